"""Trains the strategies over the lab's slowed links, for `python -m t5bench predict` to be held against.

    python tests/cluster/measure_network.py OUTPUT --engine native --rates 100mbit,50mbit,20mbit --hosts 2

It needs root, as tests/cluster does. Settings of the launchers in the environment win over those below.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from cluster_lab import SYSTEM_PATH, Cluster
from harness import REPO_ROOT

SETTINGS = {
    "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "PYTHON": sys.executable, "LAUNCH": "ssh",
    "DEVICE": "cpu", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "16",
    "LOG_INTERVAL": "1", "SAMPLE_INTERVAL": "0.2", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "RETRIES": "0",
}  # fmt: skip


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
                for node in cluster.nodes:
                    cluster.shape(node, rate)
                asked = {name: value for name, value in os.environ.items() if name.isupper() and name not in SETTINGS}
                asked |= {name: os.environ[name] for name in SETTINGS.keys() & os.environ.keys() - {"PATH"}}
                runs = {"RUNS_DIR": str(args.output.absolute() / rate), "ENGINE": args.engine}
                runs |= {"HOSTS": " ".join(cluster.nodes), "MEGATRON_DATA_DIR": str(args.data.absolute())}
                script = str(REPO_ROOT / "scripts" / "run_megatron_t5_all.sh")
                result = cluster.login("bash", script, env=SETTINGS | asked | runs, timeout=3600, check=False)
                print(result.stdout[-3000:], result.stderr[-1500:], flush=True)
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
