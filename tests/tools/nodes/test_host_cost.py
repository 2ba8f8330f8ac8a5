"""What an operator costs a host: from an iteration's time to the file that predictions read."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from support import REPO_ROOT

from t5bench import Problem
from t5bench.costmodel import time
from t5bench.costmodel.job import Architecture, Job
from t5bench.costmodel.machine import DEVICES, Host
from t5bench.costmodel.prediction import machine_of
from t5bench.record.host_cost import HostCost, read_host_cost
from t5bench.record.hosts import BEGINS
from t5bench.tools.nodes import ask, host_cost

TINY = Job(Architecture(2, 2, 64, 4, 16, 128, 4, 128, 64, 512), micro_batch=1, global_batch=8)


@pytest.mark.parametrize("device", ["", "a100"])
@pytest.mark.parametrize("cost", [5e-6, 80e-6])
def test_the_cost_is_what_explains_the_time(device: str, cost: float):
    machine = machine_of(DEVICES.get(device), gigabits=1, per_node=1)
    seconds = time.iteration(TINY, replace(machine, measured_host=Host(cost)), "gloo").total
    assert host_cost.operator_seconds(TINY, machine, seconds) == pytest.approx(cost, rel=1e-3)
    with pytest.raises(ValueError, match="less than its computing"):
        host_cost.operator_seconds(TINY, machine, 1e-9)


def test_the_slowest_host_counts(tmp_path: Path):
    path = tmp_path / "host.json"
    HostCost("native", "cuda", {"node0": 10.0, "node1": 12.0, "node2": 20.0}).write(path)
    host = read_host_cost(path).host
    assert host.operator_seconds == pytest.approx(20e-6) and host.uncertainty == pytest.approx(20 / 12)
    path.write_text('{"engine": "native", "device": "cuda", "operator_us": {}}')
    with pytest.raises(Problem, match="has no host"):
        read_host_cost(path)
    path.write_text("[]")
    with pytest.raises(Problem, match="cannot be read"):
        read_host_cost(path)


def test_the_callers_model_is_not_the_tiny_one():
    environment = {"HIDDEN_SIZE": "4096", "ENGINE": "native", "HOME": "/root", "PIPELINE_PARALLEL_SIZE": "4"}
    found = host_cost.settings(environment, "/tmp/here")
    assert found["ENGINE"] == "native" and found["HOME"] == "/root" and found["MODEL_PRESET"] == "tiny"
    assert not {"HIDDEN_SIZE", "PIPELINE_PARALLEL_SIZE"} & set(found)


@pytest.mark.nightly
def test_a_node_measures_itself(sample_data: Path):
    settings = {"ENGINE": "native", "DEVICE": "cpu", "MEGATRON_DATA_DIR": str(sample_data), "PYTHON": sys.executable}
    command = [sys.executable, "-m", "t5bench.tools.nodes.host_cost", "200"]
    done = subprocess.run(
        command, env=os.environ | settings, cwd=REPO_ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    found = json.loads(done.stdout)
    assert found["engine"] == "native" and found["device"] == "cpu", found
    assert 1 < found["operator_us"] < 1000


def test_a_node_measures_with_the_callers_threads_and_interfaces(monkeypatch: pytest.MonkeyPatch):
    """As its trainings will run, of which a launcher passes these on as well."""
    settings = {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "ib0", "FI_PROVIDER": "efa"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    answer = json.dumps({"clock": 0.0})
    run = Mock(return_value=Mock(stdout=f"{BEGINS}\n{answer}\n".encode(), stderr=b""))
    monkeypatch.setattr(subprocess, "run", run)
    ask.execute("node1", "python", "network", ["60"], 60)
    (command,) = run.call_args.args
    assert all(f"{name}={value}" in command[-1] for name, value in settings.items())
