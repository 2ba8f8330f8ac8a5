"""Which runs a sweep makes: a row for each strategy, and a baseline for each number of processes."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from t5bench import Problem
from t5bench.plan.launchers import accepted, declarations
from t5bench.sweep.launch import BASELINE, Launch


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Row:
    """A run to make. processes: what the launcher is told, in all; None leaves it the strategy's own number."""

    name: str
    strategy: str
    world_size: int
    processes: int | None = None


def choose(names: Sequence[str]) -> list[str]:
    """These strategies, each once; all of them when none is named. Raises Problem."""
    known = [strategy.name for strategy in declarations()]
    for name in names:
        if name not in known:
            raise Problem(f"there is no strategy '{name}'", f"There are: {' '.join(known)}")
    return list(dict.fromkeys(names)) or known


def plan_rows(launch: Launch, runs_dir: Path, strategies: Iterable[str], processes: int | None = None) -> list[Row]:
    """A row for each strategy that can run; says of the others what stops them."""
    rows = []
    for strategy in strategies:
        name = f"{strategy}-{processes}" if processes else strategy
        plan = accepted(launch.ask(strategy, processes, runs_dir / "plan"))
        if plan.obstacles:
            note(f"{name} cannot run here: {plan.obstacles[0].found}")
        elif plan.layout:
            rows.append(Row(name, strategy, plan.layout.world_size, processes))
    return rows


def plan_baselines(launch: Launch, runs_dir: Path, rows: Sequence[Row]) -> list[Row]:
    """The baseline, where it is among the rows, once more for each further number of processes."""
    known = {row.world_size for row in rows if row.strategy == BASELINE}
    missing = dict.fromkeys(row.world_size for row in rows if known and row.world_size not in known)
    return [row for size in missing for row in plan_rows(launch, runs_dir, [BASELINE], size)]
