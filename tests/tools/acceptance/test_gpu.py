"""The driver's library, compiled here as a small C program that answers like it: what is read from it, and watched."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from t5bench.record import nvml

# Two GPUs; the second has no memory clock, and is called by its UUID.
LIBRARY = r"""
#include <string.h>
static int temperature = 40;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = (void *)(long)(index + 1); return index > 1; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) { *gpu = (void *)2; return strcmp(uuid, "GPU-beef"); }
int nvmlDeviceGetName(void *gpu, char *name, unsigned n) {
  strcpy(name, gpu == (void *)1 ? "NVIDIA H200" : "Two");
  return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strcpy(text, "580.1"); return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *m) { m[0] = 1ull << 37; return 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *u) { u[0] = 99; u[1] = 1; return 0; }
int nvmlDeviceGetClockInfo(void *gpu, unsigned kind, unsigned *mhz) {
  *mhz = kind == 1 ? 1980 : 3201;
  return kind == 2 && gpu == (void *)2 ? 3 : 0;
}
int nvmlDeviceGetTemperature(void *gpu, unsigned sensor, unsigned *t) { *t = temperature++; return 0; }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *mw) { *mw = 650000; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) {
  *bits = 0x1 | 0x4 | 0x20;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, unsigned kind, unsigned since, unsigned long long *n) { *n = 0; return 3; }
"""
PROGRAM = """
import json, time
from t5bench.tools.acceptance import gpu
nvml = gpu.visible({environment})
with gpu.Watch(nvml, seconds=0.02) as watch:
    time.sleep(0.3)
memory = nvml and nvml.memory_mib()[0]
print(json.dumps([nvml and nvml.names(), nvml and nvml.driver(), memory, watch.summary()]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc to compile a library that answers like the driver's")
    directory = tmp_path_factory.mktemp("library")
    (directory / "nvml.c").write_text(LIBRARY)
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(directory / nvml.LIBRARY), str(directory / "nvml.c")]
    subprocess.run(command, check=True)
    return directory


def told(library: Path, environment: dict[str, str]) -> list:
    program = PROGRAM.replace("{environment}", repr(environment))
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


def test_gpus_are_known_and_watched_without_nvidia_smi(library: Path):
    names, driver, memory, summary = told(library, {})
    assert (names, driver, memory) == (["NVIDIA H200", "Two"], "580.1", 131072)
    assert summary["sm_mhz"] == {"lowest": 1980, "median": 1980, "highest": 1980}
    assert summary["memory_mhz"] == 3201
    assert summary["slowed_by"] == ["power cap", "temperature (software)"]
    assert summary["temperature_c"] > 41 and summary["power_w"] == 650
    assert summary["ecc_errors"] is None  # this GPU does not count them


def test_only_visible_gpus_count(library: Path):
    assert told(library, {"CUDA_VISIBLE_DEVICES": "GPU-beef"})[0] == ["Two"]
    assert told(library, {"CUDA_VISIBLE_DEVICES": ""})[0] is None
    assert told(library, {"CUDA_VISIBLE_DEVICES": "7"})[0] is None


def test_a_machine_without_the_library_has_nothing_to_watch(tmp_path: Path):
    assert told(tmp_path, {}) == [None, None, None, {}]
