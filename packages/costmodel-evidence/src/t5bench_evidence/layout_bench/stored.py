"""The answers of planners that are programs of their own: asked of a checkout, or as they were stored.

Nothing of these programs is here. Whoever has a checkout can ask again: LAYOUTBENCH.md has the commands.
"""

import csv
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from t5bench import Problem
from t5bench_evidence.layout_bench.cases import CaseSet
from t5bench_evidence.layout_bench.peers.sailor import SIMULATORS, Simulator
from t5bench_evidence.layout_bench.planners import Answer, Inexpressible

FIGURES = Path(__file__).with_name("figures")
COLUMNS = ("set", "case", "seconds", "allocated", "peak", "fits", "refused")


@dataclass(frozen=True)
class StoredAnswers:
    """What a planner answered."""

    version: str
    """A commit, or the version of an installed package."""
    answers: Mapping[tuple[str, str], Answer | str]
    """By set and case; a text is why the program refused it. Cases with a fault have none."""


def module_of(peer: str) -> ModuleType | Simulator:
    if peer in SIMULATORS:
        return SIMULATORS[peer]
    return import_module(f"t5bench_evidence.layout_bench.peers.{peer.replace('-', '_')}")


def asked(peer: str, checkout: Path, sets: Iterable[CaseSet]) -> StoredAnswers:
    """Asks a planner of a checkout, or of a directory with its installed package. Raises Problem."""
    module = module_of(peer)
    answers: dict[tuple[str, str], Answer | str] = {}
    for each in sets:
        for case in each.cases:
            if module.fault(case):
                continue
            try:
                answers[each.name, case.name] = module.answer(case, checkout)
            except Inexpressible as refusal:
                answers[each.name, case.name] = str(refusal)
            except (ImportError, OSError) as error:
                remedy = f"Give {module.NAME}'s checkout, and install what it imports"
                raise Problem(f"{checkout} cannot be asked: {error}", remedy) from error
    return StoredAnswers(version_of(peer, checkout), answers)


def version_of(peer: str, checkout: Path) -> str:
    """A checkout's commit, or an installed package's version."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if (checkout / ".git").exists() and found.returncode == 0:
        return found.stdout.strip()
    for metadata in sorted(checkout.glob(f"{peer}-*.dist-info")):
        return metadata.name.removeprefix(f"{peer}-").removesuffix(".dist-info")
    return "unknown"


def store(peer: str, found: StoredAnswers, directory: Path = FIGURES) -> None:
    directory.mkdir(exist_ok=True)
    module = module_of(peer)
    with (directory / f"{peer}.csv").open("w", newline="") as file:
        file.write(f"# {module.NAME} {found.version}\n")
        file.write(f"# python -m t5bench layout-bench --peer {peer}=DIRECTORY --store\n")
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for (name, case), answer in found.answers.items():
            if isinstance(answer, str):
                rows.writerow((name, case, "", "", "", "", answer))
            else:
                fits = "" if answer.fits is None else int(answer.fits)
                figures = (f"{value:.6g}" if value else "" for value in (answer.seconds, answer.allocated, answer.peak))
                rows.writerow((name, case, *figures, fits, ""))


def stored(peer: str, directory: Path = FIGURES) -> StoredAnswers:
    with (directory / f"{peer}.csv").open() as file:
        lines = list(file)
    version = lines[0].split()[-1]
    answers: dict[tuple[str, str], Answer | str] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        answers[row["set"], row["case"]] = _answer_of(row)
    return StoredAnswers(version, answers)


def _answer_of(row: Mapping[str, str]) -> Answer | str:
    if row["refused"]:
        return row["refused"]
    seconds, allocated, peak = (float(row[name] or 0) for name in ("seconds", "allocated", "peak"))
    return Answer(seconds, allocated, peak, fits=bool(int(row["fits"])) if row["fits"] else None)


def answers_to(peer: str, found: StoredAnswers, case_set: CaseSet) -> dict[str, Answer | str]:
    """By case, with the reason where it cannot be expressed. Raises Problem if a stored answer is missing."""
    module = module_of(peer)
    answers: dict[str, Answer | str] = {}
    for case in case_set.cases:
        fault = module.fault(case)
        if not fault and (case_set.name, case.name) not in found.answers:
            remedy = f"Ask it: --peer {peer}=DIRECTORY, with a checkout of {module.NAME}"
            raise Problem(f"{module.NAME} was not asked about {case_set.name}", remedy)
        answers[case.name] = fault or found.answers[case_set.name, case.name]
    return answers
