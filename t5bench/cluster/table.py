"""Turns the nodes' answers into one table: a row for each check, a column for each node, and remedies for failures."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tabulate import tabulate

from t5bench.cluster.probe import Cell

LARGEST_CLOCK_DIFFERENCE = 1.0  # seconds
RED, PLAIN = "\033[31m", "\033[0m"
UNKNOWN = Cell("-")

# What to do about a row that is red on {host}, unless the node itself says; for all other rows, ENVIRONMENT.
REMEDIES = {
    "repository": "Bring all nodes to the same commit (git status, git pull), or copy it from one to the others",
    "engine": "Run on every node: bash scripts/setup_megatron.sh",
    "data": "Prepare it on one node: bash scripts/prepare_xsum_megatron.sh   (SAMPLE=1 for the bundled sample)",
    "GPUs": "The slowest node sets the pace: use equal ones (SLURM: --gres=gpu:1; if a GPU is not listed, check the"
    " driver), or set CUDA_VISIBLE_DEVICES and NPROC_PER_NODE",
    "driver": "Install the same driver on all nodes, or choose nodes that have it",
    "network": "Let the nodes reach each other on every TCP port (check for a firewall) with the same MTU, and name the"
    " interface between them on all nodes: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
    "clock": "Let chrony or ntpd set the clock of {host}, or of the first node: timedatectl shows which is wrong",
}
ENVIRONMENT = "Use the same environment on all nodes: activate it, then pip install -r requirements.txt"


@dataclass
class Node:
    """A host's answers: its cells by row. ``reached`` says whether it answered, and how fast.

    clock: its clock less ours, in seconds.
    """

    host: str
    here: bool = False
    cells: dict[str, Cell] = field(default_factory=dict)
    free_port: int | None = None
    clock: float | None = None
    reached: Cell = UNKNOWN

    def cell(self, row: str) -> Cell:
        return self.cells.get(row, UNKNOWN)


Nodes = Sequence[Node]
Row = dict[str, Cell]  # by host


def clocks(nodes: Nodes) -> Row:
    """Compares all clocks with the first known one."""
    known = {node.host: node.clock for node in nodes if node.clock is not None}
    row = {node.host: UNKNOWN for node in nodes}
    for host, clock in known.items():
        first = next(iter(known))
        ahead = round(clock - known[first], 2) + 0.0  # no -0.0
        problem = f"its clock is {ahead:+.1f} s off that of {first}, so the nodes' logs cannot be put in order"
        row[host] = Cell(f"{ahead:+.2f} s", problem if abs(ahead) > LARGEST_CLOCK_DIFFERENCE else "")
    return row


def compared(row: Row) -> Row:
    """Makes every difference from the first healthy node a problem."""
    first, reference = next(((host, cell) for host, cell in row.items() if cell.same), ("", UNKNOWN))

    def judge(cell: Cell) -> Cell:
        differs = " and ".join(what for what, value in cell.same.items() if value != reference.same[what])
        problem = f"differs from {first} in {differs}: {cell.text} here, {reference.text} there"
        return Cell(cell.text, problem) if differs else cell

    return {host: judge(cell) for host, cell in row.items()}


def in_a_path(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def copy_command(nodes: Nodes, row: Row, prefix: Path) -> str:
    """The command that copies the data to {host} from the first node whose data are good."""
    source = next((node for node in nodes if row[node.host].same), None)
    if source is None:
        return REMEDIES["data"]
    files = [f"{prefix}.bin", f"{prefix}.idx"]
    if row[source.host].same["record"]:
        files.append(f"{prefix}.meta.json")
    if row[source.host].same["tokenizer"]:
        files.append(str(prefix.parent / "tokenizer"))
    words = files if source.here else ["-3", *(f"{in_a_path(source.host)}:{file}" for file in files)]
    folder = shlex.quote(shlex.join(["mkdir", "-p", str(prefix.parent)]))
    return f"Run here: ssh {{host}} {folder} && " + shlex.join(["scp", "-r", *words, f"{{host}}:{prefix.parent}/"])


def table(nodes: Nodes, network: Row, prefix: Path) -> dict[str, Row]:
    """Every check by name, without those for which no node has a value; failures say what to do.

    network: of the hosts that were measured. prefix: of the data.
    """
    names = dict.fromkeys(name for node in nodes for name in node.cells)
    rows = {"reachable": {node.host: node.reached for node in nodes}, "clock": clocks(nodes)}
    rows |= {name: compared({node.host: node.cell(name) for node in nodes}) for name in names}
    rows["network"] = {node.host: network.get(node.host, UNKNOWN) for node in nodes}
    remedies = REMEDIES | ({"data": copy_command(nodes, rows["data"], prefix)} if "data" in rows else {})

    def advised(name: str, host: str, cell: Cell) -> Cell:
        remedy = cell.remedy or remedies.get(name, ENVIRONMENT)
        return replace(cell, remedy=remedy.replace("{host}:", f"{in_a_path(host)}:").replace("{host}", host))

    return {
        name: {host: advised(name, host, cell) for host, cell in row.items()}
        for name, row in rows.items()
        if name == "network" or any(cell.problem or cell.text not in ("none", UNKNOWN.text) for cell in row.values())
    }


def render(nodes: Nodes, rows: Mapping[str, Row], colour: bool) -> str:
    """The table, and below it each problem with its remedy."""

    def text(cell: Cell) -> str:
        failed = f"{RED}FAIL {cell.text}{PLAIN}" if colour else f"FAIL {cell.text}"
        return failed if cell.problem else cell.text

    hosts = [node.host if node.host.replace(".", "").isdigit() else node.host.split(".")[0] for node in nodes]
    body = [[name, *map(text, row.values())] for name, row in rows.items()]
    lines = [tabulate(body, ["check", *hosts], disable_numparse=True)]
    explained: dict[tuple[str, str, str], list[str]] = {}
    for name, row in rows.items():
        for host, cell in row.items():
            if cell.problem:
                explained.setdefault((name, cell.problem, cell.remedy), []).append(host)
    for (name, problem, remedy), where in explained.items():
        lines += ["", f"{name} on {', '.join(where)}: {problem}", f"    {remedy}"]
    return "\n".join(lines)
