"""The rows of several packages as histories of the same job, and as curves over the number of processes.

A change counts only where the intervals of the two throughputs leave no doubt.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from t5bench import Problem, note
from t5bench.compare.rows import Row, distinctions, group_runs, labels, make_row
from t5bench.compare.statistics import Estimate
from t5bench.record import samples
from t5bench.record.machine import FIRST_DIGITS
from t5bench.record.run import Run
from t5bench.report.compare import load_runs, run_directories
from t5bench.report.tables import estimate_text, mark, significant
from t5bench.text import processes
from t5bench_verify.pack import packed_runs, working_in
from t5bench_verify.verify import unpack

SECONDS_OF_AN_HOUR = 3600
RELEASES = ("torch", "deepspeed", "nccl")
# What a run of another size differs in; the rest decides whether it is the same job.
SIZES = ("world_size", "nodes", "GLOBAL_BATCH_SIZE", "batch")


@dataclass(frozen=True)
class PackageRow:
    """A row of one package."""

    place: str
    """The package or directory."""
    row: Row
    power: float | None
    """Watts of all GPUs together; None where it was not measured."""

    @property
    def run(self) -> Run:
        return self.row.run

    @property
    def started(self) -> str:
        """Of the first repeat, in ISO 8601."""
        return min(run.record["started"] for run in self.row.runs)

    @property
    def speed(self) -> Estimate:
        """Samples per second."""
        assert self.row.samples_per_second
        return self.row.samples_per_second

    @property
    def joules(self) -> float | None:
        """Of the GPUs, for a sample."""
        return self.power / self.speed.median if self.power else None

    def cost(self, price: float) -> float:
        """Of a million samples. price: of a GPU for an hour."""
        return price * self.run.world_size * 1e6 / self.speed.median / SECONDS_OF_AN_HOUR

    @property
    def made_with(self) -> dict[str, str]:
        """What may change from point to point while the job stays the same: commit, releases, driver."""
        versions = self.run.record["versions"]
        commit = str(self.run.record["commits"].get("repository") or "")[:FIRST_DIGITS]
        if self.run.record["commits"].get("repository_changed"):
            commit += "+"
        drivers = {str(device.get("driver") or "") for node in self.run.nodes for device in node["devices"]}
        made_with = {"commit": commit}
        made_with |= {name: str(versions.get(name) or "") for name in RELEASES}
        return made_with | {"driver": " ".join(sorted(filter(None, drivers)))}


@dataclass(frozen=True)
class TrendChange:
    """How a point differs from the one before it."""

    ratio: Estimate
    """Of the throughputs, with an interval that covers all that both intervals allow."""

    @property
    def verdict(self) -> str:
        if self.ratio.low is None or self.ratio.high is None:
            return "unclear: too few intervals"
        if self.ratio.low > 1:
            return "faster"
        if self.ratio.high < 1:
            return "slower"
        return "no clear change"

    def __str__(self) -> str:
        percent = 100 * (self.ratio.median - 1)
        return f"{percent:+.1f} %"


@dataclass(frozen=True)
class Scaled:
    """A job on another number of processes than the smallest."""

    kind: str
    """"strong": the same global batch; "weak": the same batch per process."""
    point: PackageRow
    smallest: PackageRow

    @property
    def speed_up(self) -> float:
        return self.point.speed.median / self.smallest.speed.median

    @property
    def efficiency(self) -> float:
        """The speed-up as a share of the growth in processes."""
        return self.speed_up * self.smallest.run.world_size / self.point.run.world_size


def points_of(place: str) -> list[PackageRow]:
    """The rows that have a time, of a package or of the runs below a directory. Raises Problem."""
    if Path(place).is_file():
        with tempfile.TemporaryDirectory() as unpacked:
            for finding in unpack(Path(place).absolute(), Path(unpacked)):
                raise Problem(f"{place}: {finding}", f"See python -m t5bench verify {place}")
            with working_in(unpacked):
                runs, left_out = load_runs(packed_runs())
    else:
        runs, left_out = load_runs(run_directories([place]))
    for reason in left_out:
        note(f"warning: {place}: {reason}")
    parts = group_runs(runs)
    points = []
    for label, part in zip(labels(parts), parts, strict=True):
        row = make_row(label, part)
        if row.samples_per_second:
            points.append(PackageRow(place, row, power_of(row)))
    return points


def points_of_all(places: Sequence[str]) -> list[PackageRow]:
    """The rows of all places. Runs that an earlier place already gave count once, and that is said. Raises Problem."""
    points: list[PackageRow] = []
    for place in places:
        of_place = points_of(place)
        for other in dict.fromkeys(point.place for point in points):
            earlier = [point for point in points if point.place == other]
            copies = [point for point in of_place if any(_are_the_same_runs(point, known) for known in earlier)]
            if copies:
                what = "the same runs" if len(copies) == len(of_place) else f"{len(copies)} of the same rows"
                note(f"warning: {place} holds {what} as {other}; they count once")
            of_place = [point for point in of_place if point not in copies]
        points += of_place
    return points


def _are_the_same_runs(one: PackageRow, other: PackageRow) -> bool:
    """No two runs have every iteration at the same moment."""
    return [run.iterations for run in one.row.runs] == [run.iterations for run in other.row.runs]


def power_of(row: Row) -> float | None:
    """Watts of all GPUs of a run, the mean over the repeats; None unless every GPU of every repeat has a figure."""
    watts = []
    for entry in row.measured:
        if entry.timing:
            watts.append(samples.total_power(entry.run, entry.timing.used))
    known = [value for value in watts if value is not None]
    return sum(known) / len(known) if known and len(known) == len(watts) else None


def _job(point: PackageRow, without: Sequence[str] = ()) -> tuple[Any, ...]:
    """What two points share if they are the same job."""
    facts = {name: value for name, value in distinctions(point.run).items() if name not in without}
    return (point.run.strategy, *sorted((name, str(value)) for name, value in facts.items()))


def histories(points: Sequence[PackageRow]) -> list[list[PackageRow]]:
    """The points of each job in the order of time."""
    by_job: dict[tuple[Any, ...], list[PackageRow]] = {}
    for point in sorted(points, key=lambda point: point.started):
        by_job.setdefault(_job(point), []).append(point)
    return sorted(by_job.values(), key=lambda history: (history[0].run.world_size, history[0].run.plan.strategy.port))


def changes(history: Sequence[PackageRow]) -> list[TrendChange | None]:
    """How each point differs from the one before; None for the first."""
    following: list[TrendChange | None] = [None]
    for before, after in pairwise(history):
        following.append(TrendChange(after.speed.over(before.speed)))
    return following


def scaling(points: Sequence[PackageRow]) -> Iterator[list[Scaled]]:
    """The curves of jobs that ran on several numbers of processes, the latest point of each number."""
    latest = [history[-1] for history in histories(points)]
    by_job: dict[tuple[Any, ...], list[PackageRow]] = {}
    for point in latest:
        by_job.setdefault(_job(point, SIZES), []).append(point)
    for alike in by_job.values():
        yield from _curves(alike)


def _curves(alike: Sequence[PackageRow]) -> Iterator[list[Scaled]]:
    """The strong and the weak curves of points that differ in their sizes alone."""
    strong: dict[Any, list[PackageRow]] = {}
    weak: dict[Any, list[PackageRow]] = {}
    for point in sorted(alike, key=lambda point: point.run.world_size):
        strong.setdefault(point.row.batch, []).append(point)
        weak.setdefault(point.row.batch / point.run.world_size, []).append(point)
    for kind, curves in (("strong", strong), ("weak", weak)):
        for curve in curves.values():
            if len({point.run.world_size for point in curve}) > 1:
                yield [Scaled(kind, point, curve[0]) for point in curve]


# ---- words -----------------------------------------------------------------------------------------------------------


def title_of(point: PackageRow) -> str:
    return f"{point.row.label}, {processes(point.run.world_size)}"


def history_rows(history: Sequence[PackageRow], price: float | None) -> list[dict[str, str]]:
    """A table's rows. Columns in which no point says anything are left out."""
    rows = []
    for point, change in zip(history, changes(history), strict=True):
        cells = {"started": point.started[:16].replace("T", " "), **point.made_with}
        cells["samples/s"] = estimate_text(point.speed) + mark(point.row)
        cells["change"] = str(change) if change else ""
        cells["verdict"] = change.verdict if change else ""
        cells["J/sample"] = significant(point.joules, 3) if point.joules else ""
        cells["cost of 1M samples"] = significant(point.cost(price), 3) if price else ""
        rows.append(cells)
    empty = [name for name in rows[0] if not any(cells[name] for cells in rows)]
    return [{name: text for name, text in cells.items() if name not in empty} for cells in rows]


def scaling_rows(curve: Sequence[Scaled]) -> list[dict[str, str]]:
    return [
        {
            "processes": str(scaled.point.run.world_size),
            "global batch": f"{scaled.point.row.batch:g}",
            "samples/s": estimate_text(scaled.point.speed),
            "speed-up": f"{scaled.speed_up:.2f}",
            "efficiency": f"{scaled.efficiency:.0%}",
        }
        for scaled in curve
    ]
