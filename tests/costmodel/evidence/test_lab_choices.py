"""Searches on the hosts of this project's lab, of which every layout was measured, too.

tests/tools/nodes/measure_choices.py made lab_choices.json. Native engine on CPUs, with a tiny model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from pathlib import Path

import msgspec
import pytest

from t5bench.costmodel import time
from t5bench.costmodel.evidence import replay
from t5bench.costmodel.evidence.replay import NEAR, Replayed
from t5bench.costmodel.prediction import with_link
from t5bench.costmodel.search import Option
from t5bench.plan.space import Candidate, EngineJob, Space
from t5bench.record.host_cost import HostCost
from t5bench.record.network import Network
from t5bench.tools.search import command
from t5bench.tools.search.runs import name_of

TABLE = Path(__file__).parent / "lab_choices.json"


@dataclass(frozen=True)
class LiveSearch:
    """What scripts/search.sh did."""

    named: str
    possible_regret: float
    runs: int
    minutes: float
    seconds: Mapping[str, float]
    """Of an iteration of the layouts that it measured."""


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
        """With the network and the hosts as they were measured."""
        machine = with_link(time.CPU, self.network.link, 1, self.host_cost.host)
        space = Space([self.engine_job], self.hosts, machine, self.global_batch, backend="gloo")
        return [each for each in space.ranked() if each.fits and each.start]

    def replayed(self) -> Replayed:
        candidates = command.that_may_be_fastest(self.candidates())
        options = [Option(name_of(each), each.job, each.machine, "gloo") for each in candidates]
        return replay.replay_options(options, self.seconds)

    def regret(self, layout: str) -> float:
        """How much slower it is than the fastest, where all were measured in turn."""
        return self.seconds[layout] / min(self.seconds.values()) - 1


CHOICES = [msgspec.convert(row, LabChoice) for row in json.loads(TABLE.read_text())]
each_choice = partial(pytest.mark.parametrize, "choice", CHOICES, ids=[choice.name for choice in CHOICES])


@each_choice()
def test_every_layout_was_measured(choice: LabChoice):
    every = command.without_needless_recomputation(choice.candidates())
    assert choice.seconds.keys() == {name_of(candidate) for candidate in every} and not choice.failed


@each_choice()
def test_a_replayed_search_ends_near_the_fastest(choice: LabChoice):
    found = choice.replayed()
    print(f"{choice.name}: {found.runs} of {found.options} layouts, regret {found.regrets[-1]:.1%}")
    assert found.regrets[-1] <= NEAR and found.runs < found.options


@each_choice()
def test_the_live_search_named_a_layout_near_the_fastest(choice: LabChoice):
    regret = choice.regret(choice.search.named)
    print(f"{choice.name}: {choice.search.runs} runs, {choice.search.minutes:.1f} min, regret {regret:.1%}")
    assert regret <= choice.search.possible_regret + NEAR


def errors(choices: Sequence[LabChoice]) -> list[float]:
    """Of the predictions that know only the measured network and hosts, as natural logarithms."""
    return [
        log(candidate.seconds / choice.seconds[name_of(candidate)])
        for choice in choices
        for candidate in command.without_needless_recomputation(choice.candidates())
    ]


def test_a_measured_network_and_host_predict_within_a_tenth_on_average():
    of_each = [mean(map(abs, errors([choice]))) for choice in CHOICES]
    print("mean error of each choice: " + ", ".join(f"{exp(error) - 1:.1%}" for error in of_each))
    assert mean(of_each) < 0.12
