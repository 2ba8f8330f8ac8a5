"""``python -m t5bench sweep``: runs the strategies one after another, then compares them all."""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from t5bench import Problem, note, raise_on_signals
from t5bench.plan import claim
from t5bench.plan.resume import misfits
from t5bench.record.plan import Plan
from t5bench.record.records import load, looks_like_run, write_list
from t5bench.record.status import CONFIGURATION, EXIT_CODES
from t5bench.sweep.launch import Launch, Row, choose, has_checkpoints, plan_baselines, plan_rows
from t5bench.sweep.runner import is_complete, run_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs-dir", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--strategies", default="", help="separated by spaces (default: all)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each strategy, interleaved")
    parser.add_argument("--retries", type=int, default=0, help="retries of a failed run")
    parser.add_argument("--launch", choices=["local", "ssh"], default="local", help="here, or on all hosts")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")


def run(args: argparse.Namespace) -> int:
    """Raises Problem if nothing can run."""
    raise_on_signals()
    group = os.environ.get("WANDB_RUN_GROUP") or args.runs_dir.name
    launch = Launch({"WANDB_RUN_GROUP": group}, over_ssh=args.launch == "ssh")
    rows = plan_rows(launch, args.runs_dir, choose(args.strategies.split()))
    rows += plan_baselines(launch, args.runs_dir, rows)
    if not rows:
        raise Problem("no strategy can run here", "The reasons are above")
    runs = {args.runs_dir / f"repeat{repeat}" / row.name: row for repeat in range(1, args.repeats + 1) for row in rows}
    check_settings(runs)
    if args.dry_run:
        for directory in runs:
            print("complete " if is_complete(directory) else "run      ", directory)
        return 0
    try:
        claim.take(args.runs_dir, "sweep", os.getpid())
        write_list(args.runs_dir, [str(directory.relative_to(args.runs_dir)) for directory in runs])
    except OSError as error:
        raise Problem(f"cannot write to {args.runs_dir}: {error.strerror}", "Choose another RUNS_DIR") from error
    claim.keep(args.runs_dir, "sweep", os.getpid())
    began = run_all(launch, runs, args.runs_dir, args.retries, "Run the same command again to continue.")
    print(flush=True)
    status = compare(list(runs), args.runs_dir)
    # A node that waited for a refusing one may have left a record, but nothing was trained.
    return status if began else EXIT_CODES[CONFIGURATION]


def check_settings(runs: Mapping[Path, Row]) -> None:
    """Raises Problem for a run that this sweep would train otherwise: a complete one, which it would mistake for one of
    its own, or one with checkpoints, which it would resume."""
    for directory, row in runs.items():
        done = is_complete(directory)
        if not row.plan or not (done or has_checkpoints(directory)):
            continue
        other = list(misfits(replace(row.plan, output_dir=str(directory))))
        if done and not other and (was := _place(load(directory).plan)) != (here := _place(row.plan)):
            other = [f"{here} here and {was} then"]
        if other:
            remedy = "Choose another RUNS_DIR, or delete that run to repeat it"
            raise Problem(f"{directory} holds a run with other settings: {'; '.join(other)}", remedy)


def _place(plan: Plan) -> str:
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
    return subprocess.run([sys.executable, "-m", "t5bench", *map(str, arguments)], check=False).returncode
