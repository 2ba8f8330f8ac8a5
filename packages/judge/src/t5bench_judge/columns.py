"""What trainers call the step, the loss and the gradient norm, and which column of a log is which.

A name is taken where its words leave no doubt. Where two columns fit, a Problem lists them instead.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training_comparison.problem import Problem

Row = Mapping[str, Any]
# In the order in which they are taken: the trainer's own step before a logger's count of its lines.
STEPS = (
    "step", "iteration", "global_step", "train/global_step", "trainer/global_step", "train/step", "iter", "it",
    "current_step", "num_updates", "iter_num", "iteration_number", "optimizer_step", "opt_step", "update_step",
    "global_steps", "train_step", "training_step", "steps", "iters", "iterations", "_step", "batch", "update",
)  # fmt: skip
LOSS_WORDS = {"loss", "nll"}
BESIDE_LOSS = {
    "train", "training", "lm", "total", "mean", "avg", "average", "global", "reduced", "step", "batch", "ce", "cross",
    "entropy", "xent", "metrics", "metric", "model", "language", "loss", "nll", "current", "masked",
}  # fmt: skip
NORM_WORDS = {"norm", "gnorm", "gradnorm"}
OF_GRADIENTS = {"grad", "grads", "gradient", "gradients", "gnorm", "gradnorm", "total"}
BESIDE_NORM = {
    *NORM_WORDS, *OF_GRADIENTS, "train", "training", "global", "l2", "2", "0", "optim", "optimizer", "metrics",
    "metric", "model", "step", "before", "clip", "clipping", "unclipped", "raw", "preclip", "pre", "all", "mean",
}  # fmt: skip
# A line with one of these sums a training up.
SUMMARY = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
MANY = 2  # a column with so many times the values of another is the curve, and the other one is logged beside it
LISTED = 20


@dataclass(frozen=True)
class Names:
    """The names of columns that the user gave; "" where the file's own are to be recognized."""

    step: str = ""
    loss: str = ""
    norm: str = ""

    def has(self, name: str) -> bool:
        return plain(name) in {plain(given) for given in (self.step, self.loss, self.norm) if given}


def plain(name: str) -> str:
    return re.sub(r"[\s.:-]+", "_", name.strip().lower())


def _of_export(name: str) -> str:
    """W&B exports a column as 'run - metric', and its smallest and largest value beside it."""
    return "" if name.endswith(("__MIN", "__MAX")) else name.rpartition(" - ")[2]


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[/_\s()@]+", plain(_of_export(name))) if word]


def is_step(name: str) -> bool:
    return plain(_of_export(name)) in STEPS


def is_loss(name: str) -> bool:
    """Of the training: not an evaluation's, an auxiliary one's or a loss scale."""
    words = _words(name)
    is_named = bool(LOSS_WORDS & set(words)) or plain(name) in ("cross_entropy", "train/cross_entropy", "ce")
    return is_named and set(words) <= BESIDE_LOSS


def is_norm(name: str) -> bool:
    """Of the gradients, before clipping."""
    words = set(_words(name))
    is_named = words == {"norm"} or (bool(NORM_WORDS & words) and bool(OF_GRADIENTS & words))
    return is_named and words <= BESIDE_NORM


def is_known(name: str, names: Names) -> bool:
    return is_step(name) or is_loss(name) or is_norm(name) or names.has(name)


def sums_up(row: Row) -> bool:
    """Whether the row is no step's, but a summary of the training."""
    return any(plain(str(name)) in SUMMARY and number(value) is not None for name, value in row.items())


def columns_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows for column in row if column is not None))


def step_column(name: str, given: str, columns: Sequence[str]) -> str:
    """name: of the file, for messages. "" if the file has none. Raises Problem."""
    if given:
        return _given(name, given, columns)
    found = [column for column in columns if is_step(column)]
    return min(found, key=lambda column: STEPS.index(plain(_of_export(column))), default="")


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
