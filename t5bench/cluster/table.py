"""From the nodes' answers to one table: a row for each check, a column for each node, and what to do about the red."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
LEAST_DISK = (
    1 * GIB
)  # logs, TensorBoard and W&B files of many runs; checkpoints of the large model take several times more
LEAST_MEMORY = 2 * GIB  # a process that has loaded torch and the engine
LARGEST_CLOCK_DIFFERENCE = 1.0  # seconds
RED, PLAIN = "\033[31m", "\033[0m"


@dataclass(frozen=True)
class Cell:
    """What stands in the table; a problem makes it red and is explained below, with a remedy."""

    text: str
    problem: str = ""
    remedy: str = ""


UNKNOWN = Cell("-")


@dataclass
class Node:
    """A host as far as it answered. Times in seconds; clock is its clock less ours."""

    host: str
    here: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    clock: float | None = None
    seconds: float = 0.0
    failure: Cell | None = None


@dataclass(frozen=True)
class Paths:
    repository: Path
    engine_dir: Path
    data_prefix: Path
    engine: str
    device: str


Row = Mapping[str, Cell]
Nodes = Sequence[Node]


def short(host: str) -> str:
    return host if host.replace(".", "").isdigit() else host.split(".")[0]


def per_node(nodes: Nodes, name: str, judge: Callable[[Node, Any], Cell]) -> Row:
    """A row of cells that are judged from one fact; without it the cell says why."""
    row = {}
    for node in nodes:
        if name in node.facts:
            row[node.host] = judge(node, node.facts[name])
        elif name in node.errors:
            row[node.host] = Cell("unknown", node.errors[name], f"Look on {node.host}: this should not fail")
        elif node.failure:
            row[node.host] = UNKNOWN
        else:
            row[node.host] = Cell(
                "no answer",
                "no answer in time",
                f"Something hangs on {node.host}, for instance a file system: df tells",
            )
    return row


def same(nodes: Nodes, values: Mapping[str, Any], show: Callable[[Any], str], what: str, remedy: str) -> Row:
    """A row whose values must equal those of the first node that has any."""
    row = {node.host: UNKNOWN for node in nodes}
    first = next((node.host for node in nodes if node.host in values), None)
    for host, value in values.items():
        differs = value != values[first]
        problem = f"{what} is {show(value)}, on {first} {show(values[first])}" if differs else ""
        row[host] = Cell(show(value), problem, remedy if differs else "")
    return row


def reachable(nodes: Nodes) -> Row:
    return {n.host: n.failure or Cell("this host" if n.here else f"ssh {n.seconds:.1f} s") for n in nodes}


def host_names(nodes: Nodes) -> Row:
    def judge(node: Node, fact: Any) -> Cell:
        own = [address for address in fact["own_addresses"] if not address.startswith("127.") and address != "::1"]
        hosts_line = f"the line for {fact['own']} in /etc/hosts of {node.host}"
        if len(nodes) > 1 and not own:
            found = ", ".join(fact["own_addresses"]) or "nothing"
            return Cell(
                "own name",
                f"{fact['own']} resolves to {found} there, where no other node can answer",
                f"Give {hosts_line} its network address, or name the interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
            )
        if node is not nodes[0] and not fact["master_addresses"]:
            return Cell(
                "no master",
                f"the master's name {nodes[0].host} does not resolve there",
                f"Add it to /etc/hosts of {node.host}, or use the master's address in HOSTS",
            )
        return Cell(own[0] if own else fact["own"])

    return per_node(nodes, "names", judge)


def clocks(nodes: Nodes) -> Row:
    known = {node.host: node.clock for node in nodes if node.clock is not None}
    row = {node.host: UNKNOWN for node in nodes}
    first = next(iter(known), None)
    for host, clock in known.items():
        difference = clock - known[first]
        text = f"{round(difference, 2) + 0.0:+.2f} s" if host != first else "reference"
        row[host] = Cell(text)
        if abs(difference) > LARGEST_CLOCK_DIFFERENCE:
            row[host] = Cell(
                text,
                f"its clock is {difference:+.1f} s from that of {first}: the nodes' logs cannot be put in order",
                f"Let chrony or ntpd set the clock of {host} ({first} may also be the wrong one): timedatectl tells",
            )
    return row


def repository(nodes: Nodes, paths: Paths) -> Row:
    remedy = (
        f"Bring {paths.repository} to one state on all nodes (git status, git pull), or copy it from one to the others"
    )
    first = next((node for node in nodes if node.facts.get("repository")), None)

    def show(fact: Any) -> str:
        commit = fact["commit"][:8] if fact["commit"] else f"files {fact['content'][:8]}"
        return f"{commit} changed" if fact["changed"] else commit

    def judge(node: Node, fact: Any) -> Cell:
        if not fact or not first:
            return Cell("missing", f"there is no {paths.repository}", "Clone or copy the repository to that path")
        reference = first.facts["repository"]
        if fact["commit"] != reference["commit"]:
            return Cell(show(fact), f"it is at {show(fact)}, {first.host} at {show(reference)}", remedy)
        if fact["content"] != reference["content"]:
            return Cell(f"{show(fact)}, differs", f"its files are not those of {first.host}", remedy)
        return Cell(show(fact))

    return per_node(nodes, "repository", judge)


def engine(nodes: Nodes, paths: Paths) -> Row:
    if paths.engine == "native":
        return {node.host: Cell("native") for node in nodes}
    setup = f"MEGATRON_DIR={shlex.quote(str(paths.engine_dir))} bash scripts/setup_megatron.sh"
    good = ("series", "megatron_t5_fixes")
    first = next((n.facts["engine"] for n in nodes if n.facts.get("engine") in good), None)

    def judge(node: Node, state: str) -> Cell:
        if state == "missing":
            return Cell(
                state, f"there is no Megatron-DeepSpeed checkout at {paths.engine_dir}", f"Run on {node.host}: {setup}"
            )
        if state not in good:
            what = "not patched" if state == "unpatched" else "not as patches/ says"
            return Cell(state, f"the checkout at {paths.engine_dir} is {what}", f"Run on {node.host}: {setup}")
        if state != first:
            return Cell(state, f"other patches than on the first node ({first})", f"Run on every node: {setup}")
        return Cell(state)

    return per_node(nodes, "engine", judge)


def library(nodes: Nodes, name: str) -> Row:
    values = {node.host: node.facts["libraries"].get(name) for node in nodes if "libraries" in node.facts}
    remedy = "Use one environment on all nodes: conda activate it, then pip install -r requirements.txt"
    row = dict(same(nodes, values, lambda value: value or "none", name, remedy))
    for host, value in values.items():
        if value is None and name in ("torch", "deepspeed", "transformers"):
            row[host] = Cell("none", f"{name} is not installed for the Python of this check", remedy)
    return row


def copy_data(nodes: Nodes, paths: Paths, to: str) -> str:
    """The command that copies the data from the first node that has good ones."""
    source = next((n for n in nodes if n.facts.get("data") and not n.facts["data"]["problem"]), None)
    if not source:
        return "Prepare it on one node: bash scripts/prepare_xsum_megatron.sh   (SAMPLE=1 for the bundled sample)"
    files = [f"{paths.data_prefix}.bin", f"{paths.data_prefix}.idx"]
    if source.facts["data"]["tokenizer"]:
        files.append(str(paths.data_prefix.parent / "tokenizer"))
    between = [] if source.here else ["-3"]
    sources = files if source.here else [f"{source.host}:{file}" for file in files]
    return "Run here: " + shlex.join(["scp", "-r", *between, *sources, f"{to}:{paths.data_prefix.parent}/"])


def data(nodes: Nodes, paths: Paths) -> Row:
    good = [node for node in nodes if node.facts.get("data") and not node.facts["data"]["problem"]]

    def judge(node: Node, fact: Any) -> Cell:
        if fact["problem"]:
            word = "missing" if not fact["bin"] or not fact["idx"] else "damaged"
            return Cell(word, fact["problem"], copy_data(nodes, paths, node.host))
        reference = good[0].facts["data"]
        text = f"{fact['bin']['bytes'] / 1e6:.1f} MB"
        for kind, name in (("bin", ".bin"), ("idx", ".idx"), ("tokenizer", "tokenizer")):
            if fact[kind] != reference[kind]:
                return Cell(
                    f"other {name}", f"its {name} is not that of {good[0].host}", copy_data(nodes, paths, node.host)
                )
        return Cell(f"{text} {fact['idx']['digest'][:8]}")

    return per_node(nodes, "data", judge)


def gpus(nodes: Nodes, paths: Paths) -> Row:
    remedy = "The slowest node sets the pace: take equal ones, or set CUDA_VISIBLE_DEVICES and NPROC_PER_NODE"

    def summary(fact: Any) -> str:
        if not fact:
            return "none"
        names = {f"{gpu['name'].removeprefix('NVIDIA ')} {round(int(gpu['memory_mib']) / 1024)} GiB" for gpu in fact}
        return f"{len(fact)} x {' + '.join(sorted(names))}"

    values = {node.host: summary(node.facts["gpus"]) for node in nodes if "gpus" in node.facts}
    row = dict(per_node(nodes, "gpus", lambda node, fact: Cell(summary(fact))))
    row |= {h: c for h, c in same(nodes, values, str, "the node", remedy).items() if c is not UNKNOWN}
    for host, value in values.items():
        if value == "none" and (paths.device == "cuda" or any(other != "none" for other in values.values())):
            row[host] = Cell(
                "none", "nvidia-smi lists no GPU", f"Ask SLURM for it (--gres=gpu:1), or look at the driver on {host}"
            )
    return row


def driver(nodes: Nodes) -> Row:
    values = {n.host: ", ".join(sorted({g["driver"] for g in n.facts["gpus"]})) for n in nodes if n.facts.get("gpus")}
    return same(nodes, values, str, "the driver", "Install the same driver on all nodes, or take nodes that have it")


def ports(nodes: Nodes) -> Row:
    def judge(node: Node, taken: Mapping[str, str]) -> Cell:
        listed = ", ".join(taken)
        if not taken:
            return Cell("free")
        if node is not nodes[0]:
            return Cell(f"{listed} taken*")  # only the master's are needed
        who = "; ".join(f"{port} by {process}" for port, process in taken.items() if process)
        return Cell(
            f"{listed} taken",
            f"rendezvous ports are in use: {listed}{f' ({who})' if who else ''}",
            "End what listens there (a run left behind?), or launch with another everywhere: MASTER_PORT=29900",
        )

    return per_node(nodes, "ports", judge)


def disk(nodes: Nodes) -> Row:
    def judge(node: Node, fact: Any) -> Cell:
        text = f"{fact['free'] / GIB:.0f} GiB free"
        if not fact["writable"]:
            return Cell("read-only", f"{fact['path']} cannot be written to", "Choose an OUTPUT_DIR that can")
        if fact["free"] < LEAST_DISK:
            problem = f"{fact['free'] / GIB:.1f} GiB are free at {fact['path']}"
            return Cell(text, problem, "Make room, or put OUTPUT_DIR where there is more")
        return Cell(text)

    return per_node(nodes, "disk", judge)


def memory(nodes: Nodes) -> Row:
    def judge(node: Node, fact: Any) -> Cell:
        text = f"{fact['available'] / GIB:.0f} of {fact['total'] / GIB:.0f} GiB"
        if fact["available"] < LEAST_MEMORY:
            return Cell(
                text,
                f"{fact['available'] / GIB:.1f} GiB of memory are available",
                f"End what fills the memory of {node.host}",
            )
        return Cell(text)

    return per_node(nodes, "memory", judge)


def table(nodes: Nodes, paths: Paths, network: Row) -> dict[str, Row]:
    """Every check by name. ``network`` was measured apart."""
    rows: dict[str, Row] = {
        "reachable": reachable(nodes),
        "address": host_names(nodes),
        "clock": clocks(nodes),
        "repository": repository(nodes, paths),
        "engine": engine(nodes, paths),
    }
    for name in ("python", "torch", "cuda", "deepspeed", "transformers", "flash_attn", "apex"):
        if name in ("torch", "deepspeed", "transformers") or any(n.facts.get("libraries", {}).get(name) for n in nodes):
            rows[name] = library(nodes, name)
    rows |= {"data": data(nodes, paths), "GPUs": gpus(nodes, paths)}
    if any(node.facts.get("gpus") for node in nodes):
        rows["driver"] = driver(nodes)
    return rows | {"ports": ports(nodes), "disk": disk(nodes), "memory": memory(nodes), "network": network}


def render(nodes: Nodes, rows: Mapping[str, Row], colour: bool) -> str:
    """The table, and below it each problem with what to do about it."""

    def text(cell: Cell) -> str:
        return f"FAIL {cell.text}" if cell.problem else cell.text

    header = ["check", *(short(node.host) for node in nodes)]
    body = [[name, *(text(row.get(node.host, UNKNOWN)) for node in nodes)] for name, row in rows.items()]
    widths = [max(len(line[index]) for line in [header, *body]) for index in range(len(header))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(header, widths, strict=True)).rstrip()]
    lines.append("  ".join("-" * width for width in widths))
    for line in body:
        cells = [word.ljust(width) for word, width in zip(line, widths, strict=True)]
        painted = [f"{RED}{word}{PLAIN}" if colour and word.startswith("FAIL ") else word for word in cells]
        lines.append("  ".join(painted).rstrip())
    explained: dict[tuple[str, str, str], list[str]] = {}
    for name, row in rows.items():
        for node in nodes:
            cell = row.get(node.host, UNKNOWN)
            if cell.problem:
                explained.setdefault((name, cell.problem, cell.remedy), []).append(node.host)
    for (name, problem, remedy), hosts in explained.items():
        lines += ["", f"{name} on {', '.join(hosts)}: {problem}", f"    {remedy}"]
    return "\n".join(lines)


def failed(rows: Mapping[str, Row]) -> int:
    return sum(bool(cell.problem) for row in rows.values() for cell in row.values())
