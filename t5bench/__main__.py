"""``python -m t5bench summary RUN...``: one row a run directory, compared with the one named ddp."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from t5bench.summary import table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m t5bench", description="Reads runs and compares them.")
    commands = parser.add_subparsers(dest="command", required=True)
    summary = commands.add_parser("summary", help="one row a run; exit 1 unless all are complete and equal to DDP")
    summary.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory, such as outputs/ddp")
    args = parser.parse_args(arguments)
    if missing := [str(run) for run in args.runs if not run.is_dir()]:
        print(f"error: no such run directory: {', '.join(missing)}", file=sys.stderr)
        return 2
    text, sound = table(args.runs)
    print(text)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
