"""What a node is and runs: devices, library versions, commits, data. It imports no torch and never fails."""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "wandb", "flash_attn", "apex", "triton")
_RECORDED_VARIABLES = re.compile(
    r"^(NCCL|CUDA|TORCH|PYTORCH|GLOO|OMP|MKL|DS|UCX|FI|SLURM_JOB|SLURM_NODE|HF_HOME|WANDB_(MODE|RUN_GROUP|ENTITY))"
)
_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|ACCESS_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_SHORTEST_SECRET = 8
HIDDEN = "***"


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Values that must not reach a file, the longest first."""
    values = {v for k, v in environment.items() if _SECRET_NAME.search(k) and len(v) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)


def hide(value: Any, hidden: Sequence[str]) -> Any:
    """The same text, list or mapping without the secrets."""
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {key: hide(entry, hidden) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [hide(entry, hidden) for entry in value]
    return value


def _output(*command: str, seconds: float = 10) -> str | None:
    """What a command printed; None when it is missing, failed or did not end in time."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Versions of what computes, None for what is not installed. ``cuda`` is the one that torch was built for.

    NVIDIA's Apex is told from the package of the same name by its amp.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["apex"] and not (Path(str(metadata.distribution("apex").locate_file("apex"))) / "amp").is_dir():
        found["apex"] = None
    found["nccl"] = next(
        (d.version for d in metadata.distributions() if (d.name or "").startswith("nvidia-nccl-cu")), None
    )
    found["cuda"] = _torch_cuda()
    return found


def _torch_cuda() -> str | None:
    spec = util.find_spec("torch")
    if spec and spec.origin:
        try:
            text = Path(spec.origin).with_name("version.py").read_text()
        except OSError:
            return None
        if match := re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE):
            return match[1]
    return None


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """nvidia-smi's option for the GPUs that CUDA shows to this run; none when it shows all."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return ["-i", visible] if visible else []


def gpus(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The visible GPUs; memory in MiB."""
    text = _output(
        "nvidia-smi",
        *visible_gpus(environment),
        "--query-gpu=index,name,memory.total,driver_version,uuid",
        "--format=csv,noheader,nounits",
    )
    found = []
    for line in (text or "").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == 5 and values[0].isdigit():
            index, name, memory, driver, uuid = values
            memory_mib = float(memory) if memory.replace(".", "").isdigit() else None
            found.append({"index": int(index), "name": name, "memory_mib": memory_mib, "driver": driver, "uuid": uuid})
    return found


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and memory in MiB."""
    model, memory = None, None
    try:
        model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        memory = re.search(r"^MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        pass
    return {
        "model": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": int(memory[1]) // 1024 if memory else None,
    }


def oom_kills() -> int:
    """Processes that this machine's kernel has killed for want of memory since it started."""
    try:
        match = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def commit(directory: Path) -> tuple[str | None, bool | None]:
    """The commit of a git checkout and whether tracked files were changed; None where that is not known."""
    if not (directory / ".git").exists():
        return None, None
    head = _output("git", "-C", str(directory), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no")
    return head.strip() if head else None, bool(changed.strip()) if changed is not None else None


def commits(repository: Path, engine: Path | None) -> dict[str, Any]:
    """The engine's own files are changed by the patches, so only its commit is told; the checksums tell the rest."""
    head, changed = commit(repository)
    return {
        "repository": head,
        "repository_changed": changed,
        "engine": commit(engine)[0] if engine else None,
    }


def checksum(path: Path) -> str | None:
    """sha256 in hexadecimal."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def patches(repository: Path) -> dict[str, str | None]:
    """The patches in the order in which they are applied, with their checksums."""
    try:
        names = (repository / "patches" / "series").read_text().split()
    except OSError:
        return {}
    return {name: checksum(repository / "patches" / name) for name in names}


def data(prefix: Path, tokenizer: str) -> dict[str, Any]:
    """The indexed dataset: the index has every document's length, and its checksum stands for the corpus."""
    try:
        size = prefix.with_name(prefix.name + ".bin").stat().st_size
    except OSError:
        size = None
    return {
        "prefix": str(prefix),
        "bin_bytes": size,
        "idx_sha256": checksum(prefix.with_name(prefix.name + ".idx")),
        "tokenizer": tokenizer,
    }


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run computes or communicates."""
    return {
        key: HIDDEN if _SECRET_NAME.search(key) else value
        for key, value in sorted(environment.items())
        if _RECORDED_VARIABLES.match(key)
    }


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def pairs(words: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE words as a mapping."""
    return dict(word.partition("=")[::2] for word in words)
