"""What a node is and runs: devices, library versions, commits, data. It imports no torch and never fails."""

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from t5bench import control_groups, digest
from t5bench.record.gpus import GpuInventory, smi_selection, visible_gpus
from t5bench.record.tools import ask
from t5bench.text import in_texts

_LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "wandb", "flash_attn", "apex", "triton")
_RECORDED_VARIABLES = re.compile(
    r"^(NCCL|CUDA|CUBLAS|CUDNN|TORCH|PYTORCH|ATEN|TRITON|GLOO|OMP|GOMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS|DS|DEEPSPEED|UCX|FI|NVTE"
    r"|MALLOC|PYTHONMALLOC|LD_PRELOAD|SLURM_JOB|SLURM_NODE|HF_HOME|WANDB_(MODE|RUN_GROUP|ENTITY))"
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
    apex = _metadata("apex")
    if apex and not (apex.parent / "apex" / "amp").is_dir():
        found["apex"] = None
    found["nccl"] = installed_version("nvidia_nccl_cu*")
    torch = _metadata("torch")
    pattern = r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)"
    found["cuda"] = _found(pattern, torch.parent / "torch" / "version.py") if torch else None
    return found


FIRST_DIGITS = 8  # of a commit, where people read it


class Checkout(NamedTuple):
    """The state of a git checkout."""

    commit: str | None
    is_changed: bool | None
    """Whether tracked files were changed; None, as for the commit, if that is not known."""
    fault: str = ""
    """What git said if it failed, for example about "dubious ownership"."""


def checkout(directory: Path) -> Checkout:
    """The commit of a directory; without one if the directory is not the root of a checkout, or git fails."""
    if not (directory / ".git").exists():
        return Checkout(None, None)
    answer = ask("git", "-C", str(directory), "describe", "--match=", "--always", "--abbrev=40", "--dirty", seconds=10)
    if answer.fault:
        return Checkout(None, None, answer.fault)
    head, _, dirty = answer.output.strip().partition("-")
    return Checkout(head, bool(dirty)) if head else Checkout(None, None)


def commit(directory: Path) -> tuple[str | None, bool | None]:
    """The commit of a git checkout and whether tracked files were changed; None if that is not known."""
    state = checkout(directory)
    return state.commit, state.is_changed


def commits(repository: Path, engine: Path | None) -> dict[str, Any]:
    """The commits. The patches change the engine's files, so only its commit counts; checksums cover the files."""
    states = {"repository": checkout(repository)}
    if engine:
        states["engine"] = checkout(engine)
    described: dict[str, Any] = {
        "repository": states["repository"].commit,
        "repository_changed": states["repository"].is_changed,
        "engine": states["engine"].commit if engine else None,
    }
    faults = [state.fault for state in states.values() if state.fault]
    return described | ({"faults": "; ".join(faults)} if faults else {})


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


def gpus(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The visible GPUs; memory in MiB."""
    inventory = visible_gpus(environment)
    if inventory.source in ("nvidia-smi", "") and not inventory.fault:
        query = ["--query-gpu=index,name,memory.total,driver_version,uuid", "--format=csv,noheader,nounits"]
        answer = ask("nvidia-smi", *smi_selection(environment), *query, environ=environment)
        lines = [line.split(", ") for line in answer.output.splitlines()]
        rows = [words for words in lines if len(words) == 5 and words[0].isdigit()]
        if rows and not answer.fault:
            return [_device(words, inventory) for words in rows]
    return [
        {"index": gpu.index, "name": name, "memory_mib": gpu.memory_mib, "driver": gpu.driver, "uuid": gpu.uuid}
        for gpu, name in zip(inventory.gpus, inventory.names, strict=False)
    ]


def _device(words: Sequence[str], inventory: GpuInventory) -> dict[str, Any]:
    """A GPU from nvidia-smi's table; a MIG slice has its own name, and no memory of its own in that table."""
    index, name, memory, driver, uuid = words
    is_number = memory.replace(".", "").isdigit()
    memory_mib = float(memory) if is_number else None
    if any(gpu.slices for gpu in inventory.gpus):
        name = inventory.names[0]
        memory_mib = None
    return {"index": int(index), "name": name, "memory_mib": memory_mib, "driver": driver, "uuid": uuid}


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and memory in MiB."""
    return {
        "model": _found(r"^model name\s*: (.*)$", Path("/proc/cpuinfo")) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
    }


def oom_kills(system: Path = Path("/")) -> int:
    """Processes of this process's own control group that the kernel has killed because memory ran out.

    Where no control group counts them, those of the whole machine since it started (/proc/vmstat).
    """
    killed = control_groups.killed(system)
    return int(_found(r"^oom_kill (\d+)", system / "proc/vmstat") or 0) if killed is None else killed
