"""What a node is and runs: devices, library versions, commits, data. It imports no torch and never fails."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t5bench import digest
from t5bench.record.text import in_texts

_LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "wandb", "flash_attn", "apex", "triton")
_RECORDED_VARIABLES = re.compile(
    r"^(NCCL|CUDA|TORCH|PYTORCH|GLOO|OMP|MKL|DS|UCX|FI|SLURM_JOB|SLURM_NODE|HF_HOME|WANDB_(MODE|RUN_GROUP|ENTITY))"
)
_SECRET_NAME = re.compile(r"(^|_)((API_?|ACCESS_?)?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHORTEST_SECRET = 8
HIDDEN = "***"


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Values that must not reach a file, the longest first."""
    values = {v for k, v in environment.items() if _SECRET_NAME.search(k) and len(v) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)


def hide(value: Any, hidden: Sequence[str]) -> Any:
    """The same text, list or mapping without the secrets."""

    def covered(text: str) -> str:
        for secret in hidden:
            text = text.replace(secret, HIDDEN)
        return text

    return in_texts(value, covered)


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run computes or communicates."""
    found = {key: value for key, value in sorted(environment.items()) if _RECORDED_VARIABLES.match(key)}
    return {key: HIDDEN if _SECRET_NAME.search(key) else value for key, value in found.items()}


def _output(*command: str) -> str:
    """What a command printed; '' if it is missing, failed or did not end in time."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def _found(pattern: str, path: Path) -> str | None:
    """The pattern's first group, from the first line of the file that matches."""
    try:
        match = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


# ---- software ------------------------------------------------------------------------------------------------------


def _metadata(distribution: str) -> Path | None:
    """The metadata of an installed distribution. Its name has underscores, and may have a ``*``.

    By the folder's name: importlib.metadata would take a good part of the time that a launcher has.
    """
    return next((path for folder in sys.path for path in Path(folder).glob(f"{distribution}-*.dist-info")), None)


def installed_version(distribution: str) -> str | None:
    metadata = _metadata(distribution)
    return metadata.name.removesuffix(".dist-info").split("-", 1)[1] if metadata else None


def versions() -> dict[str, str | None]:
    """Versions of what computes, None for what is not installed. ``cuda`` is the one that torch was built for.

    NVIDIA's Apex, unlike the package of the same name, has an amp module.
    """
    found = {"python": platform.python_version()} | {name: installed_version(name) for name in _LIBRARIES}
    if (apex := _metadata("apex")) and not (apex.parent / "apex" / "amp").is_dir():
        found["apex"] = None
    found["nccl"], torch = installed_version("nvidia_nccl_cu*"), _metadata("torch")
    pattern = r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)"
    found["cuda"] = _found(pattern, torch.parent / "torch" / "version.py") if torch else None
    return found


def commit(directory: Path) -> tuple[str | None, bool | None]:
    """The commit of a git checkout and whether tracked files were changed; None if that is not known."""
    if not (directory / ".git").exists():
        return None, None
    described = _output("git", "-C", str(directory), "describe", "--match=", "--always", "--abbrev=40", "--dirty")
    head, _, dirty = described.strip().partition("-")
    return (head, bool(dirty)) if head else (None, None)


def commits(repository: Path, engine: Path | None) -> dict[str, Any]:
    """The commits. The patches change the engine's files, so only its commit counts; checksums cover the files."""
    head, changed = commit(repository)
    return {"repository": head, "repository_changed": changed, "engine": commit(engine)[0] if engine else None}


def checksum(path: Path) -> str | None:
    """sha256 in hexadecimal."""
    try:
        with path.open("rb") as file:
            return digest(file)
    except OSError:
        return None


def patches(repository: Path) -> dict[str, str | None]:
    """The patches in the order in which they are applied, with their checksums."""
    names = (repository / "patches" / "series").read_text().split()
    return {name: checksum(repository / "patches" / name) for name in names}


def data(prefix: Path, tokenizer: str) -> dict[str, Any]:
    """The indexed dataset. The index has every document's length, so its checksum represents the corpus."""
    try:
        size = Path(f"{prefix}.bin").stat().st_size
    except OSError:
        size = None
    index = checksum(Path(f"{prefix}.idx"))
    return {"prefix": str(prefix), "bin_bytes": size, "idx_sha256": index, "tokenizer": tokenizer}


# ---- hardware ------------------------------------------------------------------------------------------------------


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """nvidia-smi's option for the GPUs that CUDA shows to this run; empty when it shows all."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return ["-i", visible] if visible else []


def gpus(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The visible GPUs; memory in MiB."""
    query = ["--query-gpu=index,name,memory.total,driver_version,uuid", "--format=csv,noheader,nounits"]
    lines = _output("nvidia-smi", *visible_gpus(environment), *query).splitlines()
    rows = [values for line in lines if len(values := line.split(", ")) == 5 and values[0].isdigit()]
    return [
        {"index": int(index), "name": name, "memory_mib": float(memory) if memory.replace(".", "").isdigit() else None,
         "driver": driver, "uuid": uuid} for index, name, memory, driver, uuid in rows
    ]  # fmt: skip


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and memory in MiB."""
    return {
        "model": _found(r"^model name\s*: (.*)$", Path("/proc/cpuinfo")) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
    }


def oom_kills() -> int:
    """Processes that this machine's kernel has killed since it started because memory ran out."""
    return int(_found(r"^oom_kill (\d+)", Path("/proc/vmstat")) or 0)
