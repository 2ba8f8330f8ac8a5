"""``python -m t5bench compare``: a table of runs, and the page."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import mean

from t5bench import Problem
from t5bench.arguments import asked_whole_training
from t5bench.command_lines import DEFAULT_RUNS
from t5bench.compare.comparison import Comparison, build
from t5bench.compare.recipe import RECIPE_RUNS, sentence
from t5bench.record import records
from t5bench.record.files import WHERE_RUNS_ARE, RecordError
from t5bench.record.reader import UNFORESEEN, seconds
from t5bench.record.status import COMPLETE, RUNNING
from t5bench.report import tables
from t5bench.report.picture import panels, text
from t5bench.text import steer, visible

DEEPEST = 4  # levels of directories below a named one in which runs are looked for
PAGE = "index.html"
WIDTH_ELSEWHERE = 120  # characters of a line, for a file or a pipe when COLUMNS is unset
CLEAR_SCREEN = "\x1b[H\x1b[2J"

FORMATS = {
    "markdown": tables.markdown,
    "csv": tables.as_csv,
    "json": lambda comparison: json.dumps(tables.rounded(comparison.to_json()), indent=2) + "\n",
}
SUFFIXES = {"markdown": "md", "csv": "csv", "json": "json"}


def compare(arguments: argparse.Namespace) -> Comparison:
    """The comparison that the arguments of add_run_arguments ask for. Raises Problem."""
    runs, damaged = load_runs(run_directories(arguments.runs))
    whole = asked_whole_training(arguments)
    comparison = comparison_of(runs, damaged, arguments.baseline, arguments.allow, arguments.peak_tflops)
    return replace(comparison, whole=whole)


def with_other_recipe(comparison: Comparison) -> Comparison:
    """With one more sentence, where the sweep's fastest rows also ran with another recipe. Raises Problem."""
    folder = sweep_root([run.directory for run in comparison.runs]) / RECIPE_RUNS
    directories = list(find_runs(folder)) if folder.is_dir() else []
    if not directories:
        return comparison
    complete = [run for run in load_runs(directories)[0] if run.status == COMPLETE]
    said = sentence(comparison, build(complete, comparison.baseline)) if complete else ""
    return replace(comparison, verdicts=[*comparison.verdicts, said]) if said else comparison


def load_runs(directories: Sequence[Path], from_log: bool = False) -> tuple[list[records.Run], list[str]]:
    """The runs, and why damaged ones and copies are left out. Raises Problem where there is no run that can be read."""
    runs: list[records.Run] = []
    left_out: list[str] = []
    last_error = RecordError("there is no run")
    for directory in directories:
        try:
            run = records.load(directory, from_log=from_log)
        except RecordError as error:
            left_out.append(f"the run in {directory} is damaged and left out: {error}")
            last_error = error
            continue
        original = _original_of(run, runs)
        if original:
            left_out.append(f"the run in {directory} is left out: it is a copy of the one in {original.directory}")
        else:
            runs.append(run)
    if not runs:
        raise last_error
    return runs, left_out


def _original_of(run: records.Run, earlier: Sequence[records.Run]) -> records.Run | None:
    """The run that this one is a copy of. No two runs have every iteration at the same moment."""
    for other in earlier:
        if run.iterations and other.plan == run.plan and other.iterations == run.iterations:
            return other
    return None


def comparison_of(
    runs: Sequence[records.Run],
    damaged: Sequence[str],
    baseline: str,
    allowed: Sequence[str] = (),
    peak_tflops: float | None = None,
) -> Comparison:
    """The comparison of these runs. damaged: why others are left out, which its problems say first.

    A forged or hand-edited record may break code that no reader guards: such runs are left out too.
    """
    try:
        comparison = _captioned(runs, baseline, allowed, peak_tflops)
    except UNFORESEEN as error:
        if isinstance(error, Problem) and not isinstance(error, RecordError):
            raise
        usable, unusable = _usable(runs)
        damaged = [*damaged, *unusable]
        comparison = build(usable, baseline, allowed, peak_tflops)
    return replace(comparison, problems=[*damaged, *comparison.problems])


def _usable(runs: Sequence[records.Run]) -> tuple[list[records.Run], list[str]]:
    """The runs that a comparison can be made of, and why the others are left out."""
    usable: list[records.Run] = []
    left_out: list[str] = []
    for run in runs:
        # The first is compared with itself, every other one with the first.
        candidates = [*usable[:1], run]
        try:
            _captioned(candidates, candidates[0].strategy)
        except UNFORESEEN as error:
            reason = str(error) if isinstance(error, Problem) else repr(error)
            left_out.append(f"the run in {run.directory} is damaged and left out: {reason}")
        else:
            usable.append(run)
    return usable, left_out


def _captioned(
    runs: Sequence[records.Run],
    baseline: str,
    allowed: Sequence[str] = (),
    peak_tflops: float | None = None,
) -> Comparison:
    """A comparison of which the caption too can be written."""
    comparison = build(runs, baseline, allowed, peak_tflops)
    tables.caption(comparison)
    return comparison


def run_directories(names: Sequence[str]) -> list[Path]:
    """The directories of runs in these, or in outputs/, each once. Raises Problem."""
    directories: dict[Path, Path] = {}  # by the path without links
    for name in names or [DEFAULT_RUNS]:
        if not Path(name).is_dir():
            remedy = f"Name the directories of runs, or one that holds some. {WHERE_RUNS_ARE}"
            raise Problem(f"there is no directory {name}", remedy)
        in_here = list(find_runs(Path(name)))
        if not in_here:
            problem = f"{name} holds no run: no node0.json in it or up to {DEEPEST} levels below"
            raise Problem(problem, WHERE_RUNS_ARE)
        for directory in in_here:
            directories[directory.resolve()] = directory
    return list(directories.values())


def find_runs(directory: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The run directories in here, in the order of their paths; what lies within a run is not looked at."""
    try:
        if records.looks_like_run(directory):
            yield directory
            return
        entries = sorted(directory.iterdir()) if depth else []
        below = [path for path in entries if path.is_dir() and not path.name.startswith(".")]
    except OSError:  # whoever reads it says why it cannot be read
        yield directory
        return
    for path in below:
        yield from find_runs(path, depth - 1)


def sweep_root(directories: Sequence[Path]) -> Path:
    """What all runs lie in: the sweep's directory, where there was one."""
    root = _common_parent(directories)
    for candidate in (root, root.parent):
        if (candidate / records.SWEEP).exists():
            return candidate
    return root


def _common_parent(directories: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([directory.resolve().parent for directory in directories]))


def default_output(names: Sequence[str], runs: Sequence[records.Run]) -> Path:
    """In the one directory that was named and holds the runs, else in what all their directories lie in."""
    if len(names) <= 1:
        named = Path(names[0] if names else DEFAULT_RUNS)
        if not records.looks_like_run(named):
            return named / "comparison"
    return _common_parent([run.directory for run in runs]) / "comparison"


def write(comparison: Comparison, directory: Path) -> Path:
    """Writes comparison.md, .csv and .json and the page into the directory; the page. Raises Problem."""
    # matplotlib takes a second to import: not before the arguments are known to be right.
    from t5bench.report.page import render

    page = directory / PAGE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, suffix in SUFFIXES.items():
            text = FORMATS[name](comparison)
            (directory / f"comparison.{suffix}").write_text(visible(text, "\t\n"), encoding="utf-8")
        page.write_text(visible(render(comparison), "\t\n"), encoding="utf-8")
    except (OSError, UnicodeError) as error:  # UnicodeError: the name of a run's directory
        raise Problem(f"the comparison cannot be written: {error}", "Name another place: --output DIR") from error
    return page


def shown(comparison: Comparison, arguments: argparse.Namespace) -> str:
    """The picture, the verdicts and the table, as wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns
    drawn = panels(comparison, dict(tables.named_rows(comparison, width // 3)))
    lines = [line for panel_line in text(drawn, width, sys.stdout.encoding) for line in fitted(panel_line, width)]
    titles = [panel.title for panel in drawn]
    below = tables.terminal(comparison, None if arguments.wide else width, titles)
    return visible("\n".join([*lines, "", below] if lines else [below]), "\n")


def to_start(comparison: Comparison) -> str:
    """The command of each row that is to be taken, a line each. Its recipe is left out: the user has another."""
    from t5bench.report.page import command

    lines = []
    for group in comparison.groups:
        if group.taken:
            words = command(group.taken.run, with_recipe=False)
            where = ", on node 0" if group.taken.run.layout.nnodes > 1 else ""
            lines.append(f"To train with {group.taken.label} and your own recipe{where}:\n  {words}\n")
    return visible("".join(lines), "\n")


def fitted(line: str, width: int) -> list[str]:
    """A title that is too long, in several lines."""
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False) if len(line) > width else [line]


def progress(runs: Sequence[records.Run], now: float) -> tuple[str, bool]:
    """How far a sweep, or these runs, are; and whether all have ended. now: seconds since 1970."""
    root = sweep_root([run.directory for run in runs])
    run_in = {run.directory.resolve(): run for run in runs}
    listed = [(root / name).resolve() for name in records.read_list(root)]
    expected = listed or list(run_in)
    to_come = [directory for directory in expected if not records.looks_like_run(directory)]
    begun = [run_in[directory] for directory in expected if directory in run_in]
    running = [run for run in begun if run.status == RUNNING]
    left = len(to_come) + len(running)
    text = f"{len(expected) - left} of {len(expected)} runs have ended"
    for run in running:
        iteration = run.iterations[-1].iteration if run.iterations else 0
        text += f"; {run.name} is at iteration {iteration} of {run.plan.iterations}"
    durations = [seconds(run.record["ended"]) - seconds(run.record["started"]) for run in begun if run.record["ended"]]
    if durations and left:
        spent = sum(now - seconds(run.record["started"]) for run in running)
        remaining = max(0.0, mean(durations) * left - spent)
        text += f"; about {timedelta(seconds=round(remaining))} left"
    return text, not left


def draw(arguments: argparse.Namespace) -> bool:
    """Draws the table of a sweep that goes on; whether every run has ended."""
    comparison = with_other_recipe(compare(arguments))
    how_far, is_over = progress(comparison.runs, time.time())
    if sys.stdout.isatty():
        steer(sys.stdout, CLEAR_SCREEN)
    print(f"{shown(comparison, arguments)}{how_far}", flush=True)
    return is_over


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        while arguments.watch and not draw(arguments):
            time.sleep(max(arguments.watch, 0.1))
    comparison = with_other_recipe(compare(arguments))
    output = arguments.output or default_output(arguments.runs, comparison.runs)
    page = write(comparison, output)
    if arguments.format == "terminal":
        print(f"{shown(comparison, arguments)}{to_start(comparison)}page: {page}")
    else:
        print(FORMATS[arguments.format](comparison), end="")
        print(f"page: {page}", file=sys.stderr)
        for problem in comparison.problems:
            print(f"problem: {problem}", file=sys.stderr)
    return 0 if comparison.sound else 1
