"""The files of a record: written atomically, sealed with checksums when a node ends, and checked when they are read.

``node<R>.sha256``, in the format of ``sha256sum --check``, has the checksums of what node R wrote, as of its end. A
node that is still running, or whose recorder was killed, has none.
"""

import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from t5bench import Problem, digest

# No file of a record comes near these sizes. Only documents are read whole: a sparse file can be larger than memory.
MOST_BYTES = 1 << 30
MOST_BYTES_OF_A_DOCUMENT = 1 << 26
MOST_BYTES_OF_A_LINE = 1 << 20
WHERE_RUNS_ARE = "A launcher leaves its run in OUTPUT_DIR, outputs/<strategy> when unset"
METRICS = "metrics.jsonl"
PROFILE = "profile.json"
_SEALED = re.compile(r"^([0-9a-f]{64})  ([\w.-]+)$", re.ASCII | re.MULTILINE)


class RecordError(Problem):
    """A directory holds no record, or a damaged one: which file, which line, and why."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        otherwise = "Restore its files, move that directory away, or name only the other runs"
        super().__init__(problem, remedy or otherwise)


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader sees the old text or the new one. Raises OSError."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file of a plausible size; never waits for a pipe or a device. Raises RecordError."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
        status = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
        file.close()
        raise RecordError(f"{path} cannot be read: it is not a file, or too large for a record")
    return file


def exists(path: Path) -> bool:
    """Whether there is anything here, also a broken link. Raises RecordError where the file system cannot tell."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def read(path: Path) -> bytes:
    """A whole document. Raises RecordError."""
    with open_file(path) as file:
        try:
            # Python takes as much memory as it is asked to read, before it reads.
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, MOST_BYTES_OF_A_DOCUMENT) + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
    if len(content) > MOST_BYTES_OF_A_DOCUMENT:
        raise RecordError(f"{path} cannot be read: it is larger than {MOST_BYTES_OF_A_DOCUMENT >> 20} MiB")
    return content


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, however long it is, with their ends; the last one may lack its end. Raises RecordError."""
    with open_file(path) as file:
        number = 0
        while True:
            try:
                line = file.readline(MOST_BYTES_OF_A_LINE + 1)
            except OSError as error:
                raise _unreadable(path, error) from error
            if not line:
                return
            number += 1
            if len(line) > MOST_BYTES_OF_A_LINE:
                raise RecordError(f"{path} line {number} is longer than {MOST_BYTES_OF_A_LINE >> 20} MiB")
            yield line


def sha256(path: Path) -> str:
    """In hexadecimal. Raises RecordError."""
    with open_file(path) as file:
        try:
            return digest(file)
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RecordError:
    return RecordError(f"{path} cannot be read: {error.strerror}")


def own_files(directory: Path, node: int, nodes: int) -> list[Path]:
    """The files of a node that are sealed: its own, and those that only the first or the last node writes."""
    names = [f"node{node}.{suffix}" for suffix in ("json", "log", "samples.jsonl")]
    names += [PROFILE] * (node == 0) + [METRICS] * (node == nodes - 1)
    return [path for name in names if exists(path := directory / name)]


def seal(directory: Path, node: int, nodes: int) -> None:
    """Writes node<R>.sha256. Raises OSError, RecordError."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in own_files(directory, node, nodes)]
    write_whole(directory / f"node{node}.sha256", "".join(lines))


def check_seal(directory: Path, node: int, nodes: int) -> None:
    """Raises RecordError if a file has changed since the node ended. A node may have no checksums."""
    manifest = directory / f"node{node}.sha256"
    if not exists(manifest):
        return
    sealed = {name: checksum for checksum, name in _SEALED.findall(read(manifest).decode(errors="replace"))}
    for path in {*own_files(directory, node, nodes), *(directory / name for name in sealed)}:
        if sealed.get(path.name) != sha256(path):
            raise RecordError(f"{path} was changed after the run ended: it does not match its checksum")
