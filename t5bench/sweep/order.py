"""The order of a sweep's runs: no strategy may come at the same place of every repeat.

Something that recurs with the period of a sweep, such as a backup that starts every hour, would always hit the same
strategy if the order were A B C A B C. In Williams' design (Experimental designs balanced for the estimation of
residual effects of treatments, Australian Journal of Scientific Research A 2(2), 1949) each row comes once at every
place and, over all repeats, after every other row equally often.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def williams(count: int) -> list[list[int]]:
    """So many orders of so many rows; for an odd number of rows twice as many, of which the second half is mirrored."""
    zigzag = [0]
    for step in range(1, count):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % count)
    orders = [[(row + shift) % count for row in zigzag] for shift in range(count)]
    if count % 2:
        orders += [order[::-1] for order in orders]
    return orders


def rotated(count: int) -> list[list[int]]:
    return [[(row + shift) % count for row in range(count)] for shift in range(count)]


def in_turn(rows: Sequence[T], repeats: int) -> list[list[T]]:
    """The rows of each repeat, in the order in which they run. The first repeat keeps the order that was given."""
    orders = rotated(len(rows)) if rows else []
    return [[rows[row] for row in orders[repeat % len(orders)]] if orders else [] for repeat in range(repeats)]
