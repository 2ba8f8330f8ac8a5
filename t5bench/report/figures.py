"""What the page's figures show, by row, as data that any library can draw."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from t5bench.compare.comparison import Comparison
from t5bench.compare.parity import curve, relative_difference
from t5bench.compare.rows import Row
from t5bench.record.records import Run
from t5bench.report.tables import mark, named_rows

INK, GRID, LEFT_OUT = "currentColor", "var(--grid)", "#888888"
# Of parts, which have the same in every row.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b9a400", LEFT_OUT,
           "#7766cc", "#44aa99", "#aa4466", "#a0783c", "#99bb55", "#dd8899", "#5599aa", "#336688")  # fmt: skip
LONGEST_NAME = 24  # characters; the page's table tells what a short name stands for
MOST_POINTS = 400  # of one line; more cannot be seen and make the page heavy
MOST_DOTS, MOST_PANELS = 160, 16

Points = Sequence[tuple[float, float]]


class Series(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something of a row: a "bar", a thin "interval", "stretch"es, "dots", a "line", a named "point" or a "limit".

    points: (x, y); of bars and stretches ((start, end), the name of their line). text: the figure to take away.
    colour: if not the row's. label: what it is of a row that has several.
    """

    row: str
    look: str
    points: Sequence[tuple[Any, Any]]
    text: str = ""
    colour: str = ""
    label: str = ""


class Panel(msgspec.Struct, frozen=True, omit_defaults=True):
    """height: in inches. most: where the x axis ends, whatever goes beyond."""

    series: Sequence[Series]
    title: str = ""
    y: str = ""
    height: float = 0.0
    logarithmic: bool = False
    from_zero: bool = False
    most: float = 0.0

    @property
    def names(self) -> list[str]:
        """Of lines, where a row has one or some to itself."""
        return list(dict.fromkeys(y for series in self.series for _, y in series.points if isinstance(y, str)))


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Panels below each other share the x axis; in two columns each has its own."""

    title: str
    x: str
    caption: str
    panels: Sequence[Panel]
    columns: int = 1

    @property
    def description(self) -> str:
        """What a reader who does not see it hears."""
        texts = [f"{series.row} {series.text}" for panel in self.panels for series in panel.series if series.text]
        return f"{self.title}, {self.x}: {'; '.join(texts)}."


def rows_of(comparison: Comparison) -> dict[str, Row]:
    """By the names that the figures have for them."""
    return dict(named_rows(comparison, LONGEST_NAME))


def best(rows: Mapping[str, Row], most: int) -> dict[str, Row]:
    """As many rows as this: of each strategy and number of processes the baseline and then the fastest."""
    seen: Counter[tuple[str, int]] = Counter()
    places = {}
    for name in sorted(rows, key=lambda name: (not rows[name].is_baseline, -_rate(rows[name]))):
        kind = rows[name].strategy, rows[name].run.world_size
        places[name] = seen[kind]
        seen[kind] += 1
    kept = sorted(places, key=places.__getitem__)[:most]
    return {name: row for name, row in rows.items() if name in kept}


def _rate(row: Row) -> float:
    return row.samples_per_second.median if row.samples_per_second else 0.0


# ---- one line for each row -------------------------------------------------------------------------------------------


def by_size(rows: Mapping[str, Row], series: Sequence[Series], most: float = 0.0, each: float = 0.42) -> list[Panel]:
    """A panel for each number of processes; each: the height of a line."""
    sizes: dict[int, list[Series]] = {}
    for entry in series:
        sizes.setdefault(rows[entry.row].run.world_size, []).append(entry)
    panels = [Panel(found, f"{size} processes", most=most) for size, found in sizes.items()]
    return [replace(panel, height=0.5 + each * len(panel.names)) for panel in panels]


def stacked(name: str, parts: Mapping[str, float]) -> Iterator[Series]:
    """Bars end to end; a part has its colour by its place among the parts."""
    start = 0.0
    for number, (part, size) in enumerate(parts.items()):
        if size:
            yield Series(name, "bar", [((start, start + size), name)], "", COLOURS[number % len(COLOURS)], part)
        start += size


def throughput(rows: Mapping[str, Row]) -> Figure:
    found, most = [], 0.0
    for name, row in rows.items():
        if rate := row.samples_per_second:
            ratio = f" ({row.ratio.median:.2f}x)" if row.ratio and not row.is_baseline else ""
            most = max(most, 2 * rate.median)
            interval = rate.low or rate.median, rate.high or rate.median
            found.append(Series(name, "bar", [((0, rate.median), name)]))
            found.append(Series(name, "interval", [(interval, name)], f"{rate.median:.4g}{ratio}{mark(row)}", INK))
    caption = "The medians with their 95 % confidence intervals, and the ratio to the baseline."
    # An interval may have no end to speak of.
    is_cut = any(x[1] > most for series in found for x, _ in series.points)
    return Figure("Throughput", "samples/s (more is better)", caption, by_size(rows, found, is_cut * most))


# ---- over the iterations ---------------------------------------------------------------------------------------------


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about this many points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [point for part in stretches for point in sorted({f(part, key=lambda p: p[1]) for f in (min, max)})]


def series(run: Run, name: str) -> list[tuple[int, float]]:
    """The numbers of this name (a field of Iteration) by iteration; what is no number is left out."""
    return [(iteration, value) for iteration, value in curve(run, name).items() if math.isfinite(value)]


def _apart(points: Points, reference: Points) -> Points:
    """How far the first lie from the others, relative; equal ones are left out, for the axis is logarithmic."""
    expected = dict(reference)
    shared = [(x, relative_difference(y, expected[x])) for x, y in points if expected.get(x)]
    return [point for point in shared if point[1] > 0]


def loss(rows: Mapping[str, Row], base: str) -> Figure:
    curves = {name: series(row.run, "lm_loss") for name, row in rows.items() if row.complete}
    curves = {name: points for name, points in curves.items() if points}
    bases = {rows[name].run.world_size: points for name, points in curves.items() if rows[name].is_baseline}
    apart = {
        name: _apart(points, bases.get(rows[name].run.world_size) or next(iter(bases.values())))
        for name, points in curves.items()
        if bases and not rows[name].is_baseline
    }
    lines = [Series(name, "line", thin(its), f"ends at {rows[name].final_loss:.4f}") for name, its in curves.items()]
    panels = [Panel(lines, y="loss (nats per token)", height=3.4)] if lines else []
    caption = "The loss of each strategy, one line each (of repeats the first run)."
    if any(apart.values()):
        differences = [Series(name, "line", thin(points)) for name, points in apart.items() if points]
        panels.append(Panel(differences, y=f"|loss - {base}'s| /\n{base}'s", height=2.2, logarithmic=True))
        caption += f" Below, the relative difference of each from {base}, on a logarithmic axis."
    if same := [name for name, points in apart.items() if not points]:
        caption += f" To the last logged digit, {', '.join(same)} agree with {base}."
    return Figure("Loss", "iteration", caption, panels)


def times(rows: Mapping[str, Row]) -> Figure:
    timed = {name: row for name, row in rows.items() if row.milliseconds}
    panels = []
    for name, row in list(timed.items())[:MOST_PANELS]:
        title = f"{name}: {row.milliseconds.median:.4g} ms"
        panels.append(Panel(_run_times(name, row), title, "ms", height=1.7, from_zero=True))
    caption = "One dot for each log interval, in the order of the run; grey: left out. The line is the median."
    if len(panels) < len(timed):
        caption += f" The first {len(panels)} of {len(timed)} rows."
    return Figure("Time per iteration", "iteration", caption, panels, columns=2)


def _run_times(name: str, row: Row) -> list[Series]:
    """Of each run at most as many dots as the page can draw."""
    found, most = [], max(MOST_DOTS // len(row.measured), 10)
    for entry in row.measured:
        dropped = entry.timing.dropped if entry.timing else {}
        dots = [(x, round(y, 3)) for x, y in series(entry.run, "elapsed_ms")]
        for reason in dict.fromkeys(dropped.values()):
            own = [dot for dot in dots if dropped.get(dot[0]) == reason]
            found.append(Series(name, "dots", thin(own, most), "", LEFT_OUT, f"left out for {reason}"))
        found.append(Series(name, "dots", thin([dot for dot in dots if dot[0] not in dropped], most)))
    iterations = [x for entry in found for x, _ in entry.points]
    ends = min(iterations), max(iterations)
    median = row.milliseconds.median
    return [Series(name, "line", [(x, median) for x in ends], f"{median:.4g} ms", INK), *found]
