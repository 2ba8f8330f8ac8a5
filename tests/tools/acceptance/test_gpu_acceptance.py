"""scripts/gpu_acceptance.sh: what it refuses, its rehearsal in a bare environment, its bundle."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support import REPO_ROOT

from t5bench.tools.acceptance import bundle, results
from t5bench.tools.acceptance.__main__ import EXIT_TIME

SCRIPT = str(REPO_ROOT / "scripts" / "gpu_acceptance.sh")
# Of programs, a bare image has coreutils and what the launchers need.
PROGRAMS = """
    bash env timeout setsid sleep mkdir rm mv cat sed date stat touch dirname realpath cp ln id uname grep tr getent
    hostname ps kill nproc sort head tail
"""


def accept(*arguments: str, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {"PYTHON": sys.executable} | environment
    command = ["bash", SCRIPT, *arguments]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {"ENGINES": "native"}, "there is no GPU here"),
        (["trough"], {}, "unknown argument 'trough'"),
        (["--pack"], {}, "--pack needs a file"),
        (["--pack", "bundle"], {"MEGATRON_DIR": "/nonexistent"}, "/nonexistent is missing, but the bundle holds it"),
        (["--rehearse"], {"MINUTES": "ten"}, "MINUTES must be a number of at least 0"),
        (["--rehearse"], {"STRATEGIES": "ddp zero9"}, "there is no strategy 'zero9'"),
        (["--rehearse"], {"BUNDLE": "/nonexistent"}, "there is no bundle /nonexistent"),
        (["--rehearse"], {"CONTINUE": "/nonexistent"}, "/nonexistent cannot be continued"),
    ],
)
def test_impossible_requests_are_refused_first(tmp_path: Path, arguments: list, environment: dict, message: str):
    result = accept(*arguments, CUDA_VISIBLE_DEVICES="", WORK_DIR=str(tmp_path / "work"), **environment)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A PATH without git, make, pip or compilers, on which nvidia-smi fails."""
    directory = tmp_path / "bare"
    directory.mkdir()
    for name in PROGRAMS.split():
        if path := shutil.which(name):
            (directory / name).symlink_to(path)
    (directory / "nvidia-smi").write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    (directory / "nvidia-smi").chmod(0o755)
    return str(directory)


@pytest.fixture
def isolated() -> list[str]:
    """What starts a command without a network, with processes of its own, which all end when it is killed."""
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if not unshare or not ip:
        pytest.skip("without unshare or ip, a command cannot get a network of its own")
    namespaces = ["--map-root-user", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    command = [unshare, *namespaces, "/bin/sh", "-c", f'{ip} link set lo up && exec "$@"', "sh"]
    if subprocess.run([*command, "/bin/true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot give a command a network of its own")
    return command


def was_killed(command: list[str], settings: dict[str, str], output: Path, seconds: float) -> bool:
    """A call that is killed unless it ends before: no step that ended is lost, and none that had passed runs again."""
    before = passed(output)
    log = output.parent / "killed.log"
    output.mkdir(parents=True, exist_ok=True)
    ended_first = False
    with log.open("wb") as errors, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=settings, stdin=subprocess.DEVNULL, stderr=errors, timeout=seconds, check=False)
        ended_first = True
    lines = log.read_text().splitlines()
    ended = {line.partition(":")[0] for line in lines if ": passed" in line}
    assert before | ended <= passed(output)
    begun = {line.partition(" ")[0] for line in lines if line.endswith(" ...")}
    assert begun & before <= {"data"}, "the data are prepared again in each call"
    print(f"{seconds:.0f} s: {len(before)} steps had passed, {len(passed(output))} have, begun: {sorted(begun)}")
    print(*lines, sep="\n")
    return not ended_first


def passed(output: Path) -> set[str]:
    file = output / results.FILE
    if not file.exists():
        return set()
    return {name for name, step in results.read(file).steps.items() if step.result == results.PASSED}


@pytest.mark.nightly
def test_the_rehearsal_goes_through_everything_once_in_a_bare_environment(
    tmp_path: Path, bare: str, isolated: list[str]
):
    """Killed ten times, without a network. One engine, strategy and size: on a GPU the sizes and compilers differ."""
    chosen = {"STRATEGIES": "zero1", "MICRO_BATCH_SIZES": "4", "MINUTES": "6", "PATH": bare}
    chosen |= {"WORK_DIR": str(tmp_path / "a path with spaces"), "MEGATRON_DIR": str(tmp_path / "absent")}
    output = tmp_path / "a path with spaces" / "rehearsal" / "results"
    lock = tmp_path / "a path with spaces" / "torch-extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()  # a call that was killed left it
    generator = random.Random(42)
    command = [*isolated, f"{bare}/bash", SCRIPT, "--rehearse"]
    settings = os.environ | {"PYTHON": sys.executable} | chosen
    kills = [was_killed(command, settings, output, generator.uniform(3, 20)) for _ in range(10)]
    assert all(kills), "ten calls were killed in the middle of their work"
    # On a busy machine the same command continues.
    for _ in range(4):
        result = accept("--rehearse", timeout=590, **chosen)
        if result.returncode != EXIT_TIME:
            break
    assert not lock.exists()
    found = results.read(output / results.FILE)
    ends = {name: step.result for name, step in found.steps.items()}
    assert result.returncode == 0, result.stderr
    assert ends.pop("device-after") == "passed"
    assert {name for name, end in ends.items() if end == "skipped"} == {name for name in ends if "megatron" in name}
    assert "there is no Megatron-DeepSpeed" in found.steps["parity-megatron"].reason
    points = [p for name, step in found.steps.items() for p in step.figures or () if name.endswith("micro-batch-4")]
    products = {p["what"]: p["tflops_per_gpu"] * p["milliseconds_per_iteration"]["median"] for p in points}
    alone = [products[what] for what in ("native ddp", "Hugging Face, eager", "Hugging Face, compiled")]
    assert alone == pytest.approx(alone[:1] * 3), "the same matrix products in each"
    # On a busy machine another part than the backward pass may take the longest.
    assert all(point["limits"] for point in points)
    # Hugging Face's T5 computes attention itself, or through PyTorch, by its release.
    assert all(point["attention"] for point in points if point["what"].startswith("native"))
    assert "PASS: " in found.steps["parity-native"].figures
    assert found.steps["noise-native"].figures == {"loss": 0, "norm": 0}
    text = (output / "README.md").read_text()
    for part in (
        "the figures mean nothing",
        "## The device at its best",
        "| native zero1 ",
        "| Hugging Face, compiled ",
    ):
        assert part in text
    assert all(page.stat().st_size > 100_000 for page in output.glob("comparison-*.html"))
    names = set()
    for records in output.glob("records-*.tar.gz"):
        with tarfile.open(records) as archive:
            names |= set(archive.getnames())
    assert "records/runs/native-zero1-micro-batch-4/node0.log" in names
    assert not any(name.endswith((".bin", ".pt")) for name in names)
    again = accept("--rehearse", timeout=120, **chosen)
    assert again.returncode == 0 and ": passed" not in again.stderr, "nothing is done again"


def test_a_bundle_is_unpacked_once_and_for_its_python_only(tmp_path: Path):
    """Its packages come first, and its engine is used where there is none."""
    content, packed, work = tmp_path / "content", tmp_path / "bundle.tar.xz", tmp_path / "work"
    (content / "site-packages").mkdir(parents=True)
    (content / "site-packages" / "msgspec.py").write_text("raise ImportError('msgspec of the bundle')\n")
    for version, message in ((f"3.{sys.version_info[1]}", "msgspec of the bundle"), ("3.99", "is for Python 3.99")):
        (content / "python").write_text(f"{version}\n")
        with tarfile.open(packed, "w:xz") as archive:
            archive.add(content, arcname=".")
        result = accept("--rehearse", BUNDLE=str(packed), WORK_DIR=str(work), MEGATRON_DIR=str(tmp_path / "absent"))
        assert result.returncode == 2 and message in result.stderr
        assert not (work / "bundle" / "compiled").exists(), "another bundle replaces it"
        (work / "bundle" / "compiled").touch()
        os.utime(packed)
        accept("--rehearse", BUNDLE=str(packed), WORK_DIR=str(work), MEGATRON_DIR=str(tmp_path / "absent"))
        assert (work / "bundle" / "compiled").exists(), "a newer copy of the same bundle does not"


def test_the_engine_is_packed_whole_and_its_helper_compiled_without_make(megatron_dir: Path, tmp_path: Path):
    copy = tmp_path / "engine"
    bundle.copy_engine(megatron_dir, copy)
    assert bundle.engine.state_of(copy) == bundle.engine.SERIES
    make = tmp_path / "make"
    bundle.write_make(make, Path(sys.executable))
    stamps = set()
    for _ in range(2):  # what is built stays
        subprocess.run([str(make), "-C", str(copy / "megatron" / "data")], check=True, env={"PATH": os.environ["PATH"]})
        (built,) = (copy / "megatron" / "data").glob("helpers.*.so")
        stamps.add(built.stat().st_mtime_ns)
    assert len(stamps) == 1
    program = "import helpers; print(helpers.build_mapping.__name__)"
    subprocess.run([sys.executable, "-c", program], cwd=built.parent, check=True)
    assert bundle.engine.state_of(copy) == bundle.engine.SERIES


def test_every_package_that_the_engines_need_is_carried():
    """Of requirements.txt a machine with torch's usual companions gets the rest from the bundle."""
    image = {"numpy", "transformers", "tokenizers", "tensorboard", "setuptools", "sentencepiece", "pybind11", "ninja",
             "einops", "regex", "six", "packaging", "tqdm", "jinja2", "matplotlib"}  # fmt: skip
    not_used_here = {"pyarrow", "wandb"}
    assert bundle.requirements().keys() <= {*image, *bundle.CARRIED, *not_used_here}
