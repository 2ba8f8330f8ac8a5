"""The parity gate itself, scripts/check_parity.sh, over real trainings of the native engine."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_runs import environment, make_clone, verdicts
from support import REPO_ROOT
from warm_python import warm_python

from t5bench.compare.sensitivity import read
from t5bench.record.records import load
from t5bench.sweep import sweep
from t5bench.sweep.launch import PlannedRun


def gate(*strategies: str, root: Path = REPO_ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    """scripts/check_parity.sh with the native engine, from a directory that is not the project's."""
    words = ["bash", str(root / "scripts" / "check_parity.sh"), *strategies]
    chosen = environment(DEVICE="cpu", ENGINE="native", PYTHON=warm_python()) | settings
    where = {"env": chosen, "cwd": root.parent}
    return subprocess.run(words, **where, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(autouse=True)
def data(sample_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check prepares its data itself where none is given."""
    monkeypatch.setenv("MEGATRON_DATA_DIR", str(sample_data))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project whose engine a test may change, in a path with a space."""
    return make_clone(tmp_path / "a copy")


@pytest.mark.parametrize(
    ("strategy", "settings", "says"),
    [
        ("zero4", {}, "there is no strategy 'zero4'"),
        ("ddp", {}, "ddp is the baseline and needs another strategy"),
        ("", {"RUNS_DIR": "."}, "the check needs new runs"),
        ("--locate", {"SEQUENCE_PARALLEL": "1"}, "a run with SEQUENCE_PARALLEL=1 cannot have one"),
        ("--locate", {"PIPELINE_SCHEDULE": "zero-bubble"}, "PIPELINE_SCHEDULE=zero-bubble cannot have one"),
        ("zero1", {"ENGINE": "megatron", "MEGATRON_DIR": "nowhere"}, "the megatron engine's DDP, the baseline, cannot"),
    ],
)
def test_what_cannot_be_checked(copy: Path, strategy: str, settings: dict[str, str], says: str):
    """And that is said before anything is trained or measured."""
    result = gate(*filter(None, [strategy]), root=copy, **settings)
    assert result.returncode == 2
    assert says in result.stderr and result.stderr.count("error: ") == 1
    assert ("there is no Megatron-DeepSpeed checkout at " in result.stderr) == ("MEGATRON_DIR" in settings)
    assert "measuring" not in result.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_the_native_engines_strategies_pass_and_nothing_can_hide(copy: Path):
    """The recipe shows a hundredth of each of its numbers, or the gate would fail."""
    result = gate("pipeline", root=copy, RUNS_DIR="relative runs", MEGATRON_DATA_DIR="")
    assert result.returncode == 0, result.stdout + result.stderr
    by_run = {("ddp", "native"): "PASS", ("pipeline", "native"): "PASS", ("hugging-face", "-"): "PASS"}
    assert verdicts(result.stdout) == by_run
    runs = copy.parent / "relative runs"
    assert (runs / "native" / "pipeline" / "metrics.jsonl").exists()
    assert {"weight decay", "Adam's epsilon", "clipping"} <= {one.number for one in read(runs / "sensitivity.jsonl")}
    trained = map(json.loads, (runs / "sensitivity.jsonl").read_text().splitlines())
    lengths = {line["number"]: len(line["losses"]) for line in trained}
    assert lengths["the recipe"] == 12 and lengths["loss scale"] == 1, "a change is trained until it is seen"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_gpt_has_no_outside_reference_and_its_strategies_are_located(gpt: dict[str, str], tmp_path: Path):
    settings = gpt | {"ENGINE": "native", "RUNS_DIR": str(tmp_path / "runs"), "CHECK_BLIND_SPOTS": "0"}
    result = gate("--locate", "tensor", **settings)
    assert result.returncode == 0, result.stdout + result.stderr
    assert verdicts(result.stdout) == {("ddp", "native"): "PASS", ("tensor", "native"): "PASS"}
    assert "tensor: nothing differs beyond rounding" in result.stdout
    assert "mistakes that all strategies of a GPT share go unnoticed" in result.stderr


@pytest.mark.slow
def test_a_mistake_that_all_strategies_share_is_seen(copy: Path):
    """Attention that is scaled by the wrong size, in the one model of the native engine."""
    path = copy / "native" / "layers.py"
    text = path.read_text()
    mistake = text.replace("scale=self.scale,", "scale=0.99 * self.head_size**-0.5,")
    assert mistake != text
    path.write_text(mistake)
    result = gate("zero1", root=copy, RUNS_DIR=str(copy / "runs"), CHECK_BLIND_SPOTS="0")
    assert result.returncode == 1, result.stdout + result.stderr
    by_run = {("ddp", "native"): "PASS", ("zero1", "native"): "PASS", ("hugging-face", "-"): "FAIL"}
    assert verdicts(result.stdout) == by_run
    assert "all strategies may share this mistake" in result.stdout


@pytest.mark.slow
def test_a_number_hidden_by_a_recipe_is_named():
    """The gate's settings before its recipe was derived, with short samples."""
    short = {"ENCODER_SEQ_LENGTH": "32", "DECODER_SEQ_LENGTH": "32"}
    before = {"LR": "0.001", "WEIGHT_DECAY": "0.01", "MIN_LR": "0", "LR_WARMUP_ITERS": "0", "CLIP_GRAD": "1.1"}
    result = gate("--sensitivity", TRAIN_ITERS="4", **before, **short)
    assert result.returncode == 1, result.stdout + result.stderr
    rows = {row[0]: row[-1] for line in result.stdout.splitlines() if len(row := re.split("  +", line.strip())) == 6}
    assert (rows["weight decay"], rows["learning rate"], rows["clipping"]) == ("NO", "yes", "yes")
    assert "FAIL: not seen: " in result.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_what_the_rounding_of_bf16_hides_is_seen_in_fp32(copy: Path):
    """A thousandth too much on one rank."""
    path = copy / "native" / "zero.py"
    text = path.read_text()
    mistake = text.replace("self.model.backward(loss)  #", "self.model.backward(loss * (1 + self.args.rank / 1000))  #")
    assert mistake != text
    path.write_text(mistake)
    result = gate("--bf16", "zero1", root=copy, TRAIN_ITERS="4", RUNS_DIR="runs", CHECK_BLIND_SPOTS="0")
    assert result.returncode == 1, result.stdout + result.stderr
    in_fp32, in_bf16 = (verdicts(part) for part in result.stdout.split("\nFAIL zero1"))
    assert in_fp32[("zero1", "native")] == "FAIL" and in_bf16[("zero1", "native")] == "PASS"
    assert "the rounding of bf16 hides what" in result.stderr
    precisions = [load(copy.parent / "runs" / folder / "zero1").plan.precision for folder in ("fp32/native", "native")]
    assert precisions == ["fp32", "bf16"]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_benchmarks_own_mode(copy: Path):
    """ZeRO drops what DDP drops."""
    result = gate("--benchmark-mode", "zero3", root=copy, TRAIN_ITERS="6", RUNS_DIR="runs")
    assert result.returncode == 0, result.stdout + result.stderr
    assert verdicts(result.stdout) == {("ddp", "native"): "PASS", ("zero3", "native"): "PASS"}
    plan = load(copy.parent / "runs" / "native" / "zero3").plan
    assert (plan.precision, plan.value("DROPOUT")) == ("bf16", "0.1")


class Waiting(SimpleNamespace):
    """A run that is still in progress the first few times that it is polled."""

    def poll(self) -> int | None:
        self.looks -= 1
        return None if self.looks > 0 else 0


@pytest.mark.parametrize(
    ("locked", "says"),
    [(2**32, "compiling cpu_adam"), (1, "starting; about 0:01:15 left")],  # or left behind by a killed process
)
def test_a_long_run_reports_progress_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, locked: int, says: str
):
    monkeypatch.setattr(sweep, "SECONDS", 0.01)
    monkeypatch.setattr(sweep, "LINE_SECONDS", 0.02)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (locked, locked))
    launch = SimpleNamespace(start=lambda *_: Waiting(looks=6, problems=()))
    sweep._run_one(launch, PlannedRun("zero1", "zero1"), tmp_path / "run", "[2/3] zero1", 75)
    assert capsys.readouterr().err.startswith(f"[2/3] zero1  {says}")
