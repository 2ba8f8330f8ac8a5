"""Pipelines of more than two stages, and their schedules, train as one process does."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import EXACT, train
from support import nightly

from t5bench.checkpoint_form import TRACKER
from t5bench.compare.parity import compare_runs
from t5bench.record.records import load
from t5bench.record.run import Run

pytestmark = pytest.mark.slow
# Layers that do not divide evenly.
DEEP = {"ENCODER_NUM_LAYERS": "4", "DECODER_NUM_LAYERS": "5", "NUM_LAYERS": "9"}
NATIVE = {"ENGINE": "native", "TRAIN_ITERS": "4", "OMP_NUM_THREADS": "1", "MICRO_BATCH_SIZE": "1"} | DEEP
Trained = Callable[..., Run]


@pytest.fixture(scope="module")
def trained(sample_data: Path, gpt: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a strategy in a directory of its own; a run with the same settings once."""
    runs: dict[tuple, Run] = {}

    def run(strategy: str, family: str = "t5", **settings: str) -> Run:
        key = (strategy, family, *settings.items())
        if key not in runs:
            own = {"MEGATRON_DATA_DIR": str(sample_data)} if family == "t5" else gpt
            directory = tmp_path_factory.mktemp("pipelines") / strategy
            words = ("--", "--num-workers", "0")
            runs[key] = train(strategy, directory, arguments=words, **own | EXACT | NATIVE | settings)
        return runs[key]

    return run


def assert_equal(run: Run, baseline: Run) -> None:
    """In fp32 both curves differ by rounding alone."""
    compared = compare_runs(run, baseline)
    assert compared.loss and compared.norm and not compared.beyond


@pytest.mark.parametrize(
    ("strategy", "family", "settings"),
    [
        pytest.param("pipeline", "t5", {"PIPELINE_PARALLEL_SIZE": "3", "RECOMPUTE": "full"}, marks=pytest.mark.nightly),
        pytest.param("pipeline", "t5", {"PIPELINE_PARALLEL_SIZE": "8"}, marks=pytest.mark.nightly),
        pytest.param("pipeline", "gpt", {"PIPELINE_PARALLEL_SIZE": "8"}, marks=pytest.mark.nightly),
        ("hybrid", "t5", {"PIPELINE_PARALLEL_SIZE": "3", "TENSOR_PARALLEL_SIZE": "2"}),
        pytest.param(
            *("pipeline", "t5", {"PIPELINE_PARALLEL_SIZE": "3", "PIPELINE_SCHEDULE": "gpipe"}),
            marks=pytest.mark.nightly,
        ),
        ("pipeline", "t5", {"PIPELINE_PARALLEL_SIZE": "3", "PIPELINE_SCHEDULE": "zero-bubble"}),
        pytest.param(
            *("hybrid", "gpt", {"PIPELINE_SCHEDULE": "zero-bubble", "NPROC_PER_NODE": "8"}), marks=pytest.mark.nightly
        ),
        pytest.param(
            *("pipeline", "t5", {"PIPELINE_SCHEDULE": "zero-bubble", "NPROC_PER_NODE": "4", "RECOMPUTE": "full"}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("pipeline", "gpt", {"PIPELINE_PARALLEL_SIZE": "4", "PIPELINE_SCHEDULE": "zero-bubble"}),
            marks=pytest.mark.nightly,
        ),
        ("pipeline", "t5", {"PIPELINE_SCHEDULE": "interleaved"}),
        pytest.param(
            *("pipeline", "gpt", {"PIPELINE_PARALLEL_SIZE": "4", "PIPELINE_SCHEDULE": "interleaved"}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("hybrid", "t5", {"PIPELINE_SCHEDULE": "interleaved", "NPROC_PER_NODE": "8"}), marks=pytest.mark.nightly
        ),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_a_pipeline_trains_as_one_process(trained: Trained, strategy: str, family: str, settings: dict[str, str]):
    evaluated = {"EVAL_ITERS": "1", "EVAL_INTERVAL": "2"}
    baseline = trained("ddp", family, NPROC_PER_NODE="1", **evaluated)
    run = trained(strategy, family, **settings, **evaluated)
    assert_equal(run, baseline)
    losses = [[each.lm_loss for each in one.evaluations] for one in (run, baseline)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0]


@pytest.mark.nightly
def test_schedules_take_the_same_dropout(trained: Trained):
    """Every stage takes micro-batches forward in their order, under all but interleaved: the masks are the same. And
    every weight adds up its gradients in their order."""
    settings = {"PIPELINE_PARALLEL_SIZE": "3", "DROPOUT": "0.1"}
    runs = [trained("pipeline", **settings, PIPELINE_SCHEDULE=name) for name in ("1f1b", "gpipe", "zero-bubble")]
    first, *others = ([(i.lm_loss, i.grad_norm) for i in run.iterations] for run in runs)
    assert len(first) == 4 and others == [first, first]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("t5", {"NPROC_PER_NODE": "4"}),
        ("t5", {"PIPELINE_PARALLEL_SIZE": "3"}),
        ("gpt", {"PIPELINE_PARALLEL_SIZE": "3"}),
    ],
)
def test_gradients_of_bf16_copies_are_put_off(trained: Trained, family: str, settings: dict[str, str]):
    """The masters get the gradients that they get under 1F1B, with DDP beside it, too."""
    settings = settings | {"PRECISION_FLAG": "--bf16", "DROPOUT": "0.1"}
    runs = [trained("pipeline", family, **settings, PIPELINE_SCHEDULE=name) for name in ("1f1b", "zero-bubble")]
    plain, put_off = ([(i.lm_loss, i.grad_norm) for i in run.iterations] for run in runs)
    assert len(plain) == 4 and put_off == plain


@pytest.mark.parametrize("schedule", ["interleaved", *nightly("1f1b", "zero-bubble")])
def test_a_resumed_pipeline_gives_the_uninterrupted_curve(
    sample_data: Path, trained: Trained, tmp_path: Path, schedule: str
):
    settings = {"PIPELINE_PARALLEL_SIZE": "3", "DROPOUT": "0.1", "SAVE_INTERVAL": "2", "PIPELINE_SCHEDULE": schedule}
    settings |= {"GLOBAL_BATCH_SIZE": "6"}
    whole = trained("pipeline", **settings)
    copy = tmp_path / "run"
    shutil.copytree(whole.directory, copy)
    for path in (copy / "checkpoints").glob("*4"):
        shutil.rmtree(path)
    (copy / "checkpoints" / TRACKER).write_text("2")
    own = {"MEGATRON_DATA_DIR": str(sample_data), "RESUME": "1"}
    train("pipeline", copy, arguments=("--", "--num-workers", "0"), **EXACT | NATIVE | settings | own)
    resumed = load(copy).iterations[-2:]
    assert [(i.iteration, i.lm_loss, i.grad_norm) for i in resumed] == [
        (i.iteration, i.lm_loss, i.grad_norm) for i in whole.iterations[-2:]
    ]
