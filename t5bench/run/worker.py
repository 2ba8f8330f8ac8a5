"""Runs a training program unchanged, and lets the recorder know where it was, that it trains, and why it failed.

    python t5bench/run/worker.py STACKS SCRIPT ARGUMENTS...

When it gets TERM, its threads' stacks go to STACKS.<rank>. torchrun sends TERM to all workers when one has failed, and
so does the guard, so the stacks always show where a worker was. A sign of life in every iteration, and the exception
that ends the program, go to a file next to it (t5bench/run/reports.py). With T5_PROFILE (ITERATION:FILE) an iteration
is profiled.
"""

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from t5bench.run.agreement import compare_plans
from t5bench.run.collectives import current, tell_when_asked
from t5bench.run.reports import Reporter, reports_prefix

PR_SET_PDEATHSIG = 1


def keep_stacks(path: str) -> None:
    with contextlib.suppress(OSError):  # a run continues without the file
        Path(path).write_bytes(b"")
        file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - until the worker ends
        faulthandler.register(signal.SIGTERM, file, all_threads=True, chain=True)
        # The guard asks all workers before it ends any, because torchrun's TERM may come in the middle of a stack.
        tell_when_asked(Path(path))
        faulthandler.register(signal.SIGUSR2, file, all_threads=True, chain=True)
        # A process that a worker starts is not a worker.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.register_at_fork(after_in_child=lambda number=number: faulthandler.unregister(number))


def end_with_torchrun() -> None:
    """Lets the kernel end this process if torchrun is killed, which would leave its workers running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare_libraries(is_megatron: bool) -> None:
    """Imports what the engine imports, in less time; the native engine leaves out DeepSpeed where it needs none."""
    gc.disable()
    if is_megatron:
        from t5bench.imports import import_deepspeed, leave_out_compiler

        leave_out_compiler()
        with contextlib.suppress(ImportError):  # the engine says it better
            import_deepspeed()
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    gc.freeze()  # no collection looks at the million objects of the modules
    gc.enable()


def report_iterations(reporter: Reporter) -> None:
    """Every batch that is read, also by an evaluation, and every update of an optimizer is a sign of life."""
    try:
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data.dataloader import _BaseDataLoaderIter
    except ImportError:
        return
    register_optimizer_step_post_hook(lambda *_: reporter.alive())
    next_batch = _BaseDataLoaderIter.__next__

    @functools.wraps(next_batch)
    def reported(loader: _BaseDataLoaderIter) -> Any:
        reporter.alive()
        return next_batch(loader)

    _BaseDataLoaderIter.__next__ = reported


def report_rejections(reporter: Reporter) -> None:
    """argparse ends a program without an exception that has its message."""
    say_and_exit = argparse.ArgumentParser.error

    @functools.wraps(say_and_exit)
    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        reporter.rejection = message
        say_and_exit(parser, message)

    argparse.ArgumentParser.error = error


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
    rank = os.environ.get("RANK", "0")
    end_with_torchrun()
    keep_stacks(f"{stacks}.{rank}")
    reporter = Reporter(reports_prefix(Path(stacks)), int(rank))
    report_rejections(reporter)
    # Not resolved: a link to the engine's checkout has a path that its compilers can read.
    directory = str(Path(program).absolute().parent)
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)
    else:
        sys.path[0] = directory
    sys.argv = [program, *arguments]
    try:
        prepare_libraries(is_megatron=(Path(directory) / "megatron" / "initialize.py").exists())
        report_iterations(reporter)
        compare_plans()
        place = os.environ.get("T5_PROFILE")
        if place:
            from t5bench.profile.step import OneIteration

            iteration, _, output = place.partition(":")
            OneIteration(int(iteration), Path(output), sys.argv)
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            reporter.failed(ended)
            raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        operation, _ = current()
        reporter.failed(error, operation)
        raise
    leave()


if __name__ == "__main__":
    main()
