"""Simulated machines, to measure what the intervals cover and how often a wrong row is called the fastest.

    python -m tests.compare.simulations [RUN ...]

prints the tables of docs/statistics.md; of run directories it takes windows.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from t5bench.compare.interval import interval
from t5bench.compare.repeats import Repeat, against_the_fastest, excludes_one, ratio
from t5bench.record.records import load
from t5bench.sweep.order import balanced_orders

CORRELATIONS, LENGTHS = (0.0, 0.2, 0.4, 0.6, 0.8), (20, 30, 50, 100, 200, 500, 1000)
# All of the logarithm of the time: sd of a random walk's step from run to run, of each run's own level, and of its
# iterations, whose lag-1 autocorrelation is 0.6; a steady trend from run to run; and a delay of one run in so many as
# there are strategies.
MACHINES = {
    "quiet": (0.002, 0.005, 0.05, 0.0),
    "busy": (0.01, 0.02, 0.2, 0.0),
    "drifting": (0.03, 0.005, 0.05, 0.0),
    "warming up": (0.002, 0.005, 0.05, 0.003),
    "periodic": (0.002, 0.005, 0.05, 0.0, 0.05),
}
# The relative times of eight strategies, in the order in which they run.
SWEEPS = {
    "all equal": (1, 1, 1, 1, 1, 1, 1, 1),
    "two equal, neighbours": (1, 1, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3),
    "two equal, first and last": (1, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 1),
    "small differences": (1, 1, 1.01, 1.01, 1.02, 1.05, 1.1, 1.2),
    "the first 1 % slower": (1.01, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3, 1),
}
ITERATIONS = 100


def autoregressive(rng: np.random.Generator, series: int, length: int, rho: float) -> np.ndarray:
    """Standard normal values with this lag-1 autocorrelation: [series, length]."""
    values = rng.standard_normal((length, series))
    for before, now in pairwise(values):
        now *= np.sqrt(1 - rho**2)
        now += rho * before
    return values.T


def ideal_width(length: int, rho: float) -> float:
    """Of the median's 95 % interval, were rho and the normal distribution known."""
    lags = np.arange(1, length)
    return 2 * 1.96 * np.sqrt((np.pi / 2 + 2 * ((1 - lags / length) * np.arcsin(rho**lags)).sum()) / length)


def coverage(values: np.ndarray, true: float) -> tuple[float, float, float]:
    """Of the intervals that are given: the share that holds the true median, the share given, the median width."""
    low, high = interval(values)
    given = ~np.isnan(low)
    if not given.any():
        return np.nan, 0.0, np.nan
    held = (low <= true) & (true <= high)
    return held[given].mean(), given.mean(), float(np.median((high - low)[given]))


def structures(rng: np.random.Generator, series: int, length: int) -> dict[str, tuple[np.ndarray, float]]:
    """Values unlike a normal autoregressive process of first order, and their median."""
    normal, noise = autoregressive(rng, series, length, 0.6), rng.standard_normal((series, length + 4))
    white = noise[:, 4:]
    return {
        "lognormal, rho 0.6": (np.exp(normal), 1.0),
        "heavy tails, rho 0.6": (np.sinh(2 * normal), 0.0),
        "rounded (ties), rho 0.6": (np.round(normal), 0.0),
        "one in 20 is 20 times as long": (np.exp(white) * np.where(rng.random(white.shape) < 0.05, 20, 1), 1.068),
        "moving average of 5": (np.lib.stride_tricks.sliding_window_view(noise, 5, axis=1).mean(axis=2), 0.0),
        "trend": (white + np.linspace(-2, 2, length), 0.0),
        "slow (rho 0.95) and white": (autoregressive(rng, series, length, 0.95) + white, 0.0),
    }


def sweep(
    rng: np.random.Generator, times: Sequence[float], rounds: int, machine: Sequence[float], *, fixed: bool = False
) -> list[list[Repeat]]:
    """The Repeats of each strategy in a sweep; fixed: in the same order in each repeat."""
    walk, level, within, trend, *delay = machine
    count, runs = len(times), len(times) * rounds
    state = np.cumsum(walk * rng.standard_normal(runs)) + trend * np.arange(runs) + level * rng.standard_normal(runs)
    state += np.median(within * autoregressive(rng, runs, ITERATIONS, 0.6), axis=1)
    if delay:
        state[rng.integers(count) :: count] += delay[0]
    orders = [list(range(count))] * rounds if fixed else balanced_orders(range(count), rounds)
    made: list[list[Repeat]] = [[] for _ in times]
    for run, strategy in enumerate(strategy for order in orders for strategy in order):
        made[strategy].append(Repeat(run, "", float(np.exp(-state[run])) / times[strategy]))
    return made


def excluded(
    count: int, rounds: int, machine: Sequence[float], sweeps: int, *, fixed: bool = False
) -> tuple[float, int]:
    """Of sweeps of so many equal rows: the share of the ratios to the first whose interval excludes 1, and in how many
    sweeps one of the rows is called the fastest."""
    rng = np.random.default_rng(5)
    wrong, named = 0, 0
    for _ in range(sweeps):
        rows = sweep(rng, [1.0] * count, rounds, machine, fixed=fixed)
        for row in rows[1:]:
            found = ratio(row, rows[0])
            wrong += found.low is not None and not found.low <= 1 <= found.high
        named += all(map(excludes_one, against_the_fastest(dict(enumerate(rows)))[1].values()))
    return wrong / sweeps / (count - 1), named


def answers(times: Sequence[float], rounds: int, machine: Sequence[float], sweeps: int) -> tuple[int, int]:
    """In how many sweeps a row is wrongly called the fastest (another is as fast), and in how many rightly."""
    rng, wrong, right = np.random.default_rng(12), 0, 0
    for _ in range(sweeps):
        first, ratios = against_the_fastest(dict(enumerate(sweep(rng, times, rounds, machine))))
        if all(map(excludes_one, ratios.values())):
            truth = times[first] < min(time for row, time in enumerate(times) if row != first)
            wrong, right = wrong + (not truth), right + truth
    return wrong, right


def table(title: str, names: Sequence[object], rows: dict[str, list[str]]) -> None:
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    print("\n".join(["", f"| {title} | {' | '.join(map(str, names))} |", "|---|" + "---:|" * len(names), *lines]))


def cell(values: np.ndarray, true: float, ideal: float | None = None) -> str:
    held, given, width = coverage(values, true)
    return (f"{held:.1%} ({given:.0%})" if given else "none") + (f" {width / ideal:.1f}" if ideal else "")


def main(directories: Sequence[str], series: int = 4000, sweeps: int = 1000) -> None:
    rng = np.random.default_rng(3)
    table("rho", LENGTHS, {
        f"{rho}": [cell(autoregressive(rng, series, n, rho), 0.0, ideal_width(n, rho)) for n in LENGTHS]
        for rho in (*CORRELATIONS, 0.9)
    })  # fmt: skip
    made = [structures(rng, series, n) for n in LENGTHS]
    table("values", LENGTHS, {name: [cell(*each[name]) for each in made] for name in made[0]})
    for directory in map(Path, directories):
        times = np.array([line.elapsed_ms for line in load(directory).iterations])[40:]
        lengths = [n for n in LENGTHS if 2 * n < len(times)]
        windows = [np.lib.stride_tricks.sliding_window_view(times, n)[:: n // 20] for n in lengths]
        table(directory.name, lengths, {"": [cell(own, float(np.median(times))) for own in windows]})
    for rounds in (3, 5):
        table(f"equal rows, {rounds} repeats", list(MACHINES), {
            order: [
                f"{share:.1%}, {named / sweeps:.1%}"
                for machine in MACHINES.values()
                for share, named in [excluded(8, rounds, machine, sweeps, fixed=order == "A B C A B C")]
            ]
            for order in ("A B C A B C", "balanced")
        })  # fmt: skip
        table(f"wrong, {rounds} repeats", list(MACHINES), {
            name: [str(answers(times, rounds, machine, sweeps)[0]) for machine in MACHINES.values()]
            for name, times in SWEEPS.items()
        })  # fmt: skip
        table(f"right, {rounds} repeats", list(MACHINES), {
            f"{slower:.0%} slower: {what}": [
                f"{answers((1, 1 + slower, *others), rounds, machine, sweeps)[1] / sweeps:.0%}"
                for machine in MACHINES.values()
            ]
            for slower in (0.05, 0.1, 0.2)
            for what, others in (("the next", [1.5] * 6), ("all seven", [1 + slower] * 6))
        })  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
