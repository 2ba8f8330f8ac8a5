"""The nodes of a run compare their plans before they train, over the store with which torchrun has connected them.

The first worker of each node does this. It needs no directory and no secret that the nodes share, and no second port.
A node whose plan is unknown, because its command was pasted without a recorder, is not compared.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from t5bench import Problem, note
from t5bench.plan import shared_facts

# The recorder's name for what its node's plan has in common with the others' (t5bench/plan/shared_facts.py), as JSON.
COMMON = "T5_COMMON_PLAN"
# The recorder's name for RENDEZVOUS_TIMEOUT: how much later than the others a node's first worker may say its plan.
PATIENCE = "T5_COMPARING_SECONDS"
MOST_NAMED = 4
LEAST_WAIT_SECONDS = 0.1
QUIET_SECONDS = 10.0
"""A longer wait is told, each time that so much has passed."""


ANOTHER_PORT = "Choose another MASTER_PORT on every node, or give each node of this run its own rank"


class AbsentError(Exception):
    """A node joined the run, but its worker did not come to compare its plan. record/status.py knows the sentence."""


def compare_plans(environ: Mapping[str, str] = os.environ) -> None:
    """Returns when all nodes have the same plan.

    Raises Problem if they differ, with one sentence on all nodes, and AbsentError if a node's first worker does not
    say its plan.
    """
    nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes == 1 or environ.get("LOCAL_RANK") != "0":
        return
    node = int(environ["GROUP_RANK"])
    own = {"host": socket.gethostname(), "common": json.loads(environ.get(COMMON, "{}"))}
    seconds = float(environ.get(PATIENCE, "600"))
    try:
        store = _store(environ, seconds)
        if store.add(f"came/{node}", 1) > 1:
            where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
            raise Problem(f"a run at {where} is in progress and has its node {node}", ANOTHER_PORT)
        store.set(f"plan/{node}", json.dumps(own))
        _wait(store, node, nodes, seconds)
        verdict = _ask_all(store, node, nodes, own)
    except RuntimeError as error:  # torch's, of which the store's are kinds
        note(f"warning: the nodes could not compare their plans: {error}")
        return
    if verdict:
        raise Problem(f"the nodes were started with different settings: {verdict}", shared_facts.REMEDY)


def _store(environ: Mapping[str, str], seconds: float) -> Any:
    """torchrun's own, which it keeps on node 0. Raises RuntimeError."""
    from torch.distributed import PrefixStore, TCPStore

    timeout = timedelta(seconds=seconds)
    address = environ["MASTER_ADDR"]
    store = TCPStore(address, int(environ["MASTER_PORT"]), is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore("t5bench/plans", store)


def _wait(store: Any, node: int, nodes: int, seconds: float) -> None:
    """Waits until node 0 can say what it found. Raises AbsentError, which names the nodes that have not come."""
    awaited = [f"plan/{other}" for other in range(nodes)] if node == 0 else ["verdict"]
    deadline = time.monotonic() + seconds
    while not _has_come(store, awaited, min(QUIET_SECONDS, max(0.0, deadline - time.monotonic()))):
        absent = [other for other in range(nodes) if not store.check([f"plan/{other}"])]
        who = f"node{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:MOST_NAMED]))}"
        if absent and time.monotonic() >= deadline:
            found = f"{who} joined the run, but no worker there came to compare its plan within {seconds:g} s"
            raise AbsentError(found)
        if absent:
            note(f"waiting for {who}, whose first worker has not come to compare its plan yet")


def _has_come(store: Any, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=max(seconds, LEAST_WAIT_SECONDS)))
    except RuntimeError:  # torch has had several for a time that is over; a lost connection shows in the next call
        return False
    return True


def _ask_all(store: Any, node: int, nodes: int, own: Mapping[str, Any]) -> str:
    """In what the nodes' plans differ, as node 0 finds it; "" if in nothing."""
    if node == 0:
        others = {other: json.loads(store.get(f"plan/{other}")) for other in range(1, nodes)}
        store.set("verdict", _difference(own["common"], others))
    return store.get("verdict").decode()


def _difference(here: Mapping[str, str], others: Mapping[int, Mapping[str, Any]]) -> str:
    """Every difference between plans that are known; "" if there is none. here: node 0's."""
    places = {node: f"node {node} ({there['host']})" for node, there in others.items()} | {0: "node 0"}
    facts = {node: there["common"] for node, there in others.items()} | {0: here}
    known = {places[node]: common for node, common in facts.items() if common}
    return shared_facts.difference_of_all(known)
