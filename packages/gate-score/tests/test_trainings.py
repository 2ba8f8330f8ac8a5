"""The trainer on two processes: every layout trains as one process does, and defects are caught or missed as told."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from gate_score import processes
from gate_score.defect import DEFECTS
from gate_score.gates import GATES, OURS, lines_of
from gate_score.layouts import LAYOUTS
from gate_score.plan import PARALLEL, Trial, honest, reference_of, trial_of
from gate_score.processes import is_done, run
from gate_score.proving import said_by_prove
from gate_score.runs import distance
from gate_score.trainer import Recipe

pytestmark = pytest.mark.slow
USUAL = Recipe(steps=4)
ASKED = ("slime's grid", *OURS)
CAUGHT = {
    "gradients are not reduced": {"judge", "judge --locate", "parity check", "prove", "slime's grid"},
    "one rank skips an update": {"judge", "judge --locate", "parity check"},
    "logs own loss": {"judge", "parity check"},
    "moments are dropped": {"judge", "judge --locate", "parity check", "what ranks begin with"},
    "table is not updated": {"judge", "judge --locate", "parity check", "prove"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trainings")
    jobs = [honest(layout, USUAL) for layout in PARALLEL]
    for one in DEFECTS:
        if one.name in CAUGHT:
            jobs += trial_of(one).jobs
    run(list(dict.fromkeys([reference_of(USUAL), *jobs])), directory)
    return directory


@pytest.mark.parametrize("layout", PARALLEL)
def test_a_layout_trains_as_one_process_does(root: Path, layout: str):
    job = honest(layout, USUAL)
    pair = Trial(layout, job, reference_of(USUAL), job, LAYOUTS[layout]).pair(root)
    for name in OURS:
        assert GATES[name](pair) == "", name
    assert len(lines_of(pair.tried)) == USUAL.steps


@pytest.mark.parametrize("name", CAUGHT)
def test_gates_catch_what_they_can_see(root: Path, name: str):
    one = next(one for one in DEFECTS if one.name == name)
    pair = trial_of(one).pair(root)
    assert {gate for gate in ASKED if GATES[gate](pair)} == CAUGHT[name]


def test_what_is_trained_already_is_not_trained_again(root: Path):
    job = reference_of(USUAL)
    before = (root / job.directory / "log0.jsonl").stat().st_mtime_ns
    run([job], root)
    assert (root / job.directory / "log0.jsonl").stat().st_mtime_ns == before


def test_a_defect_that_was_changed_is_trained_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    one = next(one for one in DEFECTS if one.name == "logs own loss")
    job = trial_of(one).tried
    assert is_done(job, root)
    monkeypatch.setattr(processes, "checksum_of_code", lambda defect: "another")
    assert not is_done(job, root)


def test_weights_differ_where_a_defect_changes_more_than_the_log(root: Path):
    distances = {}
    for one in DEFECTS:
        if one.name in CAUGHT:
            pair = trial_of(one).pair(root)
            distances[one.name] = distance(pair.tried, pair.before)
    assert [name for name, found in distances.items() if not found] == ["logs own loss"]


@pytest.mark.parametrize("layout", PARALLEL)
def test_prove_raises_no_alarm_about_a_layout(layout: str):
    assert said_by_prove(LAYOUTS[layout], replace(USUAL, uneven=True, dropout=0.2)) == ""
