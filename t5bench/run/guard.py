"""Ends a run that nothing else would end: its launcher was killed, another node failed or went, or it stands still.

Before it ends a run for want of progress it asks every worker where it is: SIGABRT makes Python print its stacks
(PYTHONFAULTHANDLER, which the launchers set), one worker after another, so that the log tells whose stacks they are.
"""

import contextlib
import os
import re
import signal
import threading
import time

from t5bench.record.plan import Plan
from t5bench.record.status import CANCELLED, COMPLETE, TIMEOUT, Cause, Strength, first_failure, weight_of
from t5bench.run import processes
from t5bench.run.peers import Peers

# How long a node is given to notice by itself that another failed: torchrun takes 2 to 3 s to report a worker's end.
GRACE_SECONDS = 10
STACK_SECONDS = 1.0
# TERM, then KILL: what is waited in between, and what ending a run may take in all.
TERM_SECONDS = 10
END_SECONDS = 25
START_SECONDS = 30
SUSPENDED = "a stop by signal (SIGSTOP)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
# A rank that waits here waits for the others.
_WAITING = ("distributed_c10d.py", "torch/distributed/", "torch/autograd/graph.py")


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
    """Looks once a second, in a thread of its own. ``cause`` says why it ended the run, if it did."""

    def __init__(self, plan: Plan, launcher: int, mark: str, peers: Peers, stacks: Stacks) -> None:
        self.launcher, self.mark, self.peers, self.stacks = launcher, mark, peers, stacks
        self.watchdog_seconds = plan.decimal("WATCHDOG_SECONDS")
        # torchrun tries twice, and needs a moment before and after.
        rendezvous_seconds = 2 * plan.decimal("RENDEZVOUS_TIMEOUT")
        self.workers_due_at: float | None = time.monotonic() + rendezvous_seconds + START_SECONDS
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
            if os.getppid() != self.launcher or self._reason_to_end():
                processes.end(self.mark, TERM_SECONDS)
                return

    def _reason_to_end(self) -> bool:
        self.cause = self._others_failed() or self._never_starts() or self._stands_still()
        return self.cause is not None

    def _others_failed(self) -> Cause | None:
        failed = [end for end in self.peers.ends.values() if end["status"] != COMPLETE]
        gone = [] if failed else list(self.peers.gone.values())
        if not failed and not gone:
            self.others_failed_at = None
            return None
        self.others_failed_at = self.others_failed_at or time.monotonic()
        if time.monotonic() - self.others_failed_at < GRACE_SECONDS:
            return None
        first = first_failure(failed or gone)
        where = f"node {first['node']} ({first['host']})"
        # Who waited may have waited for a worker here.
        stopped = self._where_workers_are() if failed and weight_of(first) == Strength.WAITED else None
        if stopped:
            remedy = f"{where} waited for it. The stacks of every worker here are in this node's log"
            return Cause.now(TIMEOUT, stopped, remedy)
        became = "was cancelled" if first["status"] == CANCELLED else "failed"
        reason = f"ended because {where} {became}: {first['reason']}"
        return Cause.now(first["status"], reason, first["remedy"], Strength.VICTIM)

    def _never_starts(self) -> Cause | None:
        """torchrun waits without end for something that listens at the master's port and is no torchrun."""
        if self.workers_due_at is None or time.monotonic() < self.workers_due_at:
            return None
        if processes.workers(self.mark):
            self.workers_due_at = None
            return None
        return Cause.now(
            TIMEOUT,
            f"torchrun found no other node at {self.peers.place.address}:"
            " what listens at the master's port does not answer",
            "Look at rank 0: its launcher may have refused to start. Choose another MASTER_PORT on every node",
        )

    def _stands_still(self) -> Cause | None:
        waited = time.monotonic() - self.peers.progress
        if not self.watchdog_seconds or waited < self.watchdog_seconds:
            return None
        after = f"after iteration {self.peers.iteration}" if self.peers.iteration else "before the first iteration"
        stopped = self._where_workers_are()
        return Cause.now(
            TIMEOUT,
            f"no iteration in {waited:.0f} s, {after}: {self.stacks.sentence()}",
            "The stacks of every worker are in the node's log; WATCHDOG_SECONDS is how long the watchdog waits",
            Strength.CAUSE if stopped else Strength.WAITED,
        )

    def _where_workers_are(self) -> str | None:
        """Ends the workers, each with its stacks; which of them stopped other than to wait for others, if one did."""
        for rank, pid in sorted(processes.workers(self.mark).items()):
            if processes.state(pid)[0] in ("T", "t"):
                self.stacks.frames[rank] = SUSPENDED
            self.stacks.rank = rank
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)
            time.sleep(STACK_SECONDS)
        return self.stacks.sentence() if self.stacks.stopped() else None
