"""Who holds a directory: of several runs or sweeps that start in one at the same moment a single one gets it.

A claim is a file ``NAME.claim.N`` that appears whole, by a hard link, which is atomic on NFS too. The highest N counts:
a claim whose holder is gone is passed over by making the next one, so nobody removes a claim that another just made.
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.record.records import write_whole

TOUCH_SECONDS = 10.0
# A holder on another host is taken for gone when it has not touched its claim for so long, by the file server's clock.
SILENT_SECONDS = 120.0
_CLAIM = re.compile(r"(?P<name>.+)\.claim\.(?P<number>\d+)")

Holder = dict[str, Any]  # run, host, boot and processes, each with its start in the kernel's ticks


def take(directory: Path, name: str, run: str, pid: int) -> Path:
    """The claim of the process. run: what the claims of one run share. Raises Problem where another holds the
    directory, OSError where it cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    holder = {"run": run, "host": socket.gethostname(), "boot": _boot(), "processes": [[pid, _started(pid)]]}
    own = directory / f".{name}.{uuid.uuid4().hex}"
    try:
        own.write_text(json.dumps(holder))
        now = own.stat().st_mtime
        number = _next(directory, name, now)
        while not _made(own, claim := directory / f"{name}.claim.{number}"):
            number = _next(directory, name, now)
    finally:
        own.unlink(missing_ok=True)
    claims = _claims(directory)
    for path in claims.pop(name)[:-1]:
        path.unlink(missing_ok=True)
    # Nodes of one run share a directory; both have made their claims before they look at each other's.
    for path in (paths[-1] for paths in claims.values()):
        if (other := _read(path)).get("run") != run and _is_live(other, path, now):
            write_whole(claim, json.dumps(holder | {"processes": []}))
            raise _held(path, other)
    return claim


def check(directory: Path, name: str) -> None:
    """Raises Problem where somebody holds the name now."""
    if paths := _claims(directory).get(name):
        _refuse_live(paths[-1], time.time())


def keep(directory: Path, name: str, pid: int) -> None:
    """From now on until it ends, this process holds the claim of that one too, and shows that it lives."""
    if not (paths := _claims(directory).get(name)) or [pid, _started(pid)] not in _read(paths[-1]).get("processes", []):
        return
    path, holder = paths[-1], _read(paths[-1])
    holder["processes"].append([os.getpid(), _started(os.getpid())])
    write_whole(path, json.dumps(holder))

    def touch() -> None:
        while True:
            ended.wait(TOUCH_SECONDS)
            with contextlib.suppress(OSError):
                os.utime(path)

    ended = threading.Event()
    threading.Thread(target=touch, daemon=True).start()


def _claims(directory: Path) -> dict[str, list[Path]]:
    """By name, the oldest first."""
    matches = [match for path in directory.glob("*.claim.*") if (match := _CLAIM.fullmatch(path.name))]
    found: dict[str, list[Path]] = {}
    for match in sorted(matches, key=lambda match: int(match["number"])):
        found.setdefault(match["name"], []).append(directory / match[0])
    return found


def _next(directory: Path, name: str, now: float) -> int:
    """The number of the next claim. Raises Problem where the newest is alive."""
    if not (paths := _claims(directory).get(name)):
        return 1
    _refuse_live(paths[-1], now)
    return int(paths[-1].name.rpartition(".")[2]) + 1


def _made(own: Path, claim: Path) -> bool:
    """Whether the claim is now there with this content; False: another made it first. Raises OSError."""
    try:
        os.link(own, claim)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            with claim.open("x") as file:
                file.write(own.read_text())
        except FileExistsError:
            return False
    return True


def _read(path: Path) -> Holder:
    """Empty for one that cannot be read: it may just be written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _refuse_live(path: Path, now: float) -> None:
    if _is_live(holder := _read(path), path, now):
        raise _held(path, holder)


def _is_live(holder: Holder, path: Path, now: float) -> bool:
    """now: the file server's clock."""
    if holder.get("host") == socket.gethostname():
        return holder["boot"] == _boot() and any(_started(pid) == start != "" for pid, start in holder["processes"])
    if holder and not holder["processes"]:
        return False
    try:
        return now - path.stat().st_mtime < SILENT_SECONDS
    except OSError:
        return False


def _held(path: Path, holder: Holder) -> Problem:
    pids = ", ".join(str(pid) for pid, _ in holder.get("processes", []))
    who = f"process {pids} on {holder['host']}" if holder else "who has just begun to"
    return Problem(
        f"a run is going on in {path.parent} ({who})",
        f"Wait for it, end it, or choose another directory. Where it is long gone, remove {path}",
    )


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> str:
    """When a process started, for a process id comes again; empty for one that has ended."""
    try:
        state, *rest = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]
