"""How a CUDA toolkit that is only a compiler is completed, so that the engines' kernels can be compiled."""

from pathlib import Path

import pytest
from harness import Project

from t5bench.plan import toolkit

NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88" && exit
echo '#$ _HERE_={home}/bin' >&2; echo '#$ TOP={home}/bin/..' >&2
"""


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit without libraries, nvcc on PATH through a wrapper, and torch's nvidia packages, all of CUDA 13."""
    home, contents = tmp_path / "toolkit", {"nvidia/cu13/include/cusparse.h": "", "nvidia/cu13/lib/libcurand.so.10": ""}
    contents["toolkit/bin/nvcc"] = NVCC.format(home=home)
    contents["bin/nvcc"] = f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n'
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(toolkit, "versions", lambda: {"cuda": "13.0"})
    return tmp_path


def complete(cuda: Path, **environment: str) -> dict[str, str]:
    searched = {"PATH": f"{cuda / 'bin'}:/usr/bin:/bin"} | environment
    return toolkit.completions(searched, cuda / "links", [cuda / "nvidia"])


def test_a_toolkit_behind_a_wrapper_is_found_and_completed(cuda: Path):
    link = cuda / "links" / "libcurand.so"
    link.parent.mkdir()
    link.symlink_to("/gone/libcurand.so.10")  # of another environment
    assert complete(cuda, LIBRARY_PATH="/own") == {
        "CUDA_HOME": str(cuda / "toolkit"),
        "CPATH": str(cuda / "nvidia" / "cu13" / "include"),
        "LIBRARY_PATH": f"/own:{cuda / 'links'}",
    }
    assert link.resolve() == cuda / "nvidia" / "cu13" / "lib" / "libcurand.so.10"


def test_complete_missing_or_other_toolkits_are_left_alone(cuda: Path, monkeypatch: pytest.MonkeyPatch):
    assert complete(cuda, PATH="/nonexistent") == {}
    with monkeypatch.context() as patch:
        patch.setattr(toolkit, "versions", lambda: {"cuda": "12.4"})
        assert complete(cuda).keys() == {"CUDA_HOME"}
    (cuda / "toolkit" / "include").mkdir()
    (cuda / "toolkit" / "include" / "cusparse.h").touch()
    assert complete(cuda).keys() == {"CUDA_HOME"}
    assert complete(cuda, CUDA_HOME=str(cuda / "toolkit")) == {}
    assert complete(cuda, PATH=f"{cuda / 'toolkit' / 'bin'}:/usr/bin:/bin") == {}


def test_a_gpu_run_gets_cuda_home_and_a_cpu_run_does_not(project: Project, cuda: Path):
    project.set_gpus(1)
    for device, home in (("cuda", str(cuda / "toolkit")), ("cpu", None)):
        path = f"{cuda / 'bin'}:{project.environment['PATH']}"
        assert project.launch("ddp", PATH=path, DEVICE=device, OUTPUT_DIR=device).returncode == 0
        assert project.recorded_environment().get("CUDA_HOME") == home
