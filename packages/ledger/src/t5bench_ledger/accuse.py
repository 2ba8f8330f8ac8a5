"""``ledger --accuse``: runs the file of each accusation in every release that it accuses, and keeps what it printed.

A cell that is wrong stands in the ledger only if a file of accusations/ printed, in that very release, that what it
trained is not as promised (show.py). The files also run in the neighbouring releases that are right: there they must
print that it is.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.record.files import write_whole
from t5bench_ledger import environments, tables
from t5bench_ledger.changes import is_withdrawn, lacks_file
from t5bench_ledger.judge import RIGHT, WRONG
from t5bench_ledger.measure import publish
from t5bench_ledger.modes import BESIDE, library_of
from t5bench_ledger.pairs.page import files_of, read_summary
from t5bench_ledger.pairs.settings import Case
from t5bench_ledger.show import Accusation, accusations, statements
from t5bench_ledger.spans import public

RUNNER = Path(__file__).with_name("forked_files.py")


def release_and_torch(cell: tables.Cell) -> tuple[str, str]:
    """Of a cell that needs PyTorch alone, the release is PyTorch's."""
    torch = public(cell["torch"])
    return cell["release"] or torch, torch


Place = tuple[str, str, str]
"""A library, its release, and PyTorch's."""


def place_of(cell: tables.Cell) -> Place:
    return library_of(cell["strategy"]), *release_and_torch(cell)


def speaks_for(accusation: Accusation, cell: tables.Cell) -> bool:
    return accusation.is_of(library_of(cell["strategy"]), cell["strategy"], cell["mode"])


def right_neighbours(cells: Iterable[tables.Cell]) -> list[tables.Cell]:
    """The right cells beside wrong ones of the same way of training: a file must find them right."""
    ways: dict[tuple[str, str, str], list[tables.Cell]] = {}
    for cell in cells:
        torch = public(cell["torch"]) if cell["release"] else ""
        ways.setdefault((cell["strategy"], cell["mode"], torch), []).append(cell)
    found = []
    for own in ways.values():
        ordered = sorted(own, key=lambda cell: Version(release_and_torch(cell)[0]))
        for position, cell in enumerate(ordered):
            beside = ordered[max(0, position - 1) : position + 2]
            if cell["verdict"] == RIGHT and any(each["verdict"] == WRONG for each in beside):
                found.append(cell)
    return found


def wanted(cells: Sequence[tables.Cell]) -> dict[Place, list[Accusation]]:
    """The files to run next, by place: as few as speak for all that is wrong and not shown yet.

    A file that does not show what it speaks for has run then, so another pass may want a further one.
    """
    places: dict[Place, list[tables.Cell]] = {}
    for cell in cells:
        if lacks_file(cell) and not is_withdrawn(cell):
            places.setdefault(place_of(cell), []).append(cell)
    made: dict[Place, list[Accusation]] = {}
    for place, own in places.items():
        made[place] = fewest(own, [each for each in accusations() if each.library == place[0]], place[1:])
    for cell in right_neighbours(cells):
        place = place_of(cell)
        for accusation in accusations():
            chosen = made.setdefault(place, [])
            has_run = place[1:] in accusation.outputs or accusation in chosen
            if speaks_for(accusation, cell) and not has_run:
                chosen.append(accusation)
    for place, accusation in of_pairs():
        chosen = made.setdefault(place, [])
        if place[1:] not in accusation.outputs and accusation not in chosen:
            chosen.append(accusation)
    ordered = sorted(made.items(), key=lambda item: (item[0][0], Version(item[0][1])), reverse=True)
    return {place: files for place, files in ordered if files}


def of_pairs() -> Iterator[tuple[Place, Accusation]]:
    """Where pairs of settings were reduced to a form that a file speaks for."""
    for entry in read_summary():
        torch = public(entry["torch"])
        for found in entry["findings"]:
            for accusation in files_of(entry["library"], Case(**found["case"])):
                yield (entry["library"], entry["release"] or torch, torch), accusation


def fewest(cells: Sequence[tables.Cell], files: Sequence[Accusation], place: tuple[str, str]) -> list[Accusation]:
    """Files that have not run at a place: that which speaks for most of the cells first, then for most of the rest."""
    left = list(cells)
    unused = [each for each in files if place not in each.outputs]
    chosen = []
    while unused:
        best = max(unused, key=lambda each: sum(speaks_for(each, cell) for cell in left))
        if not any(speaks_for(best, cell) for cell in left):
            break
        chosen.append(best)
        unused.remove(best)
        left = [cell for cell in left if not speaks_for(best, cell)]
    return chosen


class Runner:
    """The process that runs files with one release of torch, which it imports once: forked_files.py."""

    def __init__(self, torch: str, output: Path) -> None:
        other = None if torch == environments.own_torch() else torch
        self.torch = other
        self.python = environments.base_python(other)
        self.output = output
        self.asked = 0
        added = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [str(self.python), str(RUNNER)],
            env=inherited | added,
            cwd=output,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, library: str, release: str, files: Sequence[Path]) -> dict[str, str]:
        """What the files printed in a release, by name. Raises Problem."""
        needed = {} if library == "torch" else {library: release} | BESIDE[library]
        folders = [environments.release_folder(each, self.python, self.torch, name) for name, each in needed.items()]
        directory = self.output / f"{library}-{release}"
        directory.mkdir(parents=True, exist_ok=True)
        self.asked += 1
        request = {
            "number": self.asked,
            "library": library,
            "folders": list(map(str, folders)),
            "files": list(map(str, files)),
            "directory": str(directory),
        }
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line or json.loads(line)["number"] != self.asked:
            raise Problem(f"the process that runs files ended at {library} {release}", f"See {directory}")
        printed = {file.name: directory / f"{file.name}.out" for file in files}
        return {name: path.read_text(errors="replace") for name, path in printed.items() if path.exists()}

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def keep(accusation: Accusation, said: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Adds what a file said to what it said in other releases."""
    path = accusation.path.with_suffix(".txt")
    lines: dict[tuple[str, str], Sequence[str]] = {**statements(accusation.printed), **said}
    ordered = sorted(lines.items(), key=lambda item: (Version(item[0][0]), Version(item[0][1])))
    write_whole(path, "".join(f"{line}\n" for _, own in ordered for line in own))


def run(args: argparse.Namespace, releases: str) -> int:
    """releases: those to run in, as "deepspeed==0.18.2"; "" for all that are accused. Raises Problem."""
    raise_on_signals()
    output = (args.output or REPOSITORY / "outputs" / "ledger").resolve() / "accusations"
    output.mkdir(parents=True, exist_ok=True)
    named = {name if "==" in name else f"deepspeed=={name}" for name in releases.split(",") if name}
    cells = tables.read(tables.CELLS)
    failed: set[Place] = set()
    runners: dict[str, Runner] = {}
    with contextlib.ExitStack() as stack:
        while True:
            accusations.cache_clear()  # it has read what files had printed before
            left = {place: files for place, files in wanted(cells).items() if place not in failed}
            if named:
                left = {place: files for place, files in left.items() if f"{place[0]}=={place[1]}" in named}
            if not left:
                break
            for number, (place, files) in enumerate(left.items(), 1):
                if place[2] not in runners:
                    runners[place[2]] = Runner(place[2], output)
                    stack.callback(runners[place[2]].end)
                silent = ran_at(place, files, runners[place[2]], f"[{number}/{len(left)}]")
                failed |= {place} if silent else set()
    if args.publish:
        publish(cells)
    return 1 if failed else 0


def ran_at(place: Place, files: Sequence[Accusation], runner: Runner, label: str) -> list[str]:
    """Runs files and keeps what they said; the names of those that said nothing. Raises Problem."""
    begin = time.monotonic()
    found = runner.run(place[0], place[1], [each.path for each in files])
    silent = []
    for accusation in files:
        said = statements(found.get(accusation.path.name, ""))
        if said:
            keep(accusation, said)
        else:
            silent.append(accusation.path.stem)
    names = ", ".join(each.path.stem for each in files)
    note(f"{label} {place[0]} {place[1]}, torch {place[2]}: {names}, {time.monotonic() - begin:.0f} s")
    if silent:
        note(f"error: {', '.join(silent)} said nothing; see {runner.output}")
    return silent
