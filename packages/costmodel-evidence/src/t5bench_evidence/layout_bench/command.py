"""``python -m t5bench layout-bench``: what it takes. Its help needs the standard library alone."""

import argparse
from pathlib import Path

from t5bench_evidence.layout_bench import PEERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = "further tables of layouts, each a set of its own (LAYOUTBENCH.md describes their columns)"
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=files)
    names = ", ".join(PEERS)
    peer = f"ask a planner again, in this checkout or directory of its package: {names}. Others' answers are as stored"
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIRECTORY", help=peer)
    parser.add_argument("--store", action="store_true", help="keep what --peer's planners answer, in this package")
    parser.add_argument("--page", action="store_true", help="write the tables and the picture into LAYOUTBENCH.md")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    from t5bench_evidence.layout_bench import bench

    return bench.run(args)
