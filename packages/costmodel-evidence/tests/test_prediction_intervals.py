"""The intervals of predictions: what sets them, what judges them, and that what is shown is what was computed."""

import json
from dataclasses import replace
from math import exp, log

import pytest

from t5bench import __main__ as program
from t5bench.choose.space import Candidate, as_fast, losers, not_told_apart
from t5bench.costmodel import intervals
from t5bench.costmodel.achievable_rates import SOURCES
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero
from t5bench.costmodel.machine import DEVICES, Link, Machine
from t5bench.costmodel.prediction import Prediction
from t5bench.costmodel.time import CPU
from t5bench_evidence.check import PredictedFigure
from t5bench_evidence.intervals import KINDS, JudgedInterval, judged, of_published, quantile, sets

SETTERS = [name for name in map(str, range(40)) if sets(name)]
JUDGES = [name for name in map(str, range(40)) if not sets(name)]
GPT = Architecture(0, 24, 1024, 16, 64, 4096, 0, 1024, 50304, family="gpt", head_bias=False)


@pytest.fixture(scope="module")
def published() -> dict[str, JudgedInterval]:
    return {each.kind: each for each in of_published()}


def rows(source: str, *errors: float) -> list[PredictedFigure]:
    return [PredictedFigure("ratio", "", source, "", measured=exp(error), predicted=1, unit="") for error in errors]


def test_a_source_sets_or_judges_but_never_both(published: dict[str, JudgedInterval]):
    for each in published.values():
        assert each.setting and each.judging and not set(each.setting) & set(each.judging)
        assert all(map(sets, each.setting)) and not any(map(sets, each.judging))


def test_what_sets_the_model_neither_sets_nor_judges_an_interval(published: dict[str, JudgedInterval]):
    """The benchmarks of kernels in t5bench/costmodel/achievable_rates.py are not sources of published trainings."""
    for each in published.values():
        for source in (*each.setting, *each.judging):
            assert not any(name in source.lower() for name in SOURCES), source


def test_the_factors_are_those_of_todays_model(published: dict[str, JudgedInterval]):
    """Otherwise: python -m t5bench predict --intervals, then costmodel/intervals.py and EVIDENCE.md."""
    factors = {"time": intervals.TIME, "ratio": intervals.RATIO, "memory": intervals.MEMORY}
    assert {kind: each.factor for kind, each in published.items()} == pytest.approx(factors, rel=0.01)


def test_every_source_weighs_the_same():
    many = [0.01] * 98 + [0.02] * 2
    assert quantile([many]) == 0.01
    assert quantile([many, [0.1]]) == 0.1
    assert quantile([many, [0.1] * 1, *[[0.05]] * 8]) == 0.05


def test_coverage_is_that_of_the_judges():
    setting = rows(SETTERS[0], *[0.1] * 10)
    first = rows(JUDGES[0], 0.05, -0.05, 0.2, 0.01)
    second = rows(JUDGES[1], 0.3)
    found = judged("ratio", setting + first + second)
    assert (found.factor, found.coverage) == (pytest.approx(exp(0.1)), pytest.approx(3 / 5))
    assert found.coverage_of_sources == pytest.approx((3 / 4 + 0) / 2)
    assert found.mean_error == pytest.approx(sum(exp(error) - 1 for error in (0.05, 0.05, 0.2, 0.01, 0.3)) / 5)


def test_a_calibrated_time_is_more_certain_and_a_cpu_has_no_other_interval():
    machine = Machine(DEVICES["a100"], Link(3e11), Link(1e10))
    job = Job(GPT, Parallel(data=8), 8, 64)
    absolute = Prediction(job, machine)
    calibrated = Prediction(job, machine, slower=1.5)
    # Computing takes nearly all of the time, so the host does not matter.
    low, high = absolute.seconds_interval
    assert (absolute.time.total / low, high / absolute.time.total) == pytest.approx([intervals.TIME] * 2, rel=0.03)
    low, high = calibrated.seconds_interval
    assert (calibrated.time.total / low, high / calibrated.time.total) == pytest.approx([intervals.RATIO] * 2)
    low, high = absolute.memory_interval
    assert log(high / low) == pytest.approx(2 * log(intervals.MEMORY))
    assert absolute.to_json()["intervals"]["seconds"] == absolute.seconds_interval
    on_cpu = Prediction(job, Machine(CPU, Link(3e11), Link(1e10)))
    assert on_cpu.seconds_interval is on_cpu.memory_interval is None
    on_cpu = Prediction(job, Machine(CPU, Link(3e11), Link(1e10)), slower=1.5)
    assert on_cpu.seconds_interval == intervals.around(on_cpu.time.total, intervals.RATIO)


def test_messages_of_cpus_are_doubted_more_than_their_link():
    """A run that many messages limit says more of the latency than one that its bytes limit."""
    slow = Link(1e8, 1e-4, is_measured=True, straggling=0.05)
    machine = Machine(CPU, slow, slow, 1)
    ddp = Job(GPT, Parallel(data=2, devices_per_node=1), 8, 16)
    zero3 = replace(ddp, zero=Zero(3))
    answers = [intervals.responses(job, machine, "gloo", 1.0, [intervals.Shift(latency=1.0)]) for job in (ddp, zero3)]
    assert 0 < answers[0][0][0] < answers[1][0][0]
    assert intervals.Shift(latency=intervals.LATENCY) in intervals.doubts(machine)
    on_gpus = Machine(DEVICES["a100"], slow, slow, 1)
    assert not any(direction.latency for direction in intervals.doubts(on_gpus))
    assert intervals.own_error(machine) > intervals.own_error(on_gpus) == intervals.LAYOUT


def test_layouts_that_cannot_be_told_apart_are_named():
    machine = Machine(DEVICES["a100"], Link(3e11), Link(1e10))
    near, nearer = (Candidate(Job(GPT, Parallel(data=8), batch, 64), machine) for batch in (8, 4))
    far = Candidate(Job(GPT, Parallel(tensor=8, devices_per_node=1), 8, 64), machine)
    ranked = sorted((near, nearer, far), key=lambda candidate: candidate.seconds)
    assert as_fast(ranked) == ranked[:2]
    assert not_told_apart(ranked).startswith("2 layouts are too close to call")
    assert "The fastest is clear" in not_told_apart([ranked[0], far])
    pipeline = Candidate(Job(GPT, Parallel(pipeline=2, data=4), 8, 64), machine)
    reasons = dict(losers([ranked[0], pipeline, far]))
    assert reasons["PP"].endswith("(too close to call)") != pipeline.surely_slower_than(ranked[0])
    assert not reasons["TP"].endswith("(too close to call)")


def test_the_command_says_what_sets_and_what_judges(capsys: pytest.CaptureFixture[str]):
    assert program.main(["predict", "--intervals"]) == 0
    shown = capsys.readouterr().out
    assert "90 % interval of" in shown and "memory, judged by: huggingface/transformers, mila-iqia/milabench" in shown
    assert program.main(["predict", "--intervals", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in found] == list(KINDS) and all("half_width" in each for each in found)
