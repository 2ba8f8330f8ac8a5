"""Steps that run one after another or together until the time is up, and what became of each.

What passed stays passed: the outcomes are kept in a file, and the same command goes on where an earlier one stopped.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t5bench.sweep.rows import note

PASSED, FAILED, OUT_OF_TIME, NOT_RUN = "passed", "failed", "out of time", "not run"
# A step may take so many times the seconds that are expected of it.
PATIENCE = 4
# Seconds that a step gets to end in order once its time is up: a launcher ends its workers and writes its record.
GRACE = 20


@dataclass(frozen=True)
class Step:
    """One command. passes: exit statuses.

    seconds: what it is expected to take. It does not begin with less time than that, nor than what it has taken before.
    """

    name: str
    command: Sequence[str]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    passes: Sequence[int] = (0,)


class Runner:
    """Runs steps until ``deadline`` (time.monotonic() seconds).

    outcomes: by the step's name its result, its exit status and its seconds. What a step writes to its standard output
    goes to logs/<name>.out, to its standard error to logs/<name>.log.
    """

    def __init__(self, work: Path, deadline: float = 0.0) -> None:
        self.logs, self.file, self.deadline = work / "logs", work / "steps.json", deadline
        self.logs.mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.live = set[subprocess.Popen[bytes]]()

    def run(self, steps: Sequence[Step], at_once: int = 1) -> None:
        """Runs those that have not passed yet, so many at a time. What ends this process ends them too."""
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for step, outcome in zip(steps, pool.map(self._run, steps), strict=True):
                    self.outcomes[step.name] = outcome
                    self.file.write_text(json.dumps(self.outcomes, indent=2) + "\n")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self.live):
                    process.terminate()
                raise

    def _run(self, step: Step) -> dict[str, Any]:
        known = self.outcomes.get(step.name, {"result": NOT_RUN, "seconds": 0})
        if known["result"] == PASSED:
            note(f"{step.name}: passed already")
            return known
        left, needed = self.deadline - time.monotonic(), max(step.seconds, known["seconds"])
        if left < needed:
            note(f"{step.name}: not run, it takes {needed:.0f} s or more and {max(0, left):.0f} s are left")
            return {"result": NOT_RUN, "status": None, "seconds": known["seconds"]}
        note(f"{step.name} ...")
        begun, limit = time.monotonic(), min(PATIENCE * step.seconds, left)
        status, seconds = self._execute(step, limit), time.monotonic() - begun
        result = PASSED if status in step.passes else OUT_OF_TIME if seconds >= limit else FAILED
        told = "" if result == PASSED else f"; see {self.logs / step.name}.log"
        note(f"{step.name}: {result}, {seconds:.0f} s{told}")
        return {"result": result, "status": status, "seconds": round(seconds, 1)}

    def _execute(self, step: Step, seconds: float) -> int:
        log = self.logs / f"{step.name}.log"
        limited = ["timeout", f"--kill-after={GRACE}", str(seconds), *step.command]
        with log.with_suffix(".out").open("wb") as output, log.open("wb") as errors:
            environment = os.environ | dict(step.environment)
            process = subprocess.Popen(limited, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        self.live.add(process)
        status = process.wait()
        self.live.discard(process)
        return status
