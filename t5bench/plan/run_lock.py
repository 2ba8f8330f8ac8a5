"""Who holds a directory: if several runs or sweeps start in one at the same moment, exactly one of them gets it.

A claim is a file ``NAME.claim.N`` that only its holder could create, which is atomic on NFS too. The highest N counts.
If its holder is gone, the next claim is created; nothing is removed, so nobody removes a claim that was just made.

A run has two kinds of claims. ``run.claim.N`` says which run the directory belongs to: the first node creates it, and
the others join it if theirs is the same run. ``nodeR.claim.N`` is the place of node R. The directory is held while one
of these claims is.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from t5bench import Problem
from t5bench.plan import shared_facts
from t5bench.record import files
from t5bench.record.files import write_whole
from t5bench.record.hosts import Host

TOUCH_SECONDS = 10.0
# A holder on another host counts as gone if it has not touched its claim for this long, by the file server's clock.
SILENT_SECONDS = 120.0
# So long if another node's part of the run has ended since, and with it the run.
SILENT_AFTER_END_SECONDS = 30.0
RUN = "run"
MASTER = "the master"


@dataclass(frozen=True)
class Holder:
    """The content of a claim."""

    host: str
    boot: str
    processes: list[tuple[int, str]]
    """Their ids, and when each started."""
    has_ended: bool = False
    """Whether its last process was about to end: on another host that cannot be seen."""
    run: dict[str, str] = field(default_factory=dict)
    """In a run's claim: what its nodes have alike."""

    @classmethod
    def of(cls, pid: int, run: Mapping[str, str] | None = None) -> "Holder":
        return cls(socket.gethostname(), _boot(), [(pid, _started(pid))], run=dict(run or {}))

    @property
    def name(self) -> str:
        pids = ", ".join(dict.fromkeys(str(pid) for pid, _ in self.processes))
        return f"process {pids} on {self.host}"


def take(directory: Path, name: str, pid: int) -> None:
    """Claims the name in the directory for a process. Raises Problem if another holds it, and OSError."""
    now = _server_time(directory)
    while not _create(directory, name, check(directory, name, now), Holder.of(pid)):
        pass


def take_for_run(directory: Path, node: int, pid: int, run: Mapping[str, str]) -> None:
    """Claims a node's place in the directory for a process of the run. Raises Problem if another holds the place or the
    directory, and OSError. run: what all nodes of the run have alike."""
    now = _server_time(directory)
    while True:
        check_run(directory, run, now)
        following = _following(_newest(directory, RUN))
        if _live_holders(directory, now) or _create(directory, RUN, following, Holder.of(pid, run)):
            break
    is_alone = False
    try:
        take(directory, f"node{node}", pid)
        # The run's other nodes may have ended, and another run begun, before this one had its place.
        check_run(directory, run, now)
        is_alone = True
    finally:
        if not is_alone:
            release(directory, f"node{node}", pid)


def check(directory: Path, name: str, now: float | None = None) -> int:
    """The number of the next claim. now: the file server's time. Raises Problem if somebody holds the name."""
    path = _newest(directory, name)
    if path and _is_live(path, now or time.time()):
        raise _in_progress(directory, path)
    return _following(path)


def check_run(directory: Path, run: Mapping[str, str], now: float | None = None) -> None:
    """Raises Problem if a node of another run holds the directory."""
    live = _live_holders(directory, now or time.time())
    if not live:
        return
    claim = _newest(directory, RUN)
    holder = _read(claim) if claim else None
    if not holder:
        raise _in_progress(directory, live[0])
    theirs = dict(holder.run)
    ours = dict(run)
    their_master = Host.of(theirs.get(MASTER, ""))
    if their_master.is_same_as(Host.of(ours.get(MASTER, ""))):  # perhaps under another name
        theirs.pop(MASTER, None)
        ours.pop(MASTER, None)
    different = shared_facts.difference(theirs, "there", ours, "here")
    if different:
        raise _in_progress(directory, live[0], f", which is another run: {different}")


def is_held(directory: Path, node: int) -> bool:
    """Whether a process has the node's place. Raises OSError."""
    path = _newest(directory, f"node{node}")
    return path is not None and _is_live(path, _server_time(directory))


def keep(directory: Path, name: str) -> None:
    """Shows other hosts, until this process ends, that the holder of the claim is alive."""
    path = _newest(directory, name)
    if not path:
        return

    def touch() -> None:
        while True:
            time.sleep(TOUCH_SECONDS)
            with contextlib.suppress(OSError):
                os.utime(path)

    threading.Thread(target=touch, daemon=True).start()


def release(directory: Path, name: str, pid: int) -> None:
    """Says to other hosts, which do not see the process, that it no longer holds this claim or its run's."""
    for path in filter(None, (_newest(directory, name), _newest(directory, RUN))):
        holder = _read(path)
        if holder and holder.host == socket.gethostname() and pid in [own for own, _ in holder.processes]:
            with contextlib.suppress(OSError):
                write_whole(path, json.dumps(asdict(replace(holder, has_ended=True))))


def _server_time(directory: Path) -> float:
    """The file server's time, and a view of the directory that is no older. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    os.utime(directory)
    return directory.stat().st_mtime


def _create(directory: Path, name: str, number: int, holder: Holder) -> bool:
    """Whether the claim of this number was created: another may have been faster. Raises OSError."""
    claim = directory / f"{name}.claim.{number}"
    try:
        with claim.open("x") as file:
            file.write(json.dumps(asdict(holder)))
    except FileExistsError:
        return False
    except OSError:
        claim.unlink(missing_ok=True)
        raise
    for path in directory.glob(f"{name}.claim.*"):
        if 0 < _number(path) < number:
            with contextlib.suppress(OSError):
                path.unlink()
    return True


def _in_progress(directory: Path, path: Path, which: str = "") -> Problem:
    holder = _read(path)
    remedy = "Wait for it, stop it, or choose another directory"
    if which:
        remedy += f". If this is a node of that run: {shared_facts.REMEDY[0].lower()}{shared_facts.REMEDY[1:]}"
    who = holder.name if holder else f"{path.name}, which was just made, cannot be read"
    remedy += f". If it no longer exists, remove {path}"
    return Problem(f"a run is already in progress in {directory} ({who}){which}", remedy)


def _live_holders(directory: Path, now: float) -> list[Path]:
    """The newest claims of the run and of its nodes, as far as their holders are alive."""
    names = {path.name.partition(".")[0] for path in directory.glob("node*.claim.*")}
    newest = [_newest(directory, name) for name in (*sorted(names), RUN)]
    return [path for path in newest if path and _is_live(path, now)]


def _number(path: Path) -> int:
    """A claim's number; 0 for a copy such as node0.claim.1.bak."""
    return int(path.suffix[1:]) if path.suffix[1:].isdecimal() else 0


def _following(claim: Path | None) -> int:
    return _number(claim) + 1 if claim else 1


def _newest(directory: Path, name: str) -> Path | None:
    return max(filter(_number, directory.glob(f"{name}.claim.*")), key=_number, default=None)


def _read(path: Path) -> Holder | None:
    """A claim's content; None if it cannot be read even after a moment, because its holder may be writing it."""
    for _ in range(10):
        with contextlib.suppress(files.RecordError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            content = json.loads(files.read(path))
            return Holder(
                host=str(content["host"]),
                boot=str(content["boot"]),
                processes=[(int(pid), str(start)) for pid, start in content["processes"]],
                has_ended=bool(content.get("has_ended")),
                run={str(name): str(value) for name, value in content.get("run", {}).items()},
            )
        time.sleep(0.05)
    return None


def _is_live(path: Path, now: float) -> bool:
    holder = _read(path)
    if holder and holder.host == socket.gethostname():
        return holder.boot == _boot() and any(_started(pid) == start != "" for pid, start in holder.processes)
    if holder and holder.has_ended:
        return False
    try:
        touched = path.stat().st_mtime
        patience = SILENT_AFTER_END_SECONDS if _others_ended_after(path, touched) else SILENT_SECONDS
        return now - touched < patience
    except OSError:  # a broken link, or removed meanwhile
        return False


def _others_ended_after(path: Path, touched: float) -> bool:
    """Whether another node's claim says that its part has ended, later than this claim was last touched."""
    if not path.name.startswith(("node", f"{RUN}.")):
        return False
    for other in path.parent.glob("node*.claim.*"):
        holder = _read(other) if other != path and other.stat().st_mtime > touched else None
        if holder and holder.has_ended:
            return True
    return False


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> str:
    """When a process started, because process ids are reused; empty if it has ended."""
    try:
        state, *rest = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]
