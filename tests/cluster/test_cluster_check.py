"""check_cluster.sh on real hosts: all well, and each thing that it is there to find."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_lab import SYSTEM_PATH, Cluster
from harness import REPO_ROOT, Project, wait_for


@dataclass
class Report:
    status: int
    text: str
    rows: dict[str, list[str]]
    seconds: float

    def failed(self) -> set[tuple[str, int]]:
        """(check, number of the column) of the red cells."""
        return {(name, i) for name, row in self.rows.items() for i, cell in enumerate(row) if cell.startswith("FAIL")}

    def remedy(self, heading: str) -> str:
        """The line below a problem, that says what to do."""
        lines = self.text.splitlines()
        return lines[next(i for i, line in enumerate(lines) if line.startswith(heading)) + 1].strip()


def read_report(result: subprocess.CompletedProcess, seconds: float) -> Report:
    lines = result.stdout.splitlines()
    body = lines[2 : lines.index("")] if "" in lines else []
    rows = {cells[0]: cells[1:] for cells in (re.split(r"  +", line.rstrip()) for line in body)}
    return Report(result.returncode, result.stdout + result.stderr, rows, seconds)


def check(cluster: Cluster, project: Project, *hosts: str, at: str = "login", **environment: str) -> Report:
    start = time.monotonic()
    result = cluster.run(
        at, "bash", "scripts/check_cluster.sh", *hosts,
        env=project.environment | environment, cwd=project.root, timeout=70, check=False,
    )  # fmt: skip
    report = read_report(result, time.monotonic() - start)
    assert report.seconds < 60, report.text
    for node in cluster.nodes:
        assert not [line for line in cluster.processes(node).values() if sys.executable in line], node
    return report


def python_of_ones_own(cluster: Cluster, folder: Path) -> Path:
    """A python3 in a directory that every node has its own copy of."""
    folder.mkdir()
    wrapper = folder / "python3"
    wrapper.write_text(f'#!/bin/bash\nexec env PYTHONPATH="{folder}" {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    cluster.private(folder)
    return wrapper


@pytest.fixture
def project(project: Project) -> Project:
    """The project is a git checkout, as after the README's clone."""
    shutil.copy(REPO_ROOT / ".gitignore", project.root)
    git = ["git", "-C", str(project.root), "-c", "user.name=Nobody", "-c", "user.email=nobody@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "A checkout"], check=True)
    return project


def in_project(cluster: Cluster, project: Project, node: str, command: str) -> None:
    cluster.run(node, "bash", "-c", command, cwd=project.root)


def gigabits(cell: str) -> float:
    match = re.fullmatch(r"([0-9.e+]+) Gbit/s, (\d+) us", cell)
    assert match, cell
    assert int(match[2]) > 0
    return float(match[1])


def test_all_is_well_and_the_network_is_measured(cluster: Cluster, project: Project):
    cluster.shape("node1", "200mbit")
    report = check(cluster, project, HOSTS="node0 node1 node2")
    assert (report.status, report.failed()) == (0, set()), report.text
    assert "All is well." in report.text
    assert report.rows["reachable"][0].startswith("ssh ")
    assert report.rows["address"] == ["10.77.0.10", "10.77.0.11", "10.77.0.12"]
    assert report.rows["engine"] == ["series"] * 3
    assert report.rows["ports"] == ["free"] * 3
    assert report.rows["network"][0] == "master"
    # A shaped link carries 200 Mbit/s each way, less headers; the other is not shaped.
    # A busy machine may make either slower.
    assert 0.05 < gigabits(report.rows["network"][1]) < 0.21 < gigabits(report.rows["network"][2]), report.text
    assert "All 3 together" in report.text
    assert "\033" not in report.text


def test_hosts_of_the_allocation(cluster: Cluster, project: Project):
    words = ["salloc", "--quiet", "--nodes=2", "bash", "scripts/check_cluster.sh"]
    result = cluster.login(*words, env=project.environment, cwd=project.root, timeout=70, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.split(r" +", result.stdout.splitlines()[0].strip()) == ["check", "node0", "node1"]


def test_a_node_that_is_cut_off(cluster: Cluster, project: Project):
    cluster.link("node2", "down")
    report = check(cluster, project, "node0", "node1", "node2", at="node0")
    assert report.status == 1
    assert report.failed() == {("reachable", 2)}
    assert report.rows["reachable"][0] == "this host"
    assert report.rows["torch"][2] == "-"
    assert gigabits(report.rows["network"][1]) > 0, "the others are measured all the same"
    assert "ssh node2" in report.remedy("reachable on node2")


def test_a_node_that_hangs(cluster: Cluster, project: Project):
    daemon = next(pid for pid, line in cluster.processes("node1").items() if "/usr/sbin/sshd" in line)
    cluster.kill("node1", daemon, by="STOP")
    try:
        report = check(cluster, project, "node0", "node1")
    finally:
        cluster.kill("node1", daemon, by="CONT")
    assert report.status == 1
    assert report.failed() == {("reachable", 1)}


def test_ctrl_c(cluster: Cluster, project: Project):
    """While a node does not answer."""
    daemon = next(pid for pid, line in cluster.processes("node1").items() if "/usr/sbin/sshd" in line)

    def running(text: str) -> list[int]:
        return [pid for pid, line in cluster.processes("login").items() if text in line]

    cluster.kill("node1", daemon, by="STOP")
    try:
        words = ("bash", "scripts/check_cluster.sh", "node0", "node1")
        process = cluster.start("login", *words, env=project.environment, cwd=project.root)
        wait_for(lambda: bool(running("ConnectTimeout=5 -o ControlMaster=no node1")))
        cluster.kill("login", *running("scripts/check_cluster.py"), by="INT")
        assert process.wait(timeout=30) == 130
        assert not running("ConnectTimeout=5 -o ControlMaster=no")
    finally:
        cluster.kill("node1", daemon, by="CONT")


def test_a_key_that_is_refused(cluster: Cluster, project: Project):
    keys = cluster.directory / "etc" / "ssh"
    cluster.private(keys)
    in_project(cluster, project, "node1", f": >'{keys}/authorized_keys'")
    report = check(cluster, project, "node0", "node1")
    assert report.status == 1
    assert report.rows["reachable"][1] == "FAIL refused"
    assert "ssh-copy-id node1" in report.remedy("reachable on node1")


def test_a_network_that_ssh_gets_through_and_training_does_not(cluster: Cluster, project: Project):
    """As a firewall between the nodes: what node1 sends to node0 goes to no one."""
    neighbour = ("ip", "neighbour", "replace", "10.77.0.10", "lladdr", "02:00:00:00:00:99", "dev", "eth0")
    cluster.run("node1", *neighbour, "nud", "permanent")
    try:
        report = check(cluster, project, "node0", "node1")
    finally:
        cluster.run("node1", "ip", "neighbour", "del", "10.77.0.10", "dev", "eth0")
    assert report.status == 1
    assert report.failed() == {("network", 0), ("network", 1)}, report.text
    assert "GLOO_SOCKET_IFNAME" in report.text


def test_nodes_that_are_not_the_same(cluster: Cluster, project: Project):
    """Without a shared file system: another commit, an engine that was changed, data that were cut off."""
    cluster.private(project.root.parent)
    in_project(
        cluster, project, "node1", "git -c user.name=N -c user.email=n@localhost commit -q --allow-empty -m Another"
    )
    in_project(cluster, project, "node2", "echo '# changed' >>scripts/common.sh")
    in_project(cluster, project, "node2", "echo '# changed' >>../Megatron-DeepSpeed/megatron/training.py")
    in_project(cluster, project, "node1", "truncate -s -2 megatron_data/xsum_text_document.bin")
    in_project(cluster, project, "node2", "rm megatron_data/xsum_text_document.idx")
    report = check(cluster, project, "node0", "node1", "node2")
    assert report.status == 1
    assert report.failed() == {("repository", 1), ("repository", 2), ("engine", 2), ("data", 1), ("data", 2)}, (
        report.text
    )
    assert report.rows["repository"][2].endswith(" changed, differs")
    assert "setup_megatron.sh" in report.remedy("engine on node2")
    # What it says to run is run as it stands.
    for node in ("node1", "node2"):
        command = report.remedy(f"data on {node}").removeprefix("Run here: ")
        assert shlex.split(command)[:3] == ["scp", "-r", "-3"]
        cluster.login("bash", "-c", command)
    again = check(cluster, project, "node0", "node1", "node2")
    assert again.failed() == report.failed() - {("data", 1), ("data", 2)}, again.text


def test_data_that_are_whole_but_others(cluster: Cluster, project: Project):
    cluster.private(project.root.parent)
    in_project(
        cluster,
        project,
        "node0",
        r"printf '\x09' | dd of=megatron_data/xsum_text_document.bin conv=notrunc status=none",
    )
    report = check(cluster, project, "node0", "node1", at="node0")
    assert report.failed() == {("data", 1)}, report.text
    command = report.remedy("data on node1").removeprefix("Run here: ")
    assert command.startswith("scp -r /") or command.startswith("scp -r '/")
    cluster.run("node0", "bash", "-c", command)
    assert check(cluster, project, "node0", "node1", at="node0").status == 0


def test_a_clock_that_is_wrong(cluster: Cluster, project: Project, tmp_path: Path):
    """The hosts share the machine's clock, so on node1 Python itself is told another time."""
    python = python_of_ones_own(cluster, tmp_path / "python")
    shift = "import time\n_real = time.time\ntime.time = lambda: _real() + 7.5\n"
    cluster.run("node1", "bash", "-c", f"printf {shlex.quote(shift)} >sitecustomize.py", cwd=python.parent)
    report = check(cluster, project, "node0", "node1", PYTHON=str(python))
    assert report.failed() == {("clock", 1)}, report.text
    assert report.rows["clock"][0] == "reference"
    assert float(report.rows["clock"][1].removeprefix("FAIL ").removesuffix(" s")) == pytest.approx(7.5, abs=0.5)


def test_a_port_that_is_taken(cluster: Cluster, project: Project):
    """On the master it fails; elsewhere no one needs it."""
    listen = "import socket, time; s = socket.create_server(('', 29803)); time.sleep(600)"
    for node in ("node0", "node1"):
        # -S tells these from the processes that the check would leave behind.
        cluster.start(node, "/usr/bin/env", "-S", f"python3 -c {shlex.quote(listen)}", env={"PATH": SYSTEM_PATH})
        wait_for(lambda node=node: "29803" in cluster.run(node, "ss", "-ltn").stdout)
    report = check(cluster, project, "node0", "node1")
    assert report.failed() == {("ports", 0)}, report.text
    assert report.rows["ports"][1] == "29803 taken*"
    assert re.search(r"29803 by process \d+ \(python3\)", report.text)
    assert "MASTER_PORT=29900" in report.remedy("ports on node0")
    other = check(cluster, project, "node0", "node1", MASTER_PORT="29900")
    assert other.status == 0, other.text


def test_a_node_without_the_environment_or_the_repository(cluster: Cluster, project: Project, tmp_path: Path):
    python = python_of_ones_own(cluster, tmp_path / "environment")
    cluster.private(project.root)
    cluster.run("node1", "rm", str(python))
    cluster.run("node2", "bash", "-c", "rm -rf scripts native patches ds_configs megatron_data .git", cwd=project.root)
    report = check(cluster, project, "node0", "node1", "node2", PYTHON=str(python))
    assert report.rows["reachable"][1] == "FAIL no python"
    assert {("repository", 2), ("data", 2)} <= report.failed()
