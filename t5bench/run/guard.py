"""Stops a run that would not stop otherwise.

The guard acts if another node failed or left, or the run hangs. Each worker that it ends
leaves its stacks in a file (see worker.py), which shows where it was.
"""

import contextlib
import re
import signal
import threading
import time
from pathlib import Path

import psutil

from t5bench.record import status as ends
from t5bench.record.plan import Plan
from t5bench.record.status import Cause, Strength, first_failure, node_named, weight_of
from t5bench.run import processes
from t5bench.run.collectives import MARK
from t5bench.run.peers import Peers
from t5bench.run.reports import Reports
from t5bench.text import visible

# How long a node has to notice another's failure; torchrun takes 2 to 3 s to report a worker's end.
GRACE_SECONDS = 10
# The wait between TERM and KILL, and the longest time that stopping a run may take.
TERM_SECONDS = 10
END_SECONDS = 25
START_SECONDS = 30
STACK_SECONDS = 3
# A worker that holds Python's lock does not say its collective operation.
OPERATION_SECONDS = 3
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

    def paths(self) -> list[Path]:
        return sorted(self.prefix.parent.glob(f"{self.prefix.name}.[0-9]*"))

    def texts(self) -> dict[int, str]:
        """All threads' stacks by rank, if there are any."""
        texts = {}
        for path in self.paths():
            with contextlib.suppress(OSError):
                text = path.read_text(errors="replace")
                if text:
                    texts[int(path.suffix[1:])] = visible(text, "\n")
        return dict(sorted(texts.items()))

    def frames(self) -> dict[int, re.Match[str]]:
        """The innermost frame of each rank's main thread that waits for others, else its innermost one.

        Of the first stacks in a file: a worker that goes on leaves others when it is ended."""
        innermost = {}
        for rank, text in self.texts().items():
            text = text.partition(f"\n{MARK}")[0]
            main_thread = next(filter(_OF_MAIN.search, _THREAD.findall(text)), "")
            frames = list(_FRAME.finditer(main_thread))
            if frames:
                innermost[rank] = next(filter(_waits, frames), frames[0])
        return innermost

    def operations(self) -> dict[int, str]:
        """What each rank said of its collective operation: "in all_reduce 7 of ranks 0, 1", or "after" it."""
        found = {}
        for rank, text in self.texts().items():
            line = re.search(rf"^{MARK}((?:in|after) .+)$", text, re.MULTILINE)
            if line and not line[1].endswith(" none"):
                found[rank] = line[1]
        return found

    def stopped(self) -> dict[int, str]:
        """The ranks that are not waiting in a collective operation: where each is stuck, or that it is suspended."""
        operations = self.operations()
        states = {}
        for rank, frame in self.frames().items():
            if not _waits(frame):
                last = operations.get(rank, "")
                states[rank] = f"stuck in {_where(frame)}" + (f", {last}" if last.startswith("after ") else "")
        for rank in self.suspended:
            states[rank] = "suspended (SIGSTOP)"
        return dict(sorted(states.items()))

    def sentence(self) -> str:
        """Which ranks stopped, and where; if none did, where all of them wait."""
        stopped = self.stopped()
        if stopped:
            return "; ".join(f"rank {rank} is {what}" for rank, what in stopped.items())
        operations = self.operations()
        waiting = "; ".join(
            f"rank {rank} {operations.get(rank) or f'in {_where(frame)}'}" for rank, frame in self.frames().items()
        )
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
    reason = f"the engine ignored the checkpoint of iteration {plan.resume_from} and started from scratch"
    return Cause.now(ends.CRASHED, reason, "See its warning in the log. What it has saved since belongs to a new model")


class Guard:
    """Checks once a second, in its own thread. ``cause`` says why it stopped the run, if it did."""

    def __init__(self, plan: Plan, mark: str, peers: Peers, stacks: Stacks, reports: Reports) -> None:
        self.plan = plan
        self.mark = mark
        self.peers = peers
        self.stacks = stacks
        self.reports = reports
        self.watchdog_seconds = plan.decimal("WATCHDOG_SECONDS")
        # torchrun tries twice and needs a moment before and after. None: they were seen.
        due_in = 2 * plan.decimal("RENDEZVOUS_TIMEOUT") + START_SECONDS
        self.workers_due_at: float | None = time.monotonic() + due_in
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
        while not self.cause:
            if self.ended.wait(1):
                return
            if self.reports.has_new_sign():
                self.peers.trains()
            self.cause = self._others_failed() or self._never_starts() or self._began_anew() or self._stands_still()
        processes.end(self.mark, TERM_SECONDS)

    def _others_failed(self) -> Cause | None:
        failed = [end for end in self.peers.ends.values() if end["status"] != ends.COMPLETE]
        ends_of_others = failed or list(self.peers.gone.values())
        if not ends_of_others:
            self.others_failed_at = None
            return None
        self.others_failed_at = self.others_failed_at or time.monotonic()
        if time.monotonic() - self.others_failed_at < GRACE_SECONDS:
            return None
        first = first_failure(ends_of_others)
        where = node_named(first["node"], first["host"])
        # The other node may have been waiting for a worker of this one.
        if failed and weight_of(first) == Strength.WAITED and (stopped := self._where_workers_are()):
            return Cause.now(ends.TIMEOUT, stopped, f"{where} waited for it. This node's log has every worker's stack")
        became = "was cancelled" if first["status"] == ends.CANCELLED else "failed"
        reason = f"stopped because {where} {became}: {first['reason']}"
        return Cause.now(first["status"], reason, first["remedy"], Strength.VICTIM)

    def _began_anew(self) -> Cause | None:
        return began_anew(self.plan, self.peers.iteration - 1) if self.peers.iteration else None

    def _never_starts(self) -> Cause | None:
        """torchrun waits forever if something other than torchrun listens on the master's port."""
        if self.workers_due_at is not None and processes.workers(self.mark):
            self.workers_due_at = None  # when they are due, they may already have ended
        if self.workers_due_at is None or time.monotonic() < self.workers_due_at:
            return None
        master = f"{self.peers.endpoint.address}:{self.plan.value('MASTER_PORT')}"
        reason = f"torchrun got no answer from {master}: something else is using that port"
        remedy = "Check rank 0, whose launcher may have refused to start, or choose another MASTER_PORT on every node"
        return Cause.now(ends.TIMEOUT, reason, remedy)

    def _stands_still(self) -> Cause | None:
        waited = time.monotonic() - self.peers.progress
        if not self.watchdog_seconds or waited < self.watchdog_seconds or not self.peers.sees_progress:
            return None
        after = f"after iteration {self.peers.iteration}" if self.peers.iteration else "before the first iteration"
        strength = Strength.CAUSE if self._where_workers_are() else Strength.WAITED
        reason = f"no iteration in {waited:.0f} s, {after}: {self.stacks.sentence()}"
        remedy = "The node's log has the stack of each worker that reported it. WATCHDOG_SECONDS sets how long to wait"
        return Cause.now(ends.TIMEOUT, reason, remedy, strength)

    def _where_workers_are(self) -> str | None:
        """Ends the workers, each of which leaves its stacks; names those that were not just waiting."""
        asked = set()
        for rank, worker in processes.workers(self.mark).items():
            if worker.info["status"] in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                self.stacks.suspended.add(rank)
                continue
            asked.add(rank)
            with contextlib.suppress(psutil.Error):
                worker.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + STACK_SECONDS
        while asked - self.stacks.frames().keys() and time.monotonic() < deadline:
            time.sleep(processes.TICK_SECONDS)
        deadline = time.monotonic() + OPERATION_SECONDS
        while asked - self.stacks.operations().keys() and time.monotonic() < deadline:
            time.sleep(processes.TICK_SECONDS)
        processes.end(self.mark, TERM_SECONDS)
        return self.stacks.sentence() if self.stacks.stopped() else None
