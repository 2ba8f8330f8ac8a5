"""Reads what step_trace.py wrote: what each rank of a training computed, in a few numbers for each tensor."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from training_comparison.given_files import open_file, read_text
from training_comparison.problem import Problem

DIRECTORY = "trace"  # of a run of the benchmark
FORMAT = 2
MOST_BYTES = 1 << 32  # of one rank
REMEDY = "Give the directory that StepTrace wrote, of one training alone"
# What a line is of, in the order in which a step computes it, and what each is called.
PHASES = {
    "weights": "weights",
    "data": "data",
    "forward": "forward pass",
    "backward": "backward pass",
    "gradient": "gradient on a rank",
    "reduced": "gradient reduced over the ranks",
    "update": "update",
}
OF_SAMPLES = ("data", "forward", "backward")


@dataclass(frozen=True)
class TraceLine:
    """What one tensor was on a rank. Which fields it has depends on its phase: one of PHASES, `loss` or `stale`."""

    step: int
    phase: str
    name: str = ""
    """Of the module or parameter."""
    rank: int = 0
    part: str = ""
    """Which part of a parameter. Lines of different parts add up, those of one part are copies."""
    replica: int = 0
    """Whose samples a rank's own gradient is of."""
    sample: int = 0
    """The number of a sample in the step."""
    sketch: Sequence[float] = ()
    square: float = 0.0
    """The sum of a reduced gradient's squares."""
    bits: int = 0
    """The sum of all bits of weights."""
    in_16_bits: bool = False
    """Every value of a reduced gradient is one of bf16."""
    size: float = 0.0
    """The norm of the update that AdamW makes in float64."""
    off: float = 0.0
    """The norm of what the update differs from it."""
    weight: float = 0.0
    """The norm of the parameter."""
    value: float = 0.0
    """The loss of the rank's samples."""
    names: Sequence[str] = ()
    """Parameters whose copies are stale."""


@dataclass(frozen=True)
class Header:
    """A rank's first line."""

    trace: int
    """The format."""
    rank: int
    world: int
    replicas: int = 1
    """Over whose samples the ranks' own gradients add up."""
    tensor_parallel: int = 0
    """Ranks that divide a layer; 0 if it is not known."""
    precision: str = ""
    """"" if it is not known."""


@dataclass(frozen=True)
class Value:
    """What some ranks together say that a tensor is."""

    ranks: tuple[int, ...]
    sketch: Sequence[float]
    weight: float = 0.0
    """The norm of the parameter."""
    square: float = 0.0
    """The sum of a reduced gradient's squares."""


@dataclass(frozen=True)
class Trace:
    """A training's trace, all ranks."""

    headers: Mapping[int, Header]
    """By rank."""
    lines: Mapping[tuple[int, str, str], Sequence[TraceLine]]
    """By step, phase and name, in the order in which they were computed."""

    @property
    def header(self) -> Header:
        """That of the first rank; what it says of the layout holds for all."""
        return self.headers[min(self.headers)]

    @cached_property
    def steps(self) -> list[int]:
        return sorted({step for step, _, _ in self.lines})

    @cached_property
    def _names(self) -> Mapping[tuple[int, str], list[str]]:
        found: dict[tuple[int, str], list[str]] = {}
        for step, phase, name in self.lines:
            found.setdefault((step, phase), []).append(name)
        return found

    def names(self, step: int, phase: str) -> list[str]:
        """In the order in which they were computed."""
        return self._names.get((step, phase), [])

    def of(self, phase: str) -> Iterator[TraceLine]:
        """All lines of a phase, by step."""
        for step in self.steps:
            for name in self.names(step, phase):
                yield from self.lines[step, phase, name]

    def values(self, step: int, phase: str, name: str, *, per_replica: bool = True) -> dict[int, list[Value]]:
        """What the ranks say that a tensor is: one value for each copy, by sample or, of gradients, by replica.

        per_replica: otherwise the replicas' own gradients are added up.
        """
        groups: dict[int, list[TraceLine]] = {}
        for line in self.lines.get((step, phase, name), []):
            key = line.replica if per_replica else 0
            groups.setdefault(line.sample if phase in OF_SAMPLES else key, []).append(line)
        return {key: copies(lines) for key, lines in groups.items()}

    @cached_property
    def losses(self) -> dict[int, float]:
        """The mean of the ranks' losses, by step."""
        found: dict[int, float] = {}
        for step in self.steps:
            of_ranks = [line.value for line in self.lines.get((step, "loss", ""), [])]
            if of_ranks:
                found[step] = math.fsum(of_ranks) / len(of_ranks) if all(map(math.isfinite, of_ranks)) else math.nan
        return found

    @cached_property
    def norms(self) -> dict[int, float]:
        """The norm of the reduced gradients, by step; of copies, the first one counts."""
        squares: dict[int, float] = {}
        for step in self.steps:
            for name in self.names(step, "reduced"):
                first = {line.part: line.square for line in reversed(self.lines[step, "reduced", name])}
                squares[step] = squares.get(step, 0.0) + sum(first.values())
        return {step: math.sqrt(square) for step, square in squares.items()}


def read_trace(directory: Path) -> Trace:
    """Raises Problem."""
    if is_of_an_older_release(directory):
        found = f"an older release wrote the trace in {directory}, and this one does not read it"
        raise Problem(found, "Train again, with this release's step_trace.py or --trace")
    headers: dict[int, Header] = {}
    lines: dict[tuple[int, str, str], list[TraceLine]] = {}
    for path in files_of(directory):
        header, of_rank = read_rank(path)
        headers[header.rank] = header
        for line in of_rank:
            lines.setdefault((line.step, line.phase, line.name), []).append(line)
    if not headers:
        raise Problem(f"there is no trace in {directory}", REMEDY)
    ranks = range(next(iter(headers.values())).world)
    if sorted(headers) != list(ranks):
        found = f"{directory} has traces of the ranks {sorted(headers)}, but of a training on {len(ranks)}"
        raise Problem(found, REMEDY)
    return Trace(headers, lines)


def read_rank(path: Path) -> tuple[Header, list[TraceLine]]:
    """Raises Problem."""
    first, *rest = read_text(path, REMEDY, MOST_BYTES).splitlines() or [""]
    lines: list[TraceLine] = []
    try:
        header = decoded(Header, json.loads(first))
        for text in rest:
            if not text.endswith("}"):  # the last one of a training that was killed
                continue
            line = decoded(TraceLine, json.loads(text) | {"rank": header.rank})
            if lines and line.step < lines[-1].step:  # the training went on from an earlier step
                lines = [earlier for earlier in lines if earlier.step < line.step]
            lines.append(line)
    except (ValueError, TypeError, RecursionError) as error:
        raise Problem(f"{path} is no readable trace: {error}", REMEDY) from error
    return header, lines


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("rank*.jsonl"), key=lambda path: (len(path.name), path.name))


def trace_of_run(run: Path) -> Trace:
    """Of a run directory. Raises Problem."""
    return read_trace(run / DIRECTORY)


def is_trace(directory: Path) -> bool:
    return is_of_this_release(directory) or is_of_an_older_release(directory)


def is_of_this_release(directory: Path) -> bool:
    return _first_line(directory).startswith('{"trace":')


def is_of_an_older_release(directory: Path) -> bool:
    """Whose files named their format in another way, or not at all."""
    return _first_line(directory).startswith(('{"audit":', '{"phase":'))


def _first_line(directory: Path) -> str:
    """Of the first rank's file; "" without one."""
    for path in files_of(directory)[:1]:
        with open_file(path, REMEDY) as file:
            return file.readline(1 << 16).decode("utf-8", "replace")
    return ""


def decoded(kind: type, content: Any) -> Any:
    """A line as such a dataclass. Raises TypeError or ValueError for what is none."""
    if not isinstance(content, dict):
        raise TypeError("a line is no object")
    made = kind(**content)
    for name, of_default in kind.__annotations__.items():
        value = getattr(made, name)
        if of_default is float and not isinstance(value, (int, float)):
            raise TypeError(f"{name} is no number")
        if of_default in (int, str) and not isinstance(value, of_default):
            raise TypeError(f"{name} is no {of_default.__name__}")
    numbers = getattr(made, "sketch", ())
    if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, (int, float)) for number in numbers):
        raise TypeError("a sketch is no list of numbers")
    if getattr(made, "trace", FORMAT) != FORMAT:
        raise ValueError(f"its format is {made.trace}, and this release reads {FORMAT}")
    return made


def copies(lines: Sequence[TraceLine]) -> list[Value]:
    """Adds up the parts and the replicas.

    Of a module that runs several times for a sample, as recomputation does, the first time counts.
    """
    by_part: dict[tuple[int, str], dict[int, TraceLine]] = {}
    for line in lines:
        by_part.setdefault((line.replica, line.part), {}).setdefault(line.rank, line)
    of_parts = [[by_rank[rank] for rank in sorted(by_rank)] for by_rank in by_part.values()]
    found = []
    for number in range(max(map(len, of_parts))):
        of_copy = [of_part[min(number, len(of_part) - 1)] for of_part in of_parts]
        sketch = [sum(numbers) for numbers in zip(*(line.sketch for line in of_copy), strict=True)]
        ranks = tuple(sorted({line.rank for line in of_copy}))
        weight = math.hypot(*(line.weight for line in of_copy))
        found.append(Value(ranks, sketch, weight, sum(line.square for line in of_copy)))
    return found
