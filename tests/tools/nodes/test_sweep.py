"""LAUNCH=ssh: the sweep started from one terminal on the login host, the nodes by real ssh."""

import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_lab import PROCESSES, Cluster
from made_runs import write_checkpoint
from support import Project, wait_for

from t5bench.record.checkpoints import Checkpoints
from t5bench.record.records import load

TWO = "node0 node1"
SWEEP = ("bash", "scripts/run_megatron_t5_all.sh")


def settings(project: Project, **changes: str) -> dict[str, str]:
    return project.environment | {"LAUNCH": "ssh", "HOSTS": TWO, "RETRIES": "0", "STRATEGIES": "ddp"} | changes


def sweep(cluster: Cluster, project: Project, **changes: str) -> subprocess.CompletedProcess:
    result = cluster.login(*SWEEP, env=settings(project, **changes), cwd=project.root, timeout=150, check=False)
    assert not cluster.left_of(project)
    return result


def start_training(cluster: Cluster, project: Project, iterations: int = 2000, pause: int = 20) -> subprocess.Popen:
    """pause: the milliseconds of an iteration."""
    changes = {"TRAIN_ITERS": str(iterations), "STUB_ITERATION_MS": str(pause)}
    process = cluster.start("login", *SWEEP, env=settings(project, **changes), cwd=project.root)
    log = run_directory(project, "ddp") / "node1.terminal"
    wait_for(lambda: log.exists() and "iteration" in log.read_text(), 60)
    return process


def run_directory(project: Project, row: str) -> Path:
    return project.root / "outputs" / "all" / "repeat1" / row


def test_four_nodes_without_a_shared_file_system(cluster: Cluster, project: Project):
    """Named by their addresses; their shells greet. Their records come back."""
    project.add_stub("ssh", '#!/bin/bash\necho Welcome to the cluster\nexec /usr/bin/ssh "$@"\n')
    cluster.private(project.root.parent)
    nodes = cluster.nodes[:4]
    hosts = " ".join(cluster.addresses[node] for node in nodes)
    changes = {"HOSTS": hosts, "STRATEGIES": "ddp hybrid", "WANDB_API_KEY": "0123456789abcdef"}
    result = sweep(cluster, project, **changes)
    assert result.returncode == 0, result.stdout + result.stderr
    for row in ("ddp", "hybrid"):
        run = load(run_directory(project, row))
        assert (run.status, run.world_size, run.iterations[-1].iteration) == ("complete", 4, 6)
        assert [node["host"] for node in run.nodes] == nodes
        assert run.record["differences"] == []
        assert (run_directory(project, row) / "node3.log").is_file()
    assert "complete" in result.stderr
    assert sweep(cluster, project, **changes).stderr.count("already complete") == 2


def test_a_killed_worker_gives_one_sentence_on_the_terminal(cluster: Cluster, project: Project, tmp_path: Path):
    """The next attempt's files are not mistaken for its own, and its checkpoints are found on the nodes' own disks."""
    cluster.private(project.root.parent)
    process = start_training(cluster, project, 20, 500)
    cluster.kill("node1", *cluster.pids("node1", PROCESSES["worker"]))
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "FAILED (crashed): node 1 (node1): rank 1: a process was killed (SIGKILL)" in output
    assert not cluster.left_of(project)
    checkpoints = Checkpoints(replace(load(run_directory(project, "ddp")).plan, output_dir=str(tmp_path / "saved")))
    write_checkpoint(checkpoints, 2)
    for node in ("node1", "node0"):
        cluster.run(node, "cp", "-r", str(checkpoints.directory), f"{run_directory(project, 'ddp')}/")
        checkpoints.point_to(2)  # only the first rank does
    again = sweep(cluster, project, TRAIN_ITERS="20").stderr
    said_by_the_first = r"node ([01]) \(node\1\): the engine ignored the checkpoint of iteration 2"
    assert re.search(said_by_the_first, again), again
    assert len(load(run_directory(project, "ddp")).nodes) == 2


def test_ctrl_c_ends_every_node(cluster: Cluster, project: Project):
    process = start_training(cluster, project)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert "nothing is left running" in output
    wait_for(lambda: not cluster.left_of(project), 30)
    assert json.loads((run_directory(project, "ddp") / "run.json").read_text())["status"] == "cancelled"


@pytest.mark.parametrize(
    ("hosts", "broken", "said", "why"),
    [
        ("node0 nowhere", "", "FAILED (configuration): ssh to nowhere failed: ", "Could not resolve hostname nowhere"),
        ("nowhere node0", "", "nowhere cannot plan ddp", "Could not resolve hostname nowhere"),
        (TWO, "rm megatron_data/*.idx", "FAILED (configuration): node1: ", "xsum_text_document.idx"),
        (
            TWO,
            "touch outputs",
            "FAILED (configuration): node1: cannot write to the run directory ",
            "is not a directory",
        ),
    ],
    ids=["no node", "no master", "refusal", "no directory"],
)
def test_what_keeps_one_node_from_training_is_named(
    cluster: Cluster, project: Project, hosts: str, broken: str, said: str, why: str
):
    """And the launchers on the others end at once."""
    cluster.private(project.root.parent)
    cluster.run("node1", "bash", "-c", broken, cwd=project.root)
    result = sweep(cluster, project, HOSTS=hosts)
    assert result.returncode == 2  # nothing was trained, whether or not node 0 got so far that it left a record
    assert said in result.stderr and why in result.stderr
