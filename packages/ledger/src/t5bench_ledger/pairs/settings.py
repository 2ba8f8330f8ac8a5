"""The settings of the libraries that pairs are drawn from, and the draw: a seed and a number give a case.

A case is a way of training (its base) and two settings that are not at their defaults. Nothing is imported here but
the standard library, so that a case can be drawn anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from math import prod
from random import Random
from typing import Any

ZERO_STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
TORCH_BASES = ("ddp", "fsdp2")
# transformers' Trainer and accelerate's loop over DDP, or in one process; on a CPU neither shards.
TRAINER_BASES = ("trainer", "trainer on one process")
ACCELERATE_BASES = ("accelerate", "accelerate on one process")
BASES_OF = {
    "deepspeed": tuple(ZERO_STAGES),
    "torch": TORCH_BASES,
    "transformers": TRAINER_BASES,
    "accelerate": ACCELERATE_BASES,
}
SETTINGS_OF_A_CASE = 2
ITERATIONS = 4
MICRO_BATCHES = 2
WIDTH = 6
PROCESSES = 2

_ZERO = ("zero1", "zero2", "zero3")
_DEEPSPEED = tuple(ZERO_STAGES)
_LOOPS = (*TORCH_BASES, *ACCELERATE_BASES)
_EVERY = (*_DEEPSPEED, *_LOOPS)
_DDP = ("ddp", "accelerate")

Value = bool | int | float | str


@dataclass(frozen=True)
class Setting:
    """Something that a user may set otherwise."""

    name: str
    bases: Sequence[str]
    """The ways of training that have it."""
    values: Sequence[Value]
    """Other than its default."""
    place: Sequence[str] = ()
    """Where DeepSpeed's JSON, TrainingArguments or accelerate's classes have it; empty: the program does it."""


def _of_zero(name: str, bases: Sequence[str], *values: Value) -> Setting:
    """An option in zero_optimization."""
    return Setting(name, bases, values, ("zero_optimization", name))


def _of_trainer(name: str, *values: Value, bases: Sequence[str] = TRAINER_BASES, under: Sequence[str] = ()) -> Setting:
    """A field of TrainingArguments, or of what stands under it."""
    return Setting(name, bases, values, (*under, name))


def _of_accelerate(class_name: str, name: str, *values: Value, bases: Sequence[str] = ACCELERATE_BASES) -> Setting:
    """A field of one of accelerate's classes."""
    return Setting(name, bases, values, (class_name, name))


_THREE = ("zero3",)
_OVER_DDP = ("trainer",)
_WITH_LOADERS = (*TRAINER_BASES, *ACCELERATE_BASES)
_LOADER = ("accelerator_config",)
SETTINGS: Sequence[Setting] = (
    # ---- DeepSpeed's JSON
    _of_zero("contiguous_gradients", _ZERO, False),
    _of_zero("overlap_comm", _ZERO, True, False),
    _of_zero("reduce_scatter", _ZERO, False),
    _of_zero("reduce_bucket_size", _ZERO, 50, 500),
    _of_zero("allgather_bucket_size", _ZERO, 50),
    _of_zero("allgather_partitions", _ZERO, False),
    _of_zero("round_robin_gradients", ("zero1", "zero2"), True),
    _of_zero("ignore_unused_parameters", ("zero1", "zero2"), False),
    _of_zero("elastic_checkpoint", ("zero1", "zero2"), True),
    _of_zero("load_from_fp32_weights", _ZERO, False),
    _of_zero("sub_group_size", _THREE, 40),
    _of_zero("stage3_param_persistence_threshold", _THREE, 0, 10, 1_000_000),
    _of_zero("stage3_model_persistence_threshold", _THREE, 20),
    _of_zero("stage3_max_live_parameters", _THREE, 0, 50),
    _of_zero("stage3_max_reuse_distance", _THREE, 0),
    _of_zero("stage3_prefetch_bucket_size", _THREE, 0, 30),
    _of_zero("stage3_gather_16bit_weights_on_model_save", _THREE, True),
    _of_zero("stage3_use_all_reduce_for_fetch_params", _THREE, True),
    _of_zero("stage3_module_granularity_threshold", _THREE, 1_000_000),
    _of_zero("zero_hpz_partition_size", _THREE, 2),
    _of_zero("memory_efficient_linear", _THREE, False),
    Setting("offload_optimizer", _ZERO, (True,)),
    Setting("offload_param", _THREE, (True,)),
    Setting("zero.Init", _THREE, (True,)),
    Setting("prescale_gradients", _DEEPSPEED, (True,), ("prescale_gradients",)),
    Setting("gradient_predivide_factor", _DEEPSPEED, (2.0,), ("gradient_predivide_factor",)),
    Setting("communication_data_type", _DEEPSPEED, ("fp32",), ("communication_data_type",)),
    Setting("grad_accum_dtype", _DEEPSPEED, ("fp32",), ("data_types", "grad_accum_dtype")),
    Setting("gradient_clipping", _DEEPSPEED, (0.1, "unset")),
    Setting("disable_allgather", _DEEPSPEED, (True,), ("disable_allgather",)),
    Setting("wall_clock_breakdown", _DEEPSPEED, (True,), ("wall_clock_breakdown",)),
    Setting("flops_profiler", _DEEPSPEED, (True,), ("flops_profiler", "enabled")),
    Setting("optimizer in the JSON", _DEEPSPEED, (True,)),
    # ---- PyTorch's own
    Setting("bucket_cap_mb", _DDP, (0.00001, 0.0003)),
    Setting("gradient_as_bucket_view", _DDP, (True,)),
    Setting("static_graph", _DDP, (True,)),
    Setting("find_unused_parameters", _DDP, (True,)),
    Setting("broadcast_buffers", _DDP, (False,)),
    Setting("allreduce_hook", ("ddp",), (True,)),
    Setting("ZeroRedundancyOptimizer", ("ddp",), ("alone", "parameters_as_bucket_view")),
    Setting("synchronises every micro-batch", TORCH_BASES, (True,)),
    Setting("foreach", TORCH_BASES, (True, False)),
    Setting("fused", TORCH_BASES, (True,)),
    Setting("set_to_none", TORCH_BASES, (False,)),
    Setting("reshard_after_forward", ("fsdp2",), (False, 2)),
    Setting("shards the whole", ("fsdp2",), (True,)),
    Setting("reshards after the last backward alone", ("fsdp2",), (True,)),
    Setting("CPUOffloadPolicy", ("fsdp2",), (True,)),
    Setting("set_gradient_divide_factor", ("fsdp2",), (1.0,)),
    Setting("prefetches", ("fsdp2",), (True,)),
    # ---- the model, the optimizer and the loop
    Setting("precision", _DEEPSPEED, ("bf16", "fp16", "fp16 with a fixed scale")),
    Setting("mixed precision", (*_LOOPS, *TRAINER_BASES), ("bf16",)),
    Setting("clipping", _LOOPS, (0.1,)),
    Setting("optimizer", _EVERY, ("SGD", "momentum", "Adam", "Adagrad")),
    Setting("groups", _EVERY, (True,)),
    Setting("tied", _EVERY, (True,)),
    Setting("frozen", _EVERY, ("embed", "middle", "norm")),
    Setting("unused", _EVERY, ("always", "in the last micro-batch")),
    Setting("used twice", _EVERY, (True,)),
    Setting("recomputes", _EVERY, ("reentrant", "non-reentrant")),
    Setting("no elements", _EVERY, ("first", "last")),
    Setting("evaluates", _EVERY, ("between steps", "between micro-batches")),
    Setting("saves", (*_DEEPSPEED, *ACCELERATE_BASES), ("between steps", "between micro-batches")),
    Setting("resumes", (*_DEEPSPEED, *ACCELERATE_BASES, *TRAINER_BASES), (True,)),
    Setting("scales by hand", _DEEPSPEED, ("scale_wrt_gas", "set_gradient_accumulation_boundary")),
    Setting("zero_grad", _DEEPSPEED, (True,)),
    # ---- the loops of transformers' Trainer and accelerate
    Setting("gradient_accumulation_steps", _WITH_LOADERS, (1, 3)),
    Setting("data", _WITH_LOADERS, ("short last window", "short last batch")),
    Setting("iterable", _WITH_LOADERS, (True,)),
    _of_accelerate("DataLoaderConfiguration", "split_batches", True),
    _of_accelerate("DataLoaderConfiguration", "dispatch_batches", True),
    _of_accelerate("DataLoaderConfiguration", "even_batches", False),
    _of_accelerate("DataLoaderConfiguration", "use_seedable_sampler", True),
    _of_accelerate("DataLoaderConfiguration", "non_blocking", True),
    _of_accelerate("GradientAccumulationPlugin", "sync_each_batch", True),
    _of_accelerate("GradientAccumulationPlugin", "sync_with_dataloader", False),
    _of_accelerate("GradientAccumulationPlugin", "adjust_scheduler", False),
    _of_accelerate("Accelerator", "step_scheduler_with_optimizer", False),
    _of_accelerate("Accelerator", "device_placement", False),
    Setting("shuffles", ACCELERATE_BASES, (True,)),
    Setting("drop_last", ACCELERATE_BASES, (True,)),
    Setting("scheduler", ACCELERATE_BASES, (True,)),
    Setting("prepares one by one", ACCELERATE_BASES, (True,)),
    Setting("no_sync by hand", ACCELERATE_BASES, (True,)),
    Setting("clips by value", ACCELERATE_BASES, (0.01,)),
    # ---- TrainingArguments
    _of_trainer("per_device_train_batch_size", 1, 3),
    _of_trainer("label_smoothing_factor", 0.1),
    _of_trainer("average_tokens_across_devices", False),
    _of_trainer("max_grad_norm", 0.1, 0.0),
    _of_trainer("optim", "adamw_torch", "adamw_torch_fused"),
    _of_trainer("weight_decay", 0.1),
    _of_trainer("lr_scheduler_type", "cosine", "constant", "constant_with_warmup"),
    _of_trainer("warmup_steps", 2),
    _of_trainer("train_sampling_strategy", "sequential", "group_by_length", "batch_rebalance"),
    _of_trainer("dataloader_drop_last", True),
    _of_trainer("dataloader_num_workers", 1),
    _of_trainer("logging_nan_inf_filter", False),
    _of_trainer("include_num_input_tokens_seen", "all"),
    _of_trainer("torch_empty_cache_steps", 1),
    _of_trainer("auto_find_batch_size", True),
    _of_trainer("full_determinism", True),
    _of_trainer("remove_unused_columns", False),
    _of_trainer("eval_strategy", "steps", "epoch"),
    _of_trainer("eval_on_start", True),
    _of_trainer("bf16_full_eval", True),
    _of_trainer("save_strategy", "steps", "epoch"),
    _of_trainer("data_seed", 3),
    _of_trainer("ddp_find_unused_parameters", True, False, bases=_OVER_DDP),
    _of_trainer("ddp_bucket_cap_mb", 1, bases=_OVER_DDP),
    _of_trainer("ddp_broadcast_buffers", True, bases=_OVER_DDP),
    _of_trainer("ddp_static_graph", True, bases=_OVER_DDP),
    _of_trainer("split_batches", True, under=_LOADER),
    _of_trainer("dispatch_batches", True, False, under=_LOADER),
    _of_trainer("even_batches", False, under=_LOADER),
    _of_trainer("use_seedable_sampler", False, under=_LOADER),
    _of_trainer("sync_each_batch", True, under=(*_LOADER, "gradient_accumulation_kwargs")),
    # ---- what else a Trainer is given
    Setting("gradient_checkpointing", TRAINER_BASES, ("reentrant", "non-reentrant")),
    Setting("counts", TRAINER_BASES, ("epochs",)),
    Setting("model", TRAINER_BASES, ("t5", "bart", "bert", "classifier", "gpt2")),
    Setting("attention", TRAINER_BASES, ("sdpa",)),
    Setting("ties", TRAINER_BASES, (True,)),
    Setting("freezes", TRAINER_BASES, ("embedding",)),
    Setting("does not use", TRAINER_BASES, ("a layer",)),
    Setting("targets", TRAINER_BASES, ("unequal", "all", "none in a sample")),
    Setting("lengths", TRAINER_BASES, ("unequal",)),
    Setting("own optimizer", TRAINER_BASES, ("momentum", "Adagrad")),
    Setting("accepts_loss_kwargs", TRAINER_BASES, (False,)),
    Setting("compute_loss_func", TRAINER_BASES, (True,)),
)
# DeepSpeed's.
BY_NAME = {setting.name: setting for setting in SETTINGS if set(setting.bases) & set(_DEEPSPEED)}


@dataclass(frozen=True)
class Case:
    """What is trained."""

    base: str
    choices: Mapping[str, Value] = field(default_factory=dict)
    """The values of the settings that are not at their defaults."""
    iterations: int = ITERATIONS
    micro_batches: int = MICRO_BATCHES
    """Of a process and iteration."""
    width: int = WIDTH
    """Of the model."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def processes(self) -> int:
        return 1 if self.base.endswith("on one process") else PROCESSES

    @property
    def precision(self) -> str:
        """By which bounds it is judged: fp32 or bf16, whose bounds fp16 has too."""
        return "bf16" if self.choices.keys() & {"precision", "mixed precision"} else "fp32"

    @property
    def words(self) -> str:
        """ "zero2, overlap_comm=True, tied=True"."""
        return ", ".join([self.base, *(f"{name}={value}" for name, value in self.choices.items())])

    def contains(self, smaller: "Case") -> bool:
        """Whether a smaller case is this one with settings left out."""
        return self.base == smaller.base and smaller.choices.items() <= self.choices.items()


def settings_of(base: str) -> list[Setting]:
    return [setting for setting in SETTINGS if base in setting.bases]


def drawn(seed: int, number: int, library: str) -> Case:
    """The case with this number of a seed: each base and then each pair of its settings is equally likely."""
    random = Random(f"{library} {seed} {number}")
    base = random.choice(BASES_OF[library])
    chosen = random.sample(settings_of(base), SETTINGS_OF_A_CASE)
    return Case(base, {setting.name: random.choice(setting.values) for setting in chosen})


def possible(library: str) -> int:
    """How many cases there are."""
    pairs = [pair for base in BASES_OF[library] for pair in combinations(settings_of(base), SETTINGS_OF_A_CASE)]
    return sum(prod(len(setting.values) for setting in pair) for pair in pairs)
