"""What DeepSpeed's JSON may say: one check of keys and values of a strategy's file, before a run.

What changes neither the trained numbers nor what is measured passes. An option that would change them may stand at its
default, and any other value of it is refused with what would go wrong. What comes from the settings is refused.
Values are as strict as keys: DeepSpeed reads "false" as true, and "auto" is a word of another library.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from t5bench import Problem

STAGES = (1, 2, 3)
DATA_TYPES = ("fp32", "fp16", "bf16", "bfp16")  # DeepSpeed also writes bf16 as bfp16
DEVICES = ("cpu", "none")
# What a value must be, in words; None if this one is.
Check = Callable[[Any], str | None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def whole(least: int) -> Check:
    """JSON writes large numbers as 5e8, which Python reads as a decimal."""

    def check(value: Any) -> str | None:
        is_whole = _is_number(value) and value == int(value) and value >= least
        return None if is_whole else f"a whole number of at least {least}"

    return check


def share(value: Any) -> str | None:
    return None if _is_number(value) and 0 <= value <= 1 else "a number from 0 to 1"


def one_of(*values: Any) -> Check:
    def check(value: Any) -> str | None:
        is_one = not isinstance(value, bool) and value in values
        return None if is_one else " or ".join(map(repr, values)).replace("'", '"')

    return check


def names(value: Any) -> str | None:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if is_list else "a list of names"


def at_default(default: Any, why: str) -> Check:
    """Of an option that may only have DeepSpeed's own default; why: what another value would do."""

    def check(value: Any) -> str | None:
        is_default = value == default and isinstance(value, bool) == isinstance(default, bool)
        return None if is_default else f"{_shown(default)}, its default, because {why}"

    return check


def left_out(why: str) -> Check:
    """Of an option that may not be given at all."""
    return lambda _: f"left out: {why}"


Options = Mapping[str, "Check | Options"]

# With these four together, ZeRO-2 trained another model in DeepSpeed 0.18.3.
OTHER_REDUCTION = "gradients would be added in another way, which trained another model with ZeRO-2"
OTHER_TRAFFIC = "it is another strategy than the one that the comparison names"
OFFLOADING: Options = {
    "device": one_of(*DEVICES),
    "pin_memory": switch,
    "fast_init": switch,
    "ratio": share,
    "buffer_count": whole(1),
    "buffer_size": whole(1),
    "max_in_cpu": whole(0),
}
ZERO: Options = {
    "stage": one_of(*STAGES),
    "overlap_comm": switch,
    "reduce_bucket_size": whole(1),
    "allgather_bucket_size": whole(1),
    "sub_group_size": whole(1),
    "memory_efficient_linear": switch,
    "offload_optimizer": OFFLOADING,
    "offload_param": OFFLOADING,
    "stage3_prefetch_bucket_size": whole(0),
    "stage3_param_persistence_threshold": whole(0),
    "stage3_model_persistence_threshold": whole(0),
    "stage3_max_live_parameters": whole(0),
    "stage3_max_reuse_distance": whole(0),
    "stage3_module_granularity_threshold": whole(0),
    # What is saved, checked or warned of, not what is trained.
    "stage3_gather_16bit_weights_on_model_save": switch,
    "stage3_gather_fp16_weights_on_model_save": switch,
    "ignore_unused_parameters": switch,
    "use_multi_rank_bucket_allreduce": switch,
    "log_trace_cache_warnings": switch,
    "pipeline_loading_checkpoint": switch,
    "contiguous_gradients": at_default(True, OTHER_REDUCTION),
    "reduce_scatter": at_default(True, OTHER_REDUCTION),
    "allgather_partitions": at_default(True, OTHER_REDUCTION),
    "round_robin_gradients": at_default(False, OTHER_REDUCTION),
    "legacy_stage1": at_default(False, OTHER_REDUCTION),
    "load_from_fp32_weights": at_default(True, "a resumed run would continue from rounded weights"),
    "elastic_checkpoint": at_default(False, "RESUME would not find the checkpoint's files"),
    "stage3_use_all_reduce_for_fetch_params": at_default(False, OTHER_TRAFFIC),
    "stage3_allgather_sequential": at_default(False, OTHER_TRAFFIC),
    "zero_hpz_partition_size": at_default(1, OTHER_TRAFFIC),
    "zero_quantized_weights": at_default(False, "weights would be rounded before they are sent"),
    "zero_quantized_nontrainable_weights": at_default(False, "weights would be rounded before they are sent"),
    "zero_quantized_gradients": at_default(False, "gradients would be rounded before they are added"),
}
OFF: Options = {"enabled": at_default(False, "it would train, or measure, something else")}
OWN_LOG: Options = {"enabled": at_default(False, "the engine sends its metrics to W&B itself")}
# A strategy's file.
STRATEGY: Options = {
    "zero_optimization": ZERO,
    "communication_data_type": one_of(*DATA_TYPES),
    "comms_logger": {"enabled": switch, "verbose": switch, "prof_all": switch, "debug": switch, "prof_ops": names},
    "wall_clock_breakdown": switch,
    "dump_state": switch,
    "memory_breakdown": switch,
    "zero_allow_untested_optimizer": switch,
    "aio": {
        "block_size": whole(1),
        "queue_depth": whole(1),
        "intra_op_parallelism": whole(1),
        "thread_count": whole(1),
        "single_submit": switch,
        "overlap_events": switch,
        "use_gds": switch,
    },
    "checkpoint": {
        "tag_validation": one_of("Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL"),
        "load_universal": at_default(False, "RESUME decides what is loaded"),
        "use_node_local_storage": at_default(False, "RESUME would not find the checkpoint's files"),
    },
    "activation_checkpointing": {
        "partition_activations": at_default(False, "RECOMPUTE decides it"),
        "cpu_checkpointing": at_default(False, "RECOMPUTE decides it"),
        "contiguous_memory_optimization": at_default(False, "RECOMPUTE decides it"),
        "number_checkpoints": at_default(None, "RECOMPUTE decides it"),
        "synchronize_checkpoint_boundary": at_default(False, "RECOMPUTE decides it"),
        "profile": at_default(False, "RECOMPUTE decides it"),
    },
    "prescale_gradients": at_default(False, "gradients would be rounded in another place"),
    "gradient_predivide_factor": at_default(1.0, "gradients would be rounded in another place"),
    "sparse_gradients": at_default(False, OTHER_REDUCTION),
    "disable_allgather": at_default(False, OTHER_TRAFFIC),
    "zero_force_ds_cpu_optimizer": at_default(True, "offloading would use another Adam"),
    "flops_profiler": OFF,
    "amp": OFF,
    "autotuning": OFF,
    "elasticity": OFF,
    "compile": OFF,
    "tensorboard": OWN_LOG,
    "wandb": OWN_LOG,
    "csv_monitor": OWN_LOG,
    "comet": OWN_LOG,
    "data_types": {
        "grad_accum_dtype": at_default(None, "several releases then train another model (docs/generated/ledger.md)"),
    },
    "optimizer": left_out("the engine makes Adam from LR, WEIGHT_DECAY and the arguments after --"),
    "scheduler": left_out("the engine follows LR, MIN_LR and LR_WARMUP_ITERS"),
    "gradient_accumulation_steps": left_out("it follows from GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE and the processes"),
}
# What the settings add for a run.
FROM_SETTINGS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "bf16", "fp16", "steps_per_print",
)  # fmt: skip

# Both spellings of DeepSpeed's curriculum learning; docs/gpt.md has what each does.
CURRICULUM = {"curriculum_learning", "data_efficiency"}
WHY_NO_CURRICULUM = (
    "With curriculum learning sequences grow and the samples are others, so such a run compares with none; "
    "docs/gpt.md has what was tried"
)


def check_strategy(config: Any, file: str) -> None:
    """A strategy's own file. Raises Problem.

    file: its name. megatron_zero3.json that says stage 2 would train ZeRO-2 and be compared as ZeRO-3, and one without
    offload be compared as ZeRO-3 with it.
    """
    twice = sorted(config.keys() & set(FROM_SETTINGS)) if isinstance(config, dict) else []
    if twice:
        said = f"{', '.join(twice)} come from the settings and must not be in the strategy's JSON"
        raise Problem(f"{file}: {said}", "Remove them from the file; README lists the settings")
    _check(config, STRATEGY, file, "")
    stage = _check_together(config, file)
    named = re.search(r"zero(\d)", Path(file).name)
    if named and int(named[1]) != stage:
        said = f'"stage" is {stage}, but the name of the file promises {named[1]}'
        raise Problem(f"{file}: {said}", f'Write "stage": {named[1]}, or give the strategy a file of another name')
    parts = [config["zero_optimization"].get(name, {}) for name in ("offload_optimizer", "offload_param")]
    if "offload" in Path(file).name and all(part.get("device") != "cpu" for part in parts):
        said = "nothing is offloaded, but the name of the file promises it"
        raise Problem(f"{file}: {said}", 'Add "offload_optimizer": {"device": "cpu"} to zero_optimization')


def _check(value: Any, options: "Check | Options", source: str, path: str) -> None:
    """Raises Problem for the first option that is not known, or has a value that it cannot have."""
    if callable(options):
        wanted = options(value)
        if wanted:
            said = f"{path} must be {wanted}, found {_shown(value)}"
            raise Problem(f"{source}: {said}", "Correct the value, or remove it")
        return
    if not isinstance(value, dict):
        place = path or "the file"
        raise Problem(f"{source}: {place} must be an object of options, found {_shown(value)}", "Write it in braces")
    unknown = sorted(value.keys() - options.keys())
    if unknown:
        said = f"{', '.join(_joined(path, name) for name in unknown)} is not an option that this project knows"
        remedy = f"Remove it. {WHY_NO_CURRICULUM}" if CURRICULUM.intersection(unknown) else "Remove it"
        raise Problem(f"{source}: {said}. It may have: {', '.join(options)}", remedy)
    for name, inner in value.items():
        _check(inner, options[name], source, _joined(path, name))


def _check_together(config: Mapping[str, Any], source: str) -> int:
    """Checks what options demand of each other; returns the stage. Raises Problem."""
    zero = config.get("zero_optimization")
    if not zero or "stage" not in zero:
        raise Problem(f"{source}: there is no zero_optimization with a stage", 'Add "zero_optimization": {"stage": 1}')
    for name in ("offload_optimizer", "offload_param"):
        if name in zero and "device" not in zero[name]:
            raise Problem(f"{source}: zero_optimization.{name} names no device", 'Add "device": "cpu", or remove it')
    if zero["stage"] < max(STAGES) and zero.get("offload_param", {}).get("device") == "cpu":
        said = f"zero_optimization.offload_param needs ZeRO stage 3, found {zero['stage']}"
        raise Problem(f"{source}: {said}", "Remove it, or use stage 3")
    return int(zero["stage"])


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    """As JSON writes it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    return words[value] if is_word else repr(value)[:60].replace("'", '"')
