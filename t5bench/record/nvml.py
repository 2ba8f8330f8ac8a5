"""Prints the GPUs that NVIDIA's management library lists, as JSON, or the library's own sentence about why it does not.

gpus.py runs it as a process of its own, because a call into a driver that hangs cannot be interrupted.
"""

import ctypes
import json
import sys
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
MIB = 2**20


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Library:
    """The few functions of NVML that are needed; a status other than 0 raises OSError with NVML's sentence."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            self.library.nvmlErrorString.restype = ctypes.c_char_p
            raise OSError(self.library.nvmlErrorString(status).decode(errors="replace"))

    def text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(NAME_BYTES)
        self.call(name, *arguments, buffer, NAME_BYTES)
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(value))
        return value

    def memory_mib(self, device: ctypes.c_void_p) -> float | None:
        memory = Memory()
        try:
            self.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        except OSError:
            return None
        return memory.total / MIB

    def slices(self, device: ctypes.c_void_p) -> list[dict[str, str]]:
        """The MIG slices of a GPU; drivers before MIG lack the functions."""
        found = []
        try:
            for index in range(self.number("nvmlDeviceGetMaxMigDeviceCount", device)):
                part = self.handle("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
                found.append(
                    {"name": self.text("nvmlDeviceGetName", part), "uuid": self.text("nvmlDeviceGetUUID", part)}
                )
        except (OSError, AttributeError):
            pass
        return found


def gpus() -> list[dict[str, Any]]:
    library = Library()
    driver = library.text("nvmlSystemGetDriverVersion")
    listed = []
    for index in range(library.number("nvmlDeviceGetCount_v2")):
        device = library.handle("nvmlDeviceGetHandleByIndex_v2", index)
        listed.append(
            {
                "index": index,
                "name": library.text("nvmlDeviceGetName", device),
                "uuid": library.text("nvmlDeviceGetUUID", device),
                "memory_mib": library.memory_mib(device),
                "driver": driver,
                "slices": library.slices(device),
            }
        )
    return listed


if __name__ == "__main__":
    try:
        print(json.dumps(gpus()))
    except (OSError, AttributeError) as error:
        sys.exit(f"NVML: {error}")
