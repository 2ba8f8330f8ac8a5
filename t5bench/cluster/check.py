"""Checks all nodes at once over ssh, within a minute, and prints one table: reachability, clocks, names, the state of
this repository and of the engine, libraries, data, GPUs, free ports, disk, memory, and the network as measured with
all-reduces. Failures are explained below the table. Every node must have the repository, the data and this shell's
Python (PYTHON, else python3) at the same path. Exit status: 0 all checks passed, 1 a check failed, 2 wrong use.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tabulate import tabulate

from t5bench import REPOSITORY, Problem
from t5bench.cluster.probe import SECONDS, Cell, Question
from t5bench.plan.launchers import ALONE, accepted, declarations
from t5bench.plan.planner import plan
from t5bench.plan.topology import is_this_host
from t5bench.record.hosts import BEGINS, ssh
from t5bench.record.text import visible, visible_in

# Seconds; everything ends within a minute.
CONNECT_SECONDS = 5
PROBE_LIMIT, NETWORK_LIMIT = CONNECT_SECONDS + SECONDS + 1, 32.0
# An ssh master process that stays in the background would keep our pipes open.
SSH_OPTIONS = ("-T", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ControlMaster=no")
PASSED_ON = ("NCCL_", "GLOO_", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
LARGEST_CLOCK_DIFFERENCE = 1.0  # seconds
RED, PLAIN = "\033[31m", "\033[0m"
SPEED = "{gbit:.3g} Gbit/s, {us:.0f} us"
UNKNOWN = Cell("-")
ABSENT = ("none", UNKNOWN.text)

# What ssh prints, what the table shows for it, and what to do about {host}; the last entry covers everything else.
SSH_FAILURES = (
    ("Permission denied", "refused", "Authorize this host's key: ssh-copy-id {host}   (or get an allocation first)"),
    ("you have requested strict checking", "another key",
     "If {host} was installed again, forget its old key: ssh-keygen -R {host}   Then compare the new one: ssh {host}"),
    ("Host key verification failed", "unknown key", "Connect once by hand and compare the key: ssh {host}"),
    ("Could not resolve hostname", "unknown name", "Check the spelling; scontrol show hostnames lists SLURM's names"),
    ("No such file or directory", "no python",
     "Have the repository and the environment at the same paths on {host}, or set PYTHON to one that all nodes have"),
    ("Connection refused", "no sshd", "Start sshd on {host}, or run this check from a node that can log in there"),
    ("No module named", "another version", "Give {host} this host's commit and environment"),
    ("without any output", "no answer", "Does {host} have this host's commit? Else log in by hand: ssh {host}"),
    ("", "unreachable", "Is {host} up, with sshd and the network? Log in by hand: ssh {host}"),
)  # fmt: skip

# What to do about a row that is red, unless the node itself says; for all other rows, ENVIRONMENT.
REMEDIES = {
    "repository": "Bring all nodes to the same commit (git status, git pull), or copy it from one to the others",
    "data": "Copy the files and the tokenizer from a node that has them (README, step 7), or prepare them there: bash"
    " scripts/prepare_xsum_megatron.sh   (SAMPLE=1 for the bundled sample)",
    "GPUs": "The slowest node sets the pace: use equal ones (SLURM: --gres=gpu:1), or set CUDA_VISIBLE_DEVICES and"
    " NPROC_PER_NODE; if a GPU is not listed, check the driver",
    "driver": "Install the same driver on all nodes, or choose nodes that have it",
    "network": "Let the nodes reach each other on every TCP port (check for a firewall) with the same MTU, and name the"
    " interface between them on all nodes: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
    "clock": "Let chrony or ntpd set the clock: timedatectl shows which is wrong",
}
ENVIRONMENT = "Use the same environment on all nodes: activate it, then pip install -r requirements.txt"

Said = dict[str, Any]
Row = dict[str, Cell]  # by host


@dataclass
class Node:
    """A host, and its cells by row. clock: its clock less ours, in seconds."""

    host: str
    here: bool = False
    cells: dict[str, Cell] = field(default_factory=dict)
    clock: float | None = None
    free_port: int | None = None


# ---- asking the nodes ----------------------------------------------------------------------------------------------


def execute(node: Node, python: str, module: str, word: str, limit: float, **environment: str) -> tuple[Said, str]:
    """What a module of this room prints on a node, as JSON, within so many seconds; and its errors."""
    environment |= {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    assignments = [f"{name}={value}" for name, value in environment.items()]
    words = shlex.join(["env", *assignments, python, "-m", f"t5bench.cluster.{module}", word])
    line = f"echo {shlex.quote(BEGINS)} && cd {shlex.quote(str(REPOSITORY))} && exec {words}"
    command = ["sh", "-c", line] if node.here else ssh(node.host, line, options=SSH_OPTIONS)
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False)
        output, error = result.stdout, result.stderr.decode(errors="replace").replace("\r\n", "\n").strip()
    except subprocess.TimeoutExpired as late:
        output, error = late.stdout or b"", f"no answer within {limit:.0f} s"
    printed = output.decode(errors="replace").partition(BEGINS)[2]
    said = next((line for line in printed.splitlines() if line.startswith("{")), "{}")
    return visible_in(json.loads(said)), visible(error, "\n") or "it ended without any output"


def look_at(node: Node, python: str, question: Question) -> None:
    """Fills in the node's answers, or why it gave none."""
    start = time.monotonic()
    said, error = execute(node, python, "probe", json.dumps(asdict(question)), PROBE_LIMIT)
    if said:
        node.clock, node.free_port = said["clock"] - time.time(), said["free_port"]
        node.cells["reachable"] = Cell("this host" if node.here else f"ssh {time.monotonic() - start:.1f} s")
        node.cells |= {row: Cell(**cell) for row, cell in said["cells"].items()}
    else:
        lines = error.splitlines()[::-1]
        found = ((line, word, remedy) for text, word, remedy in SSH_FAILURES for line in lines if text in line)
        line, word, remedy = next(found)
        node.cells["reachable"] = Cell(word, line.strip(), remedy.format(host=node.host))


def compare_clocks(nodes: Sequence[Node]) -> None:
    """Fills in the row "clock": every clock compared with the first known one."""
    known = [(node, node.clock) for node in nodes if node.clock is not None]
    for node, clock in known:
        first, reference = known[0]
        ahead = round(clock - reference, 2) + 0.0  # no -0.0
        problem = f"its clock is {ahead:+.1f} s off that of {first.host}, so the nodes' logs cannot be put in order"
        node.cells["clock"] = Cell(f"{ahead:+.2f} s", problem if abs(ahead) > LARGEST_CLOCK_DIFFERENCE else "")


def measure_network(nodes: Sequence[Node], python: str) -> str:
    """Fills in the row "network", and returns a line on what was measured."""
    for node in nodes:
        node.cells["network"] = Cell("not measured")
    able = [node for node in nodes if node.cells.get("torch", UNKNOWN).text not in ABSENT]
    if len(able) < 2 or able[0].free_port is None:
        return ""
    common = {"MASTER_ADDR": able[0].host, "MASTER_PORT": str(able[0].free_port)}
    common["HOSTS"] = " ".join(node.host for node in able)

    def start(rank: int) -> tuple[Said, str]:
        seconds = str(NETWORK_LIMIT - CONNECT_SECONDS - 1)
        return execute(able[rank], python, "network", seconds, NETWORK_LIMIT, **common, RANK=str(rank))

    with ThreadPoolExecutor(len(able)) as pool:
        answers = list(pool.map(start, range(len(able))))
    result = answers[0][0]
    if "pairs" not in result:
        for node, (said, error) in zip(able, answers, strict=True):
            node.cells["network"] = Cell("no all-reduce", said.get("error") or error.splitlines()[-1])
        return ""
    able[0].cells["network"] = Cell("master")
    for rank, measured in result["pairs"].items():
        able[int(rank)].cells["network"] = Cell(SPEED.format(**measured))
    together = f" All {len(able)} together: {SPEED.format(**result['together'])}." if result["together"] else ""
    return f"Network measured with {result['backend']}, between each node and {able[0].host}.{together}"


# ---- the table -----------------------------------------------------------------------------------------------------


def compared(row: Row) -> Row:
    """Makes every difference from the first healthy node a problem."""
    healthy = {host: cell for host, cell in row.items() if cell.same and not cell.problem}
    first, reference = next(iter(healthy.items()), ("", UNKNOWN))
    judged = dict(row)
    for host, cell in healthy.items():
        if differs := " and ".join(what for what, value in cell.same.items() if value != reference.same[what]):
            problem = f"differs from {first} in {differs}: {cell.text} here, {reference.text} there"
            judged[host] = replace(cell, problem=problem)
    return judged


def table(nodes: Sequence[Node]) -> dict[str, Row]:
    """Every check by name, without those for which no node has a value."""
    names = dict.fromkeys(name for node in nodes for name in node.cells)
    rows = {name: compared({node.host: node.cells.get(name, UNKNOWN) for node in nodes}) for name in names}
    return {n: row for n, row in rows.items() if any(c.problem or c.text not in ABSENT for c in row.values())}


def render(rows: Mapping[str, Row], colour: bool) -> str:
    """The table, and below it each problem with what to do about it."""

    def text(cell: Cell) -> str:
        failed = f"{RED}FAIL {cell.text}{PLAIN}" if colour else f"FAIL {cell.text}"
        return failed if cell.problem else cell.text

    hosts = [host if host.replace(".", "").isdigit() else host.split(".")[0] for host in rows["reachable"]]
    body = [[name, *map(text, row.values())] for name, row in rows.items()]
    lines = [tabulate(body, ["check", *hosts], disable_numparse=True)]
    explained: dict[tuple[str, str, str], list[str]] = {}
    for name, row in rows.items():
        for host, cell in row.items():
            if cell.problem:
                remedy = cell.remedy or REMEDIES.get(name, ENVIRONMENT)
                explained.setdefault((name, cell.problem, remedy), []).append(host)
    for (name, problem, remedy), where in explained.items():
        lines += ["", f"{name} on {', '.join(where)}: {problem}", f"    {remedy}"]
    return "\n".join(lines)


# ---- the command ---------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="the nodes, the master first")


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    if not args.hosts:
        remedy = "List the nodes, the master first: bash scripts/check_cluster.sh node0 node1"
        raise Problem("no hosts are given, HOSTS is not set, and this is not a SLURM allocation", remedy)
    if len(set(args.hosts)) < len(args.hosts):
        raise Problem("a node is named more than once", "List each node once, the master first")
    # A Ctrl-C ends this and every ssh at once; processes on the nodes end by their own time limit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    python = shutil.which(os.environ.get("PYTHON") or "python3") or sys.executable
    # A launcher's plan for this host only, ignoring what the host lacks for a run.
    planned = accepted(plan({**os.environ, **ALONE}, "ddp"))
    ports = [planned.number("MASTER_PORT")] if os.environ.get("MASTER_PORT") else [s.port for s in declarations()]
    nodes = [Node(host, here=is_this_host(host)) for host in args.hosts]
    place = planned.engine_directory, planned.data_prefix, planned.output_dir
    question = Question("", args.hosts, *place, planned.device, ports)
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: look_at(node, python, replace(question, host=node.host)), nodes))
    compare_clocks(nodes)
    note = measure_network(nodes, python)
    rows = table(nodes)
    count = sum(bool(cell.problem) for row in rows.values() for cell in row.values())
    verdict = f"{count} check{'s' * (count > 1)} failed." if count else "All checks passed."
    shown = render(rows, sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    print("\n\n".join(filter(None, [shown, note, verdict])))
    return 1 if count else 0
