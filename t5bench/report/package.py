"""``python -m t5bench pack`` and ``verify``: packs a comparison with its evidence, and checks that it follows from it.

A package is a tar archive: ``runs/`` has the records and logs, ``comparison/`` what is published, and ``package.json``
the checksum of every file. The same runs give the same bytes. ``verify`` reads the logs again, recomputes every figure
and compares it to the last digit.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import matplotlib
import msgspec

from t5bench import Problem
from t5bench.compare.comparison import Comparison
from t5bench.record.files import MOST_BYTES, RecordError, open_file, read, sha256
from t5bench.record.plan import Plan, same_value
from t5bench.record.reader import decoded, log_lines
from t5bench.record.records import SWEEP, Run, looks_like_run, read_list
from t5bench.report.command import (
    PAGE,
    UNFORESEEN,
    add_run_arguments,
    comparison_of,
    find_runs,
    load_runs,
    run_directories,
    sweep_root,
    write,
)

CONTENTS, RUNS, PUBLISHED, FIGURES = "package.json", "runs", "comparison", "comparison.json"
DEEPEST = 8  # levels of directories from the root of a package to a run
MOST_FAULTS = 5  # that are told of one log
# Of a run directory: the record and the logs of every attempt. Checkpoints and what W&B keeps are not needed.
_PACKED = re.compile(
    r"(node\d+\.(json|log|samples\.jsonl|sha256)|metrics\.jsonl)(\.\d+)?|node\d+\.command\.sh|(run|profile|ds_config)\.json"
)
_DRAWING = re.compile(r"<svg.*?</svg>", re.DOTALL)


class Contents(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """package.json. absent: runs of a sweep's list that left no record; files: sha256 by name."""

    format: Literal[1]
    baseline: str
    allow: list[str]
    peak_tflops: float | None
    absent: list[str]
    drawn_by: str
    files: dict[str, str]


# ---- what is published ---------------------------------------------------------------------------------------------


def publish(root: Path, contents: Contents) -> tuple[Comparison, list[str]]:
    """The comparison of the runs in an unpacked package, and what is wrong with them. Raises Problem."""
    runs, damaged = load_runs(list(find_runs(root / RUNS, DEEPEST)), from_log=True)
    faults = [f"{run.directory}: {fault}" for run in runs for fault in islice(contradictions(run), MOST_FAULTS)]
    damaged, faults = ([_inside(root, text) for text in texts] for texts in (damaged, faults))
    absent = [f"{name} is on the sweep's list of runs but left no record" for name in contents.absent]
    relative = [
        replace(run, directory=run.directory.relative_to(root), remarks=[_inside(root, text) for text in run.remarks])
        for run in runs
    ]
    try:
        how = contents.baseline, contents.allow, contents.peak_tflops
        return comparison_of(relative, [*damaged, *absent], *how), [*damaged, *faults]
    except Problem as problem:
        raise Problem("; ".join([*damaged, *faults, str(problem)]), problem.remedy) from problem


def _inside(root: Path, text: str) -> str:
    """A sentence without the place where the package was unpacked."""
    return text.replace(f"{root}{os.sep}", "")


def contradictions(run: Run) -> Iterator[str]:
    """Where a log says something else than the plan: what the engine printed of its arguments and of its work."""
    layout = run.layout
    sizes = (str(layout.tp), str(layout.pp), str(layout.dp), str(layout.micro_batches))
    # A run whose batch grows is told samples in place of iterations.
    asked = {word: (name, s.value) for name, s in run.plan.settings.items() for word in s.argument.split(",")}
    given = {word: asked[word] for word in run.plan.arguments.words if word in asked}
    for node in run.nodes:
        for place, _, text in log_lines(run.directory / f"node{node['node']}.log"):
            where = PurePosixPath(place).name
            header = re.search(r"native engine: .*TP=(\d+) PP=(\d+) DP=(\d+), (\d+) micro-batches", text)
            if header and header.groups() != sizes:
                yield f"{where} shows another layout than the plan: {' '.join(header[0].split()[4:])}"
            # Megatron prints its arguments: ``seed ......... 1234``.
            if printed := re.fullmatch(r"\s+(\w+) \.{3,} (\S+)\s*", text):
                argument = f"--{printed[1].replace('_', '-')}"
                name, value = given.get(argument, ("", printed[2]))
                if not same_value(value, printed[2]):
                    yield f"{where} has {argument} {printed[2]}, and the plan {name} '{value}'"
            yield from _other_work(where, text, run.plan)


def _other_work(where: str, text: str, plan: Plan) -> Iterator[str]:
    """An iteration's samples, and its time and throughput, which are rounded, belong to the batch."""
    fields = dict(re.findall(r" ([\w ()]+?): +([-+.\deE]+) \|", text))
    numbers = re.search(r"\biteration +(\d+)/", text)
    done = int(numbers[1]) if numbers else plan.iterations
    samples, batch = plan.samples(0, done), plan.samples(max(0, done - 1), done)
    if int(fields.get("consumed samples", samples)) != samples:
        yield f"{where} counts {fields['consumed samples']} samples after {done} iterations, which have {samples}"
    try:
        speed = float(fields["samples per second"])
        seconds = float(fields["elapsed time per iteration (ms)"]) / 1000
    except (KeyError, ValueError):
        return
    if abs(speed * seconds - batch) > 0.00006 * speed + 0.0006 * seconds + 1e-9 * batch:
        yield f"{where} has {speed} samples/s and iterations of {seconds} s, which do not give {batch} samples"


# ---- pack ----------------------------------------------------------------------------------------------------------


def pack(arguments: argparse.Namespace) -> tuple[bytes, Comparison]:
    """Raises Problem."""
    directories = run_directories(arguments.runs)
    root = sweep_root(directories)
    known = {directory.resolve() for directory in directories}
    absent = [name for name in read_list(root) if (root / name).resolve() not in known]
    how = arguments.baseline, sorted(arguments.allow), arguments.peak_tflops
    contents = Contents(1, *how, absent, matplotlib.__version__, {})
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        for directory in directories:
            for path in filter(lambda path: _PACKED.fullmatch(path.name), directory.iterdir()):
                write_file(place / RUNS / directory.resolve().relative_to(root) / path.name, read(path))
        if (root / SWEEP).exists():
            write_file(place / RUNS / SWEEP, read(root / SWEEP))
        comparison, _ = publish(place, contents)
        write(comparison, place / PUBLISHED, place)
        files = {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    contents.files.update((name, hashlib.sha256(content).hexdigest()) for name, content in sorted(files.items()))
    files[CONTENTS] = msgspec.json.format(msgspec.json.encode(contents))
    return archive(files), comparison


def write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def archive(files: Mapping[str, bytes]) -> bytes:
    """The same files give the same bytes: no times, no owners, in the order of their names."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 6, packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


# ---- verify --------------------------------------------------------------------------------------------------------


def unpack(package: Path, root: Path) -> Iterator[str]:
    """The files of a package below root; yields what should not be in it. Raises RecordError."""
    seen: set[str] = set()
    try:
        with open_file(package) as file, gzip.GzipFile(fileobj=file) as compressed:
            content = compressed.read(MOST_BYTES)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for entry in tar:
                name = PurePosixPath(entry.name)
                if not entry.isreg() or name.is_absolute() or ".." in name.parts or entry.size > MOST_BYTES:
                    yield f"{entry.name} is not a plain file of a package"
                elif entry.name in seen:
                    yield f"{entry.name} is in the package twice"
                elif content := tar.extractfile(entry):
                    seen.add(entry.name)
                    write_file(root / name, content.read())
    except RecordError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise RecordError(f"{package} cannot be read: {error}") from error


def findings(root: Path) -> Iterator[str]:
    """What is wrong with an unpacked package, a sentence each. Raises Problem."""
    contents = decoded(CONTENTS, read(root / CONTENTS), Contents)
    present = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {CONTENTS}
    for name in sorted(present | contents.files.keys()):
        if name not in present:
            yield f"{name} is missing"
        elif name not in contents.files:
            yield f"{name} was added: {CONTENTS} does not list it"
        elif sha256(root / name) != contents.files[name]:
            yield f"{name} was changed: it does not have its checksum"
    listed = read_list(root / RUNS)
    for name in dict.fromkeys([*listed, *contents.absent]):
        recorded = looks_like_run(root / RUNS / name)
        if name not in listed:
            yield f"{RUNS}/{name} is listed as absent, but is not on the sweep's list of runs"
        elif recorded and name in contents.absent:
            yield f"{RUNS}/{name} is in the package, but is listed as having left no record"
        elif not recorded and name not in contents.absent:
            yield f"{RUNS}/{name} is on the sweep's list of runs but not in the package"
    comparison, faults = publish(root, contents)
    yield from faults
    with tempfile.TemporaryDirectory() as anew:
        write(comparison, Path(anew), root)
        yield from _different(root / PUBLISHED, Path(anew), contents.drawn_by == matplotlib.__version__)


def _different(place: Path, anew: Path, same_drawings: bool) -> Iterator[str]:
    """Where what is published is not what the logs give; the page, which has all of it, where all else is right."""
    found = []
    for path in sorted(anew.iterdir(), key=lambda path: path.name == PAGE):
        if path.name == PAGE and found:
            break
        pair = [read(of / path.name).decode(errors="replace") for of in (place, anew)]
        if path.name == PAGE and not same_drawings:
            pair = [_DRAWING.sub("", text) for text in pair]
        if pair[0] != pair[1]:
            found += _figures(*pair) if path.name == FIGURES else _lines(f"{PUBLISHED}/{path.name}", *pair)
    yield from found


def _lines(name: str, found: str, anew: str) -> Iterator[str]:
    pairs = zip(found.split("\n"), anew.split("\n"), strict=False)
    number = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), anew.count("\n") + 1)
    yield f"{name} line {number} does not follow from the logs"


def _figures(found: str, anew: str) -> Iterator[str]:
    try:
        published = dict(_leaves(decoded(FIGURES, found.encode())))
    except RecordError as error:
        yield str(error)
        return
    computed = dict(_leaves(json.loads(anew)))
    for name in dict.fromkeys([*computed, *published]):
        one, other = published.get(name, "nothing"), computed.get(name, "nothing")
        if one != other:
            yield f"{PUBLISHED}/{FIGURES}: {name} is {one}, but the logs give {other}"


def _leaves(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its place; a row's by the row's label."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    elif isinstance(content, list):
        for number, value in enumerate(content):
            label = value.get("label") if isinstance(value, dict) else None
            yield from _leaves(value, f"{name}[{label or number}]")
    else:
        yield name, content


def verify(package: Path, published: str = "") -> tuple[list[str], int]:
    """What is wrong with a package, and how many numbers were computed anew; published: its checksum, if known."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary).resolve()
        try:
            if published and sha256(package) != published:
                found.append(f"{package} is not the package that was published: its checksum is {sha256(package)}")
            for finding in chain(unpack(package, root), findings(root)):
                found.append(finding)
        except UNFORESEEN as error:
            why = error if isinstance(error, Problem) else f"its records lack what a comparison needs: {error!r}"
            found.append(_inside(root, str(why)))
        figures = root / PUBLISHED / FIGURES
        text = figures.read_text(errors="replace") if figures.is_file() and not found else ""
    return found, len(re.findall(r"(?<![\w\"])-?\d[\d.e+-]*", text))


# ---- the commands --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PACKAGE", help="for example runs.tar.gz")


def run(arguments: argparse.Namespace) -> int:
    content, comparison = pack(arguments)
    try:
        arguments.output.write_bytes(content)
    except OSError as error:
        raise Problem(
            f"{arguments.output} cannot be written: {error.strerror}", "Name another file: -o FILE"
        ) from error
    for problem in comparison.problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"{arguments.output}: {len(comparison.runs)} runs, {len(content):,} bytes. Publish its checksum beside it:")
    print(hashlib.sha256(content).hexdigest())
    return 0
