"""What measured runs say of a machine: its host, its GPUs and its links, each as far as the runs depend on it.

Before any run, each direction of doubt (intervals.py) has a normal distribution. Measured times update it by Bayes'
rule, with times that answer linearly to small changes: a run that the host limits shows what the host costs and hardly
anything of the GPU; with a run that computing limits as well, both are known. Layouts of the same shape as a run have
most of their error in common with it, because their layers compute the same products (intervals.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt

from t5bench.costmodel import intervals, time
from t5bench.costmodel.intervals import OF_SHAPE, Shape, Shift, own_error, shape_of
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import Machine

ROUNDS = 8
STEP = 0.25  # of a standard deviation, to either side, for a time's response


@dataclass(frozen=True)
class MeasuredTime:
    """A run's time."""

    job: Job
    machine: Machine
    """With the figures that predictions start from; its links may be others than those of the predictions."""
    seconds: float
    backend: str = "nccl"


@dataclass(frozen=True)
class Calibrated:
    """What is known after some runs."""

    shift: Shift
    """How much longer everything takes than the figures say."""
    directions: tuple[Shift, ...]
    """What is still not known, by one standard deviation each."""
    shapes: Mapping[Shape, float] = field(default_factory=dict)
    """How much longer layouts of a shape take besides, as natural logarithms; of the shapes that have run."""
    shape_doubts: Mapping[Shape, tuple[float, ...]] = field(default_factory=dict)
    """By how much that changes along each of the directions."""

    @property
    def slower(self) -> float:
        """How many times as long computing takes as the device's figures say."""
        return exp(self.shift.gpu)

    def machine(self, machine: Machine) -> Machine:
        """The machine as the runs show it; `slower` comes on top."""
        return intervals.shifted(machine, self.shift)

    def seconds(self, job: Job, machine: Machine, backend: str = "nccl") -> float:
        """The seconds of an iteration."""
        plain = intervals.shifted_seconds(job, machine, backend, 1.0, self.shift)
        return plain * exp(self.shapes.get(shape_of(job), 0.0))

    def responses(self, job: Job, machine: Machine, backend: str = "nccl") -> list[tuple[float, float]]:
        """How the logarithm of its time answers to what is still not known (intervals.py)."""
        on = self.machine(machine)
        directions = self.directions or intervals.doubts(machine)
        answers = intervals.responses(job, on, backend, self.slower, directions)
        doubts = self.shape_doubts.get(shape_of(job))
        if not doubts:
            return answers
        return [(more + doubt, less - doubt) for (more, less), doubt in zip(answers, doubts, strict=True)]

    def own(self, job: Job, machine: Machine) -> float:
        """The standard deviation of the part of a layout's error that no direction explains."""
        return _of_layout(machine) if shape_of(job) in self.shapes else own_error(machine)

    @property
    def host(self) -> float:
        """How many times as long an operator takes the host as its figure says."""
        return exp(self.shift.host)


def calibrate(runs: Sequence[MeasuredTime]) -> Calibrated:
    """Raises ValueError if a run was faster than its links allow."""
    for run in runs:
        sending = time.iteration(run.job, run.machine, run.backend, 0.0).total
        if sending > run.seconds:
            found = f"sending alone takes {sending:.3g} s at this link's rate, the iteration {run.seconds:.3g} s"
            raise ValueError(found)
    directions = intervals.doubts(runs[0].machine)
    shapes = list(dict.fromkeys(shape_of(run.job) for run in runs))
    count = len(directions) + len(shapes)
    position = [0.0] * count  # in standard deviations

    def axis_of(run: MeasuredTime) -> int:
        return len(directions) + shapes.index(shape_of(run.job))

    def logarithm(run: MeasuredTime, at: Sequence[float]) -> float:
        shift = _along(directions, at)
        return at[axis_of(run)] * OF_SHAPE + log(
            intervals.shifted_seconds(run.job, run.machine, run.backend, 1.0, shift)
        )

    covariance = _identity(count)
    for _ in range(ROUNDS):
        # From the distribution before any run, with responses at the last position.
        covariance = _identity(count)
        following = [0.0] * count
        for run in runs:
            response = []
            for axis in range(count):
                above = [*position]
                below = [*position]
                above[axis] += STEP
                below[axis] -= STEP
                response.append((logarithm(run, above) - logarithm(run, below)) / (2 * STEP))
            expected = logarithm(run, position)
            expected += sum(each * (new - old) for each, new, old in zip(response, following, position, strict=True))
            surprise = log(run.seconds) - expected
            spread = [sum(row[axis] * response[axis] for axis in range(count)) for row in covariance]
            variance = sum(each * other for each, other in zip(response, spread, strict=True))
            variance += _of_layout(run.machine) ** 2
            following = [old + each * surprise / variance for old, each in zip(following, spread, strict=True)]
            covariance = [
                [covariance[i][j] - spread[i] * spread[j] / variance for j in range(count)] for i in range(count)
            ]
        moved = max(abs(new - old) for new, old in zip(following, position, strict=True))
        position = following
        if moved < 1e-6:
            break
    left = []
    shape_columns = []
    for column in _root(covariance):
        left.append(_along(directions, column))
        shape_columns.append([OF_SHAPE * size for size in column[len(directions) :]])
    offsets = [OF_SHAPE * size for size in position[len(directions) :]]
    return Calibrated(
        _along(directions, position),
        tuple(left),
        shapes=dict(zip(shapes, offsets, strict=True)),
        shape_doubts=dict(zip(shapes, zip(*shape_columns, strict=True), strict=True)),
    )


def _of_layout(machine: Machine) -> float:
    """Of a layout's own error, what those of its shape do not share."""
    return sqrt(own_error(machine) ** 2 - OF_SHAPE**2)


def _along(directions: Sequence[Shift], sizes: Sequence[float]) -> Shift:
    """So many standard deviations along each direction; further sizes are of something else."""
    shift = Shift()
    for direction, size in zip(directions, sizes, strict=False):
        shift = shift.plus(direction.times(size))
    return shift


def _identity(count: int) -> list[list[float]]:
    return [[1.0 if row == column else 0.0 for column in range(count)] for row in range(count)]


def _root(covariance: Sequence[Sequence[float]]) -> list[list[float]]:
    """The columns of Cholesky's root."""
    count = len(covariance)
    root = [[0.0] * count for _ in range(count)]
    for row in range(count):
        for column in range(row + 1):
            rest = covariance[row][column] - sum(root[row][k] * root[column][k] for k in range(column))
            if row == column:
                root[row][row] = sqrt(max(rest, 1e-12))
            else:
                root[row][column] = rest / root[column][column]
    return [[root[row][column] for row in range(count)] for column in range(count)]
