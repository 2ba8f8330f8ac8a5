"""Planners that need nothing but this project: its cost model, a rule of thumb, and a blind choice.

The others (peers/) are programs of their own; their answers are stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from t5bench.costmodel.job import Job
from t5bench.costmodel.memory import memory_of
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.prediction import Prediction
from t5bench_evidence.layout_bench.cases import Case

ASSUMED_MFU = 0.40


class Inexpressible(Exception):
    """What of a case a planner has no way to say, in a few words."""


@dataclass(frozen=True)
class Answer:
    """What a planner says of a case; 0 and None where it says nothing."""

    seconds: float = 0.0
    allocated: float = 0.0
    peak: float = 0.0
    """Of the stage that was measured."""
    fits: bool | None = None
    rank: float | None = None
    """Among the layouts of a choice the smallest is named; None: that of `seconds`."""

    @property
    def ranks(self) -> bool:
        """Whether it says how good a layout is beside others."""
        return bool(self.seconds) or self.rank is not None or self.fits is False

    @property
    def order(self) -> float:
        if self.rank is not None:
            return self.rank
        return self.seconds or inf


@dataclass(frozen=True)
class Planner:
    name: str
    about: str
    answer: Callable[[Case], Answer]
    """Raises Inexpressible."""


def ours(case: Case) -> Answer:
    prediction = Prediction(case.job, case.machine, case.backend)
    device = case.machine.device
    memory = prediction.memory
    if case.is_last_stage:
        memory = memory_of(case.job, case.job.parallel.pipeline - 1, device if device.memory else None)
    return Answer(
        prediction.time.total if prediction.time else 0.0,
        memory.allocated,
        memory.peak,
        fits=prediction.chance_to_fit >= 0.5,
        rank=prediction.seconds_at_risk,
    )


def constant_mfu(case: Case) -> Answer:
    """6 FLOPs for each parameter and token, at ASSUMED_MFU of the peak: the same for every layout."""
    job = case.job
    peak = case.machine.device.peak(job.precision) if case.machine.device.memory else None
    if not peak:
        raise Inexpressible("a processor without a peak")
    flops = 6 * parameters_of(job) * tokens_of(job)
    return Answer(seconds=flops / (ASSUMED_MFU * peak * job.parallel.world))


def blind(case: Case) -> Answer:
    """Any layout of a choice is as good as another."""
    return Answer(rank=0.0)


def parameters_of(job: Job) -> int:
    """Of the whole model."""
    return parameters(job.architecture, job.on(tensor=1, pipeline=1, split_rank=None).parallel, 0)


def tokens_of(job: Job) -> int:
    """Of an iteration."""
    model = job.architecture
    return job.global_batch * (model.decoder_length if not model.encoder_layers else model.encoder_length)


OWN = (
    Planner("this project", "the cost model, with nothing measured", ours),
    Planner("6ND at 40 % MFU", "the rule of thumb: every layout takes as long as any other", constant_mfu),
    Planner("blind", "any layout, by lot", blind),
)
