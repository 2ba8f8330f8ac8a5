"""What an operator costs this node's host: check.py runs this module on every node at once.

Trains a tiny model in one process with the chosen engine, whose operators have so little to compute that starting them
takes nearly all of the time, and divides an iteration's time by the operators that the cost model counts. argv[1] is
the time limit in seconds. Prints a JSON object: ``operator_us``, ``engine``, ``device`` and ``milliseconds`` of an
iteration; or ``{"error": TEXT}``.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from t5bench import REPOSITORY
from t5bench.costmodel import time
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import Host, Machine
from t5bench.costmodel.prediction import machine_of
from t5bench.plan.forecast import gpu_here, padded_vocabulary
from t5bench.plan.launchers import ALONE
from t5bench.plan.planner import plan
from t5bench.record.log import iterations
from t5bench.record.settings import BY_NAME
from t5bench.text import guard_streams

ITERATIONS = 12
WARM_UP = 4
MICRO_BATCHES = 8
LEAST = 1e-8  # seconds of an operator
LARGEST = 1e-2


# Settings of the caller that decide what the host has to do for an operator, and where engine and data are.
KEPT = ("ENGINE", "MODEL_FAMILY", "PRECISION_FLAG", "DEVICE", "MEGATRON_DIR", "MEGATRON_DATA_DIR", "PYTHON")
TINY = {
    "MODEL_PRESET": "tiny",
    "NPROC_PER_NODE": "1",
    "MICRO_BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": str(MICRO_BATCHES),
    "TRAIN_ITERS": str(ITERATIONS),
    "LOG_INTERVAL": "1",
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "disabled",
}


def settings(environment: Mapping[str, str], directory: str) -> dict[str, str]:
    """The environment of the tiny training."""
    others = {name: value for name, value in environment.items() if name in KEPT or name not in BY_NAME}
    return others | ALONE | TINY | {"OUTPUT_DIR": f"{directory}/run"}


def operator_seconds(job: Job, machine: Machine, measured: float) -> float:
    """What an operator costs if an iteration of this job takes so many seconds.

    Raises ValueError if computing alone would take longer.
    """

    def predicted(cost: float) -> float:
        return time.iteration(job, replace(machine, measured_host=Host(cost)), "gloo").total

    low = LEAST
    high = LARGEST
    if predicted(low) > measured:
        raise ValueError(f"an iteration took {measured:.3g} s, which is less than its computing is predicted to take")
    for _ in range(60):
        middle = (low * high) ** 0.5
        if predicted(middle) < measured:
            low = middle
        else:
            high = middle
    return high


def measure(seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="t5bench-host-") as directory:
        environment = settings(os.environ, directory)
        planned = plan(environment, "ddp")
        launcher = ["bash", str(REPOSITORY / "scripts" / "run_megatron_t5_ddp.sh")]
        done = subprocess.run(
            launcher, env=environment, capture_output=True, text=True, timeout=seconds, check=False, cwd=directory
        )
        times = [one.elapsed_ms for one in iterations(done.stdout.splitlines())]
        if done.returncode or len(times) <= WARM_UP:
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            return {"error": f"the tiny training failed: {lines[-1] if lines else done.returncode}"}
    milliseconds = statistics.median(times[WARM_UP:])
    job = Job.of_plan(planned, padded_vocabulary(planned))
    device = gpu_here() if planned.device == "cuda" else None
    if planned.device == "cuda" and not device:
        return {"error": "the figures of this GPU are not known, so its part of the time is not either"}
    machine = machine_of(device, gigabits=1, per_node=1)
    cost = operator_seconds(job, machine, milliseconds / 1e3)
    return {
        "operator_us": cost * 1e6,
        "engine": planned.engine,
        "device": planned.device,
        "milliseconds": milliseconds,
    }


def main() -> None:
    seconds = float(sys.argv[1])
    signal.alarm(int(seconds) + 2)  # so that nothing stays behind on the node
    try:
        answer = measure(seconds)
    except Exception as error:  # whatever it is belongs into the table
        answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
