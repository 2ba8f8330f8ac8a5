"""Ends a run that nothing else would end: its launcher was killed, another node failed or went, or it stands still.

Before it ends a run for want of progress it asks every worker where it is: SIGABRT makes Python print its stacks
(PYTHONFAULTHANDLER, which the launchers set), one worker after another, so that the log tells whose stacks they are.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.record.status import (
    CANCELLED,
    COMPLETE,
    NETWORK,
    TIMEOUT,
    Cause,
    Status,
    Strength,
    first_failure,
    weight_of,
)
from t5bench.run.peers import Peers

COMMON_SH = REPOSITORY / "scripts" / "common.sh"
# How long a node is given to notice by itself that another failed: torchrun takes 2 to 3 s to report a worker's end.
GRACE_SECONDS = 10
STACK_SECONDS = 1.0
# TERM, then KILL: what end_marked waits in between, and what it may take in all.
TERM_SECONDS = 10
END_SECONDS = 25
START_SECONDS = 30
SUSPENDED = "a stop by signal (SIGSTOP)"
WENT_AWAY = Status(
    NETWORK,
    "it went away without a word",
    "Look whether it was started anew, or its processes were killed by hand or for want of memory",
)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
# A rank that waits here waits for the others.
_WAITING = ("distributed_c10d.py", "torch/distributed/", "torch/autograd/graph.py")


def is_suspended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def workers(mark: str) -> dict[int, int]:
    """Process id of each rank of this node's run: the children of torchrun, not their data loaders."""
    found: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            variables = (directory / "environ").read_bytes().split(b"\0")
            if f"T5_RUN_MARK={mark}".encode() not in variables:
                continue
            ranks = [int(entry[5:]) for entry in variables if entry.startswith(b"RANK=")]
            parent = (directory / "stat").read_text().rpartition(")")[2].split()[1]
            parents = Path("/proc", parent, "environ").read_bytes().split(b"\0")
            if ranks and not any(entry.startswith(b"RANK=") for entry in parents):
                found[ranks[0]] = int(directory.name)
    return found


class Stacks:
    """The innermost frame of each rank, from what faulthandler prints when a worker is aborted."""

    def __init__(self) -> None:
        self.rank: int | None = None  # whose stacks come now
        self.frames: dict[int, str] = {}
        self.in_current_thread = False

    def read(self, line: str) -> None:
        if self.rank is None or self.rank in self.frames:
            return
        if line.startswith(("Current thread", "Thread 0x")):
            self.in_current_thread = line.startswith("Current thread")
        elif self.in_current_thread and (match := _FRAME.match(line)):
            self.frames[self.rank] = f"{match['function']} ({match['file']}:{match['line']})"

    def stopped(self) -> dict[int, str]:
        """The ranks that stand elsewhere than in a collective operation, and where."""
        return {rank: frame for rank, frame in self.frames.items() if not any(part in frame for part in _WAITING)}

    def sentence(self) -> str:
        """Which ranks stopped, and where; else where all of them wait."""
        stopped = self.stopped()
        where = "; ".join(f"rank {rank} in {frame}" for rank, frame in sorted((stopped or self.frames).items()))
        if not where:
            return "no worker told where it is"
        return f"it stopped at {where}" if stopped else f"all ranks here wait for others: {where}"


class Guard:
    """Looks once a second, in a thread of its own. ``verdict`` and ``cause`` say why it ended the run, if it did."""

    def __init__(
        self,
        launcher: int,
        mark: str,
        peers: Peers,
        stacks: Stacks,
        *,
        watchdog_seconds: float,
        rendezvous_seconds: float,
    ) -> None:
        self.launcher, self.mark, self.peers, self.stacks = launcher, mark, peers, stacks
        self.watchdog_seconds = watchdog_seconds
        # torchrun tries twice, and needs a moment before and after.
        self.workers_due_at: float | None = time.monotonic() + 2 * rendezvous_seconds + START_SECONDS
        self.verdict: Status | None = None
        self.cause: Cause | None = None
        self.others_failed_at: float | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """The run has ended: stop, but first tell why if this ended it."""
        self.ended.set()
        self.thread.join(END_SECONDS)

    def _watch(self) -> None:
        while not self.ended.wait(1):
            if os.getppid() != self.launcher:
                self._end_processes()
                return
            if self._others_failed() or self._never_starts() or self._stands_still():
                self._end_processes()
                return

    def _decide(self, verdict: Status, strength: Strength) -> None:
        self.cause = Cause(verdict.name, strength, verdict.reason, verdict.remedy, time.time(), verdict.reason)
        self.verdict = verdict

    def _end_processes(self) -> None:
        end = [
            "bash",
            "-c",
            'source "$1" && end_marked "$2" "$3"',
            "bash",
            str(COMMON_SH),
            self.mark,
            str(TERM_SECONDS),
        ]
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(end, check=False, timeout=END_SECONDS)

    def _others_failed(self) -> bool:
        failed = [end for end in self.peers.ends.values() if end["status"] != COMPLETE]
        if not failed and not self.peers.gone:
            self.others_failed_at = None
            return False
        self.others_failed_at = self.others_failed_at or time.monotonic()
        if time.monotonic() - self.others_failed_at < GRACE_SECONDS:
            return False
        if not failed:
            node = min(self.peers.gone)
            where = f"node {node} ({self.peers.hosts.get(node, '?')})"
            reason = f"ended because {where} failed: {WENT_AWAY.reason}"
            self._decide(Status(NETWORK, reason, WENT_AWAY.remedy), Strength.VICTIM)
            return True
        first = first_failure(failed)
        where = f"node {first['node']} ({first['host']})"
        # Who waited in vain may have waited for a worker here.
        stopped = self._where_workers_are() if weight_of(first) == Strength.WAITED else None
        if stopped:
            remedy = f"{where} waited for it in vain. The stacks of every worker here are in this node's log"
            self._decide(Status(TIMEOUT, stopped, remedy), Strength.CAUSE)
        else:
            became = "was cancelled" if first["status"] == CANCELLED else "failed"
            reason = f"ended because {where} {became}: {first['reason']}"
            self._decide(Status(first["status"], reason, first["remedy"]), Strength.VICTIM)
        return True

    def _never_starts(self) -> bool:
        """torchrun waits without end for something that listens at the master's port and is no torchrun."""
        if self.workers_due_at is None or time.monotonic() < self.workers_due_at:
            return False
        if workers(self.mark):
            self.workers_due_at = None
            return False
        verdict = Status(
            TIMEOUT,
            f"torchrun found no other node at {self.peers.address}: what listens at the master's port does not answer",
            "Look at rank 0: its launcher may have refused to start. Choose another MASTER_PORT on every node",
        )
        self._decide(verdict, Strength.CAUSE)
        return True

    def _stands_still(self) -> bool:
        waited = time.monotonic() - self.peers.progress
        if not self.watchdog_seconds or waited < self.watchdog_seconds:
            return False
        after = f"after iteration {self.peers.iteration}" if self.peers.iteration else "before the first iteration"
        stopped = self._where_workers_are()
        verdict = Status(
            TIMEOUT,
            f"no iteration in {waited:.0f} s, {after}: {self.stacks.sentence()}",
            "The stacks of every worker are in the node's log; WATCHDOG_SECONDS is how long the watchdog waits",
        )
        self._decide(verdict, Strength.CAUSE if stopped else Strength.WAITED)
        return True

    def _where_workers_are(self) -> str | None:
        """Ends the workers, each with its stacks; which of them stopped other than to wait for others, if one did."""
        for rank, pid in sorted(workers(self.mark).items()):
            if is_suspended(pid):
                self.stacks.frames[rank] = SUSPENDED
            self.stacks.rank = rank
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)
            time.sleep(STACK_SECONDS)
        return self.stacks.sentence() if self.stacks.stopped() else None
