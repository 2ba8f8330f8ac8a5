"""The engine on a GPU without apex, as far as it can be seen without one: gpu_probe.py trains on a stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPO_ROOT

PROBE = Path(__file__).with_name("gpu_probe.py")
TOKENIZER = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
pytestmark = pytest.mark.slow

# Four iterations of two micro-batches through engine_probes.py's one encoder layer and the cross-attention of its two
# decoder layers. The decoder's self-attention has 16 keys, for which the kernels are not used.
SOFTMAXES = 4 * 2 * (1 + 2)
# Parameters with and without weight decay.
UPDATES = 4 * 2


def train(engine: Path, directory: Path, *arguments: str, local_rank: int = 0) -> dict[str, Any]:
    """What a training with these arguments called and chose."""
    result = subprocess.run(
        [sys.executable, str(PROBE), str(directory), str(TOKENIZER), *arguments],
        env=os.environ | {"PYTHONPATH": str(engine), "PROBE_LOCAL_RANK": str(local_rank)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[-6000:]
    assert " iteration        4/       4 |" in said
    assert " peak memory | rank 0 | host " in said
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


def test_fp32_uses_no_half_precision_kernel(megatron_dir: Path, tmp_path: Path):
    calls = train(megatron_dir, tmp_path)["calls"]
    assert "scaled_masked_softmax_cuda" not in calls
    assert calls["fused AdamW"] == UPDATES


def test_processes_that_share_a_gpu(megatron_dir: Path, tmp_path: Path):
    """The second process of a node with one GPU takes the first device, tells DeepSpeed so, and speaks gloo."""
    found = train(megatron_dir, tmp_path, "--distributed-backend", "gloo", local_rank=1)
    assert found["devices"] == [0]
    assert found["local_rank"] == "0"
    assert found["backend"] == "gloo"
