"""The packages that a run needs: whether they are here, in releases that train the strategy correctly, by the ledger
(packages/ledger)."""

import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY
from t5bench.costmodel.job import REDUCE_ONCE_RELEASE
from t5bench.costmodel.layout import Layout
from t5bench.plan.draft import Draft
from t5bench.record.ledger import UNKNOWN, VERDICTS, WRONG, LedgerAnswer, look_up, version_of
from t5bench.record.machine import installed_version

INSTALL = f"pip install -r '{REPOSITORY}/requirements.txt'"


def check_packages(draft: Draft, config: Mapping[str, Any] | None, layout: Layout, device: str) -> str:
    """Checks that the recorder's msgspec is installed, and DeepSpeed or PyTorch in a release that trains correctly.

    Returns what the ledger says of that release; nothing where it does not speak of the strategy.
    """
    lack = draft.lack
    if not util.find_spec("msgspec"):
        lack("no-msgspec", f"msgspec, which reads plans, is not installed for {sys.executable}", f"Run: {INSTALL}")
    if not config:
        return _check_torch(draft, device) if draft.value("ENGINE") == "native" else ""
    version = installed_version("deepspeed")
    if not version:
        lack("no-deepspeed", f"DeepSpeed is not installed for {sys.executable}", f"Run: {INSTALL}")
        return ""
    if draft.is_on("ZERO_REDUCE_ONCE") and config["zero_optimization"]["stage"] > 1:
        _check_reduce_once(draft, version)
    answer = ask_ledger(
        version,
        config,
        micro_batches=layout.micro_batches,
        pipeline_stages=layout.pp,
        resumes=draft.is_on("RESUME"),
    )
    if answer.verdict == WRONG:
        problem = f"DeepSpeed {version} trains this strategy wrong: {answer.said}"
        draft.refuse("deepspeed-release", problem, f"Install the pinned release: {INSTALL}")
    elif answer.said:
        draft.notes.append(f"warning: DeepSpeed {version} may train this strategy wrong: {answer.said}")
    return str(answer)


def _check_torch(draft: Draft, device: str) -> str:
    """What the ledger says of PyTorch's release for a strategy that needs no DeepSpeed."""
    version = installed_version("torch")
    precision = draft.value("PRECISION_FLAG").lstrip("-") or "fp32"
    answer = look_up("torch", version or "", draft.strategy.name, precision=precision, resumes=draft.is_on("RESUME"))
    if answer.verdict == WRONG and device == "cpu":
        problem = f"torch {version} trains this strategy wrong: {answer.said}"
        draft.refuse("torch-release", problem, f"Install the pinned release: {INSTALL}")
    elif answer.verdict == UNKNOWN:  # most releases are right
        return UNKNOWN
    elif answer.said:
        measured = "on a CPU, where the ledger measured it, " if device != "cpu" else ""
        draft.notes.append(f"warning: torch {version} may train this strategy wrong: {measured}{answer.said}")
    return str(answer)


def _check_reduce_once(draft: Draft, version: str) -> None:
    if draft.value("ENGINE") == "megatron":
        found = "ZERO_REDUCE_ONCE=1 does not work with ENGINE=megatron: its loop has DeepSpeed reduce every micro-batch"
        draft.refuse("reduce-once", found, "Use ENGINE=native, or unset it")
        return
    try:
        is_old = version_of(version) < version_of(REDUCE_ONCE_RELEASE)
    except ValueError:
        return  # a pre-release: the engine asks DeepSpeed itself
    if is_old:
        found = f"DeepSpeed {version} cannot reduce gradients once an iteration (ZERO_REDUCE_ONCE=1)"
        draft.refuse("reduce-once", found, f"Install the pinned release: {INSTALL}")


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
    precision = precision_of(config)
    return look_up(
        "deepspeed",
        release,
        strategy,
        precision=precision,
        micro_batches=micro_batches,
        offload=offload,
        resumes=resumes,
        path=path,
    )


def precision_of(config: Mapping[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")
