"""``python -m t5bench parity-check``: trains strategies alike on this machine, and compares their curves with DDP's."""

import argparse
from pathlib import Path

from t5bench import Problem
from t5bench.sweep.command import t5bench
from t5bench.sweep.launch import BASELINE, Launch
from t5bench.sweep.rows import choose, note, plan_rows
from t5bench.sweep.runner import raise_on_signals, run_all

MEGATRON, NATIVE = "megatron", "native"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("strategies", nargs="*", help="compared with DDP (default: all)")
    parser.add_argument("--engine", choices=[MEGATRON, NATIVE], required=True)
    parser.add_argument("--runs-dir", type=Path, required=True, help="where the runs go; must not exist")


def run(args: argparse.Namespace) -> int:
    """Raises Problem where the check cannot be made."""
    raise_on_signals()
    strategies = list(dict.fromkeys([BASELINE, *choose(args.strategies)]))
    if args.engine == NATIVE and strategies == [BASELINE]:
        raise Problem(f"{BASELINE} alone has nothing to be compared with", "Name another strategy, or none for all")
    # Runs of an engine that was changed since would pass as runs of this one.
    if args.runs_dir.exists():
        raise Problem(f"{args.runs_dir} exists, and a check is made of new runs alone", "Choose another RUNS_DIR")
    train(args.engine, strategies, args.runs_dir)
    reference = []
    if args.engine == MEGATRON:
        train(NATIVE, [BASELINE], args.runs_dir)
        reference = ["--reference", args.runs_dir / NATIVE / BASELINE]
    note(f"run directories: {args.runs_dir}")
    # A strategy that could not run has no run directory, and fails by that.
    runs = args.runs_dir / args.engine
    return t5bench("parity", *(runs / name for name in strategies), "--baseline", runs / BASELINE, *reference)


def train(engine: str, strategies: list[str], runs_dir: Path) -> None:
    launch = Launch({"ENGINE": engine})
    rows = plan_rows(launch, runs_dir, strategies)
    if not rows or rows[0].strategy != BASELINE:
        raise Problem(
            f"the {engine} engine's DDP cannot run here, and the others have nothing to be compared with",
            "What stops it is said above",
        )
    run_all(launch, {runs_dir / engine / row.name: row for row in rows}, runs_dir)
