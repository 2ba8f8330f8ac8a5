"""Fixtures of the tests that need more than one host."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_lab import SYSTEM_PATH, Cluster, make_cluster_project
from support import Project

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "sshd", "ip", "tc", "unshare", "nsenter", "ssh-keygen")


def pytest_itemcollected(item: pytest.Item) -> None:
    if "running_cluster" not in getattr(item, "fixturenames", ()):
        return
    item.add_marker(pytest.mark.slow)
    daily = getattr(item.module, "DAILY", ())
    if not (daily and item.callspec.params["name"] in daily):
        item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("hosts are made of namespaces, and only root may make those")
    path = f"{os.environ['PATH']}:{SYSTEM_PATH}"
    if lacking := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        pytest.skip(f"no {', '.join(lacking)}: tests/tools/nodes/lab/cluster.sh packages installs what is missing")
    made = Cluster(tmp_path_factory.mktemp("cluster") / "lab", 8)
    made.up()
    yield made
    made.down()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Eight healthy, idle nodes, whatever the previous test did."""
    yield running_cluster
    running_cluster.reset()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """As for every launcher test, but torchrun is the real one and the engine trains (see stub_trainer.py)."""
    return make_cluster_project(tmp_path)
