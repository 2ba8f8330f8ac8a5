"""The types of commands' arguments, and those that several commands take."""

import argparse
from collections.abc import Callable
from math import inf

from t5bench import Problem
from t5bench.costmodel.whole_training import WholeTraining


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


def add_whole_training(parser: argparse.ArgumentParser) -> None:
    tokens = "also say the hours of a training of so many tokens, such as 20e9, and its tokens per second"
    price = "with --tokens: what a GPU costs for an hour, in any currency; also say what the training costs"
    parser.add_argument("--tokens", type=at_least(1, float), metavar="N", help=tokens)
    parser.add_argument("--price", type=at_least(1e-9, float), metavar="AMOUNT", help=price)


def asked_whole_training(args: argparse.Namespace) -> WholeTraining | None:
    """None where nothing is asked. Raises Problem."""
    tokens = getattr(args, "tokens", None)  # some commands over comparisons do not ask
    price = getattr(args, "price", None)
    if not tokens:
        if price:
            raise Problem("--price is given without --tokens", "Say how many tokens: --tokens 20e9")
        return None
    return WholeTraining(tokens, price)
