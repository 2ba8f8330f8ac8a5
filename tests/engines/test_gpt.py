"""GPT on the real engine with a growing batch: one model in every strategy, resumed, evaluated and merged."""

import json
import shutil
from pathlib import Path

import pytest
from real_runs import EXACT, finish, start, train
from tools.convert.convert_commands import check_logits

from t5bench.__main__ import main
from t5bench.checkpoint_form import TRACKER
from t5bench.record.records import load
from t5bench.tools.convert.checkpoint_file import read_checkpoint_file as read
from t5bench.tools.convert.shards import Weights, whole_weights
from t5bench_verify.relations import contradictions

pytestmark = pytest.mark.slow
# 4, 4, 8 and 8 samples: the batch grows after the checkpoint of iteration 2.
GROWING = {"TRAIN_ITERS": "3", "RAMPUP_BATCH_SIZE": "4 4 8", "EVAL_ITERS": "2", "SAVE_INTERVAL": "2"}


def whole_of(folder: Path) -> Weights:
    return whole_weights(folder, read(min(folder.rglob("*.pt")))["args"])


@pytest.mark.nightly
def test_a_gpt_is_the_same_model_in_every_strategy_resumed_evaluated_and_merged(gpt: dict[str, str], tmp_path: Path):
    settings = gpt | EXACT | GROWING
    curves = {}
    for strategy in ("ddp", "zero3", "3d"):
        run = train(strategy, tmp_path / strategy, **settings)
        curves[strategy] = [number for line in run.iterations for number in (line.lm_loss, line.grad_norm)]
        assert len(curves[strategy]) == 8 and curves[strategy] == pytest.approx(curves["ddp"], rel=1e-5), strategy
        assert not list(contradictions(run)), "every iteration has the samples that its plan says"

    resumed = shutil.copytree(tmp_path / "3d", tmp_path / "3d resumed")
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

    (tmp_path / "compared").mkdir()
    check_logits(tmp_path / "compared", Path(gpt["MEGATRON_DIR"]), *(tmp_path / name for name in curves))

    moved = (tmp_path / "3d").rename(tmp_path / "elsewhere")
    merged = tmp_path / "merged"
    assert main(["reshape", str(moved), "--output", str(merged)]) == 0
    assert main(["reshape", str(moved), "--output", str(tmp_path / "cut"), "--tp", "2", "--pp", "2"]) == 0
    whole, cut = (whole_of(directory / "checkpoints" / "iter_0000004") for directory in (merged, tmp_path / "cut"))
    assert whole.keys() == cut.keys() and all(whole[name].equal(cut[name]) for name in whole)
    finish(start("ddp", merged, **settings, EVAL_ONLY="1", NPROC_PER_NODE="1"))
    after = {each.samples: each.lm_loss for each in load(merged / "evaluation").evaluations}
    assert after == pytest.approx(found, rel=1e-6)  # DeepSpeed's pipeline engine adds up micro-batches in another order


@pytest.mark.nightly
def test_megatrons_interleaved_pipeline_trains_the_same_gpt(gpt: dict[str, str], tmp_path: Path, capsys):
    """Two parts of the model on each of four stages."""
    settings = gpt | EXACT | {"TRAIN_ITERS": "3", "NUM_LAYERS": "8", "SAVE_INTERVAL": "3"}
    interleaved = {"PIPELINE_SCHEDULE": "interleaved", "PIPELINE_PARALLEL_SIZE": "4", "NPROC_PER_NODE": "4"}
    curves = {}
    for strategy, more in (("ddp", {}), ("pipeline", interleaved)):
        run = train(strategy, tmp_path / strategy, **settings | more)
        curves[strategy] = [number for line in run.iterations for number in (line.lm_loss, line.grad_norm)]
    assert len(curves["ddp"]) == 6 and curves["pipeline"] == pytest.approx(curves["ddp"], rel=1e-5)
    assert main(["export", str(tmp_path / "pipeline"), str(tmp_path / "out")]) == 2
    assert "was trained with an interleaved pipeline" in capsys.readouterr().err


def test_both_engines_train_the_same_gpt(gpt: dict[str, str], tmp_path: Path):
    """The same samples and weights; the native engine's strategies agree with each other, too."""
    curves = {}
    for name, strategy in (("megatron", "ddp"), ("fsdp2", "fsdp2"), ("hybrid", "hybrid")):
        engine = {} if name == "megatron" else {"ENGINE": "native"}
        if name == "hybrid":
            engine["NPROC_PER_NODE"] = "8"
        run = train(strategy, tmp_path / name, **gpt | EXACT | {"TRAIN_ITERS": "4"} | engine)
        curves[name] = [number for line in run.iterations for number in (line.lm_loss, line.grad_norm)]
    for name, numbers in curves.items():
        assert len(numbers) == 8 and numbers == pytest.approx(curves["megatron"], rel=5e-6), name
