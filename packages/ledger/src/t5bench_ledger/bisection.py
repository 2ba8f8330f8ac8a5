"""Which release to try next, so that each boundary of a fault lies between neighbours."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from packaging.version import Version

from t5bench_ledger.judge import WRONG
from t5bench_ledger.spans import between

# Differences of one fault vary with what else a release changed, by less than this factor.
ALIKE = 1.5


class Tried(Protocol):
    """A cell's verdict."""

    @property
    def release(self) -> str: ...
    @property
    def strategy(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def times(self) -> float | None: ...


def next_releases(cells: Iterable[Tried], library: str) -> dict[str, list[tuple[str, str]]]:
    """By release the strategies and modes to try: the middle of what nobody tried between two unlike verdicts.

    Empty when every boundary lies between neighbours. cells: of this library alone.
    """
    ways: dict[tuple[str, str], list[Tried]] = {}
    for cell in cells:
        ways.setdefault((cell.strategy, cell.mode), []).append(cell)
    wanted: dict[str, list[tuple[str, str]]] = {}
    for way, own in ways.items():
        for release in middles(own, library):
            wanted.setdefault(release, []).append(way)
    return wanted


def middles(cells: Sequence[Tried], library: str) -> Iterator[str]:
    """Of the cells of one way of training."""
    ordered = sorted(cells, key=lambda cell: Version(cell.release))
    for older, newer in pairwise(ordered):
        untried = between(older.release, newer.release, library)
        if untried and not are_alike(older, newer):
            yield untried[len(untried) // 2]


def are_alike(first: Tried, second: Tried) -> bool:
    """Whether one fault, or none, may explain both."""
    if first.verdict != second.verdict:
        return False
    if not (first.verdict == WRONG and first.times and second.times):
        return True
    return max(first.times, second.times) < ALIKE * min(first.times, second.times)
