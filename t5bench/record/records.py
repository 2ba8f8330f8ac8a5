"""A run directory as a record: the part that each node writes, and what the parts say together.

    node<R>.json           what node R knows: settings, command, devices, versions, start, end, status (see recorder.py)
    node<R>.log            its output, each line after the time (UTC) at which it came
    node<R>.samples.jsonl  GPUs and network counters every few seconds (see sampler.py)
    metrics.jsonl          one line for each logged iteration, from the node that has the last rank; {"resumed_from": N}
                           where a run went on from its checkpoint of iteration N
    run.json               all parts as one, made anew whenever a node ends and by ``collect``

Nodes without a shared file system keep their own directory each, with their own parts; run.json then speaks of those.
"""

import contextlib
import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from t5bench.record.log import Iteration, PeakMemory
from t5bench.record.plan import FORMAT, ROLES, Layout, Plan
from t5bench.record.status import of_run

# What must be the same on all nodes of one run besides the plan; run.json has it once.
SHARED_KEYS = ("data", "versions", "commits", "patches")
# Of a plan, what says where a node is or what it found there.
_LOCAL_PLAN = {
    "node", "hosts", "settings", "obstacles", "engine_directory", "data_prefix", "tokenizer", "output_dir", "arguments",
    "environment", "command",
}  # fmt: skip


class RecordError(ValueError):
    """A directory that holds no record, or one that cannot be read; the message is for people."""


def write_whole(path: Path, text: str) -> None:
    """A reader sees the old text or the new one, never half of it. Raises OSError."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    new.write_text(text)
    new.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def metrics_line(line: Iteration) -> str:
    """One line of metrics.jsonl; nan and inf are written as text."""
    values = {key: value for key, value in asdict(line).items() if value is not None and key != "begin"}
    return json.dumps({k: v if math.isfinite(v) else str(v) for k, v in values.items()})


def mark_resume(metrics: Path, iteration: int) -> None:
    """Says in metrics.jsonl that what follows was logged by a run that went on from `iteration`. Raises OSError."""
    with metrics.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            # A run that died can leave half a line.
            file.write(b"" if file.read(1) == b"\n" else b"\n")
        file.write(json.dumps({"resumed_from": iteration}).encode() + b"\n")


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; what was cut off, as a full disk or a death leaves it, is passed over."""
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            if isinstance(content := json.loads(text), dict):
                yield content


_ITERATION_FIELDS = {entry.name for entry in fields(Iteration)} - {"begin"}
_MAYBE_NOT_FINITE = ("lm_loss", "grad_norm", "loss_scale")


def read_metrics(path: Path) -> list[Iteration]:
    """The iterations in order. What an attempt logged beyond the iteration from which the next went on is left out."""
    found: dict[int, Iteration] = {}
    begin = 0
    for content in json_lines(path):
        if isinstance(content.get("resumed_from"), int):
            begin = content["resumed_from"]
            found = {number: line for number, line in found.items() if number <= begin}
            continue
        values: dict[str, Any] = {"lm_loss": None} | {k: v for k, v in content.items() if k in _ITERATION_FIELDS}
        with contextlib.suppress(ValueError, TypeError):
            values |= {key: float(values[key]) for key in _MAYBE_NOT_FINITE if isinstance(values.get(key), str)}
            line = Iteration(**values, begin=begin)
            found[line.iteration] = line
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class Run:
    """One run, from its directory. ``record`` is the content of run.json."""

    directory: Path
    record: Mapping[str, Any]
    iterations: Sequence[Iteration] = field(repr=False)

    @property
    def name(self) -> str:
        return self.directory.name

    @cached_property
    def plan(self) -> Plan:
        """The plan of the first node that left its part."""
        return Plan.read(self.record["plan"])

    @property
    def strategy(self) -> str:
        return self.plan.strategy.name

    @property
    def engine(self) -> str:
        return self.plan.engine

    @property
    def status(self) -> str:
        return self.record["status"]

    @property
    def reason(self) -> str:
        return self.record["reason"]

    @property
    def layout(self) -> Layout:
        assert self.plan.layout, "a run that began has a layout"
        return self.plan.layout

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def padded_vocab_size(self) -> int | None:
        """As the engine printed it; None where it has not yet."""
        return self.record["padded_vocab_size"]

    @property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        return self.record["nodes"]

    @cached_property
    def peak_memory(self) -> list[PeakMemory]:
        found = [PeakMemory(**peak) for node in self.nodes for peak in node["peak_memory"]]
        return sorted(found, key=lambda peak: peak.rank)


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
    unequal = [text for part in parts[1:] for text in differences(first, part)]
    # What a node heard of the others while it ran, for the parts that are not here.
    unequal += [text for part in parts for text in part.get("differences", []) if text not in unequal]
    status = of_run(parts)
    return {
        "format": FORMAT,
        "plan": first["plan"],
        **{key: first[key] for key in SHARED_KEYS},
        # The node of the first rank prints it.
        "padded_vocab_size": next((p["padded_vocab_size"] for p in parts if p.get("padded_vocab_size")), None),
        "status": status.name,
        "reason": status.reason,
        "remedy": status.remedy,
        "first_failure": status.origin,
        "started": min(part["started"] for part in parts),
        "ended": None if any(not part["ended"] for part in parts) else max(part["ended"] for part in parts),
        "differences": unequal,
        "nodes": [
            {key: value for key, value in part.items() if key not in {*SHARED_KEYS, "format", "plan"}} for part in parts
        ],
    }


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """What two nodes' parts of one run say differently, and should not: one sentence each."""
    pairs = [(key, first[key], other[key]) for key in SHARED_KEYS]
    plan, its_plan = first["plan"], other["plan"]
    pairs += [(key, plan[key], its_plan[key]) for key in plan if key not in _LOCAL_PLAN]
    pairs.append(("settings", _shared_settings(plan), _shared_settings(its_plan)))
    pairs.append(("arguments", plan["arguments"]["extra"], its_plan["arguments"]["extra"]))
    for key, one, another in pairs:
        for difference in _differences(one, another):
            yield f"{key} of node {other['node']} ({other['host']}) {difference}"


def _shared_settings(plan: Mapping[str, Any]) -> dict[str, str]:
    return {name: s["value"] for name, s in plan["settings"].items() if not ROLES[s["role"]].local}


def _differences(first: Any, other: Any) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(other, dict):
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key) and key not in {"prefix", "tokenizer"}:
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
