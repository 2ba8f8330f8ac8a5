"""Both model families in every strategy, and the engine's other abilities: only plans, nothing is trained."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, Project, engine_output, record
from test_plan import ZERO_STAGES, Requests, codes

from t5bench.plan.__main__ import make
from t5bench.plan.engine import ZERO_OPTIONS
from t5bench.record.plan import Arguments, Plan, by_name

T5_ALONE = ("encoder", "decoder")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "3d"])
def test_a_gpt_in_every_strategy(plans: dict[str, Plan], gpt_plans: dict[str, Plan], strategy: str):
    plan, zero = gpt_plans[strategy], ZERO_STAGES.get(strategy, 1 if strategy == "3d" else 0)
    given = by_name(plan.arguments.words)
    large = {"--num-layers": "24", "--hidden-size": "1024", "--num-attention-heads": "16", "--seq-length": "1024"}
    large |= {"--ffn-hidden-size": "4096", "--max-position-embeddings": "1024", "--kv-channels": "64"}
    assert large.items() <= given.items()
    assert not [name for name in given if any(word in name for word in T5_ALONE) or "split-rank" in name]
    assert plan.obstacles == [] and plan.command[-len(plan.arguments.words) :] == plan.arguments.words
    assert any(word.endswith("/pretrain_gpt.py") for word in plan.command)
    assert (
        Path(plan.output_dir).name == f"gpt-{strategy}" and plan.value("WANDB_RUN_NAME") == f"megatron-gpt-{strategy}"
    )
    assert plan.zero_stage == zero and ("--no-pipeline-parallel" in given) == (zero > 0 and strategy != "3d")
    assert given["--tokenizer-type"] == "GPT2BPETokenizer" and given["--vocab-file"].endswith("/tokenizer/vocab.json")
    assert int(given["--make-vocab-size-divisible-by"]) * plan.layout.tp == 128 and plan.layout.split_rank is None
    if strategy in plans:  # the strategy's own arguments are those of T5
        t5 = by_name(plans[strategy].arguments.words)
        same = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--zero-stage", "--cpu-optimizer")
        assert {name: given.get(name) for name in same} == {name: t5.get(name) for name in same}


def test_gpt_data_have_their_own_directory_and_name_their_tokenizer(project: Project):
    for kind, argument in (("HFTokenizer", "--tokenizer-model"), ("GPT2BPETokenizer", "--merge-file")):
        record = project.root / "megatron_data" / "gpt" / "xsum_text_document.meta.json"
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps({"source": "s", "tokenizer_type": kind}))
        printed = project.launch("ddp", "--dry-run=json", MODEL_FAMILY="gpt").stdout
        given = by_name(json.loads(printed)["arguments"]["own"])
        assert given["--tokenizer-type"] == kind and argument in given
        assert given["--data-path"] == str(record.parent / "xsum_text_document")


def test_a_third_family_is_a_file_and_an_entry(project: Project):
    families = project.root / "scripts" / "families"
    (families / "third.sh").write_text((families / "gpt.sh").read_text().replace("  1024     16", "  2048     16"))
    with (project.root / "t5bench" / "plan" / "families.py").open("a") as file:
        file.write('FAMILIES["third"] = FAMILIES["gpt"]\n')
    shutil.copytree(project.data_prefix.parent, project.data_prefix.parent / "third")
    plan = Plan.read(json.loads(project.launch("zero1", "--dry-run=json", MODEL_FAMILY="third").stdout))
    assert codes(plan) == [] and plan.value("HIDDEN_SIZE") == "2048"
    assert plan.output_dir == f"{project.root}/outputs/third-zero1"
    refused = project.launch("3d", MODEL_FAMILY="third").stderr
    assert "3d supports only GPT, but MODEL_FAMILY is third" in refused


def test_a_strategy_refuses_a_family_that_it_does_not_support(project: Project):
    result = project.launch("3d")
    assert result.returncode == 2 and "error: 3d supports only GPT, but MODEL_FAMILY is t5" in result.stderr


def test_finetuning_is_refused_when_resuming_or_evaluating(request_for: Requests):
    other = ("--finetune", "--load", "/run/checkpoints")
    assert codes(make(request_for("ddp", *other))[0]) == []
    for goes_on in ({"RESUME": "1"}, {"EVAL_ONLY": "1", "EVAL_ITERS": "1"}):
        assert codes(make(request_for("ddp", *other, **goes_on))[0]) == ["launcher-argument"]


@pytest.mark.parametrize("family", ["t5", "gpt"])
def test_zero_works_with_tensor_parallelism(request_for: Requests, family: str):
    plan, _ = make(request_for("zero2", MODEL_FAMILY=family, TENSOR_PARALLEL_SIZE="2", NPROC_PER_NODE="4"))
    assert plan.obstacles == [] and (plan.layout.tp, plan.layout.dp, plan.layout.micro_batches) == (2, 2, 8)


def test_recomputing_and_a_growing_batch_reach_the_engine(project: Project):
    settings = {"RECOMPUTE": "full", "RAMPUP_BATCH_SIZE": "4 4 64", "TRAIN_ITERS": "20", "LR_WARMUP_ITERS": "2"}
    plan = Plan.read(json.loads(project.launch("ddp", "--dry-run=json", **settings).stdout))
    given = by_name(plan.arguments.words)
    wanted = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
    wanted |= {"--rampup-batch-size": "4 4 64", "--train-samples": "320", "--lr-warmup-samples": "32"}
    assert wanted.items() <= given.items() and "--train-iters" not in given and "--lr-warmup-iters" not in given
    # 6 of 4 samples, 3 of 8 and 2 of 12 are 72, and 248 left make 15 of 16.
    assert plan.iterations == 26


def test_the_commands_of_the_document_run(project: Project):
    text = (REPO_ROOT / "docs" / "gpt.md").read_text()
    commands = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    project.script("prepare_xsum_megatron.sh").write_text("")
    shutil.copytree(project.data_prefix.parent, project.data_prefix.parent / "gpt")
    project.add_stub("srun", '#!/usr/bin/env bash\nexec "${@:2}" --dry-run\n')
    environment = project.environment | {"OUTPUT_DIR": str(project.root / "run")}
    commands = commands.replace("MODEL_FAMILY=gpt MODEL_PRESET", "OUTPUT_DIR=first MODEL_FAMILY=gpt MODEL_PRESET")
    shell = ["bash", "-euo", "pipefail", "-c", commands]
    result = subprocess.run(shell, cwd=project.root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("repeat1/zero2", "repeat1/tensor", "pretrain_gpt.py"))


# ---- evaluation, DeepSpeed's JSON ------------------------------------------------------------------------------------


def test_evaluating_a_checkpoint_leaves_the_training_unchanged(project: Project):
    run = project.root / "outputs" / "ddp"
    planned = json.loads(
        project.launch("ddp", "--dry-run=json", EVAL_ONLY="1", EVAL_ITERS="4", SAVE_INTERVAL="2").stdout
    )
    given = by_name(planned["arguments"]["own"])
    assert (given["--load"], given["--skip-train"], planned["output_dir"]) == (
        f"{run}/checkpoints", "", f"{run}/evaluation",
    )  # fmt: skip
    assert "--save" not in given
    assert [o["code"] for o in planned["obstacles"]] == ["resume"] and not run.exists()


def test_an_evaluation_is_complete_and_its_loss_is_in_the_record(tmp_path: Path):
    line = (
        " validation loss at iteration 7 on 16-sample draw from {} set | lm loss value: 8.348E+00 | lm loss PPL: {} |"
    )
    output = "".join(f"{line.format(*each)}\n" for each in (("validation", "4.222E+03"), ("test", "4.1E+03")))
    assert record(tmp_path / "run", output + engine_output(0), EVAL_ONLY="1").returncode == 0
    part = json.loads((tmp_path / "run" / "node0.json").read_text())
    common = {"iteration": 7, "lm_loss": 8.348}
    assert part["evaluations"] == [
        common | {"samples": "validation", "perplexity": 4222.0}, common | {"samples": "test", "perplexity": 4100.0},
    ]  # fmt: skip
    assert part["status"] == "complete"


def test_exit_interval_is_a_planned_end(gpt_plans: dict[str, Plan]):
    plan = replace(gpt_plans["ddp"], arguments=Arguments(extra=["--exit-interval", "30"]), resume_from=60)
    assert (plan.iterations, plan.last_iteration, replace(plan, resume_from=990).last_iteration) == (1000, 90, 1000)


ZERO = {"stage": 2, "overlap_comm": False}
JSONS = {
    "too many": ({"zero_optimization": ZERO, "optimizer": {"type": "Adam"}}, "optimizer would have no effect"),
    "other numbers": ({"zero_optimization": ZERO | {"zero_quantized_weights": True}}, "zero_quantized_weights would"),
    "wrong": ({"zero_optimization": ZERO | {"contiguous_gradients": False}}, "no effect or change what is trained"),
    "a wrong stage": ({"zero_optimization": ZERO | {"offload_param": {"device": "cpu"}}}, "offload_param needs ZeRO"),
    "a disk": ({"zero_optimization": ZERO | {"offload_optimizer": {"device": "nvme"}}}, "found 'nvme'"),
    "from settings": ({"zero_optimization": ZERO, "train_batch_size": 3}, "come from the settings"),
    "no stage of that number": ({"zero_optimization": {"stage": 5}}, "ZeRO stage 5 is not 1, 2 or 3"),
    "no stage": ({}, "zero_optimization"),
    "no object": ([], "list indices must be integers"),
    "a bucket": ({"zero_optimization": ZERO | {"reduce_bucket_size": 1000}}, ""),
    "offloaded": ({"zero_optimization": ZERO | {"offload_optimizer": {"device": "cpu"}}}, ""),
    "hangs": ({"zero_optimization": ZERO | {"overlap_comm": True}}, ""),
    "hangs by default": ({"zero_optimization": {"stage": 3}}, ""),
}


@pytest.mark.parametrize("name", JSONS)
def test_every_option_of_a_strategys_json_is_honoured_or_refused(request_for: Requests, monkeypatch, tmp_path, name):
    content, found = JSONS[name]
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "megatron_zero2.json").write_text(json.dumps(content))
    monkeypatch.setattr("t5bench.plan.engine.REPOSITORY", tmp_path)
    asked = request_for("zero2")
    plan, besides = make(asked)
    said = [o.found for o in plan.obstacles if o.code == "ds-config"]
    assert len(said) == bool(found) and all(found in text for text in said)
    if not found:
        assert codes(plan) == [] and plan.ds_config["zero_optimization"] == content["zero_optimization"]
        assert besides["cpu_optimizer"] == str(int(name == "offloaded"))
        warned = any("overlap_comm is true" in note for note in asked.findings.notes)
        assert warned == name.startswith("hangs")


def test_the_options_exist_in_deepspeed():
    """By its source: importing it takes seconds."""
    config = Path(util.find_spec("deepspeed").origin).with_name("runtime") / "zero" / "config.py"
    assert set(re.findall(r"\w+", config.read_text())) >= ZERO_OPTIONS
