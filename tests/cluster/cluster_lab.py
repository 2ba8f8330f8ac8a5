"""The test cluster from Python: real hosts, sshd and SLURM (lab/cluster.sh), and a project to run there."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness import Project, make_project, wait_for

LAB = Path(__file__).parent / "lab" / "cluster.sh"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STUB_TRAINER = Path(__file__).parent / "stub_trainer.py"

# How the processes of a run are told on a node, by their command lines.
PROCESSES = {
    "launcher": r"^bash scripts/run_megatron_t5_",
    "recorder": r" -m t5bench record ",
    "torchrun": r"/torchrun --nnodes",
    "worker": r"^(?!.*torchrun).* -u .*pretrain_t5\.py",
}

Environment = Mapping[str, str]


class Cluster:
    """A login host and node0, node1, ... at 10.77.0.10, .11, ...; it lives no longer than this process."""

    def __init__(self, directory: Path, count: int, net: str = "10.77.0.") -> None:
        self.directory, self.net = directory, net
        self.nodes = [f"node{index}" for index in range(count)]
        self._own: dict[str, set[int]] = {}  # what a host runs when nothing runs on it
        self._started: list[subprocess.Popen] = []
        self._undo: list[tuple[str, ...]] = []  # calls of cluster.sh

    # ---- life ------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        self.lab("up", str(len(self.nodes)))
        # Should pytest be killed, this ends the cluster.
        self.guard(os.getpid())
        for node in self.nodes:
            self._own[node] = set(self.processes(node))

    def guard(self, pid: int) -> subprocess.Popen:
        options = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL) | {"start_new_session": True}
        return subprocess.Popen(["bash", str(LAB), "guard", str(pid)], env=self._environment(), **options)

    def down(self) -> None:
        self.lab("down")

    def reset(self) -> None:
        """Nothing of the last test is left: no process, job, pulled cable, slow network or private directory."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._started.clear()
        if self.login("squeue", "-h").stdout.strip():
            self.login("scancel", "--user=root", "--signal=KILL", "--full", check=False)
            self.login("scancel", "--user=root", check=False)
        for node in self.nodes:
            self.kill(node, *(pid for pid in self.processes(node) if pid not in self._own[node]))
        for words in reversed(self._undo):
            self.lab(*words)
        self._undo.clear()
        wait_for(self._is_idle, 40)

    def _is_idle(self) -> bool:
        found = self.login("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()
        return not self.login("squeue", "-h").stdout.strip() and set(found) == set(self.nodes)

    # ---- hosts -----------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return kept | {"LAB_DIR": str(self.directory), "LAB_NET": self.net}

    def lab(self, *arguments: str) -> None:
        """cluster.sh with these arguments."""
        # Not captured by a pipe: the hosts' processes would hold it open.
        with (self.directory.parent / "lab.log").open("a+") as log:
            start = log.seek(0, os.SEEK_END)
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "timeout": 60}
            result = subprocess.run(["bash", str(LAB), *arguments], env=self._environment(), check=False, **options)
            log.seek(start)
            assert result.returncode == 0, f"cluster.sh {shlex.join(arguments)}: {log.read()}"

    def on(self, host: str, *command: str, env: Environment | None = None, cwd: Path | None = None) -> list[str]:
        """The words that run a command on a host without ssh, as someone who sits there would."""
        variables = [f"{name}={value}" for name, value in (self._environment() | dict(env or {})).items()]
        return ["env", "-i", "-C", str(cwd or "/"), *variables, "bash", str(LAB), "exec", host, *command]

    def run(
        self, host: str, *command: str, timeout: float = 60, check: bool = True, **place
    ) -> subprocess.CompletedProcess:
        """To its end. place: env and cwd."""
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": timeout}
        result = subprocess.run(self.on(host, *command, **place), check=False, **options)
        assert not check or result.returncode == 0, f"{shlex.join(command)} on {host}: {result}"
        return result

    def start(self, host: str, *command: str, **place) -> subprocess.Popen:
        """Standard output and error come as one."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._started.append(subprocess.Popen(self.on(host, *command, **place), start_new_session=True, **pipes))
        return self._started[-1]

    def login(self, *command: str, **options) -> subprocess.CompletedProcess:
        return self.run("login", *command, **options)

    def processes(self, node: str) -> dict[int, str]:
        """pid on the node: command line; the processes that look are not among them."""
        rows = (line.split(None, 1) for line in self.run(node, "ps", "-ww", "-eo", "pid=,args=").stdout.splitlines())
        return {int(pid): line for pid, line in rows if line != "ps -ww -eo pid=,args="}

    def pids(self, node: str, pattern: str) -> list[int]:
        """Of the processes on the node whose command lines have this."""
        return sorted(pid for pid, line in self.processes(node).items() if re.search(pattern, line))

    def left_of(self, project: Project) -> list[str]:
        """What still runs on any node."""
        lines = [line for node in self.nodes for line in self.processes(node).values()]
        return [line for line in lines if str(project.root) in line]

    def kill(self, node: str, *pids: int, by: str = "KILL") -> None:
        if pids:
            self.run(node, "kill", "-s", by, *map(str, pids), check=False)

    def boot(self, node: str) -> None:
        """Start a node again that is off."""
        self.lab("boot", node)
        wait_for((self.directory / node / "ready").exists)
        self._own[node] = set(self.processes(node))

    # ---- what `reset` undoes ---------------------------------------------------------------------------------------

    def pull_cable(self, node: str) -> None:
        self._undo.append(("link", node, "up"))
        self.lab("link", node, "down")

    def shape(self, node: str, rate: str) -> None:
        """Limit the node's network both ways, such as "100mbit"."""
        self._undo.append(("shape", node, "off"))
        self.lab("shape", node, rate)

    def private(self, directory: Path) -> None:
        """From now on every node has its own copy of this directory, as without a shared file system."""
        for node in self.nodes:
            self._undo.append(("public", node, str(directory)))
            self.lab("private", node, str(directory))


def make_cluster_project(directory: Path) -> Project:
    """A project whose engine is the stub trainer, started by the real torchrun, without a GPU."""
    project = make_project(directory)
    (project.stubs / "torchrun").unlink()
    shutil.copy(STUB_TRAINER, project.engine / "pretrain_t5.py")
    project.record_engine()
    project.environment = {
        "PATH": f"{project.stubs}:{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "PYTHON": sys.executable,
        "HOME": str(directory),
        "LANG": "C.UTF-8",
        "MODEL_PRESET": "tiny",
        "TRAIN_ITERS": "6",
        "LOG_INTERVAL": "2",
        "DEVICE": "cpu",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    return project
