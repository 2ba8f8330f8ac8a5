"""The network as a variable: real training by the native engine over links that are slowed down.

    RATES=400mbit,100mbit NETWORK_OUTPUT=DIRECTORY python -m pytest -s -n0 --timeout=0 tests/tools/nodes/test_network.py

On CPUs, with a tiny model: it shows what the strategies send and what that costs them, not a GPU's speed. Settings of
the launchers in the environment win over those below; HOST_COUNT and ENGINE too. It leaves the runs in NETWORK_OUTPUT,
and beside them what check_cluster.sh would measure of each rate, 100mbit.json, both for `t5bench predict --network`.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from cluster_lab import SYSTEM_PATH, Cluster
from support import REPO_ROOT

from t5bench.compare.comparison import build
from t5bench.costmodel import traffic
from t5bench.costmodel.job import Job
from t5bench.record.network import Network
from t5bench.record.records import load

RATES = os.environ.get("RATES", "100mbit").split(",")
SETTINGS = {
    "PYTHON": sys.executable, "LAUNCH": "ssh", "DEVICE": "cpu", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "",
    "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "50", "LOG_INTERVAL": "1", "SAMPLE_INTERVAL": "0.2", "ENGINE": "native",
    "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "RETRIES": "0", "DROPOUT": "0", "STRATEGIES": "ddp zero2",
}  # fmt: skip

ITERATIONS_TO_COUNT_BYTES = 50  # fewer may end before the interfaces' counters have been read often enough


def measured_network(cluster: Cluster, nodes: Sequence[str]) -> Network:
    common = {"MASTER_ADDR": cluster.addresses[nodes[0]], "MASTER_PORT": "29555", "HOSTS": " ".join(nodes)}
    command = [sys.executable, "-m", "t5bench.tools.nodes.network", "60"]
    ranks = [
        cluster.start(node, *command, env=common | {"OMP_NUM_THREADS": "1", "RANK": str(rank)}, cwd=REPO_ROOT)
        for rank, node in enumerate(nodes)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    found = json.loads(next(line for line in said[0].splitlines() if line.startswith("{")))
    by_host = {nodes[int(rank)]: figures for rank, figures in found["pairs"].items()}
    return msgspec.convert(found | {"hosts": list(nodes), "pairs": by_host}, Network)


def test_a_slow_network_slows_strategies_that_send_more(cluster: Cluster, sample_data: Path, tmp_path: Path):
    output = Path(os.environ.get("NETWORK_OUTPUT", tmp_path)).absolute()
    nodes = cluster.nodes[: int(os.environ.get("HOST_COUNT", "2"))]
    settings = SETTINGS | {name: value for name, value in os.environ.items() if name.isupper()}
    settings |= {"PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "HOSTS": " ".join(nodes)}
    for rate in RATES:  # "off" leaves the links as they are
        megabits = float(rate.removesuffix("mbit").replace("off", "inf"))
        for node in nodes:
            cluster.shape(node, rate)
        network = measured_network(cluster, nodes)
        print(rate, network.link, flush=True)
        output.mkdir(parents=True, exist_ok=True)
        network.write(output / f"{rate}.json")
        place = {"RUNS_DIR": str(output / rate), "MEGATRON_DATA_DIR": str(sample_data)}
        script = str(REPO_ROOT / "scripts" / "run_megatron_t5_all.sh")
        cluster.login("bash", script, env=settings | place, timeout=3600)
        runs = [load(output / rate / "repeat1" / strategy) for strategy in settings["STRATEGIES"].split()]
        on_the_wire = []
        rows = {row.label: row for row in build(runs, "ddp", [], None).rows}
        for run in runs:
            row = rows[run.plan.strategy.name]
            job = Job.of_plan(run.plan, run.padded_vocab_size)
            predicted = max(traffic.node_bytes(job, traffic.collectives_of(job), "gloo"))
            if int(settings["TRAIN_ITERS"]) >= ITERATIONS_TO_COUNT_BYTES:
                assert row.sent_per_iteration == pytest.approx(predicted, rel=0.2)
            on_the_wire.append(predicted * 8 / megabits / 1000)
            assert row.milliseconds.median > on_the_wire[-1], "a byte needs its time"
        # The fastest iterations: the machine may be busy with other things in some, and no network makes one faster.
        fastest = [min(line.elapsed_ms for line in run.iterations) for run in runs]
        assert rate == "off" or fastest[1] - fastest[0] > (on_the_wire[1] - on_the_wire[0]) / 2
