"""A real little cluster on one Linux machine, without docker or systemd, and a project to run there. It needs root.

Each host is a set of namespaces (network, processes, name, mounts, ipc) with an IP address, a host name, a process
table, /run and /dev/shm of its own, and real munged, sshd and slurmd. The host "login" carries the switch (a bridge)
and slurmctld. The file system is everyone's, as over NFS, but for the directories that `private` takes out. The
machine's own network, /etc and process table stay untouched.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from support import Project, make_project, wait_for

from t5bench.record.records import load

HERE = Path(__file__).parent
LAB, BAD_CABLE, STUB_TRAINER = HERE / "lab" / "cluster.sh", HERE / "lab" / "bad_cable.py", HERE / "stub_trainer.py"
NET = "10.77.0."
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# How the processes of a run are told on a node, by their command lines.
PROCESSES = {
    "launcher": r"/t5bench record ",  # which it becomes when it has planned
    "torchrun": r"^\S+ -m torch\.distributed\.run --nnodes",
    "worker": r"^\S+ -u .*pretrain_t5\.py",
}
NAMESPACES = ("--cgroup", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SSH_CONFIG = """Host *
  IdentityFile {ssh}/key
  UserKnownHostsFile {ssh}/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
"""
SSHD_CONFIG = """HostKey {ssh}/key
AuthorizedKeysFile {ssh}/authorized_keys
StrictModes no
PasswordAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
Subsystem sftp internal-sftp
"""
SLURM_CONFIG = """ClusterName=lab
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthInfo=cred_expire=5
StateSaveLocation={lab}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldLogFile={lab}/login/slurmctld.log
SlurmdLogFile={lab}/%n/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PropagateResourceLimits=NONE
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=4 RealMemory=4096 Gres=gpu:1 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2
"""
# On the host: a copy in memory of the directory takes its place.
PRIVATE = """copy=$(mktemp -d) && mount -t tmpfs tmpfs "$copy" && cp -a -- "$1/." "$copy/" &&
  mount --move "$copy" "$1" && rmdir "$copy"
"""

# A run of the native engine that saves checkpoints.
NATIVE = {
    "ENGINE": "native", "TRAIN_ITERS": "60", "LOG_INTERVAL": "1", "SAVE_INTERVAL": "10", "PRECISION_FLAG": "",
    "RENDEZVOUS_TIMEOUT": "60", "GLOBAL_BATCH_SIZE": "2", "ENCODER_SEQ_LENGTH": "32", "DECODER_SEQ_LENGTH": "16",
}  # fmt: skip

Environment = Mapping[str, str]


def finished(command: Sequence[str], check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess:
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": timeout}
    result = subprocess.run(command, check=False, **options)
    assert not check or result.returncode == 0, f"{shlex.join(command)}: {result}"
    return result


class Cluster:
    """A login host and node0, node1, ... at 10.77.0.10, .11, ...; it lives no longer than this process."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.nodes = [f"node{index}" for index in range(count)]
        self.addresses = {"login": f"{NET}1"} | {node: f"{NET}{10 + index}" for index, node in enumerate(self.nodes)}
        self._hosts: dict[str, tuple[subprocess.Popen, int]] = {}  # `unshare`, and the pid of the host's first process
        self._own: dict[str, set[int]] = {}  # what a host runs when nothing runs on it
        self._started: list[subprocess.Popen] = []
        self._undo: list[Callable[[], object]] = []

    # ---- life ------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        self._configure()
        for host in self.addresses:
            self._boot(host)
        for host in self.addresses:
            self._await(host)
        wait_for(self._is_idle, 20)

    def _await(self, host: str) -> None:
        wait_for((self.directory / host / "ready").exists)
        self._own[host] = set(self.processes(host))

    def _configure(self) -> None:
        etc, ssh, last = self.directory / "etc", self.directory / "etc" / "ssh", len(self.nodes) - 1
        for directory in (etc / "slurm", ssh, self.directory / "state", Path("/etc/slurm"), Path("/etc/ssh")):
            directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        names = [f"{address} {host}\n" for host, address in self.addresses.items()]
        # No DNS: an unknown name is unknown at once.
        switch = re.sub(r"^hosts:.*", "hosts: files", Path("/etc/nsswitch.conf").read_text(), flags=re.MULTILINE)
        # One key is everyone's, the hosts' too.
        finished(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(ssh / "key")])
        key = (ssh / "key.pub").read_text()
        (etc / "munge.key").touch(0o600)
        (etc / "munge.key").write_bytes(os.urandom(128))
        values = {"lab": self.directory, "ssh": ssh, "nodes": f"node[0-{last}]"}
        for path, text in {
            "hosts": "".join(["127.0.0.1 localhost\n", *names]),
            "nsswitch.conf": switch,
            "ssh/authorized_keys": key,
            "ssh/known_hosts": f"* {key}",
            "ssh/ssh_config": SSH_CONFIG.format(**values),
            "ssh/sshd_config": SSHD_CONFIG.format(**values),
            # SLURM wants a device file for a GPU.
            "slurm/gres.conf": f"NodeName=node[0-{last}] Name=gpu File=/dev/null\n",
            # slurmd insists on one; v1 is not touched before it is needed.
            "slurm/cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "slurm/slurm.conf": SLURM_CONFIG.format(**values),
        }.items():
            (etc / path).write_text(text)

    def _boot(self, host: str) -> None:
        """Starts a host; it is up when there is its file "ready"."""
        folder = self.directory / host
        folder.mkdir(exist_ok=True)
        (folder / "ready").unlink(missing_ok=True)
        command = ["unshare", *NAMESPACES, "--propagation", "private", "bash", str(LAB), "host", host, NET]
        with (folder / "log").open("ab") as log:
            # Should pytest be killed, the input ends, and the host with it.
            pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "start_new_session": True}
            outer = subprocess.Popen(command, env=self._environment(), **pipes)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        wait_for(lambda: outer.poll() is not None or children.read_text().strip() != "", 10)
        assert outer.poll() is None, (folder / "log").read_text()
        pid = int(children.read_text())
        self._hosts[host] = outer, pid
        device = "switch" if host == "login" else "eth0"
        if host == "login":
            self._net("login", "ip link add switch type bridge forward_delay 0")
        else:
            self._net("login", f"ip link del to-{host}", check=False)
            self._net("login", f"ip link add to-{host} type veth peer name eth0 netns {pid}")
            self._net("login", f"ip link set to-{host} master switch up")
        self._net(host, f"ip link set {device} up")
        self._net(host, f"ip address add {self.addresses[host]}/24 dev {device}")

    def down(self) -> None:
        for host in list(self._hosts):
            self._halt(host)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _halt(self, host: str) -> None:
        """The kernel kills the rest of the host's process table with its first process."""
        outer, pid = self._hosts.pop(host)
        if outer.poll() is None:
            os.kill(pid, signal.SIGKILL)
        outer.communicate()

    def power_off(self, node: str) -> None:
        """The cable first: the others see silence, no FIN."""
        self.link(node, "down")
        self._halt(node)

    def boot(self, node: str) -> None:
        """Starts a node again that is off."""
        self._boot(node)
        self._await(node)

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
            self.kill(node, *self.foreign(node))
        while self._undo:
            self._undo.pop()()
        wait_for(self._is_idle, 90)

    def _is_idle(self) -> bool:
        found = self.login("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).stdout.split()
        return set(found) == set(self.nodes) and not self.login("squeue", "-h").stdout.strip()

    # ---- hosts -----------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        return kept | {"PATH": f"{os.environ['PATH']}:{SYSTEM_PATH}", "LAB_DIR": str(self.directory)}

    def first_process(self, host: str) -> int:
        """The pid, on this machine, of the one that all others of the host come from."""
        return self._hosts[host][1]

    def _inside(self, host: str, *command: str) -> list[str]:
        assert host in self._hosts, f"host {host} is not up"
        return ["nsenter", "-t", str(self._hosts[host][1]), *command]

    def _net(self, host: str, command: str, check: bool = True) -> None:
        """Runs a command in a host's network."""
        finished(self._inside(host, "-n", "--", *command.split()), check)

    def on(self, host: str, *command: str, env: Environment | None = None, cwd: Path | None = None) -> list[str]:
        """The words that run a command on a host without ssh, as someone who sits there would."""
        variables = [f"{name}={value}" for name, value in (self._environment() | dict(env or {})).items()]
        # The directory is entered over there: it may be the host's own.
        there = ["env", "-i", "-C", str(cwd or "/"), *variables, *command]
        return self._inside(host, "-n", "-u", "-i", "-m", "-p", "--wd=/", "--", *there)

    def run(
        self, host: str, *command: str, timeout: float = 60, check: bool = True, **place
    ) -> subprocess.CompletedProcess:
        """To its end. place: env and cwd."""
        return finished(self.on(host, *command, **place), check, timeout)

    def start(self, host: str, *command: str, **place) -> subprocess.Popen:
        """Standard output and error come as one."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pipes |= {"text": True, "errors": "replace"}
        self._started.append(subprocess.Popen(self.on(host, *command, **place), start_new_session=True, **pipes))
        return self._started[-1]

    def login(self, *command: str, **options) -> subprocess.CompletedProcess:
        return self.run("login", *command, **options)

    def processes(self, node: str) -> dict[int, str]:
        """pid on the node: command line; the processes that look are not among them."""
        rows = (line.split(None, 1) for line in self.run(node, "ps", "-ww", "-eo", "pid=,args=").stdout.splitlines())
        return {int(pid): line for pid, line in rows if line != "ps -ww -eo pid=,args="}

    def foreign(self, node: str) -> dict[int, str]:
        """The processes that do not belong to the node itself."""
        return {pid: line for pid, line in self.processes(node).items() if pid not in self._own[node]}

    def pids(self, node: str, pattern: str) -> list[int]:
        """Of the processes on the node whose command lines have this."""
        return sorted(pid for pid, line in self.processes(node).items() if re.search(pattern, line))

    def left_of(self, project: Project) -> list[int]:
        """What still runs on any node."""
        return [pid for node in self.nodes for pid in self.pids(node, re.escape(str(project.root)))]

    def kill(self, node: str, *pids: int, by: str = "KILL") -> None:
        if pids:
            self.run(node, "kill", "-s", by, *map(str, pids), check=False)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def link(self, node: str, state: str) -> None:
        """Plugs or pulls the network cable: "up" or "down"."""
        self._net("login", f"ip link set to-{node} {state}")

    def pull_cable(self, node: str) -> None:
        """Until the reset."""
        self._undo.append(partial(self.link, node, "up"))
        self.link(node, "down")

    def shape(self, node: str, rate: str) -> None:
        """Limits the node's network both ways until the reset: "100mbit", or "off"."""
        if rate != "off":
            self._undo.append(partial(self.shape, node, "off"))
        for host, device in ((node, "eth0"), ("login", f"to-{node}")):
            self._net(host, f"tc qdisc del dev {device} root", check=False)
            # After a pause a burst passes at once, and it has to hold a packet; so packets are small, or a pipeline's
            # messages would cost nothing.
            self._net(host, f"ip link set dev {device} gso_max_size {65536 if rate == 'off' else 5792}")
            if rate != "off":
                self._net(host, f"tc qdisc add dev {device} root tbf rate {rate} burst 6kb latency 20ms")

    def spoil_cable(self, node: str, milliseconds: int, lost: int, damaged: int) -> Callable[[], None]:
        """A cable that delays, and loses and damages per cent of what goes either way; returns what mends it.

        A program carries the frames between the node's cable, on a bridge with a device of its own, and the switch.
        """
        figures = map(str, (milliseconds, lost, damaged))
        carrier = self.start("login", sys.executable, str(BAD_CABLE), node, *figures)

        def mend() -> None:
            carrier.kill()
            self.kill("login", *self.pids("login", f"{BAD_CABLE.name} {node} "))
            self._net("login", f"ip link set to-{node} master switch")
            self._net("login", f"ip link del own-{node}", check=False)

        assert carrier.stdout.readline() == "ready\n"
        self._net("login", f"ip link set out-{node} master switch up")
        self._net("login", f"ip link add own-{node} type bridge forward_delay 0")
        self._net("login", f"ip link set own-{node} up")
        self._net("login", f"ip link set in-{node} master own-{node} up")
        self._net("login", f"ip link set to-{node} master own-{node}")
        return mend

    def private(self, directory: Path, nodes: Sequence[str] = ()) -> None:
        """Until the reset every node has its own copy of this directory, as without a shared file system."""
        for node in nodes or self.nodes:
            self._undo.append(partial(self.public, directory, node))
            self.run(node, "bash", "-c", PRIVATE, "private", str(directory))

    def public(self, directory: Path, node: str) -> None:
        self.run(node, "umount", str(directory), check=False)  # a node that was booted has it no more


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

    @property
    def exit_code(self) -> int:
        """As the node's shell sees it."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code


def losses(directory: Path) -> dict[int, float | None]:
    """By iteration, the last time that it was trained."""
    return {line.iteration: line.lm_loss for line in load(directory).iterations}


def make_cluster_project(directory: Path) -> Project:
    """A project whose engine is the stub trainer, started by the real torchrun, without a GPU."""
    project = make_project(directory)
    project.use_real_torch()
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
