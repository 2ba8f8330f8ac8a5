"""A figure of matplotlib as SVG: text is text, without prolog and metadata, with ids of its own and few decimals.

In a page, ink takes the page's colour, light or dark. A file stands alone, in colours that are readable on both.
"""

import contextlib
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure as Canvas

# matplotlib wants numbers, so each colour of the page's style sheet has one that stands in for it.
INK = "#010203"
GRID = "#040506"
PAPER = "#070809"
OF_THE_PAGE = {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--paper)"}
OF_A_FILE = {INK: "#7a808c", GRID: "#c3c7ce", PAPER: "none"}
_STYLE = {
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
    "legend.frameon": False,
}
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# What nothing uses: matplotlib's ids of groups, rotations by nothing, indentation.
_UNUSED = re.compile(r'(?<=<g) id="[^"]*"| transform="rotate\(-0 [^"]*"|(?<=\n) +')
_FONT = re.compile(r"font-family: [^;\"]*;? ?")  # matplotlib's face would differ from the page's
_TAG = re.compile(r"<[^>]+>")
_LATER_DECIMALS = re.compile(r"(\d\.\d)\d+")  # less than a tenth of a point cannot be seen
_ID = re.compile(r'(id="|href="#|url\(#)([^")]*)')


def for_page(draw: Callable[[], Canvas], prefix: str, mark: Callable[[str], str] = str) -> str:
    """SVG that is safe to put into a page. draw: makes the figure, in our style.

    prefix: what its ids begin with, which no other figure of the page has. mark: changes matplotlib's SVG while groups
    still have the ids that ``draw`` gave them.
    """
    svg = _FONT.sub("", _clean(mark(_saved(draw)), prefix))
    for stand_in, colour in OF_THE_PAGE.items():
        svg = svg.replace(stand_in, colour)
    return svg


def write(draw: Callable[[], Canvas], path: Path) -> None:
    """A file: our SVG, or what else matplotlib knows by the name's ending. Raises ValueError for an unknown one."""
    if path.suffix == ".svg":
        svg = _clean(_saved(draw), path.stem)
        for stand_in, colour in OF_A_FILE.items():
            svg = svg.replace(stand_in, colour)
        path.write_text(svg)
        return
    with _style(OF_A_FILE[INK], OF_A_FILE[GRID]):
        draw().savefig(path)


@contextlib.contextmanager
def _style(ink: str, grid: str) -> Iterator[None]:
    """Within this, figures are drawn in our style: a user's matplotlibrc would give a reader another picture."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | dict.fromkeys(_INKED, ink) | {"grid.color": grid})
        yield


def _saved(draw: Callable[[], Canvas]) -> str:
    buffer = io.StringIO()
    with _style(INK, GRID):
        draw().savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _clean(svg: str, prefix: str) -> str:
    svg = _with_own_ids(svg, prefix)
    svg = _TAG.sub(lambda tag: _LATER_DECIMALS.sub(r"\1", tag[0]), svg)
    return _UNUSED.sub("", svg)


def _with_own_ids(svg: str, prefix: str) -> str:
    """With ids numbered in the order of their use.

    matplotlib's are hashes of coordinates, whose last digits differ from process to process.
    """
    numbers = defaultdict(itertools.count().__next__)

    def renamed(match: re.Match) -> str:
        attribute, old_id = match.groups()
        return f"{attribute}{prefix}-{numbers[old_id]}"

    return _ID.sub(renamed, svg)
