"""A run directory as a record: the part that each node writes, and what the parts say together.

    node<R>.json           what node R knows: settings, command, devices, versions, start, end, status (see recorder.py)
    node<R>.log            its output, each line after the time (UTC) at which it came
    node<R>.samples.jsonl  GPUs and network counters every few seconds (see sampler.py)
    metrics.jsonl          one line for each logged iteration, from the node that has the last rank; {"resumed_from": N}
                           where a run went on from its checkpoint of iteration N
    run.json               all parts as one, made anew whenever a node ends and by ``collect``

Nodes without a shared file system keep their own directory each, with their own parts; run.json then speaks of those.
"""

import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from t5bench.record.log import Iteration, PeakMemory
from t5bench.record.status import of_run

FORMAT = 1
# Of a node's part, what must be the same on all nodes of one run, and stands once in run.json.
SHARED_KEYS = (
    "strategy", "title", "engine", "engine_patches", "settings", "layout", "data", "ds_config", "versions", "commits",
    "patches",
)  # fmt: skip


class RecordError(ValueError):
    """A directory that holds no record, or one that cannot be read; the message is for people."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Written beside and renamed: a reader sees the old or the new, never half of one."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    beside.write_text(json.dumps(content, indent=2, sort_keys=False, allow_nan=False) + "\n")
    beside.replace(path)


def metrics_line(line: Iteration) -> str:
    """One line of metrics.jsonl; a number that is none (nan, inf) is written as the text of it."""
    values = {key: value for key, value in asdict(line).items() if value is not None and key != "begin"}
    return json.dumps({k: v if math.isfinite(v) else str(v) for k, v in values.items()})


def resume_mark(iteration: int) -> str:
    """The line of metrics.jsonl that says: what follows was logged by a run that went on from this iteration."""
    return json.dumps({"resumed_from": iteration})


_ITERATION_FIELDS = {entry.name for entry in fields(Iteration)} - {"begin"}


def read_metrics(path: Path) -> list[Iteration]:
    """The iterations in order. What an attempt logged beyond the iteration from which the next went on is left out."""
    found: dict[int, Iteration] = {}
    begin = 0
    if path.exists():
        for text in path.read_text(errors="replace").splitlines():
            try:
                values = json.loads(text)
                if isinstance(values.get("resumed_from"), int):
                    begin = values["resumed_from"]
                    found = {number: line for number, line in found.items() if number <= begin}
                    continue
                for name in ("lm_loss", "grad_norm", "loss_scale"):
                    if isinstance(values.get(name), str):
                        values[name] = float(values[name])
                values.setdefault("lm_loss", None)
                line = Iteration(**{key: values[key] for key in values.keys() & _ITERATION_FIELDS}, begin=begin)
            except (ValueError, TypeError, AttributeError, KeyError):
                continue  # cut off when the disk was full or the node died
            found[line.iteration] = line
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class Run:
    """One run, from its directory. ``record`` is what stands in run.json."""

    directory: Path
    record: Mapping[str, Any]
    iterations: Sequence[Iteration] = field(repr=False)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def strategy(self) -> str:
        return self.record["strategy"]

    @property
    def engine(self) -> str:
        return self.record["engine"]

    @property
    def status(self) -> str:
        return self.record["status"]

    @property
    def reason(self) -> str:
        return self.record["reason"]

    @property
    def layout(self) -> Mapping[str, int]:
        """nnodes, nproc_per_node, world_size, tp, pp, dp, micro_batches and padded_vocab_size (None: not printed yet).

        micro_batches are those of an iteration on one data-parallel rank.
        """
        return self.record["layout"]

    @property
    def world_size(self) -> int:
        return self.layout["world_size"]

    @property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        return self.record["nodes"]

    @cached_property
    def peak_memory(self) -> list[PeakMemory]:
        found = [PeakMemory(**peak) for node in self.nodes for peak in node["peak_memory"]]
        return sorted(found, key=lambda peak: peak.rank)

    def setting(self, name: str) -> str:
        """A setting as the shell had it; KeyError for one that the launchers do not have."""
        return self.record["settings"][name]

    def number(self, name: str) -> int:
        return int(self.setting(name))


def read_part(path: Path) -> dict[str, Any]:
    """Raises RecordError."""
    try:
        part = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if not isinstance(part, dict) or part.get("format") != FORMAT:
        raise RecordError(f"{path} is not a record of format {FORMAT}")
    return part


def read_parts(directory: Path) -> list[dict[str, Any]]:
    """The parts of the nodes that left theirs here, by rank. Raises RecordError when there is none."""
    parts = [read_part(path) for path in directory.glob("node*.json") if path.stem.removeprefix("node").isdigit()]
    if not parts:
        raise RecordError(f"{directory} holds no record of a run (no node0.json)")
    return sorted(parts, key=lambda part: part["node"])


def merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of run.json. ``differences`` names what should be the same on all nodes and is not."""
    parts = list(parts)
    first = parts[0]
    nodes = [{key: value for key, value in part.items() if key not in {*SHARED_KEYS, "format"}} for part in parts]
    unequal = [
        f"{key} of node {part['node']} ({part['host']}) {difference}"
        for part in parts[1:]
        for key in SHARED_KEYS
        for difference in differences(first[key], part[key])
    ]
    # What a node heard of the others while it ran, for the parts that are not here.
    unequal += [text for part in parts for text in part.get("differences", []) if text not in unequal]
    status = of_run(parts)
    # The node of the first rank prints it.
    padded = next((part["padded_vocab_size"] for part in parts if part.get("padded_vocab_size")), None)
    return {
        "format": FORMAT,
        **{key: first[key] for key in SHARED_KEYS},
        "layout": first["layout"] | {"padded_vocab_size": padded},
        "status": status.name,
        "reason": status.reason,
        "remedy": status.remedy,
        "first_failure": status.origin,
        "started": min(part["started"] for part in parts),
        "ended": None if any(not part["ended"] for part in parts) else max(part["ended"] for part in parts),
        "differences": unequal,
        "nodes": nodes,
    }


# Settings that say where a node is or what it found there, and so may differ between the nodes of a run.
_LOCAL_SETTINGS = {
    "HOSTS",
    "MEGATRON_DIR",
    "MEGATRON_DATA_DIR",
    "OUTPUT_DIR",
    "TOKENIZER_MODEL",
    "WANDB_API_KEY",
    "WANDB_MODE",
}


def differences(first: Any, other: Any) -> Iterable[str]:
    """What two nodes' parts of one run say differently, and should not."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key) and key not in _LOCAL_SETTINGS | {"prefix", "tokenizer"}:
                yield f"has {key} {other.get(key)!r}, node 0 has {first.get(key)!r}"
    elif first != other:
        yield f"is {other!r}, node 0 has {first!r}"


def load(directory: Path) -> Run:
    """Read a run directory from its nodes' parts. Raises RecordError."""
    if not directory.is_dir():
        raise RecordError(f"there is no run directory {directory}")
    return Run(directory, merge(read_parts(directory)), read_metrics(directory / "metrics.jsonl"))


def write_run(directory: Path) -> dict[str, Any]:
    """Merge what the nodes left here into run.json; the content. Raises RecordError."""
    record = merge(read_parts(directory))
    write_json(directory / "run.json", record)
    return record
