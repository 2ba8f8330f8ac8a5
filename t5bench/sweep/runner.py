"""Makes runs one after another: a line for each, an estimate of the time left, retries, an orderly end."""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from t5bench import Interrupted, note
from t5bench.plan.engine import extension_locks
from t5bench.record import log
from t5bench.record.files import RecordError
from t5bench.record.records import load, looks_like_run, read_metrics
from t5bench.record.status import COMPLETE, CONFIGURATION, EXIT_CODES
from t5bench.sweep.launch import Launch, Row, Started

# The time between looks at a run, and between reports of its progress, which read all of its iterations: on a terminal,
# and in a file, where each report is a line.
SECONDS, PROGRESS_SECONDS, LINE_SECONDS = 0.1, 2.0, 30.0
BAR_WIDTH = 20


def is_complete(directory: Path) -> bool:
    """Whether the record is complete; reports a damaged one, which does not count as complete."""
    try:
        return looks_like_run(directory) and load(directory).status == COMPLETE
    except RecordError as error:
        note(f"damaged: {error}")
        return False


def outcome(status: int, run: Started, directory: Path) -> str:
    """How a run ended, in one line."""
    try:
        record = load(directory)
    except RecordError:
        record = None
    if status == 0:
        speed = record.iterations[-1].samples_per_second if record and record.iterations else "?"
        return f"complete, {speed} samples/s at the end"
    # If a launcher refused, there is no record, or only that of another node which waited for it.
    if record is None or (status == EXIT_CODES[CONFIGURATION] and run.problems):
        word, reasons = next(name for name, code in EXIT_CODES.items() if code == status), run.problems
    else:
        word, reasons = record.status, [record.reason, *run.problems]
    return f"FAILED ({word}): {'; '.join(reasons)}; see {directory}"


def progress(directory: Path, since: float = math.inf, *, bar: bool = False) -> str:
    """The newest iteration: from the record, else from the terminal output of nodes whose files are elsewhere.

    Before the first iteration it names the extensions that have been compiling since the time `since` (in seconds since
    1970); PyTorch locks their directories.
    """
    try:
        done = read_metrics(directory / "metrics.jsonl")
    except RecordError as error:
        return str(error)
    for terminal in () if done else directory.glob("node*.terminal"):
        done += log.iterations(terminal.read_text(errors="replace").splitlines())
    if done:
        last = done[-1]
        drawn = f"[{'#' * (BAR_WIDTH * last.iteration // last.total):<{BAR_WIDTH}}] " if bar else ""
        return f"{drawn}iteration {last.iteration}/{last.total}"
    with contextlib.suppress(OSError):  # a lock disappears once its extension is compiled
        if names := sorted(lock.parent.name for lock in extension_locks() if lock.stat().st_mtime >= since):
            return f"compiling {', '.join(names)}: takes minutes, but only once"
    return "starting"


def run_all(launch: Launch, runs: Mapping[Path, Row], runs_dir: Path, retries: int = 0, goes_on: str = "") -> bool:
    """Makes the incomplete runs, by directory, then retries failed ones; returns whether any of them began.

    An interruption stops the current run, prints the hint goes_on, and raises Interrupted.
    """
    try:
        statuses = _run_each(launch, runs, runs_dir)
        for _ in range(retries):
            if failed := {directory: runs[directory] for directory, status in statuses.items() if status}:
                note("retrying the failed runs")
                statuses |= _run_each(launch, failed, runs_dir)
    except Interrupted as stop:
        name = signal.Signals(stop.code - 128).name.removeprefix("SIG")
        left = "; ".join(launch.running.end() if launch.running else ()) or "nothing"
        note(f"\n{name} received: stopped; {left} is left running. {goes_on}".rstrip())
        raise
    return any(status != EXIT_CODES[CONFIGURATION] for status in statuses.values())


def _run_each(launch: Launch, runs: Mapping[Path, Row], runs_dir: Path) -> dict[Path, int]:
    """The exit status of each; 0 for one that is already complete."""
    statuses, took, width = {}, [], max(len(str(directory.relative_to(runs_dir))) for directory in runs)
    for number, (directory, row) in enumerate(runs.items(), 1):
        label = f"[{number:{len(str(len(runs)))}}/{len(runs)}] {directory.relative_to(runs_dir)!s:{width}}"
        if is_complete(directory):
            statuses[directory] = 0
            note(f"{label}  already complete")
            continue
        start, mean, after = time.monotonic(), fmean(took or [0]), len(runs) - number
        statuses[directory], said = _run_one(launch, row, directory, label, mean * (after + 1))
        took.append(time.monotonic() - start)
        note(f"{label}  {said}, {_duration(took[-1])}{_left(fmean(took) * after)}")
    return statuses


def _run_one(launch: Launch, row: Row, directory: Path, label: str, expected: float) -> tuple[int, str]:
    """The exit status, and how the run ended. expected: seconds for this run and the remaining ones; 0 if unknown."""
    directory.mkdir(parents=True, exist_ok=True)
    terminal, started = sys.stderr.isatty(), time.time()
    run, told = launch.start(row, directory), started - PROGRESS_SECONDS * terminal
    while (status := run.poll()) is None:
        if (now := time.time()) - told >= (PROGRESS_SECONDS if terminal else LINE_SECONDS):
            said = f"{label}  {progress(directory, started, bar=terminal)}{_left(expected - now + started)}"
            print(f"\r{said}\033[K", end="\r", file=sys.stderr, flush=True) if terminal else note(said)
            told = now
        time.sleep(SECONDS)
    return status, outcome(status, run, directory)


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


def _left(seconds: float) -> str:
    return f"; about {_duration(seconds)} left" if round(seconds) > 0 else ""
