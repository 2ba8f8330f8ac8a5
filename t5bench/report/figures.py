"""The page's figures, as SVG within the page: text is text, ink takes the page's colour, light or dark."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like, to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, NullFormatter

from t5bench.compare.comparison import Comparison
from t5bench.compare.rows import Measured, Row
from t5bench.record.records import Run
from t5bench.report.tables import mark, named_rows, short_labels

# Stand-ins that become the page's own colours; matplotlib wants numbers.
_INK, _GRID, _FAINT = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {_INK: "currentColor", _GRID: "var(--grid)", _FAINT: "var(--faint)"}

_METADATA = ("Creator", "Date", "Format", "Type")
_LEFT_OUT = "#888888"
# A line tells the strategy by its dashes too.
_DASHES = (
    "-", (0, (6, 1.5)), (0, (4, 1.5)), (0, (2.5, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2, 1, 1.2)),
    (0, (6, 1.5, 1, 1.5)), (0, (2, 1.2, 1, 1.2)),
)  # fmt: skip
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "legend.frameon": False,
}
WIDTH = 7.0  # inches
LONGEST_NAME = 24  # characters; the page's table tells what a short name stands for
MOST_POINTS = 400  # of one line; more cannot be seen and make the page heavy
MOST_PANELS = 16

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """svg: safe to put into the page; description: what a reader who does not see it hears; caption under it."""

    title: str
    description: str
    svg: str
    caption: str


def styles(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """How matplotlib draws each strategy, by its name; one that declares no colour has matplotlib's next."""
    strategies = {row.strategy: row.run.plan.strategy for row in comparison.rows}
    in_order = sorted(strategies.values(), key=lambda strategy: (strategy.name != comparison.baseline, strategy.port))
    found = {}
    for number, strategy in enumerate(in_order):
        colour = _INK if strategy.colour == "ink" else strategy.colour
        colour = to_hex(colour if is_color_like(colour) else f"C{number % 10}")
        found[strategy.name] = {"color": colour, "linestyle": _DASHES[number % len(_DASHES)]}
    return found


def page_colours(comparison: Comparison) -> dict[str, str]:
    """The same colours in CSS."""
    return {name: _PAGE_COLOURS.get(style["color"], style["color"]) for name, style in styles(comparison).items()}


def all_figures(comparison: Comparison) -> list[Figure]:
    """Those for which there is something measured."""
    with matplotlib.rc_context(_STYLE):
        on_gpu = dict.fromkeys(
            "GPU, allocated by PyTorch" if row.on_gpu else "host, resident set" for row in comparison.rows
        )
        found = [
            _by_row(
                comparison, "Throughput", "samples/s (more is better)", lambda row: row.samples_per_second, _draw_rate,
                "The medians with their 95 % confidence intervals; beside them the ratio to the baseline.",
            ),
            _by_row(
                comparison, "Memory", f"peak memory in MiB ({' / '.join(on_gpu)}; less is better)",
                lambda row: row.peak_memory, _draw_peaks,
                "The highest use of each rank, a dot for each. The fullest decides what fits.",
            ),
            _loss(comparison),
            _times(comparison),
        ]  # fmt: skip
    return [figure for figure in found if figure]


def _panels(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Canvas, Sequence[Axes]]:
    """height in inches."""
    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    return canvas, canvas.subplots(rows, columns, squeeze=False, **options).ravel()


def _svg(canvas: Canvas, name: str) -> str:
    """Without prolog and metadata, in the page's colours, with ids that no other figure has."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        canvas.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    text = buffer.getvalue()
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # matplotlib's face would differ from the page's
    for stand_in, colour in _PAGE_COLOURS.items():
        text = text.replace(stand_in, colour)
    return text


# ---- one line for each row -------------------------------------------------------------------------------------------


def _by_row(
    comparison: Comparison, title: str, unit: str, measured: Callable[[Row], Any],
    draw: Callable[[Axes, int, Row, str], tuple[str, float]], caption: str,
) -> Figure | None:  # fmt: skip
    """A panel for each number of processes. draw: gives the text that stands beside a row, and where it begins."""
    groups = [(group.world_size, [row for row in group.rows if measured(row)]) for group in comparison.groups]
    groups = [(size, rows) for size, rows in groups if rows]
    if not groups:
        return None
    style, short = styles(comparison), short_labels(comparison, LONGEST_NAME)
    sizes = [len(rows) for _, rows in groups]
    canvas, panels = _panels(
        0.6 + 0.42 * sum(sizes) + 0.5 * len(sizes), len(sizes), sharex=True, height_ratios=[s + 0.2 for s in sizes]
    )
    texts, ends = [], []
    for ax, (size, rows) in zip(panels, groups, strict=True):
        for position, row in enumerate(rows):
            text, end = draw(ax, position, row, style[row.strategy]["color"])
            ax.annotate(text, (end, position), xytext=(8, 0), textcoords="offset points", va="center")
            texts.append(f"{row.label} {text}")
            ends.append(end)
        ax.set_title(f"{size} processes")
        ax.set_yticks(range(len(rows)), [short.get(row.label, row.label) + mark(row) for row in rows])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x")
    panels[-1].set_xlim(0, 1.25 * max(ends))  # room for the texts
    panels[-1].set_xlabel(unit)
    return Figure(title, f"{unit}: {'; '.join(texts)}.", _svg(canvas, title.lower()), caption)


def _draw_rate(ax: Axes, position: int, row: Row, colour: str) -> tuple[str, float]:
    rate = row.samples_per_second
    ax.barh(position, rate.median, height=0.68, color=colour)
    if rate.low is not None:
        error = [[rate.median - rate.low], [rate.high - rate.median]]
        for ink, width, cap in ((_FAINT, 4, 0), (_INK, 1.4, 4)):
            ax.errorbar(rate.median, position, xerr=error, fmt="none", ecolor=ink, elinewidth=width, capsize=cap)
    ratio = f" ({row.ratio.median:.2f}x)" if row.ratio and not row.is_baseline else ""
    return f"{rate.median:.4g}{ratio}", rate.high or rate.median


def _draw_peaks(ax: Axes, position: int, row: Row, colour: str) -> tuple[str, float]:
    peaks = list(row.peak_memory.values())
    low, high = min(peaks), max(peaks)
    ax.hlines(position, 0, high, color=_GRID, linewidth=1.5)
    ax.plot(peaks, [position] * len(peaks), "o", color=colour, markersize=8, alpha=0.75, mew=0)
    return f"{high:,.0f}" if high - low < 0.5 else f"{low:,.0f} to {high:,.0f}", high


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
    found = [(line.iteration, getattr(line, name)) for line in run.iterations]
    return [(iteration, value) for iteration, value in found if value is not None and math.isfinite(value)]


def _apart(points: Points, reference: Points) -> Points:
    """How far the first lie from the others, relative; equal ones are left out, for the axis is logarithmic."""
    expected = dict(reference)
    shared = [(x, abs(y - expected[x]) / abs(expected[x])) for x, y in points if expected.get(x)]
    return [point for point in shared if point[1] > 0]


def _loss(comparison: Comparison) -> Figure | None:
    complete = [(name, row) for name, row in named_rows(comparison, LONGEST_NAME) if row.complete]
    rows = [(name, row, points) for name, row in complete if (points := series(row.run, "lm_loss"))]
    if not rows:
        return None
    base, style = comparison.baseline, styles(comparison)
    bases = {row.run.world_size: points for _, row, points in rows if row.is_baseline}
    apart = {
        name: _apart(points, bases.get(row.run.world_size) or next(iter(bases.values())))
        for name, row, points in rows
        if bases and not row.is_baseline
    }
    second = any(apart.values())
    height = (5.6 if second else 3.4) + 0.22 * math.ceil(len(rows) / 3)
    canvas, panels = _panels(height, 1 + second, sharex=True, height_ratios=[3, 2][: 1 + second])
    for name, row, points in rows:
        for ax, drawn in zip(panels, (points, apart.get(name)), strict=False):
            if drawn:
                ax.plot(*zip(*thin(drawn), strict=True), **style[row.strategy], linewidth=1.8, label=name)
    for ax in panels:
        ax.grid()
    panels[0].set_ylabel("loss (nats per token)")
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, handlelength=3.2)
    panels[-1].set_xlabel("iteration")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = "The loss of each strategy, one line each (of repeats the first run)."
    if second:
        panels[1].set_yscale("log")
        # Without mathematical text, which the page has no fonts for.
        panels[1].yaxis.set_major_formatter(lambda value, _position: f"{value:.0e}")
        panels[1].yaxis.set_minor_formatter(NullFormatter())
        panels[1].set_ylabel(f"|loss - {base}'s| /\n{base}'s")
        caption += f" Below, how far each lies from {base}, relative, on a logarithmic axis."
    if same := [name for name, points in apart.items() if not points]:
        caption += f" To the last digit that is logged, {', '.join(same)} cannot be told from {base}."
    ends = "; ".join(f"{name} ends at {row.final_loss:.4f}" for name, row, _ in rows)
    return Figure("Loss", f"Lines over the iterations: {ends}.", _svg(canvas, "loss"), caption)


def _times(comparison: Comparison) -> Figure | None:
    rows = [(name, row) for name, row in named_rows(comparison, LONGEST_NAME) if row.milliseconds]
    if not rows:
        return None
    shown, style = rows[:MOST_PANELS], styles(comparison)
    columns = min(2, len(shown))
    lines = math.ceil(len(shown) / columns)
    canvas, panels = _panels(0.6 + 1.55 * lines, lines, columns)
    for ax, (name, row) in zip(panels, shown, strict=False):
        for entry in row.measured:
            _draw_times(ax, entry, style[row.strategy]["color"], max(MOST_POINTS // len(row.measured), 20))
        time = row.milliseconds.median
        ax.axhline(time, color=_INK, linewidth=0.8, alpha=0.6, zorder=0.5)
        ax.set_title(f"{name}: {time:.4g} ms")
        ax.margins(y=0.12)
        ax.set_ylim(bottom=0)
        ax.grid(axis="y")
        ax.locator_params(axis="y", nbins=4)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for ax in panels[len(shown) :]:
        ax.remove()
    canvas.supxlabel("iteration", fontsize=11)
    canvas.supylabel("ms per iteration", fontsize=11)
    caption = "As it ran, one dot a log interval; grey: left out. The line is the median."
    if len(shown) < len(rows):
        caption += f" The first {len(shown)} of {len(rows)} rows."
    texts = "; ".join(f"{name} {row.milliseconds.median:.4g} ms" for name, row in shown)
    return Figure("Time per iteration", f"Dots over the iterations: {texts}.", _svg(canvas, "times"), caption)


def _draw_times(ax: Axes, entry: Measured, colour: str, most: int) -> None:
    """One run's dots, at most about this many, each of which the page has to draw."""
    dropped = entry.timing.dropped if entry.timing else {}
    dots = series(entry.run, "elapsed_ms")
    left_out, kept = ([dot for dot in dots if (dot[0] in dropped) == answer] for answer in (True, False))
    for points, own in ((left_out, _LEFT_OUT), (kept, colour)):
        if points:
            ax.plot(*zip(*thin(points, most), strict=True), "o", color=own, markersize=3.6, alpha=0.8, mew=0)
