"""Records of where data came from, and the facts in them."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, digest

SAMPLE = REPOSITORY / "megatron_data" / "sample"


def one_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


def file_facts(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": digest(stream)}


def record_path(prefix: Path) -> Path:
    """The record of a dataset, or, for the prefix `xsum_text`, of the exported `xsum_text.jsonl`."""
    return Path(f"{prefix}.meta.json")


def read_record(prefix: Path) -> dict[str, Any]:
    """The record that says where the files of this prefix came from; empty if there is no such record."""
    try:
        record = json.loads(record_path(prefix).read_text(encoding="utf-8"))
        return record if isinstance(record["source"], str) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def write_record(prefix: Path, record: Mapping[str, Any]) -> None:
    record_path(prefix).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def recorded_name(name: str, kind: str = "") -> str:
    """A file or directory as records name it: `kind` and its absolute path, the bundled sample, or a hub's name."""
    path = Path(name).resolve()
    if SAMPLE.resolve() in path.parents:
        return "bundled sample"
    return f"{kind}{path}" if path.exists() else name


def command(script: str, directory: Path, family: str, settings: str = "") -> str:
    """Runs a script on the data in this directory. settings: further ones, each with a blank after it."""
    default = REPOSITORY / "megatron_data" / ("" if family == "t5" else family)
    words = "" if family == "t5" else f"MODEL_FAMILY={family} "
    words += "" if directory == default else f"MEGATRON_DATA_DIR={shlex.quote(str(directory))} "
    return f"{words}{settings}bash {shlex.quote(f'{REPOSITORY}/scripts/{script}')}"


def preparation(directory: Path, family: str, settings: str = "") -> str:
    """The command that prepares the data of this directory."""
    return command("prepare_xsum_megatron.sh", directory, family, settings)
