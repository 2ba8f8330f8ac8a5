"""Looks at all nodes at once over ssh and prints one table (see check_cluster.sh, which finds the hosts and paths).

Two steps, each with its own time limit: every node answers check_cluster_probe.py, then those that did measure the
network between them with check_cluster_network.py. Both reach a node on ssh's standard input, so that a node without
the repository can answer too.
"""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from t5bench import REPOSITORY
from t5bench.cluster.table import UNKNOWN, Cell, Node, Paths, Row, failed, render, table

HERE = Path(__file__).resolve().parent
# Seconds: the whole ends within a minute.
LOOK_UP_LIMIT, PROBE_LIMIT, NETWORK_LIMIT = 4.0, 18.0, 32.0
CONNECT_SECONDS = 5
# A master that ssh leaves in the background would keep our pipes open.
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ControlMaster=no")
PASSED_ON = ("NCCL_", "GLOO_", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")

# What ssh says, what it means in the table, and what to do about it on {host}.
_NO_PYTHON = "Put the environment at the same path on {host}, or set PYTHON to one that is on all nodes"
SSH_FAILURES = (
    ("Permission denied", "refused", "Let this host's key in: ssh-copy-id {host}   (a node may need an allocation)"),
    ("Host key verification failed", "unknown key", "Connect once by hand and compare the key: ssh {host}"),
    ("Could not resolve hostname", "unknown name", "Check the spelling; scontrol show hostnames prints SLURM's names"),
    ("Connection refused", "no sshd", "Start sshd on {host}, or run this check from a node that can log in there"),
    ("No such file or directory", "no python", _NO_PYTHON),
)  # fmt: skip


def is_here(host: str) -> bool:
    """Whether the name is this machine's: its own, or one of an address that can be bound."""
    own = socket.gethostname()
    if host in (own, own.split(".")[0]):
        return True
    try:
        # In a process of its own, for Python's own look-up cannot be given up when a name server does not answer.
        found = subprocess.run(
            ["getent", "ahosts", host], capture_output=True, text=True, timeout=LOOK_UP_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return any(can_bind(line.split()[0]) for line in found.stdout.splitlines() if line.strip())


def can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


STARTED: list[subprocess.Popen[str]] = []


def stop(signal_number: int, _: object) -> NoReturn:
    """On Ctrl-C: what was started here ends now, what runs on the nodes by its own time limit."""
    for process in STARTED:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(128 + signal_number)


class Remote:
    """A Python program on a node, with the time at which each line of its output came."""

    def __init__(
        self, node: Node, python: str, program: Path, words: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        command = ["env", *(f"{name}={value}" for name, value in environment.items()), python, "-u", "-", *words]
        if not node.here:
            passed = [f"{k}={v}" for k, v in os.environ.items() if k.startswith(PASSED_ON)]
            command = [*SSH, node.host, shlex.join(["exec", "env", *passed, *command[1:]])]
        self.lines: list[tuple[float, str]] = []
        with program.open() as source:
            self.process = subprocess.Popen(
                command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        STARTED.append(self.process)
        self.error = ""
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_error)]
        for reader in self._readers:
            reader.daemon = True
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))

    def _read_error(self) -> None:
        assert self.process.stderr
        self.error = self.process.stderr.read()

    def finish(self, deadline: float) -> bool:
        """Wait for its end, at most until the deadline (of the monotonic clock); whether it came."""
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return False
        finally:
            for reader in self._readers:
                reader.join(1)
        return True


def failure_of(node: Node, status: int | None, error: str) -> Cell:
    """Why a node gave no answer at all."""
    said = [line for line in error.strip().splitlines() if line.strip()]
    for pattern, word, remedy in SSH_FAILURES:
        if line := next((line for line in said if pattern in line), None):
            return Cell(word, line.strip(), remedy.format(host=node.host))
    if status == 127:
        return Cell("no python", said[-1] if said else "python was not found", _NO_PYTHON.format(host=node.host))
    if status is None:
        return Cell(
            "no answer", f"no answer within {PROBE_LIMIT:.0f} s", f"Is {node.host} up? Log in by hand: ssh {node.host}"
        )
    problem = said[-1].strip() if said else f"ended with status {status} and said nothing"
    return Cell(
        "unreachable", problem, f"Is {node.host} up and its network plugged in? Log in by hand: ssh {node.host}"
    )


def probe(node: Node, python: str, question: Mapping[str, object]) -> None:
    """Fill in what the node answers."""
    node.here = is_here(node.host)
    start = time.monotonic()
    program = HERE / "probe.py"
    remote = Remote(node, python, program, [json.dumps({**question, "seconds": PROBE_LIMIT - CONNECT_SECONDS - 1})], {})
    ended = remote.finish(start + PROBE_LIMIT)
    node.seconds = time.monotonic() - start
    offsets = []
    for came, line in list(remote.lines):
        if line.startswith("clock "):
            offsets.append(float(line.split()[1]) - came)
        elif match := re.fullmatch(r"fact (\w+) (.*)", line):
            answer = json.loads(match[2])
            if "error" in answer:
                node.errors[match[1]] = answer["error"]
            else:
                node.facts[match[1]] = answer["value"]
    # A line's way here only ever takes time: the largest is the nearest.
    node.clock = max(offsets, default=None)
    if not node.facts and not node.errors:
        node.failure = failure_of(node, remote.process.returncode if ended else None, remote.error)


def measure_network(nodes: Sequence[Node], python: str, ports: Sequence[int]) -> tuple[Row, str]:
    """The row of the table, and a line on all nodes together where there are more than two."""
    able = [node for node in nodes if node.facts.get("libraries", {}).get("torch")]
    row: dict[str, Cell] = {node.host: UNKNOWN for node in nodes}
    if len(able) < 2:
        return row, ""
    master, taken = able[0], able[0].facts.get("ports", {})
    port = next((port for port in ports if str(port) not in taken), None)
    if port is None:
        row[master.host] = Cell("not measured", "no rendezvous port is free", "Free one of them first")
        return row, ""
    nccl = all(node.facts.get("gpus") and node.facts["libraries"].get("cuda") for node in able)
    words = ["nccl" if nccl else "gloo", str(NETWORK_LIMIT - 3)]
    deadline = time.monotonic() + NETWORK_LIMIT
    common = {"MASTER_ADDR": master.host, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(able))}
    program = HERE / "network.py"
    remotes = [Remote(n, python, program, words, common | {"RANK": str(rank)}) for rank, n in enumerate(able)]
    ended = [remote.finish(deadline) for remote in remotes]
    result = next((json.loads(line[7:]) for _, line in remotes[0].lines if line.startswith("result ")), None)
    if result:
        row[master.host] = Cell("master")
        for rank, node in enumerate(able[1:], 1):
            row[node.host] = Cell(speed(result["pairs"][str(rank)]))
        versions = sorted({line[8:] for remote in remotes for _, line in remote.lines if line.startswith("version ")})
        if len(versions) > 1:
            found = f"NCCL is {' and '.join(versions)}"
            row[master.host] = Cell("NCCL differs", found, "Use one environment on all nodes")
        note = f"Network measured with {' '.join(words[:1] + versions)}, each node against {master.host}."
        if result["together"]:
            note += f" All {len(able)} together: {speed(result['together'])}."
        return row, note
    for node, remote, done in zip(able, remotes, ended, strict=True):
        row[node.host] = network_failure(node, master, port, remote, done)
    return row, ""


def speed(measured: Mapping[str, float]) -> str:
    return f"{measured['gbit']:.3g} Gbit/s, {measured['us']:.0f} us"


def network_failure(node: Node, master: Node, port: int, remote: Remote, ended: bool) -> Cell:
    remedy = (
        f"Let the nodes reach each other on every TCP port (a firewall? {master.host}:{port} first), and name the"
        " interface between them on all nodes: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
    )
    said = next((line[6:] for _, line in remote.lines if line.startswith("error ")), "")
    if not said and ended and remote.process.returncode:
        said = (remote.error.strip().splitlines() or [f"ended with status {remote.process.returncode}"])[-1]
    return Cell("no all-reduce", said or f"the all-reduce did not end within {NETWORK_LIMIT:.0f} s", remedy)


def strategy_ports() -> list[int]:
    """The rendezvous ports that the launchers declare."""
    texts = (path.read_text() for path in (REPOSITORY / "scripts").glob("run_megatron_t5_*.sh"))
    return sorted(int(port) for text in texts for port in re.findall(r"^STRATEGY_PORT=(\d+)$", text, re.MULTILINE))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the interpreter, at the same path on every node")
    parser.add_argument("--engine", choices=["megatron", "native"], required=True)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], required=True)
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--port", default="", help="the port of MASTER_PORT, instead of the strategies' own")
    parser.add_argument("hosts", nargs="+", metavar="HOST")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    if twice := sorted({host for host in args.hosts if args.hosts.count(host) > 1}):
        print(
            f"error: {', '.join(twice)} is named more than once\n       Name each node once, the master first",
            file=sys.stderr,
        )
        return 2
    ports = [int(args.port)] if args.port else strategy_ports()
    here = Path.cwd()
    paths = Paths(
        REPOSITORY, here / args.engine_dir, here / args.data_dir / "xsum_text_document", args.engine, args.device
    )
    nodes = [Node(host) for host in args.hosts]
    question = {
        "repository": str(paths.repository),
        "engine_dir": str(paths.engine_dir),
        "data_prefix": str(paths.data_prefix),
        "output_dir": str(here / args.output_dir),
        "ports": ports,
        "master": args.hosts[0],
    }
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: probe(node, args.python, question), nodes))
    network, note = measure_network(nodes, args.python, ports)
    rows = table(nodes, paths, network)
    print(render(nodes, rows, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if note:
        print(f"\n{note}")
    count = failed(rows)
    print(f"\n{count} checks failed." if count > 1 else "\n1 check failed." if count else "\nAll is well.")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
