"""What DeepSpeed's JSON may say: one check of keys and values of a strategy's file, before a run.

What changes neither the trained numbers nor what is measured passes. An option that would change them may stand at its
default, and any other value of it is refused with what would go wrong. What comes from the settings is refused.
What DeepSpeed itself does not read passes, unless it looks like a misspelt option. Values are as strict as keys:
DeepSpeed reads "false" as true, and "auto" is a word of another library. All faults of a file are told at once.

DeepSpeed gets only what has an effect: some releases refuse an option that another one had, even if it is off.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from t5bench import Problem

STAGES = (1, 2, 3)
DATA_TYPES = ("fp32", "fp16", "bf16")
DEVICES = ("cpu", "none")
# What a value must be, in words; None if this one is.
Check = Callable[[Any], str | None]
# As many options are named where one is unknown.
MOST_NAMED = 12
MOST_SHOWN = 60


@dataclass(frozen=True)
class WithoutEffect:
    """An option of which only such values pass as change nothing; DeepSpeed does not get it."""

    check: Check

    def __call__(self, value: Any) -> str | None:
        return self.check(value)


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
        is_one = type(value) in map(type, values) and value in values
        return None if is_one else " or ".join(map(_shown, values))

    return check


def text(value: Any) -> str | None:
    return None if value is None or isinstance(value, str) else "a text"


def an_object(value: Any) -> str | None:
    return None if isinstance(value, dict) else "an object of options"


def names(value: Any) -> str | None:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return None if is_list else "a list of names"


def at_default(default: Any, why: str, *same: Any) -> WithoutEffect:
    """Of an option that may only have DeepSpeed's own default; why: what another value would do.

    same: other values that mean the same.
    """

    def check(value: Any) -> str | None:
        is_default = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in (default, *same))
        return None if is_default else f"{_shown(default)}, its default, because {why}"

    return WithoutEffect(check)


def left_out(why: str) -> Check:
    """Of an option that may not be given at all."""
    return lambda _: f"left out: {why}"


Options = Mapping[str, "Check | Options"]


def off(why: str = "it would train, or measure, something else", *switches: str) -> WithoutEffect:
    """Of a part of DeepSpeed that must be off; what else it is told then changes nothing.

    switches: what turns it on; by default "enabled".
    """

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "an object of options"
        for name in switches or ("enabled",):
            if value.get(name, False) is not False:
                return f'an object whose "{name}" is false, because {why}'
        return None

    return WithoutEffect(check)


def all_off(value: Any) -> bool:
    """Whether nothing in an object of objects is enabled."""
    if not isinstance(value, dict):
        return True
    return value.get("enabled", False) is False and all(map(all_off, value.values()))


def off_throughout(why: str) -> WithoutEffect:
    """Of a part whose parts have switches of their own."""
    wanted = f'an object in which every "enabled" is false, because {why}'
    return WithoutEffect(lambda value: None if isinstance(value, dict) and all_off(value) else wanted)


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
    "sub_group_size": whole(0),
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
    # Of earlier releases.
    "cpu_offload": at_default(None, "offload_optimizer says it", False),
    "cpu_offload_param": at_default(None, "offload_param says it", False),
    "cpu_offload_params": at_default(None, "offload_param says it", False),
    "cpu_offload_use_pin_memory": at_default(None, "offload_optimizer says it", False),
    "mics_shard_size": at_default(-1, OTHER_TRAFFIC),
    "mics_hierarchical_params_gather": at_default(False, OTHER_TRAFFIC),
    "zeropp_loco_param": at_default(None, "gradients would be rounded before they are added"),
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
OWN_STAGES = "the engines divide the layers themselves"
OTHER_COMPILER = "the other runs are not compiled"
OTHER_SAMPLES = "sequences would grow, and the samples be others"
NO_EXPERTS = "there are no experts here"
# A strategy's file.
STRATEGY: Options = {
    "zero_optimization": ZERO,
    "communication_data_type": one_of(*DATA_TYPES, None),
    "comms_logger": {"enabled": switch, "verbose": switch, "prof_all": switch, "debug": switch, "prof_ops": names},
    "wall_clock_breakdown": switch,
    "dump_state": switch,
    "memory_breakdown": switch,
    "zero_allow_untested_optimizer": switch,
    "aio": WithoutEffect(an_object),  # of NVMe
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
    "autotuning": off(),
    "compile": off(OTHER_COMPILER, "enabled", "deepcompile", "autoep_non_moe"),
    "torch_autocast": off(),
    "hybrid_engine": off(),
    "tensorboard": off(OWN_LOG),
    "wandb": off(OWN_LOG),
    "csv_monitor": off(OWN_LOG),
    "comet": off(OWN_LOG),
    "data_efficiency": off(OTHER_SAMPLES),
    # Of earlier releases.
    "curriculum_learning": off(OTHER_SAMPLES),
    "amp": off(),
    "elasticity": off(),
    "progressive_layer_drop": off(),
    "eigenvalue": off(),
    "quantize_training": off_throughout("it is another model"),
    "nebula": off("RESUME would not find the checkpoint's files"),
    "graph_harvesting": at_default(False, "it would measure something else"),
    "sparse_attention": left_out("it is another model"),
    "compression_training": off_throughout("it is another model"),
    "fp32_allreduce": at_default(False, "GRADIENT_REDUCTION decides it"),
    # What is measured or said, not what is trained.
    "timers": {"throughput": {"enabled": switch, "synchronized": switch}},
    "log_level": one_of("debug", "info", "warning", "error", "critical"),
    "dataloader_drop_last": switch,  # of a loader that the engines do not use
    "disable_python_gc": at_default(False, "memory would grow otherwise than in the other runs"),
    "gradient_allreduce_op": at_default("mean", "gradients would be summed, not averaged"),
    "managed_gradient_accumulation": at_default(True, "the engine would step at other times"),
    "seq_parallel_communication_data_type": at_default("fp32", "it belongs to another strategy"),
    "tensor_parallel": {"autotp_size": at_default(0, "TENSOR_PARALLEL_SIZE decides it", 1)},
    "sequence_parallel_size": at_default(1, "DeepSpeed would divide the batch by it"),
    "expert_parallel": left_out(NO_EXPERTS),
    "use_data_before_expert_parallelism": at_default(False, NO_EXPERTS),
    "pipeline": {
        "stages": at_default("auto", OWN_STAGES),
        "partition": at_default("best", OWN_STAGES),
        "seed_layers": at_default(False, "weights would begin with other numbers"),
        "activation_checkpoint_interval": at_default(0, "RECOMPUTE decides it"),
        "pipe_partitioned": at_default(True, OTHER_TRAFFIC),
        "grad_partitioned": at_default(True, OTHER_TRAFFIC),
    },
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


class Checked(NamedTuple):
    """A strategy's file that may be used."""

    options: dict[str, Any]
    """What has an effect, which DeepSpeed gets."""
    unread: list[str]
    """The names of options that no release of DeepSpeed has."""


def check_strategy(config: Any, file: str) -> Checked:
    """Checks a strategy's own file. Raises Problem.

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
        verb = "come" if len(twice) > 1 else "comes"
        found = f"{', '.join(twice)} {verb} from the settings and must not be in the strategy's JSON"
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
    return Checked(_with_effect(known, STRATEGY), unread)


def _with_effect(value: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """What of these options DeepSpeed is to get."""
    left: dict[str, Any] = {}
    for name, entry in value.items():
        kind = options[name]
        if isinstance(kind, Mapping):
            entry = _with_effect(entry, kind)
        if not isinstance(kind, WithoutEffect) and entry not in ({}, None):
            left[name] = entry
    return left


def _faults(value: Any, options: "Check | Options", path: str) -> Iterator[Fault]:
    """Every option that is not known, or has a value that it cannot have."""
    if callable(options):
        wanted = options(value)
        if wanted:
            remedy = "Remove it" if wanted.startswith("left out") else "Correct the value, or remove it"
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
        remedy = "Remove it"
        if meant:
            remedy = f"Write {meant}, or remove it"
        elif len(options) <= MOST_NAMED:
            remedy = f"Remove it. It may be one of {', '.join(options)}"
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
    written = json.dumps(value, default=repr)
    return written if len(written) <= MOST_SHOWN else f"{written[:MOST_SHOWN]} ..."
