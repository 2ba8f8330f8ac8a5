"""Environments for the releases of a library: made with uv, kept in the cache, and shared between ledgers.

A release is one folder that holds the library alone, transformers with what it pins, and comes first on PYTHONPATH.
Everything else, torch above all, is
the running Python's; with another torch it is that of one virtual environment for this torch.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from t5bench import REPOSITORY, Problem, note

ENVIRONMENTS = Path("~/.cache/t5-parallelism/ledger").expanduser()
# What building DeepSpeed from its source needs, without compiling its operators.
BUILD_TOOLS = ("setuptools", "wheel", "packaging")
# Of transformers each release pins its own tokenizers and huggingface_hub; none of them brings torch.
INSTALLATION = {
    "deepspeed": ("--no-deps", "--no-build-isolation"),
    "accelerate": ("--no-deps",),
    "transformers": (),
}
# Of this package, which need not be installed.
OWN_FOLDER = Path(__file__).resolve().parents[1]
BUILD = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
# The last lines of a failed installation.
LINES_SHOWN = 15


def uv_command() -> list[str]:
    """Raises Problem if there is no uv."""
    path = shutil.which("uv")
    if path:
        return [path]
    has_module = subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False)
    if has_module.returncode == 0:
        return [sys.executable, "-m", "uv"]
    raise Problem("uv, which makes the environments of the ledger, is not installed", "Run: pip install uv")


def run_uv(*arguments: str | Path, must: bool = True) -> bool:
    """Whether it succeeded. Raises Problem if it must and did not."""
    result = subprocess.run(
        [*uv_command(), *map(str, arguments)],
        env=os.environ | BUILD,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode and must:
        end = "\n".join(result.stdout.splitlines()[-LINES_SHOWN:])
        raise Problem(f"uv {' '.join(map(str, arguments[:2]))} failed", f"It said:\n{end}")
    return result.returncode == 0


def own_torch() -> str:
    """The running Python's release."""
    return metadata.version("torch").partition("+")[0]


def base_python(torch: str | None) -> Path:
    """The Python whose packages all releases share: the running one, or one with this release of torch."""
    if not torch:
        return Path(sys.executable)
    directory = ENVIRONMENTS / f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{torch}"
    python = directory / "bin" / "python"
    if (directory / "complete").exists():
        return python
    note(f"making an environment with torch {torch} in {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    run_uv("venv", "--quiet", "--python", sys.executable, directory)
    install = ("pip", "install", "--python", python)
    # The index may lack a build for CPUs of this release; then it is CUDA's, which runs on a CPU as well.
    has_cpu_build = not shutil.which("nvidia-smi") and run_uv(
        *install, "--torch-backend", "cpu", f"torch=={torch}", must=False
    )
    if not has_cpu_build:
        run_uv(*install, f"torch=={torch}")
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith(("#", "deepspeed"))]
    run_uv(*install, *BUILD_TOOLS, *packages, f"torch=={torch}")
    # DeepSpeed's own dependencies, without DeepSpeed.
    run_uv(*install, "hjson", "msgpack", "psutil", "py-cpuinfo", "pydantic>=2", f"torch=={torch}")
    (directory / "complete").touch()
    return python


def folder_of(release: str, torch: str | None, library: str) -> Path:
    """Where a release is, once it is installed."""
    return ENVIRONMENTS / f"{library}{release}-python{sys.version_info[0]}.{sys.version_info[1]}-torch{torch or 'own'}"


def release_folder(release: str, python: Path, torch: str | None, library: str = "deepspeed") -> Path:
    """The folder that holds this release, installed if it is not there."""
    folder = folder_of(release, torch, library)
    if folder.exists():
        return folder
    note(f"installing {library} {release} in {folder}")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    install = ("pip", "install", "--quiet", "--python", python, "--target", partial)
    run_uv(*install, *INSTALLATION[library], f"{library}=={release}")
    try:
        partial.rename(folder)
    except OSError:  # another ledger was faster
        shutil.rmtree(partial)
    return folder


def environment(folders: Sequence[Path], added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that finds these folders' packages before all others."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | dict(added) | {"PYTHONPATH": os.pathsep.join(map(str, [*folders, REPOSITORY, OWN_FOLDER]))}
