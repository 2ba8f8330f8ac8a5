"""The processes of a run: ``python -m t5bench.run.processes MARK SECONDS`` ends all that carry a mark.

Workers leave torchrun's process group and survive a torchrun that is killed. They are found by T5_RUN_MARK in their
environment.
"""

import contextlib
import signal
import sys
import time

import psutil

from t5bench.text import guard_streams

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


def end(mark: str, seconds: float) -> None:
    """Sends TERM, then KILL after the given seconds. SLURM allows 30 s in all (KillWait)."""
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, KILL_SECONDS)):
        for process in marked(mark):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)  # a suspended process handles TERM only once it continues
        deadline = time.monotonic() + patience
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)


if __name__ == "__main__":
    guard_streams()
    end(sys.argv[1], float(sys.argv[2]))
