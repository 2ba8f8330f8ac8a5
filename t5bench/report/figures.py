"""What the page's figures show, by row, as data that any library can draw."""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

from t5bench.compare.comparison import Comparison
from t5bench.compare.parity import curve, losses_beside, relative_difference
from t5bench.compare.rows import Row
from t5bench.profile.parts import PARTS, Profile, Rank, read_profile
from t5bench.record.files import PROFILE, RecordError
from t5bench.record.records import Run
from t5bench.record.text import processes
from t5bench.report.tables import mark, named_rows, predicted_bytes

INK, GRID, LEFT_OUT = "currentColor", "var(--grid)", "#888888"
# Of parts, which have the same in every row.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b9a400", LEFT_OUT, "#7766cc",
           "#44aa99", "#aa4466", "#a0783c", "#99bb55", "#446644", "#dd8899", "#5599aa", "#336688")  # fmt: skip
LONGEST_NAME = 24  # characters; the page's table tells what a short name stands for
MOST_POINTS = 400  # of one line; more cannot be seen and make the page heavy
MOST_DOTS, MOST_PANELS = 160, 16
# Of the timeline; a stretch takes about 100 bytes, drawn and as data.
MOST_RANKS, MOST_STEPS, STRETCHES_OF_A_ROW = 64, 200, 100
COLOUR_OF = dict(zip(PARTS, COLOURS, strict=True))
KINDS = {name: name for name in ("weights", "gradients", "optimizer")}
KINDS |= dict.fromkeys(("encoder", "decoder", "ends of stacks"), "activations") | {"logits and loss": "logits and loss"}

Points = Sequence[tuple[float, float]]
Rows = Mapping[str, Row]


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


Of = Callable[[str, Row], Iterable[Series]]  # what a figure shows of a row


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


def best(rows: Rows, most: int) -> dict[str, Row]:
    """As many rows as this: of each strategy and number of processes the baseline and then the fastest."""

    def order(name: str) -> tuple[bool, float]:
        rate = rows[name].samples_per_second
        return not rows[name].is_baseline, -rate.median if rate else 0.0

    kinds: dict[tuple[str, int], list[str]] = {}
    for name in sorted(rows, key=order):
        kinds.setdefault((rows[name].strategy, rows[name].run.world_size), []).append(name)
    kept = [name for of_a_place in zip_longest(*kinds.values()) for name in of_a_place if name][:most]
    return {name: row for name, row in rows.items() if name in kept}


def all_figures(comparison: Comparison, rows: Rows, most: int) -> list[Figure]:
    """Those for which something is measured; of what takes many points, only so many rows."""
    base, large = comparison.baseline, best(rows, most)
    rates = [rate for row in rows.values() if (rate := row.samples_per_second)]
    end = max((2 * rate.median for rate in rates), default=0.0)
    is_cut = any(rate.high and rate.high > end for rate in rates)  # an interval may have no end to speak of
    kinds = {row.on_gpu: "GPU, allocated by PyTorch" if row.on_gpu else "host, resident set" for row in rows.values()}
    memory = f"peak memory in MiB ({' / '.join(kinds.values())}; less is better)"
    sent = "MB that the busiest node sends per iteration (on one node: that its processes exchange)"
    fullest = "The peak of each rank, one dot each. The fullest rank decides what fits."
    if any(row.on_gpu and row.peak_memory and row.prediction for row in rows.values()):
        fullest += " The thick bars are what the cost model predicts for it."
    medians = "The medians with their 95 % confidence intervals, and the ratio to the baseline."
    thick = "Thick is what the cost model predicts, thin what was measured."
    thick_times = " ".join([thick, *(f"{text[:1].upper()}{text[1:]}." for text in comparison.predicted_by)])
    mean = "The mean of all ranks. The parts add up to the profiled iteration, which profiling slows down."
    found = [
        _by_row("Throughput", "samples/s (more is better)", medians, rows, _throughput, is_cut * end),
        _pareto(rows),
        _by_row("Memory", memory, fullest, rows, _memory),
        _by_row("Bytes, predicted and measured", sent, thick, rows, _bytes),
        _by_row("Time, predicted and measured", "ms of an iteration", thick_times, rows, _time),
        _by_row("Where the time went", "ms of the profiled iteration", mean, large, _parts),
        _timeline(large, STRETCHES_OF_A_ROW * most),
        _loss(large, base),
        _times(large),
    ]
    return [figure for figure in found if figure.panels]


# ---- one line for each row -------------------------------------------------------------------------------------------


def _by_row(title: str, x: str, caption: str, rows: Rows, of: Of, most: float = 0.0, each: float = 0.42) -> Figure:
    """A panel for each number of processes with what the rows have. most: as of a panel; each: the height of a line."""
    sizes: dict[int, list[Series]] = {}
    for name, row in rows.items():
        if found := list(of(name, row)):
            sizes.setdefault(row.run.world_size, []).extend(found)
    panels = [Panel(found, processes(size), most=most) for size, found in sizes.items()]
    return Figure(title, x, caption, [replace(panel, height=0.5 + each * len(panel.names)) for panel in panels])


def _stacked(name: str, parts: Mapping[str, float]) -> Iterator[Series]:
    """Bars end to end; a part has its colour by its place among the parts."""
    start = 0.0
    for number, (part, size) in enumerate(parts.items()):
        if size:
            yield Series(name, "bar", [((start, start + size), name)], "", COLOURS[number % len(COLOURS)], part)
        start += size


def _beside(name: str, parts: Mapping[str, float], measured: float) -> Iterator[Series]:
    """Nothing where nothing is predicted."""
    if predicted := sum(parts.values()):
        number = f"{measured:,.0f}" if measured >= 100 else f"{measured:.3g}"
        text = f"{number} (predicted {predicted / measured - 1:+.0%})"
        yield from _stacked(name, parts)
        yield Series(name, "interval", [((0, measured), name)], text, INK, "measured")


def _throughput(name: str, row: Row) -> Iterator[Series]:
    if rate := row.samples_per_second:
        ratio = f" ({row.ratio.median:.2f}x)" if row.ratio and not row.is_baseline else ""
        interval = rate.low or rate.median, rate.high or rate.median
        yield Series(name, "bar", [((0, rate.median), name)])
        yield Series(name, "interval", [(interval, name)], f"{rate.median:.4g}{ratio}{mark(row)}", INK)


def _memory(name: str, row: Row) -> Iterator[Series]:
    if not (peaks := list(row.peak_memory.values())):
        return
    if row.on_gpu and (known := row.prediction):
        parts = dict.fromkeys([*KINDS.values(), "buffers"], 0.0)
        for part, size in known.memory.components.items():
            parts[KINDS.get(part, "buffers")] += size / 2**20
        yield from _stacked(name, parts)
        limits = [device.get("memory_mib") for node in row.run.nodes for device in node["devices"]]
        limit = [(min(limits), name)] if limits and all(limits) else []
        yield Series(name, "limit", limit, "", INK, "the device's memory")
    low, high = min(peaks), max(peaks)
    text = f"{high:,.0f}" if high - low < 0.5 else f"{low:,.0f} to {high:,.0f}"
    yield Series(name, "interval", [((0, high), name)], "", INK, "measured")
    yield Series(name, "dots", [(peak, name) for peak in peaks], text, "", "each rank")


def _bytes(name: str, row: Row) -> Iterator[Series]:
    if row.sent_per_iteration and (predicted := predicted_bytes(row)):
        yield from _beside(name, {"predicted": predicted[0] / 1e6}, row.sent_per_iteration / 1e6)


def _time(name: str, row: Row) -> Iterator[Series]:
    if row.predicted and row.milliseconds:
        parts = {part: 1000 * seconds for part, seconds in row.predicted.parts.items()}
        yield from _beside(name, parts, row.milliseconds.median)


def _parts(name: str, row: Row) -> Iterator[Series]:
    if profile := profile_of(row):
        yield from _stacked(name, mean_parts(profile))


def profile_of(row: Row) -> Profile | None:
    """None for a row that was not profiled by part."""
    try:
        return read_profile(row.run.directory / PROFILE)
    except RecordError:
        return None


def mean_parts(profile: Profile) -> dict[str, float]:
    """Milliseconds of each part, the mean of all ranks."""
    return {part: sum(rank.parts.get(part, 0.0) for rank in profile.ranks) / len(profile.ranks) for part in PARTS}


def _timeline(rows: Rows, most: int) -> Figure:
    """most: how many stretches it has."""
    profiles = ((name, profile_of(row)) for name, row in rows.items())
    every = [(name, rank) for name, profile in profiles if profile for rank in profile.ranks if rank.timeline]
    shown = every[:MOST_RANKS]

    def stretches(name: str, _row: Row) -> Iterator[Series]:
        for rank in (rank for owner, rank in shown if owner == name):
            points: dict[str, list] = {}
            for part, start, end in _stretches(rank, min(MOST_STEPS, most // len(shown))):
                points.setdefault(part, []).append(((start, end), f"{name}: rank {rank.rank}"))
            for part, own in points.items():
                yield Series(name, "stretch", own, "", COLOUR_OF.get(part, LEFT_OUT), part)

    caption = "The profiled iteration of every rank, in coarse steps; trace.json in its directory has each operator."
    if len(shown) < len(every):
        caption += f" The first {len(shown)} of {len(every)} ranks."
    return _by_row("Timeline", "ms since the iteration began", caption, rows, stretches, each=0.25)


def _stretches(rank: Rank, steps: int) -> Iterator[tuple[str, float, float]]:
    """At most so many (part, start, end): what goes on in the middle of each step."""
    ends = [end for _, end in rank.timeline]
    step, start = ends[-1] / steps, 0.0
    parts = [rank.timeline[bisect.bisect_left(ends, (number + 0.5) * step)][0] for number in range(steps)]
    for number, (part, following) in enumerate(zip(parts, [*parts[1:], ""], strict=True), 1):
        if part != following:
            end = round(number * step, 3)
            yield part, start, end
            start = end


def _pareto(rows: Rows) -> Figure:
    sizes: dict[int, dict[str, tuple[float, float]]] = {}
    for name, row in rows.items():
        if row.samples_per_second and row.peak_memory:
            point = max(row.peak_memory.values()), row.samples_per_second.median
            sizes.setdefault(row.run.world_size, {})[name] = point
    panels = []
    for size, points in sizes.items():
        ends = points.values()
        best = sorted(p for p in ends if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in ends))
        front = Series("", "line", best, "", LEFT_OUT, "not beaten in both")
        dots = [Series(name, "point", [p], f"{p[1]:.4g} samples/s in {p[0]:,.0f} MiB") for name, p in points.items()]
        panels.append(Panel([front, *dots], processes(size), "samples/s", height=2.4))
    caption = "Up and to the left is better. The line joins the rows that no other beats in both."
    return Figure("Memory against throughput", "peak memory of the fullest rank in MiB", caption, panels)


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


def _apart(run: Run, base: Run) -> Points:
    """How far its losses lie from the other's, relative; equal ones are left out, for the axis is logarithmic."""
    expected = dict(series(base, "lm_loss"))
    found = [(x, relative_difference(y, expected[x])) for x, y in losses_beside(run, base).items() if expected.get(x)]
    return [point for point in found if point[1] > 0]


def _loss(rows: Rows, base: str) -> Figure:
    complete = {name: row.run for name, row in rows.items() if row.complete}
    curves = {name: points for name, run in complete.items() if (points := series(run, "lm_loss"))}
    bases = {rows[name].run.world_size: rows[name].run for name in curves if rows[name].is_baseline}
    apart = {
        name: _apart(rows[name].run, bases.get(rows[name].run.world_size) or next(iter(bases.values())))
        for name in curves
        if bases and not rows[name].is_baseline
    }
    ends = {name: list(curve(rows[name].run).values())[-1] for name in curves}
    lines = [Series(name, "line", thin(its), f"ends at {ends[name]:.4f}") for name, its in curves.items()]
    panels = [Panel(lines, y="loss (nats per token)", height=3.4)] if lines else []
    caption = "The loss of each strategy, one line each (of repeats the first run)."
    if any(apart.values()):
        differences = [Series(name, "line", thin(points)) for name, points in apart.items() if points]
        panels.append(Panel(differences, y=f"|loss - {base}'s| /\n{base}'s", height=2.2, logarithmic=True))
        caption += f" Below, the relative difference of each from {base}, on a logarithmic axis."
    # Without points are those too that diverged, or share no iteration with it.
    if same := [name for name, points in apart.items() if not points and rows[name].parity.difference == 0]:
        caption += f" To the last logged digit, {', '.join(same)} agree{'s' * (len(same) == 1)} with {base}."
    return Figure("Loss", "iteration", caption, panels)


def _times(rows: Rows) -> Figure:
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
        for reason in [*dict.fromkeys(dropped.values()), ""]:
            own = thin([dot for dot in dots if dropped.get(dot[0], "") == reason], most)
            grey = (LEFT_OUT, f"left out for {reason}") if reason else ()
            found.append(Series(name, "dots", own, "", *grey))
    iterations, median = [x for entry in found for x, _ in entry.points], row.milliseconds.median
    line = [(min(iterations), median), (max(iterations), median)]
    return [Series(name, "line", line, f"{median:.4g} ms", INK), *found]
