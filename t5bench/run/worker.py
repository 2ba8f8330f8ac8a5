"""Runs a training program unchanged, and makes it write its threads' stacks when it gets TERM, before it ends.

    python t5bench/run/worker.py STACKS SCRIPT ARGUMENTS...

The stacks go to STACKS.<rank>. torchrun sends TERM to all workers when one has failed, and so does the guard, so the
stacks always show where a worker was. With T5_PROFILE (ITERATION:FILE) an iteration is profiled.
"""

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path


def keep_stacks(path: str) -> None:
    with contextlib.suppress(OSError):  # a run continues without the file
        file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - until the worker ends
        faulthandler.register(signal.SIGTERM, file, all_threads=True, chain=True)
        # The guard asks all workers before it ends any, because torchrun's TERM may come in the middle of a stack.
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        # A process that a worker starts is not a worker.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.register_at_fork(after_in_child=lambda number=number: faulthandler.unregister(number))


def main() -> None:
    stacks, program, *arguments = sys.argv[1:]
    keep_stacks(f"{stacks}.{os.environ.get('RANK', '0')}")
    sys.path[0], sys.argv = str(Path(program).resolve().parent), [program, *arguments]
    if place := os.environ.get("T5_PROFILE"):
        from t5bench.run.profile_step import OneIteration

        iteration, _, output = place.partition(":")
        OneIteration(int(iteration), Path(output), sys.argv).watch()
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
