"""Steps that run one after another or together until the time is up, and what became of each.

What passed stays passed: the outcomes are kept in a file, and the same command goes on where an earlier one stopped.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

PASSED, FAILED, OUT_OF_TIME, NOT_RUN = "passed", "failed", "out of time", "not run"
# What a program of ours exits with when its time was up and it goes on when called again.
EXIT_TIME = 3
# Seconds that a step gets to end in order once its time is up: a launcher ends its workers and writes its record.
_GRACE = 20.0


@dataclass(frozen=True)
class Step:
    """One command. ``seconds`` is the most that it may take; ``expects`` the exit statuses that pass.

    ``least`` seconds must be left for it to begin at all; ``unfinished`` is the exit status by which it says that its
    own time was up, and that it goes on when called again.
    """

    name: str
    title: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 180.0
    least: float = 20.0
    expects: Sequence[int] = (0,)
    unfinished: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a step; seconds on the wall, exit_status None where it did not end by itself."""

    name: str
    title: str
    result: str
    exit_status: int | None = None
    seconds: float = 0.0
    log: str = ""


class Runner:
    """Runs steps until ``deadline`` (time.monotonic() seconds). Outcomes are in ``outcomes``, by the step's name."""

    def __init__(self, work: Path, deadline: float) -> None:
        self.work, self.deadline = work, deadline
        self.file = work / "steps.json"
        self.interrupted = 0
        self.live: set[subprocess.Popen[bytes]] = set()
        self.outcomes: dict[str, Outcome] = {}
        if self.file.exists():
            self.outcomes = {entry["name"]: Outcome(**entry) for entry in json.loads(self.file.read_text())}

    def left(self) -> float:
        return 0.0 if self.interrupted else self.deadline - time.monotonic()

    def end_on_signals(self) -> None:
        """Ctrl-C ends what runs, in order, and begins nothing more."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = number
        for process in list(self.live):
            process.send_signal(signal.SIGTERM)

    def run(self, steps: Sequence[Step], at_once: int = 1) -> None:
        """Runs these steps, ``at_once`` of them at a time: more than one only where nothing is timed."""
        with ThreadPoolExecutor(at_once) as pool:
            for outcome in pool.map(self._run, steps):
                self.outcomes[outcome.name] = outcome
        self._save()

    def _run(self, step: Step) -> Outcome:
        earlier = self.outcomes.get(step.name)
        if earlier and earlier.result == PASSED:
            say(f"{step.title}: passed already")
            return earlier
        if self.left() < step.least:
            # What an earlier call learnt says more than that this one had no time.
            outcome = earlier or Outcome(step.name, step.title, NOT_RUN)
            say(f"{step.title}: {outcome.result}, no time is left")
            return outcome
        outcome = self._execute(step)
        told = "" if outcome.result == PASSED else f"; see {outcome.log}"
        say(f"{step.title}: {outcome.result}, {outcome.seconds:.0f} s{told}")
        return outcome

    def _execute(self, step: Step) -> Outcome:
        log = self.work / "logs" / f"{step.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                step.command,
                env=os.environ | dict(step.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.live.add(process)
            try:
                status: int | None = process.wait(timeout=max(1.0, min(step.seconds, self.left())))
            except subprocess.TimeoutExpired:
                status = None
                end(process)
            self.live.discard(process)
        if self.interrupted:
            status = None
            end(process)
        result = OUT_OF_TIME if status in (None, step.unfinished) else PASSED if status in step.expects else FAILED
        return Outcome(step.name, step.title, result, status, time.monotonic() - begin, str(log))

    def _save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps([asdict(outcome) for outcome in self.outcomes.values()], indent=2) + "\n")


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks a step to end, and then ends what is left of its process group, such as compilers."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
