"""Whether the fastest row of a sweep is the fastest with another recipe, too: with dropout, clipping, precision.

A sweep that also shows equality trains without dropout. Its fastest rows run once more with the user's recipe, in a
folder of their own (RECIPE_RUNS) and by the same names.
"""

from collections.abc import Sequence
from typing import NamedTuple

from t5bench.compare.comparison import Comparison
from t5bench.compare.repeats import CONFIDENCE_OF_FASTEST, excludes_one, ratio
from t5bench.compare.rows import Row
from t5bench.compare.statistics import Estimate
from t5bench.record.settings import OWN_RECIPE

RECIPE_RUNS = ".recipe"  # in a sweep's directory; hidden, so that no comparison takes these runs for its own
MOST_ROWS = 3


class Pair(NamedTuple):
    """A row of the sweep, and the same one with the other recipe."""

    row: Row
    other: Row

    @property
    def milliseconds(self) -> float:
        """Of the sweep's row."""
        assert self.row.milliseconds
        return self.row.milliseconds.median


def fastest_rows(comparison: Comparison) -> list[Row]:
    """The fastest rows of the fastest row's number of processes, in the order of their times."""
    timed = sorted((row for row in comparison.rows if row.milliseconds), key=lambda row: row.milliseconds.median)
    alike = [row for row in timed if row.run.world_size == timed[0].run.world_size]
    return alike[:MOST_ROWS]


def pairs_of(comparison: Comparison, other: Comparison) -> list[Pair]:
    """The rows that both have, by the names of their runs, the sweep's fastest first."""
    by_name = {row.run.directory.name: row for row in other.rows if row.milliseconds}
    pairs = []
    for row in comparison.rows:
        name = row.run.directory.name
        if row.milliseconds and name in by_name:
            pairs.append(Pair(row, by_name[name]))
    return sorted(pairs, key=lambda pair: pair.milliseconds)


def sentence(comparison: Comparison, other: Comparison) -> str:
    """Whether the order holds; "" where the two have fewer than two rows in common."""
    first, *rest = pairs_of(comparison, other) or [None]
    if not first or not rest:
        return ""
    ratios = {pair.row.label: ratio(first.other.repeats, pair.other.repeats, CONFIDENCE_OF_FASTEST) for pair in rest}
    name = first.row.label
    if all(map(excludes_one, ratios.values())):
        answer = f"{name} is the fastest of these {len(ratios) + 1} rows, too"
    elif any(each.high is not None and each.high < 1 for each in ratios.values()):
        answer = f"{name} is not the fastest"
    else:
        answer = f"whether {name} is the fastest of these {len(ratios) + 1} rows is not clear"
    before = {pair.row.label: ratio(first.row.repeats, pair.row.repeats).median for pair in rest}
    speeds = [f"{_text(each)} the speed of {label} ({before[label]:.2f}x without)" for label, each in ratios.items()]
    return f"With {' '.join(_changed(first))} {answer}: {', '.join(speeds)}."


def _changed(pair: Pair) -> Sequence[str]:
    """The settings of the other recipe."""
    own = pair.row.run.plan
    plan = pair.other.run.plan
    changed = [name for name in OWN_RECIPE if plan.value(name) != own.value(name)]
    return [f"{name}={plan.value(name) or repr('')}" for name in changed] or ["the same recipe"]


def _text(faster: Estimate) -> str:
    if faster.low is None or faster.high is None:
        return f"{faster.median:.2f}x"
    return f"{faster.median:.2f}x [{faster.low:.2f}, {faster.high:.2f}]"
