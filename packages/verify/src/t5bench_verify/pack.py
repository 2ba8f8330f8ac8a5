"""``python -m t5bench pack``: packs a comparison with its evidence, so that ``verify`` can recompute it.

A package is a tar archive: ``runs/`` has the records and logs, ``comparison/`` what is published, and ``package.json``
the checksum of every file. The same runs give the same bytes.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import matplotlib
import msgspec

from t5bench import Problem
from t5bench.compare.comparison import Comparison
from t5bench.record.files import open_file
from t5bench.record.records import SWEEP, looks_like_run, read_list
from t5bench.record.run import Run
from t5bench.report.compare import (
    comparison_of,
    load_runs,
    run_directories,
    sweep_root,
    write,
)
from t5bench_verify.relations import contradictions, copies

CONTENTS = Path("package.json")
RUNS = Path("runs")
PUBLISHED = Path("comparison")
MOST_FAULTS = 8  # that are told of one run
# Of a run directory: the record and the logs of every attempt. Checkpoints and what W&B keeps are not needed.
_PACKED = re.compile(
    r"(node\d+\.(json|log|samples\.jsonl|sha256)|metrics\.jsonl)(\.\d+)?|node\d+\.command\.sh|(run|profile|ds_config)\.json"
)


class Contents(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """package.json."""

    format: Literal[1]
    baseline: str
    allow: list[str]
    peak_tflops: float | None
    absent: list[str]
    """Runs of a sweep's list that left no record."""
    drawn_by: str
    """The version of matplotlib."""
    files: dict[str, str]
    """sha256 by name."""


@contextlib.contextmanager
def working_in(place: str) -> Iterator[None]:
    """In a package's own directory no sentence about its runs says where that is."""
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def packed_runs() -> list[Path]:
    """The run directories of the package that is unpacked here, whatever their names and wherever they lie."""
    return sorted(path for path in RUNS.rglob("*") if looks_like_run(path))


def packed_files(directories: Iterable[Path]) -> list[Path]:
    """What a package has of these runs."""
    files: list[Path] = []
    for directory in directories:
        files += [path for path in directory.iterdir() if _PACKED.fullmatch(path.name)]
    return files


def examined(directories: Sequence[Path]) -> tuple[list[Run], list[str], list[str]]:
    """The runs, why others are left out, and where records contradict themselves or each other. Raises Problem."""
    runs, damaged = load_runs(directories, from_log=True)
    faults = []
    for run in runs:
        faults += [f"{run.directory}: {fault}" for fault in islice(contradictions(run), MOST_FAULTS)]
    faults += copies(runs)
    return runs, damaged, faults


def publish(contents: Contents) -> tuple[Comparison, list[str]]:
    """The comparison of the runs of the package that is unpacked here, and what is wrong with them. Raises Problem."""
    runs, damaged, faults = examined(packed_runs())
    absent = [f"{name} is on the sweep's list of runs but left no record" for name in contents.absent]
    try:
        comparison = comparison_of(
            runs,
            [*damaged, *absent],
            contents.baseline,
            contents.allow,
            contents.peak_tflops,
        )
    except Problem as problem:
        raise Problem("; ".join([*damaged, *faults, str(problem)]), problem.remedy) from problem
    return comparison, [*damaged, *faults]


def pack(arguments: argparse.Namespace) -> tuple[bytes, Comparison]:
    """Raises Problem."""
    directories = {directory.resolve(): directory for directory in run_directories(arguments.runs)}
    root = sweep_root(list(directories))
    contents = Contents(
        format=1,
        baseline=arguments.baseline,
        allow=sorted(arguments.allow),
        peak_tflops=arguments.peak_tflops,
        absent=[name for name in read_list(root) if (root / name).resolve() not in directories],
        drawn_by=matplotlib.__version__,
        files={},
    )
    packed = packed_files(directories)
    if (root / SWEEP).exists():
        packed.append(root / SWEEP)
    with tempfile.TemporaryDirectory() as unpacked, working_in(unpacked):
        for path in packed:
            _copy(path, RUNS / path.relative_to(root))
        comparison, _ = publish(contents)
        write(comparison, PUBLISHED)
        files = {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for name, content in sorted(files.items()):
        contents.files[name] = hashlib.sha256(content).hexdigest()
    files[str(CONTENTS)] = msgspec.json.format(msgspec.json.encode(contents))
    return archive(files), comparison


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_file(path) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


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


def run(arguments: argparse.Namespace) -> int:
    content, comparison = pack(arguments)
    try:
        arguments.output.write_bytes(content)
    except OSError as error:
        reason = f"{arguments.output} cannot be written: {error.strerror}"
        raise Problem(reason, "Name another file: -o FILE") from error
    for problem in comparison.problems:
        print(f"problem: {problem}", file=sys.stderr)
    size = f"{len(comparison.runs)} runs, {len(content):,} bytes"
    print(f"{arguments.output}: {size}. Publish its checksum beside it:")
    print(hashlib.sha256(content).hexdigest())
    return 0
