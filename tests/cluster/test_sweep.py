"""LAUNCH=ssh: the sweep started from one terminal on the login host, the nodes by real ssh."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from cluster_lab import PROCESSES, Cluster
from harness import Project, wait_for

from t5bench.record.records import load

TWO, FOUR = "node0 node1", "node0 node1 node2 node3"
SWEEP = ("bash", "scripts/run_megatron_t5_all.sh")


def settings(project: Project, **changes: str) -> dict[str, str]:
    return project.environment | {"LAUNCH": "ssh", "HOSTS": TWO, "RETRIES": "0", "STRATEGIES": "ddp"} | changes


def sweep(cluster: Cluster, project: Project, **changes: str) -> subprocess.CompletedProcess:
    result = cluster.login(*SWEEP, env=settings(project, **changes), cwd=project.root, timeout=150, check=False)
    assert not cluster.left_of(project)
    return result


def start_training(cluster: Cluster, project: Project) -> subprocess.Popen:
    process = cluster.start("login", *SWEEP, env=settings(project, TRAIN_ITERS="2000"), cwd=project.root)
    log = run_directory(project, "ddp") / "node1.terminal"
    wait_for(lambda: log.exists() and "iteration" in log.read_text(), 60)
    return process


def run_directory(project: Project, row: str) -> Path:
    return project.root / "outputs" / "all" / "repeat1" / row


def test_ddp_and_the_hybrid_on_four_nodes_without_a_shared_file_system(cluster: Cluster, project: Project):
    """The nodes' records come back."""
    cluster.private(project.root.parent)
    changes = {"HOSTS": FOUR, "STRATEGIES": "ddp hybrid", "WANDB_API_KEY": "0123456789abcdef"}
    result = sweep(cluster, project, **changes)
    assert result.returncode == 0, result.stdout + result.stderr
    for row in ("ddp", "hybrid"):
        run = load(run_directory(project, row))
        assert (run.status, run.world_size, run.iterations[-1].iteration) == ("complete", 4, 6)
        assert [node["host"] for node in run.nodes] == FOUR.split()
        assert run.record["differences"] == []
        assert (run_directory(project, row) / "node3.log").is_file()
    assert "complete" in result.stderr
    assert sweep(cluster, project, **changes).stderr.count("already complete") == 2


def test_a_killed_worker_gives_one_sentence_on_the_terminal(cluster: Cluster, project: Project):
    """And its files here are not mistaken for the next attempt's, whose record also comes back from the nodes."""
    cluster.private(project.root.parent)
    process = start_training(cluster, project)
    cluster.kill("node1", *cluster.pids("node1", PROCESSES["worker"]))
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "FAILED (crashed): node 1 (node1): rank 1: a process was killed (SIGKILL)" in output
    assert not cluster.left_of(project)
    again = sweep(cluster, project, TRAIN_ITERS="8")
    assert again.returncode == 0, again.stdout + again.stderr
    run = load(run_directory(project, "ddp"))
    assert (run.status, len(run.nodes), len(run.iterations)) == ("complete", 2, 4)


def test_ctrl_c_ends_every_node(cluster: Cluster, project: Project):
    process = start_training(cluster, project)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert "nothing is left running" in output
    wait_for(lambda: not cluster.left_of(project), 30)
    assert json.loads((run_directory(project, "ddp") / "run.json").read_text())["status"] == "cancelled"


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("node0 nowhere", "FAILED (configuration): ssh to nowhere failed: "),
        ("nowhere node0", "nowhere cannot plan ddp"),
    ],
)
def test_a_host_that_ssh_does_not_reach_is_named(cluster: Cluster, project: Project, hosts: str, said: str):
    result = sweep(cluster, project, HOSTS=hosts)
    assert result.returncode == 2  # nothing was trained
    assert said in result.stderr and "ssh: Could not resolve hostname nowhere" in result.stderr


def test_a_launcher_that_refuses_on_one_node_ends_the_others_at_once(cluster: Cluster, project: Project):
    cluster.private(project.root.parent)
    cluster.run("node1", "rm", str(project.data_prefix) + ".idx")
    result = sweep(cluster, project)
    assert result.returncode == 2  # whether or not node 0 got so far that it left a record
    assert "FAILED (configuration): node1: " in result.stderr and "xsum_text_document.idx" in result.stderr
