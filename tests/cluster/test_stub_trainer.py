"""The stub trainer does what the tests of faults believe it does. One process, no host but this one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_lab import STUB_TRAINER

from t5bench.plan.ports import free_port
from t5bench.record import log


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    words = {
        "--train-iters": "6", "--log-interval": "2", "--global-batch-size": "16", "--encoder-seq-length": "128",
        "--distributed-timeout-minutes": "1", "--distributed-backend": "gloo", "--hidden-size": "64",
    }  # fmt: skip
    alone = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, str(STUB_TRAINER), *(word for pair in words.items() for word in pair), *arguments],
        env=os.environ | alone | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, **environment)
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def test_what_it_prints_is_what_the_engines_print():
    result = train(STUB_ITERATION_MS="30")
    assert result.returncode == 0, result.stderr
    lines = list(log.iterations(result.stdout.splitlines()))
    assert [(line.iteration, line.total) for line in lines] == [(2, 6), (4, 6), (6, 6)]
    assert [line.lm_loss for line in lines] == [4.0, 2.0, pytest.approx(8 / 6, rel=1e-6)]
    for line in lines:
        assert line.elapsed_ms >= 30
        assert line.samples_per_second == pytest.approx(16 / line.elapsed_ms * 1000, rel=0.01)
    (peak,) = log.peak_memory(result.stdout.splitlines())
    assert peak.rank == 0
    assert peak.host_mib > 50


def test_checkpoints_and_going_on(tmp_path: Path):
    assert train("--save", str(tmp_path), "--save-interval", "3").returncode == 0
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    result = train("--load", str(tmp_path), "--train-iters", "8")
    assert [line.iteration for line in log.iterations(result.stdout.splitlines())] == [8]


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("0:3:raise:broken", 1, "RuntimeError: broken"),
        ("0:3:exit:0", 0, ""),
        ("0:3:exit:9", 9, ""),
        ("0:3:kill:KILL", -signal.SIGKILL, ""),
        ("0:3:disk:/dev/full", 1, "No space left on device"),
    ],
)
def test_faults(fault: str, status: int, said: str):
    result = train(STUB_FAULT=fault)
    assert result.returncode == status, result.stderr
    assert said in result.stdout + result.stderr
    assert "2/       6" in result.stdout
    assert "6/       6" not in result.stdout


def test_faults_that_go_on():
    result = train(STUB_FAULT="0:5:slow:700 0:2:memory:300 0:3:print:a_line 0:4:nan 1:1:raise")
    assert result.returncode == 0
    assert "\na line\n" in result.stdout
    lines = list(log.iterations(result.stdout.splitlines()))
    assert [line.nan for line in lines] == [0, 1, 1]
    assert lines[-1].elapsed_ms >= 700
    assert log.peak_memory(result.stdout.splitlines())[0].host_mib > 400


def test_a_hang():
    with start(STUB_FAULT="0:5:hang") as process:
        try:
            assert any("iteration        4/       6" in line for line in process.stdout)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=2)
        finally:
            process.kill()
