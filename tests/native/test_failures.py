"""Real runs that really fail: the native engine through a launcher, its status on the terminal and in the record."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT
from native_runs import TOKENIZER

from t5bench.plan.ports import free_port
from t5bench.record.records import Run, load

pytestmark = pytest.mark.slow


def launch(native_data: Path, directory: Path, *arguments: str, **settings: str) -> tuple[int, str, Run]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WANDB_"))} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "ENGINE": "native",
        "DEVICE": "cpu",
        "MODEL_PRESET": "tiny",
        "MEGATRON_DATA_DIR": str(native_data.parent),
        "TOKENIZER_MODEL": str(TOKENIZER),
        "OUTPUT_DIR": str(directory),
        "MASTER_PORT": str(free_port()),
        "TRAIN_ITERS": "4",
        "LOG_INTERVAL": "1",
        "WANDB_MODE": "disabled",
        "NPROC_PER_NODE": "1",
    }
    result = subprocess.run(
        ["bash", str(REPO_ROOT / "scripts" / "run_megatron_t5_ddp.sh"), *arguments],
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return result.returncode, result.stderr, load(directory)


@pytest.mark.parametrize(
    ("arguments", "settings", "code", "status", "reason"),
    [
        (["--", "--no-such-flag"], {}, 2, "configuration", "unrecognized arguments: --no-such-flag"),
        ([], {"LR": "1e30", "CLIP_GRAD": "0", "DROPOUT": "0"}, 4, "diverged", "not a number at iteration 2"),
        ([], {"HIDDEN_SIZE": "65536", "FFN_HIDDEN_SIZE": "4000000"}, 5, "out-of-memory", "the host's memory is full"),
        (["127.0.0.1", "0"], {"NNODES": "2", "RENDEZVOUS_TIMEOUT": "2"}, 6, "timeout", "1 of 2 nodes came within"),
    ],
)
def test_a_run_that_fails(
    native_data: Path,
    tmp_path: Path,
    arguments: list[str],
    settings: dict[str, str],
    code: int,
    status: str,
    reason: str,
):
    exit_code, errors, run = launch(native_data, tmp_path / "run", *arguments, **settings)
    assert (exit_code, run.status) == (code, status), errors
    assert reason in run.reason
    assert f"{status}: " in errors and reason in errors
    assert run.record["first_failure"]["host"] == socket.gethostname()
