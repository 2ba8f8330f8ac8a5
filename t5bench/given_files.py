"""JSON that a user, another program or a stranger gives. training_comparison reads files of any kind."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from t5bench import Problem
from training_comparison.given_files import read_file, read_text


def read_object(path: Path, remedy: str = "") -> dict[str, Any]:
    """A JSON object, read without packages. Raises Problem."""
    content = read_text(path, remedy)
    if not content.strip():
        raise Problem(f"{path} is empty", remedy)
    try:
        found = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} cannot be read: {error}", remedy) from error
    if not isinstance(found, dict):
        raise Problem(f"{path} cannot be read: it holds {type(found).__name__}, not an object", remedy)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def number_within(content: Any, name: str, least: float, most: float) -> float:
    """A field of a JSON object that is a number of this range. Raises ValueError."""
    value = content.get(name) if isinstance(content, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number of {least:g} to {most:g}, and is {value!r}")
    return float(value)


def read_json(path: Path, kind: Any, remedy: str = "") -> Any:
    """JSON of this type, such as a msgspec.Struct that states the types and ranges of its fields. Raises Problem."""
    import msgspec  # a launcher plans without packages

    content = read_file(path, remedy)
    if not content.strip():
        raise Problem(f"{path} is empty", remedy)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Problem(f"{path} cannot be read: {error}", remedy) from error


class Repetition(ValueError):
    """An object of JSON has the same name twice: which of the two values is meant, nobody can say."""


def without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object's entries, for json's object_pairs_hook. Raises Repetition."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Repetition(f'has "{twice}" twice')
    return entries
