"""Stops a run that would not stop otherwise: its launcher was killed, another node failed or left, or it hangs.

Each worker that it ends leaves its stacks in a file (see worker.py), which shows where it was.
"""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

from t5bench.record.plan import Plan
from t5bench.record.status import CANCELLED, COMPLETE, CRASHED, TIMEOUT, Cause, Strength, first_failure, weight_of
from t5bench.record.text import visible
from t5bench.run import processes
from t5bench.run.peers import Peers

# How long a node has to notice another's failure; torchrun takes 2 to 3 s to report a worker's end.
GRACE_SECONDS = 10
# The wait between TERM and KILL, and the longest time that stopping a run may take.
TERM_SECONDS = 10
END_SECONDS = 25
START_SECONDS = 30
STACK_SECONDS = 3
SUSPENDED = "suspended (SIGSTOP)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*?(?=^Current thread|^Thread 0x|\Z)", re.MULTILINE | re.DOTALL)
# Other threads begin in threading.py. Which one is the current is chance: the one that the signal found.
_OF_MAIN = re.compile(r"( in <module>|^  \.\.\.)\s*\Z", re.MULTILINE)  # or too deep to be shown whole
# A rank in one of these files waits for the others, or has timed out.
_WAITING = ("distributed_c10d.py", "torch/distributed/", "torch/autograd/graph.py")


class Stacks:
    """Where each rank of this node was when it was stopped, from the files <prefix>.<rank> that faulthandler wrote."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.suspended: set[int] = set()

    def texts(self) -> dict[int, str]:
        """All threads' stacks by rank, if there are any."""
        found = {}
        for path in self.prefix.parent.glob(f"{self.prefix.name}.*"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.suffix[1:])] = visible(path.read_text(errors="replace"), "\n")
        return {rank: text for rank, text in sorted(found.items()) if text}

    def remove(self) -> None:
        for path in self.prefix.parent.glob(f"{self.prefix.name}.*"):
            path.unlink(missing_ok=True)

    def frames(self) -> dict[int, re.Match[str]]:
        """The innermost frame of each rank's main thread that waits for others, else its innermost one.

        Of the first stacks in a file: a worker that goes on leaves others when it is ended."""
        found = {}
        for rank, text in self.texts().items():
            if main := next(filter(_OF_MAIN.search, _THREAD.findall(text)), ""):
                frames = list(_FRAME.finditer(main))
                found[rank] = next(filter(_waits, frames), frames[0])
        return found

    def stopped(self) -> dict[int, str]:
        """The ranks that are not waiting in a collective operation: where each is stuck, or that it is suspended."""
        standing = {rank: f"stuck in {_where(frame)}" for rank, frame in self.frames().items() if not _waits(frame)}
        return dict(sorted((standing | dict.fromkeys(self.suspended, SUSPENDED)).items()))

    def sentence(self) -> str:
        """Which ranks stopped, and where; if none did, where all of them wait."""
        if stopped := self.stopped():
            return "; ".join(f"rank {rank} is {what}" for rank, what in stopped.items())
        waiting = "; ".join(f"rank {rank} in {_where(frame)}" for rank, frame in self.frames().items())
        return f"all ranks here are waiting for others: {waiting}" if waiting else "no worker reported its stack"


def _waits(frame: re.Match[str]) -> bool:
    return frame["function"] != "<module>" and any(part in frame["file"] for part in _WAITING)


def _where(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({frame['file']}:{frame['line']})"


def began_anew(plan: Plan, trained: int) -> Cause | None:
    """Without the checkpoint that they are told to load, engines warn and train a new model.

    trained: the iterations behind the model of a line in the log, at the least."""
    if trained >= plan.resume_from:
        return None
    reason = f"the engine did not load the checkpoint of iteration {plan.resume_from}, and began with a new model"
    return Cause.now(CRASHED, reason, "See its warning in the log. What it has saved since is of a new model")


class Guard:
    """Checks once a second, in its own thread. ``cause`` says why it stopped the run, if it did."""

    def __init__(self, plan: Plan, launcher: int, mark: str, peers: Peers, stacks: Stacks) -> None:
        self.plan, self.launcher, self.mark, self.peers, self.stacks = plan, launcher, mark, peers, stacks
        self.watchdog_seconds = plan.decimal("WATCHDOG_SECONDS")
        # torchrun tries twice and needs a moment before and after.
        rendezvous_seconds = 2 * plan.decimal("RENDEZVOUS_TIMEOUT")
        self.workers_due_at: float | None = time.monotonic() + rendezvous_seconds + START_SECONDS
        self.cause: Cause | None = None
        self.others_failed_at: float | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Stops, because the run has ended; if the guard ended it, it first finishes its report."""
        self.ended.set()
        self.thread.join(END_SECONDS)

    def _watch(self) -> None:
        while not self.ended.wait(1):
            if os.getppid() != self.launcher or self._reason_to_end():
                processes.end(self.mark, TERM_SECONDS)
                return

    def _reason_to_end(self) -> bool:
        self.cause = self._others_failed() or self._never_starts() or self._trains_anew() or self._stands_still()
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
        # The other node may have been waiting for a worker of this one.
        stopped = self._where_workers_are() if failed and weight_of(first) == Strength.WAITED else None
        if stopped:
            remedy = f"{where} waited for it. This node's log has the stack of every worker here"
            return Cause.now(TIMEOUT, stopped, remedy)
        became = "was cancelled" if first["status"] == CANCELLED else "failed"
        reason = f"stopped because {where} {became}: {first['reason']}"
        return Cause.now(first["status"], reason, first["remedy"], Strength.VICTIM)

    def _never_starts(self) -> Cause | None:
        """torchrun waits forever if something other than torchrun listens on the master's port."""
        if self.workers_due_at is not None and processes.workers(self.mark):
            self.workers_due_at = None  # when they are due, they may already have ended
        if self.workers_due_at is None or time.monotonic() < self.workers_due_at:
            return None
        return Cause.now(
            TIMEOUT,
            f"torchrun cannot join a run at {self.peers.place.address}:"
            " whatever listens on the master's port does not answer",
            "Check rank 0, whose launcher may have refused to start, or choose another MASTER_PORT on every node",
        )

    def _trains_anew(self) -> Cause | None:
        return began_anew(self.plan, self.peers.iteration - 1) if self.peers.iteration else None

    def _stands_still(self) -> Cause | None:
        waited = time.monotonic() - self.peers.progress
        if not self.watchdog_seconds or waited < self.watchdog_seconds or not self.peers.sees_progress:
            return None
        after = f"after iteration {self.peers.iteration}" if self.peers.iteration else "before the first iteration"
        stopped = self._where_workers_are()
        return Cause.now(
            TIMEOUT,
            f"no iteration in {waited:.0f} s, {after}: {self.stacks.sentence()}",
            "The node's log has the stack of each worker that reported it. WATCHDOG_SECONDS sets how long to wait",
            Strength.CAUSE if stopped else Strength.WAITED,
        )

    def _where_workers_are(self) -> str | None:
        """Ends the workers, each of which leaves its stacks; names those that were not just waiting."""
        ranks = processes.workers(self.mark)
        self.stacks.suspended = {rank for rank, pid in ranks.items() if processes.state(pid)[0] in ("T", "t")}
        for rank in ranks.keys() - self.stacks.suspended:
            with contextlib.suppress(OSError):
                os.kill(ranks[rank], signal.SIGUSR2)
        asked = time.monotonic()
        while (
            time.monotonic() - asked < STACK_SECONDS
            and ranks.keys() - self.stacks.suspended - self.stacks.frames().keys()
        ):
            time.sleep(processes.TICK_SECONDS)
        processes.end(self.mark, TERM_SECONDS)
        return self.stacks.sentence() if self.stacks.stopped() else None
