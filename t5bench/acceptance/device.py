"""What the machine is, and its device's best rates: ``python -m t5bench.acceptance.device FILE``.

It is a separate process because asking PyTorch about a GPU takes memory on it.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import benchmark, collect_env

from t5bench import REPOSITORY, Problem, note
from t5bench.record import machine
from t5bench.record.status import CONFIGURATION, EXIT_CODES


def facts() -> dict[str, Any]:
    """The facts on which every figure from this machine depends; None for what is not there."""
    cpu, (commit, changed) = machine.cpu(), machine.commit(REPOSITORY)
    packed = Path(os.environ.get("BUNDLE", ""), "commit")
    if commit is None and packed.is_file():
        commit = f"{packed.read_text().strip()}, when the bundle was packed"
    return {
        "GPUs": [f"{g['name']}, {g['memory_mib']} MiB, driver {g['driver']}" for g in machine.gpus(os.environ)],
        "cuDNN": torch.backends.cudnn.version(),
        "nvcc": collect_env.get_running_cuda_version(collect_env.run),
        "g++": collect_env.get_gcc_version(collect_env.run),
        "CPU": f"{cpu['model']}, {cpu['cores']} cores, {cpu['memory_mib']} MiB",
        "/dev/shm": f"{shutil.disk_usage('/dev/shm').total >> 20} MiB",
        "commit": f"{commit}, with changes" if changed else commit,
        **machine.versions(),
    }


def seconds(statement: str, **names: Any) -> float:
    """The median time of a statement, which starts again before the device has finished it."""
    return benchmark.Timer(statement, globals=names | {"torch": torch}).blocked_autorange(min_run_time=0.3).median


def matmul_tflops(m: int, n: int, k: int, device: str) -> float:
    """TFLOP/s of a [m, k] x [k, n] product in bf16, of random numbers: zeros take less power and run faster."""
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return 2.0 * m * n * k / seconds("torch.mm(a, b, out=out)", a=a, b=b, out=out) / 1e12


def copy_gb_per_s(size: int, source: str, device: str) -> float:
    """GB/s of copying ``size`` bytes, counted once; host memory is pinned, as for offloading."""
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.randint(255, (size,), dtype=torch.uint8, device=source, pin_memory=source != device)
    return size / seconds("there.copy_(here, non_blocking=True)", there=there, here=here) / 1e9


def rates(device: str) -> dict[str, float]:
    """TFLOP/s of a large bf16 product and of T5-Large's own with eight samples, and GB/s of copies."""
    edge, size, tokens = (8192, 2 << 30, 8 * 512) if device == "cuda" else (512, 32 << 20, 256)
    found = {
        "matmul_tflops": matmul_tflops(edge, edge, edge, device),
        "attention_projection_tflops": matmul_tflops(tokens, 1024, 1024, device),
        "feed_forward_tflops": matmul_tflops(tokens, 2816, 1024, device),
        "output_layer_tflops": matmul_tflops(tokens // 4, 32128, 1024, device),
        "copy_read_and_written_gb_per_s": 2 * copy_gb_per_s(size, device, device),
    }
    if device == "cuda":
        found["copy_from_host_gb_per_s"] = copy_gb_per_s(size // 2, "cpu", device)
    return found


def main(output: Path) -> int:
    found, device = facts(), "cuda" if torch.cuda.is_available() else "cpu"
    for what, value in found.items():
        note(f"{what:>20}: {value}")
    if device == "cpu" and found["GPUs"]:
        built = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}"
        remedy = "Install a PyTorch for a CUDA version that the driver supports"
        note(Problem(f"there is a GPU, but {built}, does not see it", remedy).report)
        return EXIT_CODES[CONFIGURATION]
    measured = {"facts": found, "rates": rates(device)}
    output.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
