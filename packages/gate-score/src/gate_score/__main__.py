"""``gate-score``, where this package is installed alone."""

import argparse
import sys
from collections.abc import Sequence

from gate_score import command


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gate-score")
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
