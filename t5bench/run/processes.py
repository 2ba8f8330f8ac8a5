"""The processes of a run: ``python -m t5bench.run.processes MARK SECONDS`` ends all that carry a mark.

Workers leave torchrun's process group and survive a torchrun that is killed. They are found by T5_RUN_MARK in their
environment.
"""

import contextlib
import signal
import sys
import time

import psutil

TICK_SECONDS = 0.2
# The next run needs a killed process's memory, also on the GPU, and its ports.
KILL_SECONDS = 5.0


def marked(mark: str) -> list[psutil.Process]:
    """The processes that carry the mark; `info` of each has its environ, ppid and status."""
    every = psutil.process_iter(["environ", "ppid", "status"])
    return [process for process in every if (process.info["environ"] or {}).get("T5_RUN_MARK") == mark]


def workers(mark: str) -> dict[int, psutil.Process]:
    """The process of each rank of this node's run: the children of torchrun, not their data loaders."""
    ranks = {process.pid: process for process in marked(mark) if "RANK" in process.info["environ"]}
    return {int(p.info["environ"]["RANK"]): p for p in ranks.values() if p.info["ppid"] not in ranks}


def _signal(number: int, mark: str) -> None:
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _wait(mark: str, seconds: float) -> bool:
    """Waits for the processes to end; whether all did in time."""
    deadline = time.monotonic() + seconds
    while marked(mark):
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
