"""Runs the steps of scripts/gpu_acceptance.sh, which provides Python's packages and the settings.

python -m t5bench.tools.acceptance SECONDS [--rehearse]     SECONDS: since the call began
"""

import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.record.status import CONFIGURATION, EXIT_CODES
from t5bench.text import guard_streams
from t5bench.tools.acceptance import bundle, results
from t5bench.tools.acceptance.call import RESERVE, Call, earlier_files
from t5bench.tools.acceptance.results import FAILED, NOT_RUN, OUT_OF_TIME, Results
from t5bench.tools.acceptance.steps import FoundMachine, Steps

EXIT_FAILED = 1
EXIT_TIME = 3


def main(elapsed: float, arguments: Sequence[str]) -> int:
    """elapsed: seconds since the call began. Raises Problem."""
    begun = time.monotonic() - elapsed
    rehearsal = "--rehearse" in arguments
    here = FoundMachine(os.environ, rehearsal=rehearsal)
    steps = Steps(here, os.environ)
    name = "rehearsal" if rehearsal else results.name_of(here.gpus)
    work = steps.work / name
    default_output = work / "results" if rehearsal else REPOSITORY / "docs" / "results" / name
    output = Path(os.environ["RESULTS_DIR"] or default_output)
    new = Results(rehearsal, here.gpus, steps.batch)
    all_results = results.continued(earlier_files(output, os.environ["CONTINUE"]), new)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    all_results.calls.append(results.CallRecord(made, here.facts()))
    _put_programs_on_path(work / "bin")
    _remove_locks(steps.extensions, steps.work / "bundle")
    deadline = begun + 60 * float(os.environ["MINUTES"]) - RESERVE
    directory = work / f"call-{len(all_results.calls)}"
    call = Call(here, all_results, directory, output, deadline)
    call.run_all(steps.in_order(directory), steps.common())
    note(f"\n{output / 'README.md'}\n{all_results.verdict()}")
    ends = {step.result for step in all_results.steps.values()}
    if FAILED in ends:
        return EXIT_FAILED
    return EXIT_TIME if ends & {OUT_OF_TIME, NOT_RUN} else 0


def _put_programs_on_path(programs: Path) -> None:
    """Those that the steps run, and that belong to this Python."""
    python = Path(sys.executable)
    # There may be no make.
    bundle.write_make(programs / "make", python)
    # ninja may lie next to a Python that is not on PATH.
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}:{python.parent}"


def _remove_locks(*directories: Path) -> None:
    """PyTorch's, of compilations that a KILL ended, for which it would wait. Only this program compiles there."""
    for directory in directories:
        for lock in directory.rglob("lock"):
            lock.unlink()


if __name__ == "__main__":
    guard_streams()
    raise_on_signals()
    try:
        sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
    except Problem as problem:
        note(problem.report)
        sys.exit(EXIT_CODES[CONFIGURATION])
