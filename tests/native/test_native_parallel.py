"""The native engine under torchrun: all layouts train the same model, resume exactly, and agree with Megatron."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import REPO_ROOT, STRATEGIES
from native_runs import CLIP, LAYOUTS, TIME_LIMIT, Trained, command_line, largest_difference, parsed, torchrun

from native.checkpoint import TRACKER
from t5bench.record.log import iterations

TOLERANCE = 1e-4
Train = Callable[..., Trained]


def validation_losses(run: Trained) -> list[float]:
    return [float(loss) for loss in re.findall(r"validation loss at iteration \d+ \| lm loss value: (\S+)", run.output)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*STRATEGIES, "hybrid on 8"])
def test_trains_and_equals_ddp(trained: Callable[[str], Trained], layout: str):
    run, baseline = trained(layout), trained("ddp")
    assert [line.iteration for line in run.iterations] == list(range(1, 21))
    assert run.losses[-1] < run.losses[0] - 0.5
    assert largest_difference(run.losses, baseline.losses) < TOLERANCE
    assert largest_difference(run.norms, baseline.norms) < TOLERANCE
    assert min(run.norms) < CLIP < max(run.norms), "clipping should be active in some iterations alone"
    assert len(validation_losses(run)) == 2
    assert largest_difference(validation_losses(run), validation_losses(baseline)) < TOLERANCE
    assert [rank.rank for rank in run.memory] == list(range(LAYOUTS[layout][0]))
    assert all(rank.host_mib > 100 for rank in run.memory)


@pytest.mark.slow
def test_a_resumed_run_gives_the_uninterrupted_curve(train: Train, trained: Callable[[str], Trained], tmp_path: Path):
    run = trained("hybrid")
    assert (run.directory / TRACKER).read_text() == "20"
    shutil.copytree(run.directory / "iter_0000010", tmp_path / "iter_0000010")
    (tmp_path / TRACKER).write_text("10")
    resumed = train("hybrid", "--load", str(tmp_path))
    assert [line.iteration for line in resumed.iterations] == list(range(11, 21))
    assert largest_difference(resumed.losses, run.losses[10:]) < 1e-6
    assert largest_difference(resumed.norms, run.norms[10:]) < 1e-6


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_dropout(train: Train, trained: Callable[[str], Trained], tmp_path: Path):
    """Tensor parallelism has two streams of random numbers, and the loader's workers must not take from them."""
    flags = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--num-workers", "1"]
    whole = train("tensor", *flags, "--save", str(tmp_path), "--save-interval", "3", iterations=6)
    (tmp_path / TRACKER).write_text("3")
    resumed = train("tensor", *flags, "--load", str(tmp_path), iterations=6)
    assert largest_difference(resumed.losses, whole.losses[3:]) < 1e-6
    assert abs(whole.losses[0] - trained("tensor").losses[0]) > 1e-3, "there should be dropout"
    # What both ranks hold stays the same on both: their copies of the activations were dropped alike.
    shards = [tmp_path / "iter_0000006" / f"mp_rank_0{rank}" / "model_optim_rng.pt" for rank in (0, 1)]
    first_rank, second_rank = (torch.load(path, weights_only=True)["model"] for path in shards)
    whole_on_both = [name for name in first_rank if "layernorm" in name]
    assert len(whole_on_both) == 2 * (2 * 2 + 2 * 3 + 2)
    assert all(torch.equal(first_rank[name], second_rank[name]) for name in whole_on_both)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_bf16_follows_fp32(train: Train, trained: Callable[[str], Trained], layout: str):
    run = train(layout, precision="--bf16")
    exact = trained("ddp")
    assert 0 < largest_difference(run.losses, exact.losses) < 2e-3
    assert largest_difference(run.norms, exact.norms) < 2e-2


@pytest.mark.slow
def test_megatron_gives_the_same_curve(
    megatron_dir: Path, trained: Callable[[str], Trained], native_data: Path, tmp_path: Path
):
    """One command line for both engines: not only the same model, but the same samples, optimizer and schedule."""
    data = tmp_path / native_data.name
    for suffix in (".bin", ".idx"):
        shutil.copy(native_data.with_suffix(suffix), data.with_suffix(suffix))
    environment = {"PYTHONPATH": str(megatron_dir), "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    result = torchrun(2, megatron_dir / "pretrain_t5.py", command_line("ddp", data, tmp_path), **environment)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    theirs, ours = list(iterations(result.stdout.splitlines())), trained("ddp")
    assert largest_difference([line.lm_loss for line in theirs], ours.losses) < TOLERANCE
    assert largest_difference([line.grad_norm for line in theirs], ours.norms) < TOLERANCE
    assert [line.learning_rate for line in theirs] == [line.learning_rate for line in ours.iterations]

    def form(output: str) -> set[str]:
        # Megatron writes a line and its end apart, and another process may write between them.
        lines = re.findall(r"(?: iteration +\d+/| peak memory)(?:(?! peak memory| iteration +\d+/).)*", output)
        return {re.sub(r"\S*\d\S*|localhost", "#", re.sub(" +", " ", line)) for line in lines}

    assert form(result.stdout) == form(ours.output)


@pytest.mark.slow
def test_the_readmes_metrics_reach_tensorboard_and_wandb(train: Train, tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [
        "--wandb-project",
        "test",
        "--wandb-save-dir",
        str(tmp_path),
        "--log-interval",
        "2",
        "--exit-interval",
        "4",
    ]
    run = train("alone", *flags, iterations=8, WANDB_MODE="offline")
    assert [line.iteration for line in run.iterations] == [2, 4]
    keys = {"lm loss", "samples per second", "elapsed time per iteration", "learning rate", "loss scale"}
    keys |= {"lm-loss-training/lm loss", "grad-norm/grad-norm", "learning-rate/learning-rate vs samples"}

    events = EventAccumulator(str(run.directory / "tb"))
    events.Reload()
    assert keys <= set(events.Tags()["scalars"])
    assert [(event.step, event.value) for event in events.Scalars("loss scale")] == [
        (step, 1.0) for step in (1, 2, 3, 4)
    ]
    assert [event.step for event in events.Scalars("samples per second")] == [2, 4]
    logged = [event.value for event in events.Scalars("lm loss")]
    assert largest_difference([sum(logged[:2]) / 2, sum(logged[2:]) / 2], run.losses) < 1e-6

    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    shown = subprocess.run(inspect, capture_output=True, text=True, timeout=TIME_LIMIT, check=True).stdout
    assert {key for key in keys if f'"{key}"' not in shown} == set()


@pytest.mark.parametrize(
    ("flags", "world", "says"),
    [
        (["--frobnicate"], 1, "--frobnicate"),
        (["--lr", "fast"], 1, "--lr"),
        (["--fp16"], 1, "fp16"),
        (["--split", "1,x"], 1, "--split"),
        (["--tensor-model-parallel-size", "4"], 2, "2 processes do not divide"),
        (["--tensor-model-parallel-size", "2", "--num-attention-heads", "3"], 2, "attention heads"),
        (["--tensor-model-parallel-size", "2", "--ffn-hidden-size", "129"], 2, "feed-forward"),
        (["--pipeline-model-parallel-size", "4"], 4, "two pipeline stages"),
        (["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"], 2, "micro-batches"),
        (["--global-batch-size", "9"], 2, "global batch size"),
        (["--encoder-seq-length", "65"], 1, "position embeddings"),
        (["--encoder-seq-length", "64", "--decoder-seq-length", "8"], 1, "decoder"),
        (["--save", "somewhere"], 1, "--save-interval"),
        (["--deepspeed", "--deepspeed_config", "/nowhere.json"], 1, "/nowhere.json"),
        (["--distributed-backend", "nccl"], 1, "no GPU"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, flags: list[str], world: int, says: str
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as end:
        parsed(*flags)
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        parsed(*flags, "--distributed-backend", "gloo" if "nccl" not in flags else "nccl")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu"),
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
        ({"bf16": {"enabled": True}}, "precision"),
        ({"zero_optimization": {"stage": 1}}, "stage"),
        ({"zero_optimization": None}, "cannot be used"),
    ],
)
def test_a_json_that_contradicts_the_arguments_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path, change: dict, says: str
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = command_line("zero2", Path("data"), tmp_path)
    assert parsed(*line).deepspeed_json["zero_optimization"]["stage"] == 2
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SystemExit):
        parsed(*line)
    assert says in capfd.readouterr().err


@pytest.mark.slow
def test_wrong_data_ends_the_run_with_one_sentence(native_data: Path, tmp_path: Path):
    script = REPO_ROOT / "native" / "pretrain_t5.py"
    missing = torchrun(1, script, command_line("alone", tmp_path / "nothing", tmp_path))
    assert missing.returncode != 0
    assert [line for line in missing.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: Missing or empty Megatron indexed dataset files: {tmp_path / 'nothing'}.bin does not exist"
    ]
    line = command_line("alone", native_data, tmp_path)
    foreign = torchrun(1, script, [*line, "--tokenizer-model", str(tmp_path)])
    assert foreign.returncode != 0
    errors = [line for line in foreign.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and str(tmp_path) in errors[0]
