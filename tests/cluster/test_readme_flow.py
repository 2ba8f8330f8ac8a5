"""The README's cluster guide as it stands there: allocate, name the hosts, launch on each; and the same by srun.

torchrun and the collectives are real, the engine is the stub trainer. What is proved is that the nodes find each other,
train to the end and leave nothing behind, not that the model learns.
"""

import json
import re

import pytest
from cluster_lab import Cluster, output_of
from harness import STRATEGIES, Project

from t5bench.record import log

# Steps 1 and 8 of the README with two terminals, as one script: each ssh is a terminal of its own.
TWO_TERMINALS = """
mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NODE0=${names[0]} NODE1=${names[1]}
export HOSTS="${NODE0} ${NODE1}"
terminal() { ssh -n "$1" "cd '$PWD' && env $SETTINGS HOSTS='$HOSTS' NODE0='$NODE0' NODE1='$NODE1' bash -c '$2'" ; }
terminal "$NODE0" 'bash scripts/run_megatron_t5_ddp.sh ${NODE0} 0' & first=$!
sleep 1
terminal "$NODE1" 'bash scripts/run_megatron_t5_ddp.sh ${NODE0} 1' & second=$!
wait "$first" && wait "$second" && echo "both ended well"
"""


def last_iteration(project: Project, node: int, strategy: str = "ddp") -> int | None:
    text = (project.root / "outputs" / strategy / f"node{node}.log").read_text()
    found = list(log.iterations(text.splitlines()))
    return found[-1].iteration if found else None


def nothing_is_left(cluster: Cluster, project: Project) -> bool:
    return not [
        line for node in cluster.nodes for line in cluster.processes(node).values() if str(project.root) in line
    ]


def test_two_terminals_in_an_allocation(cluster: Cluster, project: Project):
    words = " ".join(f"{name}={value!r}" for name, value in project.environment.items())
    result = cluster.salloc(project, "--nodes=2", "--gres=gpu:1", "--time=04:00:00", "--partition=gpu",
                            script=TWO_TERMINALS, env={"SETTINGS": words})  # fmt: skip
    assert "both ended well" in result.stdout, result.stdout + result.stderr
    # The last rank prints the iterations: node 1.
    assert last_iteration(project, 1) == 6
    assert last_iteration(project, 0) is None
    assert nothing_is_left(cluster, project)


def test_srun_starts_all_nodes(cluster: Cluster, project: Project):
    result = cluster.srun(project, "--nodes=2", "--ntasks-per-node=1", "bash", "scripts/run_megatron_t5_zero1.sh")
    assert result.returncode == 0, result.stdout + result.stderr
    assert last_iteration(project, 1, "zero1") == 6
    config = json.loads((project.root / "outputs" / "zero1" / "ds_config.json").read_text())
    assert config["zero_optimization"]["stage"] == 1
    assert nothing_is_left(cluster, project)


def test_srun_where_the_login_host_exports_its_name(cluster: Cluster, project: Project):
    """Red Hat's /etc/profile exports HOSTNAME, and srun gives the nodes the environment of the login host."""
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", "bash", "scripts/run_megatron_t5_ddp.sh", "--dry-run"]
    result = cluster.login("env", "HOSTNAME=login", *words, env=project.environment, cwd=project.root, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a real run would stop here" not in result.stderr


def test_four_nodes_of_the_hybrid(cluster: Cluster, project: Project):
    """Four terminals, without SLURM, and without HOSTS: NNODES and the arguments say it all."""
    launchers = [
        cluster.start_launcher(project, node, "hybrid", "node0", str(rank), env={"NNODES": "4"})
        for rank, node in enumerate(cluster.nodes)
    ]
    for rank, (status, text) in enumerate(output_of(launchers, 90)):
        assert status == 0, f"node {rank}: {text}"
    assert last_iteration(project, 3, "hybrid") == 6
    assert nothing_is_left(cluster, project)


def test_every_launcher_infers_its_place_under_srun(cluster: Cluster, project: Project):
    """The command that each of two nodes would run; only its rank differs between them."""
    loop = f"for s in {' '.join(STRATEGIES)}; do bash scripts/run_megatron_t5_$s.sh --dry-run 2>/dev/null; done"
    result = cluster.srun(project, "--nodes=2", "--ntasks-per-node=1", "--label", "bash", "-c", loop)
    assert result.returncode == 0, result.stderr
    by_node: dict[str, list[str]] = {"0": [], "1": []}
    for line in result.stdout.splitlines():
        node, command = line.split(": ", 1)
        if " torchrun " in command:
            by_node[node].append(command)
    for commands in by_node.values():
        assert len(commands) == len(STRATEGIES)
    for first, second in zip(by_node["0"], by_node["1"], strict=True):
        assert "--master_addr node0 " in first
        assert re.sub("--node_rank 0 ", "--node_rank 1 ", first) == second


def test_nodes_without_a_shared_file_system(cluster: Cluster, project: Project):
    """Each keeps its own run directory; the iterations are where the last rank is."""
    cluster.private(project.root.parent)
    launchers = [
        cluster.start_launcher(project, node, "ddp", "node0", str(rank), env={"HOSTS": "node0 node1"})
        for rank, node in enumerate(("node0", "node1"))
    ]
    for rank, (status, text) in enumerate(output_of(launchers, 90)):
        assert status == 0, f"node {rank}: {text}"
    there = f"ls '{project.root}/outputs/ddp'"
    assert "node0.log" in cluster.ssh("node0", there).stdout.split()
    assert "node1.log" not in cluster.ssh("node0", there).stdout.split()
    assert "iteration        6/       6" in cluster.ssh("node1", f"cat '{project.root}/outputs/ddp/node1.log'").stdout
    assert not (project.root / "outputs").exists()


@pytest.mark.parametrize(
    ("fault", "node", "message"),
    [("1:4:raise:broken", 1, "RuntimeError: broken"), ("0:3:kill:KILL", 0, "a process was killed (SIGKILL)")],
)
def test_a_rank_that_fails_ends_both_nodes(cluster: Cluster, project: Project, fault: str, node: int, message: str):
    environment = {"HOSTS": "node0 node1", "STUB_FAULT": fault}
    launchers = [
        cluster.start_launcher(project, name, "ddp", "node0", str(rank), env=environment)
        for rank, name in enumerate(("node0", "node1"))
    ]
    outputs = output_of(launchers, 90)
    assert message in outputs[node][1]
    assert f"node {node} (node{node})" in outputs[1 - node][1]
    assert all(status != 0 for status, _ in outputs)
    assert nothing_is_left(cluster, project)
