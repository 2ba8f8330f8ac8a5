"""The table of gates, the page with it, and its picture."""

from collections.abc import Iterator
from pathlib import Path

from gate_score.gates import REGRESSION
from gate_score.score import Result, Score


def counts(score: Score, result: Result) -> tuple[int, int]:
    """Caught, of those that gates could be tuned on, and of those set aside."""
    aside = {one["name"] for one in result.defects if one["aside"]}
    caught_aside = sum(name in aside for name in score.caught)
    return len(score.caught) - caught_aside, caught_aside


def rows(result: Result) -> Iterator[tuple[str, ...]]:
    yield "Gate", "Caught", "of these set aside", "Missed", "Alarms", "Seconds a pair"
    for name, score in result.scores.items():
        _, aside = counts(score, result)
        alarms = f"{len(score.alarms)} of {result.honest}"
        if name in REGRESSION:
            alarms += f" ({score.alarms_in_the_same_layout} of {result.same_layout} in the same layout)"
        yield name, str(len(score.caught)), str(aside), str(len(score.missed)), alarms, f"{score.seconds:.3f}"


def table(result: Result) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows(result)]
    return "\n".join([lines[0], "|---" * len(next(rows(result))) + "|", *lines[1:]])


def write_page(result: Result, folder: Path) -> None:
    raise NotImplementedError


def picture(result: Result, path: Path) -> None:
    raise NotImplementedError
