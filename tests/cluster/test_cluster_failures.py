"""Every way in which a node can fail, made to happen on two real hosts, and what people then see.

docs/failures.md is what is checked: a scenario here for each row there, with the row's messages on every terminal, its
exit codes, its status in every node's record, its longest time to the end, and nothing left running on any node.

The hosts and processes are real, torchrun and gloo too; the engine is the stub trainer, and there is no GPU. Each node
has a directory of its own, as without a shared file system, unless the scenario says otherwise. The four hosts make two
pairs, and two scenarios run at once.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from cluster_lab import Cluster, make_cluster_project
from harness import REPO_ROOT, Project, wait_for

from t5bench.record import status

DOCUMENT = REPO_ROOT / "docs" / "failures.md"
PAIRS = (("node0", "node1"), ("node2", "node3"))
LONGEST_SECONDS = 150
# What the scenarios set, in seconds; the table's longest times are sums of these and of a number of seconds.
TIMES = {"RENDEZVOUS_TIMEOUT": 60, "DISTRIBUTED_TIMEOUT_MINUTES * 60": 60, "WATCHDOG_SECONDS": 3600}
NOTHING_SAID = "none"


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """of a node: where it happens (0) and the other (1)."""

    name: str
    messages: tuple[str, str]
    exit_codes: tuple[str, str]
    longest: str

    def seconds(self, times: dict[str, int]) -> float:
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
            found[match[1]] = Row(
                match[1], (here.strip("`"), others.strip("`")), (first, second), longest.split("`")[1]
            )
    return found


def pattern_of(message: str) -> re.Pattern[str]:
    """<...> in the table stands for what differs from run to run."""
    return re.compile(".+?".join(map(re.escape, re.split(r"<[^>]+>", message))))


# ---- the stage -----------------------------------------------------------------------------------------------------


class Terminal:
    """A launcher as someone who sits at the node starts it; its output line by line."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.lines, self.iteration_at, self.ended_at = process, [], 0.0, 0.0
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if " elapsed time per iteration" in line:
                self.iteration_at = time.monotonic()
        self.process.wait()
        self.ended_at = time.monotonic()

    @property
    def text(self) -> str:
        return "".join(self.lines)


@dataclass
class Scene:
    """Two hosts and a project, while a scenario is played."""

    cluster: Cluster
    pair: tuple[str, str]
    project: Project
    port: int
    times: dict[str, int]
    environment: dict[str, str] = field(default_factory=dict)
    terminals: dict[int, Terminal] = field(default_factory=dict)
    began: float = 0.0
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def master(self) -> str:
        return self.pair[0]

    @property
    def output(self) -> Path:
        return self.project.root / "outputs" / "ddp"

    def start(self, node: int, master: str = "", rank: int | None = None, **environment: str) -> None:
        words = ["bash", "scripts/run_megatron_t5_ddp.sh", master or self.master, str(node if rank is None else rank)]
        minutes = self.times["DISTRIBUTED_TIMEOUT_MINUTES * 60"] / 60
        everything = self.project.environment | {
            "NNODES": "2",
            "TRAIN_ITERS": "100000",
            "LOG_INTERVAL": "1",
            "STUB_ITERATION_MS": "50",
            "MASTER_PORT": str(self.port),
            "RENDEZVOUS_TIMEOUT": str(self.times["RENDEZVOUS_TIMEOUT"]),
            "WATCHDOG_SECONDS": str(self.times["WATCHDOG_SECONDS"]),
        }
        # The launcher takes whole minutes; what stands after -- is the engine's, and the later counts.
        words += ["--", "--distributed-timeout-minutes", str(minutes)]
        environment = everything | self.environment | environment
        self.terminals[node] = Terminal(
            self.cluster.start(self.pair[node], *words, env=environment, cwd=self.project.root)
        )

    def start_both(self, **environment: str) -> None:
        for node in (0, 1):
            self.start(node, **environment)

    def until_it_trains(self) -> None:
        wait_for(lambda: self.terminals[1].iteration_at or self.terminals[1].ended_at, 60)

    def on(self, node: int, *command: str) -> subprocess.CompletedProcess:
        return self.cluster.run(self.pair[node], *command, cwd=self.project.root)

    def pid(self, node: int, what: str) -> int:
        """Of the run's launcher, recorder, torchrun or worker on this node."""
        looks = {
            "launcher": lambda line: line.startswith("bash scripts/run_megatron_t5_"),
            "recorder": lambda line: "-m t5bench record" in line,
            "torchrun": lambda line: "/torchrun --nnodes" in line and "t5bench" not in line,
            "worker": lambda line: "-u " in line and "pretrain_t5.py" in line and "torchrun" not in line,
        }
        found = [pid for pid, line in self.cluster.processes(self.pair[node]).items() if looks[what](line)]
        assert found, f"no {what} on {self.pair[node]}: {self.cluster.processes(self.pair[node])}"
        return min(found)

    def signal(self, node: int, what: str, name: str) -> None:
        pid = self.pid(node, what)
        self.began = time.monotonic()
        self.cluster.kill(self.pair[node], pid, by=name)

    def abandon(self, node: int) -> None:
        """Nobody sees this terminal any more."""
        terminal = self.terminals.pop(node)
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)

    def named(self, text: str) -> str:
        """As if it had been played on node0 and node1, in the documented directory."""
        for index, node in enumerate(self.pair):
            text = text.replace(node, f"@{index}")
        return text.replace("@0", "node0").replace("@1", "node1")


@dataclass(frozen=True)
class Scenario:
    """``play`` starts the launchers and makes the failure happen; it happens ``at`` a node."""

    play: Callable[[Scene], object]
    at: int = 1
    shared: bool = False
    times: dict[str, int] = field(default_factory=dict)


@dataclass
class Outcome:
    exit_codes: dict[int, int]
    texts: dict[int, str]
    seconds: float
    left: dict[str, list[str]]
    records: dict[int, dict]  # run.json as each node has it; nothing where there is none


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, **options) -> Callable[[Callable[[Scene], object]], Callable[[Scene], object]]:
    def add(play: Callable[[Scene], object]) -> Callable[[Scene], object]:
        SCENARIOS[name] = Scenario(play, **options)
        return play

    return add


def fault(name: str, what: str, **options) -> None:
    SCENARIOS[name] = Scenario(lambda scene: scene.start_both(STUB_FAULT=what), **options)


# ---- what goes wrong -----------------------------------------------------------------------------------------------

SHORT_RENDEZVOUS = {"RENDEZVOUS_TIMEOUT": 8}
SHORT_GROUP = {"DISTRIBUTED_TIMEOUT_MINUTES * 60": 12}


@scenario("cable-pulled-briefly", times={"DISTRIBUTED_TIMEOUT_MINUTES * 60": 45})
def cable_pulled_briefly(scene: Scene) -> None:
    scene.start_both(TRAIN_ITERS="150")
    scene.until_it_trains()
    pull_cable(scene)
    time.sleep(13)  # longer than after which a node counts as silent
    scene.cluster.lab("link", scene.pair[1], "up")


@scenario("cable-pulled", times=SHORT_GROUP)
def cable_pulled(scene: Scene) -> None:
    scene.start_both()
    scene.until_it_trains()
    pull_cable(scene)


def pull_cable(scene: Scene) -> None:
    scene.undo.append(lambda: scene.cluster.lab("link", scene.pair[1], "up"))
    scene.cluster.lab("link", scene.pair[1], "down")
    scene.began = time.monotonic()


@scenario("power-off", times=SHORT_GROUP)
def power_off(scene: Scene) -> None:
    scene.start_both()
    scene.until_it_trains()
    scene.undo.append(lambda: scene.cluster.boot(scene.pair[1]))
    scene.began = time.monotonic()
    scene.cluster.poweroff(scene.pair[1])
    scene.abandon(1)


fault("rank-hangs", "1:5:hang", times=SHORT_GROUP)
fault("rank-hangs-on-node-0", "0:5:hang", at=0, times=SHORT_GROUP)
fault("no-progress", "1:5:hang", times={"WATCHDOG_SECONDS": 8})


@scenario("worker-suspended", times=SHORT_GROUP)
def worker_suspended(scene: Scene) -> None:
    scene.start_both()
    scene.until_it_trains()
    scene.signal(1, "worker", "STOP")


@scenario("node-never-comes", times=SHORT_RENDEZVOUS)
def node_never_comes(scene: Scene) -> None:
    scene.start(0)


@scenario("node-late")
def node_late(scene: Scene) -> None:
    scene.start(0, TRAIN_ITERS="6")
    time.sleep(8)
    scene.start(1, TRAIN_ITERS="6")


@scenario("master-unknown", times=SHORT_RENDEZVOUS)
def master_unknown(scene: Scene) -> None:
    scene.start(0)
    scene.start(1, master="nosuchhost")


@scenario("master-wrong", times=SHORT_RENDEZVOUS)
def master_wrong(scene: Scene) -> None:
    scene.start(0)
    scene.start(1, master="login")


@scenario("rank-of-another-node", times=SHORT_RENDEZVOUS)
def rank_of_another_node(scene: Scene) -> None:
    hosts = " ".join(scene.pair)
    scene.start(0, HOSTS=hosts)
    scene.start(1, rank=0, HOSTS=hosts)


@scenario("rank-0-twice", times=SHORT_RENDEZVOUS)
def rank_0_twice(scene: Scene) -> None:
    scene.start(0)
    scene.start(1, rank=0)


@scenario("rank-1-twice", at=0, times=SHORT_RENDEZVOUS)
def rank_1_twice(scene: Scene) -> None:
    scene.start(0, rank=1)
    scene.start(1)


@scenario("port-taken", at=0, times=SHORT_RENDEZVOUS)
def port_taken(scene: Scene) -> None:
    listen = f"import socket; s = socket.create_server(('', {scene.port})); print('ready', flush=True)\nc = []\n"
    listen += "while True: c.append(s.accept())"
    listener = scene.cluster.start(scene.pair[0], scene.project.environment["PYTHON"], "-c", listen)
    scene.undo.append(lambda: os.killpg(listener.pid, signal.SIGKILL))
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


@scenario("loss-not-a-number")
def loss_not_a_number(scene: Scene) -> None:
    scene.start_both(STUB_FAULT="1:5:nan", TRAIN_ITERS="8")


@scenario("torchrun-killed")
def torchrun_killed(scene: Scene) -> None:
    scene.start_both()
    scene.until_it_trains()
    scene.signal(1, "torchrun", "KILL")


@scenario("launcher-killed")
def launcher_killed(scene: Scene) -> None:
    scene.start_both()
    scene.until_it_trains()
    scene.signal(1, "launcher", "KILL")


@scenario("recorder-killed")
def recorder_killed(scene: Scene) -> None:
    scene.start_both()
    scene.until_it_trains()
    scene.signal(1, "recorder", "KILL")


@scenario("interrupted")
def interrupted(scene: Scene) -> None:
    scene.start_both()
    scene.until_it_trains()
    pids = [scene.pid(1, "launcher"), scene.pid(1, "recorder")]  # the terminal's foreground
    scene.began = time.monotonic()
    scene.cluster.kill(scene.pair[1], *pids, by="INT")


@scenario("disk-full")
def disk_full(scene: Scene) -> None:
    scene.on(1, "mkdir", "-p", str(scene.output))
    scene.on(1, "mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(scene.output))
    scene.undo.append(lambda: scene.on(1, "umount", str(scene.output)))
    # STUB_FAULT knows no spaces.
    scene.on(1, "ln", "-s", str(scene.output), "/run/output")
    scene.undo.append(lambda: scene.on(1, "rm", "/run/output"))
    scene.start_both(STUB_FAULT="1:20:disk:/run/output/checkpoint")


@scenario("data-truncated", times=SHORT_RENDEZVOUS)
def data_truncated(scene: Scene) -> None:
    scene.on(1, "truncate", "-s", "-2", str(scene.project.data_prefix.with_suffix(".bin")))
    scene.start_both()


@scenario("engine-changed", times=SHORT_RENDEZVOUS)
def engine_changed(scene: Scene) -> None:
    scene.on(1, "bash", "-c", 'echo "# changed" >>"$1"', "bash", str(scene.project.engine / "megatron" / "training.py"))
    scene.start_both()


@scenario("another-commit")
def another_commit(scene: Scene) -> None:
    git = "git -c user.name=lab -c user.email=lab@localhost -c init.defaultBranch=main"
    for node in (0, 1):
        scene.on(
            node, "bash", "-c", f"export HOME=/run; {git} init -q && {git} commit -q --allow-empty -m 'node {node}'"
        )
    scene.start_both(TRAIN_ITERS="100")


def srun(scene: Scene, *options: str) -> None:
    """Both launchers by one srun, whose output is both terminals'; returns when it trains."""
    words = ["srun", "--label", "--nodes=2", "--ntasks-per-node=1", f"--nodelist={','.join(scene.pair)}", *options]
    words += ["bash", "scripts/run_megatron_t5_ddp.sh"]
    environment = {"TRAIN_ITERS": "100000", "LOG_INTERVAL": "10", "MASTER_PORT": str(scene.port)}
    environment = scene.project.environment | environment
    terminal = Terminal(scene.cluster.start("login", *words, env=environment, cwd=scene.project.root))
    scene.terminals = {0: terminal, 1: terminal}
    scene.until_it_trains()


@scenario("scancel", shared=True)
def scancel(scene: Scene) -> None:
    srun(scene)
    number = scene.cluster.login("squeue", "-h", "-o", "%i", f"--nodelist={scene.pair[0]}").stdout.strip()
    scene.began = time.monotonic()
    scene.cluster.login("scancel", number)


@scenario("slurm-time-limit", shared=True)
def slurm_time_limit(scene: Scene) -> None:
    # A minute is SLURM's shortest limit; it sends this signal up to a minute earlier than it is told.
    srun(scene, "--time=1", "--signal=TERM@60")


# ---- playing -------------------------------------------------------------------------------------------------------


def play(cluster: Cluster, name: str, pair: tuple[str, str], directory: Path, port: int) -> Outcome:
    planned = SCENARIOS[name]
    project = make_cluster_project(directory)
    scene = Scene(cluster, pair, project, port, TIMES | planned.times)
    before = {node: set(cluster.processes(node).values()) for node in pair}

    def left() -> dict[str, list[str]]:
        running = {node: cluster.processes(node) for node in pair}
        return {
            node: found
            for node, lines in running.items()
            if (found := [line for line in lines.values() if line not in before[node]])
        }

    try:
        if not planned.shared:
            for node in pair:
                cluster.lab("private", node, str(project.root.parent))
        started = time.monotonic()
        planned.play(scene)
        deadline = time.monotonic() + LONGEST_SECONDS
        for terminal in scene.terminals.values():
            terminal.thread.join(max(0.1, deadline - time.monotonic()))
        texts = {node: scene.named(terminal.text) for node, terminal in scene.terminals.items()}
        late = [node for node, terminal in scene.terminals.items() if not terminal.ended_at]
        assert not late, f"{name}: after {LONGEST_SECONDS} s no end on {late}: {texts}"
        trained = max((terminal.iteration_at for terminal in scene.terminals.values()), default=0)
        began = scene.began or trained or started
        ended = max(terminal.ended_at for terminal in scene.terminals.values())
        for undo in reversed(scene.undo):
            undo()
        scene.undo.clear()
        return Outcome(
            {node: terminal.process.returncode for node, terminal in scene.terminals.items()},
            texts,
            ended - began,
            nothing_or(left),
            {node: record_on(scene, node) for node in scene.terminals},
        )
    finally:
        for undo in reversed(scene.undo):
            undo()
        for node in list(scene.terminals):
            scene.abandon(node)
        for node in pair:
            cluster.kill(node, *(pid for pid, line in cluster.processes(node).items() if line not in before[node]))
            if not planned.shared:
                cluster.lab("public", node, str(project.root.parent), check=False)


def nothing_or(left: Callable[[], dict[str, list[str]]], seconds: float = 2) -> dict[str, list[str]]:
    """What is left after a moment, in which the kernel and SLURM clear away what has ended."""
    deadline = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def record_on(scene: Scene, node: int) -> dict:
    result = scene.cluster.run(scene.pair[node], "cat", str(scene.output / "run.json"), check=False)
    return json.loads(scene.named(result.stdout)) if result.returncode == 0 else {}


class Stage:
    """Plays scenarios on both pairs of hosts at once, those first that are asked for first."""

    def __init__(self, cluster: Cluster, directory: Path, names: Sequence[str]) -> None:
        self.cluster, self.directory = cluster, directory
        self.outcomes: dict[str, Future] = {name: Future() for name in names}
        self.waiting: SimpleQueue[tuple[int, str]] = SimpleQueue()
        for entry in enumerate(names):
            self.waiting.put(entry)
        self.threads = [threading.Thread(target=self._play, args=(pair,)) for pair in PAIRS]
        for thread in self.threads:
            thread.start()

    def _play(self, pair: tuple[str, str]) -> None:
        while True:
            try:
                number, name = self.waiting.get_nowait()
            except Empty:
                return
            directory = self.directory / name
            directory.mkdir()
            try:
                self.outcomes[name].set_result(play(self.cluster, name, pair, directory, 27000 + number))
            except BaseException as error:
                self.outcomes[name].set_exception(error)

    def close(self) -> None:
        while True:
            try:
                self.waiting.get_nowait()
            except Empty:
                break
        for thread in self.threads:
            thread.join()


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, running_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    chosen = [item.callspec.params["name"] for item in request.session.items
              if getattr(item, "originalname", "") == test_what_happens.__name__]  # fmt: skip
    playing = Stage(running_cluster, tmp_path_factory.mktemp("failures"), chosen)
    yield playing
    playing.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_happens(stage: Stage, name: str):
    outcome: Outcome = stage.outcomes[name].result(timeout=550)
    planned, row = SCENARIOS[name], read_table()[name]
    everything = "\n".join(
        f"---- node {node}: {code}\n{outcome.texts[node]}" for node, code in outcome.exit_codes.items()
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


STATUSES = {*status.EXIT_CODES, status.CANCELLED}
BY_SRUN = {"scancel", "slurm-time-limit"}
# Here the node cannot write it, or what writes it is gone.
UNWRITTEN = {("disk-full", 1), ("recorder-killed", 1)}


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
        if name in BY_SRUN:  # either node's signal may have come first
            reason = reason.replace("node 0 (node0)", "node 1 (node1)")
            record |= {"reason": record["reason"].replace("node 0 (node0)", "node 1 (node1)")}
        assert reason in record["reason"] or record["reason"] in reason
    elif message.startswith("ddp: complete"):
        own = [part for part in record["nodes"] if part["node"] == node]
        assert own[0]["status"] == "complete"
    else:
        assert word == "error" and not record, "refused before the run began"


def test_every_row_has_its_scenario():
    assert list(read_table()) == list(SCENARIOS)
