"""The nodes of a run compare their plans before they train, over the store with which torchrun has connected them.

The first worker of each node does this. It needs no directory and no secret that the nodes share, and no second port.
A node whose plan is unknown, because its command was pasted without a recorder, is not compared.
"""

import json
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from t5bench import Problem, note
from t5bench.plan import shared_facts

# The recorder's name for what its node's plan has in common with the others' (t5bench/plan/shared_facts.py), as JSON.
COMMON = "T5_COMMON_PLAN"
# How much later than the others a node's first worker may have loaded its libraries.
LATE_SECONDS = 300.0


def compare_plans(environ: Mapping[str, str] = os.environ) -> None:
    """Returns when all nodes have the same plan. Raises Problem if they differ, with one sentence on all nodes."""
    nodes = int(environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes == 1 or environ.get("LOCAL_RANK") != "0":
        return
    node = int(environ["GROUP_RANK"])
    own = {"host": socket.gethostname(), "common": json.loads(environ.get(COMMON, "{}"))}
    try:
        verdict = _ask_all(_store(environ), node, nodes, own)
    except RuntimeError as error:  # torch's, of which the store's are kinds
        note(f"warning: the nodes could not compare their plans: {error}")
        return
    if verdict:
        raise Problem(f"the nodes were started with different settings: {verdict}", shared_facts.REMEDY)


def _store(environ: Mapping[str, str]) -> Any:
    """torchrun's own, which it keeps on node 0. Raises RuntimeError."""
    from torch.distributed import PrefixStore, TCPStore

    seconds = timedelta(seconds=LATE_SECONDS)
    address = environ["MASTER_ADDR"]
    store = TCPStore(address, int(environ["MASTER_PORT"]), is_master=False, wait_for_workers=False, timeout=seconds)
    return PrefixStore("t5bench/plans", store)


def _ask_all(store: Any, node: int, nodes: int, own: Mapping[str, Any]) -> str:
    """In what the nodes' plans differ, as node 0 finds it; "" if in nothing."""
    store.set(f"plan/{node}", json.dumps(own))
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
