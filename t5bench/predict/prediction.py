"""What a job costs on a machine, with everything that its parts of the model say."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from t5bench.model import time, traffic
from t5bench.model.job import Job
from t5bench.model.machine import GIB, Machine
from t5bench.model.memory import Memory, in_use, memory_of


@dataclass(frozen=True)
class Prediction:
    """A job on a machine. backend: "gloo" for CPUs. rates: None where nothing says how fast the machine computes."""

    name: str
    job: Job
    machine: Machine
    backend: str
    rates: time.Rates | None

    @cached_property
    def parameters(self) -> list[int]:
        """On a rank of each pipeline stage."""
        return [
            traffic.stage_size(self.job.architecture, self.job.parallel, stage)
            for stage in range(self.job.parallel.pipeline)
        ]

    @cached_property
    def memory(self) -> Memory:
        """Of the fullest GPU."""
        stages = range(self.job.parallel.pipeline)
        device = self.machine.device if self.machine.device.memory else None
        return max((memory_of(self.job, stage, device) for stage in stages), key=lambda found: found.peak)

    @property
    def memory_bytes(self) -> float:
        """What the device has in use at the peak; on a CPU what is allocated."""
        return in_use(self.memory) if self.machine.device.memory else self.memory.peak

    @property
    def fits(self) -> bool:
        return not self.machine.device.memory or self.memory_bytes <= self.machine.device.memory

    @cached_property
    def collectives(self) -> list[traffic.Row]:
        return traffic.rows(self.job)

    @cached_property
    def node_bytes(self) -> Sequence[float]:
        return traffic.node_bytes(self.job, self.collectives, self.backend)

    @cached_property
    def time(self) -> time.Time | None:
        return time.iteration(self.job, self.machine, self.rates, self.backend) if self.rates else None

    @property
    def limit(self) -> str:
        if not self.fits:
            return f"memory: {self.memory_bytes / GIB:.1f} GiB of {self.machine.device.memory / GIB:.0f}"
        return self.time.limit if self.time else "-"

    def to_json(self) -> dict[str, Any]:
        parallel, found = self.job.parallel, self.time
        return {
            "strategy": self.name,
            "engine": self.job.engine,
            "tp": parallel.tensor, "pp": parallel.pipeline, "dp": parallel.data,
            "micro_batches": self.job.micro_batches,
            "parameters": self.parameters,
            "memory_bytes": self.memory.components,
            "memory_moment": self.memory.moment,
            "memory_in_use": self.memory_bytes,
            "cpu_memory_bytes": self.memory.cpu,
            "fits": self.fits,
            "model_flops": time.model_flops(self.job),
            "hardware_flops": time.hardware_flops(self.job),
            "bytes_sent_by_node": self.node_bytes,
            "collectives": [asdict(row) for row in self.collectives],
            "seconds": found and found.parts | {"total": found.total, "hidden communication": found.hidden},
            "samples_per_second": found and self.job.global_batch / found.total,
            "limit": self.limit,
        }  # fmt: skip
