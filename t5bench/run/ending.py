"""How a node's run ended: from its output, its exit status and what the guard did, and what the other nodes said."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from t5bench.record.plan import Plan
from t5bench.record.status import (
    CANCELLED,
    COMPLETE,
    CRASHED,
    DIVERGED,
    EXIT_CODES,
    INCOMPLETE,
    OUT_OF_MEMORY,
    SIGNALS,
    TIMEOUT,
    Cause,
    Status,
    Strength,
    iterations_expected,
    weight_of,
)
from t5bench.run.guard import WENT_AWAY, Guard
from t5bench.run.output import Output
from t5bench.run.peers import Peers

KILLED = 128 + 9
# SLURM ends a job somewhat after its time is over, and tells its processes so by TERM alone.
SLURM_MARGIN_SECONDS = 90


def read_end(path: Path) -> tuple[int | None, str | None]:
    """Exit status and signal as the launcher wrote them; None for both while it has not."""
    try:
        words = path.read_text().split()
        return int(words[0]), words[1] if len(words) > 1 else None
    except (OSError, ValueError, IndexError):
        return None, None


def end_of(
    plan: Plan,
    output: Output,
    guard: Guard,
    exit_status: int | None,
    interrupted_by: str | None,
    killed_by_kernel: int,
) -> tuple[Status, Cause | None]:
    """What became of this node's processes, and what explains it.

    exit_status is None where the launcher was killed before it could tell.
    """
    cause, now = output.finder.cause(), time.time()

    def because(status: Status, strength: Strength = Strength.CAUSE) -> tuple[Status, Cause]:
        return status, Cause(status.name, strength, status.reason, status.remedy, now, status.reason)

    if interrupted_by == "TERM" and _slurm_time_is_up(os.environ):
        remedy = "Ask for more time (--time), or fewer TRAIN_ITERS"
        return because(Status(TIMEOUT, "SLURM's time limit ended the job", remedy))
    if interrupted_by and cause and cause.strength == Strength.CAUSE:
        return Status(cause.status, cause.reason, cause.remedy), cause
    if interrupted_by:
        return Status(CANCELLED, f"{interrupted_by} received"), None
    if exit_status is None and not output.unwritten:
        remedy = "By hand, or by the kernel for want of memory; its processes were ended"
        return because(Status(CRASHED, "the launcher was killed before its run ended", remedy))
    if guard.verdict and guard.cause:
        own_was_first = cause and cause.strength >= Strength.EXCEPTION and cause.time < guard.cause.time
        if not own_was_first:
            return guard.verdict, guard.cause
    if output.diverged_at is not None and (exit_status == 0 or cause is None or cause.strength <= Strength.EXCEPTION):
        reason = f"the loss is not a number at iteration {output.diverged_at}"
        return because(Status(DIVERGED, reason, "Lower LR, or add LR_WARMUP_ITERS"))
    if exit_status == 0:
        status = _completeness(plan, output)
        return (status, None) if status.name == COMPLETE else because(status, Strength.EXCEPTION)
    if killed_by_kernel and (cause is None or cause.status == CRASHED or cause.strength == Strength.VICTIM):
        return because(Status(OUT_OF_MEMORY, "the kernel killed a process because the host's memory was full"))
    if output.unwritten and (cause is None or cause.strength < Strength.CAUSE):
        remedy = "Free space there, or choose another OUTPUT_DIR"
        return because(Status(CRASHED, f"the run directory cannot be written: {output.unwritten}", remedy))
    if exit_status == KILLED and (cause is None or cause.strength < Strength.EXCEPTION):
        remedy = "By the kernel when memory ran out, by SLURM, or by hand"
        return because(Status(CRASHED, "torchrun was killed (SIGKILL)", remedy))
    if cause:
        who = f"rank {cause.rank}: " if cause.rank is not None else ""
        return Status(cause.status, who + cause.reason, cause.remedy), cause
    reason = f"torchrun ended with exit status {exit_status} and named no cause"
    return because(Status(CRASHED, reason, "Its output is all that there is"), Strength.VICTIM)


def _slurm_time_is_up(environment: Mapping[str, str]) -> bool:
    """Newer releases say in the environment when a job's time is over; an older one is asked."""
    ends = environment.get("SLURM_JOB_END_TIME", "")
    if ends.isdigit():
        return abs(time.time() - int(ends)) < SLURM_MARGIN_SECONDS
    try:
        command = ["scontrol", "show", "job", environment["SLURM_JOB_ID"]]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        days, _, clock = fields["TimeLimit"].rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))  # UNLIMITED has none
        limit = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
        left = datetime.fromisoformat(fields["StartTime"]).timestamp() + limit - time.time()
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return False
    return left < SLURM_MARGIN_SECONDS


def _completeness(plan: Plan, output: Output) -> Status:
    """The last rank's node has the iteration lines; every rank that trained to the end prints its peak memory."""
    assert plan.layout
    total = plan.number("TRAIN_ITERS")
    reached = output.last.iteration if output.last else 0
    if plan.node == plan.layout.nnodes - 1 and reached < iterations_expected(total, plan.number("LOG_INTERVAL")):
        return Status(INCOMPLETE, f"it ended after iteration {reached} of {total}")
    silent = [rank for rank in plan.layout.ranks_of(plan.node) if rank not in output.memory]
    if plan.engine_patches == "series" and silent:
        return Status(INCOMPLETE, f"rank {silent[0]} ended before the run did")
    return Status(COMPLETE)


def knows_little(end: Mapping[str, Any]) -> bool:
    """Whether this node ended well, or only lost a connection or waited in vain."""
    return end["status"] == COMPLETE or weight_of(end) in (Strength.VICTIM, Strength.WAITED)


def heard_from(peers: Peers) -> list[dict[str, Any]]:
    """How the other nodes ended, as they said it, or went away without a word."""
    gone = [
        {
            "node": node,
            "host": peers.hosts.get(node, "?"),
            "status": WENT_AWAY.name,
            "reason": WENT_AWAY.reason,
            "remedy": WENT_AWAY.remedy,
            "signal": None,
            "cause": asdict(
                Cause(
                    WENT_AWAY.name, Strength.WAITED, WENT_AWAY.reason, WENT_AWAY.remedy, time.time(), WENT_AWAY.reason
                )
            ),
        }
        for node in sorted(peers.gone)
    ]
    return [peers.ends[node] for node in sorted(peers.ends)] + gone


def of_silence(peers: Peers) -> str:
    """Whom nothing was heard of, for a node that waited in vain."""
    silent = [f"node {node} ({peers.hosts.get(node, '?')}) for {s:.0f} s" for node, s in sorted(peers.silent().items())]
    return f"; nothing was heard of {', '.join(silent)}" if silent else ""


def exit_code(status: Status, part: Mapping[str, Any]) -> int:
    """A launcher's own signal stands for itself; one that another node got counts here too."""
    numbers = {name: number for number, name in SIGNALS.items()}
    if part["signal"] in numbers:
        return 128 + numbers[part["signal"]]
    if status.name == CANCELLED:
        signals = (end["signal"] for end in part["heard"] if end["status"] == CANCELLED)
        return 128 + next((numbers[name] for name in signals if name in numbers), signal.SIGTERM)
    return EXIT_CODES.get(status.name, EXIT_CODES[CRASHED])
