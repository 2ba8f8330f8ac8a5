"""Rows from text: tables of any delimiter, JSON in its usual shapes, and the lines that trainers print.

A row maps names to values, as they stand there.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5bench_judge.columns import SUMMARY, Names, Row, is_loss, is_norm, is_step, number

COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
DELIMITERS = (",", "\t", ";", "|")
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
MOST_LINES_BEFORE = 50  # of a table
VALUE = re.compile(r"(?:^|[\s:=])[-+]?\d\S*$")
# A name of one or more words, a colon, an equals sign or a blank, and a number that no unit follows.
PAIR = re.compile(
    r"(?P<name>[A-Za-z_][\w/().@#-]*(?: [A-Za-z_(][\w/().@#-]*){0,5}?)(?:\s*[:=]\s*|\s+)\[?"
    r"(?P<value>[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?))(?![\w.])",
    re.IGNORECASE,
)
# Words with which a name is no training loss, wherever they stand.
OTHERS = {
    "val", "valid", "validation", "eval", "evaluation", "test", "dev", "aux", "auxiliary", "z", "kl", "best", "min",
    "max", "smoothed", "ema", "mtp", "router", "balancing", "balance", "no", "without",
}  # fmt: skip


def without_colours(text: str) -> str:
    """And with a line for each state of a progress bar."""
    return COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


# ---- JSON ------------------------------------------------------------------------------------------------------------


def json_rows(text: str) -> list[Row] | None:
    """The rows of a JSON document or of JSON lines; None if it is neither."""
    try:
        return rows_of_value(json.loads(text))
    except (ValueError, RecursionError):
        pass
    rows = []
    for line in text.splitlines():
        if line.strip().startswith("{"):
            try:
                rows += rows_of_value(json.loads(line))
            except (ValueError, RecursionError):
                continue  # a last line that was not written whole, or a line of Python's
    return rows or None


def rows_of_value(value: Any) -> list[Row]:
    """Of a decoded document: a list of rows, an object that holds one, columns, or a single row."""
    if isinstance(value, list):
        return [flat(row) for row in value if isinstance(row, dict)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        names = [str(name) for name in value["columns"]]
        return [dict(zip(names, row, strict=False)) for row in value["data"] if isinstance(row, list)]
    for content in value.values():
        if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
            return [flat(row) for row in content]
    columns = {name: content for name, content in flat(value).items() if isinstance(content, list)}
    if columns:
        length = max(map(len, columns.values()))
        whole = {name: content for name, content in columns.items() if len(content) == length}
        return [dict(zip(whole, row, strict=True)) for row in zip(*whole.values(), strict=True)]
    by_index = [content for content in value.values() if isinstance(content, dict)]
    if by_index and all(content and all(key.isdigit() for key in content) for content in by_index):
        indices = sorted({index for content in by_index for index in content}, key=int)
        named = {name: content for name, content in value.items() if isinstance(content, dict)}
        return [{name: content.get(index) for name, content in named.items()} for index in indices]
    return [flat(value)]


def flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A row in a row has its name before its columns' names, as in train/loss."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}/")
        else:
            found[f"{before}{name}"] = value
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_rows(text: str, names: Names) -> list[Row] | None:
    """The rows below a line of names; None if no line names a loss, with numbers below it."""
    lines = [line for line in text.splitlines() if line.strip()]
    for at, line in enumerate(lines[:MOST_LINES_BEFORE]):
        for delimiter in (*DELIMITERS, ""):
            header = _cells(line.lstrip("# "), delimiter)
            if is_header(header) and any(is_loss(cell) or names.has(cell) for cell in header):
                rows = list(_rows_below(header, lines[at + 1 :], delimiter))
                if rows:
                    return rows
    return None


def is_header(cells: Sequence[str]) -> bool:
    """Names alone, no values: neither '12.3' nor 'loss: 12.3'."""
    return len(cells) > 1 and not any(VALUE.search(cell) for cell in cells)


def _cells(line: str, delimiter: str) -> list[str]:
    """delimiter: "" for any number of blanks."""
    if not delimiter:
        return re.split(r"\s{2,}|\t", line.strip()) if re.search(r"\S\s{2,}\S", line) else line.split()
    cells = [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])]
    return [cell for cell in cells if cell] if delimiter == "|" else cells


def _rows_below(header: Sequence[str], lines: Sequence[str], delimiter: str) -> Iterator[Row]:
    if delimiter in ("", "|"):
        split = (_cells(line, delimiter) if delimiter else line.split() for line in lines)
    else:
        text = io.StringIO("\n".join(lines), newline="")
        split = ([cell.strip() for cell in cells] for cells in csv.reader(text, delimiter=delimiter))
    for cells in split:
        if len(cells) < 2 or len(cells) > len(header) or not any(number(_dot(cell)) is not None for cell in cells):
            continue
        values = cells if delimiter == "," else [_dot(cell) for cell in cells]
        yield dict(zip(header, values, strict=False))


def _dot(cell: str) -> str:
    return cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell


def likely_columns(text: str) -> list[str]:
    """The names of a table whose loss has another name; [] if it is no table."""
    lines = [line for line in text.splitlines() if line.strip()]
    for delimiter in DELIMITERS:
        counts = [len(_cells(line, delimiter)) for line in lines[:10]]
        if len(counts) > 1 and counts[0] > 1 and len(set(counts)) == 1:
            cells = _cells(lines[0].lstrip("# "), delimiter)
            if is_header(cells):
                return cells
    return []


# ---- what trainers print ---------------------------------------------------------------------------------------------


def printed_rows(text: str, names: Names) -> list[Row]:
    """A row for each line that says a loss, with its step and norm."""
    rows = [printed_row(line, names) for line in text.splitlines() if not any(word in line for word in SUMMARY)]
    with_loss = [row for row in rows if says_loss(row, names)]
    steps = [row for row in rows if row and all(map(is_step, row))]
    if any(is_step(name) for row in with_loss for name in row) or len(steps) < len(with_loss):
        return with_loss
    return blocks(rows)


def says_loss(row: Row, names: Names) -> bool:
    return any(is_loss(name) or (names.loss and names.has(name)) for name in row)


def blocks(rows: Sequence[Row]) -> list[Row]:
    """Of a trainer that prints a line for the step, and further lines for its values: a row for each step."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if row and all(map(is_step, row)):
            found.append({})
        if found:
            found[-1] = dict(row) | found[-1]
    return list(found)


def printed_row(line: str, names: Names) -> dict[str, str]:
    """What a line says of a step, a loss or a norm, and of whatever the user named; the first of each name counts."""
    row: dict[str, str] = {}
    for match in PAIR.finditer(line.replace('"', "").replace("'", "")):
        name = known_end(match["name"], names)
        if name:
            row.setdefault(name, match["value"].replace(",", ""))
    return row


def known_end(name: str, names: Names) -> str:
    """The longest end of a name that is known: 'INFO lm loss' ends with 'lm loss'; "" if none is."""
    words = name.split(" ")
    for start in range(len(words)):
        end = " ".join(words[start:])
        if names.has(end) or is_step(end):
            return end
        parts = {part for word in words for part in re.split(r"[/_.()-]+", word.lower())}
        if not parts & OTHERS and (is_loss(end) or is_norm(end)):
            return end
    return ""


def other_losses(text: str) -> list[str]:
    """Names with a number that speak of a loss, none of the training."""
    found = {}
    for match in PAIR.finditer(text[:100_000].replace('"', "").replace("'", "")):
        if "loss" in match["name"].lower():
            found[match["name"]] = None
    return list(found)
