"""The environment that torchrun, the engine and their libraries get: the user's, less what would change the run.

Programs read settings of their own from the environment. Some would change what a run does although neither its plan
nor its record knows of them, so a rule for each group of names says what becomes of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from t5bench.plan.draft import Draft


@dataclass(frozen=True)
class Rule:
    """What becomes of the variables whose names match a pattern."""

    pattern: str
    """As in a shell: PET_*."""
    action: Literal["remove", "warn"]
    """Those that it warns of pass: they slow a run, and its record names them."""
    reason: str
    """What the variable would do, or does, for the note."""
    harmless: tuple[str, ...] = ("", "0", "OFF", "STRICT")
    """Values with which it does nothing, so that no note is needed."""


# The first rule that matches counts. All other variables pass; a record names those of PyTorch, CUDA, NCCL and the like
# (t5bench/record/machine.py), and a comparison tells where runs differ in them.
RULES = (
    # torchrun takes a default for each of its options from PET_<NAME>.
    Rule("PET_*", "remove", "torchrun would take it as one of its options"),
    Rule("TORCHELASTIC_*", "remove", "it belongs to another torchrun"),
    # One W&B run would hold every run of a sweep, or continue another one.
    Rule("WANDB_RUN_ID", "remove", "every run would be the same W&B run"),
    Rule("WANDB_RESUME*", "remove", "W&B would continue another run"),
    Rule("WANDB_FORK_FROM", "remove", "W&B would continue another run"),
    Rule("WANDB_SWEEP_ID", "remove", "W&B would count the run as part of one of its sweeps"),
    Rule("WANDB_SERVICE", "remove", "it belongs to another process"),
    # WANDB_MODE has been set by it (t5bench/plan/settings.py).
    Rule("WANDB_DISABLED", "remove", "WANDB_MODE says whether a run is logged"),
    Rule("PYTHON_EXEC", "remove", "torchrun would start the workers with another Python"),
    Rule("PYTHONOPTIMIZE", "remove", "the engines' assertions would be off"),
    # DeepSpeed and this project: what the plan sets.
    Rule("DS_ACCELERATOR", "remove", "DEVICE sets the accelerator"),
    Rule("T5_PROFILE", "remove", "PROFILE_ITERATION profiles an iteration"),
    Rule("T5_RUN_SECRET", "remove", "only the recorders need it"),
    # What changes numbers without a trace in the record.
    # NVIDIA's PyTorch containers set the first one.
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "remove", "PyTorch would compute fp32 with fewer digits"),
    Rule("NVIDIA_TF32_OVERRIDE", "remove", "it decides against PyTorch with how many digits CUDA computes fp32"),
    Rule("ONEDNN_DEFAULT_FPMATH_MODE", "remove", "it decides with how many digits CPUs compute fp32"),
    Rule("DNNL_DEFAULT_FPMATH_MODE", "remove", "it decides with how many digits CPUs compute fp32"),
    # PyTorch would unpickle whatever a checkpoint names.
    Rule("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "remove", "a checkpoint could run code"),
    # For debugging: the run is right, and its times are not those of other runs.
    Rule("CUDA_LAUNCH_BLOCKING", "warn", "each kernel waits for the one before"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "warn", "each allocation waits for the GPU"),
    Rule("PYTORCH_NO_HIP_MEMORY_CACHING", "warn", "each allocation waits for the GPU"),
    Rule("TORCH_DISTRIBUTED_DEBUG", "warn", "ranks compare their collective operations before each"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", "warn", "the host waits for each collective operation"),
    Rule("TORCHDYNAMO_DISABLE", "warn", "compiled code runs one operator at a time"),
    Rule("TORCH_COMPILE_DISABLE", "warn", "compiled code runs one operator at a time"),
    Rule("PYTORCH_JIT", "warn", "the engine's fused functions run one operator at a time", ("", "1")),
)
# Removed in every run: a note would only distract.
SILENT = ("T5_RUN_SECRET", "DS_ACCELERATOR", "T5_PROFILE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "WANDB_DISABLED")


def rule_for(name: str) -> Rule | None:
    """The rule for a variable; None if it passes."""
    for rule in RULES:
        if fnmatchcase(name, rule.pattern):
            return rule
    return None


def child_environment(draft: Draft, added: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What is added to the user's environment, and the names that are removed from it, which a note tells."""
    removed: dict[str, Rule] = {}
    for name in sorted(draft.environ):
        rule = rule_for(name)
        if not rule or name in added:
            continue
        value = draft.environ.get(name, "")
        if rule.action == "remove":
            removed[name] = rule
        elif value.upper() in rule.harmless:
            continue
        else:
            draft.notes.append(f"warning: {name}='{value}' slows the run: {rule.reason}")
    told = [f"{name} ({rule.reason})" for name, rule in removed.items() if name not in SILENT]
    if told:
        draft.notes.append(f"unset for this run: {', '.join(told)}")
    return dict(added), list(removed)
