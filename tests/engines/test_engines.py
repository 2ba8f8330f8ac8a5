"""What both engines must do, with real trainings: one run of each strategy, and what must give the same digits."""

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from real_runs import EXACT, WATCHED, finish, kill, start, train
from support import NATIVE_STRATEGIES, nightly

from native.pieces import KINDS
from t5bench.__main__ import main
from t5bench.checkpoint_form import TRACKER
from t5bench.record.checkpoints import DEEPSPEED_TRACKER
from t5bench.record.log import iterations
from t5bench.record.records import load, read_metrics
from t5bench.record.run import Run
from t5bench.tools.convert.stored import StoredTensors

pytestmark = pytest.mark.slow
Engine = dict[str, str]


@pytest.fixture(scope="module", params=["native", "megatron"])
def engine(request: pytest.FixtureRequest, sample_data: Path) -> Engine:
    """The settings that choose the engine and its data."""
    settings = {"ENGINE": request.param, "MEGATRON_DATA_DIR": str(sample_data)}
    if request.param == "megatron":
        settings["MEGATRON_DIR"] = str(request.getfixturevalue("megatron_dir"))
    return settings


@pytest.fixture
def runs(engine: Engine, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{engine['ENGINE']}_runs")


def log_lines(run: Run) -> list[str]:
    return [line for path in run.directory.glob("node*.log") for line in path.read_text(errors="replace").splitlines()]


def curve(run: Run) -> list[tuple]:
    """The figures of each iteration, to the digit."""
    return [(i.iteration, i.lm_loss, i.grad_norm, i.learning_rate) for i in run.iterations]


def parity(*runs: Path, baseline: Path) -> str:
    """Asserts that they train as the baseline does, whose gradients are clipped only in some iterations."""
    command = [sys.executable, "-m", "t5bench", "parity", *map(str, runs), "--baseline", str(baseline)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_all_strategies_train_the_same_model(engine: Engine, runs: Path):
    strategies = sorted(run.name for run in runs.iterdir())
    parity(*(runs / strategy for strategy in strategies), baseline=runs / "ddp")
    validated = {}
    for strategy in strategies:
        run = load(runs / strategy)
        assert [line.iteration for line in run.iterations] == list(range(1, 21))
        assert run.iterations[-1].lm_loss < run.iterations[0].lm_loss - 0.3
        assert [peak.rank for peak in run.peak_memory] == list(range(run.layout.world_size))
        assert all(peak.host_mib > 100 for peak in run.peak_memory)
        found = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", "\n".join(log_lines(run)))
        validated[strategy] = {int(iteration): float(loss) for iteration, loss in found}
    for losses in validated.values():
        assert losses == pytest.approx(validated["ddp"], rel=1e-5)
    assert {10, 20} <= validated["ddp"].keys()


def test_both_engines_train_the_same_model(megatron_runs: Path, native_runs: Path, sample_data: Path, tmp_path: Path):
    """The same samples, schedule and optimizer too; a mistake that all strategies of one engine share shows here. And
    eight native processes, TP 2 x PP 2 x DP 2: Megatron's shared run of the hybrid has them, too."""
    eight = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data), "NPROC_PER_NODE": "8"}
    train("hybrid", tmp_path / "run", **EXACT, **eight)
    parity(megatron_runs / "ddp", tmp_path / "run", baseline=native_runs / "ddp")
    native, megatron = (load(runs / "ddp") for runs in (native_runs, megatron_runs))
    assert [i.learning_rate for i in native.iterations] == [i.learning_rate for i in megatron.iterations]

    def forms(run: Run) -> set[str]:
        """The lines that are read, without their figures; another process may write between a line and its end."""
        pattern = r"(?: iteration +\d+/| peak memory)(?:(?! peak memory| iteration +\d+/).)*"
        found = (match for line in log_lines(run) for match in re.findall(pattern, line))
        return {re.sub(r"\S*\d\S*|localhost", "#", re.sub(" +", " ", line)).strip() for line in found}

    assert forms(native) == forms(megatron)
    # Two nodes have a stage each: the encoder is on node 0, the iterations are in the log of the last rank's node.
    logs = [(megatron_runs / "pipeline" / f"node{rank}.log").read_text().splitlines() for rank in (0, 1)]
    stages = [{line[-2] for line in re.findall(r"model parallel rank \(0, \d\)", "\n".join(log))} for log in logs]
    assert stages == [{"0"}, {"1"}]
    assert [len(list(iterations(log))) for log in logs] == [0, 20]


@pytest.mark.parametrize(
    ("trained", "tp", "evaluates"),
    [("zero3", "2", "tensor"), *nightly(("hybrid", "1", "ddp"))],
)
def test_merged_weights_have_the_evaluated_loss(
    megatron_runs: Path, megatron_dir: Path, sample_data: Path, tmp_path: Path, trained: str, tp: str, evaluates: str
):
    """A checkpoint's weights, cut for TP 1 and PP 1 or for TP 2, with which the engine evaluates to the same loss."""
    merged = tmp_path / "merged"
    settings = {"MEGATRON_DIR": str(megatron_dir), "MEGATRON_DATA_DIR": str(sample_data)}
    assert main(["reshape", str(megatron_runs / trained), "--tp", tp, "--output", str(merged)]) == 0
    finish(
        start(
            evaluates,
            merged,
            **EXACT,
            **WATCHED | {"WANDB_MODE": "disabled"},
            **settings,
            NPROC_PER_NODE=tp,
            EVAL_ONLY="1",
        )
    )
    before, after = (load(run).evaluations for run in (megatron_runs / trained, merged / "evaluation"))
    assert [each.lm_loss for each in after] == [each.lm_loss for each in before[-len(after) :]]


@pytest.mark.nightly
def test_fsdp2_in_eight_processes(native_runs: Path, sample_data: Path, tmp_path: Path):
    """Two copies of the states, each shared by two processes, with tensor parallelism in every layer; and four
    processes that keep the gathered parameters. Recomputed layers are the same ones."""
    settings = EXACT | {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data)}
    hsdp = {"NPROC_PER_NODE": "8", "TENSOR_PARALLEL_SIZE": "2", "FSDP_SHARD_SIZE": "2", "MICRO_BATCH_SIZE": "1"}
    train("ddp", tmp_path / "ddp", **settings, NPROC_PER_NODE="4", MICRO_BATCH_SIZE="1")
    train("fsdp2", tmp_path / "hsdp", **settings, **hsdp, RECOMPUTE="full")
    parity(tmp_path / "hsdp", baseline=tmp_path / "ddp")
    train("fsdp2", tmp_path / "kept", **settings, FSDP_KEEP_PARAMETERS="1")
    parity(tmp_path / "kept", baseline=native_runs / "ddp")


@pytest.mark.parametrize("strategy", ["zero2", *nightly("zero3", "zero3_offload")])
def test_zero_that_reduces_once(native_runs: Path, sample_data: Path, tmp_path: Path, strategy: str):
    """Gradients that each process adds up, and reduces after the last micro-batch, are the same ones."""
    settings = EXACT | {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data), "ZERO_REDUCE_ONCE": "1"}
    train(strategy, tmp_path / strategy, **settings)
    parity(tmp_path / strategy, baseline=native_runs / "ddp")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["tensor", "hybrid"])
@pytest.mark.parametrize("family", ["t5", "gpt"])
def test_sequence_parallelism_changes_nothing(
    sample_data: Path, tmp_path: Path, request: pytest.FixtureRequest, family: str, strategy: str
):
    """With dropout, too, the curves are those of tensor parallelism alone: norms, biases and positions have the whole
    gradients, and each rank has its part of the mask."""
    settings = {"PRECISION_FLAG": "", "DROPOUT": "0.1", "MEGATRON_DATA_DIR": str(sample_data)}
    if family == "gpt":
        settings |= request.getfixturevalue("gpt")
    settings |= {"ENGINE": "native"}
    train(strategy, tmp_path / "alone", **settings)
    train(strategy, tmp_path / "with it", **settings, SEQUENCE_PARALLEL="1")
    parity(tmp_path / "with it", baseline=tmp_path / "alone")


def test_every_strategy_writes_the_same_checkpoint(native_runs: Path):
    """The same names with the same shapes, and what is in them."""
    folders = {name: native_runs / name / "checkpoints" / "iter_0000010" for name in NATIVE_STRATEGIES}
    for kind in KINDS:
        expected = StoredTensors(folders["ddp"], kind)
        for strategy, folder in folders.items():
            found = StoredTensors(folder, kind)
            assert {*found} == {*expected}, strategy
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


# ---- ending and going on -------------------------------------------------------------------------------------------

RESUMED = "zero3_offload"


def test_a_resumed_run_gives_the_uninterrupted_curve(engine: Engine, runs: Path, tmp_path: Path):
    resume(RESUMED, engine, runs, tmp_path)


def test_a_resumed_fsdp2_gives_the_uninterrupted_curve(sample_data: Path, native_runs: Path, tmp_path: Path):
    resume("fsdp2", {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data)}, native_runs, tmp_path)


@pytest.mark.nightly
def test_a_resumed_hsdp_gives_the_uninterrupted_curve(sample_data: Path, tmp_path: Path):
    """Two copies of the states, each of two processes. DDP with as many processes has the same curve."""
    settings = EXACT | WATCHED | {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data), "WANDB_MODE": "disabled"}
    settings |= {"NPROC_PER_NODE": "4", "MICRO_BATCH_SIZE": "1"}
    hsdp = settings | {"FSDP_SHARD_SIZE": "2"}
    train("fsdp2", tmp_path / "runs" / "fsdp2", **hsdp)
    resume("fsdp2", hsdp, tmp_path / "runs", tmp_path)
    train("ddp", tmp_path / "ddp", **settings)
    parity(tmp_path / "runs" / "fsdp2", baseline=tmp_path / "ddp")


def resume(strategy: str, engine: Engine, runs: Path, tmp_path: Path) -> None:
    """Resumes a copy of the strategy's run after half of its iterations, and compares both to the digit."""
    copy = tmp_path / "run"
    shutil.copytree(runs / strategy, copy)
    for path in (copy / "checkpoints").glob("*20"):
        shutil.rmtree(path)
    (copy / "checkpoints" / TRACKER).write_text("10")
    plan = load(copy).plan
    environment = plan.with_role("kept") | engine | {name: plan.value(name) for name in ("EVAL_ITERS", "EVAL_INTERVAL")}
    resumed = train(strategy, copy, RESUME="1", **environment)
    assert [i.begin for i in resumed.iterations] == [0] * 10 + [10] * 10
    assert curve(resumed) == curve(load(runs / strategy))
    later = [each for each in load(runs / strategy).evaluations if each.iteration > 10]
    assert resumed.evaluations == later and later, "the same validation samples"


ITERATIONS = 24
SAVE_INTERVAL = 6
NEWEST = 2 * SAVE_INTERVAL  # the last checkpoint that a killed run has


@pytest.mark.parametrize("engine", ["native", *nightly("megatron")], indirect=True)
def test_a_killed_run_continues(engine: Engine, tmp_path: Path):
    """In bf16 with dropout, on two nodes without a shared file system. All processes are killed after the second
    checkpoint, of which one node lacks a part: all go on from the first, and what was logged before is logged again,
    digit by digit."""
    nodes = [tmp_path / "node 0", tmp_path / "node 1"]
    mark = uuid.uuid4().hex
    settings = engine | {"TRAIN_ITERS": str(ITERATIONS), "SAVE_INTERVAL": str(SAVE_INTERVAL), "KILLED_RUN": mark}
    launchers = start("hybrid", *nodes, **settings)
    metrics = nodes[-1] / "metrics.jsonl"
    while len(read_metrics(metrics)) <= NEWEST and all(launcher.poll() is None for launcher in launchers):
        time.sleep(0.05)
    kill(launchers, f"KILLED_RUN={mark}")
    killed = read_metrics(metrics)
    assert NEWEST < len(killed) < ITERATIONS, "the run was not killed in time"
    checkpoints = nodes[-1] / "checkpoints"
    if engine["ENGINE"] == "native":
        file = f"iter_{NEWEST:07d}/__3_0.distcp"
        how = "missing"
        (checkpoints / file).unlink()
    else:
        file = f"iter_{NEWEST:07d}/mp_rank_01_001/model_optim_rng.pt"
        how = "truncated"
        os.truncate(checkpoints / file, (checkpoints / file).stat().st_size // 2)
    # The engines' pointers do not survive a death in their writing, and without them training would start anew.
    for pointer in (TRACKER, DEEPSPEED_TRACKER):
        (checkpoints / pointer).unlink(missing_ok=True)

    # Evaluations leave the curve as it was: they draw no dropout mask, and end where dropout begins again.
    said = finish(start("hybrid", *nodes, RESUME="1", **settings, EVAL_ITERS="1", EVAL_INTERVAL="7"))
    assert f"iteration {NEWEST}: {file} is {how}" in said[-1]
    assert all(f"resuming from the checkpoint of iteration {SAVE_INTERVAL}\n" in text for text in said)
    run = load(nodes[-1])
    assert [i.iteration for i in run.iterations] == list(range(1, ITERATIONS + 1))
    assert [i.begin for i in run.iterations] == [0] * SAVE_INTERVAL + [SAVE_INTERVAL] * (ITERATIONS - SAVE_INTERVAL)
    before, after = ({i.iteration: (i.lm_loss, i.grad_norm) for i in lines} for lines in (killed, run.iterations))
    assert before == {number: after[number] for number in before}
    assert run.iterations[-1].lm_loss < run.iterations[0].lm_loss - 0.3
