"""The lines that audit.py wrote: what each rank had at each step, and where two trainings first differ."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from training_comparison.curves import relative_difference
from training_comparison.given_files import read_text
from training_comparison.likely import ranks_in_words
from training_comparison.problem import Problem

REMEDY = "Give the directory that audit() wrote, of one training alone"
MOST_BYTES = 1 << 28
# The relative differences that honest trainings stay below, by precision: of a module's gradient at the first two
# steps, later, and of its parameters. Adam's updates of parameters whose gradients are nearly 0 are those of rounding.
ALLOWED = {"fp32": (5e-5, 2e-3, 1e-3), "bf16": (3e-1, 3e-1, 1e-1)}
FIRST_STEPS = 2
GRADIENTS = "gradients"
PARAMETERS = "parameters"


class Checksum(NamedTuple):
    """What a module's parameters are: two trainings, or two ranks, with equal ones have equal parameters."""

    norm: float
    first: float
    """The product with a fixed vector, and with another; 0 of slices, which have other places in the whole."""
    second: float
    bits: int
    """The sum of all bits as integers, which is exact."""


@dataclass(frozen=True)
class Line:
    """A rank's line of a step."""

    step: int
    rank: int
    world: int
    loss: float | None
    """Of this rank's samples."""
    gradients: Mapping[str, float]
    """The norm of each module's."""
    parameters: Mapping[str, Checksum]
    """Of each module."""

    @classmethod
    def of(cls, text: str) -> "Line":
        """Raises ValueError, LookupError or TypeError."""
        line = json.loads(text)
        gradients = {str(name): float(norm) for name, norm in line["gradients"].items()}
        parameters = {}
        for name, (norm, first, second, bits) in line["parameters"].items():
            parameters[str(name)] = Checksum(float(norm), float(first), float(second), int(bits))
        loss = None if line["loss"] is None else float(line["loss"])
        return cls(int(line["step"]), int(line["rank"]), int(line["world"]), loss, gradients, parameters)


@dataclass(frozen=True)
class Place:
    """Where two trainings, or the ranks of one, first differ."""

    step: int
    what: str
    """GRADIENTS or PARAMETERS."""
    modules: Sequence[str]
    """Those that differ, the one that differs most first."""
    of: int
    """The number of modules that were compared."""
    difference: float
    """Relative, of the first module."""
    ranks: tuple[int, ...] = ()
    """Those that differ; () if all do."""

    def __str__(self) -> str:
        others = len(self.modules) - 1
        which = f"all {self.of} modules" if others + 1 == self.of > 1 else self.modules[0]
        more = f" and {others} more of {self.of} modules" if 0 < others < self.of - 1 else ""
        most = f" most of all {self.modules[0]}," if which.startswith("all") else ""
        by = f"by {self.difference:.1e}" if math.isfinite(self.difference) else "not a number"
        where = f", {ranks_in_words(self.ranks)}" if self.ranks else ""
        return f"step {self.step}, {self.what} of {which}{more}:{most} {by}{where}"


class Audit:
    """A training's lines, by step and rank. Raises Problem."""

    def __init__(self, directory: Path) -> None:
        self.lines: dict[int, dict[int, Line]] = {}
        for path in files_of(directory):
            for text in read_text(path, REMEDY, MOST_BYTES).splitlines():
                if not text.endswith("}"):  # of a run that was killed
                    continue
                try:
                    line = Line.of(text)
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                    raise Problem(f"{path} has a line that is no audit's: {error}", REMEDY) from error
                own = self.lines.setdefault(line.step, {})
                if line.rank in own:
                    raise Problem(f"{path} has two lines of step {line.step}", REMEDY)
                own[line.rank] = line
        if not self.lines:
            raise Problem(f"{directory} holds no audit", REMEDY)

    @property
    def loss(self) -> dict[int, float]:
        """The mean of the ranks' losses, by step, without steps of which a loss is missing."""
        found = {}
        for step, by_rank in sorted(self.lines.items()):
            losses = [line.loss for line in by_rank.values() if line.loss is not None]
            if losses:
                found[step] = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        return found

    @property
    def norm(self) -> dict[int, float]:
        """The gradient norm of all modules, by step; each module counts once."""
        return {step: math.hypot(*self.modules(step, GRADIENTS).values()) for step in sorted(self.lines)}

    def modules(self, step: int, what: str) -> dict[str, float]:
        """The norm of each module, as the first rank has it that has the module."""
        found: dict[str, float] = {}
        for _, line in sorted(self.lines[step].items()):
            own = {GRADIENTS: line.gradients, PARAMETERS: {name: one.norm for name, one in line.parameters.items()}}
            for name, value in own[what].items():
                found.setdefault(name, value)
        return found

    def parameters_of(self, step: int, name: str) -> Checksum:
        """As the first rank has it that has the module."""
        lines = self.lines[step]
        return next(lines[rank].parameters[name] for rank in sorted(lines) if name in lines[rank].parameters)

    def apart(self) -> Place | None:
        """Where copies of a module first are not the same on all ranks that have it, bit by bit."""
        for step in sorted(self.lines):
            by_rank = self.lines[step]
            wrong: dict[str, tuple[int, ...]] = {}
            names = dict.fromkeys(name for line in by_rank.values() for name in line.parameters)
            for name in names:
                bits = {rank: line.parameters[name].bits for rank, line in by_rank.items() if name in line.parameters}
                if len(set(bits.values())) > 1:
                    wrong[name] = minority(bits)
            if wrong:
                first = next(iter(wrong))
                norms = [line.parameters[first].norm for line in by_rank.values() if first in line.parameters]
                return Place(step, PARAMETERS, list(wrong), len(names), spread(norms), wrong[first])
        return None


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("rank*.jsonl"), key=lambda path: (len(path.name), path.name))


def is_audit(directory: Path) -> bool:
    """Whether audit() wrote the directory's files."""
    for path in files_of(directory)[:1]:
        with path.open() as file:
            return file.read(9) == '{"audit":'
    return False


def minority(bits: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks that do not have what most have; all of them where no value has a majority."""
    ((most, count), *_) = Counter(bits.values()).most_common(1)
    if 2 * count <= len(bits):
        return tuple(bits)
    return tuple(rank for rank, value in bits.items() if value != most)


def of_the_ranks(apart: Place, other: Audit, own: Audit) -> tuple[int, ...]:
    """Which ranks have wrong copies: two ranks that differ cannot say, but the other training's parameters can."""
    name = apart.modules[0]
    if apart.step not in other.lines or len(apart.ranks) < len(own.lines[apart.step]):
        return apart.ranks
    by_rank = own.lines[apart.step]
    try:
        right = other.parameters_of(apart.step, name)
    except StopIteration:
        return apart.ranks
    far = {rank: abs(line.parameters[name].first - right.first) for rank, line in by_rank.items()}
    if min(far.values()) > ALLOWED["fp32"][0] * right.norm:
        return apart.ranks  # none has what the other training has
    return tuple(rank for rank, distance in far.items() if distance > min(far.values())) or apart.ranks


def spread(norms: Sequence[float]) -> float:
    return relative_difference(max(norms), min(norms)) if all(map(math.isfinite, norms)) else math.nan


def first_difference(first: Audit, second: Audit, precision: str) -> Place | None:
    """Where two trainings first differ beyond rounding: a step's parameters, from the update before, come first."""
    steps = sorted(first.lines.keys() & second.lines.keys())
    early, later, of_parameters = ALLOWED[precision]
    for number_of_step, step in enumerate(steps):
        allowed = {PARAMETERS: of_parameters, GRADIENTS: early if number_of_step < FIRST_STEPS else later}
        for what in (PARAMETERS, GRADIENTS):
            apart = dict(differences(first, second, step, what))
            wrong = {name: value for name, value in apart.items() if not value <= allowed[what]}
            if wrong:
                by_size = sorted(wrong, key=lambda name: (not math.isnan(wrong[name]), -wrong[name]))
                return Place(
                    step,
                    what,
                    by_size,
                    len(apart),
                    wrong[by_size[0]],
                    ranks_apart(first, second, step, ALLOWED[precision][0]),
                )
    return None


def differences(first: Audit, second: Audit, step: int, what: str) -> Iterator[tuple[str, float]]:
    """Each module that both have, and how far it is apart. One that a training lacks counts, too."""
    ours = first.modules(step, what)
    theirs = second.modules(step, what)
    if not ours or not theirs:
        return
    for name in dict.fromkeys((*theirs, *ours)):
        if name not in ours or name not in theirs:
            yield name, math.inf
            continue
        apart = relative_difference(ours[name], theirs[name])
        if what == PARAMETERS:
            apart = max(apart, between_products(first, second, step, name), key=lambda one: (math.isnan(one), one))
        yield name, apart


def between_products(first: Audit, second: Audit, step: int, name: str) -> float:
    """The relative difference of a module's values, estimated from their products; 0 where slices have none."""
    ours = first.parameters_of(step, name)
    theirs = second.parameters_of(step, name)
    has_products = any((ours.first, ours.second)) and any((theirs.first, theirs.second))
    if not theirs.norm or not has_products:
        return 0.0
    apart = (ours.first - theirs.first, ours.second - theirs.second)
    return math.hypot(*apart) / theirs.norm


def ranks_apart(first: Audit, second: Audit, step: int, bound: float) -> tuple[int, ...]:
    """The ranks whose own loss differs by more than the bound; () if all do, or nothing can be said."""
    ours = first.lines[step]
    theirs = second.lines[step]
    if ours.keys() != theirs.keys() or len(ours) == 1:
        return ()
    found = []
    for rank, line in ours.items():
        if line.loss is None or theirs[rank].loss is None:
            return ()
        apart = relative_difference(line.loss, theirs[rank].loss or 0.0)
        if not apart <= bound:
            found.append(rank)
    return tuple(found) if len(found) < len(ours) else ()
