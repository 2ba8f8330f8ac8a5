"""What runs must share to stand side by side, and what else about them differs."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from t5bench.record.records import Run

WORLD_SIZE = "world_size"
# Later settings, for records from before there were any.
SETTING_DEFAULTS = {"GRADIENT_REDUCTION": "default", "WANDB_RUN_GROUP": "", "PEAK_TFLOPS": "", "SHARE_GPUS": "0"}


class NotComparableError(ValueError):
    """Runs that must not stand side by side; the message names each difference, its values and who has which."""


def setting(run: Run, name: str) -> str | None:
    """A setting as the shell had it, or its default; None where the record has neither."""
    return run.record["settings"].get(name, SETTING_DEFAULTS.get(name))


def gpu_names(run: Run) -> str | None:
    """The kinds of GPU of all nodes, None on a CPU."""
    names = sorted({device["name"] for node in run.nodes for device in node.get("devices") or ()})
    return " + ".join(names) or None


def _setting(name: str) -> Callable[[Run], Any]:
    return lambda run: setting(run, name)


# By the name that messages print and --allow takes. Model, batch, precision and dropout; then what is no setting.
_SETTINGS = (
    "ENCODER_NUM_LAYERS", "DECODER_NUM_LAYERS", "HIDDEN_SIZE", "NUM_ATTENTION_HEADS", "FFN_HIDDEN_SIZE",
    "ENCODER_SEQ_LENGTH", "DECODER_SEQ_LENGTH", "GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "PRECISION_FLAG", "DROPOUT",
    "SHARE_GPUS",
)  # fmt: skip
MUST_AGREE: Mapping[str, Callable[[Run], Any]] = {name: _setting(name) for name in _SETTINGS} | {
    "padded_vocab_size": lambda run: run.layout.get("padded_vocab_size"),
    "idx_sha256": lambda run: run.record["data"].get("idx_sha256"),
    "bin_bytes": lambda run: run.record["data"].get("bin_bytes"),
    "engine": lambda run: run.engine,
    "engine_patches": lambda run: run.record["engine_patches"],
    "device": lambda run: run.nodes[0].get("device"),
    "gpu": gpu_names,
}
ALLOWABLE = (*MUST_AGREE, WORLD_SIZE)

# What a strategy or a place decides, or what stands in MUST_AGREE under another name.
_NO_DIFFERENCE = {
    *MUST_AGREE, "MODEL_PRESET", "MASTER_PORT", "OUTPUT_DIR", "WANDB_RUN_NAME", "WANDB_RUN_GROUP", "WANDB_PROJECT",
    "WANDB_API_KEY", "WANDB_MODE", "TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE", "NPROC_PER_NODE", "NNODES",
    "HOSTS", "DEVICE", "ENGINE", "MEGATRON_DIR", "MEGATRON_DATA_DIR", "TOKENIZER_MODEL", "RENDEZVOUS_TIMEOUT",
    "DISTRIBUTED_TIMEOUT_MINUTES",
}  # fmt: skip
# Besides what must agree: settings that change the loss and not the time.
LOSS_SETTINGS = ("SEED", "LR", "MIN_LR", "LR_WARMUP_ITERS", "WEIGHT_DECAY", "CLIP_GRAD", "TRAIN_ITERS")


def show(value: Any) -> str:
    """A value in a message; an empty setting is seen."""
    return "(empty)" if value in ("", None) else str(value)


def differing(of: Callable[[Run], Any], runs: Iterable[Run]) -> dict[Any, list[Run]]:
    """The runs by value, when there is more than one value; a value that a record does not have differs from none."""
    by_value: dict[Any, list[Run]] = {}
    for run in runs:
        if (value := of(run)) is not None:
            by_value.setdefault(value, []).append(run)
    return by_value if len(by_value) > 1 else {}


def _who(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.strategy for run in runs))
    return ", ".join(names)


def _line(name: str, by_value: Mapping[Any, Sequence[Run]]) -> str:
    return f"{name}: " + "; ".join(f"{show(value)} ({_who(runs)})" for value, runs in by_value.items())


def refuse(runs: Sequence[Run], baseline: str, allowed: Iterable[str]) -> None:
    """Raises NotComparableError unless all that must agree does or is allowed to differ."""
    allowed = set(allowed)
    lines = {
        name: _line(name, by_value)
        for name, of in MUST_AGREE.items()
        if name not in allowed and (by_value := differing(of, runs))
    }
    sizes = differing(lambda run: run.world_size, runs)
    without = [size for size, of_size in sizes.items() if not any(run.strategy == baseline for run in of_size)]
    if without and WORLD_SIZE not in allowed:
        lacking = ", ".join(map(str, sorted(without)))
        lines[WORLD_SIZE] = _line(WORLD_SIZE, sizes) + f": there is no {baseline} run at {lacking} processes"
    if lines:
        raise NotComparableError(
            "these runs cannot stand side by side, they differ in\n"
            + "\n".join(f"  {line}" for line in lines.values())
            + "\n       Name runs that agree, or mark the rows that differ: "
            + " ".join(f"--allow {name}" for name in lines)
        )


def other_differences(runs: Sequence[Run]) -> list[str]:
    """What differs besides, one sentence each: further settings, versions, commits, patches, nodes."""
    notes = []
    names = dict.fromkeys(name for run in runs for name in run.record["settings"] if name not in _NO_DIFFERENCE)
    for name in names:
        if by_value := differing(_setting(name), runs):
            notes.append(_line(name, by_value))
    for what in ("versions", "commits"):
        for name in dict.fromkeys(name for run in runs for name in run.record.get(what) or ()):

            def of(run: Run, what: str = what, name: str = name) -> Any:
                return (run.record.get(what) or {}).get(name)

            if by_value := differing(of, runs):
                notes.append(
                    _line(f"{what.rstrip('s')} of {name}" if what == "versions" else f"commit ({name})", by_value)
                )
    if by_value := differing(lambda run: json.dumps(run.record.get("patches") or None, sort_keys=True), runs):
        notes.append("the engine's patches differ between " + " and ".join(_who(of) for of in by_value.values()))
    if by_value := differing(lambda run: (run.world_size, run.layout["nnodes"]), runs):
        by_size: dict[int, set[int]] = {}
        for size, nodes in by_value:
            by_size.setdefault(size, set()).add(nodes)
        for size, nodes in by_size.items():
            if len(nodes) > 1:
                notes.append(f"{size} processes ran on {' and '.join(map(str, sorted(nodes)))} node(s)")
    if not_committed := _who([run for run in runs if (run.record.get("commits") or {}).get("repository_changed")]):
        notes.append(f"the repository had changes that are not committed: {not_committed}")
    for run in runs:
        notes += [f"{run.strategy}: {difference}" for difference in run.record.get("differences") or ()]
    return notes
