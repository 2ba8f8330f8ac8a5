"""Checks all nodes at once over ssh, within a minute, and prints one table: reachability, clocks, names, the state of
this repository and of the engine, libraries, data, GPUs, free ports, disk, memory, and the network as measured with
all-reduces. Failures are explained below the table. Every node must have the repository, the data and this shell's
Python (PYTHON, else python3) at the same path. Exit status: 0 all checks passed, 1 a check failed, 2 wrong use.
"""

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, Problem
from t5bench.cluster.network import IMPORTING
from t5bench.cluster.probe import Cell, Question
from t5bench.cluster.table import Node, render, table
from t5bench.plan.launchers import ALONE, accepted, ask, declarations
from t5bench.plan.topology import is_this_host
from t5bench.record.hosts import BEGINS, checked, ssh
from t5bench.record.text import visible, visible_in

# Seconds; everything ends within a minute.
PROBE_LIMIT, NETWORK_LIMIT = 18.0, 32.0
CONNECT_SECONDS = 5
# An ssh master process that stays in the background would keep our pipes open.
SSH_OPTIONS = ("-T", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ControlMaster=no")
PASSED_ON = ("NCCL_", "GLOO_", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")

# What ssh prints, what the table shows for it, and what to do about {host}; the last entry covers everything else.
SSH_FAILURES = (
    ("Permission denied", "refused", "Authorize this host's key: ssh-copy-id {host}   (or get an allocation first)"),
    ("you have requested strict checking", "another key",
     "If {host} was installed again, forget its old key: ssh-keygen -R {host}   Then compare the new one: ssh {host}"),
    ("Host key verification failed", "unknown key", "Connect once by hand and compare the key: ssh {host}"),
    ("Could not resolve hostname", "unknown name", "Check the spelling; scontrol show hostnames lists SLURM's names"),
    ("Connection refused", "no sshd", "Start sshd on {host}, or run this check from a node that can log in there"),
    ("No such file or directory", "no python",
     "Install the environment at the same path on {host}, or set PYTHON to one that all nodes have"),
    ("", "unreachable", "Is {host} up and its network plugged in? Log in by hand: ssh {host}"),
)  # fmt: skip

# Runs the program that comes on standard input: Python reads it from a file that has no name.
BOOT = (
    f"print({BEGINS!r}, flush=True); import os, runpy, sys; file = os.memfd_create('t5bench');"
    " os.write(file, sys.stdin.buffer.read()); runpy.run_path(f'/proc/self/fd/{file}')"
)


Said = dict[str, Any]


@cache
def program(module: str) -> bytes:
    """This package as a zip: a node runs the same code as this host, whether or not it has the repository."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (REPOSITORY / "t5bench").rglob("*.py"):
            archive.write(path, path.relative_to(REPOSITORY))
        archive.writestr("__main__.py", f"from t5bench.cluster.{module} import main\n\nmain()\n")
    return buffer.getvalue()


def execute(node: Node, python: str, module: str, word: str, limit: float, **environment: str) -> tuple[Said, str]:
    """What a module of this package prints on a node, as JSON, within so many seconds; and its errors."""
    if not node.here:
        environment |= {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    assignments = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *assignments, python, "-c", BOOT, word]
    if not node.here:
        command = ssh(node.host, shlex.join(["exec", *command]), options=SSH_OPTIONS)
    try:
        result = subprocess.run(command, input=program(module), capture_output=True, timeout=limit, check=False)
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
        node.clock, node.free_port = said.pop("clock") - time.time(), said.pop("free_port", None)
        node.cells = {row: Cell(**cell) for row, cell in said.items()}
        node.reached = Cell("this host" if node.here else f"ssh {time.monotonic() - start:.1f} s")
    else:
        lines = error.splitlines()[::-1]
        found = ((line, word, remedy) for text, word, remedy in SSH_FAILURES for line in lines if text in line)
        line, word, remedy = next(found)
        node.reached = Cell(word, line.strip(), remedy)


def measure_network(nodes: Sequence[Node], python: str) -> tuple[dict[str, Cell], str]:
    """The cells of the hosts that can be measured, and a line on what was measured."""
    able = [node for node in nodes if node.cell("torch").same]
    if len(able) < 2:
        return {}, ""
    master = able[0]
    if master.free_port is None:
        return {master.host: Cell("not measured", "no rendezvous port is free", "Free one: see the row ports")}, ""
    common = {"MASTER_ADDR": master.host, "MASTER_PORT": str(master.free_port)}
    common["HOSTS"] = " ".join(node.host for node in able)

    def start(rank: int) -> tuple[Said, str]:
        seconds = str(NETWORK_LIMIT - CONNECT_SECONDS - 1)
        return execute(able[rank], python, "network", seconds, NETWORK_LIMIT, **common, RANK=str(rank))

    with ThreadPoolExecutor(len(able)) as pool:
        answers = list(pool.map(start, range(len(able))))
    result = answers[0][0]
    if "pairs" not in result:
        problems = [said.get("error") or error.splitlines()[-1] for said, error in answers]
        by_hand = f"Try there: {shlex.quote(python)} -c 'import torch'"
        remedies = [by_hand if problem.startswith(IMPORTING) else "" for problem in problems]
        hosts = [node.host for node in able]
        return {h: Cell("no all-reduce", *why) for h, *why in zip(hosts, problems, remedies, strict=True)}, ""
    note = f"Network measured with {result['backend']}, between each node and {master.host}."
    if result["together"]:
        note += f" All {len(able)} together: {speed(result['together'])}."
    others = {able[int(rank)].host: Cell(speed(measured)) for rank, measured in result["pairs"].items()}
    return {master.host: Cell("master")} | others, note


def speed(measured: Mapping[str, float]) -> str:
    return f"{measured['gbit']:.3g} Gbit/s, {measured['us']:.0f} us"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="the nodes, the master first")


def run(args: argparse.Namespace) -> int:
    if not args.hosts:
        remedy = "List the nodes, the master first: bash scripts/check_cluster.sh node0 node1"
        raise Problem("no hosts are given, HOSTS is not set, and this is not a SLURM allocation", remedy)
    for host in args.hosts:
        checked(host)
    if twice := sorted({host for host in args.hosts if args.hosts.count(host) > 1}):
        raise Problem(f"{', '.join(twice)} is named more than once", "List each node once, the master first")
    # A Ctrl-C ends this and every ssh at once; processes on the nodes end by their own time limit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    python = shutil.which(os.environ.get("PYTHON") or "python3") or sys.executable
    # A launcher's plan for this host only, ignoring what the host lacks for a run.
    plan = accepted(ask("ddp", ["127.0.0.1", "0"], os.environ | ALONE))
    ports = [plan.number("MASTER_PORT")] if os.environ.get("MASTER_PORT") else [s.port for s in declarations()]
    nodes = [Node(host, here=is_this_host(host)) for host in args.hosts]

    def look(node: Node) -> None:
        place = str(REPOSITORY), plan.engine_directory, plan.data_prefix, plan.output_dir
        seconds = PROBE_LIMIT - CONNECT_SECONDS - 1
        look_at(node, python, Question(node.host, args.hosts, *place, plan.device, ports, seconds))

    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(look, nodes))
    network, note = measure_network(nodes, python)
    rows = table(nodes, network, Path(plan.data_prefix))
    print(render(nodes, rows, sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if note:
        print(f"\n{note}")
    count = sum(bool(cell.problem) for row in rows.values() for cell in row.values())
    print(f"\n{count} checks failed." if count > 1 else "\n1 check failed." if count else "\nAll checks passed.")
    return 1 if count else 0
