"""What the cluster check found on a node: an entry of its table each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """An entry of the table; a problem makes it red."""

    text: str
    problem: str = ""
    remedy: str = ""
    same: Mapping[str, str] = field(default_factory=dict)
    """What must be equal on all nodes."""


Findings = dict[str, Finding]
Fault = tuple[str, str]  # what is wrong, what to do


def judged(text: str, faults: Sequence[Fault], same: Mapping[str, str] | None = None) -> Finding:
    """A finding with every fault in it, each remedy once."""
    problems = "; ".join(problem for problem, _ in faults)
    remedies = "; ".join(dict.fromkeys(remedy for _, remedy in faults))
    return Finding(text, problems, remedies, same or {})
