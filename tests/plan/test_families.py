"""Both model families in every strategy, and the engine's other abilities: only plans, nothing is trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness import STRATEGIES, Project

from t5bench.record.plan import Arguments, Plan, by_name

T5_ALONE = ("encoder", "decoder")
ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "3d": 1}


def planned(project: Project, strategy: str, **environment: str) -> Plan:
    return Plan.read(json.loads(project.launch(strategy, "--dry-run=json", **environment).stdout))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "3d"])
def test_a_gpt_in_every_strategy(plans: dict[str, Plan], gpt_plans: dict[str, Plan], strategy: str):
    plan, zero = gpt_plans[strategy], ZERO_STAGES.get(strategy, 0)
    given = by_name(plan.arguments.words)
    large = {"--num-layers": "24", "--hidden-size": "1024", "--num-attention-heads": "16", "--seq-length": "1024"}
    large |= {"--ffn-hidden-size": "4096", "--max-position-embeddings": "1024", "--kv-channels": "64"}
    assert large.items() <= given.items()
    assert not [name for name in given if any(word in name for word in T5_ALONE) or "split-rank" in name]
    assert plan.obstacles == [] and plan.command[-len(plan.arguments.words) :] == plan.arguments.words
    assert any(word.endswith("/pretrain_gpt.py") for word in plan.command)
    assert Path(plan.output_dir).name == f"gpt-{strategy}" == plan.value("WANDB_RUN_NAME").removeprefix("megatron-")
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
        given = by_name(planned(project, "ddp", MODEL_FAMILY="gpt").arguments.own)
        assert given["--tokenizer-type"] == kind and argument in given
        assert given["--data-path"] == str(record.parent / "xsum_text_document")


def test_a_strategy_refuses_a_family_that_it_does_not_support(project: Project):
    result = project.launch("3d")
    assert result.returncode == 2 and "error: 3d supports only GPT, but MODEL_FAMILY is t5" in result.stderr


def test_recomputing_and_a_growing_batch_reach_the_engine(project: Project):
    settings = {"RECOMPUTE": "full", "RAMPUP_BATCH_SIZE": "4 4 64", "TRAIN_ITERS": "20", "LR_WARMUP_ITERS": "2"}
    plan = planned(project, "ddp", **settings)
    given = by_name(plan.arguments.words)
    wanted = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
    wanted |= {"--rampup-batch-size": "4 4 64", "--train-samples": "320", "--lr-warmup-samples": "32"}
    assert wanted.items() <= given.items() and "--train-iters" not in given and "--lr-warmup-iters" not in given
    # 6 of 4 samples, 3 of 8 and 2 of 12 are 72, and 248 left make 15 of 16.
    assert plan.iterations == 26


def test_evaluating_a_checkpoint_leaves_the_training_unchanged(project: Project):
    run = project.root / "outputs" / "ddp"
    plan = planned(project, "ddp", EVAL_ONLY="1", EVAL_ITERS="4", SAVE_INTERVAL="2")
    given = by_name(plan.arguments.own)
    assert (given["--load"], given["--skip-train"], plan.output_dir) == (f"{run}/checkpoints", "", f"{run}/evaluation")
    assert "--save" not in given
    assert [o.code for o in plan.obstacles] == ["resume"] and not run.exists()


def test_exit_interval_is_a_planned_end(gpt_plans: dict[str, Plan]):
    plan = replace(gpt_plans["ddp"], arguments=Arguments(extra=["--exit-interval", "30"]), resume_from=60)
    assert (plan.iterations, plan.last_iteration, replace(plan, resume_from=990).last_iteration) == (1000, 90, 1000)
