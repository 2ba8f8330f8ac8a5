"""Which GPUs there are: nvidia-smi, NVML and the driver's files as stubs, each healthy, broken and missing."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t5bench.record import gpus, machine
from t5bench.record.gpus import visible_gpus
from t5bench.record.tools import ask, sentence

H100 = "NVIDIA H100 80GB HBM3"
TWO = f"GPU 0: {H100} (UUID: GPU-aaaa)\nGPU 1: {H100} (UUID: GPU-bbbb)\n"
MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 4g.20gb     Device  1: (UUID: MIG-2222)
"""
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
INFORMATION = "Model: \t\t {}\nIRQ:   \t\t 17\nGPU UUID: \t {}\nDevice Minor: \t {}\n"
# As much of NVML as is called, for two GPUs of which one is divided.
NVML = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#ifndef STATUS
#define STATUS 0
#endif
int nvmlInitWithFlags(unsigned flags) { return STATUS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "570.86"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
  strcpy(text, (long)device > 9 ? "NVIDIA H100 80GB HBM3 MIG 1g.10gb" : "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  sprintf(text, "%s-%ld", (long)device > 9 ? "MIG" : "GPU", (long)device); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) { memory[0] = 85899345920ull; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { *count = SLICES; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
  *part = (void *)(long)(index + 10); return index ? 6 : 0; }
"""


class Machine:
    """Stubs of nvidia-smi, NVML and the driver's files; the environment shows only them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        for folder in ("bin", "dev", "lib"):
            (root / folder).mkdir()
        self.environ = {"PATH": f"{root / 'bin'}:/usr/bin:/bin"}
        monkeypatch.setattr(gpus, "DRIVER", root / "proc")
        monkeypatch.setattr(gpus, "DEVICE_FILES", root / "dev")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(root / "lib"))
        gpus._machine.cache_clear()

    def smi(self, text: str = "", status: int = 0, first: str = "") -> None:
        path = self.root / "bin" / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{first}\ncat <<'END'\n{text}END\nexit {status}\n")
        path.chmod(0o755)

    def nvml(self, *defines: str) -> None:
        pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
        (self.root / "dev" / "nvidiactl").touch()
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", *defines, "-o", str(self.root / "lib" / gpus_library())]
        subprocess.run(command, input=NVML, text=True, check=True)

    def driver(self, *names: str, device_files: int = 9) -> None:
        for minor, name in enumerate(names):
            folder = self.root / "proc" / "gpus" / f"0000:{minor}b:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(INFORMATION.format(name, f"GPU-{minor}", minor))
            if minor < device_files:
                (self.root / "dev" / f"nvidia{minor}").touch()
        (self.root / "proc" / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86  Wed\n")

    def see(self, **environ: str) -> gpus.GpuInventory:
        return visible_gpus(self.environ | environ)


def gpus_library() -> str:
    from t5bench.record import nvml

    return nvml.LIBRARY


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_healthy_tool_answers_once(stubs: Machine):
    stubs.smi(TWO, first=f"echo >>{stubs.root}/calls")
    seen = stubs.see()
    assert (seen.names, seen.source, seen.fault) == ((H100, H100), "nvidia-smi", "")
    assert seen.why == f"2 x {H100}, listed by nvidia-smi"
    assert len(stubs.see(CUDA_VISIBLE_DEVICES="1").names) == 1
    assert (stubs.root / "calls").read_text() == "\n"


def test_cuda_visible_devices_is_read_as_cuda_reads_it(stubs: Machine):
    stubs.smi(TWO)
    for wanted, indices in (
        ("1,0", [1, 0]), ("1", [1]), ("0,7,1", [0]), ("", []), ("-1", []), ("-1,0", []), ("GPU-bb", [1]),
        ("NoDevFiles", []),
    ):  # fmt: skip
        assert [gpu.index for gpu in stubs.see(CUDA_VISIBLE_DEVICES=wanted).gpus] == indices, wanted
    assert "CUDA_VISIBLE_DEVICES= hides 2 of 2 GPUs" in stubs.see(CUDA_VISIBLE_DEVICES="").why


def test_mig_slices_are_named_and_a_process_sees_one(stubs: Machine):
    stubs.smi(MIG)
    seen = stubs.see()
    assert seen.names == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb",) and "one of 2 slices" in seen.why
    assert stubs.see(CUDA_VISIBLE_DEVICES="MIG-2222").names == ("NVIDIA A100-SXM4-40GB MIG 4g.20gb",)
    selected = gpus.smi_selection(stubs.environ | {"CUDA_VISIBLE_DEVICES": "MIG-2222"})
    assert selected == ["-i", "GPU-aaaa"]


def test_a_driver_mismatch_does_not_hide_the_gpus(stubs: Machine):
    """Neither does it hide what the tool said."""
    stubs.smi(f"{MISMATCH}\nNVML library version: 535.104\n", status=18)
    stubs.driver(H100, H100)
    seen = stubs.see()
    assert (seen.names, seen.source) == ((H100, H100), str(gpus.DRIVER))
    assert seen.fault == f"nvidia-smi: {MISMATCH}" and seen.fault in seen.why
    rows = machine.gpus(stubs.environ)
    assert [(row["name"], row["driver"], row["uuid"]) for row in rows] == [
        (H100, "570.86", "GPU-0"),
        (H100, "570.86", "GPU-1"),
    ]


def test_a_tool_that_hangs_costs_seconds(stubs: Machine, monkeypatch: pytest.MonkeyPatch):
    assert gpus.SMI_SECONDS <= 5
    monkeypatch.setattr(gpus, "SMI_SECONDS", 0.3)
    stubs.smi(first="trap '' TERM INT; sleep 60")
    stubs.driver(H100)
    begun = time.monotonic()
    seen = stubs.see()
    assert seen.names == (H100,) and seen.fault == "nvidia-smi did not answer within 0.3 s"
    stubs.see()
    assert time.monotonic() - begun < 5
    gpus._machine.cache_clear()
    monkeypatch.setattr(gpus, "DRIVER", stubs.root / "none")
    assert stubs.see().names == ()
    given = stubs.see(CUDA_VISIBLE_DEVICES="0,1")
    assert (len(given.names), given.source) == (2, "CUDA_VISIBLE_DEVICES")


def test_nvml_answers_in_a_container_without_the_tool(stubs: Machine):
    stubs.nvml("-DSLICES=0")
    seen = stubs.see()
    assert (seen.names, seen.source) == ((H100, H100), "NVML")
    assert seen.fault == "nvidia-smi is not installed"
    assert machine.gpus(stubs.environ)[1] == {
        "index": 1, "name": H100, "memory_mib": 81920.0, "driver": "570.86", "uuid": "GPU-2"
    }  # fmt: skip


def test_nvml_names_slices_and_says_why_it_fails(stubs: Machine):
    stubs.nvml("-DSLICES=2")
    assert stubs.see().names == (f"{H100} MIG 1g.10gb",)
    gpus._machine.cache_clear()
    stubs.nvml("-DSLICES=0", "-DSTATUS=18")
    seen = stubs.see()
    assert seen.names == ()
    assert seen.fault == "nvidia-smi is not installed; NVML: RM has detected an NVML/RM version mismatch."


def test_a_machine_without_the_package_has_the_drivers_files(stubs: Machine, monkeypatch: pytest.MonkeyPatch):
    """A base Python with nothing installed stands for an environment that was made before the package was needed."""
    bare = stubs.root / "bin" / "python"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(gpus.sys, "executable", str(bare))
    stubs.driver(H100)
    (stubs.root / "dev" / "nvidiactl").touch()
    seen = stubs.see()
    assert (seen.names, seen.source) == ((H100,), str(gpus.DRIVER))
    assert seen.fault.endswith("NVML: the Python package nvidia-ml-py is not installed")


def test_a_driver_that_hangs_in_the_library_costs_seconds(stubs: Machine, monkeypatch: pytest.MonkeyPatch):
    assert gpus.NVML_SECONDS <= 3
    monkeypatch.setattr(gpus, "NVML_SECONDS", 1.0)
    stubs.nvml("-DSLICES=0", "-DSTATUS=(sleep(60), 0)")
    stubs.driver(H100)
    begun = time.monotonic()
    seen = stubs.see()
    assert seen.names == (H100,) and "did not answer within 1 s" in seen.fault
    assert time.monotonic() - begun < 20


def test_only_gpus_with_a_device_file_are_this_containers(stubs: Machine):
    stubs.driver(H100, H100, H100, device_files=1)
    assert stubs.see().names == (H100,)


@pytest.mark.parametrize(
    ("text", "status", "fault"),
    [
        ("", 0, ""),
        ("No devices were found\n", 6, "No devices were found"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9, "couldn't communicate"),
    ],
)
def test_no_gpu_and_why(stubs: Machine, text: str, status: int, fault: str):
    stubs.smi(text, status)
    seen = stubs.see()
    assert seen.names == () and fault in seen.fault and bool(fault) == bool(seen.fault)


def test_a_machine_without_anything_needs_no_process(stubs: Machine):
    seen = stubs.see()
    assert seen == gpus.GpuInventory() and seen.why == "no GPU is visible"


def test_a_tools_own_sentence():
    answer = ask("sh", "-c", "echo 'warning: x' >&2; echo 'fatal: detected \x1b[7mdubious ownership' >&2; exit 3")
    assert not answer and answer.status == 3
    assert answer.fault == "fatal: detected \\x1b[7mdubious ownership"
    assert ask("sh", "-c", "exit 4").fault == "sh ended with status 4 and printed nothing"
    assert ask("no-such-tool").is_missing and ask(os.devnull).fault.startswith(f"{os.devnull} cannot be run")
    assert ask(sys.executable, "-c", "print(1)").output == "1\n"
    assert sentence("\n one \n two\n") == "one"


def test_git_says_why_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = f"fatal: detected dubious ownership in repository at '{tmp_path}'"
    stub = tmp_path / "git"
    stub.write_text(f'#!/bin/sh\necho "{said}" >&2\necho "To add an exception, call:" >&2\nexit 128\n')
    stub.chmod(0o755)
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine.checkout(tmp_path) == (None, None, said)
    assert machine.commit(tmp_path) == (None, None)
    assert machine.commits(tmp_path, None)["faults"] == said
    assert machine.checkout(tmp_path / "none") == (None, None, "")
