"""Plans a sweep's runs; starts one launcher here, or one on every host over ssh, and fetches their records.

A bash on each host receives a script on its standard input: the settings (so that no key is on a command line), the
launcher, and a watch on that input. When this process ends, or the connection breaks, the input ends and the launcher
stops what it started. The repository must be at the same path on every host.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from t5bench import REPOSITORY, Problem, note
from t5bench.checkpoint_form import TRACKER
from t5bench.plan import launchers
from t5bench.plan.channel import SECRET
from t5bench.plan.launchers import without_layout
from t5bench.plan.planner import plan
from t5bench.plan.ports import free_port
from t5bench.record import collect
from t5bench.record.files import RecordError
from t5bench.record.hosts import BEGINS, ssh
from t5bench.record.plan import Plan
from t5bench.record.reader import read_part
from t5bench.record.records import write_run
from t5bench.record.status import CONFIGURATION, CRASHED, EXIT_CODES
from t5bench.text import visible

# The strategy with which the others are compared.
BASELINE = "ddp"
SSH_OPTIONS = ("-o", "ServerAliveInterval=15")
SSH_FAILED = 255
# A launcher needs up to 25 s to stop; if its peer failed, it ends without being asked within 30 s, mostly in 3.
GRACE_SECONDS = 45
# Launchers that plan at the same time; each takes half a second, most of it on one core.
PLANNING_THREADS = 4
# What a run does without that is made only for its time.
UNWATCHED = {
    **{"SAVE_INTERVAL": "0", "EVAL_ITERS": "0", "EVAL_ONLY": "0", "PROFILE_ITERATION": "0", "RESUME": "0"},
    "WANDB_MODE": "disabled",
}
# The environment variables that a host receives besides the settings.
ALSO_SENT = (
    "PATH", "PYTHON", "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "OMP_", "HF_", "TORCH_", "UCX_", "FI_", "WANDB_",
)  # fmt: skip

# The launcher runs in the background, and standard input is read until it ends.
WATCH = """main() {
  launch </dev/null &
  launcher=$!
  { cat >/dev/null; kill -TERM "$launcher" 2>/dev/null; } <&0 &
  watch=$!
  wait "$launcher"; status=$?
  while kill -0 "$launcher" 2>/dev/null; do wait "$launcher"; status=$?; done
  pkill -P "$watch" 2>/dev/null; kill "$watch" 2>/dev/null
  exit "$status"
}
main
"""


@dataclass(frozen=True)
class PlannedRun:
    """A run to make."""

    name: str
    strategy: str
    processes: int | None = None
    """In all; None for the strategy's default."""
    plan: Plan | None = None
    """The first node's."""
    resumes: bool = False
    """From its own checkpoints, which are never overwritten."""

    @property
    def world_size(self) -> int:
        """Of a row that is planned."""
        assert self.plan and self.plan.layout
        return self.plan.layout.world_size


def shell(host: str) -> list[str]:
    """The command for a bash on a host ("" for this machine) that reads its standard input."""
    return ssh(host, "bash", "-s", options=SSH_OPTIONS) if host else ["bash", "-s"]


class Node:
    """A host, the bash there, the file for its output, and the file for its part of the record."""

    def __init__(self, host: str, environment: Mapping[str, str], directory: Path, rank: int) -> None:
        self.host = host
        self.rank = rank
        self.part = directory / f"node{rank}.json"
        self.output = directory / f"node{rank}.terminal"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                shell(host),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches only this process, which then ends the nodes in order
            )

    def send(self, script: str) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # ssh has ended, and its exit status says why
            self.process.stdin.write(script.encode())
            self.process.stdin.flush()

    def end(self) -> None:
        """Makes the launcher end what it started."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    @property
    def was_lost(self) -> bool:
        """Whether the connection to the host broke after its script began."""
        return self.process.poll() == SSH_FAILED and BEGINS in self.output.read_text(errors="replace")

    @property
    def refused(self) -> bool:
        """Whether the host was never reached, or its launcher did not begin."""
        return self.process.poll() in (SSH_FAILED, EXIT_CODES[CONFIGURATION]) and not self.was_lost

    @property
    def output_lines(self) -> list[str]:
        return visible(self.output.read_text(errors="replace"), "\n").strip().splitlines() or ["it printed nothing"]


class Started:
    """One run on all its nodes, as a process."""

    def __init__(self, launch: "Launch", row: PlannedRun, directory: Path) -> None:
        self._launch = launch
        self._row = row
        self._directory = directory
        parts = (*directory.glob("node*.json"), *directory.glob("metrics.jsonl"))
        self._earlier = {path: path.stat().st_mtime_ns for path in parts}  # when an earlier attempt wrote its files
        self._deadline: float | None = None
        self.nodes: list[Node] = []
        self.problems: list[str] = []  # what its record does not say, once it has ended

    def poll(self) -> int | None:
        """None while any node runs. If one fails, the others get time to end, unless that one never began."""
        codes = [node.process.poll() for node in self.nodes]
        if None not in codes:
            return self._finish()
        if self._deadline is None and any(codes):
            has_refusal = any(node.refused for node in self.nodes)
            self._deadline = time.monotonic() + (0 if has_refusal else GRACE_SECONDS)
        if self._deadline is not None and time.monotonic() > self._deadline:
            for node in self.nodes:
                node.end()
        return None

    def end(self) -> list[str]:
        """Stops the run and fetches its record; returns the processes that did not stop in time."""
        for node in self.nodes:
            node.end()
        deadline = time.monotonic() + GRACE_SECONDS
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        still_running = [node for node in self.nodes if node.process.poll() is None]
        if not still_running:
            self._finish()
        return [f"what process {node.process.pid} started on {node.host or 'this machine'}" for node in still_running]

    def _finish(self) -> int:
        """Fetches the parts that are not already here (a shared file system); returns the run's exit status."""
        lost = [node for node in self.nodes if node.was_lost]
        self.problems = [f"ssh to {node.host} broke off: {node.output_lines[-1]}" for node in lost]
        absent = [node for node in self.nodes if self._is_old(node.part)]
        set_aside = self._set_earlier_files_aside() if absent else {}
        for node in absent:
            if node.host:
                self._fetch_from(node.host)
        nothing_began = all(self._is_old(node.part) for node in self.nodes)
        if nothing_began:  # and a later attempt may resume the earlier one
            for path, aside in set_aside.items():
                aside.rename(path)
        refused = [node for node in absent if self._has_refused(node)]
        if refused:
            self.problems = [self._why_refused(node) for node in refused]
            return EXIT_CODES[CONFIGURATION]
        try:
            return EXIT_CODES.get(write_run(self._directory)["status"], EXIT_CODES[CRASHED])
        except (RecordError, OSError) as error:
            self.problems.append(str(error))
            return EXIT_CODES[CRASHED]

    def _set_earlier_files_aside(self) -> dict[Path, Path]:
        """So that they are not mistaken for this attempt's; the new path of each."""
        earlier = [path for path in self._earlier if path.exists() and self._is_old(path)]
        set_aside = {path: Path(f"{path}.earlier") for path in earlier}
        for path, aside in set_aside.items():
            path.rename(aside)
        return set_aside

    def _fetch_from(self, host: str) -> None:
        source = f"{host}:{self._directory}"
        try:
            with collect.local_copy(source) as copy:
                collect.bring(copy, source, self._directory)
        except RecordError as error:
            self.problems.append(str(error))

    def _why_refused(self, node: Node) -> str:
        lines = node.output_lines
        if node.process.returncode == SSH_FAILED:
            return f"ssh to {node.host} failed: {lines[-1]}"
        try:
            obstacles = self._launch.ask(self._row, self._directory, node.rank).obstacles
        except Problem as problem:
            return str(problem)
        errors = [line for line in lines if line.startswith("error: ")]
        if obstacles:
            reason = obstacles[0].found
        elif errors:  # a dry run does not find everything, such as a disk that is full
            reason = errors[-1].removeprefix("error: ")
        else:
            reason = f"see {node.output}"
        return f"{node.host}: {reason}" if node.host else reason

    def _has_refused(self, node: Node) -> bool:
        """Whether its launcher refused: there is no new record, or another node's end is in it. An engine's says so."""
        if not node.refused or self._is_old(node.part):
            return node.refused
        with contextlib.suppress(RecordError):
            return read_part(node.part)["status"] != CONFIGURATION
        return True

    def _is_old(self, path: Path) -> bool:
        """Whether the file is not from this attempt."""
        return not path.exists() or path.stat().st_mtime_ns == self._earlier.get(path)


class Launch:
    """Plans and starts runs, on this machine only or on the nodes of HOSTS or SLURM."""

    def __init__(self, changes: Mapping[str, str], over_ssh: bool = False, arguments: Sequence[str] = ()) -> None:
        """changes: to the environment. arguments: for the engine. Raises Problem if there are no hosts."""
        self._environment = {**os.environ, **changes}
        self._arguments = list(arguments)
        self._hosts: Sequence[str] = [""]
        self._sent: Mapping[str, str] = {}  # the variables that a host receives
        self.running: Started | None = None  # the newest run
        if over_ssh:
            self._reach_hosts()

    def _reach_hosts(self) -> None:
        # This machine need not be one of them, and then its rank could not be inferred.
        environment = launchers.with_slurm_hosts({**self._environment, "NODE_RANK": "0"})
        baseline = launchers.accepted(plan(without_layout(environment), BASELINE))
        if not baseline.hosts:
            raise Problem("LAUNCH=ssh but no hosts are known", 'export HOSTS="node0 node1" in rank order')
        self._hosts = baseline.hosts
        self._environment.setdefault(SECRET, secrets.token_hex(32))
        self._sent = {
            name: value
            for name, value in self._environment.items()
            if name in baseline.settings or name.startswith(ALSO_SENT)
        }

    def _settings(self, row: PlannedRun, directory: Path) -> dict[str, str]:
        """What a row changes in the environment."""
        settings = {
            "HOSTS": " ".join(self._hosts),
            "OUTPUT_DIR": str(directory),
            "RESUME": "1" if row.resumes else "0",
        }
        if not self._hosts[0]:
            port = self._environment.get("MASTER_PORT") or str(free_port())
            settings |= {**launchers.ALONE, "MASTER_PORT": port}
        if row.processes:
            settings["NPROC_PER_NODE"] = str(row.processes // len(self._hosts))
        return settings | with_size(row.strategy).settings

    def _script(self, row: PlannedRun, directory: Path, rank: int, end: str) -> str:
        """The script for a host's bash; in ``end`` the launcher is called ``launch``."""
        name = with_size(row.strategy).strategy
        command = ["bash", str(launchers.launcher(name))]
        lines = [f"echo '{BEGINS}'"]
        master = self._hosts[0]
        if master:
            command += [master, str(rank)]
            repository = shlex.quote(str(REPOSITORY))
            missing = f'echo "error: there is no {repository} on $HOSTNAME" >&2'
            lines.append(f"cd -- {repository} 2>/dev/null || {{ {missing}; exit 2; }}")
        exports = {**self._sent, **self._settings(row, directory)}
        for variable, value in sorted(exports.items()):
            lines.append(f"export {variable}={shlex.quote(value)}")
        arguments = shlex.join(["--", *self._arguments]) if self._arguments else ""
        lines.append(f'launch() {{ exec {shlex.join(command)} "$@" {arguments}; }}')
        lines.append(end)
        return "\n".join(lines)

    def ask(self, row: PlannedRun, directory: Path, rank: int = 0) -> Plan:
        """The plan of a host. Raises Problem if it prints none."""
        host = self._hosts[rank]
        if not host:
            name = with_size(row.strategy).strategy
            return plan({**self._environment, **self._settings(row, directory)}, name, self._arguments)
        result = subprocess.run(
            shell(host),
            env=self._environment,
            input=self._script(row, directory, rank, "launch --dry-run=json </dev/null\n"),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        planned = result.stdout.partition(BEGINS)[2]
        if not planned.strip():
            why = visible(result.stderr, "\n")
            raise Problem(f"{host} cannot plan {row.strategy}: {why}", f"Try to log in by hand: ssh {host}")
        return Plan.read(json.loads(planned))

    def start(self, row: PlannedRun, directory: Path) -> Started:
        """Registers each node before sending it anything, so that an interruption leaves no launcher behind."""
        row = replace(row, resumes=self._has_checkpoint(directory))
        run = Started(self, row, directory)
        self.running = run
        for rank, host in enumerate(self._hosts):
            node = Node(host, self._environment, directory, rank)
            run.nodes.append(node)
            begin = WATCH
            if host:
                # A node whose own part is complete would refuse to repeat a run that failed on another node.
                status = shlex.quote(str(directory / f"node{rank}.status"))
                begin = f"rm -f -- {status}\n{WATCH}"
            node.send(self._script(row, directory, rank, begin))
        return run

    def _has_checkpoint(self, directory: Path) -> bool:
        """On the first node, so that all nodes resume or none: only its disk surely has the pointer to checkpoints."""
        pointer = shlex.quote(str(directory / "checkpoints" / TRACKER))
        result = subprocess.run(
            shell(self._hosts[0]),
            env=self._environment,
            input=f"test -e {pointer}\n",
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return result.returncode == 0


class Sized(NamedTuple):
    """A strategy with the sizes of its name, "" for one that it does not say."""

    strategy: str
    tensor: str
    micro_batch: str

    @property
    def settings(self) -> dict[str, str]:
        sizes = {"TENSOR_PARALLEL_SIZE": self.tensor, "MICRO_BATCH_SIZE": self.micro_batch}
        return {name: size for name, size in sizes.items() if size}


def with_size(name: str) -> Sized:
    """What "zero1-tp2-mb4" is: zero1, with TENSOR_PARALLEL_SIZE=2 and MICRO_BATCH_SIZE=4."""
    found = re.fullmatch(r"(.+?)(?:-tp([0-9]+))?(?:-mb([0-9]+))?", name)
    assert found
    strategy, tensor, micro_batch = found.groups("")
    return Sized(strategy, tensor, micro_batch)


def choose(names: Sequence[str]) -> list[str]:
    """These strategies without repetitions; by default all. Raises Problem."""
    known = [strategy.name for strategy in launchers.declarations()]
    for name in names:
        strategy = with_size(name).strategy
        needed = launchers.left_out().get(strategy)
        if needed:
            raise Problem(f"{strategy} needs {needed}", f"Set it for all, or choose from: {' '.join(known)}")
        if strategy not in known:
            raise launchers.no_strategy(name, known)
    return list(dict.fromkeys(names)) or known


def name_of_row(strategy: str, processes: int | None) -> str:
    return f"{strategy}-{processes}" if processes else strategy


def plans_of(launch: Launch, runs_dir: Path, rows: Sequence[PlannedRun]) -> list[Plan]:
    with ThreadPoolExecutor(PLANNING_THREADS) as threads:
        return list(threads.map(lambda row: launch.ask(row, runs_dir / "plan"), rows))


def plan_runs(
    launch: Launch, runs_dir: Path, strategies: Iterable[str], processes: int | None = None
) -> list[PlannedRun]:
    """A row for each strategy that can run; for each reason, says once which strategies cannot."""
    wanted = [PlannedRun(name_of_row(strategy, processes), strategy, processes) for strategy in strategies]
    plans = plans_of(launch, runs_dir, wanted)
    rows: list[PlannedRun] = []
    blocked: dict[tuple[str, str], list[str]] = {}  # the names of the rows, by the obstacle and its remedy
    for row, planned in zip(wanted, map(launchers.accepted, plans), strict=True):
        if planned.obstacles:
            obstacle = planned.obstacles[0]
            blocked.setdefault((obstacle.found, obstacle.remedy), []).append(row.name)
        elif planned.layout:
            rows.append(replace(row, plan=planned))
    for (reason, remedy), names in blocked.items():
        lines = [f"{', '.join(names)} cannot run here: {reason}", remedy]
        note("\n       ".join(filter(None, lines)))
    return rows


def plan_baselines(launch: Launch, runs_dir: Path, rows: Sequence[PlannedRun]) -> list[PlannedRun]:
    """If the baseline is among the rows, one more baseline row for every other number of processes."""
    with_baseline = {row.world_size for row in rows if row.strategy == BASELINE}
    if not with_baseline:
        return []
    baselines: list[PlannedRun] = []
    for size in dict.fromkeys(row.world_size for row in rows):
        if size not in with_baseline:
            baselines += plan_runs(launch, runs_dir, [BASELINE], size)
    return baselines
