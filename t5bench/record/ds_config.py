"""What DeepSpeed's JSON may say: one check of keys and values of a strategy's file, before a run.

What changes neither the trained numbers nor what is measured passes. An option that would change them may stand at its
default, and any other value of it is refused with what would go wrong. What comes from the settings is refused.
What DeepSpeed itself does not read passes, unless it looks like a misspelt option. Values are as strict as keys:
DeepSpeed reads "false" as true, and "auto" is a word of another library. All faults of a file are told at once.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


def text(value: Any) -> str | None:
    return None if value is None or isinstance(value, str) else "a text"


def some_text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a text"


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


def off(why: str = "it would train, or measure, something else", **inner: Check) -> Check:
    """Of a part of DeepSpeed that must be off; what else it is told then changes nothing.

    inner: its other options, where DeepSpeed refuses any that it does not know.
    """

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "an object of options"
        wanted = at_default(False, why)(value.get("enabled", False))
        if wanted:
            return f'an object whose "enabled" is {wanted}'
        for name, entry in value.items():
            if not inner or name == "enabled":
                continue
            if name not in inner:
                return f'an object that has only "enabled", {", ".join(inner)}'
            if inner[name](entry):
                return f'an object whose "{name}" is {inner[name](entry)}'
        return None

    return check


# With these four together, ZeRO-2 trained another model in DeepSpeed 0.18.3.
OTHER_REDUCTION = "gradients would be added in another way, which trained another model with ZeRO-2"
OTHER_TRAFFIC = "it is another strategy than the one that the comparison names"
OFFLOADED = ("offload_optimizer", "offload_param")
OFFLOADING: Options = {
    "device": one_of(*DEVICES),
    "pin_memory": switch,
    "fast_init": switch,
    "ratio": share,
    # Of NVMe, which is no device here.
    "nvme_path": text,
    "pipeline_read": switch,
    "pipeline_write": switch,
    "cpuadam_cores_perc": share,
    "super_offload": at_default(False, "offloading would use another Adam"),
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
    "enable_sanity_checks": switch,
    "save_muon_momentum_buffer_in_memory": switch,
    "compute_grad_norm": at_default(True, "clipping needs the norm"),
    "parameter_alignment": at_default(False, OTHER_TRAFFIC),
    "override_module_apply": at_default(True, "the engine's own weights would be lost"),
    "zenflow": at_default(None, "updates would come late"),
    "leaf_module": left_out("it is for mixtures of experts"),
    "cpu_offload": at_default(None, "offload_optimizer says it"),
    "cpu_offload_param": at_default(None, "offload_param says it"),
    "cpu_offload_use_pin_memory": at_default(None, "offload_optimizer says it"),
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
OWN_LOG = "the engine sends its metrics to W&B itself"
OTHER_SAMPLES = "sequences would grow, and the samples be others"
NO_EXPERTS = "there are no experts here"
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
        "parallel_write": {"pipeline_stage": switch},
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
    "flops_profiler": off(),
    "amp": off(),
    "autotuning": off(),
    "elasticity": off(),
    "compile": off(),
    "torch_autocast": off(),
    "hybrid_engine": off(
        max_out_tokens=whole(1),
        inference_tp_size=whole(1),
        release_inference_cache=switch,
        pin_parameters=switch,
        tp_gather_partition_size=whole(1),
        enable_cuda_graph=switch,
    ),
    "tensorboard": off(OWN_LOG, output_path=some_text, job_name=some_text),
    "wandb": off(OWN_LOG, group=text, team=text, project=some_text),
    "csv_monitor": off(OWN_LOG, output_path=some_text, job_name=some_text),
    "comet": off(
        OWN_LOG,
        samples_log_interval=whole(0),
        project=text,
        workspace=text,
        api_key=text,
        experiment_name=text,
        experiment_key=text,
        online=lambda value: None if value is None else switch(value),
        mode=text,
    ),
    # Of earlier releases.
    "curriculum_learning": off(OTHER_SAMPLES),
    "data_efficiency": off(OTHER_SAMPLES),
    "progressive_layer_drop": off(),
    "eigenvalue": off(),
    "quantize_training": off(),
    "nebula": off("RESUME would not find the checkpoint's files"),
    "sparse_attention": left_out("it is another model"),
    "compression_training": left_out("it is another model"),
    "fp32_allreduce": left_out("GRADIENT_REDUCTION decides it"),
    # What is measured or said, not what is trained.
    "timers": {"throughput": {"enabled": switch, "synchronized": switch}},
    "log_level": some_text,
    "dataloader_drop_last": switch,  # of a loader that the engines do not use
    "disable_python_gc": at_default(False, "memory would grow otherwise than in the other runs"),
    "gradient_allreduce_op": at_default("mean", "gradients would be summed, not averaged"),
    "managed_gradient_accumulation": at_default(True, "the engine would step at other times"),
    "seq_parallel_communication_data_type": at_default("fp32", "it belongs to another strategy"),
    "tensor_parallel": left_out("TENSOR_PARALLEL_SIZE decides it"),
    "expert_parallel": left_out(NO_EXPERTS),
    "use_data_before_expert_parallelism": at_default(False, NO_EXPERTS),
    "pipeline": left_out("the engines divide the layers themselves"),
    "weight_quantization": left_out("weights would be rounded"),
    "datastates_ckpt": left_out("RESUME would not find the checkpoint's files"),
    "data_types": {
        "grad_accum_dtype": at_default(None, "several releases then train another model (packages/ledger)"),
        "param_dtype": at_default(None, "PRECISION_FLAG decides it"),
        "buffer_dtype": at_default(None, "PRECISION_FLAG decides it"),
        "keep_in_fp32_modules": at_default(None, "PRECISION_FLAG decides it"),
    },
    "optimizer": left_out("the engine makes Adam from LR, WEIGHT_DECAY and the arguments after --"),
    "scheduler": left_out("the engine follows LR, MIN_LR and LR_WARMUP_ITERS"),
    "gradient_accumulation_steps": left_out("it follows from GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE and the processes"),
}
# What the settings add for a run.
FROM_SETTINGS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "bf16", "bfloat16", "fp16",
    "steps_per_print",
)  # fmt: skip

# Both spellings of DeepSpeed's curriculum learning; docs/gpt.md has what each does.
CURRICULUM = {"curriculum_learning", "data_efficiency"}
WHY_NO_CURRICULUM = (
    "With curriculum learning sequences grow and the samples are others, so such a run compares with none; "
    "docs/gpt.md has what was tried"
)


class Fault(NamedTuple):
    """What is wrong with an option, and what to do."""

    found: str
    remedy: str


def check_strategy(config: Any, file: str) -> list[str]:
    """Checks a strategy's own file; returns the options in it that DeepSpeed does not read. Raises Problem.

    file: its name. megatron_zero3.json that says stage 2 would train ZeRO-2 and be compared as ZeRO-3, and one without
    offload be compared as ZeRO-3 with it.
    """
    if not isinstance(config, dict):
        raise Problem(f"{file}: the file must be an object of options, found {_shown(config)}", "Write it in braces")
    own = {name: value for name, value in config.items() if name not in FROM_SETTINGS}
    unread = [name for name in own if name not in STRATEGY and not _meant(name, STRATEGY)]
    faults = []
    twice = sorted(config.keys() & set(FROM_SETTINGS))
    if twice:
        found = f"{', '.join(twice)} come from the settings and must not be in the strategy's JSON"
        faults.append(Fault(found, "Remove them from the file; README lists the settings"))
    known = {name: value for name, value in own.items() if name not in unread}
    inner = list(_faults(known, STRATEGY, ""))
    faults += inner
    misread = {fault.found.partition(" ")[0] for fault in inner}
    if not misread & {"zero_optimization", *(f"zero_optimization.{name}" for name in ("stage", *OFFLOADED))}:
        faults += _faults_together(own, file)
    if len(faults) == 1:
        raise Problem(f"{file}: {faults[0].found}", faults[0].remedy)
    if faults:
        said = [f"{fault.found}. {fault.remedy}" for fault in faults]
        raise Problem(f"{file}: {len(faults)} things must change", "\n".join(said))
    return unread


def _faults(value: Any, options: "Check | Options", path: str) -> Iterator[Fault]:
    """Every option that is not known, or has a value that it cannot have."""
    if callable(options):
        wanted = options(value)
        if wanted:
            remedy = "Correct the value, or remove it"
            if path in CURRICULUM:
                remedy = f"Remove it. {WHY_NO_CURRICULUM}"
            yield Fault(f"{path} must be {wanted}, found {_shown(value)}", remedy)
        return
    if not isinstance(value, dict):
        yield Fault(f"{path} must be an object of options, found {_shown(value)}", "Write it in braces")
        return
    for name, inner in value.items():
        if name in options:
            yield from _faults(inner, options[name], _joined(path, name))
            continue
        meant = _meant(name, options)
        remedy = f"Write {meant}, or remove it" if meant else f"Remove it. It may be one of {', '.join(options)}"
        yield Fault(f"{_joined(path, name)} is not an option that this project knows", remedy)


def _meant(name: str, options: Options) -> str:
    """The option that a name is a slip of; "" if it resembles none."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), [*options, *FROM_SETTINGS], n=1, cutoff=0.8)
    return near[0] if near else ""


def _faults_together(config: Mapping[str, Any], file: str) -> Iterator[Fault]:
    """What options demand of each other, and of the file's name."""
    zero = config.get("zero_optimization")
    if not zero or "stage" not in zero:
        yield Fault("there is no zero_optimization with a stage", 'Add "zero_optimization": {"stage": 1}')
        return
    stage = zero["stage"]
    for name in OFFLOADED:
        if name in zero and "device" not in zero[name]:
            yield Fault(f"zero_optimization.{name} names no device", 'Add "device": "cpu", or remove it')
    if stage < max(STAGES) and zero.get("offload_param", {}).get("device") == "cpu":
        yield Fault(f"zero_optimization.offload_param needs ZeRO stage 3, found {stage}", "Remove it, or use stage 3")
    named = re.search(r"zero(\d)", Path(file).name)
    if named and int(named[1]) != stage:
        found = f'"stage" is {stage}, but the name of the file promises {named[1]}'
        yield Fault(found, f'Write "stage": {named[1]}, or give the strategy a file of another name')
    parts = [zero.get(name, {}) for name in OFFLOADED]
    if "offload" in Path(file).name and all(part.get("device") != "cpu" for part in parts):
        found = "nothing is offloaded, but the name of the file promises it"
        yield Fault(found, 'Add "offload_optimizer": {"device": "cpu"} to zero_optimization')


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    """As JSON writes it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    return words[value] if is_word else repr(value)[:60].replace("'", '"')
