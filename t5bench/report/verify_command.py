"""``python -m t5bench verify``: checks that every figure of a package follows from its logs."""

import argparse
from pathlib import Path

from t5bench.report.package import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", type=Path, metavar="PACKAGE", help="what `pack` wrote")
    parser.add_argument("--sha256", default="", metavar="CHECKSUM", help="the checksum that was published with it")


def run(arguments: argparse.Namespace) -> int:
    found, figures = verify(arguments.package, arguments.sha256.lower())
    for finding in found:
        print(f"finding: {finding}")
    if not found:
        print(f"{arguments.package}: all {figures} numbers of the comparison follow from the logs")
    return int(bool(found))
