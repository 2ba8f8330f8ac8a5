"""Measurements as people say them."""

from collections.abc import Collection

from t5bench_ledger.spans import between, spans_of


def size_in_words(off_by: float | None) -> str:
    """A relative difference: "off by 56 %", "3 times as large", "not a number"."""
    if off_by is None:
        return "not a number"
    if off_by < 1:
        return f"off by {100 * off_by:.2g} %"
    times = float(f"{1 + off_by:.2g}")
    return f"{times:,.0f} times as large" if times >= 10 else f"{times:g} times as large"


def mended_in_words(release: str, last_wrong: str, library: str, tried: Collection[str]) -> str:
    """The first release that was tried and is right again, and which before it nobody tried."""
    if not release:
        return "no later release that was tried"
    untried = [each for each in between(last_wrong, release, library) if each not in tried]
    return f"{release} ({spans_of(untried, library)} not tried)" if untried else release
