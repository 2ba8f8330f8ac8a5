"""What the rows' profiles say: the parts of an iteration, all ranks in one timeline, and why it takes so long."""

import bisect
import contextlib
import os
from collections.abc import Iterator, Mapping

from t5bench.compare.explain import Explanation
from t5bench.compare.rows import Row
from t5bench.record.files import PROFILE, RecordError
from t5bench.record.profile import DOING, PARTS, Profile, Rank, read_profile
from t5bench.record.records import Run
from t5bench.report.figures import COLOURS, LEFT_OUT, Figure, Series, best, by_size, stacked

MOST_RANKS, MOST_STEPS = 64, 200  # of the timeline
SLOWER = 1.05  # times as long as the fastest: what differs by less needs no reason
COLOUR_OF = dict(zip(PARTS, COLOURS, strict=True))


def stretches(rank: Rank, steps: int) -> Iterator[tuple[str, float, float]]:
    """At most so many (part, start, end): what goes on in the middle of each step."""
    ends = [end for _, end in rank.timeline]
    step, start = ends[-1] / steps, 0.0
    parts = [rank.timeline[bisect.bisect_left(ends, (number + 0.5) * step)][0] for number in range(steps)]
    for number, (part, following) in enumerate(zip(parts, [*parts[1:], ""], strict=True), 1):
        if part != following:
            end = round(number * step, 3)
            yield part, start, end
            start = end


def profiles_of(rows: Mapping[str, Row]) -> dict[str, Profile]:
    """Of the rows that were profiled by part."""
    found = {}
    for name, row in rows.items():
        with contextlib.suppress(RecordError):
            found[name] = read_profile(row.run.directory / PROFILE)
    return found


def mean_parts(profile: Profile) -> dict[str, float]:
    """Milliseconds of each part, the mean of all ranks."""
    return {part: sum(rank.parts.get(part, 0.0) for rank in profile.ranks) / len(profile.ranks) for part in PARTS}


def why_slower(rows: Mapping[str, Row]) -> list[str]:
    """Of each strategy's fastest row, what it takes longer for than the fastest with as many processes."""
    timed = {name: row for name, row in rows.items() if row.milliseconds}
    shown = best(timed, len({(row.strategy, row.run.world_size) for row in timed.values()}))
    profiles, found = profiles_of(shown), []
    for size in sorted({row.run.world_size for row in shown.values()}):
        took = {name: row.milliseconds.median for name, row in shown.items() if row.run.world_size == size}
        first = min(took, key=took.__getitem__)
        slower = {name for name, ms in took.items() if ms >= SLOWER * took[first]}
        for name in profiles.keys() & slower if first in profiles else ():
            ours, its = mean_parts(profiles[name]), mean_parts(profiles[first])
            part = max(PARTS, key=lambda part: ours[part] - its[part])
            more = f"{took[name] - took[first]:.3g} ms longer than {first}"
            text = f"{name} takes {more}; the profile shows {ours[part] - its[part]:.3g} ms more {DOING[part]}"
            found.append((size, took[name], text))
    return [text for *_, text in sorted(found)]


def parts(rows: Mapping[str, Row], profiles: Mapping[str, Profile]) -> Figure:
    found: list[Series] = []
    for name, profile in profiles.items():
        found += stacked(name, mean_parts(profile))
    caption = "The mean of all ranks. The parts add up to the profiled iteration, which profiling slows down."
    return Figure("Where the time went", "ms of the profiled iteration", caption, by_size(rows, found))


def timeline(rows: Mapping[str, Row], profiles: Mapping[str, Profile], most: int) -> Figure:
    """most: how many stretches it has."""
    every = [(name, rank) for name, profile in profiles.items() for rank in profile.ranks if rank.timeline]
    shown, found = every[:MOST_RANKS], []
    for name, rank in shown:
        points: dict[str, list] = {}
        for part, start, end in stretches(rank, min(MOST_STEPS, most // len(shown))):
            points.setdefault(part, []).append(((start, end), f"{name}: rank {rank.rank}"))
        found += [Series(name, "stretch", own, "", COLOUR_OF.get(part, LEFT_OUT), part) for part, own in points.items()]
    caption = "The profiled iteration of every rank, in coarse steps; trace.json in its directory has each operator."
    if len(shown) < len(every):
        caption += f" The first {len(shown)} of {len(every)} ranks."
    return Figure("Timeline", "ms since the iteration began", caption, by_size(rows, found, each=0.25))


def why(run: Run) -> list[str]:
    """Where the time of the profiled iteration went, and the causes that this names; nothing without a profile."""
    if not os.path.lexists(run.directory / PROFILE):
        return []
    try:
        explanation = Explanation(run)
        return [explanation.sentence(), *(f"{cause.name}: {cause.evidence}" for cause in explanation.causes())]
    except RecordError as damage:
        return [str(damage)]
