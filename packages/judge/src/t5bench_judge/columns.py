"""Which column of a log is the step, which the loss and which the gradient norm.

A name is taken where its words leave no doubt (meanings.py). Where two columns fit, or none, a Problem says what is
there instead.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from t5bench_judge.meanings import (
    Meaning,
    is_before_clipping,
    is_loss,
    is_norm,
    is_part_of_loss,
    is_step,
    meaning_of,
    order_of_step,
    plain,
    says_sampling,
)
from training_comparison.problem import Problem

Row = Mapping[str, Any]
# A line with one of these sums a training up.
SUMMARY = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
MANY = 2  # a column with so many times the values of another is the curve, and the other one is logged beside it
LISTED = 20
LOG_THE_LOSS = "Log the mean loss of the tokens that a step trains on, with all digits"
OF_ONE_VALUE = {"value", "metric_value", "scalar", "scalar_value"}


@dataclass(frozen=True)
class Names:
    """The names of columns that the user gave; "" where the file's own are to be recognized."""

    step: str = ""
    loss: str = ""
    norm: str = ""

    def has(self, name: str) -> bool:
        return plain(name) in {plain(given) for given in (self.step, self.loss, self.norm) if given}


def is_known(name: str, names: Names) -> bool:
    """Whether a line that says it may be one of a step."""
    return is_step(name) or is_norm(name) or names.has(name) or meaning_of(name) != Meaning.OTHER


def sums_up(row: Row) -> bool:
    """Whether the row is no step's, but a summary of the training."""
    return any(plain(str(name)) in SUMMARY and number(value) is not None for name, value in row.items())


def columns_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows for column in row if column is not None))


def speaks_of_loss(columns: Collection[str], names: Names) -> bool:
    return any(names.has(column) or meaning_of(column) != Meaning.OTHER for column in columns)


# ---- which column ----------------------------------------------------------------------------------------------------


def step_column(name: str, given: str, columns: Sequence[str]) -> str:
    """name: of the file, for messages. "" if the file has none. Raises Problem."""
    if given:
        return _given(name, given, columns)
    return min((column for column in columns if is_step(column)), key=order_of_step, default="")


def loss_column(name: str, given: str, rows: Sequence[Row], notes: list[str]) -> str:
    """Raises Problem where no column is the training's loss, or more than one may be it."""
    found = value_column(name, "loss", given, rows, is_loss, notes)
    if found:
        return found
    found = value_column(name, "loss", "", rows, lambda column: meaning_of(column) == Meaning.UNKNOWN_LOSS, notes)
    if not found:
        raise _no_training_loss(name, columns_of(rows))
    notes.append(f"{name}: {found}, the only one that speaks of a training's loss, is read as the loss")
    return found


def norm_column(name: str, given: str, rows: Sequence[Row], notes: list[str]) -> str:
    """ "" if there is none. Raises Problem."""
    if any(is_norm(column) and is_before_clipping(column) for column in columns_of(rows)):
        return value_column(name, "norm", given, rows, lambda one: is_norm(one) and is_before_clipping(one), notes)
    return value_column(name, "norm", given, rows, is_norm, notes)


def value_column(
    name: str, what: str, given: str, rows: Sequence[Row], is_one: Callable[[str], bool], notes: list[str]
) -> str:
    """The column of the loss or the norm; "" if none is known. Raises Problem where choosing would be guessing."""
    columns = columns_of(rows)
    if given:
        return _given(name, given, columns)
    values = {}
    for column in columns:
        if is_one(column):
            numbers = {index: row[column] for index, row in enumerate(rows) if number(row.get(column)) is not None}
            if numbers:
                values[column] = numbers
    if not values:
        return ""
    most = max(values, key=lambda column: len(values[column]))
    whole = [column for column in values if not is_part_of_loss(column)]
    if what == "loss" and len(whole) == 1 < len(values) and len(values[whole[0]]) == len(values[most]):
        parts = in_words([column for column in values if column not in whole])
        notes.append(f"{name}: {whole[0]} is read as the loss, and not {parts}")
        return whole[0]
    for column, numbers in values.items():
        if column == most or all(values[most].get(index) == value for index, value in numbers.items()):
            continue
        is_beside = not numbers.keys() & values[most].keys() and MANY * len(numbers) <= len(values[most])
        if not is_beside:
            listed = ", ".join(values)
            raise Problem(f"{name} has several columns that may be the {what}: {listed}", f"Name one: --{what} NAME")
        notes.append(f"{name}: {most} is read as the {what}, and not {column}, which has {len(numbers)} values")
    return most


def _given(name: str, given: str, columns: Collection[str]) -> str:
    same = [column for column in columns if column == given] or [one for one in columns if plain(one) == plain(given)]
    if not same:
        raise Problem(f"{name} has no column {given}", f"It has: {in_words(columns)}")
    return same[0]


def _no_training_loss(name: str, columns: Collection[str]) -> Problem:
    """What is there instead, and what to log."""
    meanings: dict[Meaning, list[str]] = {}
    for column in columns:
        meaning = meaning_of(column)
        if meaning != Meaning.OTHER:
            meanings.setdefault(meaning, []).append(column)
    if not meanings:
        listed = in_words(columns)
        return Problem(f"{name} has no column that is called a loss", f"Name one with --loss: {listed}")
    said = "; ".join(f"{meaning.value} ({in_words(found)})" for meaning, found in meanings.items())
    first = next(iter(meanings.values()))[0]
    remedy = f"{LOG_THE_LOSS}; or compare what is there: --loss '{first}'"
    return Problem(f"{name} has no training loss, but {said}", remedy)


def note_of_sampling(name: str, columns: Collection[str]) -> str:
    """ "" unless the log is one of reinforcement learning."""
    sampled = [column for column in columns if says_sampling(column)]
    if not sampled:
        return ""
    return (
        f"{name} logs {sampled[0]}: a loss of reinforcement learning depends on what was sampled, so two trainings"
        " agree in it only if they sampled alike"
    )


# ---- a row for each value --------------------------------------------------------------------------------------------


def is_long(columns: Collection[str]) -> bool:
    """Whether a table may have a row for each value of each metric: its name, its step and its value."""
    return sum(plain(column) in OF_ONE_VALUE for column in columns) == 1


def by_step(rows: Sequence[Row]) -> Sequence[Row]:
    """Of such a table, a row for each step and metric with the metric's name as that of the column; others as they
    are."""
    columns = columns_of(rows)
    if not is_long(columns):
        return rows
    value = next(column for column in columns if plain(column) in OF_ONE_VALUE)
    naming = [column for column in columns if column != value and _names_a_loss(rows, column)]
    steps = [column for column in columns if is_step(column.rpartition("/")[2])]
    if len(naming) != 1 or not steps:
        return rows
    step = min(steps, key=lambda column: order_of_step(column.rpartition("/")[2]))
    return [{"step": row.get(step), str(row.get(naming[0])): row.get(value)} for row in rows]


def _names_a_loss(rows: Sequence[Row], column: str) -> bool:
    texts = {row[column] for row in rows if isinstance(row.get(column), str)}
    return any(number(text) is None and meaning_of(text) != Meaning.OTHER for text in texts)


# ---- words and numbers -----------------------------------------------------------------------------------------------


def in_words(columns: Collection[str]) -> str:
    shown = ", ".join(list(columns)[:LISTED])
    return f"{shown} and {len(columns) - LISTED} more" if len(columns) > LISTED else shown


def number(value: Any) -> float | None:
    """None where the row has no value."""
    if value is None or value == "" or isinstance(value, bool | list | dict):
        return None
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return None


def step_number(value: Any) -> int | None:
    """Also of 'step/steps', as some write it; None where the row has no step."""
    found = number(value.partition("/")[0] if isinstance(value, str) else value)
    if found is None or not math.isfinite(found):
        return None
    return round(found)
