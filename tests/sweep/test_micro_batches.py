"""MICRO_BATCH_SIZE of a sweep: several sizes, and each strategy's best."""

from types import SimpleNamespace

import pytest

from t5bench import Problem
from t5bench.compare.statistics import Estimate
from t5bench.costmodel.machine import device_of
from t5bench.plan.planner import plan
from t5bench.record.settings import BY_NAME
from t5bench.sweep.launch import PlannedRun, with_size
from t5bench.sweep.micro_batches import (
    Trial,
    asked_sizes,
    at_size,
    best_of,
    planned_trials,
    planners_choice,
    possible_sizes,
)
from t5bench.sweep.sweep import asked_recipe

SIZES = (1, 2, 4, 8, 16)


def trial(milliseconds: float, gib: int = 1) -> Trial:
    return Trial(SimpleNamespace(milliseconds=Estimate(milliseconds), place_in_a_tie=(gib, 0, milliseconds)))


@pytest.mark.parametrize(
    ("first", "times", "best", "tried"),
    [
        (4, {2: 80, 4: 60, 8: 70}, 4, [2, 4, 8]),
        (2, {1: 90, 2: 80, 4: 60, 8: 50, 16: 45}, 16, [1, 2, 4, 8, 16]),
        (16, {8: 50, 16: 90, 4: 60}, 8, [4, 8, 16]),
        (1, {1: 50, 2: 80}, 1, [1, 2]),
        (16, {4: 60, 2: 80}, 4, [2, 4, 8, 16]),
        (2, {}, None, [1, 2]),
    ],
    ids=["the planner was right", "it was far off", "smaller is faster", "the smallest", "too large", "none runs"],
)
def test_the_best_size_is_found_from_any_first_one(
    first: int, times: dict[int, float], best: int | None, tried: list[int]
):
    measured = []

    def measure(size: int) -> Trial:
        measured.append(size)
        return trial(times[size]) if size in times else Trial(None, "out-of-memory")

    found, trials = best_of(first, SIZES, measure)
    assert found == best and sorted(measured) == list(trials) == tried, "no size runs twice"


def test_sizes_that_are_equally_fast_are_a_tie():
    """The rule of all ties: the least memory in whole GiB, and then here the faster one."""
    times = {2: trial(101, gib=3), 4: trial(100, gib=4), 8: trial(120, gib=2), 1: trial(110)}
    assert best_of(4, SIZES, times.__getitem__)[0] == 2
    assert best_of(4, SIZES, (times | {2: trial(104, gib=3)}).__getitem__)[0] == 4


def test_what_is_asked():
    assert asked_sizes("").first == "1" and not asked_sizes("").wants_best
    both = asked_sizes("4 best")
    assert (both.sizes, both.first, both.wants_best) == (("4",), "4", True)
    assert asked_sizes("best").sizes == () and asked_sizes("best").first == BY_NAME["MICRO_BATCH_SIZE"].default
    assert asked_sizes("2 8 2").sizes == ("2", "8")
    for wrong in ("0", "beste", "4 x best", "1.5"):
        with pytest.raises(Problem, match="MICRO_BATCH_SIZE must be a whole number") as refused:
            asked_sizes(wrong)
        assert "the word best" in refused.value.remedy


def test_a_name_says_its_sizes():
    assert with_size("zero1-tp2-mb4") == ("zero1", "2", "4") and with_size("zero3_offload") == ("zero3_offload", "", "")
    assert with_size("ddp-mb16").settings == {"MICRO_BATCH_SIZE": "16"}
    row = at_size(PlannedRun("ddp-4", "ddp", 4), 8)
    assert (row.name, row.strategy, row.processes) == ("ddp-mb8-4", "ddp-mb8", 4)


H100 = {"DEVICE": "cuda", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "MEGATRON_DATA_DIR": "/nonexistent",
        "NNODES": "1", "NPROC_PER_NODE": "2", "GLOBAL_BATCH_SIZE": "1024", "ENGINE": "native"}  # fmt: skip


def test_the_planner_names_the_size_to_begin_with(monkeypatch: pytest.MonkeyPatch):
    """The fastest that fits; where the GPU is unknown, the smallest."""
    planned = plan(H100, "ddp")
    sizes = possible_sizes(planned)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    monkeypatch.setattr("t5bench.sweep.duration.gpu_here", lambda: None)
    assert planners_choice(planned, sizes) == 1
    chosen = {}
    for name in ("h100", "rtx5000-ada", "v100"):
        monkeypatch.setattr("t5bench.sweep.duration.gpu_here", lambda name=name: device_of(name))
        chosen[name] = planners_choice(planned, sizes)
    assert chosen["h100"] > chosen["v100"] >= 1, chosen
    row = PlannedRun("ddp", "ddp", plan=planned)
    line = f"best of ddp: from micro-batch {chosen['v100']}, of {' '.join(map(str, sizes))}"
    assert planned_trials([row, at_size(row, 2)]) == [line], "whoever says a size keeps it"


def test_another_recipe_has_only_what_it_may_have():
    assert asked_recipe("DROPOUT=0.1 PRECISION_FLAG=--bf16") == {"DROPOUT": "0.1", "PRECISION_FLAG": "--bf16"}
    assert asked_recipe("PRECISION_FLAG=") == {"PRECISION_FLAG": ""} and asked_recipe("") == {}
    for wrong in ("LR=1", "DROPOUT", "DROPOUT=x", "PRECISION_FLAG=--fp8"):
        with pytest.raises(Problem):
            asked_recipe(wrong)
