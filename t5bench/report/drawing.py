"""A figure of the page as SVG, by matplotlib: text is text, ink takes the page's colour, light or dark."""

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like, to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, NullFormatter

from t5bench.compare.comparison import Comparison
from t5bench.report.figures import GRID, INK, Figure, Panel, rows_of

_STAND_INS = {INK: "#010203", GRID: "#040506", "var(--paper)": "#070809"}  # matplotlib wants numbers
_INK, _GRID, _PAPER = _STAND_INS.values()
# A line tells the strategy by its dashes too.
_DASHES = (
    "-", (0, (6, 1.5)), (0, (4, 1.5)), (0, (2.5, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2, 1, 1.2)),
    (0, (6, 1.5, 1, 1.5)), (0, (2, 1.2, 1, 1.2)),
)  # fmt: skip
_STYLE = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK) | {
    "svg.fonttype": "none",
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
    "dots": {"linestyle": "", "marker": "o", "markersize": 4, "alpha": 0.8, "markeredgewidth": 0},
}
WIDTH = 7.0  # inches

Looks = Mapping[str, Mapping[str, Any]]


def colours(comparison: Comparison) -> dict[str, str]:
    """In CSS, by strategy, the baseline first; one that declares no colour has matplotlib's next."""
    strategies = {row.strategy: row.run.plan.strategy for row in comparison.rows}
    in_order = sorted(strategies.values(), key=lambda strategy: (strategy.name != comparison.baseline, strategy.port))
    found = {}
    for number, strategy in enumerate(in_order):
        colour = strategy.colour if is_color_like(strategy.colour) else f"C{number % 10}"
        found[strategy.name] = INK if strategy.colour == "ink" else to_hex(colour)
    return found


def drawings(comparison: Comparison, figures: list[Figure]) -> list[str]:
    """Safe to put into a page: without prolog and metadata, with ids that no other figure has."""
    colour = colours(comparison)
    dashes = dict(zip(colour, _DASHES * len(colour), strict=False))
    looks = {
        name: {"color": _STAND_INS.get(colour[row.strategy], colour[row.strategy]), "linestyle": dashes[row.strategy]}
        for name, row in rows_of(comparison).items()
    }
    found = []
    for figure in figures:
        name, buffer = figure.title.lower().replace(" ", "-"), io.StringIO()
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            _canvas(figure, looks).savefig(buffer, format="svg", transparent=True, metadata=metadata)
        text = buffer.getvalue()
        text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text[text.index("<svg") :])
        text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # matplotlib's face would differ from the page's
        for page_colour, stand_in in _STAND_INS.items():
            text = text.replace(stand_in, page_colour)
        found.append(text)
    return found


def _canvas(figure: Figure, looks: Looks) -> Canvas:
    panels, columns = figure.panels, min(figure.columns, len(figure.panels))
    legend = 0 if panels[0].names or figure.columns > 1 else len(panels[0].series)
    heights = [panel.height for panel in panels[::columns]]
    canvas = Canvas(figsize=(WIDTH, 0.6 + sum(heights) + 0.08 * legend), layout="constrained")
    axes = canvas.subplots(len(heights), columns, squeeze=False, sharex=figure.columns == 1, height_ratios=heights)
    for ax, panel in zip(axes.flat, panels, strict=False):
        _draw(ax, panel, looks)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=figure.x == "iteration"))
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    if panels[0].names:
        axes.flat[-1].set_xlim(0, 1.25 * max(ax.dataLim.x1 for ax in axes.flat))  # room for the texts
    if legend:
        canvas.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, handlelength=3.2)
    canvas.supxlabel(figure.x, fontsize=11)
    return canvas


def _draw(ax: Axes, panel: Panel, looks: Looks) -> None:
    for series in panel.series:
        look = dict(looks[series.row])
        look |= {"color": _STAND_INS.get(series.colour, series.colour)} if series.colour else {}
        if series.look in _BARS:
            for (start, end), name in series.points:
                ax.barh(name, end - start, left=start, color=look["color"], **_BARS[series.look])
        elif series.points:
            ax.plot(*zip(*series.points, strict=True), **look | _LINES[series.look], label=series.row)
        if panel.names and series.text:
            end = max(x[1] if series.look in _BARS else x for x, _ in series.points)
            ax.annotate(series.text, (end, series.row), (8, 0), textcoords="offset points", va="center")
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
        # Without mathematical text, which the page has no fonts for.
        ax.yaxis.set_major_formatter(lambda value, _position: f"{value:.0e}")
        ax.yaxis.set_minor_formatter(NullFormatter())
