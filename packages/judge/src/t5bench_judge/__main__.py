"""``judge A B``, where this package is installed alone."""

import argparse
import os
import sys
from collections.abc import Sequence

from t5bench_judge import command
from training_comparison.problem import Problem

EXIT_NOT_COMPARABLE = 2


def visible(text: str) -> str:
    """Text from others' logs must not steer the terminal: characters that are not printed are written out."""
    shown = []
    for character in text:
        is_kept = character in "\n\t" or character.isprintable()
        shown.append(character if is_kept else character.encode("unicode_escape", "surrogatepass").decode())
    return "".join(shown)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="judge")
    command.add_arguments(parser)
    arguments = parser.parse_args(words)
    try:
        status, text = command.judged(arguments)
    except Problem as problem:
        print(visible(problem.report), file=sys.stderr)
        return EXIT_NOT_COMPARABLE
    try:
        print(visible(text), flush=True)
    except BrokenPipeError:  # head has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    sys.exit(main())
