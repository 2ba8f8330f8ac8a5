"""From the nodes' answers to one table: a row for each check, a column for each node, and what to do about the red."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from t5bench.cluster.probe import FACTS, Cell

LARGEST_CLOCK_DIFFERENCE = 1.0  # seconds
RED, PLAIN = "\033[31m", "\033[0m"
UNKNOWN = Cell("-")

# What to do about a row that is red on {host}, where the node did not say so itself; for all other rows, ENVIRONMENT.
REMEDIES = {
    "repository": "Bring it to one state on all nodes (git status, git pull), or copy it from one to the others",
    "engine": "Run on every node: bash scripts/setup_megatron.sh",
    "data": "Prepare it on one node: bash scripts/prepare_xsum_megatron.sh   (SAMPLE=1 for the bundled sample)",
    "GPUs": "The slowest node sets the pace: take equal ones (SLURM: --gres=gpu:1; where one is not listed, look at the"
    " driver), or set CUDA_VISIBLE_DEVICES and NPROC_PER_NODE",
    "driver": "Install the same driver on all nodes, or take nodes that have it",
    "network": "Let the nodes reach each other on every TCP port (a firewall?), and name the interface between them on"
    " all nodes: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
    "clock": "Let chrony or ntpd set the clock of {host}, or of the first node: timedatectl tells which is wrong",
}
ENVIRONMENT = "Use one environment on all nodes: conda activate it, then pip install -r requirements.txt"


@dataclass
class Node:
    """A host as far as it answered: cells by fact and row; its answer took so many seconds; its clock less ours."""

    host: str
    here: bool = False
    cells: dict[str, Mapping[str, Cell]] = field(default_factory=dict)
    free_port: int | None = None
    clock: float | None = None
    seconds: float = 0.0
    failure: Cell | None = None

    def cell(self, fact: str, row: str) -> Cell:
        if fact in self.cells:
            return self.cells[fact].get(row, UNKNOWN)
        if self.failure:
            return UNKNOWN
        remedy = f"Something hangs on {self.host}, for instance a file system: df tells"
        return Cell("no answer", "no answer in time", remedy)


Nodes = Sequence[Node]
Row = dict[str, Cell]  # by host


def clocks(nodes: Nodes) -> Row:
    """All against the first that is known."""
    known = {node.host: node.clock for node in nodes if node.clock is not None}
    row = {node.host: UNKNOWN for node in nodes}
    for host, clock in known.items():
        first = next(iter(known))
        ahead = round(clock - known[first], 2) + 0.0  # no -0.0
        problem = f"its clock is {ahead:+.1f} s from that of {first}: the nodes' logs cannot be put in order"
        row[host] = Cell(f"{ahead:+.2f} s", problem if abs(ahead) > LARGEST_CLOCK_DIFFERENCE else "")
    return row


def rows_of(nodes: Nodes, fact: str) -> dict[str, Row]:
    """The rows of one fact, without those in which no node has anything."""
    names = dict.fromkeys(name for node in nodes for name in node.cells.get(fact, ()))
    rows = {name: compared({node.host: node.cell(fact, name) for node in nodes}) for name in names or (fact,)}
    return {
        name: row
        for name, row in rows.items()
        if any(cell.problem or cell.text not in ("none", UNKNOWN.text) for cell in row.values())
    }


def compared(row: Row) -> Row:
    """What is not as on the first node that is well becomes a problem."""
    compared_with = next(((host, cell) for host, cell in row.items() if cell.same), None)
    if compared_with is None:
        return row
    first, reference = compared_with

    def judge(cell: Cell) -> Cell:
        differs = [what for what, value in cell.same.items() if value != reference.same[what]]
        problem = f"not the same {' and '.join(differs)} as on {first}: {cell.text} here, {reference.text} there"
        return Cell(cell.text, problem) if differs else cell

    return {host: judge(cell) for host, cell in row.items()}


def copy_command(nodes: Nodes, row: Row, prefix: Path) -> str:
    """What copies the data to {host} from the first node whose data are good."""
    source = next((node for node in nodes if row[node.host].same), None)
    if source is None:
        return REMEDIES["data"]
    files = [f"{prefix}.bin", f"{prefix}.idx"]
    if row[source.host].same["tokenizer"]:
        files.append(str(prefix.parent / "tokenizer"))
    words = files if source.here else ["-3", *(f"{source.host}:{file}" for file in files)]
    return "Run here: " + shlex.join(["scp", "-r", *words, f"{{host}}:{prefix.parent}/"])


def table(nodes: Nodes, network: Row) -> dict[str, Row]:
    """Every check by name. network: of the hosts that were measured."""
    reached = {n.host: n.failure or Cell("this host" if n.here else f"ssh {n.seconds:.1f} s") for n in nodes}
    rows = {"reachable": reached, "clock": clocks(nodes)}
    for fact in FACTS:
        rows |= rows_of(nodes, fact.__name__)
    return rows | {"network": {node.host: network.get(node.host, UNKNOWN) for node in nodes}}


def render(nodes: Nodes, rows: Mapping[str, Row], data_prefix: Path, colour: bool) -> str:
    """The table, and below it each problem with what to do about it."""

    def text(cell: Cell) -> str:
        if not cell.problem:
            return cell.text
        return f"{RED}FAIL {cell.text}{PLAIN}" if colour else f"FAIL {cell.text}"

    hosts = [node.host if node.host.replace(".", "").isdigit() else node.host.split(".")[0] for node in nodes]
    body = [[name, *map(text, row.values())] for name, row in rows.items()]
    lines = [tabulate(body, ["check", *hosts], disable_numparse=True)]
    remedies = REMEDIES | ({"data": copy_command(nodes, rows["data"], data_prefix)} if "data" in rows else {})
    explained: dict[tuple[str, str, str], list[str]] = {}
    for name, row in rows.items():
        for host, cell in row.items():
            if cell.problem:
                remedy = (cell.remedy or remedies.get(name, ENVIRONMENT)).replace("{host}", host)
                explained.setdefault((name, cell.problem, remedy), []).append(host)
    for (name, problem, remedy), where in explained.items():
        lines += ["", f"{name} on {', '.join(where)}: {problem}", f"    {remedy}"]
    return "\n".join(lines)
