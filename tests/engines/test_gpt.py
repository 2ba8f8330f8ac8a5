"""GPT on the real engine: the same model in strategies that divide it differently, and a checkpoint evaluated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT
from real_runs import EXACT, train

from t5bench.record.records import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpt(megatron_dir: Path, once) -> dict[str, str]:
    """The settings of a tiny GPT's trainings, with the bundled articles as its data."""
    if not (megatron_dir / "examples_deepspeed" / "rebase" / "gpt2-vocab.json").is_file():
        pytest.skip("this checkout of Megatron-DeepSpeed has no vocabulary of GPT-2's")
    settings = {"MODEL_FAMILY": "gpt", "MEGATRON_DIR": str(megatron_dir)}

    def prepare(directory: Path) -> None:
        script = ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")]
        changes = settings | {"SAMPLE": "1", "MEGATRON_DATA_DIR": str(directory), "PYTHON": sys.executable}
        subprocess.run(script, env=os.environ | changes, check=True, timeout=120, capture_output=True)

    return settings | EXACT | {"MEGATRON_DATA_DIR": str(once("GPT's sample data", prepare)), "TRAIN_ITERS": "3"}


def test_a_gpt_is_the_same_model_in_every_strategy_and_its_checkpoint_is_evaluated(gpt: dict[str, str], tmp_path: Path):
    curves = {}
    for strategy in ("ddp", "zero3", "3d"):
        train(strategy, tmp_path / strategy, **gpt, EVAL_ITERS="2", SAVE_INTERVAL="3")
        lines = read_metrics(tmp_path / strategy / "metrics.jsonl")
        curves[strategy] = [number for line in lines for number in (line.lm_loss, line.grad_norm)]
        assert len(curves[strategy]) == 6 and curves[strategy] == pytest.approx(curves["ddp"], rel=1e-5), strategy
    trained = (tmp_path / "3d" / "node0.json").read_bytes()
    train("3d", tmp_path / "3d", **gpt, EVAL_ITERS="2", EVAL_ONLY="1")
    assert (tmp_path / "3d" / "node0.json").read_bytes() == trained
    evaluated = json.loads((tmp_path / "3d" / "evaluation" / "node0.json").read_text())
    found = {each["samples"]: each["lm_loss"] for each in evaluated["evaluations"]}
    assert found == {each["samples"]: each["lm_loss"] for each in json.loads(trained)["evaluations"]}
    assert evaluated["status"] == "complete" and "validation" in found
