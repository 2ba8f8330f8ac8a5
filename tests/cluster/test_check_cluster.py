"""check_cluster.sh where one machine is enough: wrong use, this host alone, and the cells for GPUs that no test has.

What needs several hosts is in tests/cluster.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Project

from t5bench.cluster import probe as check_cluster_probe
from t5bench.cluster import table as check_cluster_table
from t5bench.cluster.table import Node, Paths

HERE = socket.gethostname()
GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_mib": "81559", "driver": "550.54"}


def check(project: Project, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(project.script("check_cluster.sh")), *arguments],
        env=project.environment_with(environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def row_of(output: str, name: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(f"{name} ")).removeprefix(name).strip()


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {"HOSTS": None}, "no host is named, HOSTS is not set, and this is no SLURM allocation"),
        (("node0", "node1", "node0"), {}, "node0 is named more than once"),
        (("--fast",), {}, "unknown option '--fast'"),
        (("node0",), {"PYTHON": "/nowhere/python3"}, "there is no '/nowhere/python3' on PATH"),
        (("node0",), {"ENGINE": "other"}, "ENGINE is 'other'"),
    ],
    ids=["no host", "twice", "option", "python", "engine"],
)
def test_wrong_use(project: Project, arguments: tuple[str, ...], environment: dict[str, str | None], said: str):
    result = check(project, *arguments, **environment)
    assert result.returncode == 2
    assert f"error: {said}" in result.stderr
    assert len(result.stderr.splitlines()) == 2, "what is wrong, and what to do"


def test_help_needs_nothing(project: Project):
    result = check(project, "--help", HOSTS=None, PYTHON="/nowhere/python3")
    assert result.returncode == 0
    assert "Exit status: 0 all is well, 1 a check failed, 2 wrong use." in result.stdout


def test_this_host_alone(project: Project):
    result = check(project, HERE)
    assert row_of(result.stdout, "reachable") == "this host"
    assert row_of(result.stdout, "python") == ".".join(map(str, sys.version_info[:3]))
    assert row_of(result.stdout, "engine") == "series"
    assert row_of(result.stdout, "network") == "-"
    assert row_of(result.stdout, "GPUs") == "none"


def test_gpus_are_wanted_and_not_there(project: Project):
    result = check(project, HERE, DEVICE="cuda")
    assert result.returncode == 1
    assert row_of(result.stdout, "GPUs") == "FAIL none"


def test_port_in_use(project: Project):
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        result = check(project, HERE, MASTER_PORT=port)
    assert result.returncode == 1
    assert row_of(result.stdout, "ports") == f"FAIL {port} taken"
    assert f"{port} by process" in result.stdout


def test_engine_that_is_not_patched(project: Project):
    (project.engine / "megatron" / "training.py").write_text("patched = False\n")
    result = check(project, HERE)
    assert row_of(result.stdout, "engine") == "FAIL other"
    assert row_of(check(project, HERE, ENGINE="native").stdout, "engine") == "native"


def test_data_that_are_not_there(project: Project):
    project.data_prefix.with_suffix(".idx").unlink()
    result = check(project, HERE)
    assert row_of(result.stdout, "data") == "FAIL missing"
    assert "bash scripts/prepare_xsum_megatron.sh" in result.stdout


@pytest.mark.parametrize("size", [1000, 65 * 2**20], ids=["whole", "sampled"])
def test_digest_of_data(tmp_path: Path, size: int):
    """Large files are sampled, first and last byte included."""
    digests = []
    for name, at, length in (
        ("a", None, size),
        ("b", None, size),
        ("c", 0, size),
        ("d", size - 1, size),
        ("e", None, size + 1),
    ):
        path = tmp_path / name
        with path.open("wb") as stream:
            stream.truncate(length)  # a hole: no space is taken
            if at is not None:
                stream.seek(at)
                stream.write(b"x")
        digests.append(check_cluster_probe.digest(path))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


# ---- the table, from answers as nodes with GPUs give them ----------------------------------------------------------


def gpu_nodes(*answers: list[dict[str, str]]) -> list[Node]:
    return [Node(f"node{index}", facts={"gpus": answer}) for index, answer in enumerate(answers)]


PATHS = Paths(Path("/r"), Path("/e"), Path("/d/xsum_text_document"), "megatron", "auto")


@pytest.mark.parametrize(
    ("second", "text", "red"),
    [
        ([GPU], "1 x H100 80GB HBM3 80 GiB", False),
        ([GPU, GPU], "2 x H100 80GB HBM3 80 GiB", True),
        ([GPU | {"name": "NVIDIA A100", "memory_mib": "40960"}], "1 x A100 40 GiB", True),
        ([], "none", True),
    ],
    ids=["equal", "more", "other", "none"],
)
def test_gpus(second: list[dict[str, str]], text: str, red: bool):
    nodes = gpu_nodes([GPU], second)
    row = check_cluster_table.gpus(nodes, PATHS)
    assert row["node0"].text == "1 x H100 80GB HBM3 80 GiB"
    assert not row["node0"].problem
    assert (row["node1"].text, bool(row["node1"].problem)) == (text, red)


def test_drivers():
    row = check_cluster_table.driver(gpu_nodes([GPU], [GPU | {"driver": "535.1"}], [GPU]))
    assert [bool(row[f"node{index}"].problem) for index in range(3)] == [False, True, False]
    assert row["node1"].problem == "the driver is 535.1, on node0 550.54"


@pytest.mark.parametrize(("clock", "red"), [(0.9, False), (-0.9, False), (1.1, True), (-3600.0, True)])
def test_clocks(clock: float, red: bool):
    """The first node's clock is 5 s from this machine's: what counts is the difference between the nodes."""
    nodes = [Node("node0", clock=5.0), Node("node1", clock=5.0 + clock)]
    assert bool(check_cluster_table.clocks(nodes)["node1"].problem) is red


def test_own_name_that_is_a_loopback_address():
    """As Debian's installer writes it into /etc/hosts: gloo would listen where no other node can reach it."""
    names = {"own": "node0", "own_addresses": ["127.0.1.1"], "master_addresses": ["127.0.1.1"]}
    other = {"own": "node1", "own_addresses": ["10.0.0.2"], "master_addresses": []}
    nodes = [Node("node0", facts={"names": names}), Node("node1", facts={"names": other})]
    row = check_cluster_table.host_names(nodes)
    assert row["node0"].text == "own name"
    assert "resolves to 127.0.1.1" in row["node0"].problem
    assert row["node1"].text == "no master"


def test_little_disk_and_memory():
    node = Node("node0", facts={"disk": {"free": 2**29, "writable": True, "path": "/o"}})
    node.facts["memory"] = {"total": 2**34, "available": 2**30}
    assert check_cluster_table.disk([node])["node0"].problem == "0.5 GiB are free at /o"
    assert check_cluster_table.memory([node])["node0"].problem == "1.0 GiB of memory are available"


def test_a_fact_that_did_not_come_is_red_and_one_of_a_node_that_is_gone_is_not():
    nodes = [Node("node0", facts={"gpus": []}), Node("node1")]
    nodes[1].failure = check_cluster_table.Cell("unreachable", "no route", "plug it in")
    rows = check_cluster_table.table(nodes, PATHS, {})
    assert rows["disk"]["node0"].text == "no answer"
    assert rows["disk"]["node0"].problem
    assert rows["disk"]["node1"] == check_cluster_table.UNKNOWN


def test_colour_and_what_to_do():
    cell = check_cluster_table.Cell("none", "there is none", "get one")
    nodes = gpu_nodes([], [])
    rows = {"thing": {"node0": cell, "node1": cell}}
    plain = check_cluster_table.render(nodes, rows, colour=False)
    assert plain.splitlines()[-2:] == ["thing on node0, node1: there is none", "    get one"]
    assert "\033" not in plain
    assert check_cluster_table.render(nodes, rows, colour=True).count("\033[31mFAIL none\033[0m") == 2
