"""Trains the strategies over the lab's slowed links, and compares what the interfaces counted with the model.

    PYTHONPATH=.:tests:tests/cluster python tests/cluster/measure_network.py OUTPUT --data DIRECTORY \\
        --engine native --rates 100mbit,50mbit,20mbit --hosts 2

It needs root, as tests/cluster does. Settings of the launchers in the environment win over those below. Without --data
it reads the runs that OUTPUT has. pytest does not collect this: it takes minutes on a machine with nothing else to do.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, quantiles

import numpy as np
from cluster_lab import SYSTEM_PATH, Cluster
from harness import REPO_ROOT

from t5bench.compare.rows import Row, make_row
from t5bench.model import time, traffic
from t5bench.model.machine import Link, Machine
from t5bench.plan.forecast import job_of
from t5bench.record.records import Run, load
from t5bench.record.status import COMPLETE

SETTINGS = {
    "PYTHON": sys.executable, "LAUNCH": "ssh", "DEVICE": "cpu", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "",
    "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "16", "LOG_INTERVAL": "1", "SAMPLE_INTERVAL": "0.2",
    "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "RETRIES": "0",
}  # fmt: skip
WARM_UP = 3
LINK = "link.json"
# What a message adds to processes of a node that compute in between, as measured once (docs/prediction.md).
INSIDE = {"gbit": 7.2, "us": 690.0}


def train(cluster: Cluster, nodes: Sequence[str], output: Path, engine: str, rate: str, data: Path) -> None:
    """A sweep over links of this rate, into OUTPUT/RATE."""
    for node in nodes:
        cluster.shape(node, rate)
    (output / rate).mkdir(parents=True, exist_ok=True)
    settings = SETTINGS | {name: value for name, value in os.environ.items() if name.isupper()}
    (output / rate / LINK).write_text(json.dumps(measured_link(cluster, nodes[:2])))
    settings |= {"PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "RUNS_DIR": str(output.absolute() / rate)}
    settings |= {"ENGINE": engine, "HOSTS": " ".join(nodes), "MEGATRON_DATA_DIR": str(data.absolute())}
    script = str(REPO_ROOT / "scripts" / "run_megatron_t5_all.sh")
    result = cluster.login("bash", script, env=settings, timeout=3600, check=False)
    print(result.stdout[-3000:], result.stderr[-1500:], flush=True)


def measured_link(cluster: Cluster, nodes: Sequence[str]) -> dict[str, float]:
    """What scripts/check_cluster.sh measures between two nodes: gbit and us."""
    common = {"MASTER_ADDR": cluster.addresses[nodes[0]], "MASTER_PORT": "29555", "HOSTS": " ".join(nodes)}
    command = [sys.executable, "-m", "t5bench.cluster.network", "60"]
    ranks = [
        cluster.start(node, *command, env=common | {"OMP_NUM_THREADS": "1", "RANK": str(rank)}, cwd=REPO_ROOT)
        for rank, node in enumerate(nodes)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    return json.loads(next(line for line in said[0].splitlines() if line.startswith("{")))["pairs"]["1"]


def sent_by_node(run: Run) -> list[float]:
    """Bytes an iteration, the slope of the counter against the iterations: no burst at an end of them decides it."""
    timed = [(line.time, line.iteration) for line in run.iterations[WARM_UP:] if line.time]
    times, numbers = zip(*timed, strict=True)
    slopes = []
    for samples in run.samples.values():
        within = [sample for sample in samples if times[0] <= sample["time"] <= times[-1]]
        done = np.interp([sample["time"] for sample in within], times, numbers)
        slopes.append(np.polyfit(done, [sample["network"]["eth0"]["sent"] for sample in within], 1)[0])
    return slopes


def report(output: Path) -> None:
    errors = []
    for path in sorted(output.glob("*/repeat*/*/run.json")):
        run = load(path.parent)
        if run.status != COMPLETE:
            continue
        job = job_of(run.plan, run.padded_vocab_size or 0)
        predicted, measured = mean(traffic.node_bytes(job, traffic.rows(job), "gloo")), mean(sent_by_node(run))
        error = predicted / measured - 1
        errors.append(abs(error))
        name = "/".join(path.parent.relative_to(output).parts)
        print(f"{name:32} predicted {predicted / 1e6:8.3f} MB, measured {measured / 1e6:8.3f}, {error:+.2%}")
    print(f"{len(errors)} runs: mean error {mean(errors):.2%}, worst {max(errors):.2%}")


def report_times(output: Path, calibrating: Path) -> None:
    """Measured and predicted times, the latter from one run and the links' measured figures."""
    machines = {}
    for path in sorted(output.glob(f"*mbit/{LINK}")):
        between, inside = (
            Link(own["gbit"] * 1e9 / 8 / time.NETWORK["gloo"], own["us"] * 1e-6)
            for own in (json.loads(path.read_text()), INSIDE)
        )
        machines[path.parent.name] = Machine(time.CPU, inside, between, 1)
    first = make_row("", [load(calibrating)])
    job = job_of(first.run.plan, first.run.padded_vocab_size or 0)
    slower = time.calibrated(job, machines[calibrating.parts[-3]], seconds_of(first), "gloo")
    errors = []
    for rate, machine in machines.items():
        times, predicted = defaultdict(list), {}
        for path in sorted(output.glob(f"{rate}/repeat*/*/run.json")):
            row = make_row("", [load(path.parent)])
            if row.milliseconds:
                times[path.parent.name].append(seconds_of(row))
                job = job_of(row.run.plan, row.run.padded_vocab_size or 0)
                predicted[path.parent.name] = time.iteration(job, machine, "gloo", slower)
        for name, found in predicted.items():
            error, waits = found.total / mean(times[name]) - 1, (found.communication + found.bubble) / found.total
            if waits >= 1 / 3 and (rate, name) != (calibrating.parts[-3], calibrating.name):
                errors.append(abs(error))
            repeats = ", ".join(f"{seconds:.3f}" for seconds in times[name])
            print(f"{rate:8} {name:14} measured {repeats} s, predicted {found.total:.3f}, {error:+.1%}")
        report_order(rate, times, {name: found.total for name, found in predicted.items()})
    print(f"{len(errors)} means that wait for a third or more: mean error {mean(errors):.1%}, worst {max(errors):.1%}")


def report_order(rate: str, times: Mapping[str, list[float]], predicted: Mapping[str, float]) -> None:
    """Whether the strategies are predicted in the order in which they were measured."""
    orders, apart = [], []
    for one, other in combinations(times, 2):
        differences = mean(times[one]) - mean(times[other]), predicted[one] - predicted[other]
        orders.append(np.sign(differences))
        apart.append(min(times[one]) > max(times[other]) or max(times[one]) < min(times[other]))
    measured, model = np.transpose(orders)
    tau = (measured * model).sum() / np.sqrt((measured**2).sum() * (model**2).sum())  # with ties: b
    best = min(max(repeats) for repeats in times.values())
    fastest = " or ".join(name for name, repeats in times.items() if min(repeats) <= best)
    print(f"{rate:8} Kendall's tau {tau:.2f}; fastest: {fastest}, predicted {min(predicted, key=predicted.get)}")
    # Whose repeats overlap, these runs do not rank.
    right = (measured == model)[apart].sum()
    print(f"{rate:8} {sum(apart)} pairs whose repeats do not overlap, {right} in the right order")


def seconds_of(row: Row) -> float:
    """The lower quartile of the iterations: what else runs on the machine makes others longer, and none shorter."""
    return quantiles([line.elapsed_ms for line in row.run.iterations[WARM_UP:]], n=4)[0] / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--engine", choices=["native", "megatron"], default="native")
    parser.add_argument("--rates", default="off", help="of the links, for tc; off leaves them as they are")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--calibrate", type=Path, help="a run in OUTPUT from which to predict the others' times")
    parser.add_argument("--data", type=Path, help="an indexed dataset with its tokenizer")
    args = parser.parse_args()
    if args.data:
        with tempfile.TemporaryDirectory() as directory:
            cluster = Cluster(Path(directory) / "lab", args.hosts)
            try:
                cluster.up()
                for rate in args.rates.split(","):
                    train(cluster, cluster.nodes, args.output, args.engine, rate, args.data)
            finally:
                cluster.down()
    report(args.output)
    if args.calibrate:
        report_times(args.output, args.calibrate)


if __name__ == "__main__":
    main()
