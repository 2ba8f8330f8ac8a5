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

from t5bench.peers import Peers
from t5bench.status import CRASHED, NETWORK, TIMEOUT, Cause, Status, Strength

COMMON_SH = Path(__file__).resolve().parent.parent / "scripts" / "common.sh"
# How long a node is given to notice by itself that another has failed: its own message is better than ours.
GRACE_SECONDS = 30
STACK_SECONDS = 1.0
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
# A rank that waits here waits for the others.
_WAITING = ("distributed_c10d.py", "torch/distributed/", "torch/autograd/graph.py")


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

    def sentence(self) -> str:
        """Which ranks stopped outside a collective operation, and where; else where all of them wait."""
        stopped = {rank: frame for rank, frame in self.frames.items() if not any(part in frame for part in _WAITING)}
        where = "; ".join(f"rank {rank} in {frame}" for rank, frame in sorted((stopped or self.frames).items()))
        if not where:
            return "no worker told where it is"
        return f"it stopped at {where}" if stopped else f"all ranks here wait for others: {where}"


class Guard:
    """Looks once a second, in a thread of its own. ``verdict`` and ``cause`` say why it ended the run, if it did."""

    def __init__(self, launcher: int, mark: str, peers: Peers, stacks: Stacks, watchdog_seconds: float) -> None:
        self.launcher, self.mark, self.peers, self.stacks = launcher, mark, peers, stacks
        self.watchdog_seconds = watchdog_seconds
        self.verdict: Status | None = None
        self.cause: Cause | None = None
        self.others_failed_at: float | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self.ended.wait(1):
            if os.getppid() != self.launcher:
                self._end_processes()
                return
            if (verdict := self._others()) or (verdict := self._progress()):
                self._decide(verdict)
                self._end_processes()
                return

    def _decide(self, verdict: Status, strength: Strength = Strength.WAITED) -> None:
        self.verdict = verdict
        self.cause = self.cause or Cause(
            verdict.name, strength, verdict.reason, verdict.remedy, time.time(), verdict.reason
        )

    def _end_processes(self) -> None:
        end = ["bash", "-c", 'source "$1" && end_marked "$2" 10', "bash", str(COMMON_SH), self.mark]
        subprocess.run(end, check=False)

    def _others(self) -> Status | None:
        failed = [(node, end) for node, end in self.peers.ends.items() if end["status"] != "complete"]
        if not failed and not self.peers.gone:
            self.others_failed_at = None
            return None
        self.others_failed_at = self.others_failed_at or time.monotonic()
        if time.monotonic() - self.others_failed_at < GRACE_SECONDS:
            return None
        if failed:
            node, end = failed[0]
            return Status(CRASHED, f"ended because node {node} ({end['host']}) failed: {end['reason']}", end["remedy"])
        node = min(self.peers.gone)
        host = self.peers.hosts.get(node, "?")
        return Status(
            NETWORK,
            f"node {node} ({host}) went away without a word",
            "Look whether it has power and whether its launcher was killed",
        )

    def _progress(self) -> Status | None:
        waited = time.monotonic() - self.peers.progress
        if not self.watchdog_seconds or waited < self.watchdog_seconds:
            return None
        for rank, pid in sorted(workers(self.mark).items()):
            self.stacks.rank = rank
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)
            time.sleep(STACK_SECONDS)
        after = f"after iteration {self.peers.iteration}" if self.peers.iteration else "before the first iteration"
        verdict = Status(
            TIMEOUT,
            f"no iteration in {waited:.0f} s, {after}: {self.stacks.sentence()}",
            "The stacks of every worker are in the node's log; WATCHDOG_SECONDS is how long the watchdog waits",
        )
        stopped = self.stacks.sentence().startswith("it stopped")
        self._decide(verdict, Strength.CAUSE if stopped else Strength.WAITED)
        return verdict
