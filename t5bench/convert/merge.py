"""The former name of the command reshape."""

import argparse

from t5bench import note
from t5bench.convert import reshape
from t5bench.convert.reshape import add_arguments as add_arguments


def run(arguments: argparse.Namespace) -> int:
    note("note: merge is now called reshape; both do the same")
    return reshape.run(arguments)
