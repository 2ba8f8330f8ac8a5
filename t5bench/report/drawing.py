"""A figure of the page as SVG, by matplotlib: text is text, ink takes the page's colour, light or dark."""

import io
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like, to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from t5bench.compare.comparison import Comparison
from t5bench.report.figures import GRID, INK, Figure, Panel, Series

_STAND_INS = {INK: "#010203", GRID: "#040506", "var(--paper)": "#070809"}  # matplotlib wants numbers
_INK, _GRID, _PAPER = _STAND_INS.values()
# A line tells the strategy by its dashes too.
_DASHES = ((), (6, 1.5), (4, 1.5), (2.5, 1.5), (1, 1.2), (4, 1.2, 1, 1.2, 1, 1.2), (6, 1.5, 1, 1.5), (2, 1.2, 1, 1.2))
_STYLE = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK) | {
    "svg.fonttype": "none",
    "path.simplify": False,
    "text.parse_math": False,
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "legend.frameon": False,
}
_BARS = {"bar": {"height": 0.68}, "interval": {"height": 0.14, "edgecolor": _PAPER, "linewidth": 0.8}}
_LINES = {
    "line": {"linewidth": 1.8},
    "stretch": {"linestyle": "-", "solid_capstyle": "butt", "linewidth": 10},
    "dots": {"linestyle": "-", "solid_capstyle": "round", "linewidth": 4},
    "point": {"linestyle": "", "marker": "o", "markersize": 8},
    "limit": {"linestyle": "", "marker": "|", "markersize": 16, "markeredgewidth": 3},
}
WIDTH = 7.0  # inches

Look = tuple[str, Sequence[float]]  # a colour in CSS and dashes
Looks = Mapping[str, Mapping[str, Any]]


def styles(comparison: Comparison) -> dict[str, Look]:
    """By strategy a colour in CSS, where none is declared matplotlib's next, and dashes; the baseline first."""
    strategies = {row.strategy: row.run.plan.strategy for row in comparison.rows}
    in_order = sorted(strategies.values(), key=lambda strategy: (strategy.name != comparison.baseline, strategy.port))
    found = {}
    for number, strategy in enumerate(in_order):
        colour = strategy.colour if is_color_like(strategy.colour) else f"C{number % 10}"
        found[strategy.name] = INK if strategy.colour == "ink" else to_hex(colour), _DASHES[number % len(_DASHES)]
    return found


def drawings(looks_of: Mapping[str, Look], figures: Sequence[Figure]) -> list[str]:
    """Safe to put into a page: without prolog and metadata, with ids that no other figure has. looks_of: by row."""
    looks = {}
    for name, (colour, dashes) in looks_of.items():
        looks[name] = {"color": _STAND_INS.get(colour, colour), "linestyle": (0, dashes) if dashes else "-"}
    found = []
    for number, figure in enumerate(figures):
        name, buffer = f"f{number}", io.StringIO()
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # a user's matplotlibrc would give a package's reader another page
            matplotlib.rcParams.update(_STYLE)
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            _canvas(figure, looks).savefig(buffer, format="svg", transparent=True, metadata=metadata)
        text = buffer.getvalue()
        text = _numbered(text[text.index("<svg") :], name)
        # Less than a tenth of a point cannot be seen.
        text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d)\d+", r"\1", tag[0]), text)
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # matplotlib's face would differ from the page's
        text = re.sub(r'(?<=<g) id="[^"]*"| transform="rotate\(-0 [^"]*"|(?<=\n) +', "", text)  # nothing uses these
        for page_colour, stand_in in _STAND_INS.items():
            text = text.replace(stand_in, page_colour)
        found.append(text)
    return found


def _numbered(svg: str, name: str) -> str:
    """With ids by the order of their use. matplotlib's are hashes of places, whose last digits differ from process to
    process."""
    numbers = defaultdict(itertools.count().__next__)
    return re.sub(r'(id="|href="#|url\(#)([^")]*)', lambda found: f"{found[1]}{name}-{numbers[found[2]]}", svg)


def _canvas(figure: Figure, looks: Looks) -> Canvas:
    panels, columns = figure.panels, min(figure.columns, len(figure.panels))
    heights = [panel.height for panel in panels[::columns]]
    labels = len({_label(panel, series) for panel in panels for series in panel.series} - {None}) * (columns == 1)
    canvas = Canvas(figsize=(WIDTH, 0.6 + sum(heights) + 0.08 * labels), layout="constrained")
    axes = canvas.subplots(len(heights), columns, squeeze=False, sharex=figure.columns == 1, height_ratios=heights)
    named = {}
    for ax, panel in zip(axes.flat, panels, strict=False):
        _draw(ax, panel, looks)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=figure.x == "iteration"))
        named |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    if panels[0].names:
        end = max(ax.dataLim.x1 for ax in axes.flat)
        axes.flat[-1].set_xlim(0, 1.25 * min(end, panels[0].most or end))  # room for the texts
    if labels:
        canvas.legend(named.values(), named, loc="outside upper left", ncols=3, handlelength=3.2)
    canvas.supxlabel(figure.x, fontsize=11)
    return canvas


def _label(panel: Panel, series: Series) -> str | None:
    """In the legend."""
    return series.label or (None if panel.names or series.look == "point" else series.row)


def _draw(ax: Axes, panel: Panel, looks: Looks) -> None:
    for series in panel.series:
        look = dict(looks.get(series.row, {})) | {"label": _label(panel, series)}
        if series.colour:
            look |= {"color": _STAND_INS.get(series.colour, series.colour), "linestyle": "-"}
        if series.look in _BARS:
            for (start, end), name in series.points:
                bar = {key: look[key] for key in ("color", "label")} | _BARS[series.look]
                ax.barh(name, min(end, panel.most or end) - start, left=start, **bar)
        elif series.points:
            points = series.points
            if series.look in ("dots", "stretch"):
                # Lines with gaps: of a dot without length, which takes a quarter of what SVG takes for a marker.
                spans = [(*(x if series.look == "stretch" else (x, x)), y) for x, y in points]
                points = [(at, y) for start, end, y in spans for at in (start, end, math.nan)]
            ax.plot(*zip(*points, strict=True), **look | _LINES[series.look])
        if panel.names and series.text:
            own = [
                x for each in panel.series if each.row == series.row and each.look != "limit" for x, _ in each.points
            ]
            end = min(panel.most or math.inf, max(x[1] if isinstance(x, Sequence) else x for x in own))
            ax.annotate(series.text, (end, series.row), (8, 0), textcoords="offset points", va="center")
        elif series.look == "point":
            ax.annotate(series.row, series.points[0], (8, 4), textcoords="offset points", fontsize=9)
    ax.set_title(panel.title)
    ax.set_ylabel(panel.y)
    if panel.names:
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    if panel.from_zero:
        ax.set_ylim(bottom=0)
    if panel.logarithmic:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
        # Without mathematical text, which the page has no fonts for.
        ax.yaxis.set_major_formatter(lambda value, _position: f"{value:.3g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
