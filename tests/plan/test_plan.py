"""The plan: what each strategy runs, what the settings and the engine's own arguments change, and every obstacle."""

import json
import re
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest
from support import STRATEGIES, Project, write_data_record, write_indexed_dataset

from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import DEVICES
from t5bench.costmodel.prediction import Prediction, machine_of
from t5bench.plan.launchers import declarations
from t5bench.record import ds_config
from t5bench.record.command_script import ds_config_text
from t5bench.record.ledger import LedgerAnswer
from t5bench.record.plan import ROLES, Arguments, Plan, by_name

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "3d": 1}
PORTS = [29800, 29801, 29802, 29803, 29804, 29810, 29811, 29812, 29813]
MODEL_PARALLEL = {"tensor": (2, 1), "pipeline": (1, 2), "hybrid": (2, 2)}


def test_the_launchers_declare_the_strategies_in_the_order_of_their_ports():
    found = declarations(family="gpt")
    assert [strategy.port for strategy in found] == PORTS
    assert {strategy.name for strategy in found} == {*STRATEGIES, "3d"}
    assert {strategy.name for strategy in declarations(family="t5")} == set(STRATEGIES)
    assert len({strategy.colour for strategy in found}) == len(found)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_specific_to_each_strategy(plans: dict[str, Plan], strategy: str):
    plan, (tp, pp) = plans[strategy], MODEL_PARALLEL.get(strategy, (1, 1))
    processes = max(2, tp * pp)
    dp = processes // (tp * pp)
    assert plan.obstacles == []
    assert plan.layout and (plan.layout.tp, plan.layout.pp, plan.layout.dp) == (tp, pp, dp)
    assert (plan.layout.world_size, plan.layout.micro_batches) == (processes, 16 // dp)
    assert plan.zero_stage == ZERO_STAGES.get(strategy, 0)
    given = by_name(plan.arguments.words)
    assert given["--tensor-model-parallel-size"] == str(tp)
    assert given["--pipeline-model-parallel-size"] == str(pp)
    assert given.get("--pipeline-model-parallel-split-rank") == ("1" if pp == 2 else None)
    # The padding of the vocabulary is 128 in every layout.
    assert int(given["--make-vocab-size-divisible-by"]) * tp == 128
    assert ("--deepspeed" in given) == ("--no-pipeline-parallel" in given) == (strategy in ZERO_STAGES)
    assert given.get("--zero-stage") == (str(ZERO_STAGES[strategy]) if strategy in ZERO_STAGES else None)
    assert ("--cpu-optimizer" in given) == (strategy == "zero3_offload")
    if plan.ds_config:
        zero = plan.ds_config["zero_optimization"]
        assert zero["overlap_comm"] is False
        assert ("offload_optimizer" in zero) == ("offload_param" in zero) == (strategy == "zero3_offload")


def test_what_all_strategies_share(plans: dict[str, Plan]):
    """Their settings' and fixed arguments; and no argument is given twice."""
    ddp = plans["ddp"]
    ours = {"--encoder-num-layers": "24", "--hidden-size": "1024", "--ffn-hidden-size": "2816", "--lr": "0.0001"}
    ours |= {"--global-batch-size": "16", "--micro-batch-size": "1", "--train-iters": "1000", "--seed": "1234"}
    ours |= {"--lr-decay-style": "cosine", "--split": "949,50,1", "--attention-dropout": "0.1", "--bf16": ""}
    ours |= {"--kv-channels": "64", "--max-position-embeddings": "512", "--distributed-backend": "gloo"}
    ours |= {"--tokenizer-model": "google-t5/t5-large", "--layout-independent-init": "", "--DDP-impl": "local"}
    assert ours.items() <= by_name(ddp.arguments.words).items()
    for plan in plans.values():
        words = [word for word in plan.arguments.words if word.startswith("--")]
        assert len(words) == len(set(words))
        assert plan.engine_arguments == ddp.engine_arguments
        assert plan.with_role("trains") == ddp.with_role("trains")
        assert plan.command[-len(plan.arguments.words) :] == plan.arguments.words
    assert all(setting.role in ROLES for setting in ddp.settings.values())


def planned(project: Project, strategy: str, **environment: str) -> Plan:
    return Plan.read(json.loads(project.launch(strategy, "--dry-run=json", **environment).stdout))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "3d"])
def test_a_gpt_in_every_strategy(plans: dict[str, Plan], gpt_plans: dict[str, Plan], strategy: str):
    plan, zero = gpt_plans[strategy], ZERO_STAGES.get(strategy, 0)
    given = by_name(plan.arguments.words)
    large = {"--num-layers": "24", "--hidden-size": "1024", "--num-attention-heads": "16", "--seq-length": "1024"}
    large |= {"--ffn-hidden-size": "4096", "--max-position-embeddings": "1024", "--kv-channels": "64"}
    assert large.items() <= given.items()
    assert not [name for name in given if re.search("encoder|decoder|split-rank", name)]
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


@pytest.mark.parametrize(
    ("strategy", "gpus", "nnodes", "settings", "device", "per_node"),
    [
        ("ddp", 0, 1, {}, "cpu", 2),
        ("ddp", 2, 1, {"DEVICE": "cpu"}, "cpu", 2),
        ("zero1", 1, 1, {}, "cuda", 1),  # one GPU is enough where the model is not divided
        ("zero2", 1, 1, {"SHARE_GPUS": "1"}, "cuda", 1),
        ("ddp", 8, 2, {}, "cuda", 1),
        ("hybrid", 4, 2, {}, "cuda", 2),
        ("hybrid", 1, 4, {}, "cuda", 1),
        ("pipeline", 4, 1, {"PIPELINE_PARALLEL_SIZE": "4"}, "cuda", 4),
        ("tensor", 8, 1, {"NPROC_PER_NODE": "8", "MICRO_BATCH_SIZE": "2"}, "cuda", 8),
        ("zero2", 0, 1, {"TENSOR_PARALLEL_SIZE": "2", "NPROC_PER_NODE": "4"}, "cpu", 4),
        # Processes share GPUs on request.
        ("tensor", 1, 1, {"SHARE_GPUS": "1"}, "shared", 2),
        ("hybrid", 1, 1, {"SHARE_GPUS": "1"}, "shared", 4),
        ("ddp", 1, 1, {"SHARE_GPUS": "1"}, "shared", 2),
        ("tensor", 2, 1, {"SHARE_GPUS": "1"}, "cuda", 2),
    ],
)
def test_processes_of_a_node(making, strategy, gpus, nnodes, settings, device, per_node):
    made = making(strategy, gpus=gpus, nnodes=nnodes, **settings)
    assert made.plan.layout and made.codes == []
    device_found = "shared" if made.plan.gpus_shared else made.plan.device
    assert (device_found, made.plan.layout.nproc_per_node) == (device, per_node)
    assert made.plan.layout.split_rank == (made.plan.layout.pp // 2 or None)


def test_a_broken_tool_does_not_turn_a_run_on_gpus_into_one_on_the_cpu(making):
    made = making("ddp", fault="nvidia-smi failed: Driver/library version mismatch", DEVICE="auto", MODEL_PRESET="tiny")
    assert made.codes == ["gpu-tool"] and "Driver/library version mismatch" in made.said
    assert making("ddp", fault="nvidia-smi failed", DEVICE="cpu").codes == []
    large = making("ddp", DEVICE="auto")
    assert large.codes == ["large-on-cpu"] and "device: cpu (no GPU is visible)" in large.said
    assert "device: cuda (2 x NVIDIA Stub, listed by nvidia-smi)" in making("ddp", gpus=2).said


INTERLEAVED_GPT = {
    **{"MODEL_FAMILY": "gpt", "PIPELINE_SCHEDULE": "interleaved", "NUM_LAYERS": "16"},
    **{"PIPELINE_PARALLEL_SIZE": "4", "NPROC_PER_NODE": "4"},
}


@pytest.mark.parametrize(("virtual", "layers"), [("2", "2"), ("4", "1")])
def test_megatron_interleaves_a_gpt(making, virtual: str, layers: str):
    """The model of costs counts the same parts as the engine makes."""
    plan = making("pipeline", gpus=4, **INTERLEAVED_GPT, VIRTUAL_PIPELINE_STAGES=virtual).plan
    given = plan.named_arguments
    assert given["num_layers_per_virtual_pipeline_stage"] == layers and "pipeline_schedule" not in given
    job = Job.of_plan(plan, 50304)
    assert (job.parallel.virtual_stages, job.parallel.schedule) == (int(virtual), "interleaved")
    machine = machine_of(DEVICES["a100"], 100, 4)
    plain = Prediction(job.on(virtual_stages=1, schedule="1f1b"), machine)
    assert Prediction(job, machine).bubble < plain.bubble


DEEP = {"ENGINE": "native", "ENCODER_NUM_LAYERS": "6", "DECODER_NUM_LAYERS": "3"}


@pytest.mark.parametrize(
    ("stages", "schedule", "split"),
    [("2", "1f1b", 1), ("3", "1f1b", 2), ("4", "gpipe", 3), ("2", "zero-bubble", 1), ("2", "interleaved", 3)],
)
def test_the_native_engine_balances_its_stages(making, stages: str, schedule: str, split: int):
    """A layer of the encoder counts as several of the decoder, whose sequences are shorter."""
    settings = DEEP | {"PIPELINE_PARALLEL_SIZE": stages, "PIPELINE_SCHEDULE": schedule}
    plan = making("pipeline", gpus=4, **settings, NPROC_PER_NODE=stages).plan
    given = plan.named_arguments
    assert plan.layout.split_rank == int(given["pipeline_model_parallel_split_rank"]) == split
    chosen = given.get("pipeline_schedule", "1f1b"), given.get("virtual_pipeline_stages", "1")
    assert chosen == (schedule, "2" if schedule == "interleaved" else "1")


@pytest.mark.parametrize(
    ("strategy", "settings", "code", "found"),
    [
        ("ddp", {"GLOBAL_BATCH_SIZE": "15"}, "batch-size", "GLOBAL_BATCH_SIZE=15 is not divisible by 2"),
        ("tensor", {"GLOBAL_BATCH_SIZE": "6", "MICRO_BATCH_SIZE": "4"}, "batch-size", "=6 is not divisible by 4"),
        ("tensor", {"NUM_ATTENTION_HEADS": "1"}, "tensor-size", "NUM_ATTENTION_HEADS=1 is not divisible"),
        ("ddp", {"NUM_ATTENTION_HEADS": "15"}, "model-size", "HIDDEN_SIZE=1024 is not divisible"),
        ("pipeline", {"PIPELINE_PARALLEL_SIZE": "4", "ENCODER_NUM_LAYERS": "5"}, "pipeline-size", "over 2 stages"),
        ("pipeline", {"PIPELINE_PARALLEL_SIZE": "3", "NPROC_PER_NODE": "3"}, "pipeline-size", "must be even"),
        ("pipeline", {"MODEL_FAMILY": "gpt", "NUM_LAYERS": "5"}, "pipeline-size", "NUM_LAYERS=5 does not divide over"),
        ("tensor", {"TENSOR_PARALLEL_SIZE": "3", "NPROC_PER_NODE": "3"}, "tensor-size", "parallel size 3"),
        ("tensor", {"NPROC_PER_NODE": "1"}, "world-size", "multiple of 2 processes"),
        ("hybrid", {"NPROC_PER_NODE": "6"}, "world-size", "multiple of 4 processes"),
        ("ddp", {"TENSOR_PARALLEL_SIZE": "2"}, "no-tensor-parallelism", "ddp has no tensor parallelism"),
        ("zero3", {"PIPELINE_PARALLEL_SIZE": "2"}, "no-pipeline-parallelism", "zero3 has no pipeline parallelism"),
        ("ddp", {"PROFILE_ITERATION": "1"}, "profile-iteration", "TRAIN_ITERS=1000, found 1"),
        ("ddp", {"LR_WARMUP_ITERS": "1000"}, "learning-rate", "leaves none of the 1000 iterations"),
        ("ddp", {"MIN_LR": "0.1"}, "learning-rate", "MIN_LR=0.1 is more than LR=0.0001"),
        ("ddp", {"DROPOUT": "1"}, "dropout", "DROPOUT must be less than 1, found 1"),
        ("ddp", {"RAMPUP_BATCH_SIZE": "4 4 100", "ENGINE": "native"}, "native-engine", "RAMPUP_BATCH_SIZE='4 4 100'"),
        ("fsdp2", {"ENGINE": "megatron"}, "strategy-engine", "fsdp2"),
        ("ddp", {"PRECISION_FLAG": "--fp16", "ENGINE": "native"}, "native-engine", "does not train in fp16"),
        ("pipeline", {"MICRO_BATCH_SIZE": "16", "ENGINE": "native"}, "native-engine", "least 2 micro-batches, found 1"),
        ("zero1", {"TENSOR_PARALLEL_SIZE": "2", "ENGINE": "native"}, "native-engine", "without TP and PP"),
        ("pipeline", DEEP | {"PIPELINE_PARALLEL_SIZE": "10"}, "pipeline-size", "into 10 parts, but it has 9 layers"),
        (
            "pipeline",
            DEEP | {"PIPELINE_PARALLEL_SIZE": "5", "PIPELINE_SCHEDULE": "interleaved"},
            "pipeline-size",
            "into 10 parts, but it has 9 layers",
        ),
        (
            "pipeline",
            DEEP | {"PIPELINE_PARALLEL_SIZE": "3", "PIPELINE_SCHEDULE": "interleaved"},
            "pipeline-schedule",
            "takes a multiple of 3 micro-batches, found 16",
        ),
        ("pipeline", {"PIPELINE_SCHEDULE": "gpipe", "ENGINE": "megatron"}, "pipeline-schedule", "1f1b and interleaved"),
        ("pipeline", {"PIPELINE_SCHEDULE": "zero-bubble"}, "pipeline-schedule", "=zero-bubble is the native engine's"),
        (
            "hybrid",
            {"PIPELINE_SCHEDULE": "zero-bubble", "SEQUENCE_PARALLEL": "1", "ENGINE": "native", "NPROC_PER_NODE": "4"},
            "pipeline-schedule",
            "does not go with SEQUENCE_PARALLEL=1",
        ),
        (
            "pipeline",
            {"PIPELINE_SCHEDULE": "interleaved", "ENCODER_NUM_LAYERS": "24"},
            "pipeline-schedule",
            "GPT alone",
        ),
        (
            "pipeline",
            INTERLEAVED_GPT | {"PIPELINE_PARALLEL_SIZE": "2"},
            "pipeline-schedule",
            "3 pipeline stages, found 2",
        ),
        ("pipeline", INTERLEAVED_GPT | {"NUM_LAYERS": "12"}, "pipeline-schedule", "=12 does not divide over 8 parts"),
        ("pipeline", INTERLEAVED_GPT | {"GLOBAL_BATCH_SIZE": "6"}, "pipeline-schedule", "multiple of 4 micro-batches"),
        ("3d", INTERLEAVED_GPT | {"NPROC_PER_NODE": "8"}, "pipeline-schedule", "DeepSpeed's pipeline, which has 1f1b"),
        ("ddp", {"EVAL_ONLY": "1"}, "eval-iters", "EVAL_ITERS is 0"),
        ("ddp", {"RAMPUP_BATCH_SIZE": "4 4"}, "rampup", "three whole numbers"),
        ("ddp", {"RAMPUP_BATCH_SIZE": "4 4 801", "TRAIN_ITERS": "50"}, "rampup", "the run, which has 800 samples"),
        ("ddp", {"RAMPUP_BATCH_SIZE": "4 5 100"}, "rampup", "does not reach GLOBAL_BATCH_SIZE=16 in steps of 2"),
    ],
)
def test_a_request_that_cannot_work_is_refused(making, strategy, settings, code, found):
    made = making(strategy, **settings)
    assert made.plan.layout is None and made.plan.command == []
    assert any(o.code == code and o.fatal and found in o.found for o in made.plan.obstacles), made.plan.obstacles


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "Change GLOBAL_BATCH_SIZE or MICRO_BATCH_SIZE"),
        ({"RESUME": "1"}, "take as many processes that the data-parallel size divides 8"),
        ({"RESUME": "1", "MODEL_FAMILY": "gpt"}, "take as many processes that the data-parallel size divides 8"),
        ({"RESUME": "1", "MODEL_FAMILY": "gpt", "DROPOUT": "0"}, "Change MICRO_BATCH_SIZE, which leaves this run's"),
    ],
)
def test_the_remedy_for_a_batch_that_does_not_divide_is_one_that_may_be_followed(making, settings, remedy):
    """A run that continues keeps what its loss depends on."""
    chosen = {"ENGINE": "native", "NPROC_PER_NODE": "16", "MICRO_BATCH_SIZE": "2", "DEVICE": "cpu"}
    made = making("ddp", **chosen, **settings)
    (obstacle,) = (o for o in made.plan.obstacles if o.code == "batch-size")
    assert remedy in obstacle.remedy


@pytest.mark.parametrize(
    ("strategy", "gpus", "settings", "code", "found"),
    [
        ("tensor", 1, {}, "too-few-gpus", "NPROC_PER_NODE is 2 but this node has 1 visible GPU"),
        ("zero2", 1, {"SHARE_GPUS": "1", "NPROC_PER_NODE": "2"}, "too-few-gpus", "1 visible GPU"),  # not with ZeRO
        ("ddp", 0, {"DEVICE": "cuda"}, "too-few-gpus", "0 visible GPU"),
        ("ddp", 0, {"MEGATRON_DIR": "/nowhere/at all"}, "no-engine", "no Megatron-DeepSpeed checkout at /nowhere"),
        ("ddp", 0, {"MEGATRON_DATA_DIR": "/nowhere"}, "data", "/nowhere/xsum_text_document.bin does not exist"),
        ("ddp", 0, {"FLASH_ATTENTION": "on"}, "flash-attention", "FLASH_ATTENTION=on is not possible"),
    ],
)
def test_missing_parts_of_the_machine_are_named_in_a_complete_plan(making, strategy, gpus, settings, code, found):
    made = making(strategy, gpus=gpus, **settings)
    assert made.plan.layout
    (obstacle,) = (o for o in made.plan.obstacles if o.code == code)
    assert found in obstacle.found and obstacle.remedy and not obstacle.fatal


def test_a_run_that_will_log_nothing_says_so(making):
    warning = "LOG_INTERVAL=20 is more than TRAIN_ITERS"
    assert warning in making("ddp", TRAIN_ITERS="19").said and warning not in making("ddp", TRAIN_ITERS="20").said


@pytest.mark.parametrize(
    ("document", "encoder", "decoder", "needed"),
    [(700, "512", "128", 0), (700, "640", "120", 137), (700, "1024", "128", 149), (300, "1024", "128", 0)],
)
def test_a_decoder_that_is_too_short_for_some_samples(making, tmp_path, document, encoder, decoder, needed):
    write_indexed_dataset(tmp_path / "xsum_text_document", [[5, 1], [6] * document])
    write_data_record(tmp_path / "xsum_text_document")
    made = making("ddp", MEGATRON_DATA_DIR=str(tmp_path), ENCODER_SEQ_LENGTH=encoder, DECODER_SEQ_LENGTH=decoder)
    assert made.codes == ["decoder-length"] * bool(needed)
    assert f"Set DECODER_SEQ_LENGTH={needed} or more" in made.said or not needed


@pytest.mark.parametrize(
    ("state", "gpus", "settings", "expected"),
    [
        ("changed", 2, {}, ["engine-not-patched"]),
        ("megatron_t5_fixes", 2, {}, []),
        ("megatron_t5_fixes", 0, {}, ["engine-partly-patched"]),
        ("megatron_t5_fixes", 1, {"SHARE_GPUS": "1"}, ["engine-partly-patched"]),
        ("unpatched", 0, {"ENGINE": "native"}, []),
    ],
)
def test_what_a_checkout_in_each_state_can_do(making, monkeypatch, state, gpus, settings, expected):
    monkeypatch.setattr("t5bench.plan.engine.state_of", lambda directory: state)
    made = making("ddp", gpus=gpus, **settings)
    assert made.codes == expected
    assert made.plan.engine_patches == ("series" if settings.get("ENGINE") == "native" else state)


@pytest.mark.parametrize(
    ("verdict", "is_refused", "is_warned"),
    [("right", False, False), ("wrong", True, False), ("does not run", False, True), ("not measured", False, True)],
)
def test_what_the_ledger_says_of_the_installed_release(making, monkeypatch, verdict, is_refused, is_warned):
    asked = []

    def ask_ledger(*release_and_config: object, **facts: object) -> LedgerAnswer:
        asked.append((release_and_config[0], facts))
        return LedgerAnswer(verdict, "" if verdict == "right" else "its gradient norm differs")

    monkeypatch.setattr("t5bench.plan.releases.installed_version", lambda distribution: "0.18.2")
    monkeypatch.setattr("t5bench.plan.releases.ask_ledger", ask_ledger)
    made = making("zero2")
    assert made.codes == (["deepspeed-release"] if is_refused else [])
    assert ("may train this strategy wrong" in made.said) == is_warned
    assert asked == [("0.18.2", {"micro_batches": 8, "pipeline_stages": 1, "resumes": False})]
    if not is_refused:
        assert made.plan.ledger.startswith(verdict), "the record says it too"
    without_deepspeed = making("ddp")
    assert without_deepspeed.codes == [] and not without_deepspeed.plan.ledger and len(asked) == 1
    making("zero2", RESUME="1")
    assert asked[-1][1]["resumes"]


def test_packages_that_are_missing(making, monkeypatch):
    monkeypatch.setattr("t5bench.plan.releases.installed_version", lambda distribution: None)
    assert (making("zero1").codes, making("ddp").codes) == (["no-deepspeed"], [])
    monkeypatch.setattr("t5bench.plan.releases.util.find_spec", lambda name: None)
    assert making("ddp").codes == ["no-msgspec"]


def test_the_deepspeed_json_follows_the_settings(making):
    changed = {"GLOBAL_BATCH_SIZE": "32", "MICRO_BATCH_SIZE": "4", "CLIP_GRAD": "3.5", "PRECISION_FLAG": "--fp16"}
    made = making("zero2", **changed, GRADIENT_REDUCTION="fp32")
    config = made.plan.ds_config
    assert config == json.loads(ds_config_text(made.plan))
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (32, 4)
    assert (config["gradient_clipping"], config["communication_data_type"]) == (3.5, "fp32")
    assert (config["bf16"], config["fp16"]) == ({"enabled": False}, {"enabled": True})
    plain = making("zero3", PRECISION_FLAG="").plan.ds_config
    assert plain["bf16"] == plain["fp16"] == {"enabled": False} and "communication_data_type" not in plain


def test_sequence_parallelism(making):
    once = {"SEQUENCE_PARALLEL": "1", "ENGINE": "native"}
    assert "--sequence-parallel" in making("tensor", **once).plan.arguments.own
    assert "--sequence-parallel" not in making("ddp", **once).plan.arguments.own  # there is nothing to divide
    refused = making("tensor", SEQUENCE_PARALLEL="1", ENGINE="megatron")
    assert refused.codes == ["sequence-parallel"] and "docs/gpt.md" in str(refused.plan.obstacles[0])
    assert making("hybrid", **once, DECODER_SEQ_LENGTH="127").codes == ["sequence-parallel"]
    assert making("fsdp2", **once, TENSOR_PARALLEL_SIZE="2").codes == ["sequence-parallel"]


def test_zero_may_reduce_once(making, monkeypatch: pytest.MonkeyPatch):
    once = {"ZERO_REDUCE_ONCE": "1", "ENGINE": "native"}
    assert "--zero-reduce-once" in making("zero2", **once).plan.arguments.own
    assert "--zero-reduce-once" not in making("zero1", **once).plan.arguments.own  # it always does
    refused = making("zero3", ZERO_REDUCE_ONCE="1", ENGINE="megatron")
    assert refused.codes == ["reduce-once"] and "its loop has DeepSpeed reduce" in str(refused.plan.obstacles[0])
    monkeypatch.setattr("t5bench.plan.releases.installed_version", lambda _: "0.18.3")
    assert "reduce-once" in making("zero2", **once).codes
    assert "reduce-once" not in making("ddp", **once).codes


ZERO = {"stage": 2, "overlap_comm": False}
JSONS = {
    "too many": ({"zero_optimization": ZERO, "optimizer": {"type": "Adam"}}, "optimizer must be left out"),
    "wrong": (
        {"zero_optimization": ZERO | {"contiguous_gradients": False}},
        "contiguous_gradients must be true, its default",
    ),
    "a wrong stage": ({"zero_optimization": ZERO | {"offload_param": {"device": "cpu"}}}, "offload_param needs ZeRO"),
    "a disk": ({"zero_optimization": ZERO | {"offload_optimizer": {"device": "nvme"}}}, 'found "nvme"'),
    "from settings": ({"zero_optimization": ZERO, "train_batch_size": 3}, "comes from the settings"),
    "no stage of that number": ({"zero_optimization": {"stage": 5}}, "stage must be 1 or 2 or 3, found 5"),
    "no stage": ({}, "zero_optimization"),
    "offloaded": ({"zero_optimization": ZERO | {"offload_optimizer": {"device": "cpu"}}}, ""),
    "hangs": ({"zero_optimization": ZERO | {"overlap_comm": True}}, ""),
    "another strategy's stage": ({"zero_optimization": {"stage": 3}}, "the name of the file promises 2"),
    "a word of another library": ({"zero_optimization": ZERO | {"reduce_bucket_size": "auto"}}, 'found "auto"'),
    "a text that is no switch": ({"zero_optimization": ZERO | {"overlap_comm": "false"}}, "true or false"),
    "nothing": ({"zero_optimization": None}, "must be an object"),
    "a bucket of nothing": ({"zero_optimization": ZERO | {"reduce_bucket_size": 0}}, "at least 1, found 0"),
}


@pytest.mark.parametrize("name", JSONS)
def test_every_option_of_a_strategys_json_is_honoured_or_refused(making, monkeypatch, tmp_path, name):
    content, found = JSONS[name]
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "megatron_zero2.json").write_text(json.dumps(content))
    monkeypatch.setattr("t5bench.plan.engine.FILES", tmp_path)
    made = making("zero2")
    said = [o.found for o in made.plan.obstacles if o.code == "ds-config"]
    assert len(said) == bool(found) and all(found in text for text in said)
    if not found:
        assert made.codes == [] and made.plan.ds_config["zero_optimization"] == content["zero_optimization"]
        assert ("--cpu-optimizer" in made.plan.arguments.own) == (name == "offloaded")
        assert ("overlap_comm is true" in made.said) == name.startswith("hangs")


def test_a_file_that_promises_offload_must_offload(making, monkeypatch, tmp_path: Path):
    (tmp_path / "ds_configs").mkdir()
    monkeypatch.setattr("t5bench.plan.engine.FILES", tmp_path)
    file = tmp_path / "ds_configs" / "megatron_zero3_offload.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}))
    made = making("zero3_offload")
    assert made.codes == ["ds-config"] and "nothing is offloaded" in made.said
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    assert making("zero3_offload").codes == []


NO_JSON = {
    "comment": '{"zero_optimization": {"stage": 2}} // as on the old cluster',
    "comment line": '{\n  # as on the old cluster\n  "zero_optimization": {"stage": 2}\n}',
    "comma": '{\n  "zero_optimization": {"stage": 2},\n}\n',
    "single quotes": "{'zero_optimization': {'stage': 2}}",
    "Python's words": '{"zero_optimization": {"stage": 2, "overlap_comm": True}}',
    "cut short": '{"zero_optimization":\n',
    "empty": "",
}


@pytest.mark.parametrize("name", NO_JSON)
def test_a_file_that_is_no_json_is_told_with_its_line(making, monkeypatch, tmp_path: Path, name: str):
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "megatron_zero2.json").write_text(NO_JSON[name])
    monkeypatch.setattr("t5bench.plan.engine.FILES", tmp_path)
    [obstacle] = [o for o in making("zero2").plan.obstacles if o.code == "ds-config"]
    assert re.search(r"line \d+ is no JSON, found .+", obstacle.found) and "no comments" in obstacle.remedy


def test_deepspeed_gets_what_has_an_effect(making, monkeypatch, tmp_path: Path):
    """What other releases would refuse although it is off, what none reads, and a mark that an editor writes."""
    (tmp_path / "ds_configs").mkdir()
    config = {"zero_optimization": ZERO | {"cpu_offload": False}, "amp": {"enabled": False}, "_why": "x"}
    (tmp_path / "ds_configs" / "megatron_zero2.json").write_text("\ufeff" + json.dumps(config))
    monkeypatch.setattr("t5bench.plan.engine.FILES", tmp_path)
    made = making("zero2")
    plain = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "bf16", "fp16"}
    assert made.codes == [] and made.plan.ds_config.keys() == plain | {"steps_per_print", "zero_optimization"}
    assert made.plan.ds_config["zero_optimization"] == ZERO and "_why in" in made.said


def test_one_type_for_the_sum_of_gradients(making, monkeypatch, tmp_path: Path):
    (tmp_path / "ds_configs").mkdir()
    config = {"zero_optimization": ZERO, "communication_data_type": "bf16"}
    (tmp_path / "ds_configs" / "megatron_zero2.json").write_text(json.dumps(config))
    monkeypatch.setattr("t5bench.plan.engine.FILES", tmp_path)
    assert making("zero2").plan.ds_config["communication_data_type"] == "bf16"
    made = making("zero2", GRADIENT_REDUCTION="fp32")
    assert made.codes == ["ds-config"] and "GRADIENT_REDUCTION=fp32" in made.said


def test_the_options_exist_in_deepspeed():
    """By its source: importing it takes seconds."""
    config = Path(util.find_spec("deepspeed").origin).with_name("runtime") / "zero" / "config.py"
    given = {name for name, kind in ds_config.ZERO.items() if not isinstance(kind, ds_config.WithoutEffect)}
    assert set(re.findall(r"\w+", config.read_text())) >= given


@pytest.mark.parametrize(
    ("settings", "installed", "note"),
    [
        ({}, "2.7.4", "flash-attn 2.7.4 in the decoder's self-attention"),
        ({"DEVICE": "cpu"}, "2.7.4", "standard (no CUDA)"),
        ({"PRECISION_FLAG": ""}, "2.7.4", "standard (fp32)"),
        ({"ENGINE": "native"}, None, "PyTorch scaled_dot_product_attention"),
    ],
)
def test_the_chosen_attention_is_reported(making, monkeypatch, settings, installed, note):
    monkeypatch.setattr("t5bench.plan.node_checks.installed_version", lambda distribution: installed)
    monkeypatch.setattr("t5bench.plan.node_checks.import_fault", lambda module: "")
    made = making("ddp", gpus=2, **settings)
    assert ("--use-flash-attn-v2" in made.plan.arguments.own) == ("flash-attn 2.7.4" in note)
    assert note in made.said


def test_an_engine_argument_of_a_setting_changes_the_setting(making):
    arguments = "--encoder-seq-length 64 --lr=0.5 --fp16 --micro-batch-size 2 --micro-batch-size 4"
    made = making("zero2", *arguments.split())
    plan = made.plan
    assert (plan.value("ENCODER_SEQ_LENGTH"), plan.value("LR"), plan.precision) == ("64", "0.5", "fp16")
    assert plan.layout.micro_batches == 2 and plan.ds_config["train_micro_batch_size_per_gpu"] == 4
    # The arguments of the settings agree.
    given = by_name(plan.arguments.settings)
    assert (given["--encoder-seq-length"], given["--lr"], given["--micro-batch-size"]) == ("64", "0.5", "4")
    assert "--fp16" in given and "--bf16" not in given
    # The larger of two dropouts.
    both = ("--hidden-dropout", "0.3", "--attention-dropout", "0.2")
    assert making("ddp", *both).plan.value("DROPOUT") == "0.3"


NATIVE, RAMP = {"ENGINE": "native"}, {"RAMPUP_BATCH_SIZE": "4 4 100"}
FINETUNING = "--finetune --load /run/checkpoints"


@pytest.mark.parametrize(
    ("strategy", "arguments", "settings", "expected"),
    [
        ("ddp", "--encoder-seq 64", {}, "abbreviated-argument"),
        ("ddp", "--data-path /other", {}, "launcher-argument"),
        ("ddp", "--deepspeed_config=x.json", {}, "launcher-argument"),
        ("ddp", "--save /elsewhere", {}, "launcher-argument"),
        ("ddp", "--rampup-batch-size 4 4 100", {}, "launcher-argument"),
        ("ddp", "--hidden-size many", {}, "engine-argument"),
        ("ddp", "--lr -1", {}, "engine-argument"),
        ("ddp", "--hidden-dropout 0.3", {}, "engine-argument"),  # attention's would become 0.3 too
        ("ddp", "--tensor-model-parallel-size 2", {}, "no-tensor-parallelism"),
        ("ddp", "--train-iters 50", RAMP, "rampup"),  # the engine counts a run whose batch grows in samples
        ("ddp", "--exit-interval -1", {}, "engine-argument"),
        ("ddp", "--exit-interval 0", {}, "engine-argument"),
        ("ddp", "--train-data-path /other", {}, "launcher-argument"),
        ("ddp", "--DDP-impl torch", {}, "launcher-argument"),
        ("ddp", "--sequence-parallel", {}, "launcher-argument"),
        ("zero1", "--data-efficiency-curriculum-learning", {"MODEL_FAMILY": "gpt"}, "launcher-argument"),
        ("ddp", "--swiglu", {}, "launcher-argument"),
        ("ddp", "--normalization rmsnorm", {}, "launcher-argument"),
        ("ddp", "--use-rotary-position-embeddings", {}, "launcher-argument"),
        ("ddp", "--num-experts 4", {}, "launcher-argument"),
        ("ddp", FINETUNING, {}, ""),
        ("ddp", FINETUNING, {"RESUME": "1"}, "launcher-argument"),
        ("ddp", FINETUNING, {"EVAL_ONLY": "1", "EVAL_ITERS": "1"}, "launcher-argument"),
        # The native engine knows its arguments.
        ("ddp", "--frobnicate", NATIVE, "engine-argument"),
        ("ddp", "--adam-beta2 x", NATIVE, "engine-argument"),
        ("ddp", "--num-workers", NATIVE, "engine-argument"),
        ("ddp", "--adam-beta2 0.95 --compile", NATIVE, ""),
        ("zero3", "--compile", NATIVE, "engine-argument"),
        ("pipeline", "--compile", NATIVE | {"PIPELINE_SCHEDULE": "zero-bubble"}, "engine-argument"),
    ],
)
def test_engine_arguments_that_would_make_the_plan_untrue(making, strategy, arguments, settings, expected):
    assert making(strategy, *arguments.split(), **settings).codes == ([expected] if expected else [])


@pytest.mark.parametrize(("gpus", "codes"), [(0, ["torch-release"]), (2, [])])
def test_what_the_ledger_says_of_the_installed_torch(making, monkeypatch, gpus, codes):
    """It measured on a CPU: there a wrong release is refused, on a GPU it is a warning."""

    def look_up(library: str, release: str, strategy: str, **facts: object) -> LedgerAnswer:
        return LedgerAnswer("wrong", "its gradient norm differs") if strategy == "fsdp2" else LedgerAnswer("right")

    monkeypatch.setattr("t5bench.plan.releases.look_up", look_up)
    made = making("fsdp2", gpus=gpus, ENGINE="native")
    assert made.codes == codes
    assert ("on a CPU, where the ledger measured it, its gradient norm differs" in made.said) == bool(gpus)
    assert making("ddp", gpus=gpus, ENGINE="native").plan.ledger == "right"
    assert making("ddp", gpus=gpus).plan.ledger == ""
