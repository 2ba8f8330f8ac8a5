"""What the cost model predicts for a comparison's rows."""

from collections.abc import Sequence
from dataclasses import replace

from t5bench.compare.comparable import gpu_names
from t5bench.compare.rows import Row
from t5bench.model import flops, time
from t5bench.model.job import Job
from t5bench.model.machine import device_of
from t5bench.model.prediction import Prediction, machine_of
from t5bench.record.records import Run


def prediction(row: Row) -> Prediction | None:
    """The prediction; None if the vocabulary is not known. On a CPU or an unknown link its time means nothing."""
    link = row.measured[0].observed.busiest_link if row.measured else None
    gigabits = link.link_bits_per_second / 1e9 if link and link.link_bits_per_second else 1.0
    # A batch that grew until the end never reached the requested size.
    return prediction_of(row.run, gigabits, round(row.batch))


def prediction_of(run: Run, gigabits: float = 1.0, batch: int = 0) -> Prediction | None:
    """The prediction with a link of this many Gbit/s between the nodes, at this global batch or the run's own.

    None if the vocabulary is not known.
    """
    if not run.padded_vocab_size:
        return None
    gloo = run.plan.device == "cpu" or run.plan.gpus_shared
    device = None if gloo else device_of(gpu_names(run) or "")
    machine = machine_of(device or time.CPU, gigabits, run.layout.nproc_per_node)
    job = Job.of_plan(run.plan, run.padded_vocab_size)
    return Prediction(replace(job, global_batch=batch or job.global_batch), machine, "gloo" if gloo else "nccl")


def add_times(rows: Sequence[Row]) -> list[str]:
    """Gives rows their predicted times, and says what these are based on; empty if none can be predicted.

    They are based on data sheets if every row's device has one, else on the speed of the baseline or of the first row.
    """
    timed = [row for row in rows if row.milliseconds]
    timed = [row for row in timed if row.run.layout.nnodes == 1 or row.measured[0].observed.busiest_link]
    known = [(row, found) for row in timed if (found := prediction(row))]
    calibrating, slower = None, 1.0
    if any(found.machine.device is time.CPU for _, found in known):
        calibrating, found = min(known, key=lambda one: not one[0].is_baseline)
        try:
            slower = time.calibrated(found.job, found.machine, calibrating.milliseconds.median / 1000, found.backend)
        except ValueError as error:
            return [f"no times are predicted: {error}"]
    others = [(row, found) for row, found in known if row is not calibrating]
    for row, found in others:
        row.predicted = replace(found, slower=slower).time
    source = f"how fast {calibrating.label} ran" if calibrating else "the devices' data sheets"
    return [f"predicted times are based on {source}"] * bool(others)


def hardware_tflops(row: Row) -> float | None:
    """TFLOP/s of a process including recomputation; None without recomputation."""
    found = prediction(row) if row.milliseconds else None
    if not found or found.job.recompute == "none":
        return None
    done = flops.hardware_flops(replace(found.job, global_batch=row.batch))
    return done * 1000 / row.milliseconds.median / row.run.world_size / 1e12
