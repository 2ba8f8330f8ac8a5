"""The GPUs as NVIDIA's management library (NVML) sees them, which comes with the driver, unlike nvidia-smi.

A figure depends on the clocks, the temperature and the limits that held while it was measured: ``Watch`` samples them.
"""

import threading
from collections.abc import Mapping
from statistics import median
from typing import Any

from t5bench.record import nvml

# Numbers and bits of nvml.h.
SM_CLOCK = 1
MEMORY_CLOCK = 2
GPU_SENSOR = 0
UNCORRECTED = 1
SINCE_THE_DRIVER_LOADED = 0
SLOWED_BY = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


class Nvml:
    """The visible GPUs of this machine, in CUDA's order where CUDA_VISIBLE_DEVICES names them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises OSError without the library, the driver or a visible GPU."""
        nvml.start()
        visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
        if visible_devices is None:
            words = [str(index) for index in range(nvml.read("nvmlDeviceGetCount") or 0)]
        else:
            words = [word.strip() for word in visible_devices.split(",") if word.strip()]
        self.gpus = [self._gpu(word) for word in words]
        if not self.gpus or None in self.gpus:
            raise OSError("no GPU is visible")

    def _gpu(self, word: str) -> Any:
        """A GPU by its index or its UUID; None if there is none."""
        if word.isdecimal():
            return nvml.read("nvmlDeviceGetHandleByIndex", int(word))
        return nvml.read("nvmlDeviceGetHandleByUUID", word)

    def names(self) -> list[str]:
        return [nvml.read("nvmlDeviceGetName", gpu) or "NVIDIA GPU" for gpu in self.gpus]

    def driver(self) -> str | None:
        return nvml.read("nvmlSystemGetDriverVersion")

    def memory_mib(self) -> list[float | None]:
        """Of each GPU."""
        return [nvml.memory_mib(gpu) for gpu in self.gpus]

    def sample(self, gpu: Any) -> dict[str, int | None]:
        """One GPU's state now: MHz, degrees Celsius, milliwatts, percent, bits of SLOWED_BY, errors."""
        utilization = nvml.read("nvmlDeviceGetUtilizationRates", gpu)
        return {
            "sm_mhz": nvml.read("nvmlDeviceGetClockInfo", gpu, SM_CLOCK),
            "memory_mhz": nvml.read("nvmlDeviceGetClockInfo", gpu, MEMORY_CLOCK),
            "temperature_c": nvml.read("nvmlDeviceGetTemperature", gpu, GPU_SENSOR),
            "power_mw": nvml.read("nvmlDeviceGetPowerUsage", gpu),
            "busy_percent": utilization and utilization.gpu,
            "slowed_by": nvml.read("nvmlDeviceGetCurrentClocksThrottleReasons", gpu),
            "ecc_errors": nvml.read("nvmlDeviceGetTotalEccErrors", gpu, UNCORRECTED, SINCE_THE_DRIVER_LOADED),
        }


def visible(environment: Mapping[str, str]) -> Nvml | None:
    """The visible GPUs; None if there is none that the driver knows."""
    try:
        return Nvml(environment)
    except OSError:
        return None


class Watch:
    """Samples the GPUs from the beginning to the end of a ``with`` block."""

    def __init__(self, nvml: Nvml | None, seconds: float = 0.5) -> None:
        self.nvml = nvml
        self.seconds = seconds
        self.ended = threading.Event()
        self.samples: list[dict[str, int | None]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(timeout=5)

    def _run(self) -> None:
        while self.nvml:
            self.samples += [self.nvml.sample(gpu) for gpu in self.nvml.gpus]
            if self.ended.wait(self.seconds):
                return

    def summary(self) -> dict[str, Any]:
        """Over all GPUs while one of them was busy, or over all samples if none was; empty without NVML."""
        if not self.samples:
            return {}
        samples = [sample for sample in self.samples if sample["busy_percent"]] or self.samples

        def known(name: str) -> list[int]:
            """The values of one name, where the GPU has them."""
            return [sample[name] for sample in samples if sample[name] is not None]

        clocks = known("sm_mhz")
        memory_clocks = known("memory_mhz")
        power = known("power_mw")
        reasons = 0
        for bits in known("slowed_by"):
            reasons |= bits
        range_of_clocks = None
        if clocks:
            range_of_clocks = {
                "lowest": min(clocks),
                "median": median(clocks),
                "highest": max(clocks),
            }
        return {
            "sm_mhz": range_of_clocks,
            "memory_mhz": median(memory_clocks) if memory_clocks else None,
            "temperature_c": max(known("temperature_c"), default=None),
            "power_w": max(power) / 1000 if power else None,
            "slowed_by": [text for bit, text in SLOWED_BY.items() if reasons & bit],
            "ecc_errors": max(known("ecc_errors"), default=None),
            "samples": len(samples),
        }
