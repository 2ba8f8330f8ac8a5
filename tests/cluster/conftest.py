"""Fixtures of the tests that need more than one host."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_lab import Cluster, make_cluster_project
from harness import Project

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "sshd", "ip", "tc", "unshare", "nsenter", "ssh-keygen")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("hosts are made of namespaces, and only root may make those")
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
    if lacking := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        pytest.skip(f"no {', '.join(lacking)}: tests/cluster/lab/cluster.sh packages installs what is missing")
    if subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], check=False).returncode != 0:
        pytest.skip("this machine does not let root make namespaces")
    cluster = Cluster(tmp_path_factory.mktemp("cluster") / "lab", 4)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Four nodes, all well and idle, whatever the test before did."""
    yield running_cluster
    running_cluster.reset()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """As for every launcher test, but torchrun is the real one and the engine trains (see stub_trainer.py)."""
    return make_cluster_project(tmp_path)
