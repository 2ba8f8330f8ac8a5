"""The order of a sweep's runs: what disturbs the machine should hit every strategy alike, whatever its rhythm.

Each repeat is a row of a Williams design (E. J. Williams, Australian Journal of Scientific Research A 2, 1949): a
Latin square in which, for an even number of strategies, each follows each other one exactly once. So no strategy comes
twice at the same place, and none always runs in the state in which the same other one left the machine. The square's
rows are taken some apart, so that two strategies change their distance from repeat to repeat: what recurs with any
period hits another one each time. docs/statistics.md has a simulation of this and other orders.
"""

from collections.abc import Sequence
from math import gcd
from typing import TypeVar

T = TypeVar("T")

# How many of the square's rows a repeat moves on, by the number of strategies. Chosen by
# python -m tests.compare.order_simulations --choose, for the worst of its disturbances in 3 and 5 repeats.
ROWS_APART = {3: 1, 4: 3, 5: 2, 6: 2, 7: 5, 8: 5, 9: 2, 10: 4}


def zigzag(count: int) -> list[int]:
    """0, 1, count - 1, 2, count - 2, ...: a Williams design's first row. Its steps differ, if the count is even."""
    row = [0]
    for step in range(1, count):
        row.append((step + 1) // 2 if step % 2 else count - step // 2)
    return row


def balanced_orders(rows: Sequence[T], repeats: int, apart: int = 0) -> list[list[T]]:
    """The rows of each repeat, in the order in which they run. The first repeat keeps the order that was given.

    apart: how many rows of the square a repeat moves on; 0: the best for this number of rows. More repeats only add
    to the order of fewer.
    """
    count = len(rows)
    if not count:
        return [[] for _ in range(repeats)]
    first = zigzag(count)
    place = {number: index for index, number in enumerate(first)}
    step = apart or ROWS_APART.get(count, 2)
    cycle = count // gcd(count, step)
    orders = []
    for repeat in range(repeats):
        shift = repeat * step + repeat // cycle  # so that all of the square's rows come before the first one again
        orders.append([rows[place[(number + shift) % count]] for number in first])
    return orders
