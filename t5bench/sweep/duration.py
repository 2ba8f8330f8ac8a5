"""How long a sweep's runs will take: their iterations, and what each takes besides, its start and its profile.

Iterations take what the sweep's own runs took, else what is predicted of a known GPU. What a run takes besides is known
from complete runs alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from t5bench.costmodel.job import Job
from t5bench.costmodel.prediction import Prediction, machine_of
from t5bench.plan.forecast import GIGABITS, gpu_here, padded_vocabulary
from t5bench.record.files import RecordError
from t5bench.record.plan import Plan
from t5bench.record.reader import seconds
from t5bench.record.records import load, looks_like_run
from t5bench.record.run import Run
from t5bench.record.status import COMPLETE
from t5bench.sweep.launch import PlannedRun


def prediction_of(plan: Plan, micro_batch: int = 0) -> Prediction | None:
    """Of a plan at this micro-batch or its own. None where the GPU or a figure of the model is not known.

    On CPUs its times are right but for one factor.
    """
    device = gpu_here() if plan.device == "cuda" else None
    if plan.device == "cuda" and not device:
        return None
    try:
        job = Job.of_plan(plan, padded_vocabulary(plan))
    except (KeyError, ValueError):
        return None
    machine = machine_of(device, GIGABITS, job.parallel.devices_per_node)
    return Prediction(replace(job, micro_batch=micro_batch or job.micro_batch), machine, plan.backend)


@dataclass(frozen=True)
class Took:
    """What a complete run took, in seconds."""

    iteration: float
    besides: float
    """Its start, its profile and its end."""

    @classmethod
    def of(cls, run: Run) -> "Took | None":
        """None for one that logged nothing."""
        lines = run.iterations
        if not lines or not run.record["ended"]:
            return None
        iteration = fmean(line.elapsed_ms for line in lines) / 1000
        whole = seconds(run.record["ended"]) - seconds(run.record["started"])
        return cls(iteration, max(0.0, whole - iteration * run.plan.iterations))


def taken(runs_dir: Path) -> dict[str, Took]:
    """By the names of complete runs in a sweep's directory, its trials included."""
    found = {}
    for directory in [*runs_dir.glob("repeat*/*"), *runs_dir.glob(".*/*"), *runs_dir.glob(".*/repeat*/*")]:
        try:
            run = load(directory) if looks_like_run(directory) else None
        except RecordError:
            continue
        took = Took.of(run) if run and run.status == COMPLETE else None
        if took:
            found[directory.name] = took
    return found


def how_long(runs: Mapping[Path, PlannedRun], runs_dir: Path) -> str:
    """How long these runs will take, as far as that is known; "" where nothing is."""
    if not runs:
        return ""
    known = taken(runs_dir)
    iterations = 0.0
    for row in runs.values():
        assert row.plan
        own = known.get(row.name)
        prediction = None if own or row.plan.device != "cuda" else prediction_of(row.plan)
        each = own.iteration if own else prediction.time.total if prediction and prediction.time else None
        if each is None:
            return ""
        iterations += each * row.plan.iterations
    said = f"the iterations of {len(runs)} runs will take about {_words(iterations)}"
    if not known:
        return f"{said}; a start and a profile of each come on top, which the first run will show"
    besides = len(runs) * fmean(took.besides for took in known.values())
    return f"{said}, and their starts and profiles {_words(besides)}"


def _words(duration: float) -> str:
    return str(timedelta(seconds=round(duration)))
