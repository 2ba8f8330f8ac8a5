"""The order of a sweep's runs: no strategy may come at the same place of every repeat.

Something that recurs with the period of a sweep, such as a backup that starts every hour, would always hit the same
strategy if the order were A B C A B C. So each repeat begins one strategy later than the one before it: A B C B C A.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(rows: Sequence[T], repeats: int) -> list[list[T]]:
    """The rows of each repeat, in the order in which they run. The first repeat keeps the order that was given."""
    if not rows:
        return [[] for _ in range(repeats)]
    turns = []
    for repeat in range(repeats):
        first = repeat % len(rows)
        turns.append([*rows[first:], *rows[:first]])
    return turns
