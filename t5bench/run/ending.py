"""How a node's run ended, judged by its output, its exit status, what the guard did and what the other nodes said."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t5bench.record import status as ends
from t5bench.record.plan import Plan
from t5bench.record.status import SIGNALS, Cause, Status, Strength, iterations_expected, weight_of
from t5bench.run.guard import Guard, began_anew
from t5bench.run.output import Output

KILLED = 128 + 9
SPACE_REMEDY = "Free space and inodes there (df -h, df -i), or choose another OUTPUT_DIR"


def read_end(path: Path) -> tuple[int | None, str | None]:
    """Exit status and signal as the launcher wrote them; None for both until it has."""
    try:
        words = path.read_text().split()
        return int(words[0]), words[1] if len(words) > 1 else None
    except (OSError, ValueError, IndexError):
        return None, None


def cause_of(
    plan: Plan, output: Output, guard: Guard, exit_status: int | None, interrupted_by: str | None, kernel_kills: int
) -> Cause | None:
    """Why this node's processes ended; None if they finished or the run was cancelled.

    A launcher that was killed before it could write its exit_status leaves None.
    """
    said = output.finder.cause()
    if said and said.status == ends.TIMEOUT and said.strength == Strength.WAITED and guard.stacks.stopped():
        # torchrun ended the others because one had waited too long.
        said = Cause.now(ends.TIMEOUT, guard.stacks.sentence(), "The node's log has every worker's stack")
    strength = said.strength if said else Strength.VICTIM
    if interrupted_by == "TERM" and slurm_time_is_up(os.environ.get("SLURM_JOB_ID")):
        remedy = "Ask for more time (--time), or fewer TRAIN_ITERS"
        return Cause.now(ends.TIMEOUT, "SLURM's time limit ended the job", remedy)
    if interrupted_by:
        return said if strength == Strength.CAUSE else None
    if exit_status is None and not output.unwritten:
        remedy = "A user may have done this, or the kernel because memory ran out; its processes were stopped"
        return Cause.now(ends.CRASHED, "the launcher was killed before its run ended", remedy)
    # A run that the guard ends does not exit with 0. If it did, the guard came when all was over.
    guarded = guard.cause if exit_status != 0 else None
    if guarded and not (said and strength >= Strength.EXCEPTION and said.time < guarded.time):
        return guarded
    if output.diverged_at is not None and (exit_status == 0 or strength <= Strength.EXCEPTION):
        reason = f"the loss is not a number at iteration {output.diverged_at}"
        return Cause.now(ends.DIVERGED, reason, "Lower LR, or add LR_WARMUP_ITERS")
    trained = [each.iteration for each in output.evaluations] + ([output.first.iteration - 1] if output.first else [])
    if exit_status == 0 and trained and (anew := began_anew(plan, min(trained))):
        return anew
    if exit_status == 0 and (reason := _incomplete(plan, output)):
        return Cause.now(ends.INCOMPLETE, reason, strength=Strength.EXCEPTION)
    if exit_status == 0 and not output.unwritten:
        return None
    if kernel_kills and (strength == Strength.VICTIM or (said and said.status == ends.CRASHED)):
        return Cause.now(ends.OUT_OF_MEMORY, "the kernel killed a process because the host's memory was full")
    silent = output.finder.silent(plan.layout.ranks_of(plan.node)) if plan.layout else []
    if strength < Strength.EXCEPTION and (reason := _ended_early(plan, output, silent)):
        return Cause.now(ends.INCOMPLETE, reason, strength=Strength.EXCEPTION)
    if output.unwritten and strength < Strength.CAUSE:
        return Cause.now(ends.CRASHED, f"the run directory cannot be written: {output.unwritten}", SPACE_REMEDY)
    if exit_status == KILLED and strength < Strength.EXCEPTION:
        remedy = "The kernel does this when memory runs out (see dmesg); SLURM or a user may have, too"
        return Cause.now(ends.CRASHED, "torchrun was killed (SIGKILL)", remedy)
    reason = f"torchrun ended with exit status {exit_status} without naming a cause"
    return said or Cause.now(ends.CRASHED, reason, "See its output in the node's log", Strength.VICTIM)


def slurm_time_is_up(job: str | None) -> bool:
    """Whether SLURM gives the job less than two more minutes: at the time limit its processes see only TERM."""
    if not job:
        return False
    try:
        command = ["squeue", "--noheader", f"--job={job}", "--format=%L"]
        left = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return False
    return bool(re.fullmatch("[01]:[0-9]{2}|INVALID", left))  # INVALID: it is past the limit


def _incomplete(plan: Plan, output: Output) -> str:
    """What is missing for a complete run: iteration lines on the last rank's node, every rank's peak memory."""
    assert plan.layout
    total = plan.last_iteration
    reached = output.last.iteration if output.last else 0
    if plan.node == plan.layout.nnodes - 1 and reached < iterations_expected(total, plan.number("LOG_INTERVAL")):
        return f"it ended after iteration {reached} of {total}"
    return _ended_early(plan, output, plan.layout.ranks_of(plan.node))


def _ended_early(plan: Plan, output: Output, ranks: Sequence[int]) -> str:
    """Which of the ranks that ended with exit status 0 did so without their last line, if any did."""
    silent = [rank for rank in ranks if rank not in output.memory]
    return f"rank {silent[0]} ended before the run did" if plan.engine_patches == "series" and silent else ""


def knows_little(end: Mapping[str, Any]) -> bool:
    """Whether this node completed, lost a connection or was only waiting, and so cannot know the cause."""
    return end["status"] == ends.COMPLETE or weight_of(end) in (Strength.VICTIM, Strength.WAITED)


def exit_code(status: Status, part: Mapping[str, Any]) -> int:
    """For a cancelled run 128 + the signal that this launcher received, or else the one that another received."""
    numbers = {name: number for number, name in SIGNALS.items()}
    heard = [end["signal"] for end in part["heard"] if status.name == end["status"] == ends.CANCELLED]
    if received := [numbers[name] for name in (part["signal"], *heard) if name in numbers]:
        return 128 + received[0]
    return 128 + signal.SIGTERM if status.name == ends.CANCELLED else ends.EXIT_CODES.get(status.name, 1)
