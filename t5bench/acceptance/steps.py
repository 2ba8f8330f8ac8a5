"""Runs steps one after another until the time is up, and keeps their outcomes.

A step that passed is not repeated: the outcomes are in a file, and the same command continues where an earlier one
stopped.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t5bench import note

PASSED, FAILED, OUT_OF_TIME, NOT_RUN = "passed", "failed", "out of time", "not run"
# Seconds for a step to end in order once its time is up: a launcher ends its workers and writes its record.
GRACE = 20


@dataclass(frozen=True)
class Step:
    """One command. passes: the exit statuses that count as passed."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    passes: Sequence[int] = (0,)


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-m", name, *map(str, arguments)]


class Runner:
    """Runs steps until ``deadline`` (time.monotonic() seconds).

    outcomes: by the step's name its result, its exit status and its seconds. What a step writes to its standard output
    goes to logs/<name>.out, to its standard error to logs/<name>.log.
    """

    def __init__(self, work: Path, deadline: float = 0.0) -> None:
        self.logs, self.file, self.deadline = work / "logs", work / "steps.json", deadline
        self.logs.mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, step: Step) -> None:
        """Runs a step unless it has passed before; a signal that ends this process ends the step too."""
        if self.outcomes.get(step.name, {}).get("result") == PASSED:
            note(f"{step.name}: already passed")
            return
        note(f"{step.name} ...")
        begun, log = time.monotonic(), self.logs / f"{step.name}.log"
        result, status = NOT_RUN, None
        if begun < self.deadline:
            status = self._execute(step, self.deadline - begun, log)
            late = time.monotonic() >= self.deadline
            result = PASSED if status in step.passes else OUT_OF_TIME if late else FAILED
        seconds = time.monotonic() - begun
        self.outcomes[step.name] = {"result": result, "status": status, "seconds": round(seconds, 1)}
        self.file.write_text(json.dumps(self.outcomes, indent=2) + "\n")
        note(f"{step.name}: {result}, {seconds:.0f} s" + ("" if result == PASSED else f"; see {log}"))

    @staticmethod
    def _execute(step: Step, seconds: float, log: Path) -> int:
        limited = ["timeout", f"--kill-after={GRACE}", str(seconds), *step.command]
        with log.with_suffix(".out").open("wb") as output, log.open("wb") as errors:
            environment = os.environ | dict(step.environment)
            process = subprocess.Popen(limited, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        try:
            return process.wait()
        finally:
            process.terminate()
            process.wait()
