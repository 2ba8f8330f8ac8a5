"""What all nodes of a run must have alike, and how a difference is told."""

import hashlib
import os
from collections.abc import Mapping

from t5bench.record.plan import Plan

# How much of two plans is compared and shown: a longer value counts by its checksum.
LONGEST_VALUE = 60
MOST_VALUES = 120
MOST_DIFFERENCES = 3
REMEDY = "Start every node with the same launcher, settings and engine arguments"


def facts_of(plan: Plan) -> dict[str, str]:
    """What the plan has in common with the other nodes of its run, without secrets, as others may see it."""
    from t5bench.record import machine  # a worker, which only compares, need not load it

    shown = machine.hide(plan.common, machine.secrets(os.environ))
    return {name[:LONGEST_VALUE]: _short(value) for name, value in list(shown.items())[:MOST_VALUES]}


def difference(theirs: Mapping[str, str], there: str, ours: Mapping[str, str], here: str) -> str:
    """In which facts two nodes differ, in one clause; empty if in none. there, here: where each is true."""
    different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    clauses = [
        f"{name} is '{theirs.get(name, 'not given')}' {there} and '{ours.get(name, 'not given')}' {here}"
        for name in different[:MOST_DIFFERENCES]
    ]
    more = len(different) - MOST_DIFFERENCES
    return "; ".join(clauses) + (f"; and {more} more" if more > 0 else "")


def difference_of_all(facts: Mapping[str, Mapping[str, str]]) -> str:
    """In which facts several nodes differ, in one clause; empty if in none.

    facts: of each node by its name in the sentence, node 0 last. The value of the fewest comes first: of three nodes,
    the one that is alone is likely the one that was started wrongly.
    """
    clauses = []
    for name in dict.fromkeys(name for common in facts.values() for name in common):
        nodes_by_value: dict[str, list[str]] = {}
        for node, common in facts.items():
            nodes_by_value.setdefault(common.get(name, "not given"), []).append(node)
        if len(nodes_by_value) > 1:
            fewest_first = sorted(nodes_by_value.items(), key=lambda entry: len(entry[1]))
            told = [f"'{value}' on {', '.join(nodes)}" for value, nodes in fewest_first]
            clauses.append(f"{name} is {' and '.join(told)}")
    more = len(clauses) - MOST_DIFFERENCES
    return "; ".join(clauses[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _short(value: str) -> str:
    if len(value) <= LONGEST_VALUE:
        return value
    return f"{value[:30]}... (SHA-256 {hashlib.sha256(value.encode(errors='replace')).hexdigest()[:12]})"
