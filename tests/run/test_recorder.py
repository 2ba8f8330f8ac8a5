"""A node's record from its output: the recorder as a process, as the launchers start it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from made_runs import made_plan
from support import MEMORY, Project, record, wait_for
from support import engine_output as output

from t5bench import Problem
from t5bench.control_groups import refused_starts
from t5bench.record import machine as environment
from t5bench.record.files import RecordError
from t5bench.record.plan import FORMAT
from t5bench.record.reader import read_samples
from t5bench.record.records import load
from t5bench.record.status import Cause, Status, Strength, cause_of_exception
from t5bench.run import sampler
from t5bench.run.ending import Ending, KernelCounts
from t5bench.run.output import OPEN_SECONDS, Output, pass_on


def part_of(directory: Path, node: int = 0) -> dict:
    return json.loads((directory / f"node{node}.json").read_text())


def test_a_complete_run(tmp_path: Path):
    text = "starting\n" + output(3) + "no newline at the end"
    result = record(tmp_path, text, TRAIN_ITERS="3")
    assert (result.returncode, result.stdout.decode()) == (0, text), result.stderr
    log = (tmp_path / "node0.log").read_text().splitlines()
    assert len(log) == 6
    assert all(re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in log)
    run = load(tmp_path)
    assert (run.status, run.reason, run.strategy, run.world_size) == ("complete", "", "ddp", 1)
    assert [(line.iteration, line.lm_loss) for line in run.iterations] == [(1, 8.0), (2, 8.0), (3, 8.0)]
    assert run.iterations[0].time is not None and run.peak_memory[0].host_mib == 562.4
    assert json.loads((tmp_path / "run.json").read_text()) == run.record
    assert (tmp_path / "node0.status").read_text().split() == ["complete"]
    part = part_of(tmp_path)
    assert part["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert part["cpu"]["cores"] >= 1 and part["started"] < part["ended"]
    samples = read_samples(tmp_path / "node0.samples.jsonl")
    assert len(samples) >= 2 and samples[0]["network"]["lo"]["sent"] >= 0


OTHER_LEFT = """Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 5)
"""


def no_guard(*raised: tuple[int, BaseException]) -> SimpleNamespace:
    """A guard that ended nothing, of workers that reported these exceptions: rank and exception."""
    reports = [SimpleNamespace(cause=cause_of_exception(error, rank), fields=dict) for rank, error in raised]
    reader = SimpleNamespace(read=lambda: reports)
    return SimpleNamespace(cause=None, stacks=SimpleNamespace(stopped=dict), reports=reader)


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:1")


def said(directory: Path, *blocks: bytes) -> Output:
    found = Output(directory / "log", directory / "metrics.jsonl", [])
    for block in blocks:
        found.take(block, 1e9)
    found.end(1e9)
    return found


@pytest.mark.parametrize(
    ("text", "raised", "end", "status", "reason", "code", "strength"),
    [
        (output(3), [], "0 ", "complete", "", 0, None),
        (output(2), [], "0 ", "incomplete", "it ended after iteration 2 of 3", 3, 2),
        (output(3, ranks=()), [], "0 ", "incomplete", "rank 0 exited before the last iteration", 3, 2),
        (output(3, loss="NAN"), [], "0 ", "diverged", "the loss is not a number at iteration 1", 4, 3),
        (output(3, loss="inf"), [(0, AssertionError())], "1 ", "diverged", "the loss is not a number", 4, 3),
        (output(2), [(0, KeyError("text"))], "1 ", "crashed", "rank 0: KeyError: 'text'", 1, 2),
        # The earliest of the strongest, not what is printed: this one was handled.
        ("ValueError: handled\n", [(1, KeyError("text")), (0, CLOSED)], "1 ", "crashed", "rank 1: KeyError", 1, 2),
        ("", [(0, CLOSED)], "1 ", "network", "connection to another process was lost", 7, 0),
        (OTHER_LEFT, [(1, CLOSED)], "1 ", "incomplete", "rank 0 exited before the last iteration", 3, 2),
        (OTHER_LEFT + MEMORY.format(0), [(1, CLOSED)], "1 ", "network", "connection to another process was lost", 7, 0),
        ("", [(0, Problem("no --x", "Read --help"))], "2 ", "configuration", "no --x", 2, 3),
        ("ImportError: no torch\n", [], "1 ", "crashed", "ImportError: no torch", 1, 2),  # torchrun's own
        (output(2), [], "143 TERM", "cancelled", "", 143, None),
        (output(2), [], "130 INT", "cancelled", "", 130, None),
        (output(2), [], "138 USR1", "cancelled", "", 138, None),
        (output(2), [], "131 QUIT", "cancelled", "", 131, None),
        (output(2), [], "137 ", "crashed", "torchrun was killed (SIGKILL)", 1, 3),
        (output(2), [], "138 ", "crashed", "torchrun was ended by a signal (SIGUSR1)", 1, 3),
        (output(2), [], "9 ", "crashed", "exit status 9 without naming a cause", 1, 0),
    ],
)
def test_how_it_ended(
    tmp_path: Path, text: str, raised: list, end: str, status: str, reason: str, code: int, strength: int | None
):
    """strength: how much the cause explains; what only the recorder sees outweighs the reports of victims elsewhere."""
    status_and_signal = end.split()
    exit_status = int(status_and_signal[0])
    by = status_and_signal[1] if len(status_and_signal) > 1 else None
    plan = made_plan(settings={"TRAIN_ITERS": "3", "LOG_INTERVAL": "1"}, engine="native", world_size=1)
    ending = Ending(plan, said(tmp_path, text.encode()), no_guard(*raised), exit_status, by)
    cause = ending.cause()
    found = cause.ending() if cause else Status("cancelled" if by else "complete")
    assert (found.name, cause and cause.strength) == (status, strength)
    assert reason in found.reason
    assert ending.fields["status"] == status and ending.exit_code(found) == code


def test_the_kernel_refused_to_start_a_process(tmp_path: Path):
    """A library that needs a thread may abort without a word; the kernel counts. What a worker knows is better."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    mounts = "31 1 0:27 / /sys/fs/cgroup/{0} rw - cgroup cgroup rw,{0}\n"
    mounts = (
        mounts.format("pids") + mounts.format("cpu") + "33 1 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    (tmp_path / "proc" / "self" / "mountinfo").write_text(mounts)
    (tmp_path / "proc" / "self" / "cgroup").write_text("5:pids:/job/step\n3:cpu,cpuacct:/job\n0::/other\n")
    for folder, count in (("pids/job/step", 2), ("pids/job", 1), ("unified/other", 4), ("cpu/job", 8)):
        group = tmp_path / "sys" / "fs" / "cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / "pids.events").write_text(f"max {count}\n")
    assert refused_starts(tmp_path) == 7
    for raised, reason in (((), "the limit on processes or threads"), ([(0, MemoryError())], "the host's memory")):
        cause = Ending(made_plan(), said(tmp_path), no_guard(*raised), 1, None, KernelCounts(refused_starts=1)).cause()
        assert cause and reason in cause.reason


EVALUATED = MEMORY.format(0) + " validation loss at iteration {} | lm loss value: 8.0E+00 | lm loss PPL: 2.981E+03 |\n"


def test_a_run_that_did_not_load_its_checkpoint(tmp_path: Path):
    """Of iteration 2. An engine that finds none warns, and goes on with random weights to the end."""
    plan = made_plan(settings={"TRAIN_ITERS": "3", "LOG_INTERVAL": "1"}, engine="native", world_size=1, resume_from=2)
    first, second, rest = output(3).split("\n", 2)
    anew = f"{first}\n{second}\n{rest}", f"{second}\n{rest}", EVALUATED.format(0)
    for text in (*anew, rest, EVALUATED.format(2)):
        cause = Ending(plan, said(tmp_path, text.encode()), no_guard(), 0, None).cause()
        begins = cause is not None and cause.reason.startswith("the engine ignored the checkpoint of iteration 2")
        assert begins == (text in anew)


def test_a_run_that_ended_before_the_guard_acted_keeps_its_reason(tmp_path: Path):
    """The other node fails because of it, and the guard hears of that while the launcher is still cleaning up."""
    heard = no_guard()
    heard.cause = Cause.now("network", "stopped because node 0 failed", strength=Strength.VICTIM)
    for exit_status, reason in ((0, "it ended after iteration 0 of 1000"), (1, "stopped because node 0 failed")):
        cause = Ending(made_plan(), said(tmp_path), heard, exit_status, None).cause()
        assert cause and cause.reason == reason


@pytest.mark.parametrize(("end", "status", "reason"), [("TERM", "cancelled", "TERM received"),
                                                       ("USR1", "cancelled", "USR1 received"),
                                                       ("", "crashed", "KeyError: 'text'")])  # fmt: skip
def test_the_end_is_recorded(tmp_path: Path, end: str, status: str, reason: str):
    ends = f"kill -s {end} $PPID; sleep 60" if end else "exit 1"
    result = record(tmp_path, output(2) + "KeyError: 'text'\n" * (status == "crashed"), end=ends)
    assert result.returncode == (128 + signal.Signals[f"SIG{end}"] if end else 1)
    run = load(tmp_path)
    assert (run.status, run.reason) == (status, reason)
    assert (tmp_path / "node0.status").read_text().splitlines()[0] == f"{status} {reason}"


def test_the_last_interval_may_be_shorter_than_the_log_interval(tmp_path: Path):
    lines = output(2, 25).replace(" 2/", "20/")
    assert record(tmp_path, lines, TRAIN_ITERS="25", LOG_INTERVAL="20").returncode == 0


def test_a_node_without_the_last_rank_needs_no_iteration_lines(tmp_path: Path):
    assert record(tmp_path, MEMORY.format(0), nodes=2, TRAIN_ITERS="3").returncode == 0
    assert load(tmp_path).status == "incomplete"  # node 1 left nothing yet
    assert record(tmp_path, output(3, ranks=[1]), nodes=2, node=1, TRAIN_ITERS="3").returncode == 0
    assert load(tmp_path).status == "complete"


def test_slurms_time_limit_is_distinguished_from_a_cancellation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stub = tmp_path / "squeue"
    stub.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for left, status in (("1:45", "timeout"), ("INVALID", "timeout"), ("2:05", None), ("1-01:00:05", None)):
        stub.write_text(f"#!/bin/sh\necho {left}\n")
        cause = Ending(made_plan(), said(tmp_path, output(2).encode()), no_guard(), 143, "TERM").cause()
        assert (cause and cause.status) == status


def test_secrets_are_never_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secrets = {"WANDB_API_KEY": "0123456789abcdef", "HF_TOKEN": "hf_secretsecret", "NCCL_SECRET": "anothersecret"}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    result = record(
        tmp_path, f"login {secrets['HF_TOKEN']}\n" + output(3), WANDB_PROJECT="anothersecret", TRAIN_ITERS="3"
    )
    assert result.returncode == 0, result.stderr
    written = {path: path.read_text() for path in tmp_path.iterdir()} | {"stdout": result.stdout.decode()}
    assert not [place for place, text in written.items() if any(secret in text for secret in secrets.values())]
    assert part_of(tmp_path)["plan"]["settings_by_role"]["label"]["WANDB_PROJECT"] == "***"


def test_a_full_disk_costs_the_record_and_says_so(tmp_path: Path):
    (tmp_path / "node0.log").symlink_to("/dev/full")
    result = record(tmp_path, output(3), TRAIN_ITERS="3")
    assert result.stdout.decode() == output(3)
    assert b"No space left" in result.stderr
    assert result.returncode == 1
    assert load(tmp_path).reason.startswith("the run directory cannot be written: ")


def test_files_that_are_not_a_record_are_named(tmp_path: Path):
    for content, problem in (
        ("", "no record of a run"),
        ('{"format": 2, ', "cannot be read"),
        ('{"format": 1}', str(FORMAT)),
    ):
        (tmp_path / f"node0.{'json' if content else 'txt'}").write_text(content)
        with pytest.raises(RecordError, match=problem):
            load(tmp_path)


def test_the_recorder_ends_although_output_is_held_open(tmp_path: Path):
    """A process that left the run behind, its mark with it, and still has the pipe."""
    start, (reader, writer) = time.monotonic(), os.pipe()
    os.write(writer, output(3).encode())
    shown: list[bytes] = []
    printed = Output(tmp_path / "log", tmp_path / "metrics.jsonl", [])
    pass_on(printed, reader, shown.append, lambda: True, lambda: None)
    assert OPEN_SECONDS <= time.monotonic() - start < OPEN_SECONDS + 20
    assert b"".join(shown).decode() == output(3)
    os.close(writer)
    os.close(reader)


NVIDIA_SMI = """#!/usr/bin/env bash
echo "$*" >>"$STUB_DIR/smi"
case "$*" in
  -L) for gpu in 0 1; do echo "GPU $gpu: NVIDIA Stub (UUID: GPU-$gpu)"; done ;;
  *memory.total*) for gpu in 0 1; do echo "$gpu, NVIDIA Stub, 81559, 570.1, GPU-$gpu"; done ;;
  *) while true; do printf "0, 1000, 93, 300.50, 1980\\n1, 2000, [N/A], 310.00, 1980\\n"; sleep 0.1; done | cut -c1- ;;
esac
"""


def test_a_launchers_record(project: Project):
    """It has every effective setting, and the GPUs, which one nvidia-smi samples.

    A C program (cut) buffers its output into a pipe until 4 KiB are full, unless it is told otherwise.
    """
    project.add_stub("nvidia-smi", NVIDIA_SMI)
    given = {"LR": "0.0003", "WANDB_API_KEY": "0123456789abcdef", "WANDB_RUN_GROUP": "trial", "NCCL_DEBUG": "INFO"}
    result = project.launch("zero2", DEVICE="cuda", SAMPLE_INTERVAL="0.3", STUB_WAIT="1", **given)
    assert result.returncode == 0, result.stderr
    run = load(project.root / "outputs" / "zero2")
    values = [run.plan.value(name) for name in ("LR", "WANDB_RUN_GROUP", "NNODES", "WANDB_API_KEY")]
    assert (values, run.plan.zero_stage) == (["0.0003", "trial", "1", "given"], 2)
    assert run.nodes[0]["environment"]["NCCL_DEBUG"] == "INFO"
    assert run.plan.command[-3:] == ["--zero-stage", "2", "--no-pipeline-parallel"]
    assert run.record["versions"]["torch"]
    assert run.record["data"]["bin_bytes"] == project.data_prefix.with_suffix(".bin").stat().st_size
    assert set(run.record["patches"]) == set((project.root / "patches" / "series").read_text().split())
    assert [(gpu["name"], gpu["driver"]) for gpu in run.nodes[0]["devices"]] == [("NVIDIA Stub", "570.1")] * 2
    sampled = [sample["gpus"] for sample in read_samples(run.directory / "node0.samples.jsonl") if sample["gpus"]]
    both = [
        {"index": 0, "memory_mib": 1000, "utilization": 93, "power_w": 300.5, "sm_mhz": 1980},
        {"index": 1, "memory_mib": 2000, "utilization": None, "power_w": 310, "sm_mhz": 1980},
    ]
    assert both in sampled, "a sample may fall between two lines, but not every one"
    assert (project.stubs / "smi").read_text().count("-lms 300") == 1
    wait_for(lambda: not subprocess.run(["pgrep", "-f", f"{project.stubs}/nvidia-smi"], capture_output=True).stdout)


def test_network_counters_of_a_simulated_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counters = {"eth0": (200, 100), "bond0": (400, 300)}
    counted = {name: SimpleNamespace(bytes_sent=sent, bytes_recv=got) for name, (sent, got) in counters.items()}
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: counted)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"bond0": SimpleNamespace(speed=10000)})
    monkeypatch.setattr(sampler, "_DEVICES", tmp_path)
    port = "infiniband/mlx5_0/ports/1/counters/port_"
    for name, text in {"net/eth0/master": "", f"{port}xmit_data": "10\n", f"{port}rcv_data": "20\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = {"bond0": {"sent": 400, "received": 300}, "ib:mlx5_0/1": {"sent": 40, "received": 80}}
    assert sampler.network_counters() == expected
    assert sampler.link_speeds() == {"bond0": {"speed_mbit": 10000}, "ib:mlx5_0/1": {"speed_mbit": None}}


def test_secret_names():
    given = {"WANDB_API_KEY": "x" * 8, "TOKENIZER_MODEL": "y" * 20, "HF_TOKEN": "z" * 9, "MY_PASSWORD": "short"}
    assert environment.secrets(given) == ["z" * 9, "x" * 8]
