"""Which nodes a run has, and which of them this is: completes and checks what the launcher took from its arguments, the
environment and SLURM."""

import re
import shutil
import socket
from collections.abc import Iterator

from t5bench import Problem
from t5bench.plan.draft import Draft
from t5bench.plan.ports import is_taken
from t5bench.record.hosts import addresses_of, checked, is_loopback, is_own, own_name_fault

Fault = tuple[str, str, str]  # code, what was found, what to do


def same_name(one: str, other: str) -> bool:
    """Whether two names may be one host: a cluster's short and long names differ only after the first dot."""
    is_address = re.fullmatch("[0-9.:]+", one + other)
    return one == other or (not is_address and one.partition(".")[0] == other.partition(".")[0])


def same_host(one: str, other: str) -> bool:
    """Compares the names before it asks any resolver."""
    return same_name(one, other) or bool({*addresses_of(one)} & {*addresses_of(other)})


def is_loopback_name(host: str) -> bool:
    return host == "localhost" or is_loopback(host)


def is_this_host(host: str) -> bool:
    """Compares the names before it asks any resolver."""
    if same_name(host, socket.gethostname()) or is_loopback_name(host):
        return True
    return any(is_own(address) for address in addresses_of(host) if not is_loopback(address))


def place(draft: Draft) -> None:
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
    if draft.number("NNODES") > len(hosts) > 0:
        known = f"HOSTS names {len(hosts)} of the {draft.value('NNODES')} nodes"
        draft.notes.append(f"{known}: the others are not checked against their rank.")


def _mistakes(draft: Draft) -> Iterator[Fault]:
    """What is wrong with the nodes as requested; later faults are often consequences of the first."""
    hosts, master, rank = draft.hosts, draft.master_address, draft.node
    nodes, task = draft.number("NNODES"), draft.environ.get("SLURM_LOCALID", "0")
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
    if not rank:
        found = f"Unable to infer NODE_RANK: this host is {socket.gethostname()}, and HOSTS is '{' '.join(hosts)}'"
        yield "no-node-rank", found, f"Pass it explicitly: {launcher} {master} 0 on node 0, ... 1 on node 1"
    if not re.fullmatch("0|[1-9][0-9]{0,8}", rank):
        yield "node-rank", f"the node rank must be a whole number, found '{rank}'", usage
    if int(rank) >= nodes:
        remedy = f"Ranks run from 0 to {nodes - 1}; NNODES or HOSTS set the number of nodes"
        yield "node-rank", f"the node rank is {rank} but there are {nodes} nodes", remedy
    first = hosts[0] if hosts and nodes > 1 else master
    if not same_host(master, first):
        remedy = f"Rank 0 runs on the master: name {first} as the master, or put {master} first in HOSTS"
        yield "master-is-not-first", f"the master host is {master} but HOSTS begins with {first}", remedy


def _lacks(draft: Draft) -> Iterator[Fault]:
    """Why this node cannot meet the others."""
    hosts, master, rank = draft.hosts, draft.master_address, int(draft.node)
    here, port, addresses = socket.gethostname(), draft.number("MASTER_PORT"), addresses_of(master)
    # Where a loopback address leads each node to itself; on the master this may be right for its own name.
    is_loop = addresses and all(map(is_loopback, addresses)) and (is_loopback_name(master) or not is_this_host(master))
    if rank < len(hosts) and not is_this_host(hosts[rank]):
        remedy = f"Start rank {rank} on {hosts[rank]}, or correct HOSTS ('{' '.join(hosts)}')"
        yield "rank-of-another-host", f"rank {rank} belongs to {hosts[rank]} in HOSTS, but this is {here}", remedy
    elif is_loop and not all(map(is_loopback_name, hosts)):
        found = f"the master '{master}' is {addresses[0]} on {here}, where every node finds only itself"
        remedy = "In HOSTS, give it the name or address by which the other nodes reach it; /etc/hosts may be wrong"
        yield "loopback-master", found, remedy
    if not addresses:
        remedy = "Check the spelling, or use the address that 'getent hosts' prints on the master"
        yield "unknown-master", f"the master host name '{master}' does not resolve on {here}", remedy
    if rank == 0 and is_taken(port):
        remedy = "Choose another on every node: MASTER_PORT=29900"
        yield "port-taken", f"port {port} is already in use on this node", remedy
    for program, remedy in (("torchrun", "Activate the environment that has torch"), ("setsid", "Install util-linux")):
        if not shutil.which(program, path=draft.environ.get("PATH")):
            yield f"no-{program}", f"{program} is not on PATH", remedy


def check_own_name(draft: Draft) -> None:
    """Checks the address that gloo gives the other nodes: what this node's own name resolves to. NCCL needs none."""
    if draft.number("NNODES") > 1 and not is_loopback(draft.master_address):
        own = socket.gethostname()
        found, remedy = own_name_fault(own, addresses_of(own))
        if found:
            draft.lack("own-name", found.replace(" there,", " here,"), remedy)
