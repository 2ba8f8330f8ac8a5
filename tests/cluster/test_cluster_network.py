"""The network as a variable: real training by the native engine over links that are slowed down.

On CPUs, with a tiny model: it shows what the strategies send and what that costs them, not a GPU's speed.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_lab import SYSTEM_PATH, Cluster
from harness import REPO_ROOT

from t5bench.compare import comparison
from t5bench.compare.comparison import Row
from t5bench.record.records import load

# The tiny T5 with the sample's vocabulary.
PARAMETERS = 450_368
FP32_BYTES = 4
MEGABIT_PER_BYTE = 8e-6


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    subprocess.run(
        ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")],
        env={"PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "SAMPLE": "1", "MEGATRON_DATA_DIR": str(data)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return data


def rows_at(cluster: Cluster, rate: str, sample: Path, runs: Path) -> dict[str, Row]:
    """DDP's and ZeRO-2's rows of a sweep over two nodes whose links carry this rate."""
    hosts = ["node0", "node1"]
    for host in hosts:
        cluster.shape(host, rate)
    settings = {
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "PYTHON": sys.executable, "LAUNCH": "ssh",
        "HOSTS": " ".join(hosts), "STRATEGIES": "ddp zero2", "RUNS_DIR": str(runs), "ENGINE": "native", "DEVICE": "cpu",
        "MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "DROPOUT": "0", "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "15",
        "LOG_INTERVAL": "1", "SAMPLE_INTERVAL": "0.2", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled",
        "MEGATRON_DATA_DIR": str(sample),
    }  # fmt: skip
    script = str(REPO_ROOT / "scripts" / "run_megatron_t5_all.sh")
    result = cluster.login("bash", script, env=settings, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    loaded = [load(runs / "repeat1" / strategy) for strategy in ("ddp", "zero2")]
    return {row.strategy: row for row in comparison.build(loaded, "ddp", [], None).rows}


def test_a_slower_network_slows_what_sends_more(cluster: Cluster, sample: Path, tmp_path: Path):
    fast = rows_at(cluster, "1gbit", sample, tmp_path / "fast")
    slow = rows_at(cluster, "100mbit", sample, tmp_path / "slow")
    for rows in (fast, slow):
        # DDP: one all-reduce of the fp32 gradients, 2 (N - 1) / N of them from each of N = 2 nodes, and its headers.
        sent = rows["ddp"].sent_per_iteration
        assert sent is not None
        # The counters are read every 0.2 s, and fifteen iterations take a second or two.
        assert 0.8 * PARAMETERS * FP32_BYTES <= sent <= 1.3 * PARAMETERS * FP32_BYTES
        # ZeRO-2 reduces every one of the four micro-batches, and gathers the parameters.
        zero2 = rows["zero2"].sent_per_iteration
        assert zero2 is not None and 3 * sent <= zero2 <= 6.5 * sent
    for strategy, row in slow.items():
        bytes_sent, took = row.sent_per_iteration, row.milliseconds
        assert bytes_sent is not None and took is not None
        on_the_wire = bytes_sent * MEGABIT_PER_BYTE / 100 * 1000
        assert took.median > on_the_wire, f"{strategy} sent {bytes_sent} bytes in less time than 100 Mbit/s allow"
    # The fastest iterations: the machine may be busy with other things in some, and no network makes one faster.
    slow_time, fast_time = (min(line.elapsed_ms for line in rows["zero2"].run.iterations) for rows in (slow, fast))
    assert slow_time > fast_time
