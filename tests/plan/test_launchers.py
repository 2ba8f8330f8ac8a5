"""The eight launchers: the exact command of each, every setting in effect, every refusal, every process ended."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, Project, processes_with, wait_for

from t5bench.plan.ports import free_port

PORTS = {
    "ddp": 29800,
    "zero1": 29801,
    "zero2": 29802,
    "zero3": 29803,
    "zero3_offload": 29804,
    "pipeline": 29810,
    "tensor": 29811,
    "hybrid": 29812,
}
ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}


def split_command(arguments: list[str]) -> tuple[dict[str, str], str, dict[str, str | bool]]:
    """torchrun's options, the script, and the engine's options; a flag's value is True, a repeated option an error."""
    script = next(i for i, argument in enumerate(arguments) if argument.endswith("pretrain_t5.py"))
    return options(arguments[:script]), arguments[script], options(arguments[script + 1 :])


def options(arguments: list[str]) -> dict[str, str | bool]:
    result: dict[str, str | bool] = {}
    name = None
    for argument in arguments:
        if argument.startswith("--"):
            name = argument
            assert name not in result, f"{name} is given twice"
            result[name] = True
        else:
            assert name, f"{argument} stands before any option"
            assert result[name] is True, f"{name} has two values"
            result[name] = argument
    return result


def launched(project: Project, strategy: str, *arguments: str, **environment: str | None):
    result = project.launch(strategy, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return split_command(project.recorded_arguments())


def refused(project: Project, strategy: str, *arguments: str, **environment: str | None) -> str:
    """Standard error of a launch that must be refused: status 2, one error, nothing started."""
    result = project.launch(strategy, *arguments, **environment)
    assert result.returncode == 2, result.stderr
    assert not project.was_started()
    assert result.stderr.count("error: ") == 1, result.stderr
    assert not (project.root / "outputs").exists()
    return result.stderr


def ds_config(project: Project, strategy: str) -> dict:
    return json.loads((project.root / "outputs" / strategy / "ds_config.json").read_text())


# ---- the exact command of each strategy ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exact_command(project: Project, strategy: str):
    tensor = 2 if strategy in ("tensor", "hybrid") else 1
    pipeline = 2 if strategy in ("pipeline", "hybrid") else 1
    run = project.root / "outputs" / strategy
    expected: dict[str, str | bool] = {
        "--tensor-model-parallel-size": str(tensor),
        "--pipeline-model-parallel-size": str(pipeline),
        "--encoder-num-layers": "24",
        "--decoder-num-layers": "24",
        "--hidden-size": "1024",
        "--num-attention-heads": "16",
        "--kv-channels": "64",
        "--ffn-hidden-size": "2816",
        "--encoder-seq-length": "512",
        "--decoder-seq-length": "128",
        "--max-position-embeddings": "512",
        "--attention-dropout": "0.1",
        "--hidden-dropout": "0.1",
        "--micro-batch-size": "1",
        "--global-batch-size": "16",
        "--train-iters": "1000",
        "--lr": "0.0001",
        "--min-lr": "0",
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": "0",
        "--weight-decay": "0.01",
        "--clip-grad": "1.0",
        "--seed": "1234",
        "--data-path": str(project.data_prefix),
        "--data-impl": "mmap",
        "--split": "949,50,1",
        "--num-workers": "2",
        "--tokenizer-type": "HFTokenizer",
        "--tokenizer-model": "google-t5/t5-large",
        "--make-vocab-size-divisible-by": str(128 // tensor),
        "--log-interval": "20",
        "--eval-interval": "1000",
        "--eval-iters": "0",
        "--distributed-backend": "gloo",
        "--distributed-timeout-minutes": "10",
        "--DDP-impl": "local",
        "--no-gradient-accumulation-fusion": True,
        "--no-masked-softmax-fusion": True,
        "--no-bias-gelu-fusion": True,
        "--no-bias-dropout-fusion": True,
        "--tensorboard-dir": str(run / "tensorboard"),
        "--tensorboard-log-interval": "20",
        "--bf16": True,
        "--layout-independent-init": True,
        "--wandb-project": "ml710-t5-parallelism",
        "--wandb-exp-name": f"megatron-{strategy}",
        "--wandb-save-dir": str(run),
    }
    if pipeline == 2:
        expected["--pipeline-model-parallel-split-rank"] = "1"
    if strategy in ZERO_STAGES:
        expected |= {
            "--deepspeed": True,
            "--deepspeed_config": str(run / "ds_config.json"),
            "--zero-stage": str(ZERO_STAGES[strategy]),
            "--no-pipeline-parallel": True,
        }
    if strategy == "zero3_offload":
        expected["--cpu-optimizer"] = True

    torchrun, script, engine = launched(project, strategy)
    assert torchrun == {
        "--nnodes": "1",
        "--nproc_per_node": "4" if strategy == "hybrid" else "2",
        "--node_rank": "0",
        "--master_addr": "127.0.0.1",
        "--master_port": str(PORTS[strategy]),
        "--rdzv_conf": "timeout=600",
    }
    assert Path(script).resolve() == project.engine / "pretrain_t5.py"
    assert engine == expected


@pytest.mark.parametrize("strategy", ZERO_STAGES)
def test_effective_ds_config(project: Project, strategy: str):
    launched(project, strategy)
    config = ds_config(project, strategy)
    zero = config["zero_optimization"]
    assert zero["stage"] == ZERO_STAGES[strategy]
    assert zero["overlap_comm"] is False
    assert ("offload_optimizer" in zero) == ("offload_param" in zero) == (strategy == "zero3_offload")
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert config["gradient_clipping"] == 1.0
    assert config["bf16"] == {"enabled": True}
    assert config["fp16"] == {"enabled": False}


def test_environment_on_cpu(project: Project):
    launched(project, "zero1", PYTHONPATH=project.environment["PYTHONPATH"])
    environment = project.recorded_environment()
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["LOCAL_SIZE"] == "2"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["PYTHONPATH"].split(":")[1] == project.environment["PYTHONPATH"]
    assert Path(environment["PYTHONPATH"].split(":")[0]).resolve() == project.engine


def test_cuda_is_chosen_where_there_are_gpus(project: Project):
    project.set_gpus(2)
    _, _, engine = launched(project, "ddp")
    assert engine["--distributed-backend"] == "nccl"
    assert "--no-masked-softmax-fusion" not in engine
    assert "DS_ACCELERATOR" not in project.recorded_environment()


def test_device_cpu_wins_over_gpus(project: Project):
    project.set_gpus(2)
    _, _, engine = launched(project, "ddp", DEVICE="cpu")
    assert engine["--distributed-backend"] == "gloo"


def test_data_parallel_uses_the_single_gpu_there_is(project: Project):
    project.set_gpus(1)
    torchrun, _, _ = launched(project, "zero1")
    assert torchrun["--nproc_per_node"] == "1"


@pytest.mark.parametrize(("visible", "processes"), [("3", "1"), ("0,5", "2")])
def test_visible_devices_count_not_the_installed_ones(project: Project, visible: str, processes: str):
    project.set_gpus(8)
    torchrun, _, _ = launched(project, "ddp", CUDA_VISIBLE_DEVICES=visible)
    assert torchrun["--nproc_per_node"] == processes


@pytest.mark.parametrize("strategy", ["tensor", "pipeline", "hybrid"])
def test_further_processes_are_data_parallel(project: Project, strategy: str):
    torchrun, _, engine = launched(project, strategy, NPROC_PER_NODE="8", MICRO_BATCH_SIZE="2")
    assert torchrun["--nproc_per_node"] == "8"
    assert engine["--micro-batch-size"] == "2"


def test_gpus_per_node_is_understood(project: Project):
    torchrun, _, _ = launched(project, "ddp", GPUS_PER_NODE="4")
    assert torchrun["--nproc_per_node"] == "4"


def test_pipeline_of_four_stages_splits_in_the_middle(project: Project):
    _, _, engine = launched(project, "pipeline", PIPELINE_PARALLEL_SIZE="4")
    assert engine["--pipeline-model-parallel-size"] == "4"
    assert engine["--pipeline-model-parallel-split-rank"] == "2"


def test_native_engine_gets_the_same_command(project: Project):
    _, _, megatron = launched(project, "tensor")
    (project.root / "outputs" / "tensor" / "node0.status").unlink()
    _, script, native = launched(project, "tensor", ENGINE="native", MEGATRON_DIR="/nowhere")
    assert script == str(project.root / "native" / "pretrain_t5.py")
    assert native == megatron


# ---- settings ------------------------------------------------------------------------------------------------------

OVERRIDES = [
    ("TRAIN_ITERS", "50", "--train-iters"),
    ("GLOBAL_BATCH_SIZE", "64", "--global-batch-size"),
    ("MICRO_BATCH_SIZE", "4", "--micro-batch-size"),
    ("ENCODER_NUM_LAYERS", "6", "--encoder-num-layers"),
    ("DECODER_NUM_LAYERS", "3", "--decoder-num-layers"),
    ("HIDDEN_SIZE", "512", "--hidden-size"),
    ("NUM_ATTENTION_HEADS", "8", "--num-attention-heads"),
    ("FFN_HIDDEN_SIZE", "1000", "--ffn-hidden-size"),
    ("ENCODER_SEQ_LENGTH", "256", "--encoder-seq-length"),
    ("DECODER_SEQ_LENGTH", "100", "--decoder-seq-length"),
    ("LR", "3e-4", "--lr"),
    ("MIN_LR", "1e-6", "--min-lr"),
    ("LR_WARMUP_ITERS", "10", "--lr-warmup-iters"),
    ("WEIGHT_DECAY", "0.1", "--weight-decay"),
    ("CLIP_GRAD", "3.5", "--clip-grad"),
    ("DROPOUT", "0", "--hidden-dropout"),
    ("DROPOUT", "0.2", "--attention-dropout"),
    ("SEED", "7", "--seed"),
    ("LOG_INTERVAL", "5", "--log-interval"),
    ("EVAL_INTERVAL", "100", "--eval-interval"),
    ("EVAL_ITERS", "10", "--eval-iters"),
    ("WANDB_PROJECT", "my project", "--wandb-project"),
    ("WANDB_RUN_NAME", "smoke-ddp", "--wandb-exp-name"),
    ("TOKENIZER_MODEL", "google-t5/t5-small", "--tokenizer-model"),
    ("SAVE_INTERVAL", "25", "--save-interval"),
    ("DISTRIBUTED_TIMEOUT_MINUTES", "3", "--distributed-timeout-minutes"),
]


@pytest.mark.parametrize(("name", "value", "option"), OVERRIDES)
def test_override_reaches_the_engine(project: Project, name: str, value: str, option: str):
    _, _, engine = launched(project, "zero1", **{name: value})
    assert engine[option] == value


def test_overrides_reach_torchrun(project: Project):
    torchrun, _, _ = launched(project, "ddp", MASTER_PORT="29900", RENDEZVOUS_TIMEOUT="30")
    assert torchrun["--master_port"] == "29900"
    assert torchrun["--rdzv_conf"] == "timeout=30"


def test_overrides_reach_the_ds_config(project: Project):
    launched(project, "zero2", GLOBAL_BATCH_SIZE="32", MICRO_BATCH_SIZE="4", CLIP_GRAD="3.5", PRECISION_FLAG="--fp16")
    config = ds_config(project, "zero2")
    assert config["train_batch_size"] == 32
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_clipping"] == 3.5
    assert config["bf16"] == {"enabled": False}
    assert config["fp16"] == {"enabled": True}


def test_empty_precision_is_fp32(project: Project):
    _, _, engine = launched(project, "zero3", PRECISION_FLAG="")
    assert not engine.keys() & {"--bf16", "--fp16"}
    config = ds_config(project, "zero3")
    assert config["bf16"] == config["fp16"] == {"enabled": False}


def test_fp16_starts_from_one_loss_scale_everywhere(project: Project):
    _, _, engine = launched(project, "ddp", PRECISION_FLAG="--fp16")
    assert engine["--fp16"] is True
    assert engine["--initial-loss-scale"] == "65536"


@pytest.mark.parametrize(
    ("preset", "hidden", "layers"), [("tiny", "64", "2"), ("small", "512", "6"), ("base", "768", "12")]
)
def test_presets(project: Project, preset: str, hidden: str, layers: str):
    _, _, engine = launched(project, "ddp", MODEL_PRESET=preset, DECODER_NUM_LAYERS="4")
    assert engine["--hidden-size"] == hidden
    assert engine["--encoder-num-layers"] == layers
    assert engine["--decoder-num-layers"] == "4"


def test_tokenizer_beside_the_data_is_used(project: Project):
    tokenizer = project.root / "megatron_data" / "tokenizer"
    tokenizer.mkdir()
    _, _, engine = launched(project, "ddp")
    assert engine["--tokenizer-model"] == str(tokenizer)


def test_data_directory_may_be_elsewhere(project: Project, tmp_path: Path):
    elsewhere = tmp_path / "other data"
    (project.root / "megatron_data").rename(elsewhere)
    _, _, engine = launched(project, "ddp", MEGATRON_DATA_DIR=str(elsewhere))
    assert engine["--data-path"] == str(elsewhere / "xsum_text_document")


def test_relative_output_directory_is_the_callers(project: Project, tmp_path: Path):
    result = project.launch("ddp", cwd=tmp_path, OUTPUT_DIR="here")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "here" / "node0.log").is_file()


def test_extra_arguments_go_to_the_engine_last(project: Project):
    launched(project, "ddp", "--", "--recompute-activations", "--some-name", "a b")
    assert project.recorded_arguments()[-3:] == ["--recompute-activations", "--some-name", "a b"]


def test_works_from_inside_scripts_without_user_or_hostname(project: Project):
    result = subprocess.run(
        ["bash", "run_megatron_t5_ddp.sh"],
        cwd=project.root / "scripts",
        env=project.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_save_and_wandb_options(project: Project):
    _, _, engine = launched(project, "ddp", SAVE_INTERVAL="5", WANDB_MODE="disabled")
    assert engine["--save"] == str(project.root / "outputs" / "ddp" / "checkpoints")
    assert not [option for option in engine if option.startswith("--wandb")]


def test_without_a_key_wandb_is_offline_and_says_how_to_upload(project: Project):
    result = project.launch("ddp")
    assert project.recorded_environment()["WANDB_MODE"] == "offline"
    assert "wandb sync" in result.stderr


def test_with_a_key_wandb_is_online_and_the_key_is_nowhere_on_disk(project: Project):
    project.launch("ddp", WANDB_API_KEY="s3cr3t" * 6)
    assert project.recorded_environment()["WANDB_MODE"] == "online"
    files = [path for path in (project.root / "outputs").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_wandb_mode_is_the_users(project: Project, mode: str):
    project.launch("ddp", WANDB_MODE=mode)
    assert project.recorded_environment()["WANDB_MODE"] == mode


# ---- flash attention -----------------------------------------------------------------------------------------------


def test_flash_attention_where_it_applies_and_said(project: Project):
    project.set_gpus(2)
    project.install("flash_attn", "2.7.4")
    result = project.launch("ddp")
    assert "--use-flash-attn-v2" in project.recorded_arguments()
    assert "flash-attn 2.7.4" in result.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"DEVICE": "cpu"}, "no CUDA"),
        ({"PRECISION_FLAG": ""}, "fp32"),
        ({"FLASH_ATTENTION": "off"}, "FLASH_ATTENTION=off"),
    ],
)
def test_standard_attention_otherwise_and_said(project: Project, environment: dict, reason: str):
    project.set_gpus(2)
    project.install("flash_attn", "2.7.4")
    result = project.launch("ddp", **environment)
    assert "--use-flash-attn-v2" not in project.recorded_arguments()
    assert f"attention: standard ({reason})" in result.stderr


def test_flash_attention_that_cannot_be_is_refused(project: Project):
    assert "not installed" in refused(project, "ddp", FLASH_ATTENTION="on")


# ---- hosts, ranks, master ------------------------------------------------------------------------------------------

# 127.0.0.x are all this machine, so that several "nodes" can be named without any resolver.
TWO_HOSTS = "127.0.0.1 127.0.0.2"


def test_master_and_rank_from_the_arguments(project: Project):
    torchrun, _, _ = launched(project, "ddp", "127.0.0.1", "1", HOSTS=TWO_HOSTS)
    assert torchrun["--nnodes"] == "2"
    assert torchrun["--nproc_per_node"] == "1"
    assert torchrun["--node_rank"] == "1"
    assert torchrun["--master_addr"] == "127.0.0.1"


def test_arguments_win_over_the_environment_and_that_over_slurm(project: Project):
    slurm = {"SLURM_JOB_NODELIST": "127.0.0.8,127.0.0.9", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2"}
    torchrun, _, _ = launched(project, "ddp", "127.0.0.1", "1", HOSTS=TWO_HOSTS, NODE_RANK="0", **slurm)
    assert (torchrun["--node_rank"], torchrun["--master_addr"]) == ("1", "127.0.0.1")
    torchrun, _, _ = launched(project, "zero1", HOSTS=TWO_HOSTS, NODE_RANK="1", **slurm)
    assert (torchrun["--node_rank"], torchrun["--master_addr"]) == ("1", "127.0.0.1")
    torchrun, _, _ = launched(project, "zero3", **(slurm | {"SLURM_NODEID": "1"}))
    assert (torchrun["--node_rank"], torchrun["--master_addr"]) == ("1", "127.0.0.8")


SCONTROL_STUB = """#!/usr/bin/env bash
[[ $* == "show hostnames 127.0.0.[1-2]" ]] && printf '127.0.0.1\\n127.0.0.2\\n'
"""

# A name service that knows other-host, as a cluster's does.
GETENT_STUB = """#!/usr/bin/env bash
[[ $2 == other-host ]] && echo "192.0.2.7 STREAM other-host" && exit 0
exec /usr/bin/getent "$@"
"""


@pytest.fixture
def other_host(project: Project) -> str:
    project.add_stub("getent", GETENT_STUB)
    return "other-host"


def test_slurm_bracket_lists_are_expanded_by_scontrol(project: Project):
    project.add_stub("scontrol", SCONTROL_STUB)
    torchrun, _, _ = launched(project, "ddp", SLURM_JOB_NODELIST="127.0.0.[1-2]", SLURM_NODEID="1")
    assert torchrun["--nnodes"] == "2"
    assert torchrun["--master_addr"] == "127.0.0.1"


def test_rank_from_the_host_name(project: Project, other_host: str):
    torchrun, _, _ = launched(project, "ddp", HOSTS=f"{other_host} {socket.gethostname()}", MASTER_ADDR=other_host)
    assert torchrun["--node_rank"] == "1"


def test_hybrid_on_four_nodes_as_the_readme_has_it(project: Project):
    """HOSTS still holds the two nodes that everything else runs on."""
    torchrun, _, _ = launched(project, "hybrid", "127.0.0.1", "3", HOSTS=TWO_HOSTS, NNODES="4")
    assert torchrun["--nnodes"] == "4"
    assert torchrun["--nproc_per_node"] == "1"
    assert torchrun["--node_rank"] == "3"


def test_hybrid_on_two_nodes_takes_two_processes_on_each(project: Project):
    torchrun, _, _ = launched(project, "hybrid", "127.0.0.1", "0", HOSTS=TWO_HOSTS)
    assert torchrun["--nproc_per_node"] == "2"


@pytest.mark.parametrize("rank", ["one", "-1", "1.5", " 1", "01x"])
def test_refuses_a_rank_that_is_no_number(project: Project, rank: str):
    arguments = ["127.0.0.1", rank]
    result = project.launch("ddp", *arguments, HOSTS=TWO_HOSTS)
    assert result.returncode == 2
    assert "rank" in result.stderr or "unknown option" in result.stderr


def test_refuses_a_rank_out_of_range(project: Project):
    message = refused(project, "ddp", "127.0.0.1", "2", HOSTS=TWO_HOSTS)
    assert "rank is 2 but there are 2 nodes" in message


def test_refuses_a_rank_that_is_another_hosts(project: Project, other_host: str):
    message = refused(project, "ddp", "127.0.0.1", "1", HOSTS=f"127.0.0.1 {other_host}")
    assert "rank 1 belongs to other-host" in message


def test_refuses_a_master_that_is_not_the_first_host(project: Project):
    message = refused(project, "ddp", "127.0.0.2", "0", HOSTS=TWO_HOSTS)
    assert "HOSTS begins with 127.0.0.1" in message


def test_refuses_a_master_that_does_not_resolve(project: Project):
    message = refused(project, "ddp", "no-such-host.invalid", "0", NNODES="2")
    assert "no-such-host.invalid" in message
    assert "does not resolve" in message


def test_a_master_and_a_rank_alone_mean_the_readmes_two_nodes(project: Project, other_host: str):
    result = project.launch("ddp", other_host, "1")
    assert result.returncode == 0, result.stderr
    torchrun, _, _ = split_command(project.recorded_arguments())
    assert (torchrun["--nnodes"], torchrun["--node_rank"], torchrun["--master_addr"]) == ("2", "1", other_host)
    assert "Neither HOSTS nor NNODES" in result.stderr


def test_a_loopback_master_means_this_machine_alone(project: Project):
    torchrun, _, _ = launched(project, "ddp", "localhost", "0")
    assert torchrun["--nnodes"] == "1"


def test_refuses_when_the_rank_cannot_be_inferred(project: Project, other_host: str):
    message = refused(project, "ddp", HOSTS=f"{other_host} {other_host}")
    assert "Unable to infer NODE_RANK" in message
    assert "other-host 0" in message


def test_refuses_two_launchers_on_one_slurm_node(project: Project):
    slurm = {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    assert "--ntasks-per-node=1" in refused(project, "ddp", **slurm)


def test_refuses_a_third_argument(project: Project):
    assert "at most two arguments" in refused(project, "ddp", "127.0.0.1", "0", "1")


def test_refuses_an_unknown_option(project: Project):
    assert "unknown option '--rank'" in refused(project, "ddp", "--rank")


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_refuses_a_port_in_use(project: Project):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        message = refused(project, "ddp", MASTER_PORT=str(port))
        assert f"port {port} is already in use" in message
        assert project.launch("ddp", "127.0.0.1", "1", HOSTS=TWO_HOSTS, MASTER_PORT=str(port)).returncode == 0


@pytest.mark.parametrize(
    ("strategy", "environment", "message"),
    [
        ("ddp", {"GLOBAL_BATCH_SIZE": "15"}, "GLOBAL_BATCH_SIZE=15 is not divisible by 2"),
        ("tensor", {"GLOBAL_BATCH_SIZE": "6", "MICRO_BATCH_SIZE": "4"}, "GLOBAL_BATCH_SIZE=6 is not divisible by 4"),
        ("tensor", {"NUM_ATTENTION_HEADS": "1"}, "NUM_ATTENTION_HEADS=1 is not divisible"),
        ("tensor", {"FFN_HIDDEN_SIZE": "2815"}, "FFN_HIDDEN_SIZE=2815 is not divisible"),
        ("ddp", {"NUM_ATTENTION_HEADS": "15"}, "HIDDEN_SIZE=1024 is not divisible"),
        ("pipeline", {"PIPELINE_PARALLEL_SIZE": "4", "ENCODER_NUM_LAYERS": "5"}, "do not divide over 2 stages"),
        ("pipeline", {"PIPELINE_PARALLEL_SIZE": "4", "DECODER_NUM_LAYERS": "5"}, "do not divide over 2 stages"),
        ("pipeline", {"PIPELINE_PARALLEL_SIZE": "3"}, "must be even"),
        ("tensor", {"TENSOR_PARALLEL_SIZE": "3", "GLOBAL_BATCH_SIZE": "15"}, "by the tensor-parallel size 3"),
        ("tensor", {"NPROC_PER_NODE": "1"}, "multiple of 2 processes"),
        ("hybrid", {"NPROC_PER_NODE": "6"}, "multiple of 4 processes"),
        ("ddp", {"TENSOR_PARALLEL_SIZE": "2"}, "ddp has no tensor parallelism"),
        ("zero3", {"PIPELINE_PARALLEL_SIZE": "2"}, "zero3 has no pipeline parallelism"),
        ("ddp", {"TRAIN_ITERS": "many"}, "TRAIN_ITERS must be a whole number of at least 1, found 'many'"),
        ("ddp", {"TRAIN_ITERS": "0"}, "TRAIN_ITERS must be a whole number of at least 1"),
        ("ddp", {"TRAIN_ITERS": ""}, "TRAIN_ITERS must be a whole number"),
        ("ddp", {"MICRO_BATCH_SIZE": "08"}, "MICRO_BATCH_SIZE must be a whole number"),
        ("ddp", {"LR": "fast"}, "LR must be a number"),
        ("ddp", {"LR": "-1"}, "LR must be a number that is not negative"),
        ("ddp", {"PRECISION_FLAG": "--bf8"}, "PRECISION_FLAG is '--bf8'"),
        ("ddp", {"MODEL_PRESET": "huge"}, "MODEL_PRESET is 'huge'"),
        ("ddp", {"ENGINE": "nanotron"}, "ENGINE is 'nanotron'"),
        ("ddp", {"WANDB_MODE": "off"}, "WANDB_MODE is 'off'"),
        ("ddp", {"MASTER_PORT": "70000"}, "MASTER_PORT must be at most 65535"),
        ("ddp", {"NNODES": "two"}, "NNODES must be a whole number"),
    ],
)
def test_refuses_settings_that_cannot_work(project: Project, strategy: str, environment: dict, message: str):
    assert message in refused(project, strategy, **environment)


def test_refuses_more_processes_than_gpus(project: Project):
    project.set_gpus(1)
    assert "NPROC_PER_NODE is 2 but this node has 1 visible GPU" in refused(project, "tensor")


@pytest.mark.parametrize(("strategy", "processes"), [("tensor", "2"), ("pipeline", "2"), ("hybrid", "4"), ("ddp", "2")])
@pytest.mark.parametrize("engine", ["megatron", "native"])
def test_processes_share_a_gpu_over_gloo(project: Project, strategy: str, processes: str, engine: str):
    project.set_gpus(1)
    torchrun, _, flags = launched(project, strategy, SHARE_GPUS="1", ENGINE=engine)
    assert torchrun["--nproc_per_node"] == processes
    assert flags["--distributed-backend"] == "gloo"
    assert ("--share-gpus" in flags) == (engine == "native")
    # What is switched off on a CPU stays on: the GPU's own kernels are what such a run checks.
    assert "--no-bias-gelu-fusion" not in flags


def test_gpus_are_shared_only_where_there_are_too_few(project: Project):
    project.set_gpus(2)
    _, _, flags = launched(project, "tensor", SHARE_GPUS="1")
    assert flags["--distributed-backend"] == "nccl"


def test_deepspeeds_buffers_do_not_stay_in_memory(project: Project):
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("there is no /dev/shm")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{free_port()}"
    own, other = shared / f"{name}_0", shared / f"{name}0_0"
    try:
        for path in (own, other):
            path.touch()
        launched(project, "zero1", MASTER_PORT=name.rpartition("_")[2])
        assert not own.exists() and other.exists()
    finally:
        other.unlink()


def test_zero_shares_no_gpu(project: Project):
    project.set_gpus(1)
    assert "1 visible GPU" in refused(project, "zero2", SHARE_GPUS="1", NPROC_PER_NODE="2")
    torchrun, _, flags = launched(project, "zero2", SHARE_GPUS="1")
    assert (torchrun["--nproc_per_node"], flags["--distributed-backend"]) == ("1", "nccl")


def test_refuses_cuda_without_a_gpu(project: Project):
    assert "0 visible GPU" in refused(project, "ddp", DEVICE="cuda")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_refuses_damaged_data(project: Project, suffix: str, damage: str):
    path = project.data_prefix.with_suffix(suffix)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-3])
    message = refused(project, "ddp")
    assert path.name in message
    assert "prepare_xsum_megatron.sh" in message


def test_refuses_a_missing_checkout(project: Project):
    message = refused(project, "ddp", MEGATRON_DIR="/nowhere/at all")
    assert "no Megatron-DeepSpeed checkout at /nowhere/at all" in message
    assert "setup_megatron.sh" in message


def test_refuses_a_checkout_that_is_not_patched_as_declared(project: Project):
    (project.engine / "megatron" / "training.py").write_text("patched = False\n")
    message = refused(project, "ddp")
    assert "not patched" in message
    assert "setup_megatron.sh" in message


def test_the_fixes_alone_are_enough_on_cuda_and_not_on_cpu(project: Project):
    (project.engine / "megatron" / "training.py").write_text("patched = 'by hand'\n")
    project.record_engine("megatron_t5_fixes")
    assert "CPU needs the whole series" in refused(project, "ddp")
    project.set_gpus(2)
    _, _, engine = launched(project, "ddp")
    assert "--layout-independent-init" not in engine


@pytest.mark.parametrize("version", ["0.17.6", "0.18.0", "0.18.1", "0.18.2", "0.18.2+cu124"])
def test_refuses_zero2_with_accumulation_on_an_affected_deepspeed(project: Project, version: str):
    project.install("deepspeed", version)
    assert "only the last of the 8 micro-batches" in refused(project, "zero2")
    launched(project, "zero2", MICRO_BATCH_SIZE="8")
    launched(project, "zero1")


@pytest.mark.parametrize("version", ["0.17.5", "0.18.3", "0.18.20", "0.19.8"])
def test_accepts_zero2_on_a_sound_deepspeed(project: Project, version: str):
    project.install("deepspeed", version)
    launched(project, "zero2")


def test_refuses_to_overwrite_a_finished_run(project: Project):
    assert project.launch("ddp").returncode == 0
    (project.stubs / "arguments").unlink()
    result = project.launch("ddp")
    assert result.returncode == 2
    assert "finished run" in result.stderr
    assert not project.was_started()
    assert project.launch("ddp", OUTPUT_DIR="another").returncode == 0


def test_a_failed_run_may_be_repeated_and_keeps_its_log(project: Project):
    result = project.launch("ddp", STUB_STATUS="7")
    assert result.returncode == 1
    assert "crashed: torchrun ended with exit status 7" in result.stderr
    assert project.launch("ddp").returncode == 0
    run = project.root / "outputs" / "ddp"
    assert "stub torchrun output" in (run / "node0.log.1").read_text()
    assert "stub torchrun output" in (run / "node0.log").read_text()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((run / "node0.json.1").read_text())["status"] == "crashed"
    assert json.loads((run / "run.json").read_text())["status"] == "complete"


@pytest.mark.parametrize("name", ["iter_{:07d}", "global_step{}"])
def test_checkpoints_are_never_overwritten(project: Project, name: str):
    for iteration in (8, 40, 9):
        (project.root / "outputs" / "ddp" / "checkpoints" / name.format(iteration)).mkdir(parents=True)
    result = project.launch("ddp")
    assert result.returncode == 2
    assert "holds checkpoints of an earlier run (up to iteration 40)" in result.stderr
    assert not project.was_started()


def test_refuses_a_run_directory_that_cannot_be_written(project: Project):
    (project.root / "file").write_text("")
    assert "cannot write to the run directory" in refused(project, "ddp", OUTPUT_DIR="file/run")


# ---- dry run and help ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dry_run_prints_what_a_run_does(project: Project, tmp_path: Path, strategy: str):
    printed = project.launch(strategy, "--dry-run")
    assert printed.returncode == 0, printed.stderr
    assert not project.was_started()
    assert not (project.root / "outputs").exists()

    pasted = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", printed.stdout],
        env=project.environment,
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert pasted.returncode == 0, pasted.stderr
    by_hand = (project.recorded_arguments(), project.recorded_environment())
    config = ds_config(project, strategy) if strategy in ZERO_STAGES else None

    assert project.launch(strategy).returncode == 0
    changes_by_nature = {"T5_RUN_MARK", "PWD", "OLDPWD", "SHLVL", "_"}
    assert project.recorded_arguments() == by_hand[0]
    environment = project.recorded_environment()
    assert {k: v for k, v in environment.items() if k not in changes_by_nature} == {
        k: v for k, v in by_hand[1].items() if k not in changes_by_nature
    }
    if config:
        assert ds_config(project, strategy) == config


def test_dry_run_needs_no_engine_data_or_gpu_and_says_what_is_missing(project: Project):
    project.data_prefix.with_suffix(".bin").unlink()
    result = project.launch("tensor", "--dry-run", MEGATRON_DIR="/nowhere", DEVICE="cuda")
    assert result.returncode == 0
    assert "--distributed-backend nccl" in result.stdout
    missing = [line for line in result.stderr.splitlines() if line.startswith("a real run would stop here: ")]
    assert len(missing) == 3, result.stderr


def test_dry_run_still_refuses_settings_that_cannot_work(project: Project):
    result = project.launch("tensor", "--dry-run", GLOBAL_BATCH_SIZE="7", MICRO_BATCH_SIZE="2")
    assert result.returncode == 2
    assert result.stdout == ""


def test_dry_run_output_is_quoted_for_the_shell(project: Project):
    result = project.launch("ddp", "--dry-run", WANDB_RUN_NAME="it's $HOME; `id`")
    command = result.stdout.splitlines()[-1]
    assert "it's $HOME; `id`" in shlex.split(command)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_setting(project: Project, option: str):
    result = project.launch("zero2", option, MODEL_PRESET="large")
    assert result.returncode == 0
    for name, _, _ in OVERRIDES:
        assert f"\n  {name} " in result.stdout
    assert "29802" in result.stdout


# ---- ending --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_process(project: Project, number: signal.Signals):
    launcher = project.start_sleeping()
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert f"{number.name.removeprefix('SIG')} received" in errors
    assert processes_with(f"STUB_DIR={project.stubs}") == []
    assert (project.root / "outputs" / "ddp" / "node0.status").read_text().startswith("cancelled ")


def test_a_worker_that_ignores_term_is_killed_before_slurm_would(project: Project):
    launcher = project.start_sleeping(STUB_STUBBORN="1")
    started = time.monotonic()
    launcher.terminate()
    launcher.communicate(timeout=30)
    assert time.monotonic() - started < 25, "SLURM's KillWait is 30 s"
    assert processes_with(f"STUB_DIR={project.stubs}") == []


def test_what_had_to_be_killed_is_waited_for(tmp_path: Path):
    """A process goes some time after its KILL; what follows counts on its memory and ports."""
    script = """
        source "$1"
        signal_marked() { echo "$1" >>signals; }
        marked_processes() { echo x >>looks && (($(wc -l <looks) > 8)) || echo 4711; }
        end_marked a-mark 1
    """
    command = ["bash", "-euo", "pipefail", "-c", script, "bash", str(REPO_ROOT / "scripts" / "common.sh")]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "signals").read_text().split() == ["TERM", "CONT", "KILL"]
    # Five looks in the second that TERM has, and after KILL until nothing is found.
    assert (tmp_path / "looks").read_text().count("x") == 9


def test_workers_end_when_torchrun_is_killed(project: Project):
    launcher = project.start_sleeping()
    os.kill(int((project.stubs / "pid").read_text()), signal.SIGKILL)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert processes_with(f"STUB_DIR={project.stubs}") == []
    assert "crashed torchrun was killed" in (project.root / "outputs" / "ddp" / "node0.status").read_text()


def test_workers_end_and_the_record_says_why_when_the_launcher_is_killed(project: Project):
    launcher = project.start_sleeping()
    launcher.kill()
    launcher.communicate(timeout=30)
    wait_for(lambda: processes_with(f"STUB_DIR={project.stubs}") == [])
    record = json.loads((project.root / "outputs" / "ddp" / "run.json").read_text())
    assert (record["status"], record["reason"]) == ("crashed", "the launcher was killed before its run ended")


def test_a_second_launcher_does_not_join_a_run_that_goes_on(project: Project):
    launcher = project.start_sleeping()
    try:
        result = project.launch("ddp")
        assert result.returncode == 2
        assert "a run is going on" in result.stderr
    finally:
        launcher.terminate()
        launcher.communicate(timeout=30)
