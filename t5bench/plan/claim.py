"""Who holds a directory: if several runs or sweeps start in one at the same moment, exactly one of them gets it.

A claim is a file ``NAME.claim.N`` that only its holder could create, which is atomic on NFS too. The highest N counts.
If its holder is gone, the next claim is created; nothing is removed, so nobody removes a claim that was just made.
"""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.record.files import write_whole

TOUCH_SECONDS = 10.0
# A holder on another host counts as gone if it has not touched its claim for this long, by the file server's clock.
SILENT_SECONDS = 120.0

Holder = dict[str, Any]  # host, boot, and processes: id and start of each


def take(directory: Path, name: str, pid: int) -> None:
    """Claims the name in the directory for a process. Raises Problem if another holds it, and OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    os.utime(directory)
    now = directory.stat().st_mtime
    holder = {"host": socket.gethostname(), "boot": _boot(), "processes": [[pid, _started(pid)]]}
    while True:
        claim = directory / f"{name}.claim.{check(directory, name, now)}"
        try:
            with claim.open("x") as file:
                file.write(json.dumps(holder))
            break
        except FileExistsError:
            continue
        except OSError:
            claim.unlink(missing_ok=True)
            raise
    for path in directory.glob(f"{name}.claim.*"):
        if 0 < _number(path) < _number(claim):
            path.unlink(missing_ok=True)


def check(directory: Path, name: str, now: float | None = None) -> int:
    """The number of the next claim. now: the file server's time. Raises Problem if somebody holds the name."""
    if not (path := _newest(directory, name)):
        return 1
    if _is_live(holder := _read(path), path, now or time.time()):
        pids = ", ".join(dict.fromkeys(str(pid) for pid, _ in holder.get("processes", [])))
        who = f"process {pids} on {holder['host']}" if holder else "another has just started"
        remedy = f"Wait for it, stop it, or choose another directory. If it no longer exists, remove {path}"
        raise Problem(f"a run is already in progress in {directory} ({who})", remedy)
    return _number(path) + 1


def keep(directory: Path, name: str, pid: int) -> None:
    """Makes this process hold that process's claim too, and show until its end that it is alive."""
    path = _newest(directory, name)
    if not path or [pid, _started(pid)] not in (holder := _read(path)).get("processes", []):
        return
    holder["processes"].append([os.getpid(), _started(os.getpid())])
    write_whole(path, json.dumps(holder))

    def touch() -> None:
        while True:
            time.sleep(TOUCH_SECONDS)
            with contextlib.suppress(OSError):
                os.utime(path)

    threading.Thread(target=touch, daemon=True).start()


def _number(path: Path) -> int:
    """A claim's number; 0 for a copy such as node0.claim.1.bak."""
    return int(path.suffix[1:]) if path.suffix[1:].isdecimal() else 0


def _newest(directory: Path, name: str) -> Path | None:
    return max(filter(_number, directory.glob(f"{name}.claim.*")), key=_number, default=None)


def _read(path: Path) -> Holder:
    """A claim's content; empty if it cannot be read even after a moment, because its holder may be writing it."""
    for _ in range(20):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text())
        time.sleep(0.05)
    return {}


def _is_live(holder: Holder, path: Path, now: float) -> bool:
    if holder.get("host") == socket.gethostname():
        return holder["boot"] == _boot() and any(_started(pid) == start != "" for pid, start in holder["processes"])
    return path.exists() and now - path.stat().st_mtime < SILENT_SECONDS


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> str:
    """When a process started, because process ids are reused; empty if it has ended."""
    try:
        state, *rest = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]
