"""Asks the launchers which strategies there are, and what one of them would run."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from t5bench import REPOSITORY, Problem
from t5bench.plan.request import declaration
from t5bench.record.plan import Plan, Strategy

# For a run on this machine only, whatever the environment or SLURM says of other nodes.
ALONE: Mapping[str, str] = {
    **{"NNODES": "1", "HOSTS": "", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
    **{"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "", "SLURM_STEP_NUM_NODES": "1"},
}
EVERYTHING = "all"  # a sweep, not a strategy


def launcher(strategy: str) -> Path:
    return REPOSITORY / "scripts" / f"run_megatron_t5_{strategy}.sh"


def declarations(family: str = "") -> list[Strategy]:
    """The strategies for a model family, in the order of their ports; every launcher in scripts/ is one.

    family: by default the environment's MODEL_FAMILY.
    """
    family = family or os.environ.get("MODEL_FAMILY") or "t5"
    paths = set(launcher("").parent.glob(launcher("*").name)) - {launcher(EVERYTHING)}
    processes = [subprocess.Popen(["bash", path, "--declaration"], stdout=subprocess.PIPE, text=True) for path in paths]
    strategies = [declaration(process.communicate()[0].split("\0")[:-1]) for process in processes]
    return sorted((each for each in strategies if family in each.families), key=lambda strategy: strategy.port)


def ask(strategy: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Plan:
    """What a launcher would run with these arguments, in this environment (by default this process's own)."""
    command = ["bash", str(launcher(strategy)), "--dry-run=json", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not result.stdout:
        raise RuntimeError(f"{' '.join(command)} printed no plan: {result.stderr.strip()}")
    return Plan.read(json.loads(result.stdout))


def accepted(plan: Plan) -> Plan:
    """The plan. Raises Problem where the request itself is wrong; what this machine lacks does not matter."""
    for obstacle in plan.obstacles:
        if obstacle.fatal:
            raise Problem(f"{plan.strategy.name}: {obstacle.found}", obstacle.remedy)
    return plan


def run(_: object) -> int:
    """Prints all names: ``python -m t5bench strategies``."""
    print("\n".join(strategy.name for strategy in declarations()))
    return 0
