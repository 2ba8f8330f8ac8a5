"""The test cluster from Python: real hosts, sshd and SLURM (lab/cluster.sh), and a project to run there."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import REPO_ROOT, Project, make_project, wait_for

LAB = Path(__file__).parent / "lab" / "cluster.sh"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STUB_TRAINER = Path(__file__).parent / "stub_trainer.py"

Environment = Mapping[str, str]


def exports(environment: Environment | None) -> str:
    """The environment as a shell command; over ssh nothing else reaches the other side."""
    return "".join(f"export {name}={shlex.quote(value)}; " for name, value in (environment or {}).items())


class Cluster:
    """A login host and node0, node1, ... at 10.77.0.10, .11, ...; it lives no longer than this process."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.nodes = [f"node{index}" for index in range(count)]
        self._own: dict[str, set[int]] = {}  # what a host runs when nothing runs on it
        self._started: list[subprocess.Popen] = []
        self._off: set[str] = set()
        self._pulled: set[str] = set()
        self._shaped: set[str] = set()
        self._private: list[tuple[str, Path]] = []

    # ---- life ------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        self.lab("up", str(len(self.nodes)))
        # Should pytest be killed, this ends the cluster.
        subprocess.Popen(
            ["bash", str(LAB), "guard", str(os.getpid())],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for node in self.nodes:
            self._own[node] = set(self.processes(node))

    def down(self) -> None:
        self.lab("down")

    def reset(self) -> None:
        """Nothing of the last test is left: no process, job, pulled cable, private directory, or node that is off."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._started.clear()
        for node in self._pulled - self._off:
            self.lab("link", node, "up")
        for node in self._shaped - self._off:
            self.lab("shape", node, "off")
        self._pulled.clear()
        self._shaped.clear()
        if self.login("squeue", "-h").stdout.strip():
            self.login("scancel", "--user=root", "--signal=KILL", "--full", check=False)
            self.login("scancel", "--user=root", check=False)
        for node in list(self._off):
            self.boot(node)
        for node in self.nodes:
            self.kill(node, *(pid for pid in self.processes(node) if pid not in self._own[node]))
        for node, directory in reversed(self._private):
            self.lab("public", node, str(directory), check=False)  # gone already where the node was booted
        self._private.clear()
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        def idle() -> bool:
            found = self.login("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()
            return not self.login("squeue", "-h").stdout.strip() and set(found) == set(self.nodes)

        wait_for(idle, 40)

    # ---- hosts -----------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return kept | {"LAB_DIR": str(self.directory)}

    def lab(self, *arguments: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess:
        """cluster.sh with these arguments."""
        # Not captured by a pipe: the hosts' processes would hold it open.
        with (self.directory.parent / "lab.log").open("a+") as log:
            start = log.seek(0, os.SEEK_END)
            result = subprocess.run(
                ["bash", str(LAB), *arguments],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=timeout,
                check=False,
            )
            log.seek(start)
            output = log.read()
        assert not check or result.returncode == 0, f"cluster.sh {shlex.join(arguments)}: {output}"
        return subprocess.CompletedProcess(result.args, result.returncode, output)

    def on(self, host: str, *command: str, env: Environment | None = None, cwd: Path | None = None) -> list[str]:
        """The words that run a command on a host without ssh, as someone who sits there would."""
        variables = [f"{name}={value}" for name, value in (self._environment() | dict(env or {})).items()]
        return ["env", "-i", "-C", str(cwd or "/"), *variables, "bash", str(LAB), "exec", host, *command]

    def run(
        self,
        host: str,
        *command: str,
        env: Environment | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess:
        result = subprocess.run(
            self.on(host, *command, env=env, cwd=cwd),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or result.returncode == 0, f"{shlex.join(command)} on {host}: {result}"
        return result

    def start(
        self, host: str, *command: str, env: Environment | None = None, cwd: Path | None = None
    ) -> subprocess.Popen:
        """Standard output and error come as one."""
        process = subprocess.Popen(
            self.on(host, *command, env=env, cwd=cwd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def login(self, *command: str, **options) -> subprocess.CompletedProcess:
        return self.run("login", *command, **options)

    def processes(self, node: str) -> dict[int, str]:
        """pid on the node: command line; the processes that look are not among them."""
        rows = (line.split(None, 1) for line in self.run(node, "ps", "-ww", "-eo", "pid=,args=").stdout.splitlines())
        return {int(pid): line for pid, line in rows if line != "ps -ww -eo pid=,args="}

    def kill(self, node: str, *pids: int, by: str = "KILL") -> None:
        if pids:
            self.run(node, "kill", "-s", by, *map(str, pids), check=False)

    def link(self, node: str, state: str) -> None:
        """Plug ("up") or pull ("down") the node's network cable."""
        self._pulled.add(node)
        self.lab("link", node, state)

    def shape(self, node: str, rate: str) -> None:
        """Limit the node's network both ways, such as "100mbit"; "off" ends it."""
        self._shaped.add(node)
        self.lab("shape", node, rate)

    def poweroff(self, node: str) -> None:
        self._off.add(node)
        self.lab("poweroff", node)

    def boot(self, node: str) -> None:
        self.lab("boot", node)
        self._off.discard(node)
        wait_for(lambda: (self.directory / node / "ready").exists())
        self._own[node] = set(self.processes(node))

    def private(self, directory: Path) -> None:
        """From now on every node has its own copy of this directory, as without a shared file system."""
        for node in self.nodes:
            self.lab("private", node, str(directory))
            self._private.append((node, directory))

    # ---- what people use -------------------------------------------------------------------------------------------

    def ssh(
        self, node: str, command: str, env: Environment | None = None, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess:
        """A shell command on the node, by ssh from the login host."""
        return self.login("ssh", "-n", node, exports(env) + command, timeout=timeout, check=check)

    def start_ssh(self, node: str, command: str, env: Environment | None = None) -> subprocess.Popen:
        return self.start("login", "ssh", "-n", node, exports(env) + command)

    def start_launcher(
        self, project: Project, node: str, strategy: str, *arguments: str, env: Environment | None = None
    ) -> subprocess.Popen:
        """A launcher in a terminal of its own on the node, by ssh."""
        words = ["bash", f"scripts/run_megatron_t5_{strategy}.sh", *arguments]
        command = ["env", "-C", str(project.root), *words]
        return self.start_ssh(node, shlex.join(command), project.environment | dict(env or {}))

    def srun(self, project: Project, *arguments: str, env: Environment | None = None, timeout: float = 90):
        everything = project.environment | dict(env or {})
        return self.login("srun", *arguments, env=everything, cwd=project.root, timeout=timeout, check=False)

    def salloc(
        self,
        project: Project,
        *options: str,
        script: str,
        env: Environment | None = None,
        timeout: float = 90,
    ) -> subprocess.CompletedProcess:
        """What someone types into the shell that salloc opens on the login host."""
        words = ["salloc", *options, "bash", "-c", f"set -e\n{script}"]
        everything = project.environment | dict(env or {})
        return self.login(*words, env=everything, cwd=project.root, timeout=timeout, check=False)

    def finished_job(self, number: str, timeout: float = 90) -> dict[str, str]:
        """What SLURM says of a job once it has ended: JobState, ExitCode, ..."""

        def fields() -> dict[str, str]:
            text = self.login("scontrol", "show", "job", number).stdout
            return dict(word.split("=", 1) for word in text.split() if "=" in word)

        wait_for(lambda: fields()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), timeout)
        return fields()


def output_of(processes: Sequence[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """Exit status and output of each, when all have ended."""
    deadline = time.monotonic() + seconds
    texts = [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def make_cluster_project(directory: Path) -> Project:
    """A project whose engine is the stub trainer, started by the real torchrun, without a GPU."""
    project = make_project(directory)
    if not (project.root / "t5bench").exists():
        shutil.copytree(REPO_ROOT / "t5bench", project.root / "t5bench", ignore=shutil.ignore_patterns("__pycache__"))
    (project.stubs / "torchrun").unlink()
    shutil.copy(STUB_TRAINER, project.engine / "pretrain_t5.py")
    project.record_engine()
    project.environment = {
        "PATH": f"{project.stubs}:{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "PYTHON": sys.executable,
        "LANG": "C.UTF-8",
        "MODEL_PRESET": "tiny",
        "TRAIN_ITERS": "6",
        "LOG_INTERVAL": "2",
        "DEVICE": "cpu",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    return project
