"""A figure of the page as SVG, by matplotlib: text is text, ink takes the page's colour, light or dark.

What belongs to a row has the row's name (data-row) and says as its title what it is.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import escape
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like, to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from t5bench.compare.comparison import Comparison
from t5bench.record.plan import Strategy
from t5bench.report import svg
from t5bench.report.figures import GRID, INK, Figure, Panel, Series
from t5bench.report.tables import significant

# matplotlib wants numbers, so the page's colours have some that stand in for them.
_STAND_INS = {INK: svg.INK, GRID: svg.GRID}
# A line tells the strategy by its dashes too.
_DASHES = (
    (),
    (6, 1.5),
    (4, 1.5),
    (2.5, 1.5),
    (1, 1.2),
    (4, 1.2, 1, 1.2, 1, 1.2),
    (6, 1.5, 1, 1.5),
    (2, 1.2, 1, 1.2),
)
_BARS = {
    "bar": {"height": 0.68},
    "interval": {"height": 0.14, "edgecolor": svg.PAPER, "linewidth": 0.8},
}
_LINES = {
    "line": {"linewidth": 1.8},
    "stretch": {"linestyle": "-", "solid_capstyle": "butt", "linewidth": 10},
    "dots": {"linestyle": "-", "solid_capstyle": "round", "linewidth": 4},
    "point": {"linestyle": "", "marker": "o", "markersize": 8},
    "limit": {"linestyle": "", "marker": "|", "markersize": 16, "markeredgewidth": 3},
}
WIDTH = 7.0  # inches

_MARK = re.compile(r'<g id="mark(\d+)">')


class Look(NamedTuple):
    """How the lines of a strategy look."""

    colour: str
    """In CSS."""
    dashes: Sequence[float]
    """Lengths of strokes and gaps in turn; a solid line has none."""


Looks = Mapping[str, Mapping[str, Any]]  # by row, in matplotlib's words


class Mark(NamedTuple):
    """What a group of the drawing is about."""

    row: str
    """"" if it is about all rows."""
    title: str = ""

    @property
    def tag(self) -> str:
        title = f"<title>{escape(self.title)}</title>" if self.title else ""
        return f'<g data-row="{escape(self.row)}">{title}'


def styles(comparison: Comparison) -> dict[str, Look]:
    """The look of each strategy, the baseline first. One without a declared colour gets matplotlib's next."""
    strategies = {row.strategy: row.run.plan.strategy for row in comparison.rows}

    def order(strategy: Strategy) -> tuple[bool, int]:
        return strategy.name != comparison.baseline, strategy.port

    looks = {}
    for number, strategy in enumerate(sorted(strategies.values(), key=order)):
        if strategy.colour == "ink":
            colour = INK
        elif is_color_like(strategy.colour):
            colour = to_hex(strategy.colour)
        else:
            colour = to_hex(f"C{number % 10}")
        looks[strategy.name] = Look(colour, _DASHES[number % len(_DASHES)])
    return looks


def drawings(looks_of: Mapping[str, Look], figures: Sequence[Figure]) -> list[str]:
    """The figures as SVG that is safe to put into a page: no prolog, no metadata, and ids that no other figure has.

    looks_of: the look of each row.
    """
    looks = {}
    for name, look in looks_of.items():
        looks[name] = {
            "color": _STAND_INS.get(look.colour, look.colour),
            "linestyle": (0, look.dashes) if look.dashes else "-",
        }
    return [_svg(figure, looks, f"f{number}") for number, figure in enumerate(figures)]


def _svg(figure: Figure, looks: Looks, prefix: str) -> str:
    """A figure as SVG. prefix: what its ids begin with."""
    marks: list[Mark] = []

    def with_marks(text: str) -> str:
        return _MARK.sub(lambda group: marks[int(group[1])].tag, text)

    return svg.for_page(lambda: _canvas(figure, looks, marks), prefix, with_marks)


def _canvas(figure: Figure, looks: Looks, marks: list[Mark]) -> Canvas:
    """marks: gets what each group that has the id of a mark is about."""
    panels = figure.panels
    columns = min(figure.columns, len(panels))
    heights = [panel.height for panel in panels[::columns]]
    # In several columns each panel has one row, which its title names.
    labels = _legend_labels(panels) if columns == 1 else set()
    height = 0.6 + sum(heights) + 0.08 * len(labels)
    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    axes = canvas.subplots(
        len(heights),
        columns,
        squeeze=False,
        sharex=figure.columns == 1,
        height_ratios=heights,
    )
    handle_of_label: dict[str, Artist] = {}
    for ax, panel in zip(axes.flat, panels, strict=False):
        rows = {series.row for series in panel.series}
        if figure.columns > 1 and len(rows) == 1:
            _mark(ax, Mark(rows.pop()), marks)
        _draw(ax, panel, looks, marks)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=figure.x == "iteration"))
        panel_handles, panel_labels = ax.get_legend_handles_labels()
        handle_of_label |= dict(zip(panel_labels, panel_handles, strict=True))
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    if panels[0].names:
        end = max(ax.dataLim.x1 for ax in axes.flat)
        room_for_texts = 1.25
        axes.flat[-1].set_xlim(0, room_for_texts * min(end, panels[0].most or end))
    if labels:
        canvas.legend(
            handle_of_label.values(),
            handle_of_label,
            loc="outside upper left",
            ncols=3,
            handlelength=3.2,
        )
    canvas.supxlabel(figure.x, fontsize=11)
    return canvas


def _label(panel: Panel, series: Series) -> str | None:
    """The series' name in the legend."""
    if series.label:
        return series.label
    # What the axis or the drawing names needs no entry in a legend.
    return None if panel.names or series.look == "point" else series.row


def _legend_labels(panels: Sequence[Panel]) -> set[str]:
    labels = set()
    for panel in panels:
        labels |= {_label(panel, series) for series in panel.series}
    return labels - {None}


def _mark(artist: Artist, mark: Mark, marks: list[Mark]) -> None:
    artist.set_gid(f"mark{len(marks)}")
    marks.append(mark)


def _title(series: Series, point: tuple[Any, Any] | None = None) -> str:
    """What a reader who points at it is told. point: of a bar."""
    if point is None:
        value = series.text
    else:
        start, end = point[0]
        size = end - start if series.look == "bar" else end
        value = significant(size)
        if series.look == "interval" and start:
            value = f"{significant(start)} to {significant(end)}"
    return ": ".join(filter(None, dict.fromkeys([series.row, series.label, value])))


def _draw(ax: Axes, panel: Panel, looks: Looks, marks: list[Mark]) -> None:
    for series in panel.series:
        look = dict(looks.get(series.row, {})) | {"label": _label(panel, series)}
        if series.colour:
            look["color"] = _STAND_INS.get(series.colour, series.colour)
            look["linestyle"] = "-"
        if series.look in _BARS:
            _draw_bars(ax, series, look, panel.most or math.inf, marks)
        elif series.points:
            points = _with_gaps(series)
            (line,) = ax.plot(*zip(*points, strict=True), **look | _LINES[series.look])
            _mark(line, Mark(series.row, _title(series)), marks)
        _annotate(ax, panel, series, marks)
    ax.set_title(panel.title)
    ax.set_ylabel(panel.y)
    _shape_axes(ax, panel)
    _mark_names(ax, panel, marks)


def _mark_names(ax: Axes, panel: Panel, marks: list[Mark]) -> None:
    """The names at the axis belong to their rows."""
    row_of: dict[str, str] = {}
    for series in panel.series:
        row_of |= {name: series.row for _, name in series.points if isinstance(name, str)}
    if row_of:
        ax.set_yticks(range(len(panel.names)), panel.names)
        for label in ax.get_yticklabels():
            _mark(label, Mark(row_of[label.get_text()]), marks)


def _draw_bars(ax: Axes, series: Series, look: Mapping[str, Any], most: float, marks: list[Mark]) -> None:
    bar = {"color": look["color"], "label": look["label"]} | _BARS[series.look]
    for (start, end), name in series.points:
        (patch,) = ax.barh(name, min(end, most) - start, left=start, **bar)
        _mark(patch, Mark(series.row, _title(series, ((start, end), name))), marks)


def _with_gaps(series: Series) -> Sequence[tuple[Any, Any]]:
    """Stretches and dots as one line with gaps; a dot is a stretch without length.

    That takes a quarter of the space that SVG needs for markers.
    """
    if series.look not in ("dots", "stretch"):
        return series.points
    points = []
    for x, y in series.points:
        start, end = x if series.look == "stretch" else (x, x)
        points += [(start, y), (end, y), (math.nan, y)]
    return points


def _annotate(ax: Axes, panel: Panel, series: Series, marks: list[Mark]) -> None:
    """The figure to take away, behind the last of what the row has; a point has its row's name."""
    if panel.names and series.text:
        end = min(panel.most or math.inf, _end_of_row(panel, series.row))
        place = {"xytext": (8, 0), "textcoords": "offset points"}
        text = ax.annotate(series.text, (end, series.row), **place, va="center")
        _mark(text, Mark(series.row), marks)
    elif series.look == "point":
        place = {"xytext": (8, 4), "textcoords": "offset points"}
        text = ax.annotate(series.row, series.points[0], **place, fontsize=9)
        _mark(text, Mark(series.row), marks)


def _end_of_row(panel: Panel, row: str) -> float:
    """Where the last bar or dot of a row ends; a limit is farther out and may be."""
    ends = []
    for series in panel.series:
        if series.row == row and series.look != "limit":
            ends += [x[1] if isinstance(x, Sequence) else x for x, _ in series.points]
    return max(ends)


def _shape_axes(ax: Axes, panel: Panel) -> None:
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
