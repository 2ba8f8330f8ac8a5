"""Planners beside each other, on trainings that others published.

A planner is scored on what it can express, and a column says how much that is. A second table holds this project's cost
model against each of the others on the cases that the other one covers.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from t5bench import IS_CHECKOUT, Problem
from t5bench.printed_table import table, text_table
from t5bench_evidence.layout_bench import PEERS, stored
from t5bench_evidence.layout_bench.cases import Case, CaseSet, all_sets, read_layouts
from t5bench_evidence.layout_bench.planners import OWN, Answer, Inexpressible, Planner
from t5bench_evidence.layout_bench.scores import Errors, Score, score

PAGE = Path(__file__).parents[3] / "LAYOUTBENCH.md"
OURS = OWN[0].name


@dataclass(frozen=True)
class Entry:
    """A planner on a set."""

    planner: str
    set: str
    score: Score
    ours: Score | None
    """This project's on the cases that the planner can express; None for its own planners."""


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    checkouts = dict(map(_named, args.peer))
    if (args.store or args.page) and not IS_CHECKOUT:
        raise Problem("an installed package cannot be written to", "Run it in a clone of the repository")
    sets = [CaseSet(path.stem, str(path), read_layouts(path)) for path in args.files] or all_sets()
    known = {}
    for peer in PEERS:
        if peer in checkouts:
            known[peer] = stored.asked(peer, checkouts[peer], sets)
        elif not args.files:
            known[peer] = stored.stored(peer)
    if args.store:
        if args.files:
            raise Problem("answers about a FILE are not kept", "Leave out FILE, or --store")
        for peer in checkouts:
            stored.store(peer, known[peer])
    entries = entries_of(sets, known)
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
        return 0
    for each in sets:
        own = [entry for entry in entries if entry.set == each.name]
        print(f"{each.name}: {each.about}. {len(each.cases)} layouts\n{table(_rows(own))}\n")
    print(f"Beside {OURS}, on the cases that the other one covers\n{table(beside(entries))}\n")
    print("What each cannot express, and in how many of all cases")
    print(text_table(reasons(entries)))
    if args.page:
        from t5bench_evidence.layout_bench import page

        page.write(PAGE, sets, entries, {stored.module_of(peer).NAME: each.version for peer, each in known.items()})
    return 0


def _named(text: str) -> tuple[str, Path]:
    """Raises Problem."""
    name, _, directory = text.partition("=")
    if name not in PEERS or not directory:
        raise Problem(f"--peer {text} names no planner", f"Give NAME=DIRECTORY with one of: {' '.join(PEERS)}")
    if not Path(directory).is_dir():
        raise Problem(f"{directory} is no directory", f"Give a checkout of {name}")
    return name, Path(directory).resolve()


def answers_of(planner: Planner, cases: Sequence[Case]) -> dict[str, Answer | str]:
    """By case; a text is why the planner cannot express it."""
    answers: dict[str, Answer | str] = {}
    for case in cases:
        try:
            answers[case.name] = planner.answer(case)
        except Inexpressible as reason:
            answers[case.name] = str(reason)
    return answers


def entries_of(sets: Sequence[CaseSet], known: Mapping[str, stored.StoredAnswers]) -> list[Entry]:
    """known: by peer."""
    entries = []
    for each in sets:
        by_planner = {planner.name: answers_of(planner, each.cases) for planner in OWN}
        for peer, found in known.items():
            by_planner[stored.module_of(peer).NAME] = stored.answers_to(peer, found, each)
        ours = by_planner[OURS]
        for name, answers in by_planner.items():
            on_its_cases = None
            if name not in {planner.name for planner in OWN}:
                expressed = [case for case in each.cases if not isinstance(answers[case.name], str)]
                on_its_cases = score(expressed, ours)
            entries.append(Entry(name, each.name, score(each.cases, answers), on_its_cases))
    return entries


def percent(errors: Errors | None) -> str:
    return f"{errors.mean:.1%}" if errors else ""


def _rows(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """A line for each planner that says something of the set."""
    return [{"planner": entry.planner} | cells(entry.score) for entry in entries if entry.score.covered]


def cells(found: Score) -> dict[str, str]:
    """A planner's cells on a set; empty where it says nothing, or nothing was measured."""
    choices = found.choices
    verdicts = found.verdicts
    named_ran = ""
    if choices and choices.named_ran is not None:
        named_ran = f"{choices.named_ran:.3g} of {choices.count}"
    return {
        "covers": f"{found.covered} of {found.cases}",
        "time off": percent(found.time),
        "after a factor": percent(found.after_factor),
        "states off": percent(found.allocated),
        "peak off": percent(found.peak),
        "fits, right": f"{verdicts.right} of {verdicts.count}" if verdicts else "",
        "named ran": named_ran,
        "regret": f"{choices.regret:.1%}" if choices else "",
        "90th": f"{choices.regret_90:.0%}" if choices else "",
    }


def beside(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """A line for each planner and set, with this project's figures on the cases that the planner covers."""
    rows = []
    for entry in entries:
        if not entry.ours or not entry.score.covered:
            continue
        row = {"planner": entry.planner, "set": entry.set, "covers": f"{entry.score.covered} of {entry.score.cases}"}
        pairs = {
            "time off": (percent(entry.score.time), percent(entry.ours.time)),
            "after a factor": (percent(entry.score.after_factor), percent(entry.ours.after_factor)),
            "states off": (percent(entry.score.allocated), percent(entry.ours.allocated)),
            "peak off": (percent(entry.score.peak), percent(entry.ours.peak)),
            "regret": tuple(f"{each.choices.regret:.1%}" if each.choices else "" for each in (entry.score, entry.ours)),
        }
        for name, (theirs, ours) in pairs.items():
            row[name] = f"{theirs}, here {ours}" if theirs and ours else ""
        rows.append(row)
    return rows


def reasons(entries: Sequence[Entry]) -> list[tuple[str, str, int]]:
    """By planner, what it cannot express, and of how many layouts."""
    counted: dict[tuple[str, str], int] = {}
    for entry in entries:
        for reason, count in entry.score.reasons.items():
            key = (entry.planner, reason)
            counted[key] = counted.get(key, 0) + count
    return [(planner, reason, count) for (planner, reason), count in counted.items()]
