"""Which steps there are on which machine, and in which order."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from t5bench.acceptance.preset import Group, Preset
from t5bench.plan.launchers import declarations

DECLARED = declarations()
Make = Callable[..., Preset]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("MEGATRON_DIR", "/engine")
    monkeypatch.setenv("PYTHONPATH", "/repository")
    return lambda gpus, *engines: Preset(tmp_path, gpus, engines or ("megatron", "native"), DECLARED, [32, 8, 1])


def names(groups: Iterator[Group]) -> list[str]:
    return [step.name for _, steps in groups for step in steps]


@pytest.mark.parametrize(
    ("gpus", "processes", "too_large"),
    [(1, 1, ["pipeline", "tensor", "hybrid"]), (2, 2, ["hybrid"]), (3, 2, ["hybrid"]), (4, 4, []), (8, 8, [])],
)
def test_every_strategy_that_the_devices_suffice_for(make: Make, gpus: int, processes: int, too_large: list[str]):
    preset = make(gpus)
    assert (preset.processes, preset.too_large) == (processes, too_large)
    steps = preset.large()
    assert len(steps) == 2 * (8 - len(too_large))
    assert [step.name for step in steps[:2]] == ["large-megatron-ddp", "large-native-ddp"]
    assert {step.environment["NPROC_PER_NODE"] for step in steps} == {str(processes)}
    # The benchmark stays as it is: its batch, precision, dropout and sizes are the launchers' defaults.
    assert steps[0].environment.keys() == {"NPROC_PER_NODE", "TRAIN_ITERS", "OUTPUT_DIR", "ENGINE", "MASTER_PORT"}


def test_every_point_does_the_same_work_and_is_profiled_at_its_end(make: Make):
    preset = make(1)
    steps = [step for size in preset.micro_batch_sizes for step in preset.points(size)]
    assert [step.environment["MICRO_BATCH_SIZE"] for step in steps] == [*["32"] * 3, *["8"] * 3, *["1"] * 3]
    assert {step.environment["GLOBAL_BATCH_SIZE"] for step in steps} == {"32"}
    runs = [step for step in steps if "baseline" not in step.name]
    assert all(step.environment["PROFILE_ITERATION"] == step.environment["TRAIN_ITERS"] for step in runs)
    assert all(set(step.passes) == {0, 5} for step in runs)  # that memory is full is an answer


@pytest.mark.parametrize("engine", ["megatron", "native"])
def test_parity_covers_every_strategy(make: Make, engine: str):
    steps = make(1).parity(engine)
    checked = [word for step in steps for word in step.command[2:]]
    assert sorted(checked) == sorted(strategy.name for strategy in DECLARED if strategy.name != "ddp")
    assert all(step.environment["SHARE_GPUS"] == "1" and step.environment["ENGINE"] == engine for step in steps)


def test_nothing_is_timed_while_something_else_goes_on(make: Make):
    groups = [*make(1).acceptance(), *make(1).throughput()]
    together = names(group for group in groups if group[0] > 1)
    assert {name.partition("-")[0] for name in together} == {"compile", "parity"}


def test_parity_comes_before_the_large_runs_and_compiling_before_what_needs_it(make: Make):
    order = names(make(1).acceptance())
    assert order[0] == "data" and order[-1] == "out-of-memory"
    assert order.index("compile") < order.index("parity-megatron-1") < order.index("large-megatron-ddp")
    order = names(make(1).throughput())
    assert order.index("compile") < order.index("throughput-megatron-micro-batch-32") < order.index("baseline-32")


def test_a_rehearsal_leaves_out_only_compiling_and_filling_the_memory(make: Make):
    on_gpu, rehearsed = ({*names(p.acceptance()), *names(p.throughput())} for p in (make(1), make(0)))
    assert on_gpu - rehearsed == {"compile", "out-of-memory"}
    assert "compile" not in names(make(1, "native").acceptance())
