"""The page's figures, as SVG within the page: text is text, ink takes the page's colour, light or dark."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, NullFormatter

from t5bench.compare.comparison import Comparison, Row
from t5bench.record.log import Iteration

# Stand-ins that become the page's own colours; matplotlib wants numbers.
_INK, _GRID, _FAINT = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {_INK: "currentColor", _GRID: "var(--grid)", _FAINT: "var(--faint)"}

# Okabe and Ito's palette, which colour-blind people can tell apart, its yellow darkened for white paper. The baseline
# is the page's ink.
COLOURS = {
    "ddp": _INK,
    "zero1": "#56b4e9",
    "zero2": "#0072b2",
    "zero3": "#009e73",
    "zero3_offload": "#b5a21e",
    "pipeline": "#d55e00",
    "tensor": "#e69f00",
    "hybrid": "#cc79a7",
}
OTHER_COLOUR = "#888888"
# A line tells the strategy by its dashes too.
_DASHES: Mapping[str, object] = {
    "ddp": "-",
    "zero1": (0, (6, 1.5)),
    "zero2": (0, (4, 1.5)),
    "zero3": (0, (2.5, 1.5)),
    "zero3_offload": (0, (1, 1.2)),
    "tensor": (0, (6, 1.5, 1, 1.5)),
    "pipeline": (0, (4, 1.2, 1, 1.2, 1, 1.2)),
    "hybrid": (0, (2, 1.2, 1, 1.2)),
}
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}
WIDTH = 9.2  # inches
MOST_POINTS = 400  # of one line; more cannot be seen and make the page heavy
MOST_PANELS = 16


@dataclass(frozen=True)
class Figure:
    """svg: safe to put into the page; description: what a reader who does not see it hears; caption under it."""

    title: str
    description: str
    svg: str
    caption: str = ""


def colour_of(row: Row) -> str:
    return COLOURS.get(row.strategy, OTHER_COLOUR)


def page_colour(row: Row) -> str:
    """The same as colour_of, in CSS."""
    return _PAGE_COLOURS.get(colour_of(row), colour_of(row))


def _svg(canvas: Canvas, name: str) -> str:
    """Without what a page must not have: the prolog, metadata, colours of a light page, ids that repeat."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        canvas.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', text, count=1
    )
    # HTML knows href without its namespace, and the ids of two figures must not meet.
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    # matplotlib's default face would differ from the page's.
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font: (?:bold|700) ([0-9.]+px)[^;\"]*", r"font-size: \1; font-weight: bold", text)
    for stand_in, colour in _PAGE_COLOURS.items():
        text = text.replace(stand_in, colour)
    return text.strip()


def all_figures(comparison: Comparison) -> list[Figure]:
    """Those for which there is something measured."""
    makers: Sequence[Callable[[Comparison], Figure | None]] = (_throughput, _memory, _loss, _times)
    with matplotlib.rc_context(_STYLE):
        return [figure for make in makers if (figure := make(comparison))]


def _throughput(comparison: Comparison) -> Figure | None:
    groups = [(group.world_size, [r for r in group.rows if r.samples_per_second]) for group in comparison.groups]
    groups = [(size, rows) for size, rows in groups if rows]
    count = sum(len(rows) for _, rows in groups)
    if not count:
        return None
    canvas = Canvas(figsize=(WIDTH, 1.1 + 0.42 * count + 0.5 * (len(groups) - 1)), layout="constrained")
    heights = [len(rows) + 0.2 for _, rows in groups]
    axes = canvas.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    texts = []
    for ax, (size, rows) in zip(axes, groups, strict=True):
        for position, row in enumerate(rows):
            rate = row.samples_per_second
            ax.barh(position, rate.median, height=0.68, color=colour_of(row))
            end = rate.median
            if rate.low is not None:
                error = [[rate.median - rate.low], [rate.high - rate.median]]
                ax.errorbar(
                    rate.median, position, xerr=error, fmt="none", ecolor=_FAINT, elinewidth=4, capsize=0, alpha=0.9
                )
                ax.errorbar(rate.median, position, xerr=error, fmt="none", ecolor=_INK, elinewidth=1.4, capsize=4)
                end = rate.high
            ratio = f" ({row.ratio.median:.2f}x)" if row.ratio and not row.is_baseline else ""
            ax.annotate(
                f"{rate.median:.4g}{ratio}", (end, position), xytext=(8, 0), textcoords="offset points", va="center"
            )
            texts.append(f"{row.label} {rate.median:.4g} samples per second")
        ax.set_yticks(range(len(rows)), [row.label + (" *" if row.marks else "") for row in rows])
        ax.invert_yaxis()
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x")
        ax.set_title(f"{size} processes", loc="left")
    # The panels share it; a fifth more than the longest bar, for the figures beside the bars.
    axes[-1].set_xlim(
        0, 1.2 * max(r.samples_per_second.high or r.samples_per_second.median for _, rows in groups for r in rows)
    )
    axes[-1].set_xlabel("samples/s (more is better)")
    return Figure(
        "Throughput",
        "Bars: " + "; ".join(texts) + ".",
        _svg(canvas, "throughput"),
        "The medians with their 95 % confidence intervals; beside them the ratio to the baseline.",
    )


def _memory(comparison: Comparison) -> Figure | None:
    rows = [row for row in comparison.rows if row.peak_memory]
    if not rows:
        return None
    canvas = Canvas(figsize=(WIDTH, 1.0 + 0.42 * len(rows)), layout="constrained")
    ax = canvas.subplots()
    texts = []
    for position, row in enumerate(rows):
        peaks = list(row.peak_memory.values())
        ax.hlines(position, 0, max(peaks), color=_GRID, linewidth=1.5)
        ax.plot(peaks, [position] * len(peaks), "o", color=colour_of(row), markersize=8, alpha=0.75, mew=0)
        spread = f"{max(peaks):,.0f}" if max(peaks) - min(peaks) < 0.5 else f"{min(peaks):,.0f} to {max(peaks):,.0f}"
        ax.annotate(spread, (max(peaks), position), xytext=(9, 0), textcoords="offset points", va="center")
        texts.append(f"{row.label} {spread} MiB over {len(peaks)} ranks")
    labels = [row.label if len(comparison.groups) == 1 else f"{row.label}, {row.run.world_size} proc." for row in rows]
    ax.set_yticks(range(len(rows)), labels)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    ax.margins(x=0.2)
    ax.set_xlim(left=0)
    kinds = dict.fromkeys("GPU, allocated by PyTorch" if row.on_gpu else "host, resident set" for row in rows)
    ax.set_xlabel(f"peak memory in MiB ({' / '.join(kinds)}; less is better)")
    return Figure(
        "Memory",
        "Dots: " + "; ".join(texts) + ".",
        _svg(canvas, "memory"),
        "The highest use of each rank, a dot for each. The fullest decides what fits.",
    )


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about this many points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _losses(lines: Sequence[Iteration]) -> list[tuple[float, float]]:
    return [
        (line.iteration, line.lm_loss) for line in lines if line.lm_loss is not None and math.isfinite(line.lm_loss)
    ]


def _draw(ax: Axes, row: Row, points: Sequence[tuple[float, float]], label: str = "") -> None:
    xs, ys = zip(*thin(points), strict=True)
    ax.plot(xs, ys, color=colour_of(row), linestyle=_DASHES.get(row.strategy, "-"), linewidth=1.8, label=label or None)


def _loss(comparison: Comparison) -> Figure | None:
    rows = [row for row in comparison.rows if row.complete and _losses(row.run.iterations)]
    if not rows:
        return None
    baselines = [row for row in rows if row.is_baseline]
    apart: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        own = [base for base in baselines if base.run.world_size == row.run.world_size] or baselines
        if own and not row.is_baseline:
            apart[id(row)] = _relative(row, dict(_losses(own[0].run.iterations)))
    second = any(apart.values())
    names = [row.label if len(comparison.groups) == 1 else f"{row.label}, {row.run.world_size} proc." for row in rows]
    legend_rows = math.ceil(len(rows) / 4)
    canvas = Canvas(figsize=(WIDTH, (5.6 if second else 3.4) + 0.22 * legend_rows), layout="constrained")
    panels = canvas.subplots(2 if second else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2][: 1 + second])[
        :, 0
    ]
    for row, name in zip(rows, names, strict=True):
        _draw(panels[0], row, _losses(row.run.iterations), name)
    panels[0].set_ylabel("loss (nats per token)")
    panels[0].grid()
    canvas.legend(loc="outside upper left", ncols=4, handlelength=3.2)
    if second:
        for row in rows:
            if points := apart.get(id(row)):
                _draw(panels[1], row, points)
        panels[1].set_yscale("log")
        # Without mathematical text, which the page has no fonts for.
        panels[1].yaxis.set_major_formatter(lambda value, _position: f"{value:.0e}")
        panels[1].yaxis.set_minor_formatter(NullFormatter())
        panels[1].set_ylabel(f"|loss - {comparison.baseline}'s| /\n{comparison.baseline}'s")
        panels[1].grid()
    panels[-1].set_xlabel("iteration")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    ends = "; ".join(f"{row.label} ends at {row.final_loss:.4f}" for row in rows if row.final_loss is not None)
    same = [row.label for row in rows if id(row) in apart and not apart[id(row)]]
    caption = "The loss of each strategy, one line each (of repeats the first run)."
    if second:
        caption += f" Below, how far each lies from {comparison.baseline}, relative, on a logarithmic axis."
    if same:
        caption += f" To the last digit that is logged, {', '.join(same)} cannot be told from {comparison.baseline}."
    return Figure("Loss", f"Lines over the iterations: {ends}.", _svg(canvas, "loss"), caption)


def _relative(row: Row, reference: Mapping[float, float]) -> list[tuple[float, float]]:
    """Relative differences that are not 0, which a logarithmic axis cannot show."""
    points = [
        (i, abs(loss - reference[i]) / abs(reference[i])) for i, loss in _losses(row.run.iterations) if reference.get(i)
    ]
    return [point for point in points if point[1] > 0]


def _times(comparison: Comparison) -> Figure | None:
    rows = [row for row in comparison.rows if row.milliseconds]
    if not rows:
        return None
    shown = rows[:MOST_PANELS]
    columns = 2 if len(shown) > 1 else 1
    lines = math.ceil(len(shown) / columns)
    canvas = Canvas(figsize=(WIDTH, 0.6 + 1.55 * lines), layout="constrained")
    panels = canvas.subplots(lines, columns, squeeze=False).ravel()
    for ax, row in zip(panels, shown, strict=False):
        for entry in row.measured:
            if not entry.timing:
                continue
            dropped = set(entry.timing.dropped)
            kept, grey = [], []
            for line in entry.run.iterations:
                if math.isfinite(line.elapsed_ms):
                    (grey if line.iteration in dropped else kept).append((line.iteration, line.elapsed_ms))
            # All repeats of a panel share its dots, each of which the page has to draw.
            most = max(MOST_POINTS // len(row.measured), 20)
            for points, colour in ((grey, OTHER_COLOUR), (kept, colour_of(row))):
                if points := thin(points, most):
                    ax.plot(*zip(*points, strict=True), "o", color=colour, markersize=3.6, alpha=0.8, mew=0)
        time = row.milliseconds
        ax.axhline(time.median, color=_INK, linewidth=0.8, alpha=0.6, zorder=0.5)
        title = row.label if len(comparison.groups) == 1 else f"{row.label}, {row.run.world_size} proc."
        ax.set_title(f"{title}: {time.median:.4g} ms", loc="left")
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
    texts = [f"{row.label} {row.milliseconds.median:.4g} ms" for row in shown]
    return Figure(
        "Time per iteration", "Dots over the iterations: " + "; ".join(texts) + ".", _svg(canvas, "times"), caption
    )
