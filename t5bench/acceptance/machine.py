"""What the machine has: devices, driver, CUDA, torch, NCCL, apex and flash-attn or not, compilers.

Run as a program of its own (``python -m acceptance.machine``), for asking torch for a GPU takes memory there.
"""

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY
from t5bench.record import machine as environment


def look(engine: Path | None) -> dict[str, Any]:
    """Everything that a figure from here depends on; memory in MiB."""
    import os

    import torch

    found: dict[str, Any] = {
        "gpus": environment.gpus(os.environ),
        "cpu": environment.cpu(),
        "kernel": platform.release(),
        "driver_cuda": _driver_cuda(),
        "nvcc": _version("nvcc", r"release ([0-9.]+)"),
        "gxx": _version("g++", r"([0-9]+\.[0-9.]+)"),
        "ninja": _version("ninja", r"([0-9.]+)"),
        "versions": environment.versions(),
        "commits": environment.commits(REPOSITORY, engine),
        "patches": environment.patches(REPOSITORY),
        "torch_sees": [],
        "nccl": None,
    }
    if torch.cuda.is_available():
        found["torch_sees"] = [_seen(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _seen(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory >> 20,
    }


def _version(program: str, pattern: str) -> str | None:
    """The version that a program prints; None where there is no such program."""
    if not shutil.which(program):
        return None
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(pattern, output)
    return match[1] if match else "unknown"


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver serves, as nvidia-smi's heading says."""
    if not shutil.which("nvidia-smi"):
        return None
    output = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"CUDA(?: UMD)? Version: *([0-9.]+)", output)
    return match[1] if match else None


def name_of(machine: Mapping[str, Any]) -> str:
    """A directory's name for the machine's devices, for example nvidia-h100-80gb-hbm3 or 2x-nvidia-h200."""
    gpus = [gpu["name"] for gpu in machine["gpus"]]
    text = gpus[0] if gpus else f"cpu {machine['cpu']['model']}"
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{len(gpus)}x-{slug}" if len(gpus) > 1 else slug


def describe(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was found, as (what, value) for people."""
    versions, cpu = machine["versions"], machine["cpu"]
    memory = f"{cpu['memory_mib'] / 1024:.0f} GiB" if cpu["memory_mib"] else "memory unknown"
    gpus = [
        f"{gpu['name']}, {gpu['memory_mib']:.0f} MiB, driver {gpu['driver']}" if gpu["memory_mib"] else gpu["name"]
        for gpu in machine["gpus"]
    ]
    rows = [
        ("GPUs", "; ".join(gpus) or "none"),
        ("CUDA", f"torch's {versions['cuda'] or 'none'}, driver's {machine['driver_cuda'] or 'none'}, "
                 f"nvcc {machine['nvcc'] or 'not found'}"),
        ("NCCL", machine["nccl"] or "none"),
        ("Python, torch", f"{versions['python']}, {versions['torch']}"),
        ("DeepSpeed, transformers", f"{versions['deepspeed'] or 'not installed'}, {versions['transformers']}"),
        ("apex, flash-attn", f"{versions['apex'] or 'not installed'}, {versions['flash_attn'] or 'not installed'}"),
        ("ninja, g++", f"{machine['ninja'] or 'not found'}, {machine['gxx'] or 'not found'}"),
        ("CPU", f"{cpu['model']}, {cpu['cores']} cores, {memory}, kernel {machine['kernel']}"),
        ("commit", _commit(machine)),
    ]  # fmt: skip
    return rows


def _commit(machine: Mapping[str, Any]) -> str:
    """What the checkout says; where the files came without their history, what their bundle says."""
    commit, changed = machine["commits"]["repository"], machine["commits"]["repository_changed"]
    if commit:
        return f"{commit}, with changes" if changed else commit
    packed = machine.get("packed_at")
    return "not known (no git checkout)" + (f"; the bundle was packed at {packed}" if packed else "")


if __name__ == "__main__":
    engine = Path(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1] else None
    print(json.dumps(look(engine)))
