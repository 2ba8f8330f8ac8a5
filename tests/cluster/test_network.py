"""The network as a variable: real training by the native engine over links that are slowed down.

On CPUs, with a tiny model: it shows what the strategies send and what that costs them, not a GPU's speed.
"""

from pathlib import Path

import pytest
from cluster_lab import Cluster
from measure_network import train

from t5bench.compare.comparison import build
from t5bench.model import traffic
from t5bench.plan.forecast import job_of
from t5bench.record.records import load

MEGABITS = 100


def test_a_slow_network_slows_strategies_that_send_more(
    cluster: Cluster, sample_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STRATEGIES", "ddp zero2")
    monkeypatch.setenv("DROPOUT", "0")
    train(cluster, ["node0", "node1"], tmp_path, "native", f"{MEGABITS}mbit", sample_data)
    runs = [load(tmp_path / f"{MEGABITS}mbit" / "repeat1" / strategy) for strategy in ("ddp", "zero2")]
    ddp, zero2 = build(runs, "ddp", [], None).rows
    # The counters are read every 0.2 s, and sixteen iterations take a second or two.
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
