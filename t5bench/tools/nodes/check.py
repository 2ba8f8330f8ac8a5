"""``python -m t5bench cluster``, which scripts/check_cluster.sh calls; its --help says what it does."""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from t5bench import Problem
from t5bench.plan.launchers import ALONE, accepted, declarations
from t5bench.plan.planner import plan
from t5bench.plan.topology import REACHED_BY
from t5bench.printed_table import text_table
from t5bench.record.host_cost import HostCost
from t5bench.record.host_names import check_list
from t5bench.record.hosts import Host, double, is_loopback
from t5bench.record.network import Figures, Network
from t5bench.text import steer, visible
from t5bench.tools.nodes import health, host_cost
from t5bench.tools.nodes.ask import CONNECT_SECONDS, Reply, execute, unreachable
from t5bench.tools.nodes.findings import Finding
from t5bench.tools.nodes.probe import SECONDS, Question

# Seconds; everything ends within a minute.
PROBE_LIMIT = CONNECT_SECONDS + SECONDS + 1
HEALTH_LIMIT = CONNECT_SECONDS + health.SECONDS + 1  # until here, a node has told everything
LEAST_HEALTH_SECONDS = 5.0
# from the start of the check, and in any case
NETWORK_LIMIT = 55.0
LEAST_NETWORK = 27.0
HOST_LIMIT = 120.0  # for a tiny training, which takes ten seconds unless the engine compiles something first
LARGEST_CLOCK_DIFFERENCE = 1.0  # seconds
RED = "\033[31m"
PLAIN = "\033[0m"
UNKNOWN = Finding("-")
ABSENT = ("none", UNKNOWN.text)
# Rows of the probe that say something about one node alone.
ABOUT_ONE_NODE = ("reachable", "health", "disk", "memory", "clock")
# Of the median of all nodes with the same device.
GPU_SHARE = 0.7
CPU_SHARE = health.OWN_SHARE

# What to do about a row that is red, unless the node itself says; for all other rows, ENVIRONMENT.
REMEDIES = {
    "repository": "Bring all nodes to the same commit (git status, git pull), or copy it from one to the others",
    "data": "Copy the files and the tokenizer from a node that has them (README, step 7), or prepare them there: bash"
    " scripts/prepare_xsum_megatron.sh   (SAMPLE=1 for the bundled sample)",
    "GPUs": "The slowest node sets the pace: use equal ones (SLURM: --gres=gpu:1), or set CUDA_VISIBLE_DEVICES and"
    " NPROC_PER_NODE; if a GPU is not listed, check the driver",
    "processors": "Use nodes with the same processors, and ask for as many on each (SLURM: --cpus-per-task)",
    "driver": "Install the same driver on all nodes, or choose nodes that have it",
    "network": "Let the nodes reach each other on every TCP port (check for a firewall) with the same MTU, and name the"
    " interface between them on all nodes: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
    "clock": "Let chrony or ntpd set the clock: timedatectl shows which is wrong",
}
ENVIRONMENT = "Use the same environment on all nodes: activate it, then pip install -r requirements.txt"

Row = dict[str, Finding]  # by host


@dataclass
class CheckedNode:
    """A host."""

    host: str
    here: bool = False
    """Whether it is the one on which the check was started."""
    findings: dict[str, Finding] = field(default_factory=dict)
    """By row of the table."""
    clock: float | None = None
    """Its clock less ours, in seconds."""
    free_port: int | None = None
    kind: str = ""
    """Its GPU's name in nvidia-smi, or cpu."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Its slowest device's figures, by the names of health.SPEEDS."""
    own_rows: set[str] = field(default_factory=set)
    """The rows that say whether it is healthy."""


# ---- asking the nodes ----------------------------------------------------------------------------------------------


def fill_in(node: CheckedNode, reply: Reply) -> None:
    """The findings of a reply, or why there is none."""
    if reply.answer:
        node.clock = reply.clock
        how = "this host" if node.here else f"ssh {reply.seconds:.1f} s"
        node.findings.setdefault("reachable", Finding(how))
        node.findings |= {row: Finding(**finding) for row, finding in reply.answer["findings"].items()}
    else:
        node.findings.setdefault("reachable", unreachable(node.host, reply.error))


def fill_in_facts(node: CheckedNode, reply: Reply) -> None:
    """The answer of probe.py."""
    fill_in(node, reply)
    node.free_port = reply.answer.get("free_port")


def fill_in_health(node: CheckedNode, reply: Reply) -> None:
    """The answer of health.py."""
    fill_in(node, reply)
    if reply.answer:
        node.kind = reply.answer["kind"]
        node.speeds = reply.answer["speeds"]
        node.own_rows = set(reply.answer["findings"])
    elif not node.findings["reachable"].problem:
        node.findings["health"] = Finding("no answer", reply.error.splitlines()[-1], "See the node's kernel log")


def health_of(node: CheckedNode, python: str, device: str, seconds: float = health.SECONDS) -> Reply:
    limit = CONNECT_SECONDS + seconds + 1
    return execute(node.host, python, "health", [device, str(seconds)], limit, here=node.here)


def facts_of(node: CheckedNode, python: str, question: Question) -> Reply:
    own = replace(question, host=node.host)
    return execute(node.host, python, "probe", [json.dumps(asdict(own))], PROBE_LIMIT, here=node.here)


def find_doubles(nodes: Sequence[CheckedNode]) -> None:
    """Makes an address that two nodes report a problem: they are one node under two names."""
    first: dict[str, str] = {}
    for node in nodes:
        finding = node.findings.get("address", UNKNOWN)
        if finding.problem or finding.text in ABSENT:
            continue
        other = first.setdefault(finding.text, node.host)
        # Several loopback addresses stand for several nodes on purpose, in a rehearsal on one machine.
        if other != node.host and not is_loopback(node.host):
            problem = f"it is the same node as {other}, under another name"
            node.findings["address"] = replace(finding, problem=problem, remedy="Name each node once in HOSTS")


def compare_speeds(nodes: Sequence[CheckedNode]) -> None:
    """Makes a speed far below the median of three nodes or more with the same device a problem."""
    by_kind: dict[str, list[CheckedNode]] = {}
    for node in nodes:
        by_kind.setdefault(node.kind, []).append(node)
    for kind, alike in by_kind.items():
        share = CPU_SHARE if kind == "cpu" else GPU_SHARE
        for row, (name, *_) in health.SPEEDS.items():
            measured = [node for node in alike if name in node.speeds]
            if len(measured) < 3:
                continue
            median = statistics.median(node.speeds[name] for node in measured)
            for node in measured:
                finding = node.findings[row]
                if node.speeds[name] < share * median and not finding.problem:
                    problem = f"{finding.text}; the median of {len(measured)} nodes is {median:.3g}"
                    node.findings[row] = replace(finding, problem=problem, remedy=health.SLOW)


def compare_clocks(nodes: Sequence[CheckedNode]) -> None:
    """Fills in the row "clock": every clock compared with the first known one."""
    known = [(node, node.clock) for node in nodes if node.clock is not None]
    for node, clock in known:
        first, reference = known[0]
        ahead = round(clock - reference, 2) + 0.0  # no -0.0
        problem = f"its clock is {ahead:+.1f} s off that of {first.host}, so the nodes' logs cannot be put in order"
        node.findings["clock"] = Finding(f"{ahead:+.2f} s", problem if abs(ahead) > LARGEST_CLOCK_DIFFERENCE else "")


def measure_network(nodes: Sequence[CheckedNode], python: str, limit: float) -> Network | None:
    """Fills in the row "network" within so many seconds, and returns what was measured, if anything."""
    for node in nodes:
        node.findings["network"] = Finding("not measured")
    able = [node for node in nodes if node.findings.get("torch", UNKNOWN).text not in ABSENT]
    if len(able) < 2 or able[0].free_port is None:
        return None
    common = {"MASTER_ADDR": able[0].host, "MASTER_PORT": str(able[0].free_port)}
    common["HOSTS"] = " ".join(node.host for node in able)

    def start(rank: int) -> Reply:
        seconds = str(limit - CONNECT_SECONDS - 1)
        node = able[rank]
        environment = {**common, "RANK": str(rank)}
        return execute(node.host, python, "network", [seconds], limit, here=node.here, **environment)

    with ThreadPoolExecutor(len(able)) as pool:
        replies = list(pool.map(start, range(len(able))))
    result = replies[0].answer
    if "pairs" not in result:
        for node, reply in zip(able, replies, strict=True):
            node.findings["network"] = Finding(
                "no all-reduce", reply.answer.get("error") or reply.error.splitlines()[-1]
            )
        return None
    able[0].findings["network"] = Finding("master")
    hosts = [node.host for node in able]
    by_host = {hosts[int(rank)]: figures for rank, figures in result["pairs"].items()}
    network = Network.of({**result, "hosts": hosts, "pairs": by_host})
    for node in able[1:]:
        node.findings["network"] = Finding(speed_of(network.pairs[node.host]))
    return network


def measure_hosts(nodes: Sequence[CheckedNode], python: str) -> HostCost | None:
    """Fills in the row "operator", and returns what was measured if every node answered."""
    kept = {name: os.environ[name] for name in host_cost.KEPT if os.environ.get(name)}

    def ask(node: CheckedNode) -> Reply:
        seconds = str(HOST_LIMIT - CONNECT_SECONDS - 1)
        return execute(node.host, python, "host_cost", [seconds], HOST_LIMIT, here=node.here, **kept)

    with ThreadPoolExecutor(len(nodes)) as pool:
        replies = list(pool.map(ask, nodes))
    costs = {}
    for node, reply in zip(nodes, replies, strict=True):
        cost = reply.answer.get("operator_us")
        if cost:
            costs[node.host] = cost
            node.findings["operator"] = Finding(f"{cost:.1f} us in the {reply.answer['engine']} engine")
        else:
            why = reply.answer.get("error") or reply.error.splitlines()[-1]
            node.findings["operator"] = Finding("not measured", why, "Start the same training alone to see all it says")
    if len(costs) < len(nodes):
        return None
    return HostCost(replies[0].answer["engine"], replies[0].answer["device"], costs)


def speed_of(figures: Figures) -> str:
    return f"{figures.gbit:.3g} Gbit/s, {figures.us:.0f} us, {figures.us_computing:.0f} while computing"


def about(network: Network) -> str:
    """A line on what was measured."""
    together = ""
    if network.together:
        together = f" All {len(network.hosts)} together: {speed_of(network.together)}."
    return f"Network measured with {network.backend}, between each node and {network.hosts[0]}.{together}"


# ---- the table -----------------------------------------------------------------------------------------------------


def compared(row: Row) -> Row:
    """Makes every difference from the first healthy node a problem."""
    healthy = {host: finding for host, finding in row.items() if finding.same and not finding.problem}
    first, reference = next(iter(healthy.items()), ("", UNKNOWN))
    judged = dict(row)
    for host, finding in healthy.items():
        differs = " and ".join(what for what, value in finding.same.items() if value != reference.same[what])
        if differs:
            problem = f"differs from {first} in {differs}: {finding.text} here, {reference.text} there"
            judged[host] = replace(finding, problem=problem)
    return judged


def table(nodes: Sequence[CheckedNode]) -> dict[str, Row]:
    """Every check by name, without those for which no node has a value."""
    names = dict.fromkeys(name for node in nodes for name in node.findings)
    rows = {name: compared({node.host: node.findings.get(name, UNKNOWN) for node in nodes}) for name in names}
    return {n: row for n, row in rows.items() if any(c.problem or c.text not in ABSENT for c in row.values())}


def render(rows: Mapping[str, Row], colour: bool) -> str:
    """The table, and below it each problem with what to do about it."""

    def text(finding: Finding) -> str:
        said = visible(finding.text)
        failed = f"{RED}FAIL {said}{PLAIN}" if colour else f"FAIL {said}"
        return failed if finding.problem else said

    hosts = [host if host.replace(".", "").isdigit() else host.split(".")[0] for host in rows["reachable"]]
    body = [[name, *map(text, row.values())] for name, row in rows.items()]
    lines = [text_table(body, ["check", *hosts])]
    explained: dict[tuple[str, str, str], list[str]] = {}
    for name, row in rows.items():
        for host, finding in row.items():
            if finding.problem:
                remedy = finding.remedy or REMEDIES.get(name, ENVIRONMENT)
                explained.setdefault((name, finding.problem, remedy), []).append(host)
    for (name, problem, remedy), where in explained.items():
        lines += ["", f"{name} on {', '.join(where)}: {problem}", f"    {remedy}"]
    return "\n".join(lines)


# ---- the verdict ---------------------------------------------------------------------------------------------------


def verdicts(nodes: Sequence[CheckedNode]) -> str:
    """PASS or FAIL for each node with its reasons, and the list for --exclude.

    A node fails by itself: that two nodes have different data or commits is no reason to leave one of them out.
    """
    lines = []
    failed = []
    for node in nodes:
        rows = [row for row in node.findings if row in node.own_rows or row in ABOUT_ONE_NODE]
        reasons = [f"{row}: {node.findings[row].problem}" for row in rows if node.findings[row].problem]
        lines.append(f"FAIL  {node.host}  {'; '.join(reasons)}" if reasons else f"PASS  {node.host}")
        if reasons:
            failed.append(node.host)
    if failed:
        lines += ["", f"To leave out what failed: --exclude={','.join(failed)}"]
    return "\n".join(lines)


# ---- the command ---------------------------------------------------------------------------------------------------


def checked_hosts(names: Sequence[str]) -> list[Host]:
    """The hosts. Raises Problem for no host, for one that is named twice, and for no address."""
    if not names:
        remedy = "List the nodes, the master first: bash scripts/check_cluster.sh node0 node1"
        raise Problem("no hosts are given, HOSTS is not set, and this is not a SLURM allocation", remedy)
    check_list(names, "List {}")
    hosts = [Host.of(name) for name in names]
    for host in hosts:
        if host.is_nobody:
            raise Problem(f"{host.name} is an address to listen on, not the address of a node", REACHED_BY)
    named_twice = double(hosts, resolves=True)
    if named_twice:
        raise Problem(named_twice, "List each node once, the master first")
    return hosts


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    hosts = checked_hosts(args.hosts)
    if args.network:
        check_place(args.network, [host.name for host in hosts], is_health_alone=args.health)
    if args.host:
        check_writable(args.host, "--host")
    # A Ctrl-C ends this and every ssh at once; processes on the nodes end by their own time limit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    python = shutil.which(os.environ.get("PYTHON") or "python3") or sys.executable
    nodes = [CheckedNode(host.name, here=host.is_here) for host in hosts]
    if args.health:
        device = "cuda" if os.environ.get("DEVICE") != "cpu" else "cpu"
        with ThreadPoolExecutor(len(nodes)) as pool:
            replies = list(pool.map(lambda node: health_of(node, python, device), nodes))
        for node, reply in zip(nodes, replies, strict=True):
            fill_in_health(node, reply)
        network = None
    else:
        network = check_all(nodes, python)
    cost = measure_hosts(nodes, python) if args.host else None
    compare_clocks(nodes)
    compare_speeds(nodes)
    rows = table(nodes)
    count = len([finding for row in rows.values() for finding in row.values() if finding.problem])
    verdict = f"{count} check{'s' if count > 1 else ''} failed." if count else "All checks passed."
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    note = about(network) if network else ""
    shown = "\n\n".join(filter(None, [render(rows, colour), note, verdicts(nodes), verdict]))
    if colour:
        steer(sys.stdout, visible(shown, "\t\n", colours=True) + "\n")
    else:
        print(shown)
    if args.network:
        save(network, args.network, "network", "--network")
    if args.host:
        save(cost, args.host, "host", "--host")
    return 1 if count else 0


def check_place(path: Path, hosts: Sequence[str], is_health_alone: bool) -> None:
    """Raises Problem if no network would be measured, or if there is no place to write it."""
    if is_health_alone:
        raise Problem("--health does not measure the network, which --network writes down", "Leave one of them out")
    if len(hosts) < 2:
        raise Problem(f"--network needs two hosts or more, found {hosts[0]}", "Name another host")
    check_writable(path, "--network")


def check_writable(path: Path, option: str) -> None:
    """Raises Problem."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Problem(f"{path} cannot be written", f"Name another file with {option}")


def save(measured: Network | HostCost | None, path: Path, what: str, option: str) -> None:
    """Raises Problem if the file cannot be written."""
    if not measured:  # the table says why
        print(f"\nNo {what} was measured, so {path} was not written.")
        return
    try:
        measured.write(path)
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error.strerror}", f"Name another file with {option}") from error
    print(f"\nWrote {path}; read it with: python -m t5bench predict {option} {path}")


def check_all(nodes: Sequence[CheckedNode], python: str) -> Network | None:
    """Asks all nodes for everything; returns what was measured of the network."""
    # A launcher's plan for this host only, ignoring what the host lacks for a run.
    planned = accepted(plan({**os.environ, **ALONE}, "ddp"))
    strategies = declarations()
    ports = [planned.number("MASTER_PORT")] if os.environ.get("MASTER_PORT") else [s.port for s in strategies]
    question = Question(
        host="",
        hosts=[node.host for node in nodes],
        engine_directory=planned.engine_directory,
        data_prefix=planned.data_prefix,
        output_directory=planned.output_dir,
        device=planned.device,
        ports=ports,
    )
    start = time.monotonic()
    deadline = start + HEALTH_LIMIT
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: ask_everything(node, python, question, deadline), nodes))
    find_doubles(nodes)
    left = NETWORK_LIMIT - (time.monotonic() - start)
    return measure_network(nodes, python, max(LEAST_NETWORK, left))


def ask_everything(node: CheckedNode, python: str, question: Question, deadline: float) -> None:
    """First what nodes must have in common, then whether the node is healthy, so that neither slows the other."""
    fill_in_facts(node, facts_of(node, python, question))
    seconds = min(health.SECONDS, deadline - time.monotonic() - CONNECT_SECONDS - 1)
    if node.findings["reachable"].problem:
        return
    if seconds < LEAST_HEALTH_SECONDS:
        node.findings["health"] = Finding("not checked: slow")
        return
    fill_in_health(node, health_of(node, python, question.device, seconds))
