"""The types of commands' arguments."""

import argparse
from collections.abc import Callable
from math import inf


def at_least(least: float, kind: type = int, most: float = inf) -> Callable[[str], float]:
    """A finite number from least to most. kind: int or float."""

    def number(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, found '{text}'") from None
        if not least <= found < inf:
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, found {text}")
        if found > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:g}, found {text}")
        return found

    return number
