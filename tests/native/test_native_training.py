"""Runs of the native engine that fail: their status is on the terminal and in the record."""

import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from command_lines import parsed
from real_runs import start

from native import train as native_train
from t5bench import Problem
from t5bench.plan.ports import free_port
from t5bench.record.records import load

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "settings", "code", "status", "reason"),
    [
        (["--", "--mask-prob", "0.9"], {}, 2, "configuration", "is too short for an encoder of"),
        ([], {"LR": "1e30", "CLIP_GRAD": "0", "DROPOUT": "0"}, 4, "diverged", "not a number at iteration 2"),
        ([], {"HIDDEN_SIZE": "65536", "FFN_HIDDEN_SIZE": "4000000"}, 5, "out-of-memory", "the host's memory is full"),
    ],
)
def test_a_run_that_fails(
    sample_data: Path, tmp_path: Path, arguments: list, settings: dict, code: int, status: str, reason: str
):
    chosen = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(sample_data), "TRAIN_ITERS": "4", "NPROC_PER_NODE": "1"}
    (launcher,) = start("ddp", tmp_path / "run", arguments=arguments, **chosen | settings)
    _, errors = launcher.communicate(timeout=200)
    run = load(tmp_path / "run")
    assert (launcher.returncode, run.status) == (code, status), errors
    assert reason in run.reason
    assert f"{status}: " in errors and reason in errors
    assert run.record["first_failure"]["host"] == socket.gethostname()


@pytest.mark.parametrize("wrong", ["--data-path", "--tokenizer-model"])
def test_wrong_data_end_the_run_with_one_sentence(monkeypatch, sample_data: Path, tmp_path: Path, wrong: str):
    started = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (started | {"DS_ACCELERATOR": "cpu"}).items():
        monkeypatch.setenv(name, value)
    right = str(sample_data / "xsum_text_document")
    nothing = str(tmp_path / "nothing")
    with pytest.raises(Problem, match=re.escape(nothing)):
        native_train.run(parsed("--data-path", right, wrong, nothing))
    if dist.is_initialized():
        dist.destroy_process_group()
