"""What the device can do at best: the rates of matrix products and of copies, measured.

    python -m acceptance.floor --json FILE

bound.py says what they allow.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

_REPEATS, _WARM_UPS = 20, 5


@dataclass
class Floor:
    """Rates of one device. matmul_tflops is of a large square bf16 product, matmul_shapes of T5-Large's own."""

    device: str
    torch: str
    made: str
    matmul_tflops: float
    copy_gb_per_s: float
    host_to_device_gb_per_s: float | None
    matmul_shapes: list[dict[str, Any]] = field(default_factory=list)


def seconds(work: Callable[[int], object], device: torch.device) -> float:
    """The median time of ``work(number of the call)``, after some calls to warm up.

    On a GPU from the end of one call to the end of the next, so that the CPU runs ahead and no launch is waited for.
    """
    for call in range(_WARM_UPS):
        work(call)
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for call in range(_REPEATS):
            work(call)
            moments.append(time.perf_counter())
        return median(later - earlier for earlier, later in pairwise(moments))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for call in range(_REPEATS):
        work(call)
        events[call + 1].record()
    torch.cuda.synchronize()
    return median(earlier.elapsed_time(later) for earlier, later in pairwise(events)) / 1000


def matmul_tflops(m: int, n: int, k: int, device: torch.device) -> float:
    """Of a [m, k] x [k, n] product in bf16, of random numbers: zeros take less power and run faster."""
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return 2.0 * m * n * k / seconds(lambda _: torch.mm(left, right, out=out), device) / 1e12


def copy_gb_per_s(size: int, device: torch.device) -> float:
    """Bytes read and written by a copy of ``size`` bytes on the device, in turn between buffers larger than a cache."""
    buffers = [torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(3)]
    return 2.0 * size / seconds(lambda call: buffers[call % 3].copy_(buffers[(call + 1) % 3]), device) / 1e9


def host_to_device_gb_per_s(size: int, device: torch.device) -> float:
    """Of pinned memory, which offloading uses."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds(lambda _: there.copy_(host, non_blocking=True), device) / 1e9


def measure(device: torch.device) -> Floor:
    on_gpu = device.type == "cuda"
    edge, size = (8192, 2 << 30) if on_gpu else (512, 32 << 20)
    scale = 1 if on_gpu else 16
    # Eight samples of T5-Large: 512 tokens each in the encoder, 128 in the decoder.
    encoder, decoder = 8 * 512 // scale, 8 * 128 // scale
    shapes = {
        "attention projection": (encoder, 1024, 1024),
        "feed-forward": (encoder, 2816, 1024),
        "output layer": (decoder, 32128, 1024),
    }
    return Floor(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        torch=torch.__version__,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        matmul_tflops=matmul_tflops(edge, edge, edge, device),
        copy_gb_per_s=copy_gb_per_s(size, device),
        host_to_device_gb_per_s=host_to_device_gb_per_s(1 << 30, device) if on_gpu else None,
        matmul_shapes=[
            {"name": name, "m": m, "n": n, "k": k, "tflops": matmul_tflops(m, n, k, device)}
            for name, (m, n, k) in shapes.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    found = asdict(measure(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    text = json.dumps(found, indent=2)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
