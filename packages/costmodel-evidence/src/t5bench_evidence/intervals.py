"""``python -m t5bench predict --intervals``: intervals from published measurements, judged by other ones.

The name of a source decides whether its measurements set an interval's width or judge it, never both. The width is the
90 % quantile of the logarithm's error, in which every source weighs the same however many measurements it has:
measurements of one source share their software and so their error, and a new run is of a new source.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import mean

from t5bench.costmodel.intervals import LEVEL
from t5bench.printed_table import table
from t5bench_evidence.check import PredictedFigure, compare_all
from t5bench_evidence.points import read

FILES = ("published_training_measurements.json", "more_published_measurements.json")
# The kinds of figures that have an interval, and the uses whose errors set and judge it.
KINDS: Mapping[str, Sequence[str]] = {
    "time": ("throughput",),
    "ratio": ("ratio",),
    "memory": ("memory", "peak", "activation", "states"),
}


@dataclass(frozen=True)
class JudgedInterval:
    """An interval of one kind, and what the other sources say of it."""

    kind: str
    factor: float
    setting: Mapping[str, int]
    """The sources that set it, with their numbers of figures."""
    judging: Mapping[str, int]
    coverage: float
    """The share of the judging figures that it holds."""
    coverage_of_sources: float
    """The same with every source weighing the same."""
    mean_error: float
    """The mean of the judging figures' errors."""

    @property
    def half_width(self) -> float:
        """To compare with errors: the interval's upper end."""
        return self.factor - 1


def sets(source: str) -> bool:
    """Whether a source's figures set widths; the others judge."""
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 2 == 0


def judged(kind: str, rows: Sequence[PredictedFigure]) -> JudgedInterval:
    """rows: of every kind."""
    setting: dict[str, list[float]] = {}
    judging: dict[str, list[float]] = {}
    for row in rows:
        if row.use in KINDS[kind]:
            errors = (setting if sets(row.source) else judging).setdefault(row.source, [])
            errors.append(abs(log(row.measured / row.predicted)))
    width = quantile(list(setting.values()))
    held = [[error <= width for error in errors] for errors in judging.values()]
    return JudgedInterval(
        kind=kind,
        factor=exp(width),
        setting={source: len(errors) for source, errors in setting.items()},
        judging={source: len(errors) for source, errors in judging.items()},
        coverage=mean(each for source in held for each in source),
        coverage_of_sources=mean(mean(source) for source in held),
        mean_error=mean(exp(error) - 1 for errors in judging.values() for error in errors),
    )


def quantile(errors_of_sources: Sequence[Sequence[float]]) -> float:
    """The smallest error that is not exceeded by LEVEL of all, where each source weighs the same."""
    weighted = sorted((error, 1 / len(errors)) for errors in errors_of_sources for error in errors)
    whole = len(errors_of_sources)
    reached = 0.0
    for error, weight in weighted:
        reached += weight
        if reached >= LEVEL * whole - 1e-9:
            return error
    raise ValueError("no source sets the width")


def of_published() -> list[JudgedInterval]:
    """The intervals of this moment's model. Raises Problem."""
    points = [point for name in FILES for point in read(Path(__file__).with_name(name))[0]]
    rows = [row for row in compare_all(points) if isinstance(row, PredictedFigure)]
    return [judged(kind, rows) for kind in KINDS]


def run(as_json: bool) -> int:
    kinds = of_published()
    if as_json:
        print(json.dumps([asdict(each) | {"half_width": each.half_width} for each in kinds], indent=2))
        return 0
    cells = [
        {
            "90 % interval of": each.kind,
            "factor": f"{each.factor:.3f}",
            "set by": _counted(each.setting),
            "judged by": _counted(each.judging),
            "holds": f"{each.coverage:.0%}",
            "of sources": f"{each.coverage_of_sources:.0%}",
            "mean error": f"{each.mean_error:.1%}",
            "half width / mean error": f"{each.half_width / each.mean_error:.2f}",
        }
        for each in kinds
    ]
    print(table(cells))
    for each in kinds:
        print(f"\n{each.kind}, set by: {', '.join(sorted(each.setting))}")
        print(f"{each.kind}, judged by: {', '.join(sorted(each.judging))}")
    return 0


def _counted(sources: Mapping[str, int]) -> str:
    return f"{sum(sources.values())} figures of {len(sources)}"
