"""What a job costs on a machine: the results of all parts of the cost model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from t5bench.costmodel import flops, intervals, schedule, time, traffic
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import GIB, Device, Host, Link, Machine
from t5bench.costmodel.memory import SURE, Memory, chance_to_fit, memory_of, stages_to_compare
from t5bench.costmodel.parameters import parameters

RISK = 0.3
"""How much a small chance to fit counts beside time: a layout that runs in one of two cases counts as 1.23 times as
slow. Set on ten choices of the 354 published layouts that set the chance (memory.py)."""
LATENCY = 40e-6  # seconds of a message between nodes


@dataclass(frozen=True)
class Prediction:
    """A job on a machine. backend: "gloo" for CPUs. slower: see time.py; None if it is unknown."""

    job: Job
    machine: Machine
    backend: str = "nccl"
    slower: float | None = 1.0
    name: str = ""
    directions: tuple[intervals.Shift, ...] = ()
    """In which the machine may differ from its figures; none: as before any run on it."""

    @classmethod
    def of_plan(
        cls,
        plan: Any,
        job: Job,
        machine: Machine,
        slower: float | None = 1.0,
        name: str = "",
    ) -> "Prediction":
        """What a plan's job costs on a machine. On a CPU or over an unknown link the time means nothing.

        plan: a ``t5bench.record.plan.Plan``.
        """
        return cls(job, machine, plan.backend, slower, name)

    @cached_property
    def memory(self) -> Memory:
        """The memory of the fullest GPU."""
        device = self.machine.device if self.machine.device.memory else None
        stages = stages_to_compare(self.job)
        return max((memory_of(self.job, stage, device) for stage in stages), key=lambda found: found.peak)

    @property
    def memory_bytes(self) -> float:
        """The memory that the device reports as used at the peak; on a CPU the allocated memory."""
        return self.memory.in_use if self.machine.device.memory else self.memory.peak

    @cached_property
    def chance_to_fit(self) -> float:
        """That it does not run out of memory; 1 on CPUs, whose memory is not known."""
        size = self.machine.device.memory
        return chance_to_fit(self.memory.needed, size) if size else 1.0

    @property
    def seconds_at_risk(self) -> float:
        """The time by which layouts are chosen: longer where it may run out of memory. Raises ValueError without a
        time."""
        if not self.time:
            raise ValueError("the speed of this CPU is unknown")
        return self.time.total / self.chance_to_fit**RISK

    @property
    def fit(self) -> str:
        """What is said of it: "surely", "no", or the chance."""
        if self.chance_to_fit >= SURE:
            return "surely"
        return "no" if self.shortage else f"{self.chance_to_fit:.0%}"

    @cached_property
    def node_bytes(self) -> Sequence[float]:
        return traffic.node_bytes(self.job, traffic.collectives_of(self.job), self.backend)

    @cached_property
    def time(self) -> time.Time | None:
        return time.iteration(self.job, self.machine, self.backend, self.slower) if self.slower else None

    @cached_property
    def bubble(self) -> float | None:
        """The share of an iteration's forward and backward passes in which pipeline stages wait (schedule.py).

        Unequal stages count as they are, and transfers do not. None without a pipeline.
        """
        parallel = self.job.parallel
        if parallel.pipeline == 1:
            return None
        passes = time.passes_of_stages(self.job, self.machine)
        forward = [before.seconds for before, _ in passes]
        backward = [after.seconds for _, after in passes]
        m = self.job.micro_batches
        weights = time.weight_seconds(self.job, self.machine)
        return schedule.idle_share(forward, backward, m, parallel.virtual_stages, parallel.schedule, weights)

    @property
    def seconds_interval(self) -> tuple[float, float] | None:
        """Where 90 % of such iterations lie; a calibrated time is a ratio to a measured one. A CPU has no other."""
        if not self.time:
            return None
        if self.slower != 1 and not self.directions:
            return intervals.around(self.time.total, intervals.RATIO)
        if not self.machine.device.memory and not self.directions:
            return None
        down, up = intervals.factors(self.responses, intervals.own_error(self.machine))
        return self.time.total / down, self.time.total * up

    @cached_property
    def responses(self) -> list[tuple[float, float]]:
        """How the time answers to what is not known of the machine (intervals.py)."""
        directions = self.directions or intervals.doubts(self.machine)
        seconds = self.time.total if self.time else None
        return intervals.responses(self.job, self.machine, self.backend, self.slower or 1.0, directions, seconds)

    def surely_slower_than(self, other: "Prediction") -> bool:
        """Whether it takes longer than the other, on the same machine, with 95 % certainty."""
        ratio = self.time.total / other.time.total
        own = intervals.own_error(self.machine)
        return ratio > 1 and intervals.surely_slower(ratio, self.responses, other.responses, own)

    @property
    def memory_interval(self) -> tuple[float, float] | None:
        """Where 90 % of such peaks lie. None for CPUs."""
        if not self.machine.device.memory:
            return None
        return intervals.around(self.memory_bytes, intervals.MEMORY)

    @property
    def tflops(self) -> float | None:
        """The model's TFLOP/s on each GPU, without recomputation."""
        if not self.time:
            return None
        model_flops = flops.flops_per_iteration(self.job.architecture, self.job.global_batch)
        return model_flops / self.time.total / self.job.parallel.world / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation: the share of the GPU's dense peak; None for a CPU or a precision without a peak."""
        peak = self.machine.device.peak(self.job.precision) if self.machine.device.memory else None
        return self.tflops * 1e12 / peak if self.tflops and peak else None

    @property
    def shortage(self) -> str:
        """How much memory the job needs, if it surely runs out of it."""
        if self.chance_to_fit > 1 - SURE:
            return ""
        return f"about {self.memory.needed / GIB:.1f} of {self.machine.device.memory / GIB:.0f} GiB"

    @property
    def limit(self) -> str:
        return f"memory: {self.shortage}" if self.shortage else self.time.limit if self.time else "-"

    def to_json(self) -> dict[str, Any]:
        job, found = self.job, self.time
        stages = range(job.parallel.pipeline)
        model_flops = flops.flops_per_iteration(job.architecture, job.global_batch)
        return {
            "strategy": self.name,
            "job": asdict(job),
            "micro_batches": job.micro_batches,
            "parameters": [parameters(job.architecture, job.parallel, stage) for stage in stages],
            "memory": asdict(self.memory) | {"peak": self.memory.peak, "in_use": self.memory_bytes},
            "chance_to_fit": self.chance_to_fit,
            "flops": {"model": model_flops, "hardware": flops.hardware_flops(job)},
            "bytes_sent_by_node": self.node_bytes,
            "collectives": [asdict(collective) for collective in traffic.collectives_of(job)],
            "seconds": found and asdict(found) | {"total": found.total},
            "intervals": {
                "level": intervals.LEVEL,
                "seconds": self.seconds_interval,
                "memory": self.memory_interval,
            },
            "bubble": self.bubble,
            "tflops_per_gpu": self.tflops,
            "mfu": self.mfu,
            "limit": self.limit,
        }


def machine_of(
    device: Device | None, gigabits: float, per_node: int, latency: float = LATENCY, host: Host | None = None
) -> Machine:
    """Nodes with these GPUs, or with CPUs, and a link of this many Gbit/s between them."""
    return with_link(device or time.CPU, Link(gigabits * 1e9 / 8, latency), per_node, host)


def with_link(device: Device, between: Link, per_node: int, host: Host | None = None) -> Machine:
    """Nodes with these GPUs and this link between them. host: None where it was not measured."""
    inside = Link(device.nvlink or device.pcie, 10e-6)
    if not device.memory:  # Processes of a CPU wait for its cores, whether a message comes from their node or another.
        latency = between.latency if between.is_measured else 20e-6
        inside = Link(5e9, latency, straggling=between.straggling)
    return Machine(device, inside, between, per_node, host)
