"""``python -m t5bench sweep``: runs the strategies one after another, then compares them all.

Of each run it prints a line, with an estimate of the time left; failed runs are retried, and a signal ends it in order.
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from t5bench import Interrupted, Problem, note, raise_on_signals
from t5bench.checkpoint_form import TRACKER
from t5bench.compare.comparison import build
from t5bench.compare.recipe import RECIPE_RUNS, fastest_rows
from t5bench.plan import launchers, run_lock
from t5bench.plan.engine import extension_locks
from t5bench.plan.resume import misfits
from t5bench.record import log
from t5bench.record.files import RecordError
from t5bench.record.plan import Plan
from t5bench.record.records import load, looks_like_run, read_list, read_metrics, write_list
from t5bench.record.settings import BY_NAME, OWN_RECIPE
from t5bench.record.status import COMPLETE, CONFIGURATION, EXIT_CODES
from t5bench.sweep.clipping import AMONG, clip_of_sweep
from t5bench.sweep.duration import how_long
from t5bench.sweep.launch import UNWATCHED, Launch, PlannedRun, Started, choose, plan_baselines, plan_runs, plans_of
from t5bench.sweep.micro_batches import TRIALS, AskedSizes, also_at, asked_sizes, best_rows, planned_trials
from t5bench.sweep.order import balanced_orders
from t5bench.text import steer
from t5bench.unread import never_wait, wait_for_readers

SECONDS = 0.1  # between looks at a run
# Between reports of its progress, each of which reads all of its iterations.
PROGRESS_SECONDS = 2.0  # on a terminal
LINE_SECONDS = 30.0  # in a file, where each report is a line
BAR_WIDTH = 20
GOES_ON = "Run the same command again to continue."


def run(args: argparse.Namespace) -> int:
    """Raises Problem if nothing can run."""
    never_wait("stdout", "stderr")  # nor the next run
    raise_on_signals()
    over_ssh = args.launch == "ssh"
    asked = asked_sizes(os.environ.get("MICRO_BATCH_SIZE", ""))
    group = os.environ.get("WANDB_RUN_GROUP") or args.runs_dir.name
    settings = {"WANDB_RUN_GROUP": group, "MICRO_BATCH_SIZE": asked.first}
    wants_clip_among = os.environ.get("CLIP_GRAD") == AMONG
    if wants_clip_among:
        os.environ["CLIP_GRAD"] = BY_NAME["CLIP_GRAD"].default  # until DDP has shown its norms
    launch = Launch(settings, over_ssh)
    recipe = asked_recipe(args.recipe)
    names = args.strategies.split()
    rows = plan_runs(launch, args.runs_dir, choose(names))
    if not names:
        launchers.tell_left_out()
    rows += plan_baselines(launch, args.runs_dir, rows)
    if not rows:
        raise Problem("no strategy can run here", "The reasons are above")
    if args.dry_run:
        show(args, rows, rows_of_all(rows, asked, launch, args.runs_dir), asked, wants_clip_among)
        return 0
    hold(args.runs_dir)
    if wants_clip_among:
        os.environ["CLIP_GRAD"] = clip_of_sweep(settings, args.runs_dir, over_ssh, make_trial)
        launch = Launch(settings, over_ssh)
        plans = map(launchers.accepted, plans_of(launch, args.runs_dir, rows))
        rows = [replace(row, plan=plan) for row, plan in zip(rows, plans, strict=True)]
    of_all = rows_of_all(rows, asked, launch, args.runs_dir)
    runs = in_order(of_all, args.repeats, args.runs_dir)
    check_settings(runs)
    if asked.wants_best:
        of_all += best_rows(rows, asked, args.runs_dir, over_ssh, make_trial)
        runs = in_order(of_all, args.repeats, args.runs_dir)
        check_settings(runs)
        if not runs:
            raise Problem("no strategy ran at any micro-batch", f"The logs are in {args.runs_dir / TRIALS}")
    with writing_to(args.runs_dir):
        write_list(args.runs_dir, [str(directory.relative_to(args.runs_dir)) for directory in runs])
    try:
        tell_duration(runs, args.runs_dir)
        began = run_all(launch, runs, args.runs_dir, args.retries, GOES_ON)
        if recipe:
            run_with_recipe(recipe | {"MICRO_BATCH_SIZE": asked.first}, args, runs)
    finally:
        with contextlib.suppress(OSError, RecordError):
            list_by_start(args.runs_dir)
    print(flush=True)
    status = compare(list(runs), args.runs_dir)
    # A node that waited for a refusing one may have left a record, but nothing was trained.
    return status if began else EXIT_CODES[CONFIGURATION]


def rows_of_all(rows: Sequence[PlannedRun], asked: AskedSizes, launch: Launch, runs_dir: Path) -> list[PlannedRun]:
    """The rows at each size that is asked of all; none where each only runs at its best."""
    return [*(rows if asked.sizes else []), *also_at(asked.sizes[1:], launch, runs_dir, rows)]


def show(
    args: argparse.Namespace,
    rows: Sequence[PlannedRun],
    of_all: Sequence[PlannedRun],
    asked: AskedSizes,
    wants_clip_among: bool,
) -> None:
    """For a dry run: the short runs that come first, and all others. Raises Problem."""
    runs = in_order(of_all, args.repeats, args.runs_dir)
    if wants_clip_among:
        print("CLIP_GRAD: a number among the gradient norms of short runs of DDP")
    else:
        check_settings(runs)
    for line in planned_trials(rows) if asked.wants_best else []:
        print(line)
    for directory in runs:
        print("complete " if is_complete(directory) else "run      ", directory)
    tell_duration(runs, args.runs_dir)


def hold(runs_dir: Path) -> None:
    """Raises Problem if another sweep has it, or nothing can be written there."""
    with writing_to(runs_dir):
        run_lock.take(runs_dir, "sweep", os.getpid())
    run_lock.keep(runs_dir, "sweep")


@contextlib.contextmanager
def writing_to(runs_dir: Path) -> Iterator[None]:
    """Raises Problem where the block cannot write there."""
    try:
        yield
    except OSError as error:
        raise Problem(f"cannot write to {runs_dir}: {error.strerror}", "Choose another RUNS_DIR") from error


def tell_duration(runs: Mapping[Path, PlannedRun], runs_dir: Path) -> None:
    """Of the runs that are still to be made."""
    said = how_long({path: row for path, row in runs.items() if not is_complete(path)}, runs_dir)
    if said:
        note(said)


def make_trial(launch: Launch, directory: Path, row: PlannedRun) -> None:
    """A short run for its time alone, unless it is complete. Raises Problem and Interrupted."""
    check_settings({directory: row})
    run_all(launch, {directory: row}, directory.parent.parent, goes_on=GOES_ON)


def asked_recipe(text: str) -> dict[str, str]:
    """The settings of another recipe, such as "DROPOUT=0.1 CLIP_GRAD=1". Raises Problem."""
    found = {}
    for word in shlex.split(text):
        name, separator, value = word.partition("=")
        if name not in OWN_RECIPE or not separator:
            raise Problem(f"RECIPE has '{word}'", f"Give one or more of {', '.join(OWN_RECIPE)}, each as NAME=VALUE")
        fault = BY_NAME[name].kind.fault(name, value)
        if fault:
            raise Problem(*fault)
        found[name] = value
    return found


def run_with_recipe(settings: Mapping[str, str], args: argparse.Namespace, runs: Mapping[Path, PlannedRun]) -> None:
    """The sweep's fastest rows once more, with the settings of another recipe and the micro-batch of rows that say
    none. Raises Problem and Interrupted."""
    complete = [load(directory) for directory in runs if is_complete(directory)]
    if not complete:
        return
    fastest = [row.run.directory.name for row in fastest_rows(build(complete))]
    launch = Launch({**UNWATCHED, **settings}, over_ssh=args.launch == "ssh")
    by_name = {row.name: row for row in runs.values()}
    rows = []
    for name in fastest:
        planned = launchers.accepted(launch.ask(by_name[name], args.runs_dir / "plan"))
        rows.append(replace(by_name[name], plan=planned))
    note(f"the fastest rows with {args.recipe}:")
    again = in_order(rows, args.repeats, args.runs_dir / RECIPE_RUNS)
    check_settings(again)
    run_all(launch, again, args.runs_dir / RECIPE_RUNS, args.retries, GOES_ON)


def in_order(rows: Sequence[PlannedRun], repeats: int, runs_dir: Path) -> dict[Path, PlannedRun]:
    """The runs of a sweep by directory, in the order in which they run.

    A sweep that continues keeps the order of its list, which an earlier version may have chosen. Raises RecordError.
    """
    runs: dict[str, PlannedRun] = {}
    for repeat, ordered in enumerate(balanced_orders(rows, repeats), 1):
        runs |= {f"repeat{repeat}/{row.name}": row for row in ordered}
    listed = [name for name in read_list(runs_dir) if name in runs]
    return {runs_dir / name: runs[name] for name in dict.fromkeys([*listed, *runs])}


def list_by_start(runs_dir: Path) -> None:
    """Puts the sweep's list into the order in which its runs started: one that was tried again ran after others.

    Raises OSError, RecordError.
    """
    names = read_list(runs_dir)
    starts: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(RecordError):
            starts[name] = load(runs_dir / name).record["started"]
    ran = sorted(starts, key=starts.__getitem__)
    write_list(runs_dir, [*ran, *(name for name in names if name not in starts)], anew=True)


def check_settings(runs: Mapping[Path, PlannedRun]) -> None:
    """Raises Problem for a run that this sweep would train otherwise: a complete one, which it would mistake for one of
    its own, or one with checkpoints, which it would resume."""
    for directory, row in runs.items():
        was_completed = is_complete(directory)
        has_checkpoint = (directory / "checkpoints" / TRACKER).exists()
        if not row.plan or not (was_completed or has_checkpoint):
            continue
        differences = [each.sentence for each in misfits(replace(row.plan, output_dir=str(directory)))]
        if was_completed and not differences:
            now = _processes_of(row.plan)
            then = _processes_of(load(directory).plan)
            if now != then:
                differences = [f"{now} here and {then} then"]
        if differences:
            remedy = "Choose another RUNS_DIR, or delete that run to repeat it"
            raise Problem(f"{directory} holds a run with other settings: {'; '.join(differences)}", remedy)


def _processes_of(plan: Plan) -> str:
    assert plan.layout
    return f"{plan.layout.nnodes} x {plan.layout.nproc_per_node} processes on {plan.device}"


def compare(runs: Sequence[Path], runs_dir: Path) -> int:
    """Compares the runs. A refused run may have left no record; the others are still compared."""
    recorded = [directory for directory in runs if looks_like_run(directory)]
    for directory in runs:
        if directory not in recorded:
            note(f"{directory.relative_to(runs_dir)} left no record and is missing from the comparison")
    if not recorded:
        return EXIT_CODES[CONFIGURATION]
    status = t5bench("compare", *recorded, "--output", runs_dir / "comparison")
    # It reports its own failures, which do not change the exit status.
    if os.environ.get("WANDB_MODE") != "disabled" and status != EXIT_CODES[CONFIGURATION]:
        t5bench("wandb", *recorded, "--comparison", runs_dir / "comparison")
    return status or int(len(recorded) < len(runs))


def t5bench(*arguments: str | Path) -> int:
    """The exit status of another command."""
    wait_for_readers()
    return subprocess.run([sys.executable, "-m", "t5bench", *map(str, arguments)], check=False).returncode


def is_complete(directory: Path) -> bool:
    """Whether the record is complete; reports a damaged one, which does not count as complete."""
    try:
        return looks_like_run(directory) and load(directory).status == COMPLETE
    except RecordError as error:
        note(f"not complete: {error}")
        return False


def outcome(status: int, run: Started, directory: Path) -> str:
    """How a run ended, in one line."""
    try:
        record = load(directory)
    except RecordError:
        record = None
    if status == 0:
        speed: float | str = "?"
        if record and record.iterations:
            speed = record.iterations[-1].samples_per_second
        return f"complete, {speed} samples/s at the end"
    # If a launcher refused, there is no record, or only that of another node which waited for it.
    has_refused = status == EXIT_CODES[CONFIGURATION] and run.problems
    if record is None or has_refused:
        word = next(name for name, code in EXIT_CODES.items() if code == status)
        reasons = run.problems
    else:
        word = record.status
        reasons = [record.reason, *run.problems]
    return f"FAILED ({word}): {'; '.join(reasons)}; see {directory}"


def progress(directory: Path, since: float = math.inf, *, bar: bool = False) -> str:
    """The newest iteration: from the record, else from the terminal output of nodes whose files are elsewhere.

    Before the first iteration it names the extensions that have been compiling since the time `since` (in seconds since
    1970).
    """
    try:
        iterations = read_metrics(directory / "metrics.jsonl")
    except RecordError as error:
        return str(error)
    if not iterations:
        for terminal in directory.glob("node*.terminal"):
            iterations += log.iterations(terminal.read_text(errors="replace").splitlines())
    if iterations:
        last = iterations[-1]
        text = f"iteration {last.iteration}/{last.total}"
        if bar:
            filled = "#" * (BAR_WIDTH * last.iteration // last.total)
            text = f"[{filled:<{BAR_WIDTH}}] {text}"
        return text
    extensions = _compiling_since(since)
    if extensions:
        return f"compiling {', '.join(extensions)}: takes minutes, but only once"
    return "starting"


def _compiling_since(since: float) -> list[str]:
    """The names of the extensions whose directories PyTorch has locked since then."""
    with contextlib.suppress(OSError):  # a lock disappears once its extension is compiled
        return sorted(lock.parent.name for lock in extension_locks(os.environ) if lock.stat().st_mtime >= since)
    return []


def run_all(
    launch: Launch, runs: Mapping[Path, PlannedRun], runs_dir: Path, retries: int = 0, goes_on: str = ""
) -> bool:
    """Makes the incomplete runs, by directory, then retries failed ones; returns whether any of them began.

    An interruption stops the current run, prints the hint goes_on, and raises Interrupted.
    """
    try:
        statuses = _run_each(launch, runs, runs_dir)
        for _ in range(retries):
            failed = {directory: runs[directory] for directory, status in statuses.items() if status}
            if not failed:
                break
            note("retrying the failed runs")
            statuses |= _run_each(launch, failed, runs_dir)
    except Interrupted as stop:
        name = signal.Signals(stop.code - 128).name.removeprefix("SIG")
        remaining = launch.running.end() if launch.running else []
        left = "; ".join(remaining) or "nothing"
        note(f"\n{name} received: stopped; {left} is left running. {goes_on}".rstrip())
        raise
    return any(status != EXIT_CODES[CONFIGURATION] for status in statuses.values())


def _run_each(launch: Launch, runs: Mapping[Path, PlannedRun], runs_dir: Path) -> dict[Path, int]:
    """The exit status of each; 0 for one that is already complete."""
    names = {directory: str(directory.relative_to(runs_dir)) for directory in runs}
    width = max(len(name) for name in names.values())
    total = len(runs)
    statuses: dict[Path, int] = {}
    durations: list[float] = []
    for number, (directory, row) in enumerate(runs.items(), 1):
        label = f"[{number:{len(str(total))}}/{total}] {names[directory]:{width}}"
        if is_complete(directory):
            statuses[directory] = 0
            note(f"{label}  already complete")
            continue
        remaining = total - number
        mean = fmean(durations) if durations else 0.0
        start = time.monotonic()
        statuses[directory], result = _run_one(launch, row, directory, label, mean * (remaining + 1))
        duration = time.monotonic() - start
        durations.append(duration)
        note(f"{label}  {result}, {timedelta(seconds=round(duration))}{_left(fmean(durations) * remaining)}")
    return statuses


def _run_one(launch: Launch, row: PlannedRun, directory: Path, label: str, expected: float) -> tuple[int, str]:
    """The exit status, and how the run ended. expected: seconds for this run and the remaining ones; 0 if unknown."""
    directory.mkdir(parents=True, exist_ok=True)
    on_terminal = sys.stderr.isatty()
    started = time.time()
    if on_terminal:
        interval = PROGRESS_SECONDS
        reported = started - interval  # the first report comes at once
    else:
        interval = LINE_SECONDS
        reported = started
    run = launch.start(row, directory)
    status = run.poll()
    while status is None:
        now = time.time()
        if now - reported >= interval:
            report = f"{label}  {progress(directory, started, bar=on_terminal)}{_left(expected - now + started)}"
            if on_terminal:
                print(report, end="", file=sys.stderr)
                steer(sys.stderr, "\033[K\r")
            else:
                note(report)
            reported = now
        time.sleep(SECONDS)
        status = run.poll()
    return status, outcome(status, run, directory)


def _left(seconds: float) -> str:
    return f"; about {timedelta(seconds=round(seconds))} left" if round(seconds) > 0 else ""
