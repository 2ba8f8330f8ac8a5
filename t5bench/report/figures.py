"""What the page's figures show, by row, as data that any library can draw."""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec.structs import replace

from t5bench.compare.comparison import Comparison
from t5bench.compare.parity import curve, losses_beside
from t5bench.compare.rows import Row
from t5bench.profile.parts import PARTS, Profile, RankRecord, named
from t5bench.record.run import Run
from t5bench.report.tables import duration_text, is_on_loopback, mark, named_rows, predicted_bytes, profile_of
from t5bench.text import processes
from training_comparison.curves import relative_difference

INK = "currentColor"
GRID = "var(--grid)"
LEFT_OUT = "#888888"
# Of parts, which have the same in every row.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b9a400", LEFT_OUT, "#7766cc",
           "#44aa99", "#aa4466", "#a0783c", "#99bb55", "#446644", "#dd8899", "#5599aa", "#336688")  # fmt: skip
COLOUR_OF = dict(zip(PARTS, COLOURS, strict=True))
LONGEST_NAME = 24  # characters; the page's table tells what a short name stands for
MOST_POINTS = 400  # of one line; more cannot be seen and make the page heavy
MOST_DOTS = 160  # of one row
MOST_PANELS = 16
# Of the timeline; a stretch takes about 100 bytes, drawn and as data.
MOST_RANKS = 64
MOST_STEPS = 200
STRETCHES_OF_A_ROW = 100
# What the memory figure calls the cost model's components; all others are buffers.
KIND_OF_MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "encoder": "activations",
    "decoder": "activations",
    "ends of stacks": "activations",
    "logits and loss": "logits and loss",
}
BUFFERS = "buffers"

Point = tuple[float, float]
Points = Sequence[Point]
Rows = Mapping[str, Row]  # by the name that the figures have for a row


class Series(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that a figure shows of a row."""

    row: str
    look: str
    """"bar", "interval" (a thin bar), "stretch", "dots", "line", "point" (one, with its name) or "limit"."""
    points: Sequence[tuple[Any, Any]]
    """(x, y); of bars, intervals and stretches ((start, end), the name of their line)."""
    text: str = ""
    """The figure to take away."""
    colour: str = ""
    """If it is not the row's."""
    label: str = ""
    """What it is, where a row has several series."""


SeriesOf = Callable[[str, Row], Iterable[Series]]  # what a figure shows of a row with this name


class Panel(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pair of axes."""

    series: Sequence[Series]
    title: str = ""
    y: str = ""
    height: float = 0.0
    """In inches."""
    logarithmic: bool = False
    from_zero: bool = False
    most: float = 0.0
    """Where the x axis ends, whatever goes beyond."""

    @property
    def names(self) -> list[str]:
        """Of lines, where a row has one or some to itself."""
        names: list[str] = []
        for series in self.series:
            names += [y for _, y in series.points if isinstance(y, str)]
        return list(dict.fromkeys(names))


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Panels below each other share the x axis; in two columns each has its own."""

    title: str
    x: str
    """What the x axis shows, with its unit."""
    caption: str
    panels: Sequence[Panel]
    columns: int = 1

    @property
    def description(self) -> str:
        """What a reader who does not see it hears."""
        texts: list[str] = []
        for panel in self.panels:
            texts += [f"{series.row} {series.text}" for series in panel.series if series.text]
        return f"{self.title}, {self.x}: {'; '.join(texts)}."


def rows_of(comparison: Comparison) -> dict[str, Row]:
    """By the names that the figures have for them."""
    return dict(named_rows(comparison, LONGEST_NAME))


def best(rows: Rows, most: int) -> dict[str, Row]:
    """As many rows as this: of each strategy and number of processes the baseline and then the fastest."""

    def order(name: str) -> tuple[bool, float]:
        rate = rows[name].samples_per_second
        return not rows[name].is_baseline, -rate.median if rate else 0.0

    alike: dict[tuple[str, int], list[str]] = {}
    for name in sorted(rows, key=order):
        kind = (rows[name].strategy, rows[name].run.world_size)
        alike.setdefault(kind, []).append(name)
    # The first of each kind, then the second of each, and so on.
    in_turn: list[str] = []
    for names in zip_longest(*alike.values()):
        in_turn += [name for name in names if name]
    kept = in_turn[:most]
    return {name: row for name, row in rows.items() if name in kept}


def all_figures(comparison: Comparison, rows: Rows, most: int) -> list[Figure]:
    """Those for which something is measured; of what takes many points, only so many rows."""
    few_rows = best(rows, most)
    figures = [
        _throughput(rows),
        _pareto(rows),
        _memory(rows),
        _bytes(rows),
        _time(rows, comparison.predicted_by),
        _profile(few_rows),
        _timeline(few_rows, STRETCHES_OF_A_ROW * most),
        _loss(few_rows, comparison.baseline),
        _times(few_rows),
    ]
    return [figure for figure in figures if figure.panels]


# ---- one line for each row -------------------------------------------------------------------------------------------


def _panels(
    rows: Rows,
    series_of: SeriesOf,
    *,
    most: float = 0.0,
    line_height: float = 0.42,
) -> list[Panel]:
    """A panel for each number of processes with what the rows have. most: as of a Panel."""
    by_size: dict[int, list[Series]] = {}
    for name, row in rows.items():
        of_row = list(series_of(name, row))
        if of_row:
            by_size.setdefault(row.run.world_size, []).extend(of_row)
    panels = []
    for size, of_size in by_size.items():
        panel = Panel(of_size, processes(size), most=most)
        panels.append(replace(panel, height=0.5 + line_height * len(panel.names)))
    return panels


def _stacked(name: str, parts: Mapping[str, float]) -> Iterator[Series]:
    """Bars end to end; a part has its colour by its position among the parts."""
    start = 0.0
    for number, (part, size) in enumerate(parts.items()):
        end = start + size
        if size:
            colour = COLOURS[number % len(COLOURS)]
            yield Series(name, "bar", [((start, end), name)], colour=colour, label=named(part))
        start = end


def _predicted_and_measured(
    name: str, parts: Mapping[str, float], measured: float, error: float | None
) -> Iterator[Series]:
    """The predicted parts as a thick bar, what was measured as a thin one; nothing without a prediction.

    error: of the prediction, relative to what was measured; None if the two are not comparable.
    """
    if not sum(parts.values()):
        return
    number = f"{measured:,.0f}" if measured >= 100 else f"{measured:.3g}"
    text = number if error is None else f"{number} (predicted {error:+.0%})"
    yield from _stacked(name, parts)
    yield _thin_bar(name, measured, text)


def _thin_bar(name: str, measured: float, text: str = "") -> Series:
    return Series(name, "interval", [((0, measured), name)], text, INK, "measured")


def _throughput(rows: Rows) -> Figure:
    rates = [row.samples_per_second for row in rows.values() if row.samples_per_second]
    end = max((2 * rate.median for rate in rates), default=0.0)
    # An interval may have no end to speak of.
    is_cut = any(rate.high and rate.high > end for rate in rates)
    panels = _panels(rows, _throughput_of, most=float(end if is_cut else 0))
    caption = "Medians with 95 % confidence intervals, and the ratio to the baseline."
    return Figure("Throughput", "samples/s (more is better)", caption, panels)


def _throughput_of(name: str, row: Row) -> Iterator[Series]:
    rate = row.samples_per_second
    if not rate:
        return
    ratio = f" ({row.ratio.median:.2f}x)" if row.ratio and not row.is_baseline else ""
    text = f"{rate.median:.4g}{ratio}{mark(row)}"
    interval = (rate.low or rate.median, rate.high or rate.median)
    yield Series(name, "bar", [((0, rate.median), name)])
    yield Series(name, "interval", [(interval, name)], text, INK)


def _memory(rows: Rows) -> Figure:
    measures = []
    for row in rows.values():
        measures.append("GPU, allocated by PyTorch" if row.on_gpu else "host, resident set")
    x = f"peak memory in MiB ({' / '.join(dict.fromkeys(measures))}; less is better)"
    caption = "The peak of each rank, one dot each. The fullest rank decides what fits."
    if any(row.on_gpu and row.peak_memory and row.prediction for row in rows.values()):
        caption += " Thick bars: what the cost model predicts for it."
    return Figure("Memory", x, caption, _panels(rows, _memory_of))


def _memory_of(name: str, row: Row) -> Iterator[Series]:
    peaks = list(row.peak_memory.values())
    if not peaks:
        return
    if row.on_gpu and row.prediction:
        parts = dict.fromkeys([*KIND_OF_MEMORY.values(), BUFFERS], 0.0)
        for component, size in row.prediction.memory.components.items():
            kind = KIND_OF_MEMORY.get(component, BUFFERS)
            parts[kind] += size / 2**20
        yield from _stacked(name, parts)
        smallest = _smallest_device(row.run)
        limit = [(smallest, name)] if smallest else []
        yield Series(name, "limit", limit, "", INK, "the device's memory")
    low = min(peaks)
    high = max(peaks)
    text = f"{high:,.0f}" if high - low < 0.5 else f"{low:,.0f} to {high:,.0f}"
    yield _thin_bar(name, high)
    yield Series(name, "dots", [(peak, name) for peak in peaks], text, label="each rank")


def _smallest_device(run: Run) -> float | None:
    """Its memory in MiB; None if that of a device is not known."""
    sizes = []
    for node in run.nodes:
        sizes += [device.get("memory_mib") for device in node["devices"]]
    return min(sizes) if sizes and all(sizes) else None


def _bytes(rows: Rows) -> Figure:
    x = "MB that the busiest node sends per iteration (on one node: that its processes exchange)"
    caption = "Thick: predicted by the cost model; thin: measured."
    if any(is_on_loopback(row) for row in rows.values()):
        caption += " On one node the loopback was measured, which other programs use too."
    return Figure("Bytes, predicted and measured", x, caption, _panels(rows, _bytes_of))


def _bytes_of(name: str, row: Row) -> Iterator[Series]:
    prediction = predicted_bytes(row) if row.sent_per_iteration else None
    if prediction:
        parts = {"predicted": prediction.value / 1e6}
        yield from _predicted_and_measured(name, parts, row.sent_per_iteration / 1e6, prediction.error)


def _time(rows: Rows, predicted_by: Sequence[str]) -> Figure:
    """predicted_by: what predicted times are based on, a sentence each."""
    sentences = ["Thick: predicted by the cost model; thin: measured."]
    for text in predicted_by:
        sentences.append(f"{text[:1].upper()}{text[1:]}.")
    caption = " ".join(sentences)
    panels = _panels(rows, _time_of)
    return Figure("Time, predicted and measured", "ms of an iteration", caption, panels)


def _time_of(name: str, row: Row) -> Iterator[Series]:
    if row.predicted and row.milliseconds:
        parts = {part: 1000 * seconds for part, seconds in row.predicted.parts.items()}
        measured = row.milliseconds.median
        yield from _predicted_and_measured(name, parts, measured, sum(parts.values()) / measured - 1)


def _profile(rows: Rows) -> Figure:
    caption = "Mean of all ranks. The parts add up to the profiled iteration, which profiling slows down."
    panels = _panels(rows, _profile_of)
    return Figure("Where the time went", "ms of the profiled iteration", caption, panels)


def _profile_of(name: str, row: Row) -> Iterator[Series]:
    profile = profile_of(row)
    if profile:
        yield from _stacked(name, mean_parts(profile))


def mean_parts(profile: Profile) -> dict[str, float]:
    """Milliseconds of each part, the mean of all ranks."""
    means = {}
    for part in PARTS:
        total = sum(rank.parts.get(part, 0.0) for rank in profile.ranks)
        means[part] = total / len(profile.ranks)
    return means


def _timeline(rows: Rows, most: int) -> Figure:
    """most: how many stretches it has."""
    ranks_of: dict[str, list[RankRecord]] = {}
    for name, row in rows.items():
        profile = profile_of(row)
        ranks_of[name] = [rank for rank in profile.ranks if rank.timeline] if profile else []
    count = sum(len(ranks) for ranks in ranks_of.values())
    shown = min(count, MOST_RANKS)
    left = shown
    for name, ranks in ranks_of.items():
        ranks_of[name] = ranks[:left]
        left -= len(ranks_of[name])

    def stretches(name: str, _row: Row) -> Iterator[Series]:
        for rank in ranks_of[name]:
            steps = min(MOST_STEPS, most // shown)
            yield from _timeline_of(name, rank, steps)

    caption = "The profiled iteration of every rank, in coarse steps; trace.json in its directory has each operator."
    if shown < count:
        caption += f" The first {shown} of {count} ranks."
    panels = _panels(rows, stretches, line_height=0.25)
    return Figure("Timeline", "ms since the iteration began", caption, panels)


def _timeline_of(name: str, rank: RankRecord, steps: int) -> Iterator[Series]:
    """A rank's stretches, by part."""
    line = f"{name}: rank {rank.rank}"
    points: dict[str, list[tuple[Point, str]]] = {}
    for part, start, end in _stretches(rank, steps):
        points.setdefault(part, []).append(((start, end), line))
    for part, of_part in points.items():
        colour = COLOUR_OF.get(part, LEFT_OUT)
        yield Series(name, "stretch", of_part, colour=colour, label=named(part))


def _stretches(rank: RankRecord, steps: int) -> Iterator[tuple[str, float, float]]:
    """At most so many (part, start, end): what goes on in the middle of each step."""
    ends = [end for _, end in rank.timeline]
    step = ends[-1] / steps
    parts = []
    for number in range(steps):
        middle = (number + 0.5) * step
        part, _ = rank.timeline[bisect.bisect_left(ends, middle)]
        parts.append(part)
    start = 0.0
    for number, part in enumerate(parts, 1):
        is_last = number == steps
        if is_last or parts[number] != part:
            end = round(number * step, 3)
            yield part, start, end
            start = end


def _pareto(rows: Rows) -> Figure:
    by_size: dict[int, dict[str, Point]] = {}
    for name, row in rows.items():
        if row.samples_per_second and row.peak_memory:
            point = (max(row.peak_memory.values()), row.samples_per_second.median)
            by_size.setdefault(row.run.world_size, {})[name] = point
    panels = []
    for size, points in by_size.items():
        front = _pareto_front(list(points.values()))
        series = [Series("", "line", front, "", LEFT_OUT, "Pareto front")]
        for name, point in points.items():
            memory, rate = point
            text = f"{rate:.4g} samples/s in {memory:,.0f} MiB"
            series.append(Series(name, "point", [point], text))
        panels.append(Panel(series, processes(size), "samples/s", height=2.4))
    x = "peak memory of the fullest rank in MiB"
    caption = "Up and to the left is better. The line connects the Pareto-optimal rows."
    return Figure("Memory against throughput", x, caption, panels)


def _pareto_front(points: Points) -> Points:
    """Those (memory, rate) that no other beats in both, by memory."""
    front = []
    for point in points:
        memory, rate = point
        better = [other for other in points if other[0] <= memory and other[1] >= rate]
        if all(other == point for other in better):
            front.append(point)
    return sorted(front)


# ---- over the iterations ---------------------------------------------------------------------------------------------


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about this many points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    thinned: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        lowest = min(stretch, key=_height)
        highest = max(stretch, key=_height)
        thinned += sorted({lowest, highest})
    return thinned


def _height(point: Point) -> float:
    return point[1]


def series(run: Run, name: str) -> list[tuple[int, float]]:
    """The numbers of this name (a field of Iteration) by iteration; what is no number is left out."""
    values = curve(run, name)
    return [(iteration, value) for iteration, value in values.items() if math.isfinite(value)]


def _apart(run: Run, base: Run) -> Points:
    """How far its losses lie from the other's, relative; equal ones are left out, for the axis is logarithmic."""
    expected = dict(series(base, "lm_loss"))
    points = []
    for iteration, loss in losses_beside(run, base).items():
        base_loss = expected.get(iteration)
        if not base_loss:
            continue
        difference = relative_difference(loss, base_loss)
        if difference > 0:
            points.append((iteration, difference))
    return points


def _loss(rows: Rows, base: str) -> Figure:
    lines: list[Series] = []
    for name, row in rows.items():
        points = series(row.run, "lm_loss") if row.complete else []
        if points:
            last_loss = list(curve(row.run).values())[-1]
            lines.append(Series(name, "line", thin(points), f"ends at {last_loss:.4f}"))
    panels = [Panel(lines, y="loss (nats per token)", height=3.4)] if lines else []
    caption = "One line per strategy: its loss (with repeats, the first run's)."
    apart = _apart_from_baseline({line.row: rows[line.row] for line in lines})
    differences = [Series(name, "line", thin(points)) for name, points in apart.items() if points]
    if differences:
        y = f"|loss - {base}'s| /\n{base}'s"
        panels.append(Panel(differences, y=y, height=2.2, logarithmic=True))
        caption += f" Below, the relative difference of each from {base}, on a logarithmic axis."
    # Those that diverged, or share no iteration with the baseline, have no points either.
    identical = [name for name, points in apart.items() if not points and rows[name].parity.difference == 0]
    if identical:
        agree = "agrees" if len(identical) == 1 else "agree"
        caption += f" To the last logged digit, {', '.join(identical)} {agree} with {base}."
    return Figure("Loss", "iteration", caption, panels)


def _apart_from_baseline(rows: Rows) -> dict[str, Points]:
    """How far each row's losses lie from those of the baseline with as many processes, or else from any baseline's."""
    baselines: dict[int, Run] = {}
    for row in rows.values():
        if row.is_baseline:
            baselines[row.run.world_size] = row.run
    if not baselines:
        return {}
    any_baseline = next(iter(baselines.values()))
    apart = {}
    for name, row in rows.items():
        if not row.is_baseline:
            baseline = baselines.get(row.run.world_size, any_baseline)
            apart[name] = _apart(row.run, baseline)
    return apart


def _times(rows: Rows) -> Figure:
    timed = {name: row for name, row in rows.items() if row.milliseconds}
    panels = []
    for name, row in list(timed.items())[:MOST_PANELS]:
        title = f"{name}: {duration_text(row.milliseconds.median, 4)}"
        panels.append(Panel(_run_times(name, row), title, "ms", height=1.7, from_zero=True))
    caption = "One dot per log interval, in the order of the run (grey: left out). The line is the median."
    if len(panels) < len(timed):
        caption += f" The first {len(panels)} of {len(timed)} rows."
    return Figure("Time per iteration", "iteration", caption, panels, columns=2)


def _run_times(name: str, row: Row) -> list[Series]:
    """Of each run at most as many dots as the page can draw."""
    dots: list[Series] = []
    most = max(MOST_DOTS // len(row.measured), 10)
    for entry in row.measured:
        dropped = entry.timing.dropped if entry.timing else {}
        times = [(x, round(y, 3)) for x, y in series(entry.run, "elapsed_ms")]
        for reason in dict.fromkeys(dropped.values()):
            left_out = [(x, y) for x, y in times if dropped.get(x) == reason]
            label = f"left out for {reason}"
            dots.append(Series(name, "dots", thin(left_out, most), colour=LEFT_OUT, label=label))
        used = [(x, y) for x, y in times if x not in dropped]
        dots.append(Series(name, "dots", thin(used, most)))
    iterations: list[float] = []
    for drawn in dots:
        iterations += [x for x, _ in drawn.points]
    median = row.milliseconds.median
    line = [(min(iterations), median), (max(iterations), median)]
    return [Series(name, "line", line, duration_text(median, 4), INK), *dots]
