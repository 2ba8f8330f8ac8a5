"""The launchers in scripts/: which there are, and what they declare."""

import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from t5bench import FILES, REPOSITORY, Problem, note
from t5bench.record.plan import Plan, Strategy
from t5bench.record.settings import DEFAULT_FAMILY, LAYOUT_SETTINGS, MODEL_FAMILIES

EVERYTHING = "all"  # a sweep, not a strategy
# For a run on this machine only, whatever the environment or SLURM says of other nodes.
ALONE: Mapping[str, str] = {
    **{"NNODES": "1", "HOSTS": "", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
    **{"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "", "SLURM_STEP_NUM_NODES": "1"},
}
ENGINES = ("megatron", "native")
# Sources each launcher in a subshell of one bash. A function in place of the program dirname saves a process for each.
_NEAR = 0.65  # of two names: that share so much
_READ_DECLARATIONS = """
dirname() { printf '%s\\n' "${2%/*}"; }
for launcher in "$@"; do (source "$launcher" --declaration); done
"""


def without_layout(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings with which DDP's plan says what does not depend on the layout."""
    return {name: value for name, value in settings.items() if name not in LAYOUT_SETTINGS}


def launcher(strategy: str) -> Path:
    return FILES / "scripts" / f"run_megatron_t5_{strategy}.sh"


def declarations(family: str = "") -> list[Strategy]:
    """The strategies for a model family, in the order of their ports; every launcher in scripts/ is one.

    family: by default the environment's MODEL_FAMILY. Those that the environment's ENGINE lacks are left out.
    """
    family = family or _chosen_family()
    engine = _chosen_engine()
    return [each for each in all_declarations() if family in each.families and engine in each.engines]


def _chosen_family() -> str:
    return os.environ.get("MODEL_FAMILY") or DEFAULT_FAMILY


def _chosen_engine() -> str:
    return os.environ.get("ENGINE") or ENGINES[0]


def left_out() -> dict[str, str]:
    """The strategies that the environment's engine or model family lacks, and the setting that each needs."""
    family = _chosen_family()
    engine = _chosen_engine()
    needs: dict[str, str] = {}
    for strategy in all_declarations():
        if family not in strategy.families:
            needs[strategy.name] = f"MODEL_FAMILY={strategy.families[0]}"
        elif engine not in strategy.engines:
            needs[strategy.name] = f"ENGINE={strategy.engines[0]}"
    return needs


def tell_left_out() -> None:
    reasons = [f"{name} (needs {setting})" for name, setting in left_out().items()]
    if reasons:
        note(f"Left out: {', '.join(reasons)}")


@cache
def all_declarations() -> tuple[Strategy, ...]:
    """Every launcher's declaration, in the order of their ports."""
    paths = sorted(set(launcher("").parent.glob(launcher("*").name)) - {launcher(EVERYTHING)})
    command = ["bash", "-p", "-c", _READ_DECLARATIONS, "bash", *map(str, paths)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    strategies = [declaration(line) for line in result.stdout.splitlines()]
    return tuple(sorted(strategies, key=lambda strategy: strategy.port))


def declaration(line: str) -> Strategy:
    """A strategy from the line that its launcher prints for ``--declaration``: fields separated by tabs."""
    name, title, port, tp, pp, ds_config, colour, families, engines, flags = line.split("\t")
    return Strategy(
        name=name,
        title=title,
        port=int(port),
        tp=int(tp),
        pp=int(pp),
        ds_config=ds_config,
        colour=colour,
        flags=flags.split(),
        families=families.split() or list(MODEL_FAMILIES),
        engines=engines.split() or list(ENGINES),
    )


def declared(name: str) -> Strategy:
    """The strategy of this name. Raises Problem if no launcher declares it."""
    for strategy in all_declarations():
        if strategy.name == name:
            return strategy
    raise no_strategy(name, [strategy.name for strategy in all_declarations()])


def no_strategy(name: str, known: Sequence[str]) -> Problem:
    near = difflib.get_close_matches(name.lower().replace("-", "").replace("_", ""), known, n=1, cutoff=_NEAR)
    meant = f"Did you mean {near[0]}? " if near else ""
    return Problem(f"there is no strategy '{name}'", f"{meant}Choose from: {' '.join(known)}")


def with_slurm_hosts(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with HOSTS, from the SLURM allocation if the user gave none."""
    if environ.get("HOSTS") or not (environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")):
        return dict(environ)
    script = f"source '{REPOSITORY}/scripts/common.sh' && slurm_hosts"
    command = ["bash", "-p", "-c", script]
    result = subprocess.run(command, env=dict(environ), stdout=subprocess.PIPE, text=True, check=False)
    return {**environ, "HOSTS": " ".join(result.stdout.split())}


def accepted(plan: Plan) -> Plan:
    """The plan. Raises Problem where the request itself is wrong; what this machine lacks does not matter."""
    for obstacle in plan.obstacles:
        if obstacle.fatal:
            raise Problem(f"{plan.strategy.name}: {obstacle.found}", obstacle.remedy)
    return plan


def run(_: object) -> int:
    """Prints all names, and on standard error which are left out: ``python -m t5bench strategies``."""
    tell_left_out()
    print("\n".join(strategy.name for strategy in declarations()))
    return 0
