"""Which nodes a run has, and which of them this is: completes and checks what the launcher took from its arguments, the
environment and SLURM."""

import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from t5bench import Problem
from t5bench.plan.draft import Draft
from t5bench.plan.ports import is_taken
from t5bench.record.hosts import (
    addresses_of,
    checked,
    interfaces,
    is_loopback,
    is_nobody,
    is_own,
    is_without_zone,
    own_name_fault,
    without_dot,
)

Fault = tuple[str, str, str]  # code, what was found, what to do
REACHED_BY = "Use the name or address by which the other nodes reach it: hostname -I lists its addresses"


def same_name(one: str, other: str) -> bool:
    """Whether two names may be one host: a cluster's short and long names differ only after the first dot."""
    one, other = without_dot(one).lower(), without_dot(other).lower()
    is_address = re.fullmatch("[0-9.:]+", one + other)
    return one == other or (not is_address and one.partition(".")[0] == other.partition(".")[0])


def _is_same_name(one: str, other: str) -> bool:
    """Whether two names are surely of one host: they are equal, or one is the beginning of the other."""
    shorter, longer = sorted((without_dot(one).lower(), without_dot(other).lower()), key=len)
    return shorter == longer or (longer.startswith(f"{shorter}.") and not _is_address(longer))


def same_host(one: str, other: str) -> bool:
    """Compares the names before it asks any resolver."""
    return same_name(one, other) or bool({*addresses_of(one)} & {*addresses_of(other)})


def is_loopback_name(host: str) -> bool:
    return without_dot(host).lower() in ("localhost", "localhost.localdomain") or is_loopback(host)


def is_this_host(host: str) -> bool:
    """Compares the names before it asks any resolver."""
    if same_name(host, socket.gethostname()) or is_loopback_name(host):
        return True
    return any(map(is_own, _beyond(addresses_of(host))))


def _leads_elsewhere(addresses: Sequence[str]) -> bool:
    """Whether these are addresses of other machines alone."""
    return bool(addresses) and not any(is_loopback(address) or is_own(address) for address in addresses)


def _beyond(addresses: Sequence[str]) -> list[str]:
    """Those that lead beyond this machine."""
    return [address for address in addresses if not is_loopback(address)]


def double(hosts: Sequence[str], *, resolves: bool) -> str:
    """Which node is named more than once, in one clause; empty if none is. Several loopback addresses may stand for
    several nodes, in a rehearsal on one machine.

    resolves: compares what all names resolve to. Otherwise none is looked up unless some are addresses.
    """
    names = [without_dot(host) for host in hosts]
    alike: dict[str, list[str]] = {}
    for host in names:
        earlier_ones = alike.setdefault(host if _is_address(host) else host.lower().partition(".")[0], [])
        for earlier in earlier_ones:
            if _is_same_name(earlier, host):
                return f"a node is named more than once: {earlier} and {host}"
        earlier_ones.append(host)
    if not resolves and len({_is_address(host) for host in names}) < 2:
        return ""
    first: dict[str, str] = {}
    for host in names:
        for address in addresses_of(host):
            earlier = first.setdefault(address, host)
            if earlier != host and not is_loopback(address):
                return f"{earlier} and {host} are the same node, {address}"
    return ""


def _is_address(host: str) -> bool:
    return ":" in host or bool(re.fullmatch("[0-9.]+", host))


def find_own_rank(draft: Draft) -> None:
    """Completes the draft with this node's rank, inferred if it was not given, and checks the nodes."""
    hosts = draft.hosts
    try:
        for host in (*hosts, draft.master_address or "none"):
            checked(host)
    except Problem as problem:
        draft.refuse("host-name", str(problem), problem.remedy)
        return
    if not draft.node:
        own_ranks = (rank for rank, host in enumerate(hosts) if is_this_host(host) and hosts.count(host) == 1)
        draft.node = str(next(own_ranks, ""))
    mistake = next(_mistakes(draft), None)
    if mistake:
        draft.refuse(*mistake)
        return
    for fault in _lacks(draft):
        draft.lack(*fault)
    if draft.number("NNODES") > 1 and is_loopback_name(draft.master_address):
        loop = f"warning: the master {draft.master_address} is this machine itself"
        draft.notes.append(f"{loop}: nodes on other machines do not reach it.")
    elif draft.number("NNODES") > 1 and draft.master_address.startswith(("169.254.", "fe80:")):
        link = f"warning: the master {draft.master_address} is a link-local address"
        draft.notes.append(f"{link}: only nodes on the same cable or switch reach it.")
    if draft.number("NNODES") > 1 and draft.node == "0" and _leads_elsewhere(addresses_of(draft.master_address)):
        found = f"the master {draft.master_address} is not an address of {socket.gethostname()}, but this is node 0"
        draft.notes.append(f"warning: {found}. Is the node rank right?")
    if draft.number("NNODES") > len(hosts) > 0:
        known = f"HOSTS names {len(hosts)} of the {draft.value('NNODES')} nodes"
        draft.notes.append(f"{known}: the others are not checked against their rank.")


def _mistakes(draft: Draft) -> Iterator[Fault]:
    """What is wrong with the nodes as requested; later faults are often consequences of the first."""
    hosts = draft.hosts
    master = draft.master_address
    rank = draft.node
    nodes = draft.number("NNODES")
    task = draft.environ.get("SLURM_LOCALID", "0")
    launcher = f"bash scripts/run_megatron_t5_{draft.strategy.name}.sh"
    usage = f"Usage: {launcher} [master-host] [node-rank]"
    if not master:
        remedy = 'Name it as the first argument, or export HOSTS="node0 node1 ..." in rank order'
        yield "no-master", f"NNODES is {nodes} but no master host is known", remedy
    if master.isdecimal():
        remedy = f"{usage}; is the variable with the host name set?"
        yield "master-is-a-number", f"the first argument must be the master's host name, found '{master}'", remedy
    if task != "0" and rank == draft.environ.get("SLURM_NODEID"):
        remedy = "One launcher starts all processes of its node: use srun --ntasks-per-node=1"
        yield "tasks-per-node", f"srun started more than one launcher on this node (SLURM_LOCALID={task})", remedy
    for host in dict.fromkeys([master, *hosts]):
        addresses = addresses_of(host) if _is_address(host) else []
        if any(map(is_nobody, addresses)):
            yield "not-a-host", f"{host} is an address to listen on, not the address of a node", REACHED_BY
        if is_without_zone(host):
            found = f"{host} is a link-local address, which leads nowhere without an interface"
            yield "not-a-host", found, f"{REACHED_BY}, or add the interface: {host}%eth0"
    named_twice = double(hosts, resolves=False)
    if named_twice:
        remedy = "Name each node once in HOSTS; NPROC_PER_NODE sets the number of processes on it"
        yield "host-twice", named_twice, remedy
    if not rank:
        found = f"Unable to infer NODE_RANK: this host is {socket.gethostname()}, and HOSTS is '{' '.join(hosts)}'"
        yield "no-node-rank", found, f"Pass it explicitly: {launcher} {master} 0 on node 0, ... 1 on node 1"
    if not re.fullmatch("0|[1-9][0-9]{0,8}", rank):
        yield "node-rank", f"the node rank must be a whole number, found '{rank}'", usage
    if int(rank) >= nodes:
        remedy = f"Ranks run from 0 to {nodes - 1}; NNODES or HOSTS set the number of nodes"
        yield "node-rank", f"the node rank is {rank} but there are {nodes} nodes", remedy
    first = hosts[0] if hosts and nodes > 1 else master
    if not same_host(master, first) and not _may_be_another_address(master, hosts, is_first=rank == "0"):
        remedy = f"Rank 0 runs on the master: name {first} as the master, or put {master} first in HOSTS"
        yield "master-is-not-first", f"the master host is {master} but HOSTS begins with {first}", remedy


def _may_be_another_address(master: str, hosts: Sequence[str], *, is_first: bool) -> bool:
    """Whether a master that is not the first of the hosts by name may be that host in another network.

    The first node knows its addresses; the others, that it is none of themselves.
    """
    if any(same_host(master, host) for host in hosts[1:]):
        return False
    if is_first:
        return is_this_host(master) and is_this_host(hosts[0])
    return bool(addresses_of(master)) and not is_this_host(master)


def _lacks(draft: Draft) -> Iterator[Fault]:
    """Why this node cannot meet the others."""
    hosts = draft.hosts
    master = draft.master_address
    rank = int(draft.node)
    here = socket.gethostname()
    port = draft.number("MASTER_PORT")
    addresses = addresses_of(master)
    # Where a loopback address leads each node to itself; on the master this may be right for its own name.
    is_loop = addresses and all(map(is_loopback, addresses)) and (is_loopback_name(master) or not is_this_host(master))
    if rank < len(hosts) and not is_this_host(hosts[rank]):
        remedy = f"Start rank {rank} on {hosts[rank]}, or correct HOSTS ('{' '.join(hosts)}')"
        yield "rank-of-another-host", f"rank {rank} belongs to {hosts[rank]} in HOSTS, but this is {here}", remedy
    elif is_loop and not all(map(is_loopback_name, hosts)):
        found = f"the master '{master}' is {addresses[0]} on {here}, where every node finds only itself"
        remedy = "In HOSTS, give it the name or address by which the other nodes reach it; /etc/hosts may be wrong"
        yield "loopback-master", found, remedy
    elif rank > 0 and not is_loop and (_is_same_name(master, here) or any(map(is_own, _beyond(addresses)))):
        remedy = f"Name node 0 as the master on every node; {master} is right only if this is node 0"
        yield "own-master", f"the master {master} is this host, {here}, but this is node {rank}", remedy
    elif draft.number("NNODES") == 1 and _leads_elsewhere(addresses):
        found = f"the master {master} is not an address of {here}, which is the only node"
        yield "foreign-master", found, "Name localhost, or all nodes: HOSTS='node0 node1', or NNODES"
    if not addresses:
        remedy = "Check the spelling, or use the address that 'getent hosts' prints on the master"
        yield "unknown-master", f"the master host name '{master}' does not resolve on {here}", remedy
    if rank == 0 and is_taken(port):
        remedy = "Choose another on every node: MASTER_PORT=29900"
        yield "port-taken", f"port {port} is already in use on this node", remedy
    if not find_spec("torch"):
        remedy = "Activate the environment that has it, or set PYTHON to that environment's interpreter"
        yield "no-torch", f"torch is not installed for {sys.executable}", remedy


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
    if draft.number("NNODES") > 1 and not is_loopback(draft.master_address):
        own = socket.gethostname()
        found, remedy = own_name_fault(own, addresses_of(own))
        if found:
            draft.lack("own-name", found.replace(" there,", " here,"), remedy)
