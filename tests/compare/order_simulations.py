"""Simulated sweeps of equal rows on disturbed machines, to choose the order of a sweep's runs.

python -m tests.compare.order_simulations            the tables of docs/statistics.md, in two minutes
python -m tests.compare.order_simulations --choose   by the number of rows, the steps in the square
"""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from t5bench.compare.interval import student
from t5bench.compare.repeats import Repeat, pairs
from t5bench.sweep.order import balanced_orders

Order = list[list[int]]
# Of the logarithm of the time. The machine of simulations.py that is called quiet: a random walk from run to run, and
# each run's own level, in which its iterations' noise is contained.
WALK, LEVEL = 0.002, 0.0095
SLOWER, MUCH_SLOWER = 0.05, 0.2
TREND = 0.003  # from run to run


def moved_on(places: int) -> Callable[[int, int], Order]:
    """An order in which each repeat begins so many rows later than the one before it."""

    def order(count: int, repeats: int) -> Order:
        return [[(row + repeat * places) % count for row in range(count)] for repeat in range(repeats)]

    return order


def reversed_in_turn(count: int, repeats: int) -> Order:
    return [list(range(count))[:: -1 if repeat % 2 else 1] for repeat in range(repeats)]


def drawn(count: int, repeats: int) -> Order:
    rng = np.random.default_rng(1)
    return [rng.permutation(count).tolist() for _ in range(repeats)]


def square(apart: int = 0) -> Callable[[int, int], Order]:
    return lambda count, repeats: balanced_orders(range(count), repeats, apart)


ORDERS: dict[str, Callable[[int, int], Order]] = {
    "one order": moved_on(0),
    "moved on by 1": moved_on(1),
    "moved on by 3": moved_on(3),
    "there and back": reversed_in_turn,
    "drawn": drawn,
    "Williams, 1 apart": square(1),
    "Williams, as chosen": square(),
}


def machines(order: Order, sweeps: int, seed: int = 1) -> dict[str, dict[str, np.ndarray]]:
    """The logarithm of each run's time, [sweeps, runs], by kind of disturbance and by its period."""
    rng = np.random.default_rng(seed)
    count = len(order[0])
    length = count * len(order)
    run = np.arange(length)
    follows = np.array([-1, *np.ravel(order)[:-1]])

    def quiet() -> np.ndarray:
        walk = np.cumsum(WALK * rng.standard_normal((sweeps, length)), axis=1)
        return walk + LEVEL * rng.standard_normal((sweeps, length))

    def phase(period: float) -> np.ndarray:
        return rng.uniform(0, period, (sweeps, 1)) if period % 1 else rng.integers(0, int(period), (sweeps, 1))

    periods = range(2, 2 * count + 2)
    kinds: dict[str, dict[str, np.ndarray]] = {name: {} for name in ("one run of each period", "half of each period")}
    kinds["a wave"] = {}
    for period in periods:
        one = (run - phase(period)) % period == 0
        kinds["one run of each period"][str(period)] = quiet() + SLOWER * one
        half = (run - phase(period)) % period < period / 2
        kinds["half of each period"][str(period)] = quiet() + SLOWER * half
        for length_of_wave in (period, period + 0.5):
            wave = np.sin(2 * np.pi * (run - phase(length_of_wave)) / length_of_wave)
            kinds["a wave"][str(length_of_wave)] = quiet() + SLOWER / 2 * wave
    kinds["the run after a certain row"] = {"": quiet() + SLOWER * (follows == rng.integers(0, count, (sweeps, 1)))}
    kinds["the first run of each repeat"] = {"": quiet() + SLOWER * (run % count == 0)}
    kinds["a trend"] = {"": quiet() + TREND * run}
    kinds["warming up"] = {"": quiet() + 0.1 * np.exp(-run / 5)}
    kinds["one run of all"] = {"": quiet() + MUCH_SLOWER * (run == rng.integers(0, length, (sweeps, 1)))}
    kinds["a step"] = {"": quiet() + 0.1 * (run >= rng.integers(0, length, (sweeps, 1)))}
    kinds["none"] = {"": quiet()}
    return kinds


def wrong(order: Order, times: np.ndarray) -> float:
    """The share of all ratios of two equal rows whose interval excludes 1, as t5bench.compare.repeats.ratio has it.

    times: the logarithm of each run's time, [sweeps, runs]. Many sweeps at once: one by one takes minutes.
    """
    in_turn = np.array(order).ravel()
    places = [np.flatnonzero(in_turn == row) for row in range(len(order[0]))]
    speeds = -times
    excluded = 0.0
    count = 0
    for first, second in combinations(places, 2):
        count += 1
        paired = pairs(*([Repeat(int(place), "", 1.0) for place in own] for own in (first, second)))
        if len(paired) < 3:
            continue
        before = [int(own.start) for own, _ in paired]
        after = [int(its.start) for _, its in paired]
        logs = speeds[:, before] - speeds[:, after]
        apart = [own - own.mean() for own in (first, second)]
        growth = sum(speeds[:, own] @ time for own, time in zip((first, second), apart, strict=True))
        growth = growth / sum(time @ time for time in apart)
        half = float(student(len(paired) - 1)) * logs.std(axis=1, ddof=1) / math.sqrt(len(paired))
        half += np.abs(growth * np.mean(np.subtract(after, before)))
        middle = np.median(speeds[:, first], axis=1) - np.median(speeds[:, second], axis=1)
        low = np.minimum(logs.mean(axis=1) - half, middle)
        high = np.maximum(logs.mean(axis=1) + half, middle)
        excluded += float(((low > 0) | (high < 0)).mean())
    return excluded / count


def worst(order: Order, sweeps: int) -> dict[str, tuple[float, str]]:
    """By kind of disturbance: the share of wrong ratios with its worst period, and that period."""
    return {
        kind: max((wrong(order, times), period) for period, times in by_period.items())
        for kind, by_period in machines(order, sweeps).items()
    }


def worst_of_all(order: Order, sweeps: int) -> float:
    return max(share for share, _ in worst(order, sweeps).values())


def table(title: str, names: Sequence[str], rows: dict[str, list[str]]) -> None:
    print(f"\n| {title} | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def main(sweeps: int = 400) -> None:
    for repeats in (3, 5):
        found = {name: worst(order(8, repeats), sweeps) for name, order in ORDERS.items()}
        cells: dict[str, list[str]] = {}
        for kind in found["one order"]:
            for name in ORDERS:
                share, period = found[name][kind]
                cells.setdefault(kind, []).append(f"{share:.1%} ({period})" if period else f"{share:.1%}")
        table(f"slower is, {repeats} repeats", list(ORDERS), cells)
    rows = {}
    for count in range(2, 11):
        rows[str(count)] = [
            f"{max(worst_of_all(order(count, repeats), sweeps // 4) for repeats in (3, 5)):.0%}"
            for order in ORDERS.values()
        ]
    table("rows", list(ORDERS), rows)


def choose(sweeps: int = 50) -> None:
    for count in range(3, 11):
        shares = []
        for apart in range(1, count):
            orders = [balanced_orders(range(count), repeats, apart) for repeats in (3, 5)]
            shares.append((max(worst_of_all(order, sweeps) for order in orders), apart))
        print(count, ", ".join(f"{apart}: {share:.1%}" for share, apart in sorted(shares)), flush=True)


if __name__ == "__main__":
    choose() if "--choose" in sys.argv else main()
