"""The table of gates, the page with it, and its picture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gate_score.gates import OTHERS, OURS, REGRESSION
from gate_score.score import Result, Score

PICTURE = "score.svg"
NAME = "of these set aside"
TOP = """# The score

Written by `python -m t5bench gate-score --page packages/gate-score`; do not edit.
{ran}

![How many of the defects each gate catches]({picture})

{table}

Each gate is used as its documentation has it (`src/gate_score/gates.py` quotes where).
They compare with the same recipe in one process.
torchtitan's comparison and the bits of a log compare with the same layout before the mistake; of honest pairs, with
one process, but for those that are of one layout and differ in a seed that must not matter.
{aside} of the {defects} defects were set aside by a draw that was committed before any gate was tried.
`one of ours` is a union, and so is `before the first update`: `prove`, which trains nothing, and what
`judge --locate` says of the first step alone, its initial weights and gradients.

## What ours miss

{missed}

## The list

`needs`: what hides the defect where it is missing.
`shows in`: where it is beyond the bounds of its precision: in rank 0's logged loss or norm, in a parameter's
trace, or in copies of a parameter that differ between ranks.
`found by`: of the gates, {letters}.
A source "own" is a kind of mistake that this project plants; all mechanisms are written anew.

{listed}
"""
WHY_MISSED = {
    "a resume": "after a resume that rounds once to bf16, curves differ by less than rounding in bf16 does",
    "bf16": "in bf16 the difference is within what another order of sums makes",
}


def union(result: Result, names: Sequence[str]) -> set[str]:
    return {defect for name in names for defect in result.scores[name].caught}


def rows(result: Result) -> Iterator[tuple[str, ...]]:
    yield "Gate", "Caught", NAME, "Missed", "Alarms", "CPU seconds a pair"
    aside = {one["name"] for one in result.defects if one["aside"]}
    for name, score in result.scores.items():
        yield name, *shares(set(score.caught), aside, len(result.defects)), alarms(name, score, result), seconds(score)
    ours = union(result, tuple(OURS))
    wrong = {pair for name in OURS for pair in result.scores[name].alarms}
    yield "one of ours", *shares(ours, aside, len(result.defects)), f"{len(wrong)} of {result.honest}", ""
    early = set(result.before_the_first_update) | set(result.scores["prove"].caught)
    yield "before the first update", *shares(early, aside, len(result.defects)), "", ""


def shares(caught: set[str], aside: set[str], of: int) -> tuple[str, str, str]:
    return f"{len(caught)} of {of}", f"{len(caught & aside)} of {len(aside)}", str(of - len(caught))


def alarms(name: str, score: Score, result: Result) -> str:
    found = f"{len(score.alarms)} of {result.honest}"
    if name in REGRESSION:
        found += f" ({score.alarms_in_the_same_layout} of {result.same_layout} in the same layout)"
    return found


def seconds(score: Score) -> str:
    return f"{score.seconds:.4f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    first, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([first, "|---" * len(lines[0]) + "|", *rest])


def table(result: Result) -> str:
    return markdown(list(rows(result)))


def write_page(result: Result, folder: Path) -> None:
    counts = f"{len(result.defects)} defects and {result.honest} honest pairs"
    ran = f"{counts}, on two CPU processes with gloo, {result.software}."
    letters = {name: chr(ord("a") + number) for number, name in enumerate(result.scores)}
    text = TOP.format(
        ran=ran,
        picture=PICTURE,
        table=table(result),
        aside=sum(one["aside"] for one in result.defects),
        defects=len(result.defects),
        missed=missed(result),
        letters=", ".join(f"{letter} {name}" for name, letter in letters.items()),
        listed=listed(result, letters),
    )
    (folder / "SCORE.md").write_text(text)
    draw(result, folder / PICTURE)


def missed(result: Result) -> str:
    caught = union(result, tuple(OURS))
    lines = [("Defect", "Layout", "Why")]
    for one in result.defects:
        if one["name"] not in caught:
            reasons = [WHY_MISSED[need] for need in reversed(one["needs"]) if need in WHY_MISSED]
            lines.append((one["name"], one["layout"], reasons[0] if reasons else "not known"))
    return markdown(lines) if len(lines) > 1 else "None."


def listed(result: Result, letters: Mapping[str, str]) -> str:
    lines = [("Kind", "Defect", "Layout", "Source", "What one sees", "Needs", "Shows in", "Found by")]
    for one in sorted(result.defects, key=lambda one: (one["kind"], one["name"])):
        found = "".join(letter for name, letter in letters.items() if one["name"] in result.scores[name].caught)
        name = f"{one['name']} (set aside)" if one["aside"] else one["name"]
        needs, shows = ", ".join(one["needs"]), ", ".join(one["shows"])
        lines.append((one["kind"], name, one["layout"], source(one), one["seen"], needs, shows, found))
    return markdown(lines)


def source(one: Mapping[str, Any]) -> str:
    """A link to the thread."""
    repository, _, number = one["source"].partition("#")
    return f"[{one['source']}](https://github.com/{repository}/issues/{number})" if number else one["source"]


def draw(result: Result, path: Path) -> None:
    """A bar for each gate: caught of those that gates may have been tuned on, and of those set aside."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gate-score"
    from matplotlib import pyplot

    aside = {one["name"] for one in result.defects if one["aside"]}
    names = [*OTHERS, *OURS]
    seen = [len(set(result.scores[name].caught) - aside) for name in names]
    unseen = [len(set(result.scores[name].caught) & aside) for name in names]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(names) + 1.2))
    axes.barh(names, seen, color="#3b6ea5", label="defects that were open")
    axes.barh(names, unseen, left=seen, color="#9dbbd9", label="defects set aside before")
    for place, name in enumerate(names):
        wrong = len(result.scores[name].alarms)
        words = f"{seen[place] + unseen[place]}, {wrong} false alarm{'' if wrong == 1 else 's'}"
        axes.text(seen[place] + unseen[place] + 1, place, words, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * len(result.defects))
    axes.axvline(len(result.defects), color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"of {len(result.defects)} defects; false alarms of {result.honest} honest pairs")
    axes.legend(fontsize=8, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
