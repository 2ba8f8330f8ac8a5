"""What the launchers say: their declarations, their requests to the planning process, and their plans.

A request is NUL-separated words, because a shell has no JSON: groups of a name, a count and as many words, as
``request`` in scripts/megatron_common.sh prints them.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, Problem
from t5bench.record.plan import Obstacle, Plan, Setting, Strategy

FIELDS_OF_A_SETTING = 7  # name, kind, role, argument, default, meaning, value
EVERYTHING = "all"  # a sweep, not a strategy
# For a run on this machine only, whatever the environment or SLURM says of other nodes.
ALONE: Mapping[str, str] = {
    **{"NNODES": "1", "HOSTS": "", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
    **{"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "", "SLURM_STEP_NUM_NODES": "1"},
}


def launcher(strategy: str) -> Path:
    return REPOSITORY / "scripts" / f"run_megatron_t5_{strategy}.sh"


def declarations(family: str = "") -> list[Strategy]:
    """The strategies for a model family, in the order of their ports; every launcher in scripts/ is one.

    family: by default the environment's MODEL_FAMILY. Those that the environment's ENGINE lacks are left out.
    """
    family = family or os.environ.get("MODEL_FAMILY") or "t5"
    engine = os.environ.get("ENGINE") or "megatron"
    paths = set(launcher("").parent.glob(launcher("*").name)) - {launcher(EVERYTHING)}
    processes = [subprocess.Popen(["bash", path, "--declaration"], stdout=subprocess.PIPE, text=True) for path in paths]
    strategies = [declaration(process.communicate()[0].split("\0")[:-1]) for process in processes]
    fitting = (each for each in strategies if family in each.families and engine in each.engines)
    return sorted(fitting, key=lambda strategy: strategy.port)


def declaration(words: Sequence[str]) -> Strategy:
    """A strategy from what its launcher prints for ``--declaration``."""
    name, title, port, tp, pp, ds_config, colour, families, engines, *flags = words
    return Strategy(
        name, title, int(port), int(tp), int(pp), ds_config, colour, flags, families.split(), engines.split()
    )


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


@dataclass
class Findings:
    """What stops the run, and what the user should know, in the order found."""

    obstacles: list[Obstacle] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, code: str, found: str, remedy: str = "") -> None:
        """The request is wrong."""
        self.obstacles.append(Obstacle(code, found, remedy, fatal=True))

    def lack(self, code: str, found: str, remedy: str = "") -> None:
        """The machine lacks something: a dry run reports it and continues."""
        self.obstacles.append(Obstacle(code, found, remedy, fatal=False))

    @property
    def refused(self) -> bool:
        return any(obstacle.fatal for obstacle in self.obstacles)


@dataclass(frozen=True)
class Request:
    """What a launcher was asked to run, from a directory.

    facts, as text: launcher (its process id), node, master_address, dry_run and default_tokenizer.
    """

    strategy: Strategy
    settings: Mapping[str, Setting]
    extra: Sequence[str]
    hosts: Sequence[str]
    directory: str
    facts: Mapping[str, str]
    findings: Findings = field(default_factory=Findings)
    fixed: Sequence[str] = ()

    def value(self, name: str) -> str:
        return self.settings[name].value

    def number(self, name: str) -> int:
        return int(self.settings[name].value)

    @property
    def dry_run(self) -> bool:
        return self.facts["dry_run"] != "0"


def groups(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of each group, by the group's name."""
    found: dict[str, list[str]] = {}
    position = 0
    while position < len(words):
        name, count = words[position], int(words[position + 1])
        found[name] = list(words[position + 2 : position + 2 + count])
        position += 2 + count
    return found


def read_settings(group: Mapping[str, Sequence[str]]) -> dict[str, Setting]:
    words = iter(group["settings"])
    return {name: Setting(*rest) for name, *rest in zip(*[words] * FIELDS_OF_A_SETTING, strict=True)}


def read_request(words: Sequence[str]) -> Request:
    """Reads a request. Raises KeyError or ValueError for words that no launcher prints."""
    group = groups(words)
    facts = dict(word.partition("=")[::2] for word in group["facts"])
    strategy, directory = declaration(group["declaration"]), group["directory"][0]
    extra, fixed, hosts = group["extra"], group["fixed"], group["hosts"]
    return Request(strategy, read_settings(group), extra, hosts, directory, facts, fixed=fixed)


def completed(words: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON, with what the shell built from it: what ``plan_words`` in scripts/megatron_common.sh prints.

    words: the plan as the planning process answered it, then the four groups of Arguments, ``environment`` (NAME=VALUE)
    and ``command``.
    """
    plan, built = json.loads(words[0]), groups(words[1:])
    plan["environment"] = dict(entry.partition("=")[::2] for entry in built.pop("environment", []))
    plan["command"] = built.pop("command", [])
    plan["arguments"] |= built
    return plan
