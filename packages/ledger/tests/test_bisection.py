"""Which releases are tried until each boundary of a fault lies between neighbours."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from t5bench_ledger.bisection import next_releases
from t5bench_ledger.judge import RIGHT, WRONG
from t5bench_ledger.spans import published

RELEASES = published()["transformers"]


@dataclass(frozen=True)
class Tried:
    release: str
    verdict: str
    times: float | None = None
    strategy: str = "trainer"
    mode: str = "equal targets"


def bisected(truth: dict[str, Tried], first: list[str]) -> tuple[dict[str, Tried], int]:
    """What is known in the end, and how many releases that took."""
    known = {release: truth[release] for release in first}
    while wanted := next_releases(known.values(), "transformers"):
        assert not known.keys() & wanted.keys(), "a release is tried once"
        known |= {release: truth[release] for release in wanted}
    return known, len(known)


@given(
    st.lists(st.sampled_from([(RIGHT, None), (WRONG, 7.0), (WRONG, 75000.0)]), min_size=1, max_size=4),
    st.lists(st.integers(1, len(RELEASES) - 1), min_size=3, max_size=3, unique=True),
    st.sets(st.sampled_from(RELEASES)),
)
def test_every_change_that_is_seen_lies_between_neighbours(verdicts, bounds, first):
    def verdict_of(number: int) -> tuple[str, float | None]:
        return verdicts[sum(number >= bound for bound in bounds) % len(verdicts)]

    truth = {release: Tried(release, *verdict_of(number)) for number, release in enumerate(RELEASES)}
    known, _ = bisected(truth, [RELEASES[0], *sorted(first), RELEASES[-1]])
    tried = [release for release in RELEASES if release in known]
    for older, newer in pairwise(tried):
        if (known[older].verdict, known[older].times) != (known[newer].verdict, known[newer].times):
            assert RELEASES.index(newer) == RELEASES.index(older) + 1


def test_one_fault_takes_as_many_releases_as_a_bisection():
    truth = {release: Tried(release, WRONG if number >= 40 else RIGHT, 9.0) for number, release in enumerate(RELEASES)}
    _, count = bisected(truth, [RELEASES[0], RELEASES[-1]])
    assert count <= 2 + 7, "2 to the power of 7 is more than there are"
    _, count = bisected({release: Tried(release, RIGHT) for release in RELEASES}, RELEASES[:1])
    assert count == 1
