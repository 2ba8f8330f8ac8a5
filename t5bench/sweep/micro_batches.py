"""MICRO_BATCH_SIZE of a sweep: one size for all, each strategy's best, or both, as in MICRO_BATCH_SIZE="4 best".

The best one is looked for with short runs: of the size that the planner names and of its neighbours, and where a
neighbour is faster, of its neighbours, too. Sizes that differ by less than matters are a tie (costmodel/ties.py).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from t5bench import Problem, note
from t5bench.compare.rows import Row, make_row
from t5bench.costmodel.ties import TOO_CLOSE
from t5bench.record.files import RecordError
from t5bench.record.plan import Plan
from t5bench.record.records import load, looks_like_run
from t5bench.record.settings import BY_NAME
from t5bench.record.status import COMPLETE
from t5bench.sweep.duration import prediction_of
from t5bench.sweep.launch import UNWATCHED, Launch, PlannedRun, name_of_row, plan_runs, with_size

BEST = "best"
TRIALS = ".micro-batches"  # hidden, so that no comparison takes these runs for its own
TRIAL_ITERATIONS = 25  # of which 20 are warm-up
SETTING = BY_NAME["MICRO_BATCH_SIZE"]
MakeRun: TypeAlias = Callable[[Launch, Path, PlannedRun], None]
"""Makes one run, unless it is complete. Raises Problem and Interrupted."""


@dataclass(frozen=True)
class AskedSizes:
    """What MICRO_BATCH_SIZE asks of a sweep."""

    sizes: tuple[str, ...]
    """Each of them for all strategies."""
    wants_best: bool = False
    """Whether each strategy also runs at its best size."""

    @property
    def first(self) -> str:
        """The size of the runs that say none in their name."""
        return self.sizes[0] if self.sizes else SETTING.default


def asked_sizes(text: str) -> AskedSizes:
    """Raises Problem."""
    words = text.split() or [SETTING.default]
    sizes = tuple(dict.fromkeys(word for word in words if word != BEST))
    for size in sizes:
        fault = SETTING.kind.fault(SETTING.name, size)
        if fault:
            found, remedy = fault
            raise Problem(found, f"{remedy}; a sweep also takes several sizes, and the word {BEST}")
    return AskedSizes(sizes, BEST in words)


def possible_sizes(plan: Plan) -> list[int]:
    """Those that divide a data-parallel rank's share of the global batch, the smallest first."""
    assert plan.layout
    share = plan.number("GLOBAL_BATCH_SIZE") // plan.layout.dp
    return [size for size in range(1, share + 1) if share % size == 0]


def planners_choice(plan: Plan, sizes: Sequence[int]) -> int:
    """The size that is predicted to be the fastest of those that fit; the smallest where nothing can be predicted."""
    fitting = {}
    for size in sizes:
        predicted = prediction_of(plan, size)
        if predicted and predicted.time and predicted.chance_to_fit >= 0.5:
            fitting[size] = predicted.time.total
    return min(fitting, key=fitting.__getitem__, default=sizes[0])


@dataclass(frozen=True)
class Trial:
    """A short run at one size: its row, or why there is none."""

    row: Row | None
    reason: str = ""

    @property
    def milliseconds(self) -> float | None:
        """Of an iteration."""
        return self.row.milliseconds.median if self.row and self.row.milliseconds else None

    def __str__(self) -> str:
        return f"{self.milliseconds:.4g} ms" if self.milliseconds else self.reason


def best_of(first: int, sizes: Sequence[int], measure: Callable[[int], Trial]) -> tuple[int | None, dict[int, Trial]]:
    """The best size, None if none runs, and all trials by size. It ends where no neighbour is faster.

    first: where it begins.
    """
    trials: dict[int, Trial] = {}
    best: int | None = None
    wanted = [first]
    while wanted:
        for size in wanted:
            trials[size] = measure(size)
        best = chosen(trials)
        place = sizes.index(first if best is None else best)
        if best is None and place:  # too large: the next smaller one may run
            first = sizes[place - 1]
        wanted = [first] if best is None else [*sizes[max(0, place - 1) : place], *sizes[place + 1 : place + 2]]
        wanted = [size for size in wanted if size not in trials]
    return best, dict(sorted(trials.items()))


def chosen(trials: Mapping[int, Trial]) -> int | None:
    """Of the sizes that are as fast as the fastest, the one that the rule for ties names; None if none ran."""
    times = {size: trial.milliseconds for size, trial in trials.items() if trial.milliseconds}
    if not times:
        return None
    most = min(times.values()) * (1 + TOO_CLOSE)
    tied = [size for size, milliseconds in times.items() if milliseconds <= most]
    return min(tied, key=lambda size: trials[size].row.place_in_a_tie)


def also_at(sizes: Sequence[str], launch: Launch, runs_dir: Path, rows: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The rows once more at each of these sizes, as far as that can run; those that say a size keep it."""
    found: list[PlannedRun] = []
    for size in sizes:
        of_processes: dict[int | None, list[str]] = {}
        for row in rows:
            if not with_size(row.strategy).micro_batch:
                of_processes.setdefault(row.processes, []).append(f"{row.strategy}-mb{size}")
        for processes, strategies in of_processes.items():
            found += plan_runs(launch, runs_dir, strategies, processes)
    return found


def planned_trials(rows: Sequence[PlannedRun]) -> list[str]:
    """For a dry run, of each row: the size that the planner names, and the sizes that there are."""
    lines = []
    for row in rows:
        if row.plan and not with_size(row.strategy).micro_batch:
            sizes = possible_sizes(row.plan)
            first = planners_choice(row.plan, sizes)
            lines.append(f"best of {row.name}: from micro-batch {first}, of {' '.join(map(str, sizes))}")
    return lines


def best_rows(
    rows: Sequence[PlannedRun],
    asked: AskedSizes,
    runs_dir: Path,
    over_ssh: bool,
    make_run: MakeRun,
) -> list[PlannedRun]:
    """Each row at its best size, where that is not the size it has; those that say a size keep it. Raises Problem and
    Interrupted."""
    iterations = min(TRIAL_ITERATIONS, int(os.environ.get("TRAIN_ITERS") or TRIAL_ITERATIONS))
    changes = {"TRAIN_ITERS": str(iterations), "LR_WARMUP_ITERS": "0", "RAMPUP_BATCH_SIZE": "", "LOG_INTERVAL": "1"}
    launch = Launch({**UNWATCHED, **changes, "MICRO_BATCH_SIZE": asked.first}, over_ssh)
    found = []
    for row in rows:
        if with_size(row.strategy).micro_batch or not row.plan:
            continue

        def measure(size: int, row: PlannedRun = row) -> Trial:
            return tried(launch, at_size(row, size), runs_dir / TRIALS, make_run)

        sizes = possible_sizes(row.plan)
        best, trials = best_of(planners_choice(row.plan, sizes), sizes, measure)
        shown = "; ".join(f"{size}: {trial}" for size, trial in trials.items())
        note(f"micro-batch of {row.name}: {best or 'none runs'} ({shown})")
        if best is None or str(best) in asked.sizes:
            continue
        planned = launch.ask(at_size(row, best), runs_dir / "plan")
        found.append(replace(at_size(row, best), plan=planned))
    return found


def at_size(row: PlannedRun, size: int) -> PlannedRun:
    strategy = f"{row.strategy}-mb{size}"
    return PlannedRun(name_of_row(strategy, row.processes), strategy, row.processes)


def tried(launch: Launch, row: PlannedRun, runs_dir: Path, make_run: MakeRun) -> Trial:
    """A short run. Raises Problem and Interrupted."""
    directory = runs_dir / row.name
    planned = launch.ask(row, runs_dir.parent / "plan")  # not where it may have run already
    refused = [obstacle.found for obstacle in planned.obstacles]
    if refused:
        return Trial(None, refused[0])
    make_run(launch, directory, replace(row, plan=planned))
    try:
        if not looks_like_run(directory):
            return Trial(None, "it left no record")
        run = load(directory)
        if run.status != COMPLETE:
            return Trial(None, run.status)
        return Trial(make_row(row.name, [run]))
    except RecordError as error:
        return Trial(None, str(error))
