"""The choice of a layout, on 720 published times of which whole grids were measured."""

import json
from math import log

import pytest

from t5bench import __main__ as program
from t5bench.choose.calibration import MeasuredTime, calibrate
from t5bench.costmodel import intervals
from t5bench.costmodel.machine import ON_AMPERE, Host
from t5bench_evidence import grid
from t5bench_evidence.grid import GridErrors, GridPoint, PredictedPoint

pytestmark = pytest.mark.slow  # predicts 720 iterations some fifty times


@pytest.fixture(scope="module")
def cells() -> list[GridPoint]:
    return grid.read()


@pytest.fixture(scope="module")
def uncalibrated(cells: list[GridPoint]) -> list[PredictedPoint]:
    return grid.predict(cells)


@pytest.fixture(scope="module")
def verdict(uncalibrated: list[PredictedPoint]) -> GridErrors:
    found = grid.verdict(uncalibrated)
    print(json.dumps(found.__dict__, indent=1, default=dict))
    return found


def of_layers(judged: list[PredictedPoint], layers: int) -> list[PredictedPoint]:
    return [each for each in judged if each.cell.job.architecture.decoder_layers == layers]


def test_times_and_choices_of_an_unmeasured_machine(verdict: GridErrors):
    assert (verdict.choices, verdict.pairs) == (72, 4896)
    assert verdict.mean_error < 0.10
    assert verdict.regret < 0.05 and verdict.regret_90 < 0.18
    assert verdict.kendall_tau > 0.75


def test_a_verdict_that_is_sure_is_right(verdict: GridErrors, cells: list[GridPoint]):
    """Whether the machine was measured or not."""
    assert verdict.sure_pairs > 1000 and verdict.sure_and_wrong <= 0.05
    for number in range(2):
        calibrated = grid.verdict(grid.calibrated_by_one(cells, number))
        assert calibrated.sure_pairs > verdict.sure_pairs and calibrated.sure_and_wrong <= 0.05


def test_intervals_hold_nine_in_ten_of_the_times_of_a_measured_machine(cells: list[GridPoint]):
    """Of an unmeasured one they hold more, because its host is one of many and happens to be near the middle."""
    held = []
    for number in range(3):
        calibrated = grid.verdict(grid.calibrated_by_one(cells, number))
        print(number, dict(calibrated.coverage))
        held.append(calibrated.coverage)
    for name in grid.CLASSES:
        assert 0.80 <= sum(coverage[name] for coverage in held) / len(held) <= 1.0, name


def test_a_layouts_own_error_is_the_same_at_another_depth(uncalibrated: list[PredictedPoint]):
    """It is set with 12 layers, and judged with 20."""
    assert grid.own_error(of_layers(uncalibrated, 12)) == pytest.approx(intervals.LAYOUT, abs=0.015)
    assert grid.own_error(of_layers(uncalibrated, 20)) == pytest.approx(intervals.LAYOUT, abs=0.015)


def test_the_host_of_these_nodes_is_that_of_the_table(cells: list[GridPoint]):
    """Set by 12 layers at micro-batch 1 and without tensor parallelism, where the host takes all of the time."""
    layouts = [cell for cell in cells if cell.job.micro_batch == 1 and cell.job.parallel.tensor == 1]
    runs = [cell for cell in layouts if cell.job.architecture.decoder_layers == 12][::6]
    known = calibrate([MeasuredTime(run.job, run.machine, run.seconds) for run in runs])
    assert known.host == pytest.approx(1, abs=0.15), f"{ON_AMPERE.operator_seconds * known.host * 1e6:.1f} us"


def test_a_run_says_what_limits_it(cells: list[GridPoint]):
    """A run that the host limits moves the host's cost and not the GPU's rates, and leaves less doubt of it."""
    run = next(
        cell
        for cell in cells
        if cell.job.micro_batch == 1 and cell.job.parallel.tensor == 4 and cell.job.parallel.pipeline == 1
    )
    seconds = 2 * intervals.shifted_seconds(run.job, run.machine, "nccl", 1.0, intervals.Shift())
    known = calibrate([MeasuredTime(run.job, run.machine, seconds)])
    assert known.host == pytest.approx(2, rel=0.15) and known.slower == pytest.approx(1, abs=0.15)
    prior = log(run.machine.host.uncertainty) / intervals.Z
    left = sum(direction.host**2 for direction in known.directions) ** 0.5
    assert left < prior / 3
    measured = Host(run.machine.host.operator_seconds, 1.1)
    assert known.machine(run.machine).host.operator_seconds > measured.operator_seconds


def test_the_command_prints_the_verdict(capsys: pytest.CaptureFixture[str]):
    assert program.main(["predict", "--choice", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nothing measured"]["choices"] == 72
