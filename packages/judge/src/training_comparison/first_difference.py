"""Where two traced trainings first differ beyond rounding: the step, the phase, the tensor and the ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from training_comparison.curves import relative_difference
from training_comparison.likely import ranks_in_words
from training_comparison.traces import OF_SAMPLES, PHASES, Trace, Value

FP32 = "fp32"
# The relative differences that honest trainings stay below; docs/parity_evidence.md has the measurements. Gradients
# differ most, because terms cancel each other in them.
ROUNDING = {
    "weights": 1e-3,
    "data": 0.0,
    "forward": 1e-5,
    "backward": 2e-3,
    "gradient": 2e-3,
    "reduced": 2e-3,
    "update": 1e-5,
}
# The updates magnify what differs from step to step. Before the first of them, gradients differ least.
FIRST_STEPS = 2
ROUNDING_AT_FIRST = ROUNDING | {"backward": 5e-5, "gradient": 5e-5, "reduced": 5e-5}
INITIAL_WEIGHTS = 1e-6
# In bf16 each layout rounds at different places, and what differs grows: later than in the first steps, honest
# gradients differ by as much as they are large.
BF16_ROUNDING = ROUNDING | {
    "weights": 0.1,
    "forward": 0.1,
    "backward": 0.3,
    "gradient": 0.3,
    "reduced": 0.3,
    "update": 0.1,
}
# Without tensor parallelism all layouts compute a sample's first forward pass in the same way, bit for bit on a CPU.
BF16_FORWARD_AT_FIRST = 1e-3
# A share by which all gradients of a rank are larger, in the same case, on average over modules and samples.
BF16_SIZE_AT_FIRST = 2e-3
LAST_DIGIT = 2**-23  # of a weight of 1: a smaller change is lost
OF_PARAMETERS = ("weights", "reduced")  # which each training has of all its parameters
BF16_CUTS = 1 << 16  # a number of fp32 that bf16 has, too, is a multiple of these bits
SMALL = 1e-3  # of all gradients together: a smaller gradient may be rounding alone, as that of attention's key bias


@dataclass(frozen=True)
class Place:
    """Where two trainings, or the ranks of one, first differ."""

    step: int
    phase: str
    """One of PHASES."""
    name: str
    """Of the module or parameter: the first that differs, in the order in which they are computed."""
    ranks: tuple[int, ...]
    """Those that differ."""
    difference: float
    """Relative; an estimate from a sketch."""
    after: str = ""
    """What is still right before it: a module or parameter of the same phase."""
    differing: int = 1
    """How many of the phase differ."""
    compared: int = 1

    def where(self, unit: str = "step") -> str:
        return f"{unit} {self.step}, {PHASES[self.phase]}, {self.name}, {ranks_in_words(self.ranks)}"

    def sentence(self, unit: str = "step") -> str:
        """unit: what the training calls a step."""
        by = "where one is 0, missing or not a number"
        if math.isfinite(self.difference):
            by = f"by {self.difference:.1e} of its size"
        more = f", and so do {self.differing - 1} more of {self.compared}" if self.differing > 1 else ""
        before = f"; {self.after} before it is still right" if self.after else ""
        return f"first differs at {self.where(unit)}: {by}{more}{before}"


def first_difference(run: Trace, baseline: Trace, precision: str = "") -> Place | None:
    """None if they differ nowhere. In bf16, later than in the first steps, gradients are compared by their size alone.

    precision: where the traces do not say it; else fp32.
    """
    precision = run.header.precision or precision or FP32
    for number, step in enumerate(sorted(set(run.steps) & set(baseline.steps))):
        allowed = rounding(run, baseline, precision, step, number)
        by_size = precision != FP32 and number >= FIRST_STEPS
        for phase in OF_PARAMETERS if by_size else PHASES:
            place = first_of_phase(run, baseline, (step, phase), allowed[phase], by_size=by_size)
            if place:
                return place
    return None


def rounding(run: Trace, baseline: Trace, precision: str, step: int, number: int) -> Mapping[str, float]:
    """The relative difference that is allowed, by phase. number: of the step, of those that are compared."""
    begins = number == 0 and step <= 1  # trainings count from 0 or from 1
    if precision == FP32:
        found = dict(ROUNDING_AT_FIRST if number < FIRST_STEPS else ROUNDING)
    else:
        found = dict(BF16_ROUNDING)
        if begins and computes_alike(run, baseline):
            found["forward"] = BF16_FORWARD_AT_FIRST
    if begins and (precision == FP32 or computes_alike(run, baseline)):  # else masters may be beside rounded copies
        found["weights"] = INITIAL_WEIGHTS
    return found


def computes_alike(run: Trace, baseline: Trace) -> bool:
    sizes = {run.header.tensor_parallel, baseline.header.tensor_parallel}
    return len(sizes) == 1 and 0 not in sizes


def first_of_phase(
    run: Trace, baseline: Trace, where: tuple[int, str], allowed: float, *, by_size: bool
) -> Place | None:
    """where: the step and the phase."""
    step, phase = where
    names = baseline.names(step, phase)
    more = run.names(step, phase)
    if not names or not more:
        return None  # one of them did not write it
    if phase in OF_PARAMETERS:
        names = list(dict.fromkeys((*names, *more)))
    floor = floors(baseline, step, phase, by_module=by_size or phase == "weights")
    distance = sizes_apart if by_size and phase == "reduced" else apart
    after = ""
    wrong: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
    for name in names:
        measured = [
            (distance(value, reference, floor(name)) if reference else math.inf, value.ranks)
            for value, reference in pairs(run, baseline, (step, phase, name))
        ]
        beyond = [(difference, ranks) for difference, ranks in measured if not difference <= allowed]
        if beyond:
            wrong[name] = beyond
        elif measured and not wrong:
            after = name
    if not wrong:
        return None
    first = next(iter(wrong))
    ranks = tuple(sorted({rank for _, of_ranks in wrong[first] for rank in of_ranks}))
    if phase not in OF_SAMPLES and len(ranks) == len(run.headers):  # what is summed over the ranks differs on all
        ranks = ranks_by_loss(run, baseline, step, ROUNDING_AT_FIRST["reduced"]) or ranks
    largest, _ = max(wrong[first])
    return Place(step, phase, first, ranks, largest, after, len(wrong), len(names))


# ---- how far tensors are apart ---------------------------------------------------------------------------------------


def root_mean_square(sketch: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in sketch) / len(sketch)) if sketch else 0.0


def apart(value: Value, reference: Value, floor: float = 0.0) -> float:
    """The relative difference, without what rounding to the weights' last digit explains.

    floor: the size to which it is relative where the reference is smaller.
    """
    gap = root_mean_square([ours - theirs for ours, theirs in zip(value.sketch, reference.sketch, strict=True)])
    if not math.isfinite(gap):
        return math.inf
    gap = max(0.0, gap - 2 * LAST_DIGIT * reference.weight)
    size = max(root_mean_square(reference.sketch), floor)
    if gap == 0:
        return 0.0
    return gap / size if size else math.inf


def sizes_apart(value: Value, reference: Value, floor: float = 0.0) -> float:
    """The relative difference of two gradients' norms."""
    gap = abs(math.sqrt(value.square) - math.sqrt(reference.square))
    size = max(math.sqrt(reference.square), floor)
    if gap == 0:
        return 0.0
    return gap / size if size and math.isfinite(gap) else math.inf


def floors(baseline: Trace, step: int, phase: str, *, by_module: bool) -> Callable[[str], float]:
    """The size, by name, to which smaller tensors are compared: rounding alone decides what nearly vanishes.

    A small share of all gradients together; or a module's, for Adam moves a bias whose gradient is rounding as far as
    any other.
    """
    if phase not in ("weights", "gradient", "reduced"):
        return lambda _: 0.0
    sizes = {name: size_of(baseline, step, phase, name) for name in baseline.names(step, phase)}
    if not by_module:
        least = SMALL * math.hypot(*sizes.values())
        return lambda _: least
    of_module: dict[str, float] = {}
    for name, size in sizes.items():
        module = name.rpartition(".")[0]
        of_module[module] = math.hypot(of_module.get(module, 0.0), size)
    return lambda name: of_module.get(name.rpartition(".")[0], 0.0)


def size_of(trace: Trace, step: int, phase: str, name: str) -> float:
    values = trace.values(step, phase, name, per_replica=False)
    return root_mean_square(next(iter(values.values()))[0].sketch)


def pairs(run: Trace, baseline: Trace, quantity: tuple[int, str, str]) -> Iterator[tuple[Value, Value | None]]:
    """Each value of a run about a quantity (step, phase, name), and the baseline's; None for a sample that the
    baseline did not have. A parameter that one of them lacks is 0 there."""
    _, phase, _ = quantity
    are_alike = run.header.replicas == baseline.header.replicas
    values = run.values(*quantity, per_replica=are_alike)
    references = baseline.values(*quantity, per_replica=are_alike)
    if phase in OF_PARAMETERS:
        values = values or zeros(run, references)
        references = references or zeros(baseline, values)
    if not values or not references:
        return
    first = next(iter(references.values()))
    for number, values_of_number in values.items():
        if phase in OF_SAMPLES and number not in references:
            yield values_of_number[0], None
            continue
        for value in values_of_number:
            yield value, references.get(number, first)[0]


def zeros(trace: Trace, like: Mapping[int, list[Value]]) -> dict[int, list[Value]]:
    length = len(next(iter(like.values()))[0].sketch)
    return {0: [Value(tuple(sorted(trace.headers)), [0.0] * length)]}


# ---- ranks ---------------------------------------------------------------------------------------------------------


def ranks_by_loss(run: Trace, baseline: Trace, step: int, bound: float) -> tuple[int, ...]:
    """The ranks whose own loss differs by more than the bound; () if all do, or nothing can be said."""
    ours = {line.rank: line.value for line in run.lines.get((step, "loss", ""), [])}
    theirs = {line.rank: line.value for line in baseline.lines.get((step, "loss", ""), [])}
    if ours.keys() != theirs.keys() or len(ours) < 2:
        return ()
    found = [rank for rank, loss in ours.items() if not relative_difference(loss, theirs[rank]) <= bound]
    return tuple(found) if len(found) < len(ours) else ()


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def rounded_to_bf16(trace: Trace, other: Trace) -> int | None:
    """The first step at which all weights of fp32 are numbers of bf16 in this training, and not in the other."""
    common = sorted(set(trace.steps) & set(other.steps))
    return next((step for step in common if is_in_bf16(trace, step) and not is_in_bf16(other, step)), None)


def is_in_bf16(trace: Trace, step: int) -> bool:
    bits = [line.bits for name in trace.names(step, "weights") for line in trace.lines[step, "weights", name]]
    return any(bits) and not any(of_tensor % BF16_CUTS for of_tensor in bits)


def differences_in_bf16(run: Trace, baseline: Trace, unit: str = "step") -> list[str]:
    """Where a run's first steps differ from the baseline's by more than rounding to bf16, a sentence each."""
    place = first_difference(run, baseline)
    sentences = [f"it {place.sentence(unit)}"] if place else []
    wrong_size = next(wrong_sizes(run, baseline, unit), "")
    return [*sentences, wrong_size] if wrong_size else sentences


def wrong_sizes(run: Trace, baseline: Trace, unit: str) -> Iterator[str]:
    """Ranks whose first backward pass is, on average over modules and samples, larger or smaller than the baseline's.

    Rounding enlarges one number and diminishes the next; a wrong factor changes all alike.
    """
    if not computes_alike(run, baseline):
        return
    first = baseline.steps[0]
    shares: dict[tuple[int, ...], list[float]] = {}
    for name in baseline.names(first, "backward"):
        for value, reference in pairs(run, baseline, (first, "backward", name)):
            if reference and any(reference.sketch):
                shares.setdefault(value.ranks, []).append(larger_by(value.sketch, reference.sketch))
    for ranks, of_rank in shares.items():
        average = fmean(of_rank)
        if not abs(average) <= BF16_SIZE_AT_FIRST:
            much = f"{abs(average):.1e} {'larger' if average > 0 else 'smaller'} than the baseline's"
            on_average = f"on average over modules (allowed: {BF16_SIZE_AT_FIRST:.0e})"
            yield f"in {unit} {first} the backward pass of {ranks_in_words(ranks)} is {much}, {on_average}"


def larger_by(sketch: Sequence[float], reference: Sequence[float]) -> float:
    """By which share of its size the part of a sketch that points along the reference is larger."""
    product = sum(ours * theirs for ours, theirs in zip(sketch, reference, strict=True))
    return product / sum(number * number for number in reference) - 1
