"""Random damage to the files of a run: bytes, lines, values, whole files."""

import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made_runs import seal

INSERTED = (
    b"\0", b"\xff\xfe", "٣".encode(), b"-", b"9" * 400, b"\n", b"null\n", b"[]\n", b'{"resumed_from": 3}\n',
    b'{"resumed_from": -1}\n', b"[" * 100_000 + b"\n",
)  # fmt: skip
OTHER_VALUES = (
    None, True, -1, -0.0, 0, 1e300, 10**400, float("nan"), float("inf"), "", "x", "nan", "٣", "-1", [], {}, [[]],
    {"a": 1}, "\ud800", "\0", "2099-13-01T00:00:00.000Z", "9" * 5000,
)  # fmt: skip


def pieces_changed(rng: random.Random, path: Path) -> None:
    """Bytes or lines that go, change, come twice or in another order, or have something between them."""
    content = path.read_bytes() or b"x"
    pieces = rng.choice([[b"%c" % byte for byte in content], content.splitlines(keepends=True)])
    one, other = sorted(rng.choices(range(len(pieces)), k=2))
    digit = rng.choice([number for number, piece in enumerate(pieces) if piece.isdigit()] or [one])
    path.write_bytes(b"".join(rng.choice([
        pieces[:one],
        pieces[:one] + pieces[one + 1 :],
        pieces[:one] + pieces[min(other, one + 200) :],
        [*pieces[:other], pieces[one], *pieces[other:]],
        [*pieces[:one], rng.randbytes(1), *pieces[one + 1 :]],
        [*pieces[:digit], b"%d" % rng.randrange(10), *pieces[digit + 1 :]],
        [*pieces[:one], rng.choice(INSERTED), *pieces[one:]],
        pieces[::-1],
        rng.sample(pieces, len(pieces)),
    ])))  # fmt: skip


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in here with each of its keys."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        yield content, key
        yield from places(value)


def values_changed(rng: random.Random, path: Path) -> None:
    """Of a file of JSON or JSON lines: a field that goes, changes, gets another name or another's value; a clock that
    jumps."""
    lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    container, key = rng.choice(list(places(content)))
    value = container.pop(key)
    others = list(container.values() if isinstance(container, dict) else container)
    new = [rng.choice(OTHER_VALUES), rng.choice([value, *others]), str(value), [value]]
    new += [value + more for more in (7200, -7200, 1, -1, value)] if isinstance(value, int | float) else []
    if isinstance(container, dict):
        container.update(rng.choice([{}, {f"{key}x": value}, *({key: each} for each in new)]))
    else:
        container[key:key] = rng.choice([[], *([each] for each in new)])
    lines[number] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")


def file_replaced(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    other = rng.choice(list(path.parent.iterdir()))
    rng.choice([
        lambda: None,
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(rng.choice([str(path), "/dev/zero", "/dev/null", "nowhere", "..", str(other)])),
        lambda: path.with_name("node7.json").write_bytes(content),
        lambda: (path.write_bytes(content), os.truncate(path, 1 << 41)),
        lambda: (path.write_bytes(content), path.chmod(0)),
    ])()  # fmt: skip


KINDS = (pieces_changed, pieces_changed, values_changed, file_replaced)


def mutate(rng: random.Random, run: Path, reseal: bool) -> str:
    """Once or twice; a run that is sealed again has checksums that fit. What was done."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        paths = sorted(path for path in run.iterdir() if path.is_file() and os.access(path, os.R_OK))
        if not paths:
            break
        path = rng.choice(paths)
        mutation = rng.choice(KINDS)
        with contextlib.suppress(ValueError, IndexError, RecursionError, MemoryError, OSError):
            mutation(rng, path)  # some damage cannot be done to what is damaged
        done.append(f"{mutation.__name__} {path.name}")
    if reseal:
        with contextlib.suppress(Exception):
            seal(run)
    return ", ".join(done)
