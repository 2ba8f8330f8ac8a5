"""Whether the installed release of DeepSpeed trains a strategy correctly, by the ledger (packages/ledger)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5bench.record.ledger import VERDICTS, LedgerAnswer, look_up


def ledger_strategy(config: Mapping[str, Any], pipeline_stages: int) -> tuple[str, bool]:
    """The ledger's name for what this DeepSpeed JSON does, and whether it is in the ledger's offload modes."""
    zero = config["zero_optimization"]
    if pipeline_stages > 1:
        return "deepspeed-pipeline", False
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if zero["stage"] == 3 and offloads:
        return "zero3_offload", False
    return f"zero{zero['stage']}", offloads


def ask_ledger(
    release: str,
    config: Mapping[str, Any],
    *,
    micro_batches: int,
    pipeline_stages: int = 1,
    resumes: bool = False,
    path: Path = VERDICTS,
) -> LedgerAnswer:
    """What the ledger says of a run with this DeepSpeed JSON, in the words of a launcher."""
    strategy, offload = ledger_strategy(config, pipeline_stages)
    return look_up(
        "deepspeed",
        release,
        strategy,
        precision=precision_of(config),
        micro_batches=micro_batches,
        offload=offload,
        resumes=resumes,
        path=path,
    )


def precision_of(config: Mapping[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")
