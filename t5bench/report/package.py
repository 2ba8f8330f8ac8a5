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
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Literal

import matplotlib
import msgspec

from t5bench import Problem
from t5bench.compare.comparison import Comparison
from t5bench.compare.statistics import event_within
from t5bench.record import log
from t5bench.record.command import script
from t5bench.record.files import METRICS, read
from t5bench.record.log import Iteration
from t5bench.record.plan import FORMAT, Plan, by_name, same_value
from t5bench.record.reader import log_lines
from t5bench.record.records import ENDING, SWEEP, Run, looks_like_run, read_list, read_parts
from t5bench.record.settings import BY_NAME
from t5bench.record.status import COMPLETE
from t5bench.report.command import (
    add_run_arguments,
    comparison_of,
    load_runs,
    run_directories,
    sweep_root,
    write,
)

CONTENTS, RUNS, PUBLISHED = (Path(name) for name in ("package.json", "runs", "comparison"))
MOST_FAULTS = 5  # that are told of one log
CLOCKS_DIFFER = 0.25  # at the most, of an interval, in the median of ENOUGH: a busy machine's lines come late
ENOUGH = 10
# Of a run directory: the record and the logs of every attempt. Checkpoints and what W&B keeps are not needed.
_PACKED = re.compile(
    r"(node\d+\.(json|log|samples\.jsonl|sha256)|metrics\.jsonl)(\.\d+)?|node\d+\.command\.sh|(run|profile|ds_config)\.json"
)

_NATIVE = re.compile(
    r"native engine: .*TP=(\d+) PP=(\d+) DP=(\d+), (\d+) micro-batches.* on (\w+), from iteration (\d+)"
)


class Contents(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """package.json. absent: runs of a sweep's list that left no record; files: sha256 by name."""

    format: Literal[1]
    baseline: str
    allow: list[str]
    peak_tflops: float | None
    absent: list[str]
    drawn_by: str
    files: dict[str, str]


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
    return [path for directory in directories for path in directory.iterdir() if _PACKED.fullmatch(path.name)]


def publish(contents: Contents) -> tuple[Comparison, list[str]]:
    """The comparison of the runs of the package that is unpacked here, and what is wrong with them. Raises Problem."""
    runs, damaged = load_runs(packed_runs(), from_log=True)
    faults = [f"{run.directory}: {fault}" for run in runs for fault in islice(contradictions(run), MOST_FAULTS)]
    absent = [f"{name} is on the sweep's list of runs but left no record" for name in contents.absent]
    try:
        how = contents.baseline, contents.allow, contents.peak_tflops
        return comparison_of(runs, [*damaged, *absent], *how), [*damaged, *faults]
    except Problem as problem:
        raise Problem("; ".join([*damaged, *faults, str(problem)]), problem.remedy) from problem


def contradictions(run: Run) -> Iterator[str]:
    """Where a log says something else than the plan: what the engine printed of its arguments and of its work."""
    layout = run.layout
    planned = layout.tp, layout.pp, layout.dp, layout.micro_batches, run.plan.device, run.plan.resume_from
    # A run whose batch grows is told samples in place of iterations.
    asked = {word: name for name in run.plan.settings if name in BY_NAME for word in BY_NAME[name].arguments}
    words = by_name(run.plan.arguments.words)
    given = {word: (asked[word], value) for word, value in words.items() if word in asked}
    for node in run.nodes:
        for place, _, text in log_lines(run.directory / f"node{node['node']}.log"):
            where = PurePosixPath(place).name
            header = _NATIVE.search(text)
            if header and (run.engine != "native" or header.groups() != tuple(map(str, planned))):
                yield f"{where} shows another run than the plan: {header[0]}"
            # Megatron prints its arguments: ``seed ......... 1234``.
            if printed := re.fullmatch(r"\s+(\w+) \.{3,} (\S+)\s*", text):
                argument = f"--{printed[1].replace('_', '-')}"
                name, value = given.get(argument, ("", printed[2]))
                if not same_value(value, printed[2]):
                    yield f"{where} has {argument} {printed[2]}, and the plan {name} '{value}'"
            yield from _other_samples(where, text, run.plan)
    for line in run.iterations:
        yield from _other_batch(line, run.plan)
    yield from _other_clock(run)
    yield from _other_files(run)


def _other_files(run: Run) -> Iterator[str]:
    """What the launcher wrote of the plan besides the record."""
    for part in read_parts(run.directory):
        path = run.directory / f"node{part['node']}.command.sh"
        if not path.exists():
            yield f"{path.name} is missing"
        elif part["format"] != FORMAT:
            continue  # an earlier version's launcher wrote it in another way
        elif read(path).decode(errors="surrogateescape") != script(Plan.read(part["plan"])):
            yield f"{path.name} has another command than the plan"
    path, written = run.directory / "run.json", _json(msgspec.json.encode(run.record))
    # A run that some nodes never began has none.
    told = _json(read(path)) if path.exists() else None if run.status == COMPLETE else written
    # A run that was killed has an older one.
    if told != written and not (isinstance(told, dict) and any(told.get(key) != run.record[key] for key in ENDING)):
        yield f"{path.name} differs from the nodes' parts"
    path = run.directory / "ds_config.json"
    if run.plan.ds_config and path.exists() and _json(read(path)) != run.plan.ds_config:
        yield f"{path.name} differs from the plan's"


def _json(content: bytes) -> object:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return None


def _other_samples(where: str, text: str, plan: Plan) -> Iterator[str]:
    if not (line := log.iteration(text)):  # of a line in pieces nothing can be said
        return
    *_, (_, _, told) = log.ITERATION.findall(text)
    samples, counted = plan.samples(0, line.iteration), re.search(r" consumed samples: +(\S+) \|", told)
    if counted and counted[1] != str(samples):
        yield f"{where} counts {counted[1]} samples after {line.iteration} iterations, which have {samples}"


def _other_batch(line: Iteration, plan: Plan) -> Iterator[str]:
    """An iteration's time and throughput, which are rounded, belong to the batch, in every attempt."""
    batch, speed = plan.samples(line.iteration - 1, line.iteration), line.samples_per_second
    seconds = line.elapsed_ms / 1000
    if abs(speed * seconds - batch) > 0.00006 * speed + 0.0006 * seconds + 1e-9 * batch:
        found = f"iteration {line.iteration} in {METRICS} has {speed} samples/s and took {seconds} s"
        yield f"{found}, which do not give {batch} samples"


def _other_clock(run: Run) -> Iterator[str]:
    """The recorder's clock and the engine's are two: most intervals without an event take about as long by both."""
    pairs = [
        (after.time - line.time, after.elapsed_ms / 1000 * (after.iteration - line.iteration))
        for line, after in pairwise(run.iterations)
        if line.time and after.time and line.begin == after.begin
        and not event_within(line.iteration, after.iteration, run.plan)
    ]  # fmt: skip
    if len(pairs) < ENOUGH:
        return
    passed, took = (median(each) for each in zip(*pairs, strict=True))
    if abs(passed - took) > CLOCKS_DIFFER * took + 0.005:
        yield f"intervals took {took:.3g} s by {METRICS}, but their lines came {passed:.3g} s apart"


def pack(arguments: argparse.Namespace) -> tuple[bytes, Comparison]:
    """Raises Problem."""
    directories = {directory.resolve(): directory for directory in run_directories(arguments.runs)}
    root = sweep_root(list(directories))
    absent = [name for name in read_list(root) if (root / name).resolve() not in directories]
    how = arguments.baseline, sorted(arguments.allow), arguments.peak_tflops
    contents = Contents(1, *how, absent, matplotlib.__version__, {})
    listed = [root / SWEEP] if (root / SWEEP).exists() else []
    with tempfile.TemporaryDirectory() as place, working_in(place):
        for path in [*listed, *packed_files(directories)]:
            write_file(RUNS / path.relative_to(root), read(path))
        comparison, _ = publish(contents)
        write(comparison, PUBLISHED)
        files = {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    contents.files.update((name, hashlib.sha256(content).hexdigest()) for name, content in sorted(files.items()))
    files[str(CONTENTS)] = msgspec.json.format(msgspec.json.encode(contents))
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
