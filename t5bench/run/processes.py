"""The processes of a run: ``python -m t5bench.run.processes MARK SECONDS`` ends all that carry a mark.

Workers leave torchrun's process group and survive a torchrun that is killed. They are found by T5_RUN_MARK in their
environment.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

TICK_SECONDS = 0.2
# The next run needs a killed process's memory, also on the GPU, and its ports.
KILL_SECONDS = 5.0


def environments(mark: str) -> dict[int, list[bytes]]:
    """The environments (NAME=VALUE) of the processes that carry the mark, by process id."""
    wanted, found = f"T5_RUN_MARK={mark}".encode(), {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in (variables := path.read_bytes().split(b"\0")):
                found[int(path.parent.name)] = variables
    return found


def state(pid: int) -> tuple[str, int]:
    """A process's state, as a letter of /proc (empty if it has ended), and its parent."""
    try:
        letter, parent = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "", 0
    return letter, int(parent)


def workers(mark: str) -> dict[int, int]:
    """Process id of each rank of this node's run: the children of torchrun, not their data loaders."""
    found = environments(mark)
    ranks = {pid: int(entry[5:]) for pid in found for entry in found[pid] if entry.startswith(b"RANK=")}
    return {rank: pid for pid, rank in ranks.items() if state(pid)[1] not in ranks}


def _signal(number: int, mark: str) -> None:
    for pid in environments(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _wait(mark: str, seconds: float) -> bool:
    """Waits for the processes to end; whether all did in time."""
    deadline = time.monotonic() + seconds
    while environments(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(TICK_SECONDS)
    return True


def end(mark: str, seconds: float) -> None:
    """Sends TERM, then KILL after the given seconds. SLURM allows 30 s in all (KillWait)."""
    _signal(signal.SIGTERM, mark)
    # A suspended process handles TERM only once it continues.
    _signal(signal.SIGCONT, mark)
    if not _wait(mark, seconds):
        _signal(signal.SIGKILL, mark)
        _wait(mark, KILL_SECONDS)


if __name__ == "__main__":
    end(sys.argv[1], float(sys.argv[2]))
