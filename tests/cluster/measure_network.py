"""Trains the strategies over the lab's slowed links, and says what check_cluster.sh measures of these.

    PYTHONPATH=.:tests:tests/cluster python tests/cluster/measure_network.py OUTPUT --data DIRECTORY \\
        --engine native --rates 100mbit,50mbit,20mbit --hosts 2

It needs root, as tests/cluster does. Settings of the launchers in the environment win over those below. pytest does not
collect this: it takes minutes on a machine with nothing else to do. `t5bench predict` compares the runs with the model.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster_lab import SYSTEM_PATH, Cluster
from harness import REPO_ROOT

SETTINGS = {
    "PYTHON": sys.executable, "LAUNCH": "ssh", "DEVICE": "cpu", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "",
    "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "16", "LOG_INTERVAL": "1", "SAMPLE_INTERVAL": "0.2",
    "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "RETRIES": "0",
}  # fmt: skip


def train(cluster: Cluster, nodes: Sequence[str], output: Path, engine: str, rate: str, data: Path) -> None:
    """A sweep over links of this rate, into OUTPUT/RATE."""
    for node in nodes:
        cluster.shape(node, rate)
    print(rate, measured_link(cluster, nodes[:2]), flush=True)
    settings = SETTINGS | {name: value for name, value in os.environ.items() if name.isupper()}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--engine", choices=["native", "megatron"], default="native")
    parser.add_argument("--rates", default="off", help="of the links, for tc; off leaves them as they are")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--data", type=Path, required=True, help="an indexed dataset with its tokenizer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory) / "lab", args.hosts)
        try:
            cluster.up()
            for rate in args.rates.split(","):
                train(cluster, cluster.nodes, args.output, args.engine, rate, args.data)
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
