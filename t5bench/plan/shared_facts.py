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


def _short(value: str) -> str:
    if len(value) <= LONGEST_VALUE:
        return value
    return f"{value[:30]}... (SHA-256 {hashlib.sha256(value.encode(errors='replace')).hexdigest()[:12]})"
