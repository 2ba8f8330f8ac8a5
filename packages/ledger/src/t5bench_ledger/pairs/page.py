"""What came out of pairs of settings: data/pairs.json, and pages/pairs.md from that alone."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from t5bench.record.files import write_whole
from t5bench_ledger import tables
from t5bench_ledger.judge import BY_ITS_SHARE
from t5bench_ledger.modes import BESIDE, LIBRARY
from t5bench_ledger.pairs.settings import ITERATIONS, MICRO_BATCHES, PROCESSES, Case, possible
from t5bench_ledger.show import NOT_AS_PROMISED, Accusation, accusations
from t5bench_ledger.spans import DATA, public

SUMMARY = DATA / "pairs.json"
PAGE = tables.PAGES / "pairs.md"
VERDICTS = ("equal", "refused", BY_ITS_SHARE, "crashes", "hangs", "does not run", "wrong")
EXAMPLES = 3
LONGEST_SENTENCE = 120

BEGINNING = f"""\
# Pairs of settings

Most faults of the [ledger](ledger.md) need two settings that nobody tried together.
Here pairs of settings are drawn at random, and the way of training too: a ZeRO stage, DDP, FSDP2, transformers' Trainer
or accelerate's loop.
A tiny model trains for {ITERATIONS} iterations of {MICRO_BATCHES} micro-batches on {PROCESSES} processes, on a CPU.
Each loss, each gradient norm and a loss after the last update are compared with plain PyTorch's in one process.
Of the Trainer and accelerate the samples are compared too: in an epoch each must be taken once.
The bounds are those of the parity gate.

```bash
python -m t5bench ledger --pairs 2000 --seed 1                       # of the installed DeepSpeed and torch
python -m t5bench ledger --pairs 2000 --seed 1 --releases 0.18.6,transformers==5.24.0,accelerate==1.15.0
```

A seed and a number give the same pair everywhere.
What was trained is kept, so the same command continues after an interruption.
[The settings](../src/t5bench_ledger/pairs/settings.py) are a list.
[train.py](../src/t5bench_ledger/pairs/train.py), [by_trainer.py](../src/t5bench_ledger/pairs/by_trainer.py) and
[by_accelerate.py](../src/t5bench_ledger/pairs/by_accelerate.py) train one pair.
transformers is tried with accelerate {BESIDE["transformers"]["accelerate"]}.
The Trainer and accelerate train over DDP or in one process here: on a CPU they do not shard.

"""
MEANING = f"""\
The pairs so far were tried on two cores that other work shared; a quiet machine tries more in an hour.

*Refused*: an error that a library raises on purpose; its words stand below.
*Crashes*: any other error, such as an AttributeError, or an assertion about the library's own state.
*Hangs*: it does not end, or a process ends for which the other still waits.
*Wrong*: a loss, a gradient norm or the samples differ.
*{BY_ITS_SHARE.capitalize()}*: accelerate divides the short window by as many micro-batches as a full one, as it says.
A finding is reduced by hypothesis: a setting, a micro-batch or an iteration is left out as long as the verdict stays.
Where a file of plain PyTorch and the library shows it in that release, the table names it; the others are places to
look at.
"""


def summary(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each library, release and seed: how many pairs ended how, how long they took, and the smallest findings.

    pairs: lines of pairs.jsonl.
    """
    subjects: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = {}
    for pair in pairs:
        subjects.setdefault((pair["library"], pair["release"], pair["torch"], pair["seed"]), []).append(pair)
    made = []
    for (library, release, torch, seed), own in sorted(subjects.items()):
        counts = Counter(pair["verdict"] for pair in own)
        made.append(
            {
                "library": library,
                "release": release,
                "torch": torch,
                "seed": seed,
                "pairs": len(own),
                "of": possible(library),
                "seconds": round(sum(pair["seconds"] for pair in own)),
                "verdicts": {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]},
                "findings": findings(own),
                "refusals": refusals(own),
            }
        )
    return made


def findings(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each smallest case once, the most frequent first, with the numbers of some pairs that were reduced to it."""
    found: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        if not pair["smallest"]:
            continue
        name = f"{pair['verdict']} {Case(**pair['smallest']).words}"
        begin = {"case": pair["smallest"], "verdict": pair["verdict"], "said": pair["said"], "pairs": 0, "numbers": []}
        entry = found.setdefault(name, begin)
        entry["pairs"] += 1
        if len(entry["numbers"]) < EXAMPLES:
            entry["numbers"].append(pair["number"])
    return sorted(found.values(), key=lambda entry: (-VERDICTS.index(entry["verdict"]), -entry["pairs"]))


def refusals(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each sentence with which pairs were refused, the most frequent first, and the number of one pair."""
    refused = [pair for pair in pairs if pair["verdict"] == "refused"]
    counts = Counter(pair["said"] for pair in refused)
    numbers = {pair["said"]: pair["number"] for pair in reversed(refused)}
    return [{"said": said, "pairs": count, "number": numbers[said]} for said, count in counts.most_common()]


def title_of(entry: Mapping[str, Any]) -> str:
    """ "DeepSpeed 0.19.8"."""
    return f"{LIBRARY[entry['library']]} {entry['release'] or public(entry['torch'])}"


def an_hour(entry: Mapping[str, Any]) -> int:
    """Pairs in an hour."""
    return round(entry["pairs"] / max(1, entry["seconds"]) * 3600)


def in_words(entries: Sequence[Mapping[str, Any]]) -> str:
    """A line for each library and seed."""
    lines = []
    for entry in entries:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in entry["verdicts"].items())
        lines.append(
            f"{title_of(entry)}, seed {entry['seed']}: {entry['pairs']} pairs: {counts}; {an_hour(entry)}/hour"
        )
    return "\n".join(lines)


def markdown(entries: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [verdict for verdict in VERDICTS if any(verdict in entry["verdicts"] for entry in entries)]
    header = ["Release", "Torch", "Seed", "Pairs", "Of all", *verdicts, "Pairs an hour"]
    rows = []
    for entry in entries:
        counts = [str(entry["verdicts"].get(verdict, 0)) for verdict in verdicts]
        share = f"{entry['pairs'] / entry['of']:.0%} of {entry['of']}"
        first = [title_of(entry), public(entry["torch"]), str(entry["seed"]), str(entry["pairs"]), share]
        rows.append([*first, *counts, str(an_hour(entry))])
    parts = [BEGINNING, tables.table(header, rows), MEANING]
    for entry in entries:
        parts.append(f"## {title_of(entry)}, seed {entry['seed']}\n")
        parts.append(findings_table(entry) if entry["findings"] else "No finding.\n")
        if entry["refusals"]:
            parts.append(refusals_table(entry))
    return "\n".join(parts)


def in_cell(text: str) -> str:
    return text[:LONGEST_SENTENCE].replace("|", "\\|")


def refusals_table(of: Mapping[str, Any]) -> str:
    """Of a library, release and seed."""
    rows = [[in_cell(each["said"]), str(each["pairs"]), str(each["number"])] for each in of["refusals"]]
    return tables.table(["Refused with the words", "Pairs", "Such as number"], rows)


def findings_table(of: Mapping[str, Any]) -> str:
    """Of a library, release and seed."""
    rows = []
    for entry in of["findings"]:
        case = Case(**entry["case"])
        sizes = f"{case.iterations} x {case.micro_batches}, width {case.width}"
        numbers = ", ".join(map(str, entry["numbers"]))
        said = in_cell(entry["said"])
        words = in_cell(case.words)
        file = file_that_shows(of, case)
        link = f"[{file.path.stem}](../src/t5bench_ledger/accusations/{file.path.name})" if file else "not yet"
        reported = file.reported if file else ""
        rows.append([words, sizes, entry["verdict"], said, str(entry["pairs"]), numbers, link, reported])
    header = [
        "Smallest form",
        "Iterations x micro-batches",
        "Verdict",
        "What differs, or the error",
        "Pairs",
        "Numbers",
        "Shown alone",
        "Reported",
    ]
    return tables.table(header, rows)


def files_of(library: str, case: Case) -> list[Accusation]:
    """That speak for a smallest form."""
    return [each for each in accusations() if each.library == library and case.words in each.pairs]


def file_that_shows(entry: Mapping[str, Any], case: Case) -> Accusation | None:
    """The file that showed a smallest form in its release, or in PyTorch's, without this project."""
    torch = public(entry["torch"])
    releases = {entry["library"]: entry["release"] or torch, "torch": torch}
    for each in accusations():
        if case.words not in each.pairs or each.library not in releases:
            continue
        lines = each.outputs.get((releases[each.library], torch), ())
        if any(line.endswith(NOT_AS_PROMISED) for line in lines):
            return each
    return None


def read_summary() -> list[dict[str, Any]]:
    """An entry for each library, release and seed."""
    kept: list[dict[str, Any]] = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else []
    return kept


def merged(kept: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What was measured, and what was kept of other releases and seeds."""
    keys = ("library", "release", "torch", "seed")
    names = [tuple(entry[key] for key in keys) for entry in measured]
    others = [entry for entry in kept if tuple(entry[key] for key in keys) not in names]
    return sorted([*others, *measured], key=lambda entry: tuple(entry[key] for key in keys))


def write(entries: Sequence[Mapping[str, Any]]) -> None:
    """Writes the data and the page, in which other releases and seeds stay. Raises OSError."""
    every = merged(read_summary(), entries)
    lines = ",\n".join(json.dumps(entry) for entry in every)
    write_whole(SUMMARY, f"[\n{lines}\n]\n")
    write_whole(PAGE, markdown(every))
