"""Runs the steps of scripts/gpu_acceptance.sh, which provides Python's packages and the settings.

python -m t5bench.acceptance SECONDS [--rehearse]     SECONDS: since the call began
"""

import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.acceptance import bundle, results
from t5bench.acceptance.call import RESERVE, Call, earlier_files
from t5bench.acceptance.results import FAILED, NOT_RUN, OUT_OF_TIME, Results
from t5bench.acceptance.steps import Machine, Steps
from t5bench.record.status import CONFIGURATION, EXIT_CODES
from t5bench.sweep.venv import write_torchrun

EXIT_FAILED, EXIT_TIME = 1, 3


def main(elapsed: float, arguments: Sequence[str]) -> int:
    """Raises Problem."""
    begun, rehearsal = time.monotonic() - elapsed, "--rehearse" in arguments
    here = Machine(os.environ, rehearsal=rehearsal)
    steps = Steps(here, os.environ)
    name = "rehearsal" if rehearsal else results.name_of(here.gpus)
    own = steps.work / name / "results" if rehearsal else REPOSITORY / "docs" / "results" / name
    output = Path(os.environ["RESULTS_DIR"] or own)
    new = Results(rehearsal, here.gpus, steps.batch)
    found = results.continued(earlier_files(output, os.environ["CONTINUE"]), new)
    found.calls.append(results.Call(datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), here.facts()))
    # A torchrun on PATH may belong to another Python and would start workers with its packages. There may be no make.
    programs = steps.work / name / "bin"
    write_torchrun(programs / "torchrun", Path(sys.executable))
    bundle.write_make(programs / "make", Path(sys.executable))
    # ninja may lie next to a Python that is not on PATH.
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}:{Path(sys.executable).parent}"
    deadline = begun + 60 * float(os.environ["MINUTES"]) - RESERVE
    call = Call(here, found, steps.work / name / f"call-{len(found.calls)}", output, deadline)
    call.run_all(steps.in_order(call.directory), steps.common())
    note(f"\n{output / 'README.md'}\n{found.verdict()}")
    ends = {step.result for step in found.steps.values()}
    if FAILED in ends:
        return EXIT_FAILED
    return EXIT_TIME if ends & {OUT_OF_TIME, NOT_RUN} else 0


if __name__ == "__main__":
    raise_on_signals()
    try:
        sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
    except Problem as problem:
        note(problem.report)
        sys.exit(EXIT_CODES[CONFIGURATION])
