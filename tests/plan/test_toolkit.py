"""What a CUDA toolkit that is a compiler alone is completed with, so that the engines' kernels can be compiled."""

from pathlib import Path

import pytest
from harness import Project

from t5bench.plan import toolkit


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit without libraries, nvcc on PATH through a wrapper, and torch's nvidia packages, all of CUDA 13."""
    for name in ("toolkit/bin/nvcc", "bin/nvcc", "nvidia/cu13/include/cusparse.h", "nvidia/cu13/lib/libcurand.so.10"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    home = tmp_path / "toolkit"
    (home / "bin" / "nvcc").write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88" && exit\n'
        f'echo "#\\$ _HERE_={home}/bin" >&2; echo "#\\$ TOP={home}/bin/.." >&2\n'
    )
    (tmp_path / "bin" / "nvcc").write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    for program in ("bin/nvcc", "toolkit/bin/nvcc"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(toolkit, "versions", lambda: {"cuda": "13.0"})
    return tmp_path


def complete(cuda: Path, **environment: str) -> dict[str, str]:
    searched = {"PATH": f"{cuda / 'bin'}:/usr/bin:/bin"} | environment
    return toolkit.completions(searched, cuda / "links", [cuda / "nvidia"])


def test_a_bare_toolkit_behind_a_wrapper_is_found_and_completed(cuda: Path):
    assert complete(cuda, LIBRARY_PATH="/own") == {
        "CUDA_HOME": str(cuda / "toolkit"),
        "CPATH": str(cuda / "nvidia" / "cu13" / "include"),
        "LIBRARY_PATH": f"/own:{cuda / 'links'}",
    }
    link = cuda / "links" / "libcurand.so"
    assert link.resolve() == cuda / "nvidia" / "cu13" / "lib" / "libcurand.so.10"
    # Of another environment, which is gone.
    link.unlink()
    link.symlink_to("/gone/libcurand.so.10")
    complete(cuda)
    assert link.exists()


def test_a_whole_toolkit_is_left_alone(cuda: Path):
    (cuda / "toolkit" / "include").mkdir()
    (cuda / "toolkit" / "include" / "cusparse.h").touch()
    assert complete(cuda).keys() == {"CUDA_HOME"}
    assert complete(cuda, CUDA_HOME=str(cuda / "toolkit")) == {}
    assert complete(cuda, PATH=f"{cuda / 'toolkit' / 'bin'}:/usr/bin:/bin") == {}


def test_headers_of_another_cuda_are_not_mixed_in(cuda: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolkit, "versions", lambda: {"cuda": "12.4"})
    assert complete(cuda).keys() == {"CUDA_HOME"}


def test_without_nvcc_nothing_is_completed(cuda: Path):
    assert complete(cuda, PATH="/nonexistent") == {}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_run_on_a_gpu_is_told(project: Project, cuda: Path, device: str):
    project.set_gpus(1)
    path = f"{cuda / 'bin'}:{project.environment['PATH']}"
    assert project.launch("ddp", PATH=path, DEVICE=device).returncode == 0
    home = str(cuda / "toolkit") if device == "cuda" else None
    assert project.recorded_environment().get("CUDA_HOME") == home
