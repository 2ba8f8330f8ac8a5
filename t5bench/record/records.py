"""A run directory as a record: the part that each node writes, and what the parts say together.

    node<R>.json           what node R knows: settings, command, devices, versions, start, end, status (see recorder.py)
    node<R>.log            its output, each line after the time (UTC) at which it came
    node<R>.samples.jsonl  GPUs and network counters every few seconds (see sampler.py)
    node<R>.sha256         checksums of these files, and of metrics.jsonl on the last node, once the node has ended
    metrics.jsonl          one line for each logged iteration, from the node that has the last rank; {"resumed_from": N}
                           where a run went on from its checkpoint of iteration N
    run.json               all parts as one, rewritten whenever a node ends and by ``collect``

Without a shared file system each node keeps its own directory with its own parts, and run.json covers those.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from t5bench.record import reader
from t5bench.record.files import METRICS, WHERE_RUNS_ARE, RecordError, check_seal, exists, read, write_json
from t5bench.record.log import Iteration
from t5bench.record.plan import FORMAT, ROLES, Plan
from t5bench.record.run import Run
from t5bench.record.status import COMPLETE, RUNNING, of_run

_OF_A_RUN = re.compile(r"node[0-9]+\.(json|log|samples\.jsonl|sha256)|run\.json|metrics\.jsonl")

# What must be the same on all nodes of a run, besides the plan; run.json has it once.
SHARED_KEYS = ("data", "versions", "commits", "patches")
ENDING = ("status", "reason", "started", "ended")  # of run.json
# The fields of a plan that say where a node is or what it found there.
_LOCAL_PLAN = {
    "node", "hosts", "settings_by_role", "chosen", "obstacles", "notes", "engine_directory", "data_prefix", "tokenizer",
    "output_dir", "environment", "removed_environment", "rendezvous", "program", "arguments",
}  # fmt: skip
_LOCAL_DATA = ("data.prefix", "data.tokenizer")


def metrics_line(line: Iteration) -> str:
    """One line of metrics.jsonl; nan and inf are written as text."""
    values = {key: value for key, value in asdict(line).items() if value is not None and key != "begin"}
    return json.dumps({k: v if math.isfinite(v) else str(v) for k, v in values.items()})


def mark_resume(metrics: Path, iteration: int) -> None:
    """Writes to metrics.jsonl that the lines below come from a run that resumed from `iteration`. Raises OSError.

    This changes a file of the earlier attempt, so its checksums are removed.
    """
    for manifest in metrics.parent.glob("node*.sha256"):
        if metrics.name in manifest.read_text():
            manifest.unlink()
    is_torn = metrics.exists() and not metrics.read_bytes().endswith(b"\n")  # a run that died can leave half a line
    with metrics.open("a") as file:
        file.write("\n" * is_torn + json.dumps({"resumed_from": iteration}) + "\n")


def read_metrics(path: Path) -> list[Iteration]:
    """The iterations in order, without those that an attempt logged after the iteration from which the next resumed.

    Raises RecordError.
    """
    return reader.that_count(reader.read_attempts(path))


def looks_like_run(directory: Path) -> bool:
    """Whether a run left something here, readable or not. Raises OSError."""
    return directory.is_dir() and any(_OF_A_RUN.fullmatch(path.name) for path in directory.iterdir())


def read_parts(directory: Path) -> list[dict[str, Any]]:
    """The nodes' parts in this directory, by rank, unless one of their files was changed since.

    Raises RecordError, also if there is no record.
    """
    parts = [reader.read_part(path) for path in sorted(directory.glob("node*.json")) if path.stem[4:].isdecimal()]
    if not parts:
        raise RecordError(f"{directory} holds no record of a run (no node0.json)")
    for part in parts:
        check_seal(directory, part["node"], part["nnodes"])
    return sorted(parts, key=lambda part: part["node"])


def other_run(part: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why two nodes' parts cannot be of one run, in one clause; empty if they may be."""
    its = f"node {other['node']}'s"
    own = f"node {part['node']}'s"
    if part["nnodes"] != other["nnodes"]:
        return f"{its} part is of a run of {other['nnodes']} nodes, {own} of {part['nnodes']}"
    if part.get("attempt") and other.get("attempt") and part["attempt"] != other["attempt"]:
        return f"{its} part is of another attempt than {own}"
    return ""


def merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of run.json. ``differences`` names what should be the same on all nodes and is not."""
    parts = list(parts)
    first = parts[0]
    status = of_run(parts)
    # For parts that are not here, what a node heard about the others counts.
    heard = [text for part in parts for text in part.get("differences", [])]
    return {
        "format": FORMAT,
        **{key: first[key] for key in ("plan", *SHARED_KEYS)},
        # The node of the first rank prints it.
        "padded_vocab_size": next((p["padded_vocab_size"] for p in parts if p.get("padded_vocab_size")), None),
        "status": status.name,
        "reason": status.reason,
        "remedy": status.remedy,
        "first_failure": status.origin,
        "started": min(part["started"] for part in parts),
        "ended": max(part["ended"] for part in parts) if all(part["ended"] for part in parts) else None,
        "differences": list(dict.fromkeys([*(t for part in parts[1:] for t in differences(first, part)), *heard])),
        "nodes": [{k: v for k, v in part.items() if k not in {*SHARED_KEYS, "format", "plan"}} for part in parts],
    }


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Facts on which two nodes of a run should agree but do not: one sentence each."""
    ours = _shared(first)
    theirs = _shared(other)
    where = f"on node {other['node']} ({other['host']})"
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield f"{name} is {theirs.get(name)!r} {where}, {ours.get(name)!r} on node 0"


def _shared(part: Mapping[str, Any]) -> dict[str, Any]:
    """What the nodes of one run should agree on, by name: ``versions.torch``."""
    plan = part["plan"]
    shared = {key: part[key] for key in SHARED_KEYS} | {key: plan[key] for key in plan if key not in _LOCAL_PLAN}
    shared["settings"] = {
        name: value
        for role, values in plan["settings_by_role"].items()
        if not ROLES[role].local
        for name, value in values.items()
    }
    shared["arguments"] = plan["arguments"]["extra"]
    entries: dict[str, Any] = {}
    for key, value in shared.items():
        entries |= {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
    return {name: value for name, value in entries.items() if name not in _LOCAL_DATA}


def load(directory: Path, *, from_log: bool = False) -> Run:
    """Loads and checks the run that its nodes left in a directory; see reader.py. Raises RecordError.

    from_log: its log is read again even where checksums show that nothing was changed.
    """
    try:
        return _load(directory, from_log)
    except OSError as error:  # of a file system that has lost its server or its disk
        raise RecordError(f"{error.filename or directory} cannot be read: {error.strerror}") from error


def _load(directory: Path, from_log: bool) -> Run:
    if not directory.is_dir():
        raise RecordError(f"there is no run directory {directory}", WHERE_RUNS_ARE)
    parts = read_parts(directory)
    for other in parts[1:]:
        why = other_run(parts[0], other)
        if why:
            raise RecordError(f"{directory} has parts of different runs: {why}")
    record = merge(parts)
    attempts = reader.read_attempts(directory / METRICS)
    samples = {p["node"]: reader.read_samples(directory / f"node{p['node']}.samples.jsonl") for p in parts}
    unsealed = ", ".join(str(p["node"]) for p in parts if not exists(directory / f"node{p['node']}.sha256"))
    why = ", because it has not ended or was killed" if record["status"] == RUNNING else ""
    remark = f"{directory}, node {unsealed}: there are no checksums{why}, so changes to its files go unnoticed"
    remarks = [remark] * bool(unsealed)
    plan = Plan.read(record["plan"])
    run = Run(directory, record, plan, reader.that_count(attempts), samples, remarks)
    if run.status == COMPLETE:
        reader.check_complete(run, attempts, from_log or bool(unsealed))
    return run


def load_settings(directory: Path) -> Run:
    """A run as some of its nodes' parts say it was to be, without what it logged. Raises RecordError."""
    record = merge(read_parts(directory))
    return Run(directory, record, Plan.read(record["plan"]), [], {}, [])


SWEEP = "sweep.json"


def write_list(runs_dir: Path, names: Sequence[str], *, anew: bool = False) -> None:
    """Writes the list of a sweep's runs, which shows later whether one is missing. Raises OSError.

    A sweep that continues with other strategies adds its runs. anew: these are all.
    """
    before = [] if anew else read_list(runs_dir)
    runs_dir.mkdir(parents=True, exist_ok=True)
    write_json(runs_dir / SWEEP, {"runs": list(dict.fromkeys([*before, *names]))})


def read_list(runs_dir: Path) -> list[str]:
    """The directories of the runs on a sweep's list; none if there was no sweep. Raises RecordError."""
    path = runs_dir / SWEEP
    return reader.decoded(path, read(path), dict[str, list[str]]).get("runs", []) if exists(path) else []


def write_run(directory: Path, node: int | None = None) -> dict[str, Any]:
    """Merges what the nodes left here into run.json, and returns it. Raises RecordError.

    node: whose run this is; parts of another run are left out.
    """
    parts = read_parts(directory)
    own = [part for part in parts if part["node"] == node]
    record = merge(part for part in parts if not own or not other_run(own[0], part))
    write_json(directory / "run.json", record)
    return record
