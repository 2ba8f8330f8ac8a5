"""What a machine without internet needs besides Python and torch, in one file.

    python -m t5bench.tools.acceptance.bundle pack FILE           packs it, where there is internet
    python -m t5bench.tools.acceptance.bundle make -C DIRECTORY   compiles the engine's index helper, as make does

Packages lie in it as installed, next to a patched engine, so that the other machine builds and downloads nothing. They
come before the ones of its Python, but torch and what usually comes with it are not among them: its torch matches its
CUDA.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from t5bench import REPOSITORY, Problem, note
from t5bench.plan import engine
from t5bench.record.status import CONFIGURATION, EXIT_CODES
from t5bench.text import guard_streams

# What DeepSpeed and the records need, and images with PyTorch and Transformers usually lack.
CARRIED = (
    "deepspeed",
    "hjson",
    "msgspec",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "nvidia-ml-py",
)
# Built from its sources: pure Python as long as no operator is compiled ahead, so it serves every machine.
BUILT = "deepspeed"
# pip takes each name exactly.
MANYLINUX = ("_2_28", "_2_27", "_2_17", "2014", "1", "_2_5")
# Of the engine: what its checksums cover, and no documents, examples or tests.
ENGINE_PARTS = ("megatron", "tools", "tests/__init__.py", "*.py")
HELPER = Path("megatron/data/helpers.cpp")
# A program that prints what compile_helper needs to know of a Python.
INCLUDE_AND_SUFFIX = (
    "import sysconfig; print(sysconfig.get_path('include')); print(sysconfig.get_config_var('EXT_SUFFIX'))"
)


def requirements() -> dict[str, str]:
    """The lines of requirements.txt by the package's name."""
    by_name = {}
    for line in (REPOSITORY / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name = re.split("[<=>]", line, maxsplit=1)[0]
            by_name[name] = line
    return by_name


def pip(*arguments: str | Path) -> None:
    """Raises Problem if pip fails, which says why."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command += map(str, arguments)
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    ended = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if ended.returncode:
        remedy = f"See pip's message above; {BUILT} is built with {sys.executable}"
        raise Problem("cannot pack the Python packages", remedy)


def pack(file: Path, python: str, more: list[str], engine_directory: Path) -> None:
    """python: the version of the machine that will use it, on x86-64 Linux; more: further packages. Raises Problem."""
    state = engine.state_of(engine_directory)
    if state != engine.SERIES:
        remedy = "Run: INSTALL=0 bash scripts/setup_megatron.sh"
        raise Problem(f"the engine in {engine_directory} is {state}, but the bundle holds it patched", remedy)
    pinned = requirements()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "bundle")
        site = root / "site-packages"
        wheels = Path(scratch, "wheels")
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, pinned[BUILT])
        names = [pinned.get(name, name) for name in (*CARRIED, *more) if name != BUILT]
        platforms = [f"--platform=manylinux{version}_x86_64" for version in MANYLINUX]
        target = ("--python-version", python, "--implementation", "cp", *platforms, "--only-binary=:all:")
        pip("download", "--no-deps", *target, "--dest", wheels, *names)
        pip("install", "--no-deps", "--no-compile", *target, "--target", site, *sorted(wheels.iterdir()))
        copy_engine(engine_directory, root / "Megatron-DeepSpeed")
        compile_ahead(root / "Megatron-DeepSpeed", python)
        (root / "python").write_text(f"{python}\n")
        described = ["git", "-C", str(REPOSITORY), "describe", "--always", "--abbrev=40", "--dirty"]
        commit = subprocess.run(described, capture_output=True, text=True, check=False)
        (root / "commit").write_text(commit.stdout)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:xz") as archive:
            archive.add(root, arcname=".")
    size = file.stat().st_size / 1e6
    note(f"packed {size:.1f} MB in {file}: copy it and this repository to the other machine, and run there")
    note("  BUNDLE=<its path> bash scripts/gpu_acceptance.sh")


def copy_engine(source: Path, target: Path) -> None:
    """Without the engine's git history: the launchers check its files' checksums."""
    for pattern in ENGINE_PARTS:
        for path in source.glob(pattern):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "build", "*.so")
                shutil.copytree(path, copy, ignore=ignored)
            else:
                shutil.copy2(path, copy)


# ---- the engine's index helper -------------------------------------------------------------------------------------


def compile_ahead(directory: Path, python: str) -> None:
    """Compiles the index helper for another Python, if that one is here too."""
    is_this_one = python == sysconfig.get_python_version()
    interpreter = sys.executable if is_this_one else shutil.which(f"python{python}")
    if interpreter and shutil.which("g++"):
        answer = subprocess.run(
            [interpreter, "-c", INCLUDE_AND_SUFFIX],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode == 0 and compile_helper(directory, *answer.stdout.split()) == 0:
            return
    note(f"there is no Python {python} with g++ here: the other machine compiles the engine's index helper, in seconds")


def compile_helper(directory: Path, include: str, suffix: str) -> int:
    """What megatron/data/Makefile does, without make. Its exit status."""
    import pybind11

    source = directory / HELPER
    built = source.with_name(f"helpers{suffix}")
    if built.exists() and built.stat().st_mtime >= source.stat().st_mtime:
        return 0
    flags = ["-O3", "-Wall", "-shared", "-std=c++11", "-fPIC", f"-I{include}", f"-I{pybind11.get_include()}"]
    unfinished = built.with_name(f"{built.name}.{os.getpid()}")
    status = subprocess.run(["g++", *flags, str(source), "-o", str(unfinished)], check=False).returncode
    if status == 0:
        unfinished.replace(built)
    return status


def write_make(path: Path, python: Path) -> None:
    """Writes a make for the engine, which calls ``make -C megatron/data``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    module = shlex.join([str(python), "-m", "t5bench.tools.acceptance.bundle", "make"])
    path.write_text(f'#!/usr/bin/env bash\nPYTHONPATH={shlex.quote(str(REPOSITORY))}:$PYTHONPATH exec {module} "$@"\n')
    path.chmod(0o755)


def main(task: str, arguments: list[str], environment: Mapping[str, str]) -> int:
    """Raises Problem."""
    if task == "pack":
        more = environment["CARRY"].split()
        pack(Path(arguments[0]), environment["TARGET_PYTHON"], more, Path(environment["MEGATRON_DIR"]))
        return 0
    directory = Path(arguments[-1]).resolve().parents[1]
    return compile_helper(directory, sysconfig.get_path("include"), sysconfig.get_config_var("EXT_SUFFIX"))


if __name__ == "__main__":
    guard_streams()
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:], os.environ))
    except Problem as problem:
        note(problem.report)
        sys.exit(EXIT_CODES[CONFIGURATION])
