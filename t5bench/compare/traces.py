"""Where two runs first differ beyond rounding, and whether a run's own figures follow from each other.

Reads what ``--trace`` lets the native engine write (native/trace.py): sketches of what each module computed, by
iteration and rank. ``first_difference`` compares two runs of any layouts. ``contradictions`` needs no second run: it
compares what a run printed and did with what it should have done with its own numbers, so in bf16 it sees mistakes that
are smaller than what layouts differ by.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import msgspec

from t5bench import Problem
from training_comparison.given_files import read_text
from training_comparison.likely import ranks_in_words

DIRECTORY = "trace"  # of a run directory
MOST_BYTES_OF_A_TRACE = 1 << 32  # of one rank
# In the order in which an iteration computes them, with what each is called.
PHASES = {
    "weights": "initial weights",
    "data": "data",
    "forward": "forward pass",
    "backward": "backward pass",
    "gradient": "gradient on a rank",
    "reduced": "gradient reduced over the ranks",
    "update": "update",
}
OF_SAMPLES = ("data", "forward", "backward")
# The relative differences that honest runs stay below; docs/parity_evidence.md has the measurements. Gradients differ
# most, because terms cancel each other in them.
ROUNDING = {
    "weights": 1e-6,
    "data": 0.0,
    "forward": 1e-5,
    "backward": 2e-3,
    "gradient": 2e-3,
    "reduced": 2e-3,
    "update": 1e-5,
}
# The updates magnify what differs from iteration to iteration. Before the first of them, gradients differ least.
FIRST_ITERATIONS = 2
ROUNDING_AT_FIRST = ROUNDING | {"backward": 5e-5, "gradient": 5e-5, "reduced": 5e-5}
# In bf16 each layout rounds at different places, and what differs grows from iteration to iteration.
BF16_ROUNDING = ROUNDING | {"forward": 0.1, "backward": 0.3, "gradient": 0.3, "reduced": 0.3, "update": 0.1}
# Without tensor parallelism all layouts compute a sample's first forward pass in the same way, bit for bit on a CPU.
BF16_ROUNDING_AT_FIRST = BF16_ROUNDING | {"forward": 1e-3}
BF16_ITERATIONS = 2  # later, honest gradients differ by as much as they are large
# A share by which all gradients of a rank are larger, in the same case, on average over modules and samples.
BF16_SIZE_AT_FIRST = 2e-3
LAST_DIGIT = 2**-23  # of a weight of 1: a smaller change is lost
# The relative differences of a run's own figures from what follows from its numbers, in either precision
# (docs/parity_evidence.md has what honest runs reach).
LOSS = 2e-6
NORM = 1e-5
SUM = 1e-5  # of gradients over micro-batches and ranks
SUM_IN_16_BITS = 5e-2  # where gradients are added up in 16 bits, as DeepSpeed does in bf16
UPDATE = 1e-5


class TraceLine(msgspec.Struct):
    """A line of a rank's trace. Which fields it has depends on its phase: one of PHASES, or a figure's."""

    phase: str
    iteration: int
    name: str = ""
    """Of the module or parameter."""
    sample: int = 0
    """The number of a sample in the iteration."""
    sketch: list[float] = []
    slice: bool = False
    """The rank has a slice of the parameter."""
    square: float = 0.0
    """The sum of a reduced gradient's squares."""
    in_16_bits: bool = False
    """Every value of a reduced gradient is one of bf16."""
    size: float = 0.0
    """The norm of the update that AdamW makes in float64."""
    off: float = 0.0
    """The norm of what the update differs from it."""
    weight: float = 0.0
    """The norm of the parameter."""
    value: float = 0.0
    """The loss of the rank's samples, in float64."""
    names: list[str] = []
    """Parameters whose copies are stale."""


class RankPosition(msgspec.Struct):
    """A rank's first line: its position in the layout."""

    tp: int
    dp: int
    pp: int
    dp_size: int
    precision: str


@dataclass(frozen=True)
class Location:
    """The first difference of two runs."""

    iteration: int
    phase: str
    """One of PHASES."""
    name: str
    """Of the module or parameter."""
    ranks: tuple[int, ...]
    """Those whose values differ."""
    difference: float
    """Relative; an estimate from a sketch, good to a third."""
    after: str = ""
    """What is still right before it: a module or parameter of the same phase."""

    @property
    def place(self) -> str:
        return f"iteration {self.iteration}, {PHASES[self.phase]}, {self.name}, {ranks_in_words(self.ranks)}"

    def __str__(self) -> str:
        before = f"; {self.after} before it is still right" if self.after else ""
        return f"first differs at {self.place}: by {self.difference:.1e} of its size{before}"


@dataclass(frozen=True)
class RankValue:
    """What ranks say that a quantity is."""

    ranks: tuple[int, ...]
    sketch: list[float]
    weight: float = 0.0


class Trace:
    """A run's trace, all ranks. Raises Problem."""

    def __init__(self, run: Path) -> None:
        self.positions: dict[int, RankPosition] = {}
        self.lines: dict[tuple[int, str, str], list[tuple[int, TraceLine]]] = {}
        self.figures: list[tuple[int, TraceLine]] = []
        try:
            for path in sorted((run / DIRECTORY).glob("rank*.jsonl")):
                self._read(path)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise Problem(f"{run} has no readable trace: {error}", "Train with --trace again") from error
        if not self.positions:
            raise Problem(f"there is no trace in {run}", "Train it with the native engine and -- --trace")

    def _read(self, path: Path) -> None:
        rank = int(path.stem.removeprefix("rank"))
        first, *rest = read_text(path, most=MOST_BYTES_OF_A_TRACE).splitlines()
        self.positions[rank] = msgspec.json.decode(first, type=RankPosition)
        decoder = msgspec.json.Decoder(TraceLine)
        for text in rest:
            if not text.endswith("}"):  # of a run that was killed
                continue
            line = decoder.decode(text)
            if line.phase in PHASES:
                self.lines.setdefault((line.iteration, line.phase, line.name), []).append((rank, line))
            else:
                self.figures.append((rank, line))

    @property
    def dp_size(self) -> int:
        return next(iter(self.positions.values())).dp_size

    @property
    def tp_size(self) -> int:
        return 1 + max(position.tp for position in self.positions.values())

    @property
    def precision(self) -> str:
        return next(iter(self.positions.values())).precision

    @cached_property
    def iterations(self) -> list[int]:
        return sorted({iteration for iteration, _, _ in self.lines})

    def names(self, iteration: int, phase: str) -> list[str]:
        """In the order in which they were computed."""
        return [name for number, kind, name in self.lines if (number, kind) == (iteration, phase)]

    def values(self, iteration: int, phase: str, name: str, *, per_replica: bool = True) -> dict[int, list[RankValue]]:
        """What the ranks say that a quantity is, by sample or by replica.

        The slices of tensor-parallel ranks are added up, and so are gradients of the stages that hold a tied parameter;
        without per_replica, those of replicas too.
        """
        parts: dict[int, dict[Hashable, list[tuple[int, TraceLine]]]] = {}
        for rank, line in self.lines.get((iteration, phase, name), []):
            position = self.positions[rank]
            if phase in OF_SAMPLES:
                parts.setdefault(line.sample, {}).setdefault(rank, []).append((rank, line))
                continue
            replica = position.dp if per_replica or phase != "gradient" else 0
            owner = "all" if line.slice else position.tp
            stage = 0 if phase == "gradient" else position.pp
            parts.setdefault(replica, {}).setdefault((owner, stage), []).append((rank, line))
        return {number: [added_up(phase, lines) for lines in by_owner.values()] for number, by_owner in parts.items()}


def added_up(phase: str, lines: Sequence[tuple[int, TraceLine]]) -> RankValue:
    """Of a module that runs several times for a sample, as recomputation does, the first time counts."""
    used = lines[:1] if phase in OF_SAMPLES else lines
    sketch = [sum(numbers) for numbers in zip(*(line.sketch for _, line in used), strict=True)]
    weight = math.hypot(*(line.weight for _, line in used))
    return RankValue(tuple(sorted({rank for rank, _ in used})), sketch, weight)


def is_traced(run: Path) -> bool:
    return any((run / DIRECTORY).glob("rank*.jsonl"))


def root_mean_square(sketch: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in sketch) / len(sketch))


def apart(value: RankValue, reference: RankValue) -> float:
    """The relative difference, without what rounding to the weights' last digit explains."""
    gap = root_mean_square([ours - theirs for ours, theirs in zip(value.sketch, reference.sketch, strict=True)])
    if not math.isfinite(gap):
        return math.inf
    gap = max(0.0, gap - 2 * LAST_DIGIT * reference.weight)
    size = root_mean_square(reference.sketch)
    if gap == 0:
        return 0.0
    return gap / size if size else math.inf


def differences(run: Trace, baseline: Trace, quantity: tuple[int, str, str]) -> list[tuple[float, tuple[int, ...]]]:
    """How far each value of a run about a quantity (iteration, phase, name) lies from the baseline's, and whose value
    it is."""
    return [
        (apart(value, reference) if reference else math.inf, value.ranks)
        for value, reference in pairs(run, baseline, quantity)
    ]


def pairs(run: Trace, baseline: Trace, quantity: tuple[int, str, str]) -> Iterator[tuple[RankValue, RankValue | None]]:
    """Each value of a run about a quantity (iteration, phase, name), and the baseline's; None for a sample that the
    baseline did not have."""
    _, phase, _ = quantity
    are_alike = run.dp_size == baseline.dp_size
    values = run.values(*quantity, per_replica=are_alike)
    references = baseline.values(*quantity, per_replica=are_alike)
    if not values or not references:
        return
    first = next(iter(references.values()))
    for number, values_of_number in values.items():
        if phase in OF_SAMPLES and number not in references:
            yield values_of_number[0], None
            continue
        for value in values_of_number:
            yield value, references.get(number, first)[0]


def rounding(run: Trace, baseline: Trace, iteration: int) -> Mapping[str, float]:
    """The relative difference that is allowed, by phase."""
    if run.precision != "fp32":
        computes_alike = iteration == 1 and run.tp_size == baseline.tp_size
        return BF16_ROUNDING_AT_FIRST if computes_alike else BF16_ROUNDING
    return ROUNDING_AT_FIRST if iteration <= FIRST_ITERATIONS else ROUNDING


def first_difference(run: Path, baseline: Path) -> Location | None:
    """Where two traced runs of one recipe first differ beyond rounding; None if they do not. In bf16 only the first
    iterations are compared.

    run and baseline: run directories. Raises Problem for one without a trace.
    """
    traced = Trace(run)
    reference = Trace(baseline)
    iterations = reference.iterations
    if traced.precision != "fp32":
        iterations = iterations[:BF16_ITERATIONS]
    for iteration in iterations:
        allowed = rounding(traced, reference, iteration)
        for phase in PHASES:
            still_right = ""
            for name in reference.names(iteration, phase):
                measured = differences(traced, reference, (iteration, phase, name))
                wrong = [(difference, ranks) for difference, ranks in measured if not difference <= allowed[phase]]
                if wrong:
                    ranks_that_differ = {rank for _, ranks in wrong for rank in ranks}
                    largest, _ = max(wrong)
                    return Location(iteration, phase, name, tuple(sorted(ranks_that_differ)), largest, still_right)
                if measured:
                    still_right = name
    return None


def differences_in_bf16(run: Path, baseline: Path) -> list[str]:
    """Where a run's first iterations differ from the baseline's by more than rounding to bf16, a sentence each.

    run and baseline: run directories. Raises Problem for one without a trace.
    """
    location = first_difference(run, baseline)
    sentence = next(wrong_sizes(Trace(run), Trace(baseline)), "")
    return [*([f"it {location}"] if location else []), *([sentence] if sentence else [])]


def larger_by(sketch: Sequence[float], reference: Sequence[float]) -> float:
    """By which share of its size the part of a sketch that points along the reference is larger."""
    product = sum(ours * theirs for ours, theirs in zip(sketch, reference, strict=True))
    return product / sum(number * number for number in reference) - 1


def wrong_sizes(run: Trace, baseline: Trace) -> Iterator[str]:
    """Ranks whose first backward pass is, on average over modules and samples, larger or smaller than the baseline's.

    Rounding enlarges one number and diminishes the next; a wrong factor changes all alike.
    """
    if run.tp_size != baseline.tp_size:
        return
    shares: dict[tuple[int, ...], list[float]] = {}
    for name in baseline.names(1, "backward"):
        for value, its in pairs(run, baseline, (1, "backward", name)):
            if its and any(its.sketch):
                shares.setdefault(value.ranks, []).append(larger_by(value.sketch, its.sketch))
    for ranks, of_rank in shares.items():
        average = fmean(of_rank)
        if not abs(average) <= BF16_SIZE_AT_FIRST:
            much = f"{abs(average):.1e} {'larger' if average > 0 else 'smaller'} than the baseline's"
            on_average = f"on average over modules (allowed: {BF16_SIZE_AT_FIRST:.0e})"
            yield f"in iteration 1 the backward pass of {ranks_in_words(ranks)} is {much}, {on_average}"


# ---- a run's own figures ---------------------------------------------------------------------------------------------


def contradictions(
    run: Path, losses: Mapping[int, float], norms: Mapping[int, float], *, sums_in_16_bits: bool = False
) -> list[str]:
    """Where a traced run did not do what follows from its own numbers, a sentence for each kind, with its first place.

    losses and norms: what the run printed, by iteration. sums_in_16_bits: its gradients are added up so, by design.
    Raises Problem.
    """
    trace = Trace(run)
    kinds = (
        wrong_losses(trace, losses),
        wrong_norms(trace, norms),
        wrong_sums(trace, SUM_IN_16_BITS if sums_in_16_bits else SUM),
        wrong_updates(trace),
        stale_copies(trace),
    )
    firsts = [next(sentences, "") for sentences in kinds]
    return [sentence for sentence in firsts if sentence]


def is_off(value: float, expected: float, allowed: float) -> bool:
    return not abs(value - expected) <= allowed * abs(expected)


def wrong_losses(trace: Trace, losses: Mapping[int, float]) -> Iterator[str]:
    values: dict[int, list[float]] = {}
    for _, line in trace.figures:
        if line.phase == "loss":
            values.setdefault(line.iteration, []).append(line.value)
    for iteration, of_ranks in values.items():
        expected = sum(of_ranks) / len(of_ranks)
        printed = losses.get(iteration)
        if printed is not None and is_off(printed, expected, LOSS):
            yield f"iteration {iteration} printed the loss {printed:.7g}, but its logits give {expected:.7g}"


def wrong_norms(trace: Trace, norms: Mapping[int, float]) -> Iterator[str]:
    for iteration in trace.iterations:
        squares = 0.0
        for name in trace.names(iteration, "reduced"):
            lines = [(trace.positions[rank], line) for rank, line in trace.lines[iteration, "reduced", name]]
            stage = min(position.pp for position, _ in lines)
            for position, line in lines:
                # Every parameter counts once: on the first stage that has it, in the first replica.
                if position.pp == stage and position.dp == 0 and (line.slice or position.tp == 0):
                    squares += line.square
        expected = math.sqrt(squares)
        printed = norms.get(iteration)
        if printed is not None and is_off(printed, expected, NORM):
            its = f"its gradients give {expected:.7g}"
            yield f"iteration {iteration} printed the gradient norm {printed:.7g}, but {its}"


def wrong_sums(trace: Trace, allowed: float) -> Iterator[str]:
    """A reduced gradient is the sum of all ranks' and micro-batches'."""
    for iteration in trace.iterations:
        for name in trace.names(iteration, "reduced"):
            of_ranks = trace.values(iteration, "gradient", name, per_replica=False)
            if not of_ranks:  # FSDP2 divides gradients before a trace can see them
                lines = trace.lines[iteration, "reduced", name]
                if trace.dp_size > 1 and all(line.in_16_bits for _, line in lines):
                    yield f"in iteration {iteration} the reduced gradient of {name} has only values of 16 bits"
                continue
            total = of_ranks[0][0]
            for values in trace.values(iteration, "reduced", name).values():
                for value in values:
                    difference = apart(value, total)
                    if not difference <= allowed:
                        what = f"the reduced gradient of {name} on {ranks_in_words(value.ranks)}"
                        from_what = f"the sum over micro-batches and ranks by {difference:.1e}"
                        yield f"in iteration {iteration} {what} differs from {from_what}"


def wrong_updates(trace: Trace) -> Iterator[str]:
    for iteration in trace.iterations:
        for name in trace.names(iteration, "update"):
            for rank, line in trace.lines[iteration, "update", name]:
                if not line.off <= UPDATE * line.size + 2 * LAST_DIGIT * line.weight:
                    share = line.off / line.size if line.size else math.inf
                    what = f"the update of {name} on rank {rank} differs from AdamW's by {share:.1e}"
                    yield f"in iteration {iteration} {what}"


def stale_copies(trace: Trace) -> Iterator[str]:
    for rank, line in trace.figures:
        if line.phase == "stale" and line.names:
            what = f"computed with copies of {len(line.names)} parameters that are not their rounded masters"
            yield f"in iteration {line.iteration} rank {rank} {what}: {line.names[0]}"
