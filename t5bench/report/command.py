"""``python -m t5bench compare``: a table of runs, and the page."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

from t5bench import Problem
from t5bench.compare.comparison import Comparison, build
from t5bench.record import records
from t5bench.record.files import RecordError
from t5bench.record.reader import UNFORESEEN, seconds
from t5bench.record.status import RUNNING
from t5bench.record.text import steer, visible
from t5bench.report import tables

DEEPEST = 4
DEFAULT_RUNS, PAGE = "outputs", "index.html"
WIDTH_ELSEWHERE = 120  # characters of a line, for a file or a pipe when COLUMNS is unset


FORMATS = {
    "markdown": tables.markdown,
    "csv": tables.as_csv,
    "json": lambda comparison: json.dumps(tables.rounded(comparison.to_json()), indent=2) + "\n",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    formats = ["terminal", *FORMATS]
    parser.add_argument("--format", choices=formats, default=formats[0], help="what to print (default: %(default)s)")
    watch = "redraw the table until every run of the sweep has ended (default: every 5 seconds)"
    parser.add_argument("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help=watch)
    parser.add_argument("--wide", action="store_true", help="print every column, however wide the terminal is")
    parser.add_argument("--output", type=Path, help="directory for the files (default: 'comparison' next to the runs)")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command over a comparison takes: the runs, and how to compare them."""
    runs = f"a run directory, or one that contains some (default: {DEFAULT_RUNS})"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=runs)
    parser.add_argument("--baseline", default="ddp", metavar="STRATEGY", help="baseline (default: %(default)s)")
    allow = "allow runs to differ in this, and mark the rows that do"
    parser.add_argument("--allow", action="append", default=[], metavar="NAME", help=allow)
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="a GPU's dense peak, for the MFU")


def compare(arguments: argparse.Namespace) -> Comparison:
    """The comparison that the arguments of add_run_arguments ask for. Raises Problem."""
    runs, damaged = load_runs(run_directories(arguments.runs))
    return comparison_of(runs, damaged, arguments.baseline, arguments.allow, arguments.peak_tflops)


def load_runs(directories: Sequence[Path], from_log: bool = False) -> tuple[list[records.Run], list[str]]:
    """The runs, and why damaged ones and copies are left out. Raises Problem where there is no run that can be read."""
    runs, damaged, problem = [], [], RecordError("there is no run")
    for directory in directories:
        try:
            run = records.load(directory, from_log=from_log)
            # No two runs have every iteration at the same moment: a copy is no repeat.
            same = (each for each in runs if each.plan == run.plan and each.iterations == run.iterations != [])
            if original := next(same, None):
                damaged.append(f"the run in {directory} is left out: it is a copy of the one in {original.directory}")
            else:
                runs.append(run)
        except RecordError as error:
            damaged.append(f"the run in {directory} is damaged and left out: {error}")
            problem = error
    if not runs:
        raise problem
    return runs, damaged


def comparison_of(runs: Sequence[records.Run], damaged: Sequence[str], *how: Any) -> Comparison:
    """how: what `build` takes besides runs. A record that nobody wrote may lack what no reader foresees: without it."""
    try:
        comparison = _captioned(runs, *how)
    except UNFORESEEN as error:
        if isinstance(error, Problem) and not isinstance(error, RecordError):
            raise
        fit, damaged = list[records.Run](), list(damaged)
        for run in runs:
            try:  # with itself, then with the first of the others
                _captioned([*fit[:1], run], fit[0].strategy if fit else run.strategy)
                fit.append(run)
            except UNFORESEEN as wrong:
                why = str(wrong) if isinstance(wrong, Problem) else repr(wrong)
                damaged.append(f"the run in {run.directory} is damaged and left out: {why}")
        comparison = build(fit, *how)
    return replace(comparison, problems=[*damaged, *comparison.problems])


def _captioned(runs: Sequence[records.Run], *how: Any) -> Comparison:
    """A comparison of which the caption too can be written."""
    comparison = build(runs, *how)
    tables.caption(comparison)
    return comparison


def run_directories(places: Sequence[str]) -> list[Path]:
    """The directories of runs in these, or in outputs/, each once. Raises Problem."""
    directories: dict[Path, Path] = {}  # by what they are without links
    for place in places or [DEFAULT_RUNS]:
        if not Path(place).is_dir():
            raise Problem(f"there is no directory {place}", "Name the directories of runs, or one that holds some")
        found = list(find_runs(Path(place)))
        if not found:
            remedy = "A launcher leaves its run in OUTPUT_DIR, outputs/<strategy> when unset"
            raise Problem(f"{place} holds no run: no node0.json in it or up to {DEEPEST} levels below", remedy)
        directories |= {directory.resolve(): directory for directory in found}
    return list(directories.values())


def find_runs(directory: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The run directories in here, in the order of their paths; what lies within a run is not looked at."""
    if records.looks_like_run(directory):
        yield directory
    elif depth:
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                yield from find_runs(path, depth - 1)


def sweep_root(directories: Sequence[Path]) -> Path:
    """What all runs lie in: the sweep's directory, where there was one."""
    root = Path(os.path.commonpath([directory.resolve().parent for directory in directories]))
    with_list = (place for place in (root, root.parent) if (place / records.SWEEP).exists())
    return next(with_list, root)


def default_output(places: Sequence[str], runs: Sequence[records.Run]) -> Path:
    """In the one directory that was named and holds the runs, else in what all their directories lie in."""
    if len(places) <= 1 and not records.looks_like_run(here := Path(*places or [DEFAULT_RUNS])):
        return here / "comparison"
    return Path(os.path.commonpath([run.directory.resolve().parent for run in runs])) / "comparison"


def write(comparison: Comparison, directory: Path) -> Path:
    """Writes comparison.md, .csv and .json and the page into the directory; the page. Raises Problem."""
    # matplotlib takes a second to import: not before the arguments are known to be right.
    from t5bench.report.page import render

    page = directory / PAGE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for suffix, text in zip(("md", "csv", "json"), FORMATS.values(), strict=True):
            (directory / f"comparison.{suffix}").write_text(text(comparison), encoding="utf-8")
        page.write_text(render(comparison), encoding="utf-8")
    except (OSError, UnicodeError) as error:  # UnicodeError: the name of a run's directory
        raise Problem(f"the comparison cannot be written: {error}", "Name another place: --output DIR") from error
    return page


def table(comparison: Comparison, arguments: argparse.Namespace) -> str:
    """As wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns
    return visible(tables.terminal(comparison, None if arguments.wide else width), "\n")


def progress(runs: Sequence[records.Run], now: float) -> tuple[str, bool]:
    """How far a sweep, or these runs, are; and whether all have ended. now: seconds since 1970."""
    root, found = sweep_root([run.directory for run in runs]), {run.directory.resolve(): run for run in runs}
    places = [(root / name).resolve() for name in records.read_list(root)] or list(found)
    to_come = [place for place in places if not records.looks_like_run(place)]
    begun = [found[place] for place in places if place in found]
    going = [run for run in begun if run.status == RUNNING]
    left = len(to_come) + len(going)
    text = f"{len(places) - left} of {len(places)} runs have ended"
    for run in going:
        last = run.iterations[-1].iteration if run.iterations else 0
        text += f"; {run.name} is at iteration {last} of {run.plan.iterations}"
    spans = [(seconds(run.record["started"]), seconds(run.record["ended"])) for run in begun if run.record["ended"]]
    if spans and left:
        of_one = mean(end - start for start, end in spans)
        spent = sum(now - seconds(run.record["started"]) for run in going)
        text += f"; about {timedelta(seconds=round(max(0.0, of_one * left - spent)))} left"
    return text, not left


def draw(arguments: argparse.Namespace) -> bool:
    """Draws the table of a sweep that goes on; whether every run has ended."""
    comparison = compare(arguments)
    text, over = progress(comparison.runs, time.time())
    if sys.stdout.isatty():
        steer(sys.stdout, "\x1b[H\x1b[2J")
    print(f"{table(comparison, arguments)}{text}", flush=True)
    return over


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        while arguments.watch and not draw(arguments):
            time.sleep(max(arguments.watch, 0.1))
    comparison = compare(arguments)
    page = write(comparison, arguments.output or default_output(arguments.runs, comparison.runs))
    if arguments.format == "terminal":
        print(f"{table(comparison, arguments)}page: {page}")
    else:
        print(FORMATS[arguments.format](comparison), end="")
        print("\n".join([f"page: {page}", *(f"problem: {text}" for text in comparison.problems)]), file=sys.stderr)
    return 0 if comparison.sound else 1
