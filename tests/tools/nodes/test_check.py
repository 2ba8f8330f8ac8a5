"""check_cluster.sh: wrong use, only this host, the table from made-up answers, and real hosts with every finding."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_lab import SYSTEM_PATH, Cluster
from support import REPO_ROOT, Project, wait_for

from t5bench.record import hosts
from t5bench.record.network import read_network
from t5bench.tools.nodes import check, probe
from t5bench.tools.nodes.check import CheckedNode
from t5bench.tools.nodes.probe import Finding

HERE = socket.gethostname()
CHECK = ("bash", "scripts/check_cluster.sh")


@dataclass
class Report:
    status: int
    text: str
    rows: dict[str, list[str]]

    def failed(self) -> set[tuple[str, int]]:
        """(check, number of the column) of what is red."""
        return {
            (name, i) for name, row in self.rows.items() for i, finding in enumerate(row) if finding.startswith("FAIL")
        }

    def remedy(self, heading: str) -> str:
        """The line below a problem, that says what to do."""
        lines = self.text.splitlines()
        return lines[next(i for i, line in enumerate(lines) if line.startswith(heading)) + 1].strip()


def read_report(result: subprocess.CompletedProcess) -> Report:
    lines = result.stdout.splitlines()
    body = lines[2 : lines.index("")] if "" in lines else []
    rows = {row[0]: row[1:] for row in (re.split(r"  +", line.rstrip()) for line in body)}
    return Report(result.returncode, result.stdout + result.stderr, rows)


# ---- one machine ---------------------------------------------------------------------------------------------------


def check_here(project: Project, *arguments: str, **environment: str | None) -> Report:
    options = {"cwd": project.root, "capture_output": True, "text": True, "timeout": 60, "check": False}
    return read_report(subprocess.run([*CHECK, *arguments], env=project.environment_with(environment), **options))


WRONG_USES = [
    ((), {"HOSTS": None}, "no hosts are given, HOSTS is not set, and this is not a SLURM allocation"),
    (("node0", "node1", "node0"), {}, "a node is named more than once: node0 and node0"),
    ((), {"HOSTS": "node0 NODE0."}, "a node is named more than once: node0 and NODE0"),
    (("node0", "node0.cluster"), {}, "a node is named more than once: node0 and node0.cluster"),
    (("0.0.0.0", "node1"), {}, "0.0.0.0 is an address to listen on, not the address of a node"),
    (("no de",), {}, "'no de' is not a host name or address"),
    (("--network",), {"HOSTS": "node0 node1"}, "argument --network: expected one argument"),
    (("--network", "here.json", "node0"), {}, "--network needs two hosts or more, found node0"),
    (("--network", "/nowhere/here.json", "node0", "node1"), {}, "/nowhere/here.json cannot be written"),
    (("--network", "/", "node0", "node1"), {}, "/ cannot be written"),
    (("--health", "--network", "here.json", "node0", "node1"), {}, "--health does not measure the network"),
    (("node0",), {"PYTHON": "/nowhere/python3"}, "there is no file /nowhere/python3, which PYTHON names"),
    (("node0",), {"ENGINE": "other"}, "ddp: ENGINE is 'other'"),
]
PLAYED_DAILY = 3  # the others differ in the words alone, and are nightly


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        *WRONG_USES[:PLAYED_DAILY],
        *(pytest.param(*wrong, marks=pytest.mark.nightly) for wrong in WRONG_USES[PLAYED_DAILY:]),
    ],
)
def test_wrong_use(project: Project, arguments: tuple[str, ...], environment: dict[str, str | None], said: str):
    report = check_here(project, *arguments, **environment)
    assert report.status == 2
    assert f"error: {said}" in report.text
    assert len(report.text.splitlines()) == 2, "what is wrong, and what to do"


SSH_THAT_REFUSES = r"""#!/bin/sh
echo '{ Welcome'
printf 'Host key for other has changed and you have requested strict checking.\r\nVerification failed.\r\n' >&2
exit 255
"""


def test_only_this_host(project: Project):
    """With an engine that is not patched, no data, a rendezvous port that is in use, and another host that greets and
    has another key than before."""
    (project.engine / "megatron" / "training.py").write_text("patched = False\n")
    project.data_prefix.with_suffix(".idx").unlink()
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        report = check_here(project, HOSTS=HERE, MASTER_PORT=port)
    project.add_stub("ssh", SSH_THAT_REFUSES)
    changes = {"ENGINE": "native", "DEVICE": "cuda", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    native = check_here(project, HERE, "other", **changes)
    assert (report.status, report.failed()) == (1, {("engine", 0), ("data", 0), ("ports", 0)}), report.text
    assert report.rows["python"] == [".".join(map(str, sys.version_info[:3]))]
    assert report.rows["ports"] == [f"FAIL {port} taken"] and "xsum_text_document.idx does not exist" in report.text
    assert "bash scripts/setup_megatron.sh" in report.remedy("engine on")
    assert native.failed() == {("data", 0), ("GPUs", 0), ("reachable", 1)}, native.text
    assert "reachable on other: Host key for other has changed and you have requested strict checking.\n" in native.text
    assert "ssh-keygen -R other" in native.remedy("reachable on other")


SSH_THAT_DENIES = """#!/bin/sh
[ "$1" != -G ] || { echo "identityfile ~/.ssh/id_locked"; exit 0; }
echo 'root@other: Permission denied (publickey).' >&2
exit 255
"""


@pytest.mark.nightly
def test_a_key_with_a_passphrase_is_told_from_a_missing_one(project: Project, tmp_path: Path):
    key = tmp_path / ".ssh" / "id_locked"
    key.parent.mkdir(mode=0o700)
    project.add_stub("ssh", SSH_THAT_DENIES)
    project.add_stub("ssh-add", "#!/bin/sh\necho 'The agent has no identities.'\nexit 1\n")
    assert "ssh-copy-id other" in check_here(project, "--health", "other").remedy("reachable on other")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "a secret", "-f", str(key)], check=True)
    assert locked_key_of(project) == str(key)
    report = check_here(project, "--health", "other")
    assert f"The key {key} has a passphrase. Load it first:" in report.remedy("reachable on other")
    assert "ssh-add " in report.remedy("reachable on other") and report.text.count("--exclude=other") == 1
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "a secret", "-N", "", "-f", str(key)], check=True)
    assert locked_key_of(project) == ""


def locked_key_of(project: Project) -> str:
    words = [sys.executable, "-c", "from t5bench.tools.nodes.ask import locked_key; print(locked_key('other'))"]
    options = {"cwd": project.root, "env": project.environment, "capture_output": True, "text": True, "check": True}
    return subprocess.run(words, **options).stdout.strip()


HETEROGENEOUS = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "nowhere0"}
HETEROGENEOUS |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "nowhere0", "SLURM_JOB_NODELIST_HET_GROUP_1": "nowhere[1-2]"}


def test_all_components_of_a_heterogeneous_job(project: Project):
    project.add_stub("scontrol", "#!/bin/sh\nprintf 'nowhere1\\nnowhere2\\n'\n")
    project.add_stub("ssh", SSH_THAT_REFUSES)
    report = check_here(project, "--health", HOSTS=None, **HETEROGENEOUS)
    assert "--exclude=nowhere0,nowhere1,nowhere2" in report.text
    project.add_stub(
        "scontrol", "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"
    )
    said = check_here(project, "--health", HOSTS=None, **HETEROGENEOUS).text
    assert "slurm_load_jobs error: Unable to contact slurm controller" in said


def test_git_and_the_gpus_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dubious = f"fatal: detected dubious ownership in repository at '{tmp_path}'"
    monkeypatch.setattr(probe.machine, "checkout", lambda _: probe.machine.Checkout(None, None, dubious))
    finding = probe.repository(asked("node0"))["repository"]
    assert finding.problem == f"git: {dubious}" and "--add safe.directory" in finding.remedy
    mismatch = probe.visible_gpus({}).__class__(fault="nvidia-smi: Driver/library version mismatch")
    monkeypatch.setattr(probe.machine, "gpus", lambda _: [])
    monkeypatch.setattr(probe, "visible_gpus", lambda _: mismatch)
    finding = probe.gpus(asked("node0"))["GPUs"]
    assert finding.problem == "no GPU is visible; nvidia-smi: Driver/library version mismatch"


def test_one_node_under_two_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "addresses_of", lambda host: ["10.0.0.7"] if host in ("node7", "10.0.0.7") else [])
    with pytest.raises(check.Problem, match=r"node7 and 10.0.0.7 are the same node, 10.0.0.7"):
        check.checked_hosts(["node0", "node7", "10.0.0.7"])
    assert [host.name for host in check.checked_hosts(["Node0.", "node1"])] == ["Node0", "node1"]
    nodes = [
        CheckedNode(name, findings={"address": Finding(at)}) for name, at in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
    ]
    nodes.append(CheckedNode("alias", findings={"address": Finding("10.0.0.1")}))
    check.find_doubles(nodes)
    assert [node.findings["address"].problem for node in nodes] == [
        "",
        "",
        "it is the same node as a, under another name",
    ]


# ---- the table, from answers as nodes give them --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 65 * 2**20], ids=["whole", "sampled"])
def test_digest_of_data(tmp_path: Path, size: int):
    """Large files are sampled, first and last byte included."""
    digests = []
    for at, length in ((None, size), (None, size), (0, size), (size - 1, size), (None, size + 1)):
        with (tmp_path / "file").open("wb") as stream:
            stream.truncate(length)  # a hole: no space is taken
            if at is not None:
                stream.seek(at)
                stream.write(b"x")
        digests.append(probe.digest(tmp_path / "file"))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def asked(*hosts: str, output: Path = Path("/")) -> probe.Question:
    return probe.Question(hosts[-1], hosts, "", "/d/x", str(output), device="cpu", ports=[])


def red(*nodes: CheckedNode) -> dict[str, list[str]]:
    """The checks that failed, each with its hosts."""
    found = {n: [host for host, finding in row.items() if finding.problem] for n, row in check.table(nodes).items()}
    return {name: hosts for name, hosts in found.items() if hosts}


GPU = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559.0, "driver": "550.54", "uuid": "GPU-0"}


@pytest.mark.parametrize(
    ("second", "texts", "fails"),
    [
        ([GPU, GPU], ["2 x H100 80GB HBM3 80 GiB", "550.54"], ["GPUs"]),
        ([GPU | {"name": "NVIDIA A100", "memory_mib": 40960.0}], ["1 x A100 40 GiB", "550.54"], ["GPUs"]),
        ([GPU | {"driver": "535.1"}], ["1 x H100 80GB HBM3 80 GiB", "535.1"], ["driver"]),
        ([], ["no GPU", "-"], ["GPUs"]),
    ],
)
def test_gpus(second: list[dict], texts: list[str], fails: list[str], monkeypatch: pytest.MonkeyPatch):
    nodes = []
    for name, found in (("node0", [GPU]), ("node1", second)):
        monkeypatch.setattr(probe.machine, "gpus", lambda _, found=found: found)
        nodes.append(CheckedNode(name, findings=probe.gpus(asked(name))))
    rows = check.table(nodes)
    assert [rows[name]["node1"].text for name in ("GPUs", "driver")] == texts
    assert red(*nodes) == {name: ["node1"] for name in fails}


def test_clocks():
    """The first node's clock is 5 s from this machine's: what counts is the difference between the nodes."""
    nodes = [CheckedNode(f"node{n}", clock=5.0 + ahead) for n, ahead in enumerate((0.0, 0.9, -0.9, 1.1, -3600.0))]
    check.compare_clocks(nodes)
    assert red(*nodes) == {"clock": ["node3", "node4"]}


def test_a_nodes_names_disk_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An own name that is a loopback address, as Debian's installer writes it into /etc/hosts: gloo would listen where
    no other node can reach it."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(hosts, "is_own", lambda address: address == "10.0.0.2")
    for resolves, text, problem in (("127.0.1.1", "own name", "resolves to 127.0.1.1"), ("10.0.0.2", "no master", "")):
        monkeypatch.setattr(hosts, "addresses_of", lambda name, at=resolves: [at] if name == HERE else [])
        finding = probe.address(asked("node0", "node1"))["address"]
        assert finding.text == text and problem in finding.problem
    monkeypatch.setattr(hosts, "addresses_of", lambda name: ["127.0.0.1" if name == "localhost" else "10.0.0.2"])
    for other, text in (("node1", "no master"), ("127.0.0.2", "10.0.0.2")):
        assert probe.address(asked("localhost", other))["address"].text == text
    monkeypatch.setattr(probe, "LEAST_DISK", 2**60)
    monkeypatch.setattr(probe, "LEAST_MEMORY", 2**60)
    there = asked("node0", output=tmp_path / "run")
    assert f"GiB are free at {tmp_path}" in probe.disk(there)["disk"].problem
    (tmp_path / "run").touch()
    assert probe.disk(there)["disk"].problem == f"cannot write to {tmp_path / 'run'}: Not a directory"
    assert "GiB of memory are available" in probe.memory(there)["memory"].problem


def test_a_fact_that_hangs_or_fails_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch):
    def data(_: probe.Question) -> dict:
        time.sleep(1)

    def engine(_: probe.Question) -> dict:
        raise OSError("stale file handle")

    monkeypatch.setattr(probe, "FACTS", (data, engine, probe.memory))
    monkeypatch.setattr(probe, "SECONDS", 0.2)
    found = probe.look(asked("node0"))
    assert (found["data"].text, found["engine"].problem) == ("no answer", "OSError: stale file handle")
    assert "GiB" in found["memory"].text
    assert red(CheckedNode("node0", findings=found)) == {"data": ["node0"], "engine": ["node0"]}


def test_what_to_do_and_colour():
    findings = {
        "reachable": Finding("ssh"),
        "engine": Finding("none", "there is none", "get one"),
        "data": Finding("x", "gone"),
    }
    rows = check.table([CheckedNode("node0", findings=findings), CheckedNode("node1.cluster", findings=findings)])
    plain = check.render(rows, colour=False)
    assert "\nengine on node0, node1.cluster: there is none\n    get one\n" in plain
    assert plain.splitlines()[0].split() == ["check", "node0", "node1"]
    assert "README, step 7" in plain.splitlines()[-1] and "\033" not in plain
    assert check.render(rows, colour=True).count("\033[31mFAIL none\033[0m") == 2


# ---- real hosts ----------------------------------------------------------------------------------------------------


def check_all(cluster: Cluster, project: Project, *words: str, **environment: str) -> Report:
    start, settings = time.monotonic(), project.environment | environment
    report = read_report(cluster.login(*words, env=settings, cwd=project.root, timeout=70, check=False))
    assert time.monotonic() - start < 60, report.text
    for node in cluster.nodes:
        wait_for(lambda node=node: not cluster.pids(node, sys.executable), 10)
    return report


@pytest.fixture
def checkout(project: Project) -> Project:
    """The project is a git checkout, as after the README's clone."""
    shutil.copy(REPO_ROOT / ".gitignore", project.root)
    git = ["git", "-C", str(project.root), "-c", "user.name=Nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "A checkout"]):
        subprocess.run([*git, *words], check=True)
    return project


@pytest.fixture
def suspended(cluster: Cluster) -> Iterator[str]:
    """A node whose sshd takes connections and does not answer."""
    (daemon, *_) = cluster.pids("node3", "/usr/sbin/sshd")
    cluster.kill("node3", daemon, by="STOP")
    yield "node3"
    cluster.kill("node3", daemon, by="CONT")


def test_all_checks_pass_and_the_network_is_measured(cluster: Cluster, checkout: Project):
    """On the nodes of an allocation."""
    cluster.shape("node1", "200mbit")
    path = checkout.root / "network.json"
    report = check_all(cluster, checkout, "salloc", "--quiet", "--nodes=3", *CHECK, "--network", str(path))
    assert (report.status, report.failed()) == (0, set()), report.text
    assert "All checks passed." in report.text
    assert report.rows["reachable"][0].startswith("ssh ")
    assert report.rows["address"] == ["10.77.0.10", "10.77.0.11", "10.77.0.12"]
    assert report.rows["engine"] == ["series"] * 3
    assert report.rows["ports"] == ["free"] * 3
    assert report.rows["network"][0] == "master"
    # A shaped link carries 200 Mbit/s each way, less headers; the other is not shaped.
    # A busy machine may make either slower.
    measured = [
        re.fullmatch(r"(.+) Gbit/s, (\d+) us, (\d+) while computing", finding) for finding in report.rows["network"][1:]
    ]
    shaped, other = (float(found[1]) for found in measured)
    assert 0.05 < shaped < 0.21 < other and "All 3 together" in report.text
    assert all(0 < int(found[2]) <= int(found[3]) for found in measured)
    # The file for predictions has what all measured together.
    network = read_network(path)
    assert network.hosts == ["node0", "node1", "node2"] and network.link.is_measured
    assert network.pairs["node1"].gbit == pytest.approx(shaped, rel=0.01)
    assert f"All 3 together: {network.link.bandwidth * 8 / 1e9:.3g} Gbit/s" in report.text


def test_ctrl_c(cluster: Cluster, project: Project, suspended: str):
    """While a node does not answer."""
    ssh = "ConnectTimeout=5 -o ControlMaster=no"
    process = cluster.start("login", *CHECK, suspended, env=project.environment, cwd=project.root)
    wait_for(lambda: bool(cluster.pids("login", ssh)))
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert not cluster.pids("login", ssh)
    assert not cluster.pids("login", "t5bench cluster")


@pytest.fixture
def python(tmp_path: Path, cluster: Cluster) -> Path:
    """A Python that each node has for itself, with a directory from which it imports."""
    folder = tmp_path / "environment"
    folder.mkdir()
    path = folder / "python3"
    path.write_text(f'#!/bin/bash\nexec env PYTHONPATH="{folder}:$PYTHONPATH" {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    cluster.private(folder)
    return path


LATE_CLOCK = "import time\n_real = time.time\ntime.time = lambda: _real() + 7.5\n"
# ssh gets through and training does not: what the last node sends to the first goes to no one.
NEIGHBOUR = "ip neighbour replace 10.77.0.10 dev eth0 lladdr 02:00:00:00:00:99 nud permanent"


def test_everything_that_can_be_wrong(cluster: Cluster, checkout: Project, python: Path, suspended: str):
    """Without a shared file system: a finding or more on every node. The hosts share the machine's clock, so on node5
    Python itself is told another time."""
    keys = cluster.directory / "etc" / "ssh"
    cluster.private(keys)
    cluster.private(checkout.root.parent)
    cluster.pull_cable("node2")
    for node, command in (
        ("node1", f": >{shlex.quote(str(keys))}/authorized_keys"),
        ("node4", f"rm {shlex.quote(str(python))}"),
        ("node5", "git -c user.name=N -c user.email=n@localhost commit -q --allow-empty -m Another"),
        ("node5", "truncate -s -2 megatron_data/xsum_text_document.bin"),
        ("node5", f"printf {shlex.quote(LATE_CLOCK)} >{shlex.quote(str(python.parent))}/sitecustomize.py"),
        ("node6", "rm -rf scripts native patches ds_configs .git megatron_data/xsum_text_document.idx"),
        ("node7", NEIGHBOUR),
        ("node7", "echo '# changed' >>scripts/common.sh"),
        ("node7", "echo '# changed' >>../Megatron-DeepSpeed/megatron/training.py"),
        ("node7", r"printf '\x09' | dd of=megatron_data/xsum_text_document.bin conv=notrunc status=none"),
    ):
        cluster.run(node, "bash", "-c", command, cwd=checkout.root)
    listen = "import socket, time; s = socket.create_server(('', 29803)); print('ready', flush=True); time.sleep(600)"
    for node in ("node0", "node7"):
        # -S distinguishes this from processes that the check might leave behind.
        listener = cluster.start(node, "/usr/bin/env", "-S", f"PATH={SYSTEM_PATH} python3 -c {shlex.quote(listen)}")
        assert listener.stdout.readline() == "ready\n"
    report = check_all(cluster, checkout, *CHECK, *cluster.nodes, PYTHON=str(python))
    assert report.status == 1
    unreachable = {("reachable", 1), ("reachable", 2), ("reachable", 3), ("reachable", 4)}
    different = {("repository", 5), ("repository", 6), ("repository", 7), ("engine", 7), ("ports", 0), ("clock", 5)}
    different |= {("data", 5), ("data", 6), ("data", 7), *(("network", node) for node in (0, 5, 6, 7))}
    # What the engine on node6 is, is not known without patches/.
    assert report.failed() == unreachable | different | {("engine", 6)}, report.text
    assert report.rows["reachable"][1] == "FAIL refused" and report.rows["reachable"][4] == "FAIL no python"
    assert "ssh-copy-id node1" in report.remedy("reachable on node1")
    assert "ssh node2" in report.remedy("reachable on node2")
    assert report.rows["repository"][7].endswith(" changed")
    assert "data on node7: differs from node0 in .bin:" in report.text
    assert re.search(r"^network on node0.*: waiting until node7 reaches node0 port", report.text, re.MULTILINE)
    assert "GLOO_SOCKET_IFNAME" in report.remedy("network on node0")
    assert float(report.rows["clock"][5].removeprefix("FAIL ").removesuffix(" s")) == pytest.approx(7.5, abs=0.5)
    # On the master it fails; elsewhere no one needs it.
    assert report.rows["ports"][7] == "29803 taken"
    assert "MASTER_PORT=29900" in report.remedy("ports on node0")
