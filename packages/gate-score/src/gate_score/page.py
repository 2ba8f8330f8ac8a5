"""The table of gates, the page with it, and its picture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gate_score.defect import UNCONFIRMED
from gate_score.gates import BEFORE_THE_FIRST_STEP, OTHERS, OURS, REGRESSION
from gate_score.score import Result, Score

PICTURE = "score.svg"
ASIDE = "of these set aside"
LATER = "of these later"
NOT_ASKED = "not asked"
TOP = """# The score

Written by `python -m t5bench gate-score --page packages/gate-score`; do not edit.
{ran}

![How many of the defects each gate catches]({picture})

{table}

Each gate is used as its documentation has it (`src/gate_score/gates.py` quotes where).
They compare with the same recipe in one process.
torchtitan's comparison and the bits of a log compare with the same layout before the mistake; of honest pairs, with
one process, but for those that are of one layout and differ in a seed that must not matter.
{aside} of the first {first} defects were set aside by a draw that was committed before any gate was tried.
{later} came later: found in public threads, and written down, when the judge and the parity check were finished.
The last three rows are unions.
`before the first step` is of the two gates that train nothing: `prove`, which executes a step without arithmetic, and
its comparison of what ranks begin with: weights, samples, the optimizer's numbers, and what a checkpoint gives back.
The second was written when the later defects had been, but for the last two, of Megatron-Bridge.
`before the first update` has, too, what `judge --locate` says of the first step alone, its weights and gradients.

## What ours miss

{missed}

## The list

`needs`: what hides the defect where it is missing.
`shows in`: where it is beyond the bounds of its precision: in rank 0's logged loss or norm, in a parameter's
trace, or in copies of a parameter that differ between ranks.
`found by`: of the gates, {letters}.
`weights differ`: by how much the final ones differ from those of the same layout without the mistake, relative to
their size. {harmless}
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
    yield "Gate", "Caught", ASIDE, LATER, "Missed", "Alarms", "CPU seconds a pair"
    for name, score in result.scores.items():
        yield name, *shares(set(score.caught), result), alarms(name, score, result), seconds(score)
    ours = union(result, tuple(OURS))
    wrong = {pair for name in OURS for pair in result.scores[name].alarms}
    found = f"{len(wrong)} of {result.honest}" if result.honest else NOT_ASKED
    yield "one of ours", *shares(ours, result), found, ""
    before_a_step = union(result, BEFORE_THE_FIRST_STEP)
    yield "before the first step", *shares(before_a_step, result), "", ""
    yield "before the first update", *shares(before_a_step | set(result.before_the_first_update), result), "", ""


def shares(caught: set[str], result: Result) -> tuple[str, str, str, str]:
    of = len(result.defects)
    aside, later = part(result, "aside"), part(result, "later")
    shares_of_parts = [f"{len(caught & one)} of {len(one)}" for one in (aside, later)]
    return f"{len(caught)} of {of}", *shares_of_parts, str(of - len(caught))


def part(result: Result, name: str) -> set[str]:
    """name: aside or later."""
    return {one["name"] for one in result.defects if one[name]}


def alarms(name: str, score: Score, result: Result) -> str:
    if not result.honest:
        return NOT_ASKED
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
        aside=len(part(result, "aside")),
        later=len(part(result, "later")),
        first=len(result.defects) - len(part(result, "later")),
        harmless=harmless(result),
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


def harmless(result: Result) -> str:
    """In words: defects that no final weight shows."""
    names = [one["name"] for one in result.defects if not one["distance"]]
    differ = f"Those of {len(result.defects) - len(names)} defects do"
    return f"{differ}; of the others what is logged alone is wrong: {', '.join(names)}." if names else f"{differ}."


def listed(result: Result, letters: Mapping[str, str]) -> str:
    lines = [("Kind", "Defect", "Layout", "Source", "What one sees", "Needs", "Weights differ", "Shows in", "Found by")]
    for one in sorted(result.defects, key=lambda one: (one["kind"], one["name"])):
        found = "".join(letter for name, letter in letters.items() if one["name"] in result.scores[name].caught)
        which = {"set aside": one["aside"], "later": one["later"]}
        name = one["name"] + "".join(f" ({word})" for word, is_so in which.items() if is_so)
        needs, shows, differ = ", ".join(one["needs"]), ", ".join(one["shows"]), f"{one['distance']:.1g}"
        lines.append((one["kind"], name, one["layout"], source(one), one["seen"], needs, differ, shows, found))
    return markdown(lines)


def source(one: Mapping[str, Any]) -> str:
    """A link to the thread."""
    repository, _, number = one["source"].partition("#")
    if not number:
        return one["source"]
    link = f"[{one['source']}](https://github.com/{repository}/issues/{number})"
    return f"{link}, not confirmed by us" if one["source"] in UNCONFIRMED else link


def draw(result: Result, path: Path) -> None:
    """A bar for each gate: caught of those that gates may have been tuned on, of those set aside, and of later ones."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gate-score"
    from matplotlib import pyplot

    aside, later = part(result, "aside"), part(result, "later")
    open_ones = {one["name"] for one in result.defects} - aside - later
    parts = {
        "defects that were open": (open_ones, "#3b6ea5"),
        "defects set aside before": (aside, "#9dbbd9"),
        "defects of later": (later, "#d9b99d"),
    }
    names = [*OTHERS, *OURS]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(names) + 1.2))
    ends = [0] * len(names)
    for label, (defects, color) in parts.items():
        counts = [len(defects & set(result.scores[name].caught)) for name in names]
        axes.barh(names, counts, left=ends, color=color, label=label)
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
    for place, name in enumerate(names):
        wrong = len(result.scores[name].alarms)
        words = f"{ends[place]}, {wrong} false alarm{'' if wrong == 1 else 's'}"
        axes.text(ends[place] + 1, place, words, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * len(result.defects))
    axes.axvline(len(result.defects), color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"of {len(result.defects)} defects; false alarms of {result.honest} honest pairs")
    axes.legend(fontsize=8, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
