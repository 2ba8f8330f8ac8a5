"""What runs must share to be compared, and what else about them differs.

A setting's role (t5bench/record/plan.py) decides. Engine arguments that no setting owns count separately, because each
may change anything.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from t5bench import Problem
from t5bench.record.files import RecordError
from t5bench.record.plan import spelled
from t5bench.record.run import Run
from t5bench.record.settings import BY_NAME, micro_batches_leave_the_curve
from t5bench.text import processes

NOT_GIVEN = "not given"  # an engine argument
NOT_SET = "not set"  # a variable of the environment
# Variables that say where a run is and how it is called, not how it computes.
PLACES = ("SLURM_", "WANDB_", "HF_", "CUDA_VISIBLE_DEVICES")
THREADS = "OMP_NUM_THREADS"
ENGINE_ARGUMENTS = "engine_arguments"  # what --allow calls all of them


def gpu_names(run: Run) -> str | None:
    """The kinds of GPU of all nodes, of several how many of each; None on a CPU."""
    counts: Counter[str] = Counter()
    for node in run.nodes:
        counts.update(device["name"] for device in node["devices"])
    if len(counts) > 1:
        return " + ".join(f"{counts[name]} x {name}" for name in sorted(counts))
    return next(iter(counts), None)


def threads_of(run: Run) -> str | None:
    """The threads of a process that computes on a CPU, as far as the record has them."""
    recorded = {(node.get("environment") or {}).get(THREADS) for node in run.nodes}
    return run.plan.environment.get(THREADS) or " + ".join(sorted(filter(None, recorded))) or None


def _threads_follow_processes(by_value: Mapping[Any, Sequence[Run]]) -> bool:
    """Whether runs with equally many processes on a node have equally many threads: the launchers share the cores."""
    pairs = {(run.layout.nproc_per_node, value) for value, runs in by_value.items() for run in runs}
    return len(pairs) == len({processes for processes, _ in pairs})


def _facts(run: Run, role: str, **machine: Any) -> dict[str, Any]:
    """The settings with this role, then what else changes the loss curve, what changes only the time, the arguments."""
    training = {
        "MODEL_FAMILY": run.architecture.family,  # records of earlier versions lack the setting
        "padded_vocab_size": run.padded_vocab_size,
        "idx_sha256": run.record["data"].get("idx_sha256"),
        "bin_bytes": run.record["data"].get("bin_bytes"),
        "engine_patches": run.plan.engine_patches,
    }
    arguments = {name: spelled(value) or "given" for name, value in run.plan.engine_arguments.items()}
    return run.plan.with_role(role) | training | machine | arguments


def compared(run: Run) -> dict[str, Any]:
    """What runs must share to be compared, by the name that messages print and --allow takes."""
    machine = {"engine": run.engine, "device": run.plan.device, "gpu": gpu_names(run), "world_size": run.world_size}
    machine[THREADS] = threads_of(run)
    return _facts(run, "compared", **machine)


def trains(run: Run) -> dict[str, Any]:
    """What decides a run's loss curve up to rounding, by name."""
    facts = _facts(run, "trains")
    with contextlib.suppress(RecordError):  # of an earlier version, which lacks a setting
        if micro_batches_leave_the_curve(run.plan.value, run.plan.arguments.extra):
            facts.pop("MICRO_BATCH_SIZE")
    return facts


def show(value: Any) -> str:
    """A value in a message; an empty setting is made visible."""
    return "(empty)" if value in ("", None) else str(value)


def differing(values: Callable[[Run], Mapping[str, Any]], runs: Iterable[Run]) -> dict[str, dict[Any, list[Run]]]:
    """The names in `values` in which runs differ: the runs by value, in their order.

    A value that a record lacks is not a difference. An engine argument that was not given differs from one that was.
    """
    tables = [(run, values(run)) for run in runs]
    names: dict[str, None] = {}
    for _, table in tables:
        names |= dict.fromkeys(table)
    different: dict[str, dict[Any, list[Run]]] = {}
    for name in names:
        absent = NOT_GIVEN if name.startswith("--") else None
        runs_by_value: dict[Any, list[Run]] = {}
        for run, table in tables:
            value = table.get(name, absent)
            if value is not None:
                runs_by_value.setdefault(value, []).append(run)
        if len(runs_by_value) > 1:
            different[name] = runs_by_value
    return different


def _who(runs: Iterable[Run]) -> str:
    return ", ".join(dict.fromkeys(run.strategy for run in runs))


def _line(name: str, by_value: Mapping[Any, Sequence[Run]]) -> str:
    return f"{name}: " + "; ".join(f"{show(value)} ({_who(runs)})" for value, runs in by_value.items())


def refuse(runs: Sequence[Run], baseline: str, allowed: Collection[str]) -> None:
    """Raises Problem if the runs differ where they must not. World sizes may differ if each has a baseline."""
    known: dict[str, None] = {}
    for run in runs:
        known |= dict.fromkeys(name for name in compared(run) if not name.startswith("-"))
    known[ENGINE_ARGUMENTS] = None
    unknown = [name for name in allowed if name not in known and name not in BY_NAME]  # earlier ones were compared
    if unknown:
        raise Problem(f"--allow {unknown[0]} is not known", f"It may be one of: {' '.join(known)}")
    lines: dict[str, list[str]] = {}
    for name, by_value in differing(compared, runs).items():
        line = _line(name, by_value)
        if name == "world_size":
            lacking = [size for size, those in by_value.items() if baseline not in {run.strategy for run in those}]
            if not lacking:
                continue
            line += f": there is no {baseline} run at {', '.join(map(processes, sorted(lacking)))}"
        if name == THREADS and _threads_follow_processes(by_value):
            continue
        lines.setdefault(ENGINE_ARGUMENTS if name.startswith("--") else name, []).append(line)
    names = [name for name in lines if name not in allowed]
    if names:
        found = "\n".join("\n".join(lines[name]) for name in names)
        remedy = f"Compare runs that agree, or accept and mark the difference: --allow {' --allow '.join(names)}"
        raise Problem(f"these runs cannot be compared: they differ in {', '.join(names)}", f"{found}\n{remedy}")


def _variables(runs: Sequence[Run]) -> dict[str, dict[Any, list[Run]]]:
    """The variables of the environment in which runs differ, beside settings: the runs by value.

    What the launcher set counts, else what the nodes recorded. A variable that a run lacks is a difference.
    """
    names: set[str] = set()
    for run in runs:
        for node in run.nodes:
            names.update(node.get("environment") or ())
    names -= BY_NAME.keys()
    names = {name for name in names if not name.startswith(PLACES)}

    def of_run(run: Run) -> dict[str, str]:
        values: dict[str, str] = {}
        for name in sorted(names):
            on_nodes = [(node.get("environment") or {}).get(name, NOT_SET) for node in run.nodes]
            values[f"variable {name}"] = run.plan.environment.get(name) or " + ".join(sorted(set(on_nodes)))
        return values

    return differing(of_run, runs)


def _flags(runs: Sequence[Run]) -> dict[str, dict[Any, list[Run]]]:
    """Where runs of one strategy have different flags. Different strategies have them by definition."""
    different: dict[str, dict[Any, list[Run]]] = {}
    for strategy in dict.fromkeys(run.strategy for run in runs):
        name = f"flags of {strategy}"
        of_strategy = [run for run in runs if run.strategy == strategy]
        different |= differing(lambda run, name=name: {name: " ".join(run.plan.strategy.flags)}, of_strategy)
    return different


def other_differences(runs: Sequence[Run]) -> list[str]:
    """Other differences, one sentence each: further settings, versions, commits, patches, nodes, variables."""

    def told(run: Run) -> dict[str, Any]:
        facts: dict[str, Any] = run.plan.with_role("told")
        facts[f"nodes of {processes(run.world_size)}"] = run.layout.nnodes
        facts["CPU"] = " + ".join(sorted({node["cpu"]["model"] for node in run.nodes if node.get("cpu")})) or None
        for what, key in (("version of", "versions"), ("commit of", "commits"), ("patch", "patches")):
            for name, value in run.record[key].items():
                if isinstance(value, str):
                    facts[f"{what} {name}"] = value
        return facts

    different = differing(told, runs) | _flags(runs) | _variables(runs)
    notes = [_line(name, by_value) for name, by_value in different.items()]
    uncommitted = [run for run in runs if run.record["commits"].get("repository_changed")]
    if uncommitted:
        notes.append(f"the repository had uncommitted changes: {_who(uncommitted)}")
    for run in runs:
        notes += [f"{run.strategy}: {text}" for text in (*run.record["differences"], *run.remarks)]
    return notes
