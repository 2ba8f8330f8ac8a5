"""What a process inherits from its parent, put right: a run's status must not depend on who started it.

A parent hands down which signals are ignored or blocked, the mask for new files, and the standard streams, one of which
may be closed. Daemons, job agents and test tools leave these in states that no program expects.
"""

import contextlib
import os
import signal
import stat
import sys

# What people ask for by ignoring a signal: a run that outlives its terminal (nohup), or that a key for the foreground's
# program does not reach (a shell's background job); and what a batch script does to survive SLURM's --signal.
_IGNORED_ON_PURPOSE = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
# Python ignores these itself, and raises an exception where they would have come.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def put_right() -> None:
    """For the beginning of a program, before it starts another, which inherits the same."""
    _restore_signals()
    os.umask(_current_mask() & ~stat.S_IRWXU)  # what this process creates it must be able to read


def _restore_signals() -> None:
    """With SIGCHLD ignored, the kernel keeps no exit status, and Python takes every child's end for a success."""
    for number in signal.valid_signals() - _IGNORED_ON_PURPOSE - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) == signal.SIG_IGN:
            with contextlib.suppress(OSError):  # of those that the C library keeps for itself
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _current_mask() -> int:
    """Of this process; it can only be read by setting another."""
    mask = os.umask(stat.S_IRWXG | stat.S_IRWXO)
    os.umask(mask)
    return mask


def open_missing_streams() -> None:
    """Gives standard streams that are closed the null device; the next file opened would take their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - until the program ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
