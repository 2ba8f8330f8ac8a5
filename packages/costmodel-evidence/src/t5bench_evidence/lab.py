"""Choices among layouts on the hosts of this project's lab, of which every layout was measured.

tests/tools/nodes/measure_choices.py made the tables. Native engine on CPUs, with small models.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from t5bench.choose.search import command
from t5bench.choose.space import Candidate, EngineJob, Space
from t5bench.costmodel import time
from t5bench.costmodel.prediction import with_link
from t5bench.record.host_cost import HostCost
from t5bench.record.network import Network

TABLE = Path(__file__).with_name("lab_choices.json")
TABLE_OF_MODELS = TABLE.with_name("lab_model_choices.json")
"""Of models of MODEL; the cost model was not developed with these."""


@dataclass(frozen=True)
class LiveSearch:
    """What scripts/search.sh did."""

    named: str
    """The fastest that it measured."""
    possible_regret: float
    runs: int
    minutes: float
    seconds: Mapping[str, float]
    """Of an iteration of the layouts that it measured."""
    start: str = ""
    """What its last line starts: of those too close to call, what the rule for ties chose, if there was one."""


@dataclass(frozen=True)
class LabChoice:
    """A choice among layouts on some hosts."""

    name: str
    hosts: int
    global_batch: int
    engine_job: EngineJob
    network: Network
    host_cost: HostCost
    iterations: int
    seconds: Mapping[str, float]
    """Of an iteration of each layout."""
    failed: Mapping[str, str]
    search: LiveSearch

    def candidates(self) -> list[Candidate]:
        """All that the launchers can start, with the network and the hosts as they were measured."""
        machine = with_link(time.CPU, self.network.link, 1, self.host_cost.host)
        space = Space([self.engine_job], self.hosts, machine, self.global_batch, backend="gloo")
        return command.without_needless_recomputation([each for each in space.ranked() if each.start])

    def regret(self, layout: str) -> float:
        """How much slower it is than the fastest, where all were measured in turn."""
        return self.seconds[layout] / min(self.seconds.values()) - 1


def choices(table: Path = TABLE) -> list[LabChoice]:
    return [msgspec.convert(row, LabChoice) for row in json.loads(table.read_text())]
