"""Every way in which a node can fail, made to happen on two real hosts, and what people then see.

docs/failures.md is what is checked: a scenario here for each row there, with the row's messages on every terminal, its
exit codes, its status in every node's record, its longest time to the end, and nothing left running on any node.

The hosts and processes are real, torchrun and gloo too; the engine is the stub trainer, and there is no GPU. Each node
has a directory of its own, as without a shared file system, unless the scenario says otherwise. The hosts make pairs,
and a scenario is played on each of them at once.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import pytest
from cluster_lab import PROCESSES, Cluster, make_cluster_project
from harness import REPO_ROOT, Project, wait_for

from t5bench.record import status

DOCUMENT = REPO_ROOT / "docs" / "failures.md"
PAIRS = (("node0", "node1"), ("node2", "node3"), ("node4", "node5"))
LONGEST_SECONDS = 150
# What the scenarios set, in seconds; the table's longest times are sums of these and of a number of seconds.
TIMES = {"RENDEZVOUS_TIMEOUT": 60, "DISTRIBUTED_TIMEOUT_MINUTES * 60": 60, "WATCHDOG_SECONDS": 3600}
NOTHING_SAID = "none"
Times = Mapping[str, int]


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """messages, exit_codes: of the node where it happens, and of the other."""

    messages: tuple[str, str]
    exit_codes: tuple[str, str]
    longest: str

    def seconds(self, times: Times) -> float:
        """The longest time to the end, from a sum of settings and seconds."""
        terms = [term.strip() for term in self.longest.split("+")]
        return sum(times[term] if term in times else float(term.removesuffix(" s")) for term in terms)


def read_table() -> dict[str, Row]:
    found = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if match := re.fullmatch(r"`([a-z0-9-]+)`", cells[0]):
            _, _, here, others, codes, longest, *_ = cells
            first, second = (code.strip() for code in codes.split("/"))
            found[match[1]] = Row((here.strip("`"), others.strip("`")), (first, second), longest.split("`")[1])
    return found


def pattern_of(message: str) -> re.Pattern[str]:
    """<...> in the table stands for what varies between runs."""
    return re.compile(".+?".join(map(re.escape, re.split(r"<[^>]+>", message))))


# ---- the stage -----------------------------------------------------------------------------------------------------


class Terminal:
    """A launcher as someone who sits at the node starts it; its output line by line."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.text, self.iteration_at, self.ended_at = process, "", 0.0, 0.0
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.text += line
            if " elapsed time per iteration" in line:
                self.iteration_at = time.monotonic()
        self.process.wait()
        self.ended_at = time.monotonic()


@dataclass
class Scene:
    """Two hosts and a project, while a scenario is played. at_end: what is undone when all launchers have ended."""

    cluster: Cluster
    pair: tuple[str, str]
    project: Project
    output: Path
    port: int
    times: dict[str, int]
    terminals: dict[int, Terminal] = field(default_factory=dict)
    began: float = 0.0
    at_end: ExitStack = field(default_factory=ExitStack)

    def start(self, node: int, master: str = "", rank: int | None = None, **environment: str) -> None:
        words = ["bash", "scripts/run_megatron_t5_ddp.sh", master or self.pair[0], str(node if rank is None else rank)]
        common = {
            "NNODES": "2", "TRAIN_ITERS": "100000", "LOG_INTERVAL": "1", "STUB_ITERATION_MS": "50",
            "MASTER_PORT": str(self.port), "OUTPUT_DIR": str(self.output),
            "STUB_TIMEOUT": str(self.times["DISTRIBUTED_TIMEOUT_MINUTES * 60"]),
            **{name: str(self.times[name]) for name in ("RENDEZVOUS_TIMEOUT", "WATCHDOG_SECONDS")},
        }  # fmt: skip
        everything = self.project.environment | common | environment
        process = self.cluster.start(self.pair[node], *words, env=everything, cwd=self.project.root)
        self.terminals[node] = Terminal(process)

    def start_both(self, **environment: str) -> None:
        for node in (0, 1):
            self.start(node, **environment)

    def train(self, **environment: str) -> None:
        self.start_both(**environment)
        self.until_it_trains()

    def until_it_trains(self) -> None:
        wait_for(lambda: self.terminals[1].iteration_at or self.terminals[1].ended_at, 60)

    def on(self, node: int, *command: str) -> subprocess.CompletedProcess:
        return self.cluster.run(self.pair[node], *command, cwd=self.project.root, check=False)

    def signal(self, name: str, *kinds: str) -> None:
        """To these processes of the run on node 1."""
        pids = [self.cluster.pids(self.pair[1], PROCESSES[kind])[0] for kind in kinds]
        self.began = time.monotonic()
        self.cluster.kill(self.pair[1], *pids, by=name)

    def abandon(self, node: int) -> None:
        """Nobody sees this terminal any more."""
        terminal = self.terminals.pop(node)
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)

    def named(self, text: str) -> str:
        """As if it had been played on node0 and node1."""
        for index, node in enumerate(self.pair):
            text = text.replace(node, f"@{index}")
        return text.replace("@0", "node0").replace("@1", "node1")

    def record(self, node: int) -> dict:
        """run.json on that node; empty if there is none."""
        result = self.on(node, "cat", str(self.output / "run.json"))
        return json.loads(self.named(result.stdout)) if result.returncode == 0 else {}


@dataclass(frozen=True)
class Scenario:
    """``play`` starts the launchers and makes the failure happen; it happens ``at`` a node."""

    play: Callable[[Scene], object]
    at: int = 1
    shared: bool = False
    times: Times = field(default_factory=dict)


SCENARIOS: dict[str, Scenario] = {}


def scenario(**options) -> Callable[[Callable[[Scene], None]], None]:
    def add(play: Callable[[Scene], None]) -> None:
        SCENARIOS[play.__name__.replace("_", "-")] = Scenario(play, **options)

    return add


def fault(name: str, what: str, at: int = 1, shared: bool = False, times: Times | None = None, **settings: str) -> None:
    SCENARIOS[name] = Scenario(lambda scene: scene.start_both(STUB_FAULT=what, **settings), at, shared, times or {})


def started(name: str, *launchers: dict, **options) -> None:
    """With these arguments of Scene.start."""
    SCENARIOS[name] = Scenario(lambda scene: [scene.start(**launcher) for launcher in launchers], **options)


def spoiled(name: str, command: str, **options) -> None:
    SCENARIOS[name] = Scenario(lambda scene: (scene.on(1, "bash", "-c", command), scene.start_both()), **options)


def signalled(name: str, kind: str, signal_name: str, **options) -> None:
    SCENARIOS[name] = Scenario(lambda scene: (scene.train(), scene.signal(signal_name, kind)), **options)


# ---- what goes wrong -----------------------------------------------------------------------------------------------

SHORT_RENDEZVOUS = {"RENDEZVOUS_TIMEOUT": 8}
SHORT_GROUP = {"DISTRIBUTED_TIMEOUT_MINUTES * 60": 12}


@scenario(times={"DISTRIBUTED_TIMEOUT_MINUTES * 60": 45})
def cable_pulled_briefly(scene: Scene) -> None:
    scene.train(TRAIN_ITERS="150")
    pull_cable(scene)
    time.sleep(13)  # longer than after which a node counts as silent
    scene.cluster.lab("link", scene.pair[1], "up")


@scenario()
def cable_bad(scene: Scene) -> None:
    scene.train(TRAIN_ITERS="40")
    scene.began = time.monotonic()
    scene.at_end.callback(scene.cluster.lab, "cable", scene.pair[1], "mend")
    scene.cluster.lab("cable", scene.pair[1], "50", "5", "2")


@scenario(times=SHORT_GROUP)
def cable_pulled(scene: Scene) -> None:
    scene.train()
    pull_cable(scene)


def pull_cable(scene: Scene) -> None:
    scene.at_end.callback(scene.cluster.lab, "link", scene.pair[1], "up")
    scene.cluster.lab("link", scene.pair[1], "down")
    scene.began = time.monotonic()


@scenario(times=SHORT_GROUP)
def power_off(scene: Scene) -> None:
    scene.train()
    scene.at_end.callback(scene.cluster.boot, scene.pair[1])
    scene.began = time.monotonic()
    scene.cluster.lab("poweroff", scene.pair[1])
    scene.abandon(1)


fault("rank-hangs", "1:5:hang", times=SHORT_GROUP)
fault("rank-hangs-on-node-0", "0:5:hang", at=0, times=SHORT_GROUP)
fault("rank-hangs-of-two", "2:5:hang", times=SHORT_GROUP, NPROC_PER_NODE="2")
fault("no-progress", "1:5:hang", times={"WATCHDOG_SECONDS": 25})
signalled("worker-suspended", "worker", "STOP", times=SHORT_GROUP)


started("node-never-comes", {"node": 0}, times=SHORT_RENDEZVOUS)


@scenario()
def node_late(scene: Scene) -> None:
    scene.start(0, TRAIN_ITERS="6")
    time.sleep(8)
    scene.start(1, TRAIN_ITERS="6")


started("master-unknown", {"node": 0}, {"node": 1, "master": "nosuchhost"}, times=SHORT_RENDEZVOUS)
started("master-wrong", {"node": 0}, {"node": 1, "master": "login"}, times=SHORT_RENDEZVOUS)


@scenario(times=SHORT_RENDEZVOUS)
def rank_of_another_node(scene: Scene) -> None:
    hosts = " ".join(scene.pair)
    scene.start(0, HOSTS=hosts)
    scene.start(1, rank=0, HOSTS=hosts)


started("rank-0-twice", {"node": 0}, {"node": 1, "rank": 0}, times=SHORT_RENDEZVOUS)
started("rank-1-twice", {"node": 0, "rank": 1}, {"node": 1}, at=0, times=SHORT_RENDEZVOUS)


@scenario(at=0, times=SHORT_RENDEZVOUS)
def port_taken(scene: Scene) -> None:
    listen = f"import socket; s = socket.create_server(('', {scene.port})); print('ready', flush=True)\nc = []\n"
    listen += "while True: c.append(s.accept())"
    listener = scene.cluster.start(scene.pair[0], scene.project.environment["PYTHON"], "-c", listen)
    scene.at_end.callback(os.killpg, listener.pid, signal.SIGKILL)
    assert listener.stdout.readline() == "ready\n"
    scene.start_both()


fault("worker-killed", "1:5:kill:KILL")
fault("exception", "1:5:raise:broken")
fault("exception-shared-directory", "1:5:raise:broken", shared=True)
fault("rank-ends-early", "1:5:exit:0")
fault("host-memory-full", "1:5:memory:100000000")
fault(
    "gpu-memory-full",
    "1:4:print:[rank1]:_torch.OutOfMemoryError:_CUDA_out_of_memory._Tried_to_allocate_2.00_GiB 1:5:exit:1",
)
fault("loss-not-a-number", "1:5:nan", TRAIN_ITERS="8")
signalled("torchrun-killed", "torchrun", "KILL")
signalled("launcher-killed", "launcher", "KILL")
signalled("recorder-killed", "recorder", "KILL")


@scenario()
def other_secret(scene: Scene) -> None:
    for node in (0, 1):
        scene.start(node, T5_RUN_SECRET=f"secret of node {node}")
    scene.until_it_trains()
    scene.signal("KILL", "worker")


@scenario()
def interrupted(scene: Scene) -> None:
    scene.train()
    scene.signal("INT", "launcher", "recorder")  # the terminal's foreground


@scenario()
def disk_full(scene: Scene) -> None:
    # STUB_FAULT knows no spaces.
    disk = shlex.quote(str(scene.output))
    scene.on(
        1, "bash", "-c", f"mkdir -p {disk} && mount -t tmpfs -o size=256k tmpfs {disk} && ln -s {disk} /run/output"
    )
    scene.at_end.callback(scene.on, 1, "bash", "-c", f"rm /run/output; umount {disk}")
    scene.start_both(STUB_FAULT="1:20:disk:/run/output/checkpoint")


spoiled("data-truncated", "truncate -s -2 megatron_data/xsum_text_document.bin", times=SHORT_RENDEZVOUS)
spoiled("engine-changed", "echo >>../Megatron-DeepSpeed/megatron/training.py", times=SHORT_RENDEZVOUS)


@scenario()
def another_commit(scene: Scene) -> None:
    git = "git -c user.name=lab -c user.email=lab@localhost -c init.defaultBranch=main"
    for node in (0, 1):
        commit = f"export HOME=/run; {git} init -q && {git} commit -q --allow-empty -m 'node {node}'"
        scene.on(node, "bash", "-c", commit)
    scene.start_both(TRAIN_ITERS="100")


def srun(scene: Scene, *options: str) -> None:
    """Both launchers by one srun, whose output is both terminals'; returns when it trains."""
    words = ["srun", "--label", "--nodes=2", "--ntasks-per-node=1", f"--nodelist={','.join(scene.pair)}", *options]
    words += ["bash", "scripts/run_megatron_t5_ddp.sh"]
    settings = {"TRAIN_ITERS": "100000", "MASTER_PORT": str(scene.port), "OUTPUT_DIR": str(scene.output)}
    environment = scene.project.environment | settings
    terminal = Terminal(scene.cluster.start("login", *words, env=environment, cwd=scene.project.root))
    scene.terminals = {0: terminal, 1: terminal}
    scene.until_it_trains()


@scenario(shared=True)
def scancel(scene: Scene) -> None:
    srun(scene)
    number = scene.cluster.login("squeue", "-h", "-o", "%i", f"--nodelist={scene.pair[0]}").stdout.strip()
    scene.began = time.monotonic()
    scene.cluster.login("scancel", number)


@scenario(shared=True)
def slurm_time_limit(scene: Scene) -> None:
    # A minute is SLURM's shortest limit; it sends this signal up to a minute earlier than it is told.
    srun(scene, "--time=1", "--signal=TERM@60")


# ---- playing -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """By node: its terminal's exit status and text, and its run.json. left: what still ran."""

    exit_codes: dict[int, int]
    texts: dict[int, str]
    records: dict[int, dict]
    seconds: float
    left: list[str]


class Stage:
    """Plays scenarios on all pairs of hosts at once, those first that are asked for first."""

    def __init__(self, cluster: Cluster, directory: Path, names: list[str]) -> None:
        self.cluster, self.project = cluster, make_cluster_project(directory)
        self.free: SimpleQueue[tuple[str, str]] = SimpleQueue()
        for pair in PAIRS:
            self.free.put(pair)
        self.pool = ThreadPoolExecutor(len(PAIRS))
        self.outcomes = {name: self.pool.submit(self._play_somewhere, name) for name in names}

    def _play_somewhere(self, name: str) -> Outcome:
        pair = self.free.get()
        try:
            return self._play(name, pair)
        finally:
            self.free.put(pair)

    def _play(self, name: str, pair: tuple[str, str]) -> Outcome:
        planned, number = SCENARIOS[name], list(SCENARIOS).index(name)
        output, times = self.project.root / "outputs" / name, TIMES | planned.times
        scene = Scene(self.cluster, pair, self.project, output, 27000 + number, times)
        before = {node: set(self.cluster.processes(node).values()) for node in pair}

        def left() -> list[tuple[str, int, str]]:
            found = [(node, pid, line) for node in pair for pid, line in self.cluster.processes(node).items()]
            return [(node, pid, line) for node, pid, line in found if line not in before[node]]

        with ExitStack() as cleanup:
            if not planned.shared:
                for node in pair:
                    cleanup.callback(self.cluster.lab, "public", node, str(self.project.root.parent))
                    self.cluster.lab("private", node, str(self.project.root.parent))
            cleanup.callback(lambda: [self.cluster.kill(node, pid) for node, pid, _ in left()])
            cleanup.callback(lambda: [scene.abandon(node) for node in list(scene.terminals)])
            with scene.at_end:
                started = time.monotonic()
                planned.play(scene)
                self._wait(name, scene)
            terminals = scene.terminals
            began = scene.began or max(terminal.iteration_at for terminal in terminals.values()) or started
            with suppress(AssertionError):  # the kernel and SLURM need a moment to clear away what has ended
                wait_for(lambda: not left(), 2)
            return Outcome(
                {node: terminal.process.returncode for node, terminal in terminals.items()},
                {node: scene.named(terminal.text) for node, terminal in terminals.items()},
                {node: scene.record(node) for node in terminals},
                max(terminal.ended_at for terminal in terminals.values()) - began,
                [line for _, _, line in left()],
            )

    @staticmethod
    def _wait(name: str, scene: Scene) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        for terminal in scene.terminals.values():
            terminal.thread.join(max(0.1, deadline - time.monotonic()))
        late = {node: terminal.text for node, terminal in scene.terminals.items() if not terminal.ended_at}
        assert not late, f"{name}: no end after {LONGEST_SECONDS} s: {late}"


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    chosen = [item.callspec.params["name"] for item in request.session.items
              if getattr(item, "originalname", "") == test_what_happens.__name__]  # fmt: skip
    playing = Stage(running_cluster, tmp_path_factory.mktemp("failures"), chosen)
    yield playing
    playing.pool.shutdown(cancel_futures=True)


STATUSES = {*status.EXIT_CODES, status.CANCELLED}
BY_SRUN = {"scancel", "slurm-time-limit"}
# Here the node cannot write it, or what writes it is gone.
UNWRITTEN = {("disk-full", 1), ("recorder-killed", 1)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_happens(stage: Stage, name: str):
    outcome: Outcome = stage.outcomes[name].result(timeout=550)
    planned, row = SCENARIOS[name], read_table()[name]
    everything = "\n".join(
        f"---- node {node}: {outcome.exit_codes[node]}\n{text}" for node, text in outcome.texts.items()
    )
    print(f"\n{name}: {outcome.seconds:.1f} s\n{everything}")
    for index, node in enumerate((planned.at, 1 - planned.at)):
        message, code = row.messages[index], row.exit_codes[index]
        if node not in outcome.texts:
            assert (message, code) == (NOTHING_SAID, NOTHING_SAID)
            continue
        found = pattern_of(message).search(outcome.texts[node])
        assert found, f"node {node} did not say: {message}\n{everything}"
        if name not in BY_SRUN:  # srun gives one status for all
            assert outcome.exit_codes[node] == int(code), everything
        check_record(name, outcome.records[node], found[0], node)
    assert not outcome.left, everything
    assert outcome.seconds <= row.seconds(TIMES | planned.times), everything


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
