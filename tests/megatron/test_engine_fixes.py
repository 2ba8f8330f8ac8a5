"""Every bug that the patches mend has a test that fails without its fix: the files in inside/, run in the engine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_runs import environment
from support import REPO_ROOT

from t5bench.plan.ports import free_port

INSIDE = Path(__file__).with_name("inside")


def run_inside(engine: Path, directory: Path, *command: str, processes: int = 1, **settings: str) -> list[str]:
    """Runs a Python command in so many processes, to the successful end of all; what each of them said.

    {rank} in the command is the process's.
    """
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, (engine, INSIDE, REPO_ROOT / "tests", REPO_ROOT))),
        "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    logs = [directory / f"{rank}.log" for rank in range(processes)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            words = [sys.executable, *(word.format(rank=rank) for word in command)]
            own = environment(**given | {"RANK": str(rank)} | settings)
            started.append(subprocess.Popen(words, env=own, cwd=directory, stdout=output, stderr=output))
    try:
        statuses = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    said = [log.read_text(errors="replace") for log in logs]
    assert not any(statuses), "\n".join(text[-8000:] for text in said)
    return said


@pytest.mark.parametrize(("names", "processes"), [(["alone", "beside_native", "sizes"], 1), (["pair"], 2)])
def test_checks_inside_the_engine(
    megatron_dir: Path, sample_data: Path, tmp_path: Path, names: list[str], processes: int
):
    """Importing the engine takes seconds, so one process runs many tests; those that fail are named."""
    files = [str(INSIDE / f"{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "rank {rank}")]
    options += ["--exitfirst"] if processes > 1 else []  # a process that failed would keep the other waiting
    data = {"SAMPLE_DATA": str(sample_data / "xsum_text_document"), "SHARED_DATA": str(tmp_path / "shared" / "text")}
    run_inside(megatron_dir, tmp_path, "-m", "pytest", *files, *options, processes=processes, **data)


def test_half_precision_training(megatron_dir: Path, tmp_path: Path):
    """The loss is scaled before gradients are unscaled, or the norm is 1024 times too small. Evaluation and saving are
    not iteration time. Peak memory is said after --exit-interval too, which ends training by sys.exit()."""
    (said,) = run_inside(megatron_dir, tmp_path, str(INSIDE / "half_precision.py"), str(tmp_path))
    lines = [line for line in said.splitlines() if "| lm loss: " in line]

    def numbers(name: str) -> list[float]:
        return [float(re.search(f"{name}: +(\\S+)", line)[1]) for line in lines]

    assert numbers("loss scale") == [1024.0] * 2
    assert all(0.2 < norm < 20 for norm in numbers("grad norm"))
    assert numbers(r"per iteration \(ms\)")[1] < 1900
    assert " | device cpu | allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB " in said
    # The tokens of both sides are counted.
    assert numbers("consumed tokens") == [4 * (32 + 16), 2 * 4 * (32 + 16)]
    per_second = [number * (32 + 16) for number in numbers("samples per second")]
    assert numbers(r"\(tgs\)") == pytest.approx(per_second, rel=1e-2)


# Four iterations of two micro-batches through one encoder layer and the cross-attention of two decoder layers. The
# decoder's self-attention has 16 keys, for which the kernels are not used.
SOFTMAXES = 4 * 2 * (1 + 2)
# Parameters with and without weight decay.
UPDATES = 4 * 2


def train_on_gpu(engine: Path, directory: Path, *arguments: str, local_rank: int = 0) -> dict[str, Any]:
    """What a training with these arguments called and chose on a stand-in for a GPU without apex, inside/gpu.py."""
    command = [str(INSIDE / "gpu.py"), str(directory), *arguments]
    kept = {"PYTORCH_JIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    (said,) = run_inside(engine, directory, *command, DS_ACCELERATOR="cuda", LOCAL_RANK=str(local_rank), **kept)
    assert " iteration        4/       4 |" in said
    assert "| device cuda:0 | allocated MiB 1.0 | reserved MiB 2.0 |" in said
    return json.loads((directory / "gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", pytest.param("--fp16", marks=pytest.mark.nightly)])
def test_trains_without_apex(megatron_dir: Path, tmp_path: Path, precision: str):
    """Everything is on the GPU, and the kernels are found by name although loading them does not import them."""
    found = train_on_gpu(megatron_dir, tmp_path, precision)
    assert not found["apex"]
    assert found["architectures"] == [["arch=compute_90,code=sm_90"]] * 3
    calls = found["calls"]
    assert calls["scaled_masked_softmax_cuda"] == calls["scaled_masked_softmax_cuda backward"] == SOFTMAXES
    # What is read from the stand-in's overflow flag is an overflow, after which fp16 updates nothing.
    assert calls.get("fused AdamW", 0) == (UPDATES if precision == "--bf16" else 0)
    assert calls["all_reduce"] > 0
    assert found["backend"] == "nccl"


@pytest.mark.slow
@pytest.mark.nightly
def test_processes_that_share_a_gpu_in_fp32(megatron_dir: Path, tmp_path: Path):
    """The second process of a node with one GPU takes the first device, tells DeepSpeed so, and speaks gloo; fp32 uses
    no half-precision kernel."""
    found = train_on_gpu(megatron_dir, tmp_path, "--distributed-backend", "gloo", local_rank=1)
    assert (found["devices"], found["local_rank"], found["backend"]) == ([0], "0", "gloo")
    assert found["calls"]["fused AdamW"] == UPDATES
    assert "scaled_masked_softmax_cuda" not in found["calls"]
