"""The launchers as programs: hosts and ranks, what reaches torchrun, the run directory, and every process ended."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import REPO_ROOT, Project, processes_with

from t5bench.plan.help import HELP_GROUPS
from t5bench.record.plan import Plan, by_name
from t5bench.record.settings import BY_NAME, TABLE

# 127.0.0.x are all this machine, so that several "nodes" can be named without any resolver.
TWO_HOSTS = "127.0.0.1 127.0.0.2"
ELSEWHERE = "192.0.2.7"  # an address that is nobody's (RFC 5737)
SCONTROL_STUB = """#!/usr/bin/env bash
[[ $* == "show hostnames 127.0.0.[1-2]" ]] && printf '127.0.0.1\\n127.0.0.2\\n'
"""


def planned(project: Project, strategy: str, *arguments: str, **environment: str | None) -> dict:
    """The plan as the launcher prints it, valid or not."""
    result = project.launch(strategy, "--dry-run=json", *arguments, **environment)
    assert result.stdout, result.stderr
    plan = json.loads(result.stdout)
    assert result.returncode == (2 if any(o["fatal"] for o in plan["obstacles"]) else 0)
    return plan


def test_the_plan_goes_to_a_file_and_notes_through_a_pipe(tmp_path: Path):
    words = [sys.executable, "-m", "t5bench.plan", str(tmp_path), "script-help", "quickstart"]
    with (tmp_path / "answer").open("w") as file:
        result = subprocess.run(words, cwd=REPO_ROOT, stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "answer").read_text()


def test_a_python_without_torch_is_named(project: Project, tmp_path: Path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True)
    obstacles = planned(project, "ddp", PYTHON=str(tmp_path / "empty" / "bin" / "python"), PYTHONPATH=None)["obstacles"]
    assert obstacles[0]["code"] == "no-torch"


SLURM = {
    "SLURM_JOB_NODELIST": "127.0.0.8,127.0.0.9",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
}
BRACKETS = {"SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_NODEID": "1"}
PART = {"SLURM_STEP_NODELIST": "127.0.0.3,127.0.0.4", "SLURM_STEP_NUM_NODES": "2"}  # srun --nodes=2
OWN_NAME = socket.gethostname()
OWN = f"{ELSEWHERE} {OWN_NAME}"


@pytest.mark.parametrize(
    ("strategy", "arguments", "environment", "expected"),
    [
        # Arguments override the environment, and this overrides SLURM.
        ("ddp", ["127.0.0.1", "1"], SLURM | {"HOSTS": TWO_HOSTS, "NODE_RANK": "0"}, ("127.0.0.1", 2, 1)),
        ("ddp", [], SLURM | {"HOSTS": TWO_HOSTS, "NODE_RANK": "0"}, ("127.0.0.1", 2, 0)),
        ("ddp", [], SLURM, ("127.0.0.8", 2, 1)),
        ("ddp", [], SLURM | {"HOSTS": " "}, ("127.0.0.8", 2, 1)),
        ("ddp", [], BRACKETS, ("127.0.0.1", 2, 1)),
        ("ddp", [], BRACKETS | PART, ("127.0.0.3", 2, 1)),
        ("ddp", [], {"HOSTS": OWN, "MASTER_ADDR": ELSEWHERE}, (ELSEWHERE, 2, 1)),
        ("ddp", [ELSEWHERE, "1"], {}, (ELSEWHERE, 2, 1)),
        ("ddp", ["localhost", "0"], {}, ("localhost", 1, 0)),
        ("ddp", ["LocalHost.", "0"], {}, ("LocalHost", 1, 0)),
        ("ddp", [], {"HOSTS": f"{OWN_NAME.upper()}. {ELSEWHERE}"}, (OWN_NAME.upper(), 2, 0)),
        # As the README has the hybrid: HOSTS still holds the two nodes that everything else runs on.
        ("hybrid", ["127.0.0.1", "3"], {"HOSTS": TWO_HOSTS, "NNODES": "4"}, ("127.0.0.1", 4, 3)),
    ],
)
def test_where_the_nodes_come_from(project: Project, strategy, arguments, environment, expected):
    """The master, the number of nodes and the node's rank."""
    project.add_stub("scontrol", SCONTROL_STUB)
    plan = planned(project, strategy, *arguments, **environment)
    assert plan["obstacles"] == []
    torchrun = by_name(plan["command"][3 : plan["command"].index("--rdzv_conf")])
    assert (torchrun["--master_addr"], int(torchrun["--node_rank"])) == (plan["master_address"], plan["node"])
    assert (plan["master_address"], plan["layout"]["nnodes"], plan["node"]) == expected


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "found"),
    [
        (["127.0.0.1", "one"], {"HOSTS": TWO_HOSTS}, "node-rank", "found 'one'"),
        (["127.0.0.1", "2"], {"HOSTS": TWO_HOSTS}, "node-rank", "rank is 2 but there are 2 nodes"),
        (["127.0.0.1", "1"], {"HOSTS": f"127.0.0.1 {ELSEWHERE}"}, "rank-of-another-host", "rank 1 belongs to 192"),
        ([], {"HOSTS": f"localhost {ELSEWHERE}"}, "loopback-master", "the master 'localhost' is 127.0.0.1 on"),
        (["127.0.0.2", "0"], {"HOSTS": TWO_HOSTS}, "master-is-not-first", "HOSTS begins with 127.0.0.1"),
        (["no-such-host.invalid", "0"], {"NNODES": "2"}, "unknown-master", "no-such-host.invalid' does not resolve"),
        (["a" * 70, "0"], {"NNODES": "2"}, "unknown-master", "does not resolve"),
        ([ELSEWHERE, "0"], {"NNODES": "1"}, "foreign-master", f"not an address of {OWN_NAME}, which is the only node"),
        ([], {"HOSTS": f"{ELSEWHERE} 192.0.2.8"}, "no-node-rank", "Unable to infer NODE_RANK"),
        ([], {"HOSTS": f"{ELSEWHERE} {ELSEWHERE}"}, "host-twice", f"more than once: {ELSEWHERE} and {ELSEWHERE}"),
        ([OWN_NAME, "1"], {"HOSTS": f"{OWN_NAME} {OWN_NAME.upper()}."}, "host-twice", "a node is named more than once"),
        (["node0", "1"], {"HOSTS": "node0 node0.cluster"}, "host-twice", "NPROC_PER_NODE"),
        (["0.0.0.0", "0"], {"NNODES": "2"}, "not-a-host", "0.0.0.0 is an address to listen on"),
        (["0.0.0.0", "0"], {"NNODES": "2"}, "not-a-host", "hostname -I"),
        (["127.0.0.1", "0"], {"HOSTS": "127.0.0.1 ::"}, "not-a-host", ":: is an address to listen on"),
        (["fe80::1", "1"], {"NNODES": "2"}, "not-a-host", "fe80::1 is a link-local address"),
        ([OWN_NAME, "1"], {"NNODES": "2"}, "own-master", f"is this host, {OWN_NAME}, but this is node 1"),
        ([], {"GLOO_SOCKET_IFNAME": "lo,eth77"}, "no-interface", "names 'eth77', but the interfaces"),
        ([], {"GLOO_SOCKET_IFNAME": "^lo"}, "no-interface", "unset the variable"),
        (["0"], {}, "master-is-a-number", "host name, found '0'"),
        ([], {"NNODES": "2"}, "no-master", "no master host is known"),
        ([], {"SLURM_JOB_NODELIST": "node[0-1]"}, "host-name", 'Write HOSTS="node0 node1"'),
        ([], {"HOSTS": "root@node0 root@node1"}, "host-name", 'Write HOSTS="node0 node1"'),
        (["tcp://node0:29500", "1"], {"NNODES": "2"}, "host-name", "it is a URL. Name the host alone: node0"),
    ],
)  # fmt: skip
def test_impossible_places(project: Project, arguments, environment, code, found):
    project.add_stub("scontrol", "#!/bin/sh\nexit 1\n")
    (obstacle,) = planned(project, "ddp", *arguments, **environment)["obstacles"]
    assert obstacle["code"] == code and found in f"{obstacle['found']}. {obstacle['remedy']}"


def test_one_task_of_a_node_launches_and_the_others_end_well(project: Project):
    """srun with four tasks a node is the habit of jobs that start their processes themselves."""
    job = {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2", "SLURM_NODEID": "0", "SLURM_STEP_ID": "0"}
    other = project.launch("ddp", SLURM_LOCALID="1", **job)
    assert other.returncode == 0 and "Task 1 of this node has nothing to do" in other.stderr and not other.stdout
    assert planned(project, "ddp", SLURM_LOCALID="0", **job)["layout"]["nnodes"] == 2


def test_a_batch_script_without_srun_is_refused_at_once(project: Project):
    job = {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}
    alone = project.launch("ddp", **job)
    assert alone.returncode == 2 and "only one of them runs this script" in alone.stderr
    assert "srun --ntasks-per-node=1 bash" in alone.stderr
    # Started by ssh on each node, with a master and a rank; and by srun.
    for arguments, more in ((["127.0.0.1", "0"], {}), ([], {"SLURM_STEP_ID": "0"}), ([], {"SLURM_JOB_NUM_NODES": "1"})):
        assert project.launch("ddp", *arguments, "--dry-run", **(job | more)).returncode == 0, more


def test_a_master_may_be_named_by_another_of_its_addresses(project: Project):
    """HOSTS by names and the master by its address in the fast network, for example."""
    for master, rank, hosts in (
        ("127.0.0.3", "0", f"{OWN_NAME} {ELSEWHERE}"),
        ("192.0.2.77", "1", f"{ELSEWHERE} {OWN_NAME}"),
    ):
        obstacles = planned(project, "ddp", master, rank, HOSTS=hosts)["obstacles"]
        assert "master-is-not-first" not in [each["code"] for each in obstacles], obstacles
    (obstacle,) = planned(project, "ddp", ELSEWHERE, "0", HOSTS=f"{OWN_NAME} {ELSEWHERE}")["obstacles"]
    assert obstacle["code"] == "master-is-not-first"


def test_the_interfaces_of_nccl(project: Project):
    """It reads beginnings of names, whole names after =, and names to leave out after ^."""
    for names, is_wrong in (("l", False), ("^docker", False), ("=lo", False), ("=l", True), ("eth77", True)):
        obstacles = planned(project, "ddp", "--", DEVICE="cuda", NCCL_SOCKET_IFNAME=names)["obstacles"]
        assert ("no-interface" in [each["code"] for each in obstacles]) == is_wrong, names
    # Without GPUs nobody reads it.
    assert not planned(project, "ddp", NCCL_SOCKET_IFNAME="eth77")["obstacles"]


def test_what_may_be_meant_is_only_said(project: Project):
    loop = project.launch("ddp", "127.0.0.1", "1", "--dry-run", NNODES="2")
    assert loop.returncode == 0 and "nodes on other machines do not reach it" in loop.stderr
    rank = project.launch("ddp", ELSEWHERE, "0", "--dry-run", NNODES="2")
    assert rank.returncode == 0 and "but this is node 0. Is the node rank right?" in rank.stderr
    link = project.launch("ddp", "fe80::1%lo", "1", "--dry-run", NNODES="2")
    assert "only nodes on the same cable or switch reach it" in link.stderr
    job = {"SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_JOB_NUM_NODES": "1", "SLURM_HET_SIZE": "2"}
    components = project.launch("ddp", "--dry-run", **job)
    assert "This SLURM job has 2 components, and this run uses the nodes of one: 127.0.0.1." in components.stderr


LONG = "x" * 300
NO_DIRECTORIES = {
    "loop": "Too many levels of symbolic links",
    "loop/run": "Too many levels of symbolic links",
    "file": "is not a directory",
    "file/deep/run": "file is not a directory",
    "nowhere": "does not exist",
    "pipe": "is not a directory",
    LONG: "OUTPUT_DIR is too long",
    f"absent/{LONG}": "OUTPUT_DIR is too long",
    "d/" * 2100: "OUTPUT_DIR is too long",
}


@pytest.mark.parametrize("place", NO_DIRECTORIES, ids=lambda place: place[:20])
@pytest.mark.parametrize("settings", [{}, {"RESUME": "1"}, {"EVAL_ONLY": "1", "EVAL_ITERS": "1"}], ids=str)
def test_where_no_run_directory_can_be(project: Project, place: str, settings: dict[str, str]):
    (project.root / "loop").symlink_to(project.root / "loop")
    (project.root / "nowhere").symlink_to(project.root / "absent" / "deep")
    (project.root / "file").write_text("something else")
    os.mkfifo(project.root / "pipe")
    for option in ([], ["--dry-run"]):
        result = project.launch("ddp", *option, OUTPUT_DIR=str(project.root / place), **settings)
        assert NO_DIRECTORIES[place] in result.stderr and "Traceback" not in result.stderr
        assert result.returncode == 2 or option
    assert not project.was_started() and (project.root / "file").read_text() == "something else"


def test_other_paths_that_are_too_long(project: Project):
    for name in ("MEGATRON_DATA_DIR", "MEGATRON_DIR"):
        assert f"{name} is too long for a path" in project.launch("ddp", **{name: LONG}).stderr
    assert project.launch("ddp", TOKENIZER_MODEL=LONG).returncode == 0  # it may be a name on the hub


def test_a_port_in_use(project: Project):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        result = project.launch("ddp", MASTER_PORT=port)
        assert result.returncode == 2 and f"error: port {port} is already in use on this node" in result.stderr
        assert result.stderr.count("error: ") == 1 and not project.was_started()
        assert not (project.root / "outputs").exists()
        # It is the master's port, not this node's.
        assert planned(project, "ddp", "127.0.0.1", "1", HOSTS=TWO_HOSTS, MASTER_PORT=port)["obstacles"] == []


def test_one_plan_names_every_invalid_setting(project: Project):
    wrong = {
        "TRAIN_ITERS": ("many", "must be a whole number of at least 1, found 'many'"),
        "DECODER_NUM_LAYERS": ("10001", "must be at most 10000"),  # the cost model lists them one by one
        "HIDDEN_SIZE": ("a[$(touch /tmp/never)]", "must be a whole number"),
        "LR": ("-1", "must be a number of at least 0"),
        "MIN_LR": ("1e999", "must be at most 1e+38"),
        "DISTRIBUTED_TIMEOUT_MINUTES": ("9" * 18, "must be at most 999999999"),
        "PRECISION_FLAG": ("--bf8", "is '--bf8'"),
        "OUTPUT_DIR": ("", "is empty"),
        "WANDB_RUN_NAME": ("\udcff", "is not UTF-8 text, found '\\udcff'"),
    }
    obstacles = planned(project, "ddp", **{name: value for name, (value, _) in wrong.items()})["obstacles"]
    assert {o["code"] for o in obstacles} == {"setting-value"}
    found = {o["found"].partition(" ")[0]: o["found"].partition(" ")[2] for o in obstacles}
    assert found.keys() == wrong.keys() and all(part in found[name] for name, (_, part) in wrong.items())


# Every setting that an engine or torchrun sees, with a value that is not its default.
CHANGED = {
    "TRAIN_ITERS": "50", "GLOBAL_BATCH_SIZE": "64", "MICRO_BATCH_SIZE": "4", "ENCODER_NUM_LAYERS": "6",
    "DECODER_NUM_LAYERS": "3", "HIDDEN_SIZE": "512", "NUM_ATTENTION_HEADS": "8", "FFN_HIDDEN_SIZE": "1000",
    "ENCODER_SEQ_LENGTH": "256", "DECODER_SEQ_LENGTH": "100", "LR": "3e-4", "MIN_LR": "1e-6", "LR_WARMUP_ITERS": "10",
    "WEIGHT_DECAY": "0.1", "CLIP_GRAD": "3.5", "DROPOUT": "0.2", "SEED": "7", "LOG_INTERVAL": "5",
    "EVAL_INTERVAL": "100", "EVAL_ITERS": "10", "DISTRIBUTED_TIMEOUT_MINUTES": "3", "PRECISION_FLAG": "--fp16",
}  # fmt: skip


def test_every_setting_reaches_the_engine_and_what_stands_after_the_dashes_comes_last(project: Project):
    extra = ["--some-switch", "--some-name", "a b", "--seed", "8"]
    others = {"WANDB_PROJECT": "my project", "WANDB_RUN_NAME": "it's $HOME; `id`", "TOKENIZER_MODEL": "a/model"}
    others |= {"SAVE_INTERVAL": "25", "MASTER_PORT": "29900", "RENDEZVOUS_TIMEOUT": "30", "OUTPUT_DIR": "here"}
    paths = f"{project.stubs / 'site'}:/elsewhere"
    result = project.launch("zero1", "--", *extra, **CHANGED, **others, PYTHONPATH=paths)
    assert result.returncode == 0, result.stderr
    environment = project.recorded_environment()
    assert {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}.items() <= environment.items()
    engine, *rest = environment["PYTHONPATH"].split(":")
    assert Path(engine).resolve() == project.engine and rest == [str(project.root), *paths.split(":")]
    words = project.recorded_arguments()
    given = by_name(words)
    plan = Plan.read(json.loads((project.root / "here" / "run.json").read_text())["plan"])
    for name, value in (CHANGED | {"SEED": "8"}).items():
        assert plan.value(name) == value
        for argument in BY_NAME[name].arguments:
            assert given[argument] == value, name
    assert "--fp16" in words
    assert words[-len(extra) :] == extra
    assert plan.command[3:] == words and plan.command[1:3] == ["-m", "torch.distributed.run"]
    # A link leads to an environment whose path has a blank.
    assert Path(plan.command[0]).parent.resolve() == Path(sys.executable).parent.resolve()
    wanted = {"--wandb-project": "my project", "--wandb-exp-name": "it's $HOME; `id`", "--tokenizer-model": "a/model"}
    wanted |= {"--save-interval": "25", "--save": str(project.root / "here" / "checkpoints"), "--master_port": "29900"}
    assert "timeout=30" in words
    wanted |= {"--initial-loss-scale": "65536"}
    assert {name: given.get(name) for name in wanted} == wanted


def test_both_engines_get_the_same_arguments_and_presets_are_defaults(project: Project):
    changes = {"MODEL_PRESET": "small", "DECODER_NUM_LAYERS": "4", "GPUS_PER_NODE": "4"}
    megatron = planned(project, "tensor", **changes)
    native = planned(project, "tensor", ENGINE="native", MEGATRON_DIR="/nowhere", **changes)
    assert native["obstacles"] == [] and native["arguments"] == megatron["arguments"]
    assert str(project.root / "native" / "pretrain_t5.py") in native["command"]
    names = ("HIDDEN_SIZE", "ENCODER_NUM_LAYERS", "DECODER_NUM_LAYERS")
    assert [native["settings_by_role"]["model"][name] for name in names] == ["512", "6", "4"]
    assert native["layout"]["nproc_per_node"] == 4


def test_wrong_use(project: Project):
    for arguments, found in ((["a", "0", "1"], "at most two arguments"), (["--rank"], "unknown option '--rank'")):
        result = project.launch("ddp", *arguments)
        assert result.returncode == 2 and found in result.stderr and not project.was_started()


def test_help_has_every_setting_by_role_at_most_100_columns_wide(project: Project):
    without_help = ("common.sh", "megatron_common.sh", "check_cluster.sh")
    for script in {path.name for path in project.root.glob("scripts/*.sh")} - {*without_help}:
        command = ["bash", project.script(script), "--help"]
        shown = subprocess.run(command, env=project.environment, capture_output=True, text=True, check=True).stdout
        assert f"Usage: bash scripts/{script} " in shown
        assert [line for line in shown.splitlines() if len(line) > 100] == [], script
    lines = project.launch("zero2", "--help", "all").stdout.splitlines()
    assert settings_in(lines) == Plan.read(planned(project, "zero2")).settings.keys()
    assert any(line.split()[:2] == ["MASTER_PORT", "29802"] for line in lines)
    assert lines.index("Monitoring, checkpoints, timeouts") < lines.index("Names, and Weights & Biases")
    assert [line for line in lines if len(line) > 100] == []


def settings_in(lines: Sequence[str]) -> set[str]:
    return {line.split()[0] for line in lines if line.startswith("  ") and line[2].isupper()}


def test_help_shows_the_settings_that_a_strategy_has_in_three_groups(project: Project):
    shown = {}
    for name in ("ddp", "zero2", "hybrid", "fsdp2"):
        text = project.launch(name, "--help").stdout
        assert all(f"\n{heading}\n" in text for heading in HELP_GROUPS)
        assert text.count("\n") < 78
        shown[name] = settings_in(text.splitlines())
    assert "MICRO_BATCH_SIZE" in set.intersection(*shown.values())
    tensor = {"TENSOR_PARALLEL_SIZE"}
    assert shown["zero2"] - shown["ddp"] == tensor | {"ZERO_REDUCE_ONCE", "GRADIENT_REDUCTION", "OVERLAP_COMM"}
    assert shown["fsdp2"] - shown["ddp"] == tensor | {"FSDP_KEEP_PARAMETERS", "FSDP_SHARD_SIZE"}
    pipeline = {"PIPELINE_PARALLEL_SIZE", "PIPELINE_SCHEDULE", "VIRTUAL_PIPELINE_STAGES"}
    assert shown["hybrid"] - shown["ddp"] == tensor | pipeline | {"SEQUENCE_PARALLEL"}


def test_every_setting_of_a_method_is_in_the_short_help():
    """A new one belongs into HELP_GROUPS; a strategy that lacks it leaves it out."""
    shown = {name for names in HELP_GROUPS.values() for name in names}
    methods = {entry.name for entry in TABLE if entry.role == "method"}
    assert methods - shown == {"CUDA_DEVICE_MAX_CONNECTIONS"}  # the engines', not a strategy's
    assert shown <= BY_NAME.keys()


def test_without_a_key_wandb_is_offline_and_with_one_the_key_is_nowhere_on_disk(project: Project):
    assert "wandb sync" in project.launch("ddp", OUTPUT_DIR="offline").stderr
    assert project.recorded_environment()["WANDB_MODE"] == "offline"
    project.launch("ddp", WANDB_API_KEY="s3cr3t" * 6)
    assert project.recorded_environment()["WANDB_MODE"] == "online"
    files = [path for path in (project.root / "outputs").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]
    arguments = planned(project, "ddp", WANDB_MODE="disabled", OUTPUT_DIR="disabled")["arguments"]
    assert not [word for words in arguments.values() for word in words if word.startswith("--wandb")]


@pytest.mark.parametrize("strategy", ["zero3_offload", "hybrid"])
def test_a_dry_run_prints_what_a_run_does(project: Project, tmp_path: Path, strategy: str):
    project.environment["WANDB_RUN_NAME"] = "it's $HOME; `id`"
    inside = {"cwd": project.root / "scripts"}
    printed = project.launch(strategy, "--dry-run", "--", "--some-name", "a b", **inside)
    assert printed.returncode == 0, printed.stderr
    assert not project.was_started() and not (project.root / "outputs").exists()
    run = project.root / "outputs" / strategy

    def left() -> tuple:
        config = run / "ds_config.json"
        environment = project.recorded_environment()
        by_nature = {"T5_RUN_MARK", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_"}
        return (
            project.recorded_arguments(),
            {name: value for name, value in environment.items() if name not in by_nature},
            json.loads(config.read_text()) if config.exists() else None,
        )

    pasted = ["bash", "-euo", "pipefail", "-c", printed.stdout]
    subprocess.run(pasted, env=project.environment, cwd=tmp_path, capture_output=True, check=True)
    by_hand = left()
    # The launcher's own path is in the environment of what it starts, as the printed command says.
    assert project.launch(strategy, "--", "--some-name", "a b", **inside).returncode == 0
    assert left() == by_hand


def test_a_dry_run_needs_no_engine_data_or_gpu_and_says_what_is_missing(project: Project):
    project.data_prefix.with_suffix(".bin").unlink()
    result = project.launch("tensor", "--dry-run", MEGATRON_DIR="/nowhere", DEVICE="cuda")
    assert result.returncode == 0 and "--distributed-backend nccl" in result.stdout
    assert result.stderr.count("A real run would refuse to start:\n") == 1
    assert result.stderr.count("\n  - ") == 3
    refused = project.launch("tensor", "--dry-run", GLOBAL_BATCH_SIZE="7", MICRO_BATCH_SIZE="2")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_nothing_is_overwritten(project: Project):
    assert project.launch("ddp").returncode == 0
    (project.stubs / "arguments").unlink()
    run = project.root / "outputs" / "ddp"
    shutil.copytree(run, run / "evaluation")
    for settings in ({}, {"EVAL_ONLY": "1", "EVAL_ITERS": "1"}):
        assert "finished-run" in [each["code"] for each in planned(project, "ddp", **settings)["obstacles"]]
    for strategy, name in (("zero1", "global_step{}"), ("tensor", "iter_{:07d}")):
        for iteration in (8, 40, 9):
            (project.root / "outputs" / strategy / "checkpoints" / name.format(iteration)).mkdir(parents=True)
        (found,) = planned(project, strategy)["obstacles"]
        assert found["code"] == "earlier-checkpoints" and "up to iteration 40" in found["found"]
    assert project.launch("ddp").returncode == 2
    assert not project.was_started()


def test_a_smoke_run_can_be_followed_by_the_real_one(project: Project):
    """The message names the one command, also when the name that it would give is taken."""
    for attempt, name in enumerate(("ddp-50-iterations", "ddp-50-iterations-2")):
        assert project.launch("ddp", TRAIN_ITERS="50").returncode == 0
        refused = project.launch("ddp")
        kept = project.root / "outputs" / name
        command = re.search("and start this one of 1000: (mv .*), on every node", refused.stderr)
        assert refused.returncode == 2 and command and shlex.split(command[1])[-1] == str(kept), attempt
        subprocess.run(["bash", "-c", command[1]], check=True)
        assert kept.is_dir()
    assert project.launch("ddp").returncode == 0


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("t5bench", "t5bench/__init__.py"),
        ("t5bench/record", "t5bench/record"),
        ("ds_configs",) * 2,
        ("native",) * 2,
        ("packages", "packages/judge/src/training_comparison"),
    ],
)
def test_a_part_of_the_repository_does_not_start(project: Project, part: str, named: str):
    shutil.rmtree(project.root / part)
    result = project.launch("ddp")
    assert result.returncode == 2 and not project.was_started()
    assert f"holds only a part of this repository: {named} is missing" in result.stderr
    assert "Clone or copy the whole repository" in result.stderr


def test_another_node_leaves_a_finished_run_alone(project: Project):
    """It has no part there yet, and would rename the finished run's metrics."""
    assert project.launch("ddp").returncode == 0
    run = project.root / "outputs" / "ddp"
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    nodes = {"HOSTS": TWO_HOSTS, "NODE_RANK": "1", "RENDEZVOUS_TIMEOUT": "5"}
    result = project.launch("ddp", **nodes)
    assert result.returncode == 2 and "already holds a finished run" in result.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_failed_run_may_be_repeated_and_keeps_its_log(project: Project):
    result = project.launch("ddp", STUB_STATUS="7")
    assert result.returncode == 1
    assert "crashed: torchrun ended with exit status 7" in result.stderr
    run = project.root / "outputs" / "ddp"
    (run / "profile.json").write_text("of the failed run")
    assert project.launch("ddp").returncode == 0
    assert (run / "profile.json.1").exists() and not (run / "profile.json").exists()
    assert "stub torchrun output" in (run / "node0.log.1").read_text()
    assert "stub torchrun output" in (run / "node0.log").read_text()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 50
    assert json.loads((run / "node0.json.1").read_text())["status"] == "crashed"
    assert json.loads((run / "run.json").read_text())["status"] == "complete"


def test_a_run_directory_that_cannot_be_written(project: Project):
    result = project.launch("ddp", OUTPUT_DIR=f"{project.script('common.sh')}/run")
    assert result.returncode == 2 and "cannot write to the run directory" in result.stderr
    assert not project.was_started()


@pytest.mark.parametrize(
    ("number", "is_ignored"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.nightly),  # which takes 15 s
    ],
)
def test_a_signal_ends_every_process(project: Project, number: signal.Signals, is_ignored: bool):
    """Also a worker that ignores TERM, before SLURM would kill it: its KillWait is 30 s."""
    launcher = project.start_sleeping(STUB_STUBBORN="1" * is_ignored)
    started = time.monotonic()
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert time.monotonic() - started < 25
    assert launcher.returncode == 128 + number
    assert f"{number.name.removeprefix('SIG')} received" in errors
    assert processes_with(f"STUB_DIR={project.stubs}") == []
    assert (project.root / "outputs" / "ddp" / "node0.status").read_text().startswith("cancelled ")


def test_a_ctrl_c_on_the_terminal_ends_every_process(project: Project):
    """It reaches the whole process group: the launcher, what ends the others, and whoever reads the output."""
    launcher = project.start_sleeping()
    while launcher.poll() is None:  # like a key that is held down
        os.killpg(launcher.pid, signal.SIGINT)
        time.sleep(0.01)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert processes_with(f"STUB_DIR={project.stubs}") == []


def test_when_torchrun_is_killed_the_others_end_and_the_record_says_why(project: Project):
    launcher = project.start_sleeping()
    os.kill(int((project.stubs / "pid").read_text()), signal.SIGKILL)
    launcher.communicate(timeout=30)
    assert processes_with(f"STUB_DIR={project.stubs}") == []
    record = json.loads((project.root / "outputs" / "ddp" / "run.json").read_text())
    assert (record["status"], record["reason"]) == ("crashed", "torchrun was killed (SIGKILL)")


def test_a_second_launcher_does_not_join_a_run_in_progress(project: Project):
    launcher = project.start_sleeping()
    try:
        assert planned(project, "ddp")["obstacles"][0]["code"] == "running"
        assert project.launch("ddp").returncode == 2
    finally:
        launcher.terminate()
        launcher.communicate(timeout=30)


def test_a_lock_that_nobody_holds(project: Project):
    """PyTorch waits forever for the lock of a compilation that was killed; one that is held or new may be in use. Only
    what the run compiles matters: on a CPU neither fused_adam nor the engine's kernels, and DDP nothing."""
    extensions = project.root / "extensions" / "py312_cu130"
    killed = extensions / "cpu_adam" / "lock"
    held = extensions / "deepspeed_shm_comm" / "lock"
    of_others = [extensions / "fused_adam" / "lock"]
    of_others.append(project.engine / "megatron" / "fused_kernels" / "build" / "sm_90" / "lock")
    for lock in (killed, held, *of_others):
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - 3600,) * 2)
    here = {"TORCH_EXTENSIONS_DIR": str(project.root / "extensions")}
    with held.open():
        result = project.launch("zero3_offload", **here)
        assert result.returncode == 2 and f"rm '{killed}'" in result.stderr
        assert result.stderr.count("was left by a compilation that was killed") == 1
    for strategy, stale in (("zero3_offload", {killed, held}), ("zero2", {held}), ("ddp", set())):
        found = [each for each in planned(project, strategy, **here)["obstacles"] if each["code"] == "stale-lock"]
        named = {Path(obstacle["remedy"].split("'")[1]).resolve() for obstacle in found}
        assert named == {lock.resolve() for lock in stale}, strategy
    killed.unlink()
    held.touch()
    result = project.launch("zero1", **here)
    assert result.returncode == 0 and f"waits as long as {held} exists" in result.stderr


def test_planning_imports_no_package(project: Project):
    """A launch must not be slow where the disk's cache is cold, and a dry run needs no installation."""
    for name in ("torch", "numpy", "msgspec", "transformers", "sentencepiece"):
        (project.stubs / "site" / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    assert project.launch("zero1", "--dry-run").returncode == 0


@pytest.mark.parametrize(("sink", "said"), [("| true", ""), (">/dev/full", "No space left on device")])
def test_nobody_reads_what_a_command_prints(sink: str, said: str):
    for printing in ("plan --device a100 --gpus 64", "strategies"):
        command = ["bash", "-c", f"{shlex.quote(sys.executable)} -m t5bench {printing} {sink}"]
        result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
        assert said in result.stderr and "Traceback" not in result.stderr
        assert result.returncode == (2 if said else 0)
