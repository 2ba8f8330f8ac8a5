"""Runs a training program unchanged, and makes it write its threads' stacks when it gets TERM, before it ends.

    python t5bench/run/worker.py STACKS SCRIPT ARGUMENTS...

The stacks go to STACKS.<rank>. torchrun sends TERM to all workers when one has failed, and so does the guard, so the
stacks always show where a worker was. With T5_PROFILE (ITERATION:FILE) an iteration is profiled.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn


def keep_stacks(path: str) -> None:
    with contextlib.suppress(OSError):  # a run continues without the file
        file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - until the worker ends
        faulthandler.register(signal.SIGTERM, file, all_threads=True, chain=True)
        # The guard asks all workers before it ends any, because torchrun's TERM may come in the middle of a stack.
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        # A process that a worker starts is not a worker.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.register_at_fork(after_in_child=lambda number=number: faulthandler.unregister(number))


def prepare_megatron() -> None:
    """Imports what Megatron-DeepSpeed imports, in less time; the native engine does the same for itself."""
    from t5bench.imports import import_deepspeed, leave_out_compiler

    gc.disable()
    leave_out_compiler()
    with contextlib.suppress(ImportError):  # the engine says it better
        import_deepspeed()
    gc.freeze()  # no collection looks at the million objects of the modules
    gc.enable()


def leave() -> NoReturn:
    """Ends this process as Python does, but without taking the interpreter apart, as multiprocessing ends its own.

    There, a thread of gloo that has yet to release its last tensor would abort the process (PyTorch issue 190489).
    """
    threading._shutdown()  # waits for all threads but daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C programs have printed
    os._exit(0)


def main() -> None:
    stacks, program, *arguments = sys.argv[1:]
    keep_stacks(f"{stacks}.{os.environ.get('RANK', '0')}")
    sys.path[0], sys.argv = str(Path(program).resolve().parent), [program, *arguments]
    if place := os.environ.get("T5_PROFILE"):
        from t5bench.run.profile_step import OneIteration

        iteration, _, output = place.partition(":")
        OneIteration(int(iteration), Path(output), sys.argv)
    if (Path(sys.path[0]) / "megatron" / "initialize.py").exists():
        prepare_megatron()
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    leave()


if __name__ == "__main__":
    main()
