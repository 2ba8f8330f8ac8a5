"""Plans runs, records them and compares them. docs/house.md says what each room holds, and what it may import.

An old Python, such as the 3.6 of some clusters, must be able to parse this file and t5bench/__main__.py, to say that it
is too old.
"""

import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

OLDEST, NEWEST = (3, 10), (3, 14)
_FOUND = f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}"
WRONG_PYTHON = f"{_FOUND}, but 3.{OLDEST[1]} to 3.{NEWEST[1]} is needed", "Choose another: PYTHON=/path/to/python3"
if sys.version_info < OLDEST:
    sys.stderr.write("error: {}\n       {}\n".format(*WRONG_PYTHON))
    sys.exit(2)

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = REPOSITORY / "packages"
IS_CHECKOUT = (REPOSITORY / "scripts" / "common.sh").is_file()
# Where scripts/ and ds_configs/ are: an installed package carries what it reads of them (setup.py).
FILES = REPOSITORY if IS_CHECKOUT else Path(__file__).with_name("carried")
# In a checkout, what stands alone beside this package is imported from there, without an installation.
sys.path[1:1] = [str(source) for source in sorted(PACKAGES.glob("*/src"))]
from training_comparison.problem import Problem  # noqa: E402 - lies beside this package; imported from here

EXIT_CONFIGURATION = 2  # nothing expensive has started, and nothing was changed
# USR1 and USR2: SLURM's --signal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def need_checkout(what: str) -> None:
    """Raises Problem where this package is installed without its launchers."""
    if not IS_CHECKOUT:
        remedy = f"Clone the repository, and run python -m t5bench there: {REPOSITORY} has only the Python packages"
        raise Problem(f"{what} needs the launchers of a clone", remedy)


class Interrupted(SystemExit):
    """One of SIGNALS arrived."""


def raise_on_signals() -> None:
    """Makes the first signal raise Interrupted; later ones are ignored, so that the clean-up can finish.

    A signal that is already ignored, as HUP is under nohup, stays ignored.
    """

    def interrupt(number: int, _: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(128 + number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


@contextlib.contextmanager
def later_signals() -> Iterator[None]:
    """Keeps SIGNALS for the end of the block, because Python drops what a signal's handler raises while it forks."""
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in arrived[:1]:
        signal.raise_signal(number)


def note(text: str) -> None:
    """Prints on standard error, if anybody is left to read it, with control characters made visible."""
    from t5bench.text import visible

    try:
        print(visible(text, "\t\n"), file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """For a stream that cannot be written: Python writes what it still holds at its end, and would fail there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def digest(file: BinaryIO) -> str:
    """The sha256 of the rest of the file, in hexadecimal."""
    found = hashlib.sha256()
    for block in iter(lambda: file.read(1 << 20), b""):
        found.update(block)
    return found.hexdigest()
