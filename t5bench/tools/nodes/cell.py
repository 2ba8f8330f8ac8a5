"""A node's entry in the table of the cluster check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """A problem makes it red."""

    text: str
    problem: str = ""
    remedy: str = ""
    same: Mapping[str, str] = field(default_factory=dict)
    """What must be equal on all nodes."""


Cells = dict[str, Cell]
Fault = tuple[str, str]  # what is wrong, what to do


def judged(text: str, faults: Sequence[Fault], same: Mapping[str, str] | None = None) -> Cell:
    """A cell with every fault in it, each remedy once."""
    problems = "; ".join(problem for problem, _ in faults)
    remedies = "; ".join(dict.fromkeys(remedy for _, remedy in faults))
    return Cell(text, problems, remedies, same or {})
