"""What runs say of the memory that layouts have: those that ran, and those that ran out of it.

Each layout needs somewhat more or less than its prediction says (chance_to_fit in costmodel/memory.py), and all of them
share what is not known of the device and the software. A layout that ran out of memory is therefore knowledge of all
others: those that need as much will probably run out, too.
"""

from collections.abc import Sequence
from math import exp, log

from t5bench.costmodel.memory import HALF_RUN, STEEPNESS

SHARED = 0.10
"""The standard deviation of the logarithm of the memory at which half of the layouts run, where the device's size is
known."""
POINTS = 200
BELOW = 1.5
ABOVE = 0.5
"""How far from the largest need the memory may lie where its size is not known, as natural logarithms."""
CONTRADICTED = 1e-6
"""Runs that are as unlikely as that say that the device's size is not what layouts have."""


class Capacity:
    """The distribution of the memory, in bytes, at which half of the layouts that need as much run."""

    def __init__(self, size: int, ran: Sequence[float], ran_out: Sequence[float], least: float = 0.0) -> None:
        """size: of the device, 0 where it is not known. ran, ran_out: what layouts need as predicted, in bytes. least:
        what the smallest of all needs, which probably runs: nobody searches where nothing does."""
        self._points: list[tuple[float, float]] = []
        """(the logarithm of the memory, its probability); none where nothing is known."""
        if size:
            middle = log(HALF_RUN * size)
            prior = [(middle + SHARED * step, exp(-(step**2) / 2)) for step in _steps(-5.0, 5.0)]
            self._points = _learnt(prior, ran, ran_out)
        if ran_out and not self._points:  # or the size is not what layouts have: others use the device, too
            largest = log(max([*ran, *ran_out]))
            low = largest - BELOW
            if least:
                low = max(low, log(least) - SHARED)
            self._points = _learnt([(point, 1.0) for point in _steps(low, largest + ABOVE)], ran, ran_out)

    def chance(self, needed: float) -> float:
        """That a layout that needs so many bytes runs."""
        if not self._points or not needed:
            return 1.0
        return sum(weight * _chance(needed, point) for point, weight in self._points)


def _steps(low: float, high: float) -> list[float]:
    return [low + (high - low) * number / (POINTS - 1) for number in range(POINTS)]


def _learnt(
    prior: Sequence[tuple[float, float]], ran: Sequence[float], ran_out: Sequence[float]
) -> list[tuple[float, float]]:
    """The distribution after what ran and what did not, by Bayes' rule; nothing if both contradict it."""
    found = []
    for point, weight in prior:
        for needed in ran:
            weight *= _chance(needed, point)
        for needed in ran_out:
            weight *= 1 - _chance(needed, point)
        found.append((point, weight))
    total = sum(weight for _, weight in found)
    if total < CONTRADICTED * sum(weight for _, weight in prior):
        return []
    return [(point, weight / total) for point, weight in found]


def _chance(needed: float, logarithm: float) -> float:
    return 1 / (1 + exp(STEEPNESS * (log(needed) - logarithm)))
