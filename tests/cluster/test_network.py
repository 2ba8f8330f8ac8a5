"""The network as a variable: real training by the native engine over links that are slowed down.

On CPUs, with a tiny model: it shows what the strategies send and what that costs them, not a GPU's speed.
"""

import sys
from pathlib import Path

import pytest
from cluster_lab import SYSTEM_PATH, Cluster
from harness import REPO_ROOT

from t5bench.compare.comparison import build
from t5bench.model import traffic
from t5bench.plan.forecast import job_of
from t5bench.record.records import load

MEGABITS = 100
SETTINGS = {
    "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "PYTHON": sys.executable, "LAUNCH": "ssh",
    "STRATEGIES": "ddp zero2", "ENGINE": "native", "DEVICE": "cpu", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "",
    "DROPOUT": "0", "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "15", "LOG_INTERVAL": "1", "SAMPLE_INTERVAL": "0.2",
    "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled",
}  # fmt: skip


def test_a_slow_network_slows_what_sends_more(cluster: Cluster, sample_data: Path, tmp_path: Path):
    hosts = ["node0", "node1"]
    for host in hosts:
        cluster.shape(host, f"{MEGABITS}mbit")
    settings = SETTINGS | {"HOSTS": " ".join(hosts), "RUNS_DIR": str(tmp_path), "MEGATRON_DATA_DIR": str(sample_data)}
    script = str(REPO_ROOT / "scripts" / "run_megatron_t5_all.sh")
    result = cluster.login("bash", script, env=settings, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = [load(tmp_path / "repeat1" / strategy) for strategy in ("ddp", "zero2")]
    ddp, zero2 = build(runs, "ddp", [], None).rows
    # The counters are read every 0.2 s, and fifteen iterations take a second or two.
    for run, row in zip(runs, (ddp, zero2), strict=True):
        job = job_of(run.plan, run.padded_vocab_size)
        predicted = max(traffic.node_bytes(job, traffic.rows(job), "gloo"))
        assert row.sent_per_iteration == pytest.approx(predicted, rel=0.2)
    on_the_wire = [row.sent_per_iteration * 8 / (MEGABITS * 1e6) * 1000 for row in (ddp, zero2)]
    for row, milliseconds in zip((ddp, zero2), on_the_wire, strict=True):
        assert row.milliseconds.median > milliseconds, "a byte needs its time"
    # The fastest iterations: the machine may be busy with other things in some, and no network makes one faster.
    fastest = [min(line.elapsed_ms for line in run.iterations) for run in runs]
    assert fastest[1] - fastest[0] > (on_the_wire[1] - on_the_wire[0]) / 2
