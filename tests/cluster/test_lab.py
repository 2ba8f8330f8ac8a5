"""The test cluster is one: what its tests rely on."""

import subprocess
import time
from pathlib import Path

from cluster_lab import Cluster
from harness import wait_for


def test_hosts_are_apart(cluster: Cluster):
    assert cluster.ssh("node1", "hostname").stdout.strip() == "node1"
    assert "10.77.0.11" in cluster.ssh("node1", "hostname -I").stdout.split()
    sleeper = cluster.start_ssh("node1", "sleep 1234.5")
    wait_for(lambda: "sleep 1234.5" in cluster.processes("node1").values())
    assert "sleep 1234.5" not in cluster.processes("node0").values()
    assert sleeper.poll() is None
    assert cluster.ssh("node0", "touch /dev/shm/mine && ls /dev/shm").stdout.split() == ["mine"]
    assert cluster.ssh("node1", "ls /dev/shm").stdout.split() == []


def test_pulled_cable_and_power(cluster: Cluster):
    def pings() -> bool:
        return cluster.run("node0", "bash", "-c", "timeout 1 bash -c '</dev/tcp/node1/22'", check=False).returncode == 0

    assert pings()
    cluster.link("node1", "down")
    assert not pings()
    cluster.link("node1", "up")
    wait_for(pings)
    cluster.poweroff("node1")
    assert not pings()
    cluster.boot("node1")
    wait_for(pings)


def test_slow_network(cluster: Cluster):
    def seconds_for_megabytes(count: int) -> float:
        start = time.monotonic()
        cluster.run("node0", "bash", "-c", f"head -c {count * 2**20} /dev/zero | ssh node1 'cat >/dev/null'")
        return time.monotonic() - start

    cluster.shape("node1", "20mbit")  # 12 MiB less the burst of 1 MB take 4.6 s
    assert seconds_for_megabytes(12) > 4
    cluster.shape("node1", "off")
    assert min(seconds_for_megabytes(12) for _ in range(3)) < 4


def test_directories_of_ones_own(cluster: Cluster, tmp_path: Path):
    shared = tmp_path / "a directory"
    shared.mkdir()
    (shared / "file").write_text("as it was\n")
    cluster.private(shared)
    cluster.ssh("node1", f"bash -c 'echo changed >\"{shared}/file\"'")
    assert cluster.ssh("node1", f"cat '{shared}/file'").stdout == "changed\n"
    assert cluster.ssh("node0", f"cat '{shared}/file'").stdout == "as it was\n"
    assert (shared / "file").read_text() == "as it was\n"
    cluster.reset()
    assert cluster.ssh("node1", f"cat '{shared}/file'").stdout == "as it was\n"


def test_slurm_runs_a_task_on_each_node(cluster: Cluster):
    found = cluster.login("srun", "--nodes=4", "--ntasks-per-node=1", "hostname").stdout.split()
    assert sorted(found) == cluster.nodes


def test_reset_ends_what_is_left(cluster: Cluster):
    before = set(cluster.processes("node2").values())
    cluster.run("node2", "bash", "-c", "trap '' TERM; setsid sleep 4321 >/dev/null 2>&1 & exit 0")
    cluster.login("sbatch", "--nodes=3", "--output=/dev/null", "--wrap", "sleep 4322")
    cluster.reset()
    assert set(cluster.processes("node2").values()) <= before
    assert cluster.login("squeue", "-h").stdout == ""


def test_ends_with_its_owner(cluster: Cluster, tmp_path: Path):
    """A second cluster, independent of the first, whose owner is killed."""
    owner = subprocess.Popen(["sleep", "600"])
    other = Cluster(tmp_path / "lab", 1)
    try:
        other.lab("up", "1")
        guard = subprocess.Popen(["bash", str(Path(__file__).parent / "lab" / "cluster.sh"), "guard", str(owner.pid)],
                                 env=other._environment())  # fmt: skip
        assert other.ssh("node0", "hostname").stdout.strip() == "node0"
        owner.kill()
        owner.wait()
        assert guard.wait(timeout=20) == 0
        assert not (tmp_path / "lab").exists()
    finally:
        owner.kill()
        owner.wait()
        other.down()
    assert cluster.ssh("node0", "hostname").stdout.strip() == "node0"
