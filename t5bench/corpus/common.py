"""What the commands that prepare data share: files that appear whole, records of where they came from, and an end."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from t5bench import REPOSITORY, Problem

EXIT_ERROR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAMPLE = REPOSITORY / "megatron_data" / "sample"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content is the file `path` once the block ends; if the block raises, an older file stays."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as stream:
        stream.write(json.dumps(content, indent=2).encode() + b"\n")


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 and objects of a JSONL file, blank lines left out; raises Problem that names a bad line."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
                if b"\\u" in line:
                    json.dumps(record, ensure_ascii=False).encode()
                problem = "" if isinstance(record, dict) else "is not a JSON object"
            except UnicodeDecodeError:
                problem = "is not UTF-8 text"
            except UnicodeEncodeError:
                problem = "holds half of a surrogate pair, which is not text"
            except (ValueError, RecursionError) as error:
                problem = f"is not valid JSON ({one_line(error)})"
            if problem:
                remedy = "Correct or remove that line; each line must be one JSON object in UTF-8"
                raise Problem(f"line {number} of {path} {problem}", remedy)
            yield number, record


def string_in(record: dict[str, Any], key: str, place: str) -> str:
    """What a record holds under a key; raises Problem that names the place of a record without such a string."""
    value = record.get(key)
    if not isinstance(value, str):
        found = "nothing" if value is None else type(value).__name__
        raise Problem(f'{place} has no string as "{key}", but {found}', "Correct or remove it")
    return value


def one_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


def file_facts(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    import hashlib  # a twentieth of the time that --check takes

    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def record_path(prefix: Path) -> Path:
    """The record of a dataset, or, for the prefix `xsum_text`, of the exported `xsum_text.jsonl`."""
    return Path(f"{prefix}.meta.json")


def read_record(prefix: Path) -> dict[str, Any]:
    """The record that says where the files of this prefix came from; empty if there is no such record."""
    try:
        record = json.loads(record_path(prefix).read_text(encoding="utf-8"))
        return record if isinstance(record["source"], str) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def recorded_name(name: str, kind: str = "") -> str:
    """What records call a file or directory (`kind` and its absolute path, or the bundled sample) or a hub's name."""
    path = Path(name).resolve()
    if SAMPLE.resolve() in path.parents:
        return "bundled sample"
    return f"{kind}{path}" if path.exists() else name


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run(command: Callable[[], None]) -> NoReturn:
    """Run a command and end the process: with status 0, 2 after a problem, or 128 + the signal that interrupted it."""
    for number in SIGNALS:
        # Under nohup, or in the background of a script, some are ignored and stay so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        command()
        sys.exit()
    except Problem as error:
        problem = error
    except ImportError as error:
        remedy = f"Run: pip install -r '{REPOSITORY / 'requirements.txt'}'"
        problem = Problem(f"{sys.executable} lacks a package: {error}", remedy)
    except OSError as error:
        remedy = "Check the path, its permissions and the free space"
        problem = Problem(f"{error.filename or 'writing'}: {error.strerror or error}", remedy)
    except KeyboardInterrupt as interrupt:
        sys.exit(128 + interrupt.args[0])
    note(f"error: {problem}\n       {problem.remedy}".rstrip())
    sys.exit(EXIT_ERROR)


def _interrupt(number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)
