"""Prepare data: what scripts/prepare_xsum_megatron.sh and scripts/export_xsum_corpus.py run, with their settings."""

import os
import signal
import sys
from typing import NoReturn

from t5bench import REPOSITORY, Problem
from t5bench.corpus import common

EXIT_CONFIGURATION = 2


def main() -> NoReturn:
    """End with status 0, 2 after a problem, or 128 + the signal that interrupted it."""
    for number in common.SIGNALS:
        # Under nohup, or in the background of a script, some are ignored and stay so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        from t5bench.corpus.prepare import prepare

        prepare(os.environ)
        sys.exit()
    except Problem as error:
        problem = error
    except ImportError as error:
        remedy = f"Run: pip install -r '{REPOSITORY / 'requirements.txt'}'"
        problem = Problem(f"{sys.executable} lacks a package: {error}", remedy)
    except OSError as error:
        remedy = "Check the path, its permissions and the free space"
        problem = Problem(f"{error.filename or 'writing'}: {error.strerror or error}", remedy)
    except KeyboardInterrupt as interrupt:
        sys.exit(128 + interrupt.args[0])
    common.note(f"error: {problem}\n       {problem.remedy}".rstrip())
    sys.exit(EXIT_CONFIGURATION)


def _interrupt(number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    main()
