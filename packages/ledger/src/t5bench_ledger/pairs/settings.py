"""The settings of DeepSpeed and PyTorch that pairs are drawn from, and the draw: a seed and a number give a case.

A case is a way of sharding (its base) and two settings that are not at their defaults. Nothing is imported here but
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
BASES_OF = {"deepspeed": tuple(ZERO_STAGES), "torch": TORCH_BASES}
SETTINGS_OF_A_CASE = 2
ITERATIONS = 4
MICRO_BATCHES = 2
WIDTH = 6
PROCESSES = 2

_ZERO = ("zero1", "zero2", "zero3")
_DEEPSPEED = tuple(ZERO_STAGES)
_EVERY = (*_DEEPSPEED, *TORCH_BASES)

Value = bool | int | float | str


@dataclass(frozen=True)
class Setting:
    """Something that a user may set otherwise."""

    name: str
    bases: Sequence[str]
    """The ways of sharding that have it."""
    values: Sequence[Value]
    """Other than its default."""
    place: Sequence[str] = ()
    """Where DeepSpeed's JSON has it; empty: train.py does it."""


def _of_zero(name: str, bases: Sequence[str], *values: Value) -> Setting:
    """An option in zero_optimization."""
    return Setting(name, bases, values, ("zero_optimization", name))


_THREE = ("zero3",)
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
    Setting("bucket_cap_mb", ("ddp",), (0.00001, 0.0003)),
    Setting("gradient_as_bucket_view", ("ddp",), (True,)),
    Setting("static_graph", ("ddp",), (True,)),
    Setting("find_unused_parameters", ("ddp",), (True,)),
    Setting("broadcast_buffers", ("ddp",), (False,)),
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
    Setting("mixed precision", TORCH_BASES, ("bf16",)),
    Setting("clipping", TORCH_BASES, (0.1,)),
    Setting("optimizer", _EVERY, ("SGD", "momentum", "Adam", "Adagrad")),
    Setting("groups", _EVERY, (True,)),
    Setting("tied", _EVERY, (True,)),
    Setting("frozen", _EVERY, ("embed", "middle", "norm")),
    Setting("unused", _EVERY, ("always", "in the last micro-batch")),
    Setting("used twice", _EVERY, (True,)),
    Setting("recomputes", _EVERY, ("reentrant", "non-reentrant")),
    Setting("no elements", _EVERY, ("first", "last")),
    Setting("evaluates", _EVERY, ("between steps", "between micro-batches")),
    Setting("saves", _DEEPSPEED, ("between steps", "between micro-batches")),
    Setting("resumes", _DEEPSPEED, (True,)),
    Setting("scales by hand", _DEEPSPEED, ("scale_wrt_gas", "set_gradient_accumulation_boundary")),
    Setting("zero_grad", _DEEPSPEED, (True,)),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


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
