"""GPT on the real engine with a growing batch: one model in every strategy, resumed, and evaluated."""

import json
import shutil
from pathlib import Path

import pytest
from real_runs import EXACT, train

from t5bench.record.checkpoints import TRACKER
from t5bench.report.package import contradictions

pytestmark = pytest.mark.slow
# 4, 4, 8 and 8 samples: the batch grows after the checkpoint of iteration 2.
GROWING = {"TRAIN_ITERS": "3", "RAMPUP_BATCH_SIZE": "4 4 8", "EVAL_ITERS": "2", "SAVE_INTERVAL": "2"}


def test_a_gpt_is_the_same_model_in_every_strategy_resumed_and_evaluated(gpt: dict[str, str], tmp_path: Path):
    settings, curves = gpt | EXACT | GROWING, {}
    for strategy in ("ddp", "zero3", "3d"):
        run = train(strategy, tmp_path / strategy, **settings)
        curves[strategy] = [number for line in run.iterations for number in (line.lm_loss, line.grad_norm)]
        assert len(curves[strategy]) == 8 and curves[strategy] == pytest.approx(curves["ddp"], rel=1e-5), strategy
        assert not list(contradictions(run)), "every iteration has the samples that its plan says"

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "3d", resumed)
    shutil.rmtree(resumed / "checkpoints" / "global_step4")
    (resumed / "checkpoints" / TRACKER).write_text("2")
    lines = train("3d", resumed, RESUME="1", **settings).iterations
    assert [line.begin for line in lines] == [0, 0, 2, 2]
    assert [number for line in lines for number in (line.lm_loss, line.grad_norm)] == curves["3d"]

    trained = (tmp_path / "3d" / "node0.json").read_bytes()
    train("3d", tmp_path / "3d", **settings, EVAL_ONLY="1")
    assert (tmp_path / "3d" / "node0.json").read_bytes() == trained
    evaluated = json.loads((tmp_path / "3d" / "evaluation" / "node0.json").read_text())
    found = {each["samples"]: each["lm_loss"] for each in evaluated["evaluations"]}
    assert found == {each["samples"]: each["lm_loss"] for each in json.loads(trained)["evaluations"]}
    assert evaluated["status"] == "complete" and "validation" in found
