"""What the device does at best, and which kernels its attention takes: python -m t5bench.tools.acceptance.device FILE.

It is a separate process because asking PyTorch about a GPU takes memory on it.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils import benchmark, collect_env

from t5bench import Problem, note
from t5bench.record.status import CONFIGURATION, EXIT_CODES
from t5bench.text import guard_streams
from t5bench.tools.acceptance.results import attention_kernels


def software() -> dict[str, Any]:
    """What only PyTorch and the compilers know of this machine."""
    return {
        "cuDNN": torch.backends.cudnn.version(),
        "nvcc": collect_env.get_running_cuda_version(collect_env.run),
        "g++": collect_env.get_gcc_version(collect_env.run),
    }


def seconds(statement: str, **names: Any) -> float:
    """The median time of a statement, which starts again before the device has finished it."""
    return benchmark.Timer(statement, globals=names | {"torch": torch}).blocked_autorange(min_run_time=0.3).median


def matmul_tflops(m: int, n: int, k: int, device: str) -> float:
    """TFLOP/s of a [m, k] x [k, n] product, on a GPU in bf16. Its numbers are random: zeros take less power."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(k, n, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return 2.0 * m * n * k / seconds("torch.mm(a, b, out=out)", a=a, b=b, out=out) / 1e12


def copy_gb_per_s(size: int, source: str, device: str) -> float:
    """GB/s of copying ``size`` bytes, counted once; host memory is pinned, as for offloading."""
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.randint(255, (size,), dtype=torch.uint8, device=source, pin_memory=source != device)
    return size / seconds("there.copy_(here, non_blocking=True)", there=there, here=here) / 1e9


def rates(device: str) -> dict[str, float]:
    """TFLOP/s of a large product and of T5-Large's own with eight samples, and GB/s of copies."""
    on_gpu = device == "cuda"
    edge = 8192 if on_gpu else 512
    size = 2 << 30 if on_gpu else 32 << 20
    tokens = 8 * 512 if on_gpu else 256
    measured = {
        "matmul_tflops": matmul_tflops(edge, edge, edge, device),
        "attention_projection_tflops": matmul_tflops(tokens, 1024, 1024, device),
        "feed_forward_tflops": matmul_tflops(tokens, 2816, 1024, device),
        "output_layer_tflops": matmul_tflops(tokens // 4, 32128, 1024, device),
        "copy_read_and_written_gb_per_s": 2 * copy_gb_per_s(size, device, device),
    }
    if on_gpu:
        measured["copy_from_host_gb_per_s"] = copy_gb_per_s(size // 2, "cpu", device)
    return measured


def probe_attention(device: str, dtype: torch.dtype, *, masked: bool, dropout: float) -> dict[str, Any]:
    """Which kernels attention runs forward and backward, and its mean over values of one: 1, whatever the dropout.

    A mean of 0.97 or 1.04 says that the kernel drops one weight in 8 or 16, but scales as if it were one in 10.
    """
    on_gpu = device == "cuda"
    batch, heads, length, head_size = (8, 16, 512, 64) if on_gpu else (1, 2, 32, 16)
    options = {"device": device, "dtype": dtype}
    query = torch.randn(batch, heads, length, head_size, **options, requires_grad=True)
    key = torch.randn(batch, heads, length, head_size, **options, requires_grad=True)
    value = torch.ones(batch, heads, length, head_size, **options, requires_grad=True)
    mask = torch.zeros(batch, 1, length, length, **options) if masked else None
    probed = {"precision": str(dtype).removeprefix("torch."), "mask": masked, "dropout": dropout}
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    try:
        with profile(activities=activities) as profiled:
            output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
            output.sum().backward()
        mean = output.float().mean().item()
    except RuntimeError as error:
        return probed | {"kernels": [], "mean": None, "error": str(error).splitlines()[0]}
    kernels = attention_kernels(event.key for event in profiled.key_averages())
    return probed | {"kernels": kernels, "mean": mean, "error": ""}


def main(output: Path) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("DEVICE") == "cuda":
        built = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}"
        remedy = "Install a PyTorch for a CUDA version that the driver supports"
        note(Problem(f"there is a GPU, but {built}, does not see it", remedy).report)
        return EXIT_CODES[CONFIGURATION]
    attention = []
    for dtype, masked, dropout in itertools.product(
        (torch.bfloat16, torch.float32),
        (False, True),
        (0.0, 0.1),
    ):
        attention.append(probe_attention(device, dtype, masked=masked, dropout=dropout))
    measured = {"software": software(), "attention": attention, "rates": rates(device)}
    output.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main(Path(sys.argv[1])))
