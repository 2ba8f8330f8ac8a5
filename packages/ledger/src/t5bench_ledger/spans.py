"""Releases in a few characters: a span names no release that was not tried.

``a..b`` is every published release from a to b. It is written only where all of them are meant, so that a reader may
take it literally; data/published.json has the releases that were published, of those that were withdrawn only what was
tried.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

DATA = Path(__file__).with_name("data")
SPAN = ".."


@cache
def published() -> Mapping[str, Sequence[str]]:
    """Of each library the releases that were published since the oldest that the ledger tries, the oldest first."""
    found: dict[str, list[str]] = json.loads((DATA / "published.json").read_text())
    return found


def spans_of(releases: Collection[str], library: str) -> str:
    """Releases of a library, as a list in which neighbours are joined; one that is not known to be published stands
    alone."""
    known = published()[library]
    runs: list[list[str]] = []
    before = ""
    for release in known:
        if release in releases:
            if runs and runs[-1][-1] == before:
                runs[-1].append(release)
            else:
                runs.append([release])
        before = release
    runs += [[release] for release in releases if release not in known]
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}{SPAN}{run[-1]}" for run in runs)


def releases_in(spans: str, library: str) -> list[str]:
    """The releases that spans_of was given."""
    known = published()[library]
    named: list[str] = []
    for span in spans.split():
        first, has_two_ends, last = span.partition(SPAN)
        named += known[known.index(first) : known.index(last) + 1] if has_two_ends else [first]
    return named


def between(first: str, last: str, library: str) -> Sequence[str]:
    """The published releases after the first and before the last; none if one of them is not known."""
    known = published()[library]
    if first not in known or last not in known:
        return []
    return known[known.index(first) + 1 : known.index(last)]


def public(release: str) -> str:
    """2.13.0 of 2.13.0+cpu."""
    return release.partition("+")[0]
