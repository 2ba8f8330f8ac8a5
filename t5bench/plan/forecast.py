"""What a run will need, in one line, before it starts. It imports only the model, because launchers wait for it."""

import os
from pathlib import Path

from t5bench.corpus.index import read_record
from t5bench.costmodel.job import Architecture, Job, padded
from t5bench.costmodel.machine import GIB, Device, device_of
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.prediction import Prediction, machine_of
from t5bench.plan.families import FAMILIES
from t5bench.record.gpus import visible_gpus
from t5bench.record.plan import Plan

GIGABITS = 10.0


def padded_vocabulary(plan: Plan) -> int:
    """The padded size of the vocabulary: from the data's tokenizer if known, otherwise the family's default."""
    if plan.value("MODEL", ""):
        return Architecture.of_arguments(plan.named_arguments, 0).padded_vocabulary
    words = read_record(Path(plan.data_prefix)).get("vocabulary") or FAMILIES[plan.value("MODEL_FAMILY")].vocabulary
    return padded(int(words), plan.number("VOCABULARY_MULTIPLE"))


def gpu_here() -> Device | None:
    """This machine's first GPU, if the model knows its figures."""
    names = visible_gpus(os.environ).names
    return device_of(names[0]) if names else None


def forecast(plan: Plan, *, is_dry_run: bool) -> list[str]:
    """Lines for a person: the prediction, and a warning if the run will not fit. A prediction never stops a run."""
    device = gpu_here() if plan.device == "cuda" else None
    lines = []
    try:
        job = Job.of_plan(plan, padded_vocabulary(plan))
        prediction = Prediction.of_plan(plan, job, machine_of(device, GIGABITS, job.parallel.devices_per_node))
    except (KeyError, ValueError) as error:
        return [f"no prediction: the cost model does not know {error}"] if is_dry_run else []
    if prediction.shortage:
        lines.append(
            f"warning: {plan.strategy.name} needs {prediction.shortage} of GPU memory and will probably run out"
        )
    if is_dry_run:
        figures = f"{parameters(job.architecture):,} parameters, {prediction.memory_bytes / GIB:.2f} GiB per process"
        sent = max(prediction.node_bytes)
        if sent:
            figures += f", {sent / 1e6:,.1f} MB sent by a node per iteration"
        if device and prediction.time:
            figures += f", {prediction.time.total:.3g} s per iteration on {device.name} at {GIGABITS:g} Gbit/s"
        lines.append(f"predicted: {figures}; see python -m t5bench predict")
    return lines
