"""Statistics over repeated runs: the run is the unit, because runs differ more than the iterations within one.

The logarithms of the runs' median times are treated as normal, and speeds are compared by the ratios of consecutive
runs. docs/statistics.md has the method, its sources and how often it is wrong.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from t5bench.compare.interval import CONFIDENCE, student
from t5bench.compare.statistics import Estimate

FEWEST_REPEATS = 3
CONFIDENCE_OF_FASTEST = 0.96


class Repeat(NamedTuple):
    """One run: when it started, in seconds since 1970, its directory, its median throughput."""

    start: float
    place: str
    speed: float


def _student_interval(middle: float, logs: Sequence[float], confidence: float, more: float = 0.0) -> Estimate:
    """`middle` with the interval of exp(mean), from at least two logarithms; more: by how much to widen each half."""
    half = student(len(logs) - 1, confidence) * np.std(logs, ddof=1) / math.sqrt(len(logs)) + more
    low, high = np.exp(np.clip([fmean(logs) - half, fmean(logs) + half], -700, 700))  # a float's reach
    return Estimate(middle, min(float(low), middle), max(float(high), middle))


def of_repeats(runs: Sequence[Estimate]) -> Estimate:
    """The median of the runs' medians; its interval is over the repeats, or covers those of fewer than three runs."""
    middle = median(run.median for run in runs)
    if len(runs) >= FEWEST_REPEATS:
        return _student_interval(middle, [math.log(run.median) for run in runs], CONFIDENCE)
    if any(run.low is None for run in runs):
        return Estimate(middle)
    return Estimate(middle, min(run.low for run in runs), max(run.high for run in runs))


def pairs(first: Sequence[Repeat], second: Sequence[Repeat]) -> list[tuple[Repeat, Repeat]]:
    """Pairs of consecutive runs of the two, each run in at most one pair; for equal times the paths decide."""
    order = sorted([*((run, 0) for run in first), *((run, 1) for run in second)])
    found = []
    while len(order) > 1:
        (run, row), (after, its) = order[:2]
        if row != its:
            found.append((after, run) if row else (run, after))
        order = order[1 + (row != its) :]
    return found


def _trend(rows: Sequence[Sequence[Repeat]]) -> float:
    """The growth of the speed's logarithm per second, by least squares within each row."""
    apart = [(run.start - fmean(other.start for other in runs), math.log(run.speed)) for runs in rows for run in runs]
    squares = sum(time**2 for time, _ in apart)
    return sum(time * speed for time, speed in apart) / squares if squares else 0.0


def ratio(first: Sequence[Repeat], second: Sequence[Repeat], confidence: float = CONFIDENCE) -> Estimate:
    """The speed-up of the first over the second, with an interval if both have at least three interleaved repeats."""
    middle = median(run.speed for run in first) / median(run.speed for run in second)
    paired = pairs(first, second)
    if len(paired) < FEWEST_REPEATS:
        return Estimate(middle)
    logs = [math.log(own.speed / its.speed) for own, its in paired]
    apart = fmean(its.start - own.start for own, its in paired)
    return _student_interval(middle, logs, confidence, abs(_trend([first, second]) * apart))


def against_the_fastest(rows: Mapping[int, Sequence[Repeat]]) -> tuple[int, dict[int, Estimate]]:
    """The row with the highest median, and how many times faster it is than each other row, from second to last."""
    first, *others = sorted(rows, key=lambda row: -median(run.speed for run in rows[row]))
    return first, {row: ratio(rows[first], rows[row], CONFIDENCE_OF_FASTEST) for row in others}


def ran_in_one_order(rows: Sequence[Sequence[Repeat]]) -> bool:
    """Whether every repeat ran the rows in the same order, in which what recurs with that period hits one row alone."""
    repeated = [sorted(runs) for runs in rows if len(runs) >= FEWEST_REPEATS]
    if len(repeated) < 2:
        return False
    orders = set()
    for of_one_repeat in zip(*repeated, strict=False):
        order = sorted(range(len(repeated)), key=of_one_repeat.__getitem__)
        orders.add(tuple(order))
    return len(orders) == 1


def excludes_one(faster: Estimate) -> bool:
    return faster.low is not None and faster.low > 1
