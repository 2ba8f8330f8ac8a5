"""Prepare data: what scripts/prepare_xsum_megatron.sh and scripts/export_xsum_corpus.py run, with their settings."""

import os
import sys

from t5bench import Problem, note, raise_on_signals
from t5bench.__main__ import EXIT_CONFIGURATION, imported


def main() -> None:
    """End with status 2 after a problem, or 128 + the signal that interrupted it."""
    raise_on_signals()
    try:
        return imported("t5bench.corpus.prepare").prepare(os.environ)
    except OSError as error:
        problem = Problem(str(error), "Check the path, its permissions and the free space")
    except Problem as error:
        problem = error
    note(problem.report)
    sys.exit(EXIT_CONFIGURATION)


if __name__ == "__main__":
    main()
