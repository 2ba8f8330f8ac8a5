"""Which column of a source holds the text: asked, never guessed.

XSum calls it `document`, most others `text`. A file may have both, one of them a name or an id, or its text in a column
of another name beside them; then the user says which (TEXT_COLUMN). The first rows of a file decide, and every later
row must agree.
"""

import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from t5bench import Problem

# What this repository reads without being asked.
DEFAULT_NAMES = ("document", "text")
# What others call their text; beside one of DEFAULT_NAMES it may be what is meant.
OTHER_NAMES = {
    "article",
    "body",
    "content",
    "contents",
    "documents",
    "full_text",
    "page_content",
    "paragraph",
    "paragraphs",
    "passage",
    "raw_content",
    "raw_text",
    "sentence",
    "sentences",
    "story",
    "texts",
}
# A column of any other name may be what is meant if it holds so many times the characters.
MANY_TIMES = 2
SAMPLE_ROWS = 64
SHOWN_CHARACTERS = 40
# What a column holds that is not one text per row.
KINDS = {list: "lists", dict: "objects", bytes: "bytes", bool: "true and false", int: "numbers", float: "numbers"}


def text_column(rows: Sequence[Any], asked: str, source: str) -> str:
    """The column of the text, by the first rows of a file; "" if no row has one that is known.

    asked: the user's, "" without one. Raises Problem if more than one may be meant.
    """
    values = _values_by_column(rows)
    if asked:
        if values and asked not in values:
            found = f'{source} has no column "{asked}"; it has {", ".join(values)}'
            raise Problem(found, "Set TEXT_COLUMN to the one with the text")
        _check_kind(asked, values.get(asked, []), source)
        return asked
    known = [name for name in DEFAULT_NAMES if name in values]
    if not known:
        return ""
    chosen = next((name for name in known if _may_be_text(values[name])), known[0])
    others = [name for name in values if name != chosen and _rivals(name, values[name], values[chosen])]
    if not others:
        _check_kind(chosen, values[chosen], source)
    if others:
        raise Problem(
            f"{source} has {len(others) + 1} columns that may hold the text: "
            + ", ".join(_shown(name, values[name]) for name in (chosen, *others)),
            f"Name the one with the text: {setting(others[0])}, or {setting(chosen)}",
        )
    return chosen


def setting(column: str) -> str:
    """As one types it."""
    return f"TEXT_COLUMN={shlex.quote(column)}"


def other_text(row: Mapping[str, Any], column: str) -> str:
    """Another column of a known name in which a row has text; "" if none has."""
    others = (name for name in row if name != column and is_known(name) and _may_be_text([row[name]]))
    return next(others, "")


@lru_cache(maxsize=1 << 12)
def is_known(name: str) -> bool:
    """Whether a column of this name often holds the text: "Text" and " text" too."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    letters = "".join(character for character in plain if character.isalnum() or character == "_")
    return letters in DEFAULT_NAMES or letters in OTHER_NAMES


def _check_kind(name: str, values: Sequence[Any], source: str) -> None:
    """Raises Problem if a column has values, but no text among them."""
    kinds = {type(value) for value in values if value is not None}
    if kinds and not any(issubclass(kind, str) for kind in kinds) and not all(map(_is_nan, values)):
        first = next(value for value in values if value is not None)
        found = f'the column "{name}" of {source} holds {_kind(first)}, not texts'
        raise Problem(found, "Write it anew with one text per row, or name another column: TEXT_COLUMN")


def _kind(value: Any) -> str:
    return KINDS.get(type(value), type(value).__name__)


def _is_nan(value: Any) -> bool:
    """As pandas writes a text that is missing."""
    return isinstance(value, float) and value != value


def likely_column(row: Mapping[str, Any]) -> str:
    """The column with the most text in a row that has none of the known names; "" if none has any."""
    lengths = {name: _prose_length(value) for name, value in row.items() if isinstance(value, str)}
    best = max(lengths, key=lengths.__getitem__, default="")
    return best if lengths.get(best) else ""


def check_names(names: Sequence[str], asked: str, source: str) -> None:
    """Raises Problem if a table has a column twice that is read."""
    for name in (asked, *DEFAULT_NAMES, "summary", "id"):
        if name and names.count(name) > 1:
            raise Problem(
                f'{source} has {names.count(name)} columns called "{name}"',
                f'Write it anew with one of them, and without any other of the name "{name}"',
            )


def _values_by_column(rows: Sequence[Any]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for row in rows[:SAMPLE_ROWS]:
        if isinstance(row, Mapping):
            for name, value in row.items():
                values.setdefault(name, []).append(value)
    return values


def _may_be_text(values: Sequence[Any]) -> bool:
    """Whether any is a text that is not empty, or what a text may be wrapped in."""
    return any(isinstance(value, str | bytes | list | dict) and value for value in values)


def _rivals(name: str, values: Sequence[Any], chosen: Sequence[Any]) -> bool:
    is_prose = any(map(_prose_length, chosen))
    if is_known(name):
        return _may_be_text(values) or not is_prose
    length = sum(len(value) for value in chosen if isinstance(value, str))
    # Markup and code count where the other is a name or an id.
    lengths = (_prose_length(value) if is_prose else _length_of_words(value) for value in values)
    return sum(lengths) > MANY_TIMES * length


def _prose_length(value: Any) -> int:
    return sum(len(text) for text in _texts_in(value) if _is_prose(text))


def _length_of_words(value: Any) -> int:
    return sum(len(text) for text in _texts_in(value) if any(map(str.isspace, text)) or not text.isascii())


def _texts_in(value: Any) -> Iterator[str]:
    """The strings in a value; those of an object describe something, unless it is one of a list, as messages are."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Mapping):
                yield from (text for text in entry.values() if isinstance(text, str))
            else:
                yield from _texts_in(entry)


def _is_prose(text: str) -> bool:
    """Not a name, an address, a number or code of markup: several words, or the script of a language without blanks."""
    stripped = text.strip()
    if stripped[:1] in ("{", "<") or not stripped:
        return False
    return any(character.isspace() for character in stripped) or not stripped.isascii()


def _shown(name: str, values: Sequence[Any]) -> str:
    first = next((value for value in values if value), "")
    if not isinstance(first, str):
        return f'"{name}" ({_kind(first)})'
    if not first:
        return f'"{name}" (empty)'
    return f'"{name}" (it begins "{first_words(first)}")'


def first_words(text: str) -> str:
    """How a text begins, in one line."""
    line = " ".join(text[: 4 * SHOWN_CHARACTERS].split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS].rstrip()} ..."
