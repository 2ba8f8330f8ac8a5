"""Whether the installed release of DeepSpeed trains a strategy correctly, by the ledger (docs/generated/ledger.md)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5bench.record.ledger import VERDICTS, LedgerAnswer, look_up, look_up_costs


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


def ask_costs(
    release: str, config: Mapping[str, Any], *, micro_batches: int, pipeline_stages: int = 1, path: Path = VERDICTS
) -> str:
    """What such a run costs more in this release than in another, and which release is without it; "" if nothing."""
    strategy, offload = ledger_strategy(config, pipeline_stages)
    precision = precision_of(config)
    found = look_up_costs(
        release, strategy, precision=precision, micro_batches=micro_batches, offload=offload, path=path
    )
    sentences = []
    for increase in found:
        free = [other for other in (increase.mended_in, increase.before) if other]
        right = [
            other
            for other in free
            if ask_ledger(
                other, config, micro_batches=micro_batches, pipeline_stages=pipeline_stages, path=path
            ).is_right
        ]
        if right:
            remedy = f"{right[0]} is without it"
        else:
            remedy = f"{' and '.join(free)} {'are' if len(free) > 1 else 'is'} without it, but not known to be right"
        reported = f", {', '.join(increase.upstream)}" if increase.upstream else ""
        sentences.append(f"{increase.size} (since {increase.since}{reported}); {remedy}")
    return ". ".join(sentences)
