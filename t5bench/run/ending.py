"""How a node's part of a run ended: what is known here, what the other nodes say, and what the record gets of it."""

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from t5bench import control_groups, note
from t5bench.record import machine
from t5bench.record import status as ends
from t5bench.record.plan import Plan
from t5bench.record.status import PROCESSES_REMEDY, Cause, Status, Strength, of_run, remedy_of_writing, weight_of
from t5bench.record.tools import ask
from t5bench.run import guard as guards
from t5bench.run.guard import Guard, began_anew
from t5bench.run.output import Output, timestamp
from t5bench.run.peers import Peers

# How long a node that lost its connection or waited for others waits for the reason: the others' guards act after
# GRACE_SECONDS, collect the stacks of their workers and end them.
OTHERS_SECONDS = guards.GRACE_SECONDS + 20
# How long a node that has completed waits until the others report the same.
COMPLETE_SECONDS = 10
SEE_STACKS = "The node's log has every worker's stack"


class KernelCounts(NamedTuple):
    """What the kernel has done to processes of this control group."""

    kills: int = 0
    """It killed one because memory was full."""
    refused_starts: int = 0
    """It refused to start one because there were too many."""

    @classmethod
    def now(cls) -> "KernelCounts":
        return cls(machine.oom_kills(), control_groups.refused_starts())

    def since(self, before: "KernelCounts") -> "KernelCounts":
        return KernelCounts(self.kills - before.kills, self.refused_starts - before.refused_starts)


NO_COUNTS = KernelCounts()


@dataclass
class Ending:
    """The end of this node's part of a run, once all its processes are gone."""

    plan: Plan
    output: Output
    guard: Guard
    exit_status: int | None
    """torchrun's; None if it was not started."""
    interrupted_by: str | None
    """The signal that ended the run, if one did."""
    kernel: KernelCounts = NO_COUNTS
    """Of the time of this run."""
    fields: dict[str, Any] = field(init=False)
    """What this node's part of the record gets; tell_and_hear() completes it."""

    def __post_init__(self) -> None:
        """Reads what workers have left in files, which may be removed then."""
        cause = self.cause()
        stacks = self.guard.stacks
        self._stopped = stacks.sentence() if stacks.stopped() else ""
        how: dict[str, Any] = {"status": ends.COMPLETE, "reason": "", "remedy": "", "cause": None}
        if cause:
            how = cause.fields()
        elif self.interrupted_by:
            how |= {"status": ends.CANCELLED, "reason": f"{self.interrupted_by} received"}
        output = self.output
        self.fields = {
            **how,
            "exit_status": self.exit_status,
            "signal": self.interrupted_by,
            "ended": timestamp(output.ended),
            "padded_vocab_size": output.padded_vocab_size,
            "peak_memory": [asdict(output.memory[rank]) for rank in sorted(output.memory)],
            "evaluations": [asdict(evaluation) for evaluation in output.evaluations],
            "exceptions": [report.fields() for report in self.guard.reports.read()],
            "oom_kills": self.kernel.kills,
            "heard": [],
        }

    # ---- what this node knows ----------------------------------------------------------------------------------------

    def cause(self) -> Cause | None:
        """Why this node's processes ended; None if they finished or the run was cancelled."""
        reported = self._reported()
        strength = reported.strength if reported else Strength.VICTIM
        # TERM, or what --signal asks SLURM to send before.
        if self.interrupted_by not in (None, "INT") and "SLURM_JOB_ID" in os.environ and slurm_time_is_up():
            remedy = "Ask for more time (--time), or fewer TRAIN_ITERS"
            return Cause.now(ends.TIMEOUT, "SLURM's time limit ended the job", remedy)
        if self.interrupted_by:
            return reported if strength == Strength.CAUSE else None
        # A run that the guard ends does not exit with 0. If it did, the guard came when all was over.
        guarded = self.guard.cause if self.exit_status != 0 else None
        if guarded and guarded.status == ends.TIMEOUT and self._is_patched and not self._incomplete():
            # What hung was torchrun, or W&B's upload after the last iteration.
            return None
        if guarded:
            failed_before = reported and strength >= Strength.EXCEPTION and reported.time < guarded.time
            if not failed_before:
                return guarded
        if self.output.diverged_at is not None and (self.exit_status == 0 or strength <= Strength.EXCEPTION):
            reason = f"the loss is not a number at iteration {self.output.diverged_at}"
            return Cause.now(ends.DIVERGED, reason, "Lower LR, or add LR_WARMUP_ITERS")
        if self.exit_status == 0:
            return self._cause_without_failure()
        if self.kernel.refused_starts and strength < Strength.CAUSE:
            reason = "the limit on processes or threads is reached here: the kernel refused to start one (pids.max)"
            return Cause.now(ends.CRASHED, reason, PROCESSES_REMEDY)
        return self._cause_of_failure(reported)

    def _reported(self) -> Cause | None:
        """The best that workers and messages say."""
        reported = self.output.finder.cause([report.cause for report in self.guard.reports.read()])
        has_waited = reported and reported.status == ends.TIMEOUT and reported.strength == Strength.WAITED
        if has_waited and self.guard.stacks.stopped():
            # torchrun ended the others because one had waited too long.
            return Cause.now(ends.TIMEOUT, self.guard.stacks.sentence(), SEE_STACKS)
        return reported

    def _cause_without_failure(self) -> Cause | None:
        """Why a run whose processes all ended with exit status 0 is not complete, if it is not."""
        trained = [evaluation.iteration for evaluation in self.output.evaluations]
        if self.output.first:
            trained.append(self.output.first.iteration - 1)
        if trained and (anew := began_anew(self.plan, min(trained))):
            return anew
        reason = self._incomplete()
        if reason:
            return Cause.now(ends.INCOMPLETE, reason, strength=Strength.EXCEPTION)
        return self._unwritten()

    def _unwritten(self) -> Cause | None:
        error = self.output.unwritten
        if not error:
            return None
        return Cause.now(ends.CRASHED, f"the run directory cannot be written: {error}", remedy_of_writing(error))

    def _cause_of_failure(self, reported: Cause | None) -> Cause:
        """Why a process of this node failed."""
        strength = reported.strength if reported else Strength.VICTIM
        was_killed = reported is not None and reported.reason == ends.KILLED
        signal_name = _name_of_signal(self.exit_status)
        if self.kernel.kills and (was_killed or signal_name == "SIGKILL"):
            return Cause.now(ends.OUT_OF_MEMORY, "the kernel killed a process because the host's memory was full")
        silent = self.output.finder.silent(self._ranks)
        if strength < Strength.EXCEPTION and (reason := self._ended_early(silent)):
            return Cause.now(ends.INCOMPLETE, reason, strength=Strength.EXCEPTION)
        unwritten = self._unwritten()
        if unwritten and strength < Strength.CAUSE:
            return unwritten
        if strength < Strength.EXCEPTION and signal_name == "SIGKILL":
            remedy = "The kernel does this when memory runs out (see dmesg); SLURM or a user may have, too"
            return Cause.now(ends.CRASHED, "torchrun was killed (SIGKILL)", remedy)
        if strength < Strength.EXCEPTION and signal_name:
            found = f"torchrun was ended by a signal ({signal_name})"
            return Cause.now(ends.CRASHED, found, "Find who sent it: SLURM or a user")
        if reported:
            return reported
        reason = f"torchrun ended with exit status {self.exit_status} without naming a cause"
        return Cause.now(ends.CRASHED, reason, "See its output in the node's log", Strength.VICTIM)

    @property
    def _is_patched(self) -> bool:
        """Whether the engine prints every rank's peak memory at the end."""
        return self.plan.engine_patches == "series"

    @property
    def _ranks(self) -> Sequence[int]:
        """This node's."""
        return self.plan.layout.ranks_of(self.plan.node) if self.plan.layout else []

    def _incomplete(self) -> str:
        """What is missing for a complete run: iteration lines on the last rank's node, every rank's peak memory."""
        plan = self.plan
        assert plan.layout
        total = plan.last_iteration
        reached = self.output.last.iteration if self.output.last else 0
        expected = ends.iterations_expected(total, plan.number("LOG_INTERVAL"))
        if plan.node == plan.layout.nnodes - 1 and reached < expected:
            return f"it ended after iteration {reached} of {total}"
        return self._ended_early(self._ranks)

    def _ended_early(self, ranks: Sequence[int]) -> str:
        """Which of the ranks that ended with exit status 0 did so without their last line, if any did."""
        silent = [rank for rank in ranks if rank not in self.output.memory]
        return f"rank {silent[0]} exited before the last iteration" if self._is_patched and silent else ""

    # ---- all nodes ---------------------------------------------------------------------------------------------------

    def tell_and_hear(self, position: Mapping[str, Any], peers: Peers) -> None:
        """Tells the others how this node ended, hears how they did, and keeps that and the better reason.

        position: the node's. If the others were waiting for a worker here that was stuck, this is the reason.
        """
        stopped = self._stopped
        self.fields |= {**position, "attempt": peers.attempt}
        peers.ended(self.fields)

        def enough(others: Mapping[int, Mapping[str, Any]]) -> bool:
            waited = any(other["status"] == ends.TIMEOUT for other in others.values())
            return not all(map(knows_little, others.values())) or bool(stopped and waited)

        if self.fields["status"] == ends.COMPLETE:
            peers.wait_for_ends(COMPLETE_SECONDS, lambda others: _any_failed(others.values()))
        elif knows_little(self.fields) and not self.interrupted_by:
            peers.wait_for_ends(OTHERS_SECONDS, enough)
            if all(map(knows_little, peers.ends.values())) and enough(peers.ends):
                remedy = "This node's log has the stack of every worker here"
                self.fields |= Cause.now(ends.TIMEOUT, stopped, remedy).fields()
                peers.ended(self.fields)
            else:
                self.fields["reason"] += peers.of_silence()
        heard = [with_silence(other, peers) for other in peers.heard_from()]
        self.fields |= {"heard": heard, "differences": peers.differences}

    @property
    def status(self) -> Status:
        """How the run ended, as far as this node knows: one that has completed may not have heard from the others."""
        everyone = (self.fields, *self.fields["heard"])
        return of_run([self.fields]) if _any_failed(everyone) else Status(ends.COMPLETE)

    def exit_code(self, status: Status) -> int:
        """For a cancelled run 128 + the signal that this launcher received, or else the one that another received."""
        numbers = {name: number for number, name in ends.SIGNALS.items()}
        heard = [end["signal"] for end in self.fields["heard"] if status.name == end["status"] == ends.CANCELLED]
        received = [numbers[name] for name in (self.interrupted_by, *heard) if name in numbers]
        if received:
            return 128 + received[0]
        return 128 + signal.SIGTERM if status.name == ends.CANCELLED else ends.EXIT_CODES.get(status.name, 1)


def _any_failed(parts: Iterable[Mapping[str, Any]]) -> bool:
    return any(part["status"] != ends.COMPLETE for part in parts)


def knows_little(part: Mapping[str, Any]) -> bool:
    """Whether this node completed, lost a connection or was only waiting, and so cannot know the cause."""
    return part["status"] == ends.COMPLETE or weight_of(part) in (Strength.VICTIM, Strength.WAITED)


def with_silence(other: Mapping[str, Any], peers: Peers) -> Mapping[str, Any]:
    """What another node said about its end. If it was waiting, it may not have known yet which nodes were silent."""
    silence = peers.of_silence()
    if not silence or other["status"] != ends.TIMEOUT or not knows_little(other) or " silent " in other["reason"]:
        return other
    return {**other, "reason": other["reason"] + silence}


def _name_of_signal(exit_status: int | None) -> str:
    """The signal that ended a process with this exit status, as shells tell it; empty if none did."""
    try:
        return signal.Signals((exit_status or 0) - 128).name
    except ValueError:
        return ""


def slurm_time_is_up() -> bool:
    """Whether SLURM gives the job less than two more minutes: at the time limit its processes see only TERM."""
    answer = ask("squeue", "--noheader", f"--job={os.environ['SLURM_JOB_ID']}", "--format=%L")
    if not answer:
        note(f"warning: SLURM does not say how much time the job has left: {answer.fault}")
        return False
    return bool(re.fullmatch("[01]:[0-9]{2}|INVALID", answer.output.strip()))  # INVALID: it is past the limit
