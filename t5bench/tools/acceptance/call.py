"""One call of scripts/gpu_acceptance.sh: runs steps until its time is up, and keeps the results after each of them.

Whoever limits the call may kill it at any moment. What RESULTS_DIR then holds is complete for every step that ended.
"""

import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from t5bench import note
from t5bench.record.files import RecordError
from t5bench.record.reader import UNFORESEEN
from t5bench.tools.acceptance import results
from t5bench.tools.acceptance.gpu import Watch
from t5bench.tools.acceptance.results import FAILED, NOT_RUN, OUT_OF_TIME, PASSED, SKIPPED, Results, StepResult
from t5bench.tools.acceptance.steps import FoundMachine, Step, module

# Seconds for a step to end in order once its time is up: a launcher ends its workers and writes its record.
GRACE = 20
# Seconds at the end of a call for stopping what is still running, and for the results.
RESERVE = GRACE + 10
# A step that takes this many times as long as expected, on a GPU, is stuck.
PATIENCE = 4
# The text files of the steps. TensorBoard's files only repeat them.
ARCHIVED = (".json", ".jsonl", ".log", ".out", ".sh", ".html", ".stack")
# Of an archive. What fetches it may refuse larger files.
MOST_BYTES = 15 << 20
UNFINISHED = "unfinished"
LONGEST_REASON = 200
# In what the runs of one page differ.
ALLOWED = ("engine", "MICRO_BATCH_SIZE", "DROPOUT")


class Call:
    """Runs steps until ``deadline`` (time.monotonic() seconds).

    What a step writes to its standard output goes to logs/<name>.out in ``directory``, to its standard error to
    logs/<name>.log.
    """

    def __init__(self, here: FoundMachine, found: Results, directory: Path, output: Path, deadline: float) -> None:
        """found: the results so far; directory: for the files of this call's steps; output: RESULTS_DIR."""
        self.here = here
        self.results = found
        self.directory = directory
        self.output = output
        self.deadline = deadline
        self.number = len(found.calls)
        self.missing = here.missing()
        self.ready: dict[str, bool] = {}  # the steps of this call on which others depend
        shutil.rmtree(directory, ignore_errors=True)  # of a call that was killed before it kept anything
        (directory / "logs").mkdir(parents=True)
        output.mkdir(parents=True, exist_ok=True)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def run_all(self, steps: Iterable[Step], common: dict[str, str]) -> None:
        """Those that failed before come last: they may fail again, and take long."""
        self.common = common
        earlier = {name: outcome.result for name, outcome in self.results.steps.items()}
        for step in sorted(steps, key=lambda step: earlier.get(step.name) == FAILED):
            if self.results.passed(step.name):
                note(f"{step.name}: already passed")
            else:
                self.keep(step, self.outcome(step))

    def outcome(self, step: Step) -> StepResult:
        lacks = [self.missing[need] for need in step.needs if need in self.missing]
        if lacks:
            return StepResult(SKIPPED, self.number, reason=lacks[0])
        for before in step.after:
            if before.name not in self.ready:
                prepared = self.outcome(before)
                self.ready[before.name] = prepared.result == PASSED
                self.keep(before, prepared)
            if not self.ready[before.name]:
                return StepResult(NOT_RUN, self.number, reason=f"{before.name} did not pass")
        left = self.deadline - time.monotonic()
        if left <= 0:
            return StepResult(NOT_RUN, self.number, reason="time ran out")
        if self.here.rehearsal:
            return self.execute(step, left)
        if left <= step.seconds:
            reason = f"it takes about {step.seconds:.0f} s, but only {left:.0f} s were left"
            return StepResult(NOT_RUN, self.number, reason=reason)
        return self.execute(step, min(left, PATIENCE * step.seconds))

    def execute(self, step: Step, limit: float) -> StepResult:
        """Runs the command; a signal that ends this process ends the step too."""
        note(f"{step.name} ...")
        if not self.results.passed(step.name):  # a preparation has, in an earlier call
            # A step that takes this machine down with it is known by this.
            self.results.steps[step.name] = StepResult(NOT_RUN, self.number, reason="it was interrupted")
            self.replace(results.FILE, results.encoded(self.results))
        log = self.directory / "logs" / f"{step.name}.log"
        begun = time.monotonic()
        with Watch(self.here.nvml) as watch:
            status = self.wait_for(step, limit, log)
        ended = time.monotonic()
        seconds = ended - begun
        if status in step.passes:
            result = PASSED
            reason = ""
        elif ended >= self.deadline:
            result = OUT_OF_TIME
            reason = "time ran out"
        else:
            result = FAILED
            reason = f"it took longer than {limit:.0f} s" if seconds >= limit else reason_in(log)
        try:
            figures = step.figures()
        except (RecordError, OSError, *UNFORESEEN) as error:
            figures = None
            result = FAILED
            reason = reason or f"its figures cannot be read: {error}"
        return StepResult(
            result,
            self.number,
            status=status,
            seconds=round(seconds, 1),
            reason=reason,
            gpu=watch.summary(),
            figures=figures,
        )

    def wait_for(self, step: Step, limit: float, log: Path) -> int:
        """The step's exit status. limit: seconds after which it is ended; log: of its standard error."""
        command = ["timeout", f"--kill-after={GRACE}", str(limit), *step.command]
        environment = os.environ | self.common | dict(step.environment)
        with log.with_suffix(".out").open("wb") as output, log.open("wb") as errors:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
            try:
                return process.wait()
            finally:
                process.terminate()
                process.wait()

    # ---- results ---------------------------------------------------------------------------------------------------

    def keep(self, step: Step, outcome: StepResult) -> None:
        """Writes everything to RESULTS_DIR, what matters most first, and then says how the step ended."""
        self.results.steps[step.name] = outcome
        self.replace(results.FILE, results.encoded(self.results))
        self.replace("README.md", results.summary(self.results).encode())
        has_run = outcome.status is not None
        if has_run:
            if (self.directory / "runs").is_dir():
                self.keep_page()
            self.keep_records()
        seconds = f", {outcome.seconds:.0f} s" if has_run else ""
        reason = f": {outcome.reason}" if outcome.reason else ""
        note(f"{step.name}: {outcome.result}{seconds}{reason}")

    def replace(self, name: str, content: bytes) -> None:
        """A file in RESULTS_DIR, at once: whoever reads it sees the earlier content or this."""
        unfinished = self.output / UNFINISHED
        unfinished.write_bytes(content)
        unfinished.replace(self.output / name)

    def keep_page(self) -> None:
        """The comparison page of this call's runs; without its packages, or with runs that cannot be compared, none."""
        comparison = self.directory / "comparison"
        command = module("t5bench", "compare", self.directory / "runs", "--output", comparison)
        for name in ALLOWED:
            command += ["--allow", name]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        page = comparison / "index.html"
        if page.exists():
            self.replace(f"comparison-{self.number}.html", page.read_bytes())

    def keep_records(self) -> None:
        """The small files first: what does not fit are large traces."""
        files = [path for path in self.directory.rglob("*") if path.suffix in ARCHIVED and path.is_file()]
        files.sort(key=lambda path: path.stat().st_size)
        unfinished = self.output / UNFINISHED
        with (
            unfinished.open("wb") as stream,
            tarfile.open(fileobj=stream, mode="w:gz", compresslevel=3) as archive,
        ):
            for path in files:
                # At worst a file cannot be compressed.
                if stream.tell() + path.stat().st_size < MOST_BYTES:
                    name = Path("records", path.relative_to(self.directory))
                    archive.add(path, arcname=str(name))
        unfinished.replace(self.output / f"records-{self.number}.tar.gz")


def reason_in(log: Path) -> str:
    """The last error in a step's output."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error: |[\w.]+(Error|Exception): ", line)]
    candidates = errors or lines or ["it wrote no error"]
    return candidates[-1][:LONGEST_REASON]


def earlier_files(output: Path, named: str) -> Sequence[Path]:
    """The results.json of earlier calls: the one here, and the one that CONTINUE names."""
    files = [Path(named)] if named else []
    here = output / results.FILE
    return [*files, here] if here.exists() else files
