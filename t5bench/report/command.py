"""``python -m t5bench compare``: the table over a set of runs, and the page."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from t5bench.compare import comparable
from t5bench.compare.comparison import Comparison, build
from t5bench.record import records
from t5bench.report import tables

DEEPEST = 4
DEFAULT_RUNS = "outputs"
FORMATS = {
    "terminal": tables.terminal,
    "markdown": tables.markdown,
    "csv": tables.as_csv,
    "json": lambda comparison: json.dumps(comparison.to_json(), indent=2, allow_nan=False) + "\n",
}


class UsageError(ValueError):
    """Wrong use: what is wrong, and what to do on a second line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="what to print (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, help="where the files go (default: the directory 'comparison' where the runs are)"
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command over a comparison takes: the runs, and how to compare them."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"a run directory, or one that holds some (default: {DEFAULT_RUNS})"
    )
    parser.add_argument("--baseline", default="ddp", metavar="STRATEGY", help="compare with it (default: %(default)s)")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="let runs differ in this, and mark the rows that do",
    )
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="a GPU's dense peak, for the MFU")


def compare(arguments: argparse.Namespace) -> Comparison:
    """The comparison that the arguments of add_run_arguments ask for. Raises UsageError."""
    for name in arguments.allow:
        if name not in comparable.ALLOWABLE:
            raise UsageError(f"--allow {name} is not known\nIt may be one of: {' '.join(comparable.ALLOWABLE)}")
    if arguments.peak_tflops is not None and not 0 < arguments.peak_tflops < float("inf"):
        raise UsageError(f"--peak-tflops must be a positive number, found {arguments.peak_tflops}")
    runs = load_runs(arguments.runs)
    try:
        return build(runs, arguments.baseline, arguments.allow, arguments.peak_tflops)
    except comparable.NotComparableError as error:
        raise UsageError(str(error)) from error


def load_runs(places: Sequence[str]) -> list[records.Run]:
    """The runs in these directories, or in outputs/ when there is none, each once. Raises UsageError."""
    directories: dict[Path, Path] = {}
    for place in places or [DEFAULT_RUNS]:
        if not Path(place).is_dir():
            raise UsageError(f"there is no directory {place}\nName the directories of runs, or one that holds some")
        found = list(find_runs(Path(place)))
        if not found:
            raise UsageError(
                f"{place} holds no run: no node0.json in it or up to {DEEPEST} levels below\n"
                "A launcher leaves its run in OUTPUT_DIR, outputs/<strategy> when unset"
            )
        directories |= {directory.resolve(): directory for directory in found}
    try:
        return [records.load(directory) for directory in directories.values()]
    except records.RecordError as error:
        raise UsageError(f"{error}\nMove that directory away, or name the runs to compare") from error


def find_runs(directory: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The run directories in here, in the order of their paths; what lies within a run is not looked at."""
    if any(path.stem.removeprefix("node").isdigit() for path in directory.glob("node*.json")):
        yield directory
    elif depth:
        for child in sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from find_runs(child, depth - 1)


def default_output(places: Sequence[str], runs: Sequence[records.Run]) -> Path:
    """In the one directory that was named and holds the runs, else in what all their directories lie in."""
    if len(places) <= 1 and next(find_runs(here := Path(*places or [DEFAULT_RUNS]))) != here:
        return here / "comparison"
    return Path(os.path.commonpath([run.directory.resolve().parent for run in runs])) / "comparison"


def write(comparison: Comparison, directory: Path) -> Path:
    """Writes comparison.md, .csv and .json and the page into the directory; the page. Raises OSError."""
    from t5bench.report.page import (
        render,
    )  # matplotlib takes a second to import: not before the arguments are known to be right

    directory.mkdir(parents=True, exist_ok=True)
    for name, suffix in (("markdown", "md"), ("csv", "csv"), ("json", "json")):
        (directory / f"comparison.{suffix}").write_text(FORMATS[name](comparison))
    page = directory / "index.html"
    page.write_text(render(comparison))
    return page


def usage_error(error: Exception) -> int:
    """Says what is wrong and what to do; the exit status."""
    first, *rest = str(error).split("\n")
    print("\n".join([f"error: {first}", *(f"       {line}" for line in rest)]), file=sys.stderr)
    return 2


def run(arguments: argparse.Namespace) -> int:
    try:
        comparison = compare(arguments)
        directory = arguments.output or default_output(arguments.runs, comparison.runs)
        page = write(comparison, directory)
    except UsageError as error:
        return usage_error(error)
    except OSError as error:
        return usage_error(UsageError(f"the comparison cannot be written: {error}\nName another place: --output DIR"))
    print(FORMATS[arguments.format](comparison), end="")
    print(f"page: {page}", file=sys.stderr if arguments.format != "terminal" else sys.stdout)
    if not comparison.sound and arguments.format != "terminal":
        print("\n".join(f"problem: {problem}" for problem in comparison.problems), file=sys.stderr)
    return 0 if comparison.sound else 1
