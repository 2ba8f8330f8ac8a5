"""scripts/gpu_acceptance.sh: what it refuses, its time, its bundle, and a rehearsal whose packages can be verified."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO_ROOT


def accept(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "BUNDLE": str(tmp_path / "bundle")}
    settings |= {"RESULTS_DIR": str(tmp_path / "results"), "WORK_DIR": str(tmp_path / "a path with spaces")}
    settings |= {"MEGATRON_DIR": str(tmp_path / "absent")} | environment
    command = ["bash", str(REPO_ROOT / "scripts" / "gpu_acceptance.sh"), *arguments]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "PyTorch sees no GPU here"),
        (["--rehearse", "native-al"], {}, "there is no step 'native-al'"),
        (["--trough"], {}, "unknown option '--trough'"),
        (["--rehearse"], {"MINUTES": "ten"}, "MINUTES must be"),
    ],
)
def test_impossible_requests_are_refused_first(tmp_path: Path, arguments: list, environment: dict, message: str):
    result = accept(tmp_path, *arguments, **environment)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "results").exists()


def test_no_step_begins_for_which_too_little_time_is_left(tmp_path: Path):
    result = accept(tmp_path, "--rehearse", "native-ddp", "megatron-all", MINUTES="1")
    assert result.returncode == 3
    assert "native-ddp: not run, it takes about 90 s" in result.stderr
    assert f"megatron-all: not run, {tmp_path}/bundle/Megatron-DeepSpeed, make or g++ is missing" in result.stderr
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["log.txt"]


def test_the_packages_of_the_bundle_are_found(tmp_path: Path):
    packages = tmp_path / "bundle" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "sitecustomize.py").write_text("raise SystemExit('a module of the bundle')\n")
    assert "a module of the bundle" in accept(tmp_path, "--rehearse").stderr


@pytest.mark.nightly
def test_a_rehearsal_leaves_packages_that_can_be_verified(tmp_path: Path):
    result = accept(tmp_path, "--rehearse", "native-ddp", "native-parity", MINUTES="8")
    assert result.returncode == 0, (tmp_path / "results" / "log.txt").read_text()
    for step in ("native-ddp", "native-parity"):
        assert f"{step}: exit status 0" in result.stderr
        package = str(tmp_path / "results" / f"{step}.tar.gz")
        command = [sys.executable, "-m", "t5bench", "verify", package]
        assert subprocess.run(command, capture_output=True, cwd=REPO_ROOT, check=False).returncode == 0
