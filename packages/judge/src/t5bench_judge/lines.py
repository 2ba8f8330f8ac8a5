"""Rows from text: tables of any delimiter, JSON in its usual shapes, and the lines that trainers print.

A row maps names to values, as they stand there.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5bench_judge.columns import SUMMARY, Names, Row, by_step, columns_of, is_known, is_long, number, speaks_of_loss
from t5bench_judge.meanings import KINDS, Meaning, is_loss, is_norm, is_step, meaning_of

COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
DELIMITERS = (",", "\t", ";", "|")
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
MOST_LINES_BEFORE = 50  # of a table
VALUE = re.compile(r"(?:^|[\s:=])[-+]?\d\S*$")
# A name of one or more words, a colon, an equals sign or a blank, and a number that no unit follows.
PAIR = re.compile(
    r"(?P<name>[A-Za-z_][\w/().@#-]*(?: [A-Za-z_(][\w/().@#-]*){0,5}?)(?:\s*[:=]\s*|\s+is\s+|\s+)\[?\s*"
    r"(?P<value>[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?))(?![\w.])",
    re.IGNORECASE,
)
# How far a training is, without a word for it: 12/100, or [12]. No date, and no part of a path.
COUNT = re.compile(
    r"(?<![\w./:-])(?P<slash>\d+)(?:\.\d+it)?\s*/\s*(?P<total>\d+)(?:it)?(?![\w./:-])|\[\s*(?P<bracket>\d+)\]"
)
BOXES = str.maketrans("│┃║", "|||")
NUMBERS = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf", re.IGNORECASE)


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


def json_after_words(text: str) -> list[Row]:
    """Of lines that end with a JSON object, behind what a logger or a container writes before it; [] if not all of
    those that have one do."""
    rows = []
    for line in text.splitlines():
        before, brace, rest = line.partition("{")
        if not (before.strip() and brace):
            continue
        try:
            rows += rows_of_value(json.loads(brace + rest))
        except (ValueError, RecursionError):
            return []
    return rows


def text_in(rows: Sequence[Row], names: Names) -> str:
    """The lines that a program printed, of JSON that a collector of logs put around each; "" if the JSON itself says a
    loss, or no text in it does."""
    names_of_columns = columns_of(rows)
    if speaks_of_loss(names_of_columns, names):
        return ""
    for column in names_of_columns:
        texts = [row[column] for row in rows if isinstance(row.get(column), str)]
        if any(speaks_of_loss(printed_row(text, names), names) for text in texts):
            return "\n".join(texts)
    return ""


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
    lines = [line for line in text.translate(BOXES).splitlines() if line.strip()]
    for at, line in enumerate(lines[:MOST_LINES_BEFORE]):
        for delimiter in (*DELIMITERS, ""):
            header = _cells(line.lstrip("# "), delimiter)
            if not is_header(header) or not (speaks_of_loss(header, names) or is_long(header)):
                continue
            rows = list(_rows_below(header, lines[at + 1 :], delimiter))
            if rows and speaks_of_loss(columns_of(by_step(rows)), names):
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
    lines = [line for line in text.splitlines() if not any(word in line for word in SUMMARY)]
    rows = [printed_row(line, names) for line in lines]
    says = [says_loss(row, names) for row in rows]
    if not any(says):
        says = [speaks_of_loss(row, names) for row in rows]
    with_loss = [row for row, does in zip(rows, says, strict=True) if does]
    if any(is_step(name) for row in with_loss for name in row):
        return with_loss
    steps = [row for row in rows if row and all(map(is_step, row))]
    if with_loss and len(steps) >= len(with_loss):
        return blocks(rows)
    return with_counts(with_loss, [line for line, does in zip(lines, says, strict=True) if does])


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


def with_counts(rows: Sequence[Row], lines: Sequence[str]) -> list[Row]:
    """Of lines without a word for the step: with the count in them that never falls, if there is one. A progress bar
    that was drawn again for the same count is one row."""
    counts = [
        [(match["slash"] or match["bracket"], match["total"]) for match in COUNT.finditer(line)] for line in lines
    ]
    for place in range(min(map(len, counts), default=0)):
        of_lines = [int(count[place][0]) for count in counts]
        totals = {count[place][1] for count in counts}
        if len(totals) == 1 and len(set(of_lines)) > 1 and of_lines == sorted(of_lines):
            return list(
                {count: dict(row) | {"step": count} for count, row in zip(of_lines, rows, strict=True)}.values()
            )
    return list(rows)


def printed_row(line: str, names: Names) -> dict[str, str]:
    """What a line says of a step, a loss or a norm, and of whatever the user named; the first of each name counts.

    {} for a line of an evaluation, whose word for it stands before a plain "loss".
    """
    row: dict[str, str] = {}
    text = line.replace('"', "").replace("'", "")
    before = 0
    for match in PAIR.finditer(text):
        name = known_end(match["name"], names)
        if name:
            unread = text[before : match.start()] + match["name"].removesuffix(name)
            if _is_evaluation(unread) and not any(map(is_loss, row)):
                return {}
            row.setdefault(name, match["value"].replace(",", ""))
        before = match.end()
    return row


def names_in(text: str) -> list[str]:
    """Whatever stands before a number in the first lines."""
    return list(dict.fromkeys(match["name"] for match in PAIR.finditer(text[:10_000])))


def _is_evaluation(text: str) -> bool:
    return any(word.strip("[]():|-").lower() in KINDS[Meaning.EVALUATION] for word in text.split())


def known_end(name: str, names: Names) -> str:
    """The longest end of a name that is known: 'INFO lm loss' ends with 'lm loss'; "" if none is."""
    words = name.split(" ")
    ends = [" ".join(words[start:]) for start in range(len(words))]
    if meaning_of(name) not in (Meaning.OTHER, Meaning.LOSS, Meaning.UNKNOWN_LOSS):
        ends = [end for end in ends if meaning_of(end) == meaning_of(name)][-1:]  # 'INFO eval loss' is no 'loss'
    for end in ends:
        if names.has(end) or is_step(end) or is_norm(end) or is_loss(end):
            return end
    return next((end for end in ends[::-1] if is_known(end, names)), "")


def is_numbers_alone(text: str) -> bool:
    """Whether each line has the same number of numbers, and no names."""
    lines = [re.split(r"[,;|\s]+", line.strip()) for line in text.splitlines() if line.strip()]
    are_numbers = all(NUMBERS.fullmatch(word) for line in lines for word in line)
    return are_numbers and len({len(line) for line in lines}) == 1
