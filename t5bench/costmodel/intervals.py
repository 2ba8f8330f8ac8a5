"""How far a prediction may be off: intervals that should hold 90 % of what new sources measure.

Memory has one factor. A time's doubt depends on what limits it: layouts share their machine's host, GPUs and links, so
what is not known of these moves their times together, each by as much as it matters to the layout; and each layout has
an error of its own. ``python -m t5bench predict --intervals`` computes the factors from published measurements and says
how many others they hold; ``--choice`` does it for the choice among layouts. Tests compare
(packages/costmodel-evidence/EVIDENCE.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import TypeAlias

from t5bench.costmodel import time
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import Link, Machine

LEVEL = 0.90
Z = 1.645
"""Standard deviations of a normal distribution on each side of an interval that holds LEVEL."""
TIME = 1.426
"""Factor of an iteration's absolute time, where computing limits it: lies between predicted / TIME and x TIME."""
RATIO = 1.178
"""Of the ratio of two times on the same machine with the same software, where computing limits both."""
MEMORY = 1.054
"""Of the fullest GPU's memory."""

# Standard deviations of natural logarithms. A ratio has the errors of two layouts.
LAYOUT = 0.107
"""Of what a layout does not share with others: t5bench_evidence/grid.py's."""
LAYOUT_ON_CPU = 0.18
"""The same where processes on CPUs compute: of the 104 layouts in lab_choices.json of
packages/costmodel-evidence after one run of DDP."""
SHARED = 0.85
"""The share of its variance that layouts of one shape have in common: what the pairs of
t5bench_evidence/grid.py show that differ in pipeline stages alone. Layouts that differ in their shape have none."""
OF_SHAPE = LAYOUT * sqrt(SHARED)
GPU = sqrt((log(TIME) / Z) ** 2 - LAYOUT**2)
"""Of what all layouts share of the GPU: its rates in this software."""
LINK = 0.30
"""Of the rate that collectives reach on a link that was not measured."""
MEASURED_LINK = 0.10
LATENCY = 0.50
"""Of a message's latency between processes that compute on CPUs and so wait for each other: twelve measurements on one
machine found 0.24 to 1.2 ms (EVIDENCE.md and lab_choices.json in packages/costmodel-evidence)."""
CPU_SPEED = 1.5
"""Of a CPU: nothing is known of its speed before a run calibrates it."""
CPU_HOST = 0.30
"""Of the cost of an operator on a CPU beside its speed in arithmetic."""


Shape: TypeAlias = tuple[str, int, int, bool, int, str]


def shape_of(job: Job) -> Shape:
    """What decides how well a layer's products suit the GPU and its host: layouts that share it share errors."""
    parallel = job.parallel
    hidden = job.architecture.hidden
    return job.engine, hidden, parallel.tensor, parallel.sequence_parallel, job.micro_batch, job.recompute


@dataclass(frozen=True)
class Shift:
    """How much longer, as natural logarithms, what layouts share takes than a machine's figures say."""

    host: float = 0.0
    gpu: float = 0.0
    inside: float = 0.0
    """Collectives inside of a node."""
    between: float = 0.0
    """Between nodes."""
    latency: float = 0.0
    """A message's latency, beside what its link does."""

    def times(self, size: float) -> "Shift":
        return Shift(self.host * size, self.gpu * size, self.inside * size, self.between * size, self.latency * size)

    def plus(self, other: "Shift") -> "Shift":
        return Shift(
            self.host + other.host,
            self.gpu + other.gpu,
            self.inside + other.inside,
            self.between + other.between,
            self.latency + other.latency,
        )


def doubts(machine: Machine) -> list[Shift]:
    """The independent directions in which a machine may differ from its figures, by one standard deviation each."""
    between = MEASURED_LINK if machine.between.is_measured else LINK
    links = [Shift(inside=LINK), Shift(between=between)]
    if not machine.device.memory:  # The same cores compute and start operators.
        return [Shift(host=CPU_SPEED, gpu=CPU_SPEED), Shift(host=CPU_HOST), Shift(latency=LATENCY), *links]
    return [Shift(host=log(machine.host.uncertainty) / Z), Shift(gpu=GPU), *links]


def own_error(machine: Machine) -> float:
    """The standard deviation of what a layout does not share with all others."""
    return LAYOUT if machine.device.memory else LAYOUT_ON_CPU


def _slower_link(link: Link, shift: float, latency: float) -> Link:
    bandwidth = link.bandwidth / exp(shift)
    slower = exp(shift + latency)
    return replace(link, bandwidth=bandwidth, latency=link.latency * slower, straggling=link.straggling * slower)


def shifted(machine: Machine, shift: Shift) -> Machine:
    """A machine that differs from its figures; computing takes exp(shift.gpu) times as long besides."""
    host = machine.host.operator_seconds * exp(shift.host - shift.gpu)  # what is slower slows the host down, too
    return replace(
        machine,
        measured_host=replace(machine.host, operator_seconds=host),
        inside=_slower_link(machine.inside, shift.inside, shift.latency),
        between=_slower_link(machine.between, shift.between, shift.latency),
    )


def shifted_seconds(job: Job, machine: Machine, backend: str, slower: float, shift: Shift) -> float:
    """The seconds of an iteration on a machine that differs from its figures."""
    return time.iteration(job, shifted(machine, shift), backend, slower * exp(shift.gpu)).total


def responses(
    job: Job,
    machine: Machine,
    backend: str,
    slower: float,
    directions: Sequence[Shift],
    seconds: float | None = None,
) -> list[tuple[float, float]]:
    """For each direction, by how much the logarithm of the time changes with one standard deviation up, and down.

    seconds: of an iteration on the machine as its figures say, if they are known already.
    """
    base = log(seconds or shifted_seconds(job, machine, backend, slower, Shift()))
    answers: list[tuple[float, float]] = []
    for direction in directions:
        more = log(shifted_seconds(job, machine, backend, slower, direction)) - base
        less = -more
        if direction.host:  # A faster host hides behind the GPU, a slower one does not.
            less = log(shifted_seconds(job, machine, backend, slower, direction.times(-1))) - base
        answers.append((more, less))
    return answers


def factors(of: Sequence[tuple[float, float]], own: float) -> tuple[float, float]:
    """The factors of an interval's lower and upper end, both at least 1.

    of: responses. own: the standard deviation of what no direction explains.
    """
    down = own**2
    up = own**2
    for more, less in of:
        down += min(more, less, 0.0) ** 2
        up += max(more, less, 0.0) ** 2
    return exp(Z * sqrt(down)), exp(Z * sqrt(up))


def surely_slower(
    ratio: float, of_slower: Sequence[tuple[float, float]], of_faster: Sequence[tuple[float, float]], own: float
) -> bool:
    """Whether a layout that is predicted to take `ratio` times as long as another surely takes longer.

    of_slower, of_faster: the responses of both. What they share cancels out as far as it matters to both. own: the
    standard deviation of what each does not share.
    """
    differences = [(slow[0] - fast[0], slow[1] - fast[1]) for slow, fast in zip(of_slower, of_faster, strict=True)]
    lower, _ = factors(differences, own * sqrt(2))
    return ratio > lower


def around(value: float, factor: float) -> tuple[float, float]:
    return value / factor, value * factor
