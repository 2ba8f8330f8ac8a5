"""Every way in which a node can fail, made to happen on two real hosts, and what people then see.

docs/failure_table.md is what is checked: a scenario here for each row there, with the row's messages on every terminal,
its exit codes, its status in every node's record, its longest time to the end, and nothing left running on any node.

The hosts and processes are real, torchrun and gloo too; the engine is the stub trainer, and there is no GPU. Each node
has a directory of its own, as without a shared file system, unless the scenario says otherwise. Three pairs of
hosts play at once, and two groups of three.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import pytest
from cluster_lab import PROCESSES, Cluster, Terminal, make_cluster_project
from support import REPO_ROOT, Project, wait_for

from t5bench.record import status

DOCUMENT = REPO_ROOT / "docs" / "failure_table.md"
LONGEST_SECONDS = 150
# What the scenarios set, in seconds; the table's longest times are sums of these and of a number of seconds.
TIMES = {"RENDEZVOUS_TIMEOUT": 60, "DISTRIBUTED_TIMEOUT_MINUTES * 60": 60, "WATCHDOG_SECONDS": 3600}
NOTHING_SAID = "none"
SAID_THERE = "the same"
Times = Mapping[str, int]


def read_table() -> dict[str, list[str]]:
    """The cells of each failure on two hosts: its description, the messages there and on the other node, the exit codes
    of both, and the longest time."""
    table = {}
    for line in DOCUMENT.read_text().splitlines():
        name, *cells = re.split(r" *\| *", line.strip(" |"))
        if not re.fullmatch("`[a-z0-9-]+`", name):
            continue
        if cells[2] == SAID_THERE:
            cells[2] = cells[1]
        table[name.strip("`")] = cells
    return table


def pattern_of(message: str) -> re.Pattern[str]:
    """<...> in the table stands for what varies between runs."""
    return re.compile(".+?".join(map(re.escape, re.split(r"<[^>]+>", message))))


def seconds_of(finding: str, times: Times) -> float:
    """The longest time to the end, from a sum of settings and seconds."""
    terms = finding.split("`")[1].split(" + ")
    return sum(times[term] if term in times else float(term.removesuffix(" s")) for term in terms)


# ---- the stage -----------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Two or three hosts and a project, while a scenario is played, and what came of it.

    at_end: what is undone when all launchers have ended. records: run.json of each node. left: what still ran.
    """

    cluster: Cluster
    hosts: tuple[str, ...]
    project: Project
    output: Path
    port: int
    times: dict[str, int]
    terminals: dict[int, Terminal] = field(default_factory=dict)
    began: float = 0.0
    at_end: ExitStack = field(default_factory=ExitStack)
    seconds: float = 0.0
    records: dict[int, dict] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def start(self, node: int, master: str = "", rank: int | None = None, **environment: str) -> None:
        words = ["bash", "scripts/run_megatron_t5_ddp.sh", master or self.hosts[0], str(node if rank is None else rank)]
        common = {
            "NNODES": str(len(self.hosts)), "GLOBAL_BATCH_SIZE": "12", "TRAIN_ITERS": "100000", "LOG_INTERVAL": "1",
            "STUB_ITERATION_MS": "50",
            "MASTER_PORT": str(self.port), "OUTPUT_DIR": str(self.output),
            "STUB_TIMEOUT": str(self.times["DISTRIBUTED_TIMEOUT_MINUTES * 60"]),
            **{name: str(self.times[name]) for name in ("RENDEZVOUS_TIMEOUT", "WATCHDOG_SECONDS")},
        }  # fmt: skip
        everything = self.project.environment | common | environment
        process = self.cluster.start(self.hosts[node], *words, env=everything, cwd=self.project.root)
        self.terminals[node] = Terminal(process)

    def start_all(self, **environment: str) -> None:
        for node in range(len(self.hosts)):
            self.start(node, **environment)

    def train(self, **environment: str) -> None:
        self.start_all(**environment)
        self.until_it_trains()

    def start_third(self, **environment: str) -> None:
        """The node of three that does nothing wrong."""
        if len(self.hosts) > 2:
            self.start(2, **environment)

    def until_it_trains(self) -> None:
        last = self.terminals[len(self.hosts) - 1]
        wait_for(lambda: last.iteration_at or last.ended_at, 60)

    def srun(self, *options: str) -> None:
        """All launchers by one srun, whose output is all terminals'; returns when it trains."""
        words = [
            "srun",
            "--label",
            f"--nodes={len(self.hosts)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(self.hosts)}",
            *options,
        ]
        words += ["bash", "scripts/run_megatron_t5_ddp.sh"]
        settings = {
            "TRAIN_ITERS": "100000",
            "GLOBAL_BATCH_SIZE": "12",
            "MASTER_PORT": str(self.port),
            "OUTPUT_DIR": str(self.output),
        }
        environment = self.project.environment | settings
        terminal = Terminal(self.cluster.start("login", *words, env=environment, cwd=self.project.root))
        self.terminals = dict.fromkeys(range(len(self.hosts)), terminal)
        self.until_it_trains()

    def on(self, node: int, command: str) -> subprocess.CompletedProcess:
        return self.cluster.run(self.hosts[node], "bash", "-c", command, cwd=self.project.root, check=False)

    def signal(self, name: str, *kinds: str) -> None:
        """To these processes of the run on node 1."""
        pids = [self.cluster.pids(self.hosts[1], PROCESSES[kind])[0] for kind in kinds]
        self.began = time.monotonic()
        self.cluster.kill(self.hosts[1], *pids, by=name)

    def pull_cable(self) -> None:
        self.at_end.callback(self.cluster.link, self.hosts[1], "up")
        self.cluster.link(self.hosts[1], "down")
        self.began = time.monotonic()

    def abandon(self, node: int) -> None:
        """Nobody sees this terminal any more."""
        terminal = self.terminals.pop(node)
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)

    def named(self, text: str) -> str:
        """As if it had been played on node0, node1 and node2."""
        return re.sub("|".join(self.hosts), lambda match: f"node{self.hosts.index(match[0])}", text)

    def record(self, node: int) -> dict:
        """run.json on that node; empty if there is none."""
        return json.loads(self.named(self.on(node, f"cat {shlex.quote(str(self.output))}/run.json").stdout) or "{}")


Play = Callable[[Scene], object]


@dataclass(frozen=True)
class Scenario:
    """``play`` starts the launchers and makes the failure happen; it happens ``at`` a node."""

    play: Play
    at: int = 1
    shared: bool = False
    times: Times = field(default_factory=dict)


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def cable_pulled_briefly(scene: Scene) -> None:
    scene.train(TRAIN_ITERS="150")
    scene.pull_cable()
    time.sleep(13)  # longer than after which a node counts as silent
    scene.cluster.link(scene.hosts[1], "up")


def cable_bad(scene: Scene) -> None:
    scene.train(TRAIN_ITERS="40")
    scene.began = time.monotonic()
    scene.at_end.callback(scene.cluster.spoil_cable(scene.hosts[1], milliseconds=50, lost=5, damaged=2))


def power_off(scene: Scene) -> None:
    scene.train()
    scene.at_end.callback(scene.cluster.boot, scene.hosts[1])
    scene.began = time.monotonic()
    scene.cluster.power_off(scene.hosts[1])
    scene.abandon(1)


def node_late(scene: Scene) -> None:
    scene.start(0, TRAIN_ITERS="6")
    scene.start_third(TRAIN_ITERS="6")
    time.sleep(8)
    scene.start(1, TRAIN_ITERS="6")


def rank_of_another_node(scene: Scene) -> None:
    hosts = " ".join(scene.hosts)
    scene.start(0, HOSTS=hosts)
    scene.start(1, rank=0, HOSTS=hosts)
    scene.start_third(HOSTS=hosts)


def port_taken(scene: Scene) -> None:
    listen = f"import socket; s = socket.create_server(('', {scene.port})); print('ready', flush=True)\nc = []\n"
    listen += "while True: c.append(s.accept())"
    listener = scene.cluster.start(scene.hosts[0], scene.project.environment["PYTHON"], "-c", listen)
    scene.at_end.callback(os.killpg, listener.pid, signal.SIGKILL)
    assert listener.stdout.readline() == "ready\n"
    scene.start_all()


def other_secret(scene: Scene) -> None:
    for node in range(len(scene.hosts)):
        scene.start(node, T5_RUN_SECRET=f"secret of node {node}")
    scene.until_it_trains()
    scene.signal("KILL", "worker")


def disk_full(scene: Scene) -> None:
    disk = shlex.quote(str(scene.output))
    scene.on(1, f"mkdir -p {disk} && mount -t tmpfs -o size=256k tmpfs {disk}")
    scene.at_end.callback(scene.on, 1, f"umount {disk}")
    scene.start_all(STUB_FAULT=f"1:20:Path({str(scene.output / 'checkpoint')!r}).write_bytes(bytes(2**20))")


def another_commit(scene: Scene) -> None:
    git = "git -c user.name=lab -c user.email=lab@localhost -c init.defaultBranch=main"
    for node in range(len(scene.hosts)):
        scene.on(node, f"export HOME=/run; {git} init -q && {git} commit -q --allow-empty -m 'node {node}'")
    scene.start_all(TRAIN_ITERS="100")


def scancel(scene: Scene) -> None:
    scene.srun()
    number = scene.cluster.login("squeue", "-h", "-o", "%i", f"--nodelist={scene.hosts[0]}").stdout.strip()
    scene.began = time.monotonic()
    scene.cluster.login("scancel", number)


def faulty(what: str, **settings: str) -> Play:
    return lambda scene: scene.start_all(STUB_FAULT=what, **settings)


def started(*launchers: dict) -> Play:
    """With these arguments of Scene.start."""
    return lambda scene: ([scene.start(**launcher) for launcher in launchers], scene.start_third())


def spoiled(command: str) -> Play:
    return lambda scene: (scene.on(1, command), scene.start_all())


def signalled(name: str, *kinds: str) -> Play:
    return lambda scene: (scene.train(), scene.signal(name, *kinds))


SHORT_RENDEZVOUS = {"RENDEZVOUS_TIMEOUT": 8}
SHORT_GROUP = {"DISTRIBUTED_TIMEOUT_MINUTES * 60": 12}
CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB"
BROKEN = faulty("1:5:raise RuntimeError('broken')")
TRUNCATE, CHANGE = (
    "truncate -s -2 megatron_data/xsum_text_document.bin",
    "echo >>../Megatron-DeepSpeed/megatron/training.py",
)
SCENARIOS = {
    "cable-pulled-briefly": Scenario(cable_pulled_briefly, times={"DISTRIBUTED_TIMEOUT_MINUTES * 60": 45}),
    "cable-bad": Scenario(cable_bad),
    "cable-pulled": Scenario(lambda scene: (scene.train(), scene.pull_cable()), times=SHORT_GROUP),
    "power-off": Scenario(power_off, times=SHORT_GROUP),
    "rank-hangs": Scenario(faulty("1:5:hang"), times=SHORT_GROUP),
    "rank-hangs-on-node-0": Scenario(faulty("0:5:hang"), at=0, times=SHORT_GROUP),
    "rank-hangs-of-two": Scenario(faulty("2:5:hang", NPROC_PER_NODE="2"), times=SHORT_GROUP),
    "no-progress": Scenario(faulty("1:5:hang"), times={"WATCHDOG_SECONDS": 25}),
    "worker-suspended": Scenario(signalled("STOP", "worker"), times=SHORT_GROUP),
    "node-never-comes": Scenario(started({"node": 0}), times=SHORT_RENDEZVOUS),
    "node-late": Scenario(node_late),
    "master-unknown": Scenario(started({"node": 0}, {"node": 1, "master": "nosuchhost"}), times=SHORT_RENDEZVOUS),
    "master-wrong": Scenario(started({"node": 0}, {"node": 1, "master": "login"}), times=SHORT_RENDEZVOUS),
    "rank-of-another-node": Scenario(rank_of_another_node, times=SHORT_RENDEZVOUS),
    "rank-0-twice": Scenario(started({"node": 0}, {"node": 1, "rank": 0}), times=SHORT_RENDEZVOUS),
    "rank-1-twice": Scenario(started({"node": 0, "rank": 1}, {"node": 1}), at=0, times=SHORT_RENDEZVOUS),
    "port-taken": Scenario(port_taken, at=0, times=SHORT_RENDEZVOUS),
    "worker-killed": Scenario(faulty("1:5:os.kill(os.getpid(), signal.SIGKILL)")),
    "exception": Scenario(BROKEN),
    "exception-shared-directory": Scenario(BROKEN, shared=True),
    "rank-ends-early": Scenario(faulty("1:5:os._exit(0)")),
    "host-memory-full": Scenario(faulty("1:5:bytearray(2**60)")),
    "gpu-memory-full": Scenario(faulty(f"1:5:raise torch.OutOfMemoryError({CUDA_SAYS!r})")),
    "loss-not-a-number": Scenario(faulty("1:5:nan", TRAIN_ITERS="8")),
    "torchrun-killed": Scenario(signalled("KILL", "torchrun")),
    "launcher-killed": Scenario(signalled("KILL", "launcher")),
    "other-secret": Scenario(other_secret),
    "interrupted": Scenario(signalled("INT", "launcher")),
    "disk-full": Scenario(disk_full),
    "data-truncated": Scenario(spoiled(TRUNCATE), times=SHORT_RENDEZVOUS),
    "engine-changed": Scenario(spoiled(CHANGE), times=SHORT_RENDEZVOUS),
    "another-commit": Scenario(another_commit),
    "scancel": Scenario(scancel, shared=True),
    # A minute is SLURM's shortest limit; it sends this signal up to a minute earlier than it is told.
    "slurm-time-limit": Scenario(lambda scene: scene.srun("--time=1", "--signal=TERM@60"), shared=True),
}
# A program's fault, a process's death, a wrong file. The others are nightly.
DAILY = ("exception", "worker-killed", "data-truncated")


# ---- playing -------------------------------------------------------------------------------------------------------


def play(cluster: Cluster, project: Project, hosts: tuple[str, ...], name: str) -> Scene:
    planned, number, directory = SCENARIOS[name], list(SCENARIOS).index(name), project.root.parent
    output, times = project.root / "outputs" / f"{name}-{len(hosts)}", TIMES | planned.times
    scene = Scene(cluster, hosts, project, output, 27000 + number, times)

    def left() -> list[str]:
        return [line for node in hosts for line in cluster.foreign(node).values()]

    with ExitStack() as cleanup:
        if not planned.shared:
            for node in hosts:
                cleanup.callback(cluster.public, directory, node)
            cluster.private(directory, hosts)
        cleanup.callback(lambda: [cluster.kill(node, *cluster.foreign(node)) for node in hosts])
        cleanup.callback(lambda: [scene.abandon(node) for node in list(scene.terminals)])
        with scene.at_end:
            started = time.monotonic()
            planned.play(scene)
            for terminal in scene.terminals.values():
                terminal.thread.join(max(0.1, started + LONGEST_SECONDS - time.monotonic()))
            late = {node: terminal.text for node, terminal in scene.terminals.items() if not terminal.ended_at}
            assert not late, f"{name}: no end after {LONGEST_SECONDS} s: {late}"
        terminals = dict(scene.terminals)
        began = scene.began or max(terminal.iteration_at for terminal in terminals.values()) or started
        scene.seconds = max(terminal.ended_at for terminal in terminals.values()) - began
        with suppress(AssertionError):  # the kernel and SLURM need a moment to clear away what has ended
            wait_for(lambda: not left(), 2)
        scene.left = left()
        scene.records = {node: scene.record(node) for node in terminals}
    scene.terminals = terminals
    return scene


Outcomes = Iterator[dict[str, Future[Scene]]]


def outcomes_of(request: pytest.FixtureRequest, cluster: Cluster, directory: Path, count: int) -> Outcomes:
    """Of the scenarios of the test that asks, played on groups of so many hosts at once, those first that are asked
    for first."""
    test = {2: test_what_happens, 3: test_what_happens_on_three_hosts}[count].__name__
    chosen = [item.callspec.params["name"] for item in request.session.items
              if getattr(item, "originalname", "") == test]  # fmt: skip
    project = make_cluster_project(directory)
    # More at a time would need more cores, or the longest times would be the machine's.
    free: SimpleQueue[tuple[str, ...]] = SimpleQueue()
    for first in range(0, 6, count):
        free.put(tuple(cluster.nodes[first : first + count]))

    def play_somewhere(name: str) -> Scene:
        hosts = free.get()
        try:
            return play(cluster, project, hosts, name)
        finally:
            free.put(hosts)

    pool = ThreadPoolExecutor(free.qsize())
    yield {name: pool.submit(play_somewhere, name) for name in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def on_two(
    request: pytest.FixtureRequest, running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    yield from outcomes_of(request, running_cluster, tmp_path_factory.mktemp("failures"), 2)


@pytest.fixture(scope="module")
def on_three(
    request: pytest.FixtureRequest, running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    yield from outcomes_of(request, running_cluster, tmp_path_factory.mktemp("failures"), 3)


# The last node prints the iterations, so on three hosts these two show there.
ON_THREE = {
    "rank-ends-early": "incomplete: node 1 (node1): rank 1 exited before the last iteration",
    "loss-not-a-number": "diverged: node 2 (node2): the loss is not a number at iteration <5>",
}
STATUSES = {*status.EXIT_CODES, status.CANCELLED}
BY_SRUN = {"scancel", "slurm-time-limit"}
# Here the node cannot write it, or what writes it is gone.
UNWRITTEN = {("disk-full", 1), ("launcher-killed", 1)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_happens(on_two: dict[str, Future[Scene]], name: str):
    check(on_two[name].result(timeout=550), name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_happens_on_three_hosts(on_three: dict[str, Future[Scene]], name: str):
    """The third node does nothing wrong, and says what the other innocent one says."""
    check(on_three[name].result(timeout=550), name)


def check(scene: Scene, name: str) -> None:
    _, here, others, codes, longest, *_ = read_table()[name]
    code_here, code_of_others = codes.split(" / ")
    texts = {node: scene.named(terminal.text) for node, terminal in scene.terminals.items()}
    everything = "\n".join(f"---- node {node}: {scene.terminals[node].exit_code}\n{texts[node]}" for node in texts)
    print(f"\n{name}: {scene.seconds:.1f} s\n{everything}")
    at = SCENARIOS[name].at
    for node in range(len(scene.hosts)):
        message, code = (here, code_here) if node == at else (others, code_of_others)
        message = message.strip("`").replace("1 of 2 nodes", f"{len(scene.hosts) - 1} of {len(scene.hosts)} nodes")
        if len(scene.hosts) > 2:  # whichever innocent node was the first to see it
            message = re.sub(rf": node {1 - at} \(node{1 - at}\): ", ": node <n> (<host>): ", message)
            message = message.replace(f": rank {1 - at}: ", ": rank <n>: ")
            message = ON_THREE.get(name, message)
        if node not in texts:
            assert (message, code) == (NOTHING_SAID, NOTHING_SAID)
            continue
        if message == NOTHING_SAID:
            assert scene.terminals[node].exit_code == int(code) and "error: " not in texts[node], everything
            continue
        found = pattern_of(message).search(texts[node])
        assert found, f"node {node} did not say: {message}\n{everything}"
        if name not in BY_SRUN:  # srun gives one status for all
            assert scene.terminals[node].exit_code == int(code), everything
        check_record(name, scene.records[node], found[0], node)
    assert not scene.left, everything
    assert scene.seconds <= seconds_of(longest, scene.times), everything


def check_record(name: str, record: dict, message: str, node: int) -> None:
    """run.json on that node says what its terminal said."""
    word, _, reason = message.partition(": ")
    if (name, node) in UNWRITTEN:
        assert not record
    elif word == "warning":
        assert record["status"] in ("complete", "incomplete")
        (first, *_) = record["nodes"]
        assert [entry for entry in first["differences"] if entry in reason]
    elif word in STATUSES:
        assert record["status"] == word
        written = record["reason"]
        if name in BY_SRUN:  # either node's signal may have come first
            reason, written = (text.replace("node 0 (node0)", "node 1 (node1)") for text in (reason, written))
        assert reason in written or written in reason
    elif message.startswith("ddp: complete"):
        own = [part for part in record["nodes"] if part["node"] == node]
        assert own[0]["status"] == "complete"
    else:
        assert word == "error" and not record, "refused before the run began"


def test_every_row_has_its_scenario():
    assert list(read_table()) == list(SCENARIOS)
    assert set(DAILY) <= SCENARIOS.keys()
