"""What the steps' records say, as one JSON-able whole: figures with what they were measured with, and checks."""

import json
import math
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from t5bench.acceptance.bound import iteration_ms
from t5bench.acceptance.plan import Plan
from t5bench.acceptance.steps import FAILED, PASSED, Outcome
from t5bench.compare.rows import make_row, shape_of
from t5bench.model import flops
from t5bench.record import profile, samples
from t5bench.record.records import RecordError, Run, load
from t5bench.record.status import COMPLETE

# Names of kernels that results.json keeps of a profile, the longest: the records have them all.
_KERNELS = 10
# Archived: what the runs wrote as text. Checkpoints there are none, and TensorBoard's files say the same again.
_ARCHIVED = (".json", ".jsonl", ".log", ".sh", ".txt", ".status")


def gather(plan: Plan, machine: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Everything that the summary tells. ``failed`` holds one sentence for each thing that is wrong."""
    floor = _read(plan.work / "floor.json")
    large = [figures(plan.runs / "large" / engine / strategy, floor) for engine, strategy in plan.large_runs()]
    points = [
        figures(plan.runs / "throughput" / engine / f"micro-batch-{size}", floor)
        for size in plan.micro_batch_sizes
        for engine in plan.engines
    ]
    found: dict[str, Any] = {
        "made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "rehearsal": plan.rehearsal,
        "preset": plan.preset,
        "vocabulary": plan.vocabulary,
        "processes": plan.processes,
        "machine": dict(machine),
        "floor": floor,
        "steps": [asdict(outcome) for outcome in outcomes.values()],
        "large": [row for row in large if row],
        "points": [row for row in points if row],
        "baseline": [
            baseline_figures(point, floor)
            for mode in ("eager", "compiled")
            for point in _read_lines(plan.work / f"baseline-{mode}.jsonl")
        ],
        "parity": parity_tables(outcomes),
        "too_large": plan.too_large(),
    }
    found["checks"] = [*_of_steps(outcomes), *_of_runs(plan, found["large"])]
    found["failed"] = [check["title"] for check in found["checks"] if check["result"] == FAILED]
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(directory: Path, floor: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """One run of a launcher in figures; None where it left no record. Rates are per GPU, memory in MiB."""
    try:
        run = load(directory)
    except RecordError:
        return None
    row = make_row(run.strategy, [run])
    entry: dict[str, Any] = {
        "engine": run.engine,
        "strategy": run.strategy,
        "world_size": run.world_size,
        "micro_batch": run.number("MICRO_BATCH_SIZE"),
        "global_batch": run.number("GLOBAL_BATCH_SIZE"),
        "precision": run.setting("PRECISION_FLAG").lstrip("-") or "fp32",
        "status": run.status,
        "reason": run.reason,
        "directory": run.directory.name,
        "first_loss": _finite(run.iterations[0].lm_loss) if run.iterations else None,
        "last_loss": _finite(run.iterations[-1].lm_loss) if run.iterations else None,
        "sampled_gpus": _sampled(run),
    }
    if not (row.milliseconds and row.samples_per_second and row.measured[0].timing):
        return entry
    timing, observed = row.measured[0].timing, row.measured[0].observed
    profiled = _longest(_read(directory / "profile.json"))
    entry |= {
        "milliseconds": asdict(row.milliseconds),
        "iterations": list(timing.used),
        "dropped": timing.dropped_by_reason(),
        "samples_per_second": row.samples_per_second.median,
        "tflops": row.tflops,
        "mfu": row.mfu,
        "of_measured_rate": _share(row.tflops, floor),
        "floor_ms": _floor_ms(shape_of(run), entry, floor) if run.world_size == 1 else None,
        "peak_mib": max(row.peak_memory.values(), default=None) if row.on_gpu else None,
        "peak_host_mib": max((peak.host_mib for peak in run.peak_memory), default=None),
        "power_w": observed.power_w,
        "utilization": observed.utilization,
        "profile": profiled,
        "limits": profile.limits(profiled) if profiled else "",
    }
    return entry


def baseline_figures(point: Mapping[str, Any], floor: Mapping[str, Any] | None) -> dict[str, Any]:
    """A point of the plain PyTorch loop, with what results of the engines have too."""
    profiled, peak = _longest(point.get("profile")), point.get("peak_tflops")
    return dict(point) | {
        "profile": profiled,
        "mfu": point["tflops"] / peak if peak and point.get("tflops") else None,
        "of_measured_rate": _share(point.get("tflops"), floor),
        "floor_ms": _floor_ms(flops.Shape(**point["shape"]), point, floor),
        "limits": profile.limits(profiled) if profiled else "",
    }


def _longest(profiled: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {**profiled, "by_name": profiled["by_name"][:_KERNELS]} if profiled else None


def _share(tflops: float | None, floor: Mapping[str, Any] | None) -> float | None:
    """Of the rate that a large product reached here, 0 to 1."""
    return tflops / floor["matmul_tflops"] if tflops and floor and floor.get("matmul_tflops") else None


def _floor_ms(
    shape: flops.Shape | None, entry: Mapping[str, Any], floor: Mapping[str, Any] | None
) -> list[float] | None:
    """The least milliseconds of an iteration: of matrix products, and of memory traffic; None where not known."""
    if shape is None or not floor:
        return None
    return list(iteration_ms(shape, entry["global_batch"], entry["micro_batch"], floor))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sampled(run: Run) -> int:
    """How many samples have a GPU's power or utilisation."""
    return sum(
        any(gpu.get("power_w") is not None or gpu.get("utilization") is not None for gpu in sample.get("gpus") or ())
        for node in run.nodes
        for sample in samples.read_samples(run.directory / f"node{node['node']}.samples.jsonl")
    )


def parity_tables(outcomes: Mapping[str, Outcome]) -> list[dict[str, str]]:
    """The tables that check_parity.sh printed, with what it said below them."""
    found = []
    for name, outcome in outcomes.items():
        if not name.startswith("parity-") or not outcome.log:
            continue
        try:
            lines = Path(outcome.log).read_text(errors="replace").splitlines()
        except OSError:
            continue
        begin = next((number for number, line in enumerate(lines) if re.match(r"run +engine ", line)), None)
        text = lines[begin:] if begin is not None else lines[-5:]
        found.append({"title": outcome.title, "result": outcome.result, "text": "\n".join(text).strip()})
    return found


# ---- checks ----------------------------------------------------------------------------------------------------------


def _of_steps(outcomes: Mapping[str, Outcome]) -> list[dict[str, str]]:
    return [
        {"title": outcome.title, "result": outcome.result, "detail": f"{outcome.seconds:.0f} s"}
        for outcome in outcomes.values()
    ]


def _of_runs(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    complete = [row for row in rows if row["status"] == COMPLETE]
    if not complete:
        return []
    learnt = [row for row in complete if row["last_loss"] is not None and row["last_loss"] < row["first_loss"]]
    checks = [("the loss falls in every run", len(learnt) == len(complete), f"{len(learnt)} of {len(complete)}")]
    if not plan.rehearsal:
        sampled = [row for row in complete if row["sampled_gpus"]]
        measured = [row for row in complete if row.get("peak_mib")]
        rated = [row for row in complete if row.get("mfu")]
        checks += [
            ("GPUs are sampled in every run", len(sampled) == len(complete), f"{len(sampled)} of {len(complete)}"),
            ("GPU memory is told by every run", len(measured) == len(complete), f"{len(measured)} of {len(complete)}"),
        ]
        if len(rated) < len(complete):
            # No failure: the table of peaks does not know every GPU.
            checks.append(("MFU needs PEAK_TFLOPS here", True, "the GPU's peak is not known by its name"))
    return [
        {"title": title, "result": PASSED if passed else FAILED, "detail": detail} for title, passed, detail in checks
    ]


def not_run(found: Mapping[str, Any]) -> list[str]:
    """What did not come to an end, by title."""
    return [step["title"] for step in found["steps"] if step["result"] not in (PASSED, FAILED)]


# ---- raw records -----------------------------------------------------------------------------------------------------


def pack(plan: Plan, archive: Path) -> None:
    """Everything that the steps wrote as text, compressed; a file made by an earlier call is replaced."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(plan.work.rglob("*")):
            inner = path.relative_to(plan.work)
            if path.is_file() and path.suffix in _ARCHIVED and inner.parts[0] not in ("data", "results"):
                tar.add(path, arcname=str(Path(archive.name.removesuffix(".tar.xz")) / inner))
