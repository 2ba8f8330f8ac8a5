"""Where two runs first differ beyond rounding, and whether a run's own figures follow from each other.

Reads what ``--trace`` lets the native engine write (native/trace.py): sketches of what each module computed,
by iteration and rank. ``first_difference`` compares two runs of any layouts. ``contradictions`` needs no second
run: it compares what a run printed and did with what it should have done with its own numbers, so in bf16 it sees
mistakes that are smaller than what layouts differ by.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from t5bench import Problem

DIRECTORY = "trace"  # of a run directory
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
# The relative differences that honest runs stay below: docs/parity.md has the measurements. Gradients differ most,
# because terms cancel each other in them.
ROUNDING = {
    "weights": 1e-6, "data": 0.0, "forward": 1e-5, "backward": 5e-4, "gradient": 5e-4, "reduced": 5e-4, "update": 1e-5,
}  # fmt: skip
# In bf16 each layout rounds at different places, and what differs grows from iteration to iteration.
BF16_ROUNDING = ROUNDING | {"forward": 0.1, "backward": 0.3, "gradient": 0.3, "reduced": 0.3, "update": 0.1}
BF16_ITERATIONS = 2  # later, honest gradients differ by as much as they are large
LAST_DIGIT = 2**-23  # of a weight of 1: a smaller change is lost
# The relative differences of a run's own figures from what follows from its numbers, in either precision; honest runs
# stay below a tenth of each (docs/parity.md).
LOSS = 2e-6
NORM = 1e-5
SUM = 1e-5  # of gradients over micro-batches and ranks
SUM_IN_16_BITS = 5e-2  # where gradients are added up in 16 bits, as DeepSpeed does in bf16
UPDATE = 1e-5

Sketch = list[float]


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

    def __str__(self) -> str:
        which = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        before = f"; {self.after} before it is still right" if self.after else ""
        where = f"iteration {self.iteration}, {PHASES[self.phase]}, {self.name}, {which}"
        return f"first differs at {where}: by {self.difference:.1e} of its size{before}"


@dataclass(frozen=True)
class Values:
    """One claim of what a quantity is, by the ranks that computed it."""

    ranks: tuple[int, ...]
    sketch: Sketch
    weight: float = 0.0


class Trace:
    """A run's trace, all ranks. Raises Problem."""

    def __init__(self, directory: Path) -> None:
        self.layouts: dict[int, Mapping[str, Any]] = {}
        self.lines: dict[tuple[int, str, str], list[tuple[int, Mapping[str, Any]]]] = {}
        self.figures: list[tuple[int, Mapping[str, Any]]] = []
        paths = sorted((directory / DIRECTORY).glob("rank*.jsonl"))
        try:
            for path in paths:
                self.read(path)
        except (OSError, ValueError, LookupError) as error:
            raise Problem(f"{directory} has no readable trace: {error}", "Train with --trace again") from error
        if not self.layouts:
            raise Problem(f"there is no trace in {directory}", "Train it with the native engine and -- --trace")

    def read(self, path: Path) -> None:
        rank = int(path.stem.removeprefix("rank"))
        for text in path.read_text().splitlines():
            if not text.endswith("}"):  # of a run that was killed
                continue
            line = json.loads(text)
            if line["phase"] == "layout":
                self.layouts[rank] = line
            elif line["phase"] in PHASES:
                key = line["iteration"], line["phase"], line["name"]
                self.lines.setdefault(key, []).append((rank, line))
            else:
                self.figures.append((rank, line))

    @property
    def dp_size(self) -> int:
        return next(iter(self.layouts.values()))["dp_size"]

    @property
    def precision(self) -> str:
        return next(iter(self.layouts.values()))["precision"]

    @cached_property
    def iterations(self) -> list[int]:
        return sorted({iteration for iteration, _, _ in self.lines})

    def names(self, iteration: int, phase: str) -> list[str]:
        """In the order in which they were computed."""
        return [name for number, kind, name in self.lines if (number, kind) == (iteration, phase)]

    def claims(self, iteration: int, phase: str, name: str, *, per_replica: bool = True) -> dict[Any, list[Values]]:
        """What the ranks claim a quantity to be, by sample or by replica.

        The slices of tensor-parallel ranks are added up, and so are gradients of the stages that hold a tied parameter;
        without per_replica, those of replicas too.
        """
        parts: dict[Any, dict[Any, list[tuple[int, Mapping[str, Any]]]]] = {}
        for rank, line in self.lines.get((iteration, phase, name), []):
            layout = self.layouts[rank]
            if phase in OF_SAMPLES:
                parts.setdefault(line["sample"], {}).setdefault(rank, []).append((rank, line))
                continue
            replica = layout["dp"] if per_replica or phase != "gradient" else 0
            claimant = "all" if line["slice"] else layout["tp"]
            stage = 0 if phase == "gradient" else layout["pp"]
            parts.setdefault(replica, {}).setdefault((claimant, stage), []).append((rank, line))
        found: dict[Any, list[Values]] = {}
        for place, of_place in parts.items():
            found[place] = [added_up(phase, lines) for lines in of_place.values()]
        return found


def added_up(phase: str, lines: Sequence[tuple[int, Mapping[str, Any]]]) -> Values:
    """Of a module that runs several times for a sample, as recomputation does, the first time counts."""
    used = lines[:1] if phase in OF_SAMPLES else lines
    sketch = [sum(numbers) for numbers in zip(*(line["sketch"] for _, line in used), strict=True)]
    weight = math.hypot(*(line.get("weight", 0.0) for _, line in used))
    return Values(tuple(sorted({rank for rank, _ in used})), sketch, weight)


def is_traced(run: Path) -> bool:
    return any((run / DIRECTORY).glob("rank*.jsonl"))


def root_mean_square(sketch: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in sketch) / len(sketch))


def apart(values: Values, reference: Values) -> float:
    """The relative difference, without what rounding to the weights' last digit explains."""
    gaps = [own - its for own, its in zip(values.sketch, reference.sketch, strict=True)]
    gap = root_mean_square(gaps)
    if not math.isfinite(gap):
        return math.inf
    gap = max(0.0, gap - 2 * LAST_DIGIT * reference.weight)
    size = root_mean_square(reference.sketch)
    if gap == 0:
        return 0.0
    return gap / size if size else math.inf


def differences(own: Trace, its: Trace, key: tuple[int, str, str]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """How far each claim of a run about a quantity lies from the baseline's, and whose claim it is."""
    are_alike = own.dp_size == its.dp_size
    claims, references = (trace.claims(*key, per_replica=are_alike) for trace in (own, its))
    if not claims or not references:
        return
    first = next(iter(references.values()))
    for place, of_place in claims.items():
        if key[1] in OF_SAMPLES and place not in references:
            yield math.inf, of_place[0].ranks
            continue
        reference = references.get(place, first)[0]
        for values in of_place:
            yield apart(values, reference), values.ranks


def first_difference(run: Path, baseline: Path) -> Location | None:
    """Where two traced runs of one recipe first differ beyond rounding; None if they do not. In bf16 only the first
    iterations are compared.

    run and baseline: run directories. Raises Problem for one without a trace.
    """
    own = Trace(run)
    its = Trace(baseline)
    allowed = ROUNDING if own.precision == "fp32" else BF16_ROUNDING
    iterations = its.iterations if own.precision == "fp32" else its.iterations[:BF16_ITERATIONS]
    for iteration in iterations:
        for phase in PHASES:
            right = ""
            for name in its.names(iteration, phase):
                found = list(differences(own, its, (iteration, phase, name)))
                wrong = [(difference, ranks) for difference, ranks in found if not difference <= allowed[phase]]
                if wrong:
                    whose = tuple(sorted({rank for _, ranks in wrong for rank in ranks}))
                    return Location(iteration, phase, name, whose, max(wrong)[0], right)
                right = name if found else right
    return None


# ---- a run's own figures ---------------------------------------------------------------------------------------------


def contradictions(
    directory: Path, losses: Mapping[int, float], norms: Mapping[int, float], *, sums_in_16_bits: bool = False
) -> Iterator[str]:
    """Where a traced run did not do what follows from its own numbers, a sentence for each kind, with its first place.

    losses and norms: what the run printed, by iteration. sums_in_16_bits: its gradients are added up so, by design.
    Raises Problem.
    """
    trace = Trace(directory)
    yield from first_of(wrong_losses(trace, losses))
    yield from first_of(wrong_norms(trace, norms))
    yield from first_of(wrong_sums(trace, SUM_IN_16_BITS if sums_in_16_bits else SUM))
    yield from first_of(wrong_updates(trace))
    yield from first_of(stale_copies(trace))


def first_of(sentences: Iterator[str]) -> Iterator[str]:
    sentence = next(sentences, None)
    if sentence is not None:
        yield sentence


def is_off(value: float, expected: float, allowed: float) -> bool:
    return not abs(value - expected) <= allowed * abs(expected)


def wrong_losses(trace: Trace, losses: Mapping[int, float]) -> Iterator[str]:
    values: dict[int, list[float]] = {}
    for _, line in trace.figures:
        if line["phase"] == "loss":
            values.setdefault(line["iteration"], []).append(line["value"])
    for iteration, of_ranks in values.items():
        expected = sum(of_ranks) / len(of_ranks)
        printed = losses.get(iteration)
        if printed is not None and is_off(printed, expected, LOSS):
            yield f"iteration {iteration} printed the loss {printed:.7g}, but its logits give {expected:.7g}"


def wrong_norms(trace: Trace, norms: Mapping[int, float]) -> Iterator[str]:
    for iteration in trace.iterations:
        total = 0.0
        for name in trace.names(iteration, "reduced"):
            lines = trace.lines[iteration, "reduced", name]
            of_ranks = {
                (trace.layouts[rank]["tp"], trace.layouts[rank]["pp"], trace.layouts[rank]["dp"]): line
                for rank, line in lines
            }
            stage = min(pp for _, pp, _ in of_ranks)
            total += sum(
                line["square"]
                for (tp, pp, dp), line in of_ranks.items()
                if pp == stage and dp == 0 and (line["slice"] or tp == 0)
            )
        printed = norms.get(iteration)
        if printed is not None and is_off(printed, math.sqrt(total), NORM):
            expected = f"its gradients give {math.sqrt(total):.7g}"
            yield f"iteration {iteration} printed the gradient norm {printed:.7g}, but {expected}"


def wrong_sums(trace: Trace, allowed: float) -> Iterator[str]:
    """A reduced gradient is the sum of all ranks' and micro-batches'."""
    for iteration in trace.iterations:
        for name in trace.names(iteration, "reduced"):
            locals_ = trace.claims(iteration, "gradient", name, per_replica=False)
            for of_replica in trace.claims(iteration, "reduced", name).values():
                for values in of_replica if locals_ else []:
                    difference = apart(values, locals_[0][0])
                    if not difference <= allowed:
                        what = f"the reduced gradient of {name} on {ranks_in_words(values.ranks)}"
                        sum_ = f"the sum over micro-batches and ranks by {difference:.1e}"
                        yield f"in iteration {iteration} {what} differs from {sum_}"


def wrong_updates(trace: Trace) -> Iterator[str]:
    for iteration in trace.iterations:
        for name in trace.names(iteration, "update"):
            for rank, line in trace.lines[iteration, "update", name]:
                if not line["off"] <= UPDATE * line["size"] + 2 * LAST_DIGIT * line["weight"]:
                    share = line["off"] / line["size"] if line["size"] else math.inf
                    what = f"the update of {name} on rank {rank} differs from AdamW's by {share:.1e}"
                    yield f"in iteration {iteration} {what}"


def stale_copies(trace: Trace) -> Iterator[str]:
    for rank, line in trace.figures:
        if line["phase"] == "stale" and line["names"]:
            what = f"computed with copies of {len(line['names'])} parameters that are not their rounded masters"
            yield f"in iteration {line['iteration']} rank {rank} {what}: {line['names'][0]}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
