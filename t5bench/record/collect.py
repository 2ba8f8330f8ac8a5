"""``python -m t5bench collect RUN FROM...``: copies the parts of a run into one directory, for nodes without a shared
file system."""

import argparse
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from t5bench import note
from t5bench.record.files import RecordError, own_files, read
from t5bench.record.hosts import BEGINS, ssh
from t5bench.record.records import SHARED_KEYS, differences, load, read_parts, write_run
from t5bench.record.status import CONFIGURATION, EXIT_CODES
from t5bench.text import visible

# [user@]host:directory; an IPv6 address is in brackets, or its directory begins with a slash.
_SOURCE = re.compile(r"([^]]*\]|[^/]*(?=:/)|[^:]*):(.*)", re.DOTALL)
# Checkpoints stay where they are: they can be as large as the disk, and a comparison does not need them.
LEFT_OUT = ("checkpoints", "comparison")


@contextmanager
def local_copy(source: str) -> Iterator[Path]:
    """The directory itself, or a temporary copy of HOST:DIRECTORY. Raises RecordError."""
    if Path(source).is_dir() or ":" not in source:
        yield Path(source)
        return
    host, directory = _SOURCE.fullmatch(source).groups()
    exclusions = " ".join(f"--exclude=./{name}" for name in LEFT_OUT)
    remote = ssh(re.sub(r"[][]", "", host), f"echo {BEGINS}; tar -C {shlex.quote(directory)} {exclusions} -cf - .")
    with tempfile.TemporaryDirectory() as unpacked, tempfile.TemporaryFile(buffering=0) as archive:
        result = subprocess.run(remote, stdout=archive, stderr=subprocess.PIPE, check=False)
        if result.returncode:
            raise RecordError(f"cannot fetch {source}: {visible(result.stderr.decode(errors='replace').strip())}")
        archive.seek(0)
        any(line.endswith(f"{BEGINS}\n".encode()) for line in archive)  # up to there
        if subprocess.run(["tar", "-C", unpacked, "-xf", "-"], stdin=archive, check=False).returncode:
            raise RecordError(f"cannot unpack what {source} sent: see tar's message")
        yield Path(unpacked)


def misfits(here: Mapping[str, Any], other: Mapping[str, Any], *, is_same_run: bool) -> Iterator[str]:
    """Why the parts belong to different runs: other strategy or settings, another attempt, or separate times.

    Times are compared only where the recorders did not tell each other their attempt's name: clocks may differ.
    is_same_run: the user says so, whatever the times.
    """
    yield from (text for text in differences(here, other) if not text.startswith(SHARED_KEYS))
    if _attempts(here, other):
        if here["attempt"] != other["attempt"]:
            yield f"it began {other['started']}: a different attempt from this one, which began {here['started']}"
    elif not is_same_run:
        last_start = max(here["started"], other["started"])
        first_end = min(part["ended"] or _LATER for part in (here, other))
        if last_start > first_end:
            its, own = (f"from {part['started']} to {part['ended']}" for part in (other, here))
            yield f"it ran {its}, this one {own}. If the nodes' clocks differ, add --same-run"


_LATER = "9"  # than any time, as text


def _attempts(here: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both nodes knew the name of their attempt at the run."""
    return bool(here.get("attempt") and other.get("attempt"))


def outdated(parts: Mapping[Path, Mapping[str, Any]]) -> set[Path]:
    """The paths of those that an earlier attempt wrote: one of them is where a later one set its own aside."""
    aside = {read(path) for place in {path.parent for path in parts} for path in place.glob("node*.json.[0-9]*")}
    known = {path for path in parts if read(path) in aside}
    resumed = [part for part in parts.values() if known and part["plan"]["resume_from"]]
    if not resumed:
        return known
    newest = max(resumed, key=lambda part: part["started"])

    def is_older(part: Mapping[str, Any]) -> bool:
        if _attempts(part, newest) and part["attempt"] == newest["attempt"]:
            return False
        return bool(part["ended"] and part["ended"] < newest["started"])

    return known | {path for path, part in parts.items() if is_older(part)}


def bring(source: Path, name: str, directory: Path, *, is_same_run: bool = False) -> None:
    """Copies what a node left in source to the run directory, where nothing stays of an attempt that was resumed since.
    Raises RecordError."""
    if source.exists() and source.samefile(directory):
        return
    places = [place for place in (source, directory) if any(place.glob("node*.json"))]
    if source not in places:  # which may be a temporary copy, whose name says nothing
        raise RecordError(f"{name} holds no record of a run (no node*.json)")
    everything = {place / f"node{part['node']}.json": part for place in places for part in read_parts(place)}
    old = outdated(everything)
    new = {path: part for path, part in everything.items() if path not in old}
    arriving = [part for path, part in new.items() if path.parent == source]
    present = [part for path, part in new.items() if path.parent == directory]
    _check_belongs(arriving, present, name, directory, is_same_run=is_same_run)
    nodes = {f"node{part['node']}" for part in arriving}
    left: set[Path] = set()  # files of earlier attempts
    for path in old:
        left |= set(own_files(path.parent, everything[path]["node"], everything[path]["nnodes"]))
    # Besides what is left of an earlier attempt, its checksums.
    for path in [*left, *(directory / f"{node}.sha256" for node in nodes)]:
        if path.parent == directory:
            path.unlink(missing_ok=True)

    def skipped(folder: str, names: list[str]) -> set[str]:
        return _special_files(folder, names) | (not_copied(names) if Path(folder) == source else set())

    def not_copied(names: list[str]) -> set[str]:
        """Other nodes' files that already exist here, and what is left of an earlier attempt."""
        here = {name for name in names if name.partition(".")[0] not in nodes and (directory / name).exists()}
        return here | {path.name for path in left if path.parent == source} | {*LEFT_OUT, "run.json"}

    try:
        shutil.copytree(source, directory, ignore=skipped, dirs_exist_ok=True)
    except OSError as error:  # shutil.Error is one
        raise RecordError(f"cannot copy {name}: {error}") from error


def _check_belongs(
    arriving: Sequence[Mapping[str, Any]],
    present: Sequence[Mapping[str, Any]],
    name: str,
    directory: Path,
    *,
    is_same_run: bool,
) -> None:
    """Raises RecordError unless all parts are of one run, and no two of one node."""
    for part, other in product(arriving, present):
        for misfit in misfits(other, part, is_same_run=is_same_run):
            raise RecordError(f"{name} belongs to another run: {misfit}")
        if other["node"] == part["node"] and other != part:
            raise RecordError(f"{name} and {directory} have different files node{part['node']}.json")


def _special_files(folder: str, names: Iterable[str]) -> set[str]:
    """Links to directories, pipes and devices."""
    paths = [Path(folder, name) for name in names]
    return {path.name for path in paths if not path.is_file() and (path.is_symlink() or not path.is_dir())}


def run(args: argparse.Namespace) -> int:
    try:
        args.run.mkdir(parents=True, exist_ok=True)
        for source in args.sources:
            with local_copy(source) as directory:
                bring(directory, source, args.run, is_same_run=args.same_run)
        record = write_run(args.run)
        remarks = load(args.run).remarks
    except (RecordError, OSError) as error:
        note(f"error: {error}")
        return EXIT_CODES[CONFIGURATION]
    nodes = ", ".join(str(node["node"]) for node in record["nodes"])
    plan = record["plan"]
    ended = ": ".join(filter(None, (record["status"], record["reason"])))
    print(f"{args.run}: {plan['strategy']['name']}, nodes {nodes} of {plan['layout']['nnodes']}, {ended}")
    for sentence in (*record["differences"], *remarks):
        note(f"warning: {sentence}")
    return 0
