"""Prints the GPUs that NVIDIA's management library lists, as JSON, or the library's own sentence about why it does not.

gpus.py runs it as a process of its own, because a call into a driver that hangs cannot be interrupted.
"""

import json
import sys
from typing import Any

try:
    import pynvml
except ImportError:  # requirements.txt has it; without it the driver's files still name the GPUs
    pynvml = None

LIBRARY = "libnvidia-ml.so.1"  # the driver's, which pynvml loads
MIB = 2**20


def start() -> None:
    """Raises OSError with NVML's sentence, without the library, its Python package or a driver that answers."""
    if pynvml is None:
        raise OSError("the Python package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from error


def read(name: str, *arguments: Any) -> Any:
    """What a function of NVML says; None where this GPU, driver or library does not have it."""
    try:
        return getattr(pynvml, name)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


def memory_mib(device: Any) -> float | None:
    """A GPU's whole memory."""
    memory = read("nvmlDeviceGetMemoryInfo", device)
    return memory.total / MIB if memory else None


def _slices(device: Any) -> list[dict[str, str]]:
    """The MIG slices of a GPU; drivers before MIG lack the functions."""
    found = []
    for index in range(read("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
        part = read("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        if part is not None:
            found.append({"name": pynvml.nvmlDeviceGetName(part), "uuid": pynvml.nvmlDeviceGetUUID(part)})
    return found


def gpus() -> list[dict[str, Any]]:
    start()
    driver = read("nvmlSystemGetDriverVersion") or ""
    listed = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        listed.append(
            {
                "index": index,
                "name": pynvml.nvmlDeviceGetName(device),
                "uuid": pynvml.nvmlDeviceGetUUID(device),
                "memory_mib": memory_mib(device),
                "driver": driver,
                "slices": _slices(device),
            }
        )
    return listed


if __name__ == "__main__":
    try:
        print(json.dumps(gpus()))
    except Exception as error:  # OSError, or an NVMLError of a driver that stopped answering meanwhile
        sys.exit(f"NVML: {error}")
