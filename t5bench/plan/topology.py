"""Which nodes a run has, and which of them this is: completes and checks what the launcher took from its arguments, the
environment and SLURM."""

import re
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from t5bench import Problem
from t5bench.plan.draft import Draft
from t5bench.plan.ports import is_taken
from t5bench.record.host_names import check_list, checked
from t5bench.record.hosts import Host, double, interfaces, is_loopback, own_name_fault

Fault = tuple[str, str, str]  # code, what was found, what to do
REACHED_BY = "Use the name or address by which the other nodes reach it: hostname -I lists its addresses"


def find_own_rank(draft: Draft) -> None:
    """Completes the draft with this node's rank, inferred if it was not given, and checks the nodes."""
    hosts = draft.hosts
    master = hosts.master
    if master.name.isdecimal() and master.name not in hosts.names:
        found = f"the first argument must be the master's host name, found '{master.name}'"
        draft.refuse("master-is-a-number", found, f"{_usage(draft)}; is the variable with the host name set?")
        return
    try:
        check_list(hosts.names)
        checked(master.name or "none")
    except Problem as problem:
        draft.refuse("host-name", str(problem), problem.remedy)
        return
    draft.node = draft.node or hosts.own_rank()
    mistake = next(_mistakes(draft), None)
    if mistake:
        draft.refuse(*mistake)
        return
    for fault in _lacks(draft):
        draft.lack(*fault)
    draft.notes += _doubts(draft)


def _doubts(draft: Draft) -> Iterator[str]:
    """What may be meant as it is."""
    master = draft.hosts.master
    nodes = draft.number("NNODES")
    named = len(draft.hosts.nodes)
    if nodes > 1 and master.names_itself:
        yield f"warning: the master {master.name} is this machine itself: nodes on other machines do not reach it."
    elif nodes > 1 and master.is_on_the_link:
        link = f"warning: the master {master.name} is a link-local address"
        yield f"{link}: only nodes on the same cable or switch reach it."
    if nodes > 1 and draft.node == "0" and master.is_elsewhere:
        found = f"the master {master.name} is not an address of {socket.gethostname()}, but this is node 0"
        yield f"warning: {found}. Is the node rank right?"
    if nodes > named > 0:
        yield f"HOSTS names {named} of the {nodes} nodes: the others are not checked against their rank."


def _launcher(draft: Draft) -> str:
    return f"bash scripts/run_megatron_t5_{draft.strategy.name}.sh"


def _usage(draft: Draft) -> str:
    return f"Usage: {_launcher(draft)} [master-host] [node-rank]"


def _mistakes(draft: Draft) -> Iterator[Fault]:
    """What is wrong with the nodes as requested; later faults are often consequences of the first."""
    hosts = draft.hosts
    master = hosts.master
    rank = draft.node
    nodes = draft.number("NNODES")
    task = draft.environ.get("SLURM_LOCALID", "0")
    if not master.name:
        remedy = 'Name it as the first argument, or export HOSTS="node0 node1 ..." in rank order'
        yield "no-master", f"NNODES is {nodes} but no master host is known", remedy
    if task != "0" and rank == draft.environ.get("SLURM_NODEID"):
        remedy = "One launcher starts all processes of its node: use srun --ntasks-per-node=1"
        yield "tasks-per-node", f"srun started more than one launcher on this node (SLURM_LOCALID={task})", remedy
    for host in (master, *hosts.nodes):
        if host.is_nobody:
            yield "not-a-host", f"{host.name} is an address to listen on, not the address of a node", REACHED_BY
        if host.lacks_zone:
            found = f"{host.name} is a link-local address, which leads nowhere without an interface"
            yield "not-a-host", found, f"{REACHED_BY}, or add the interface: {host.name}%eth0"
    named_twice = double(hosts.nodes, resolves=False)
    if named_twice:
        remedy = "Name each node once in HOSTS; NPROC_PER_NODE sets the number of processes on it"
        yield "host-twice", named_twice, remedy
    if not rank:
        found = (
            f"Unable to infer NODE_RANK: this host is {socket.gethostname()}, and HOSTS is '{' '.join(hosts.names)}'"
        )
        remedy = f"Pass it explicitly: {_launcher(draft)} {master.name} 0 on node 0, ... 1 on node 1"
        yield "no-node-rank", found, remedy
    if not re.fullmatch("0|[1-9][0-9]{0,8}", rank):
        yield "node-rank", f"the node rank must be a whole number, found '{rank}'", _usage(draft)
    if int(rank) >= nodes:
        remedy = f"Ranks run from 0 to {nodes - 1}; NNODES or HOSTS set the number of nodes"
        yield "node-rank", f"the node rank is {rank} but there are {nodes} nodes", remedy
    if nodes > 1 and hosts.nodes and not _may_be_the_first(draft):
        first = hosts.names[0]
        remedy = f"Rank 0 runs on the master: name {first} as the master, or put {master.name} first in HOSTS"
        yield "master-is-not-first", f"the master host is {master.name} but HOSTS begins with {first}", remedy


def _may_be_the_first(draft: Draft) -> bool:
    """Whether the master may be the first of the hosts, perhaps by its name in another network.

    The first node knows its addresses; the others, that it is none of themselves.
    """
    first, *others = draft.hosts.nodes
    master = draft.hosts.master
    if master.is_same_as(first):
        return True
    if any(master.is_same_as(other) for other in others):
        return False
    if draft.node == "0":
        return master.is_here and first.is_here
    return bool(master.addresses) and not master.is_here


def _lacks(draft: Draft) -> Iterator[Fault]:
    """Why this node cannot meet the others."""
    nodes = draft.hosts.nodes
    master = draft.hosts.master
    rank = int(draft.node)
    here = socket.gethostname()
    port = draft.number("MASTER_PORT")
    # On the master this may be right for its own name.
    is_loop = master.is_loop and (master.names_itself or not master.is_here)
    if rank < len(nodes) and not nodes[rank].is_here:
        remedy = f"Start rank {rank} on {nodes[rank].name}, or correct HOSTS ('{' '.join(draft.hosts.names)}')"
        found = f"rank {rank} belongs to {nodes[rank].name} in HOSTS, but this is {here}"
        yield "rank-of-another-host", found, remedy
    elif is_loop and not all(node.names_itself for node in nodes):
        found = f"the master '{master.name}' is {master.addresses[0]} on {here}, where every node finds only itself"
        remedy = "In HOSTS, give it the name or address by which the other nodes reach it; /etc/hosts may be wrong"
        yield "loopback-master", found, remedy
    elif rank > 0 and not is_loop and (master.surely_is(Host.of(here)) or master.has_own_address):
        remedy = f"Name node 0 as the master on every node; {master.name} is right only if this is node 0"
        yield "own-master", f"the master {master.name} is this host, {here}, but this is node {rank}", remedy
    elif draft.number("NNODES") == 1 and master.is_elsewhere:
        found = f"the master {master.name} is not an address of {here}, which is the only node"
        yield "foreign-master", found, "Name localhost, or all nodes: HOSTS='node0 node1', or NNODES"
    if not master.addresses:
        remedy = "Check the spelling, or use the address that 'getent hosts' prints on the master"
        yield "unknown-master", f"the master host name '{master.name}' does not resolve on {here}", remedy
    if rank == 0 and is_taken(port):
        remedy = "Choose another on every node: MASTER_PORT=29900"
        yield "port-taken", f"port {port} is already in use on this node", remedy
    if not find_spec("torch"):
        remedy = "Activate the environment that has it, or set PYTHON to that environment's interpreter"
        yield "no-torch", f"torch is not installed for {sys.executable}", remedy


def check_network(draft: Draft, device: str, *, uses_gloo: bool) -> None:
    """Checks what the collectives will use of this node's network. uses_gloo: whether they are not NCCL's."""
    if uses_gloo:
        check_own_name(draft)
    check_interfaces(draft, device)


def check_interfaces(draft: Draft, device: str) -> None:
    """Checks the network interfaces that the user names for gloo and NCCL: without them a run ends after minutes."""
    up = interfaces()
    wrong = []
    names = draft.environ.get("GLOO_SOCKET_IFNAME", "")
    if names:
        wrong = [f"GLOO_SOCKET_IFNAME names '{name}'" for name in names.split(",") if name not in up]
    names = draft.environ.get("NCCL_SOCKET_IFNAME", "")
    if names and device == "cuda" and not any(map(_nccl_takes(names), up)):
        wrong.append(f"NCCL_SOCKET_IFNAME is '{names}'")
    for found in wrong[:1]:
        remedy = "Name one of these by which the other nodes reach this one, or unset the variable"
        draft.lack("no-interface", f"{found}, but the interfaces of this node are {', '.join(up)}", remedy)


def _nccl_takes(names: str) -> Callable[[str], bool]:
    """As NCCL reads its variable: beginnings of names; after = whole names; after ^ those that it does not take."""
    is_excluding = names.startswith("^")
    names = names.removeprefix("^")
    is_exact = names.startswith("=")
    listed = names.removeprefix("=").split(",")

    def takes(interface: str) -> bool:
        is_listed = any(interface == name if is_exact else interface.startswith(name) for name in listed)
        return is_listed != is_excluding

    return takes


def check_own_name(draft: Draft) -> None:
    """Checks the address that gloo gives the other nodes: what this node's own name resolves to. NCCL needs none."""
    if draft.number("NNODES") > 1 and not is_loopback(draft.hosts.master.name):
        found, remedy = own_name_fault(Host(socket.gethostname()))
        if found:
            draft.lack("own-name", found.replace(" there,", " here,"), remedy)


def tell_the_last_node(draft: Draft) -> None:
    last = draft.number("NNODES") - 1
    if int(draft.node) != last:
        where = f" ({draft.hosts.names[last]})" if len(draft.hosts.nodes) > last else ""
        draft.notes.append(f"iterations are printed on the last node: node {last}{where}")
