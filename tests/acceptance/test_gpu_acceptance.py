"""scripts/gpu_acceptance.sh: what it refuses, its rehearsal, its results, its bundle."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from harness import REPO_ROOT

from t5bench.acceptance import packages, results


def accept(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(REPO_ROOT / "scripts" / "gpu_acceptance.sh"), *arguments]
    settings = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {"ENGINES": "native"}, "there is no GPU here"),
        (["trough"], {}, "unknown argument 'trough'"),
        (["--pack"], {}, "--pack needs a directory"),
        (["--pack", "bundle"], {"MEGATRON_DIR": "/nonexistent"}, "there is no Megatron-DeepSpeed checkout"),
        (["--rehearse"], {"MEGATRON_DIR": "/nonexistent"}, "or set ENGINES=native"),
        (["--rehearse"], {"MINUTES": "ten"}, "MINUTES must be a number of at least 0"),
        (["--rehearse"], {"ENGINES": "native", "STRATEGIES": "ddp zero9"}, "there is no strategy 'zero9'"),
        (["--rehearse"], {"ENGINES": "native", "MICRO_BATCH_SIZES": "8 x"}, "of at least 1, found '8 x'"),
    ],
)
def test_impossible_requests_are_refused_first(tmp_path: Path, arguments: list, environment: dict, message: str):
    result = accept(*arguments, CUDA_VISIBLE_DEVICES="", WORK_DIR=str(tmp_path / "work"), **environment)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_gpu_that_torch_does_not_see_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stub = tmp_path / "nvidia-smi"
    stub.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: Stub" || echo "0, NVIDIA Stub, 81559, 470.1, GPU-0"\n')
    stub.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = accept(PATH=path, ENGINES="native", WORK_DIR=str(tmp_path / "work"), RESULTS_DIR=str(tmp_path / "results"))
    assert result.returncode == 2
    assert "NVIDIA Stub, 81559.0 MiB, driver 470.1" in result.stderr and "does not see it" in result.stderr


@pytest.mark.slow
def test_the_rehearsal_goes_through_everything_once(tmp_path: Path):
    """One engine, strategy and size: what differs on a GPU are the device, the sizes and the compilers."""
    chosen = {"ENGINES": "native", "STRATEGIES": "zero1", "MICRO_BATCH_SIZES": "4", "GLOBAL_BATCH_SIZE": "4"}
    chosen |= {"MINUTES": "8", "WORK_DIR": str(tmp_path / "a path with spaces")}
    left = tmp_path / "a path with spaces" / "rehearsal" / "results"
    result = accept("--rehearse", timeout=590, **chosen)
    assert result.returncode == 0, result.stderr
    found = json.loads((left / "results.json").read_text())
    large = results.rows_of(found["large"])
    assert [(row["strategy"], row["status"]) for row in large] == [("ddp", "complete"), ("zero1", "complete")]
    points = found["throughput"]
    assert [p["engine"] for p in points] == ["native engine", "Hugging Face, eager", "Hugging Face, compiled"]
    # The same matrix products in each, and a profile of each.
    products = [point["tflops_per_gpu"] * point["milliseconds_per_iteration"]["median"] for point in points]
    assert products == pytest.approx(products[:1] * 3)
    assert all("in the backward pass" in point["limits"] for point in points)
    assert list(found["devices"]) == ["device", "device-after"]
    assert "PASS: " in found["parity"]["parity-native"]
    text = (left / "README.md").read_text()
    for part in ("the figures mean nothing", "\n## The device at its best\n", "| zero1† ", "| Hugging Face, compiled "):
        assert part in text
    with tarfile.open(left / "records.tar.xz") as archive:
        names = set(archive.getnames())
    assert names > {"records/runs/large/native/repeat1/zero1/node0.log", "records/runs/large-comparison/index.html"}
    assert not any(name.endswith((".bin", ".pt", "results.json")) for name in names)
    again = accept("--rehearse", timeout=120, **chosen)
    assert again.returncode == 0 and ": passed, " not in again.stderr, "nothing is done again"


def test_only_missing_packages_are_installed_next_to_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(packages, "required", lambda: {"quite-unheard_of": "quite-unheard_of==1.0", "lost": "lost>=2"})
    assert packages.complete(site) == ["quite-unheard_of==1.0", "lost>=2"]
    for name in ("quite_unheard_of", "numpy"):  # numpy of any version: what is there was made for this machine
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "here = True\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    assert packages.complete(site, tmp_path) == ["lost>=2"]
    assert (site / "quite_unheard_of.py").exists()
    assert not (site / "numpy.py").exists()


def test_every_package_that_the_engines_need_is_carried():
    """Of requirements.txt a machine with torch's usual companions gets the rest from the bundle."""
    image = {"numpy", "transformers", "tokenizers", "tensorboard", "setuptools"}
    assert packages.required().keys() <= {*image, *packages.CARRIED, packages.BUILT, *packages.NOT_NEEDED}
