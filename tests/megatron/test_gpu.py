"""The engine on a GPU without apex, as far as that can be tested without a GPU: inside/gpu.py trains on a stand-in."""

import json
from pathlib import Path
from typing import Any

import pytest
from inside_engine import INSIDE, run_inside

pytestmark = pytest.mark.slow

# Four iterations of two micro-batches through one encoder layer and the cross-attention of two decoder layers. The
# decoder's self-attention has 16 keys, for which the kernels are not used.
SOFTMAXES = 4 * 2 * (1 + 2)
# Parameters with and without weight decay.
UPDATES = 4 * 2


def train(engine: Path, directory: Path, *arguments: str, local_rank: int = 0) -> dict[str, Any]:
    """What a training with these arguments called and chose."""
    command = [str(INSIDE / "gpu.py"), str(directory), *arguments]
    kept = {"PYTORCH_JIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    (said,) = run_inside(engine, directory, *command, DS_ACCELERATOR="cuda", LOCAL_RANK=str(local_rank), **kept)
    assert " iteration        4/       4 |" in said
    assert "| device cuda:0 | allocated MiB 1.0 | reserved MiB 2.0 |" in said
    return json.loads((directory / "gpu.json").read_text())


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_trains_without_apex(megatron_dir: Path, tmp_path: Path, precision: str):
    """Everything is on the GPU, and the kernels are found by name although loading them does not import them."""
    found = train(megatron_dir, tmp_path, precision)
    assert not found["apex"]
    assert found["architectures"] == [["arch=compute_90,code=sm_90"]] * 3
    calls = found["calls"]
    assert calls["scaled_masked_softmax_cuda"] == calls["scaled_masked_softmax_cuda backward"] == SOFTMAXES
    # What is read from the stand-in's overflow flag is an overflow, after which fp16 updates nothing.
    assert calls.get("fused AdamW", 0) == (UPDATES if precision == "--bf16" else 0)
    assert calls["all_reduce"] > 0
    assert found["backend"] == "nccl"


def test_processes_that_share_a_gpu_in_fp32(megatron_dir: Path, tmp_path: Path):
    """The second process of a node with one GPU takes the first device, tells DeepSpeed so, and speaks gloo; fp32 uses
    no half-precision kernel."""
    found = train(megatron_dir, tmp_path, "--distributed-backend", "gloo", local_rank=1)
    assert (found["devices"], found["local_rank"], found["backend"]) == ([0], "0", "gloo")
    assert found["calls"]["fused AdamW"] == UPDATES
    assert "scaled_masked_softmax_cuda" not in found["calls"]
