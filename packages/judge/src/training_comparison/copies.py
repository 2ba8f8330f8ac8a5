"""Whether all ranks of a traced training hold the same weights, bit by bit, and which of them do not."""

from collections import Counter

from training_comparison.first_difference import ROUNDING_AT_FIRST, Place, apart
from training_comparison.traces import Trace


def copies_apart(trace: Trace, other: Trace | None = None) -> Place | None:
    """Where copies of weights first are not the same, bit by bit, on all ranks that have them.

    other: a training that may say which of two ranks is right.
    """
    for step in trace.steps:
        names = trace.names(step, "weights")
        wrong = [name for name in names if not has_equal_copies(trace, step, name)]
        if wrong:
            name = wrong[0]
            ranks = odd_ranks(trace, step, name, other)
            values = trace.values(step, "weights", name)[0]
            difference = max(apart(value, values[0]) for value in values)
            return Place(step, "weights", name, ranks, difference, "", len(wrong), len(names))
    return None


def has_equal_copies(trace: Trace, step: int, name: str) -> bool:
    bits: dict[str, set[int]] = {}
    for line in trace.lines[step, "weights", name]:
        bits.setdefault(line.part, set()).add(line.bits)
    return all(len(of_part) == 1 for of_part in bits.values())


def odd_ranks(trace: Trace, step: int, name: str, other: Trace | None) -> tuple[int, ...]:
    """The ranks whose copy is not what most have; all that hold one of them, where neither that nor the other training
    tells."""
    lines = trace.lines[step, "weights", name]
    found: set[int] = set()
    for part in {line.part for line in lines}:
        bits = {line.rank: line.bits for line in lines if line.part == part}
        ((most, count), *rest) = Counter(bits.values()).most_common()
        if not rest:
            continue
        has_majority = 2 * count > len(bits)
        found |= {rank for rank, own in bits.items() if not has_majority or own != most}
    return far_from(trace, step, name, other, found) or tuple(sorted(found))


def far_from(trace: Trace, step: int, name: str, other: Trace | None, ranks: set[int]) -> tuple[int, ...]:
    """Those whose copy is farther from the other training's than the nearest, which is as near as rounding; else ()."""
    values = trace.values(step, "weights", name)[0]
    references = other.values(step, "weights", name) if other else {}
    if not references or len(ranks) < len(trace.headers):
        return ()
    distances = {value.ranks: apart(value, references[0][0]) for value in values}
    nearest = min(distances.values())
    if nearest > ROUNDING_AT_FIRST["reduced"]:
        return ()  # none has what the other training has
    return tuple(sorted(rank for of_ranks, distance in distances.items() if distance > nearest for rank in of_ranks))
