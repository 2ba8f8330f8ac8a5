"""Tables of text for a terminal or for Markdown, of the standard library alone: whoever only asks installs nothing."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeAlias

Cell: TypeAlias = str | float | int | None

GAP = "  "
ROOM = 2  # a column is at least so much wider than its title


def table(rows: Sequence[Mapping[str, Cell]], digits: str | Mapping[str, str] = ".4g") -> str:
    """Rows with the same keys, which are the titles. Columns of numbers are aligned at the point.

    digits: how `format` writes a number that is not whole, perhaps by title.
    """
    titles = list(rows[0]) if rows else []
    columns = []
    for title in titles:
        of_title = digits if isinstance(digits, str) else digits.get(title, ".4g")
        columns.append(_column([row[title] for row in rows], of_title))
    alignment = ["right" if is_number else "left" for _, is_number in columns]
    cells = [list(row) for row in zip(*(column for column, _ in columns), strict=True)]
    return text_table(cells, titles, alignment)


def _column(values: Sequence[Cell], digits: str) -> tuple[list[str], bool]:
    """The cells' texts, and whether all are numbers; an empty cell is none or any."""
    present = [value for value in values if value not in (None, "")]
    if not present or any(isinstance(value, str) for value in present):
        return ["" if value is None else str(value) for value in values], False
    if all(isinstance(value, int) for value in present):
        return ["" if value in (None, "") else str(value) for value in values], True
    texts = ["" if value in (None, "") else format(value, digits) for value in values]
    after = [_behind_the_point(text) for text in texts]
    return [text + " " * (max(after) - count) for text, count in zip(texts, after, strict=True)], True


def _behind_the_point(number: str) -> int:
    """How many characters follow the digits of the whole part, with the point itself."""
    for mark in ".e":
        if mark in number:
            return len(number) - number.index(mark)
    return 0


def text_table(
    cells: Sequence[Sequence[object]],
    titles: Sequence[str] = (),
    alignment: Sequence[str] = (),
    is_markdown: bool = False,
) -> str:
    """Rows of cells, printed as they are, below their titles, which may have several lines.

    alignment: "left", "center" or "right", by column; left where nothing is said.
    """
    rows = [[str(cell) for cell in row] for row in cells]
    if not rows and not titles:
        return ""
    count = len(titles or rows[0])
    sides = [*alignment, *["left"] * (count - len(alignment))]
    heads = [title.split("\n") for title in titles]
    lines_of_titles = [list(line) for line in zip_longest(*heads, fillvalue="")]
    widths = [0] * count
    for line in lines_of_titles:
        widths = [max(width, len(text) + ROOM) for width, text in zip(widths, line, strict=True)]
    for row in rows:
        widths = [max(width, len(text)) for width, text in zip(widths, row, strict=True)]
    if is_markdown:
        return _markdown(lines_of_titles, rows, widths, sides)
    printed = [_line(line, widths, sides) for line in lines_of_titles]
    if titles:
        printed.append(GAP.join("-" * width for width in widths))
    printed += [_line(row, widths, sides) for row in rows]
    return "\n".join(printed)


def _line(texts: Sequence[str], widths: Sequence[int], sides: Sequence[str]) -> str:
    return GAP.join(_padded(*cell) for cell in zip(texts, widths, sides, strict=True)).rstrip()


def _markdown(
    titles: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], widths: Sequence[int], sides: Sequence[str]
) -> str:
    rules = {"left": ":{}-", "right": "-{}:", "center": ":{}:"}
    rule = "|".join(rules[side].format("-" * width) for width, side in zip(widths, sides, strict=True))
    lines = [" | ".join(_padded(*cell) for cell in zip(line, widths, sides, strict=True)) for line in [*titles, *rows]]
    written = [f"| {line} |" for line in lines]
    return "\n".join([*written[: len(titles)], f"|{rule}|", *written[len(titles) :]])


def _padded(text: str, width: int, side: str) -> str:
    if side == "right":
        return text.rjust(width)
    return f"{text:^{width}}" if side == "center" else text.ljust(width)
