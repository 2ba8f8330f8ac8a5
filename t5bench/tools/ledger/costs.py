"""``ledger --costs``: what an iteration costs under each release, counted, and where a release changed it.

counts.py counts. A release is compared with the one before it in the list; what differs has a name: which collectives,
how many operators and copies, and which functions of DeepSpeed are called more or less often.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from packaging.version import Version

from t5bench.record.files import write_whole
from t5bench.tools.ledger import tables

FORMAT = 1
MODES_COUNTED = ("fp32", "bf16")
PHASES = ("forward", "backward", "update", "other")
# How many functions of DeepSpeed a change names, those first whose calls changed the most.
MOST_FUNCTIONS = 3
MIB = 1 << 20
INTRODUCTION = """# What a release of DeepSpeed costs

One iteration of the native engine (a tiny T5, four micro-batches, two processes) under each release, counted on one
process and not timed: operators that PyTorch runs, copies among them, collectives, calls of Python functions of
DeepSpeed, and the memory that tensors hold after it. Two runs of a release count the same. A row says what changed
against the release before it in the list; releases that changed nothing have none.

More operators and more Python calls cost time where a GPU waits for the host: small layers, small micro-batches, fast
GPUs. Collectives and bytes cost time everywhere. A count says nothing of how fast a kernel is.

```
python -m t5bench ledger --costs                                     # all releases
python -m t5bench ledger --costs --releases 0.18.4,0.18.5 --strategies zero2
```

"""


@dataclass(frozen=True)
class Cost:
    """What was counted of a release in one way of training."""

    release: str
    strategy: str
    mode: str
    counts: Mapping[str, Any]
    """As counts.py writes them; empty if the release did not train."""
    sentence: str = ""
    """Why not."""

    @property
    def figures(self) -> dict[str, int]:
        """The totals that releases are compared by, by their names."""
        found: dict[str, int] = {}
        for phase in PHASES:
            found[f"operators in {phase}"] = self.counts["operators"].get(phase, 0)
        found["copies"] = sum(self.counts["copies"].values())
        found["bytes copied"] = sum(self.counts["copied_bytes"].values())
        for row in self.counts["collectives"]:
            found[f"{row['kind']}"] = found.get(row["kind"], 0) + row["count"]
            found[f"bytes in {row['kind']}"] = found.get(f"bytes in {row['kind']}", 0) + row["count"] * row["bytes"]
        found["calls of DeepSpeed's Python"] = sum(self.counts["deepspeed_calls"].values())
        found["bytes that tensors hold"] = self.counts["tensor_bytes"]
        return found


@dataclass(frozen=True)
class CostChange:
    """A figure that a release changed."""

    figure: str
    before: int
    after: int

    def __str__(self) -> str:
        if self.figure.startswith("bytes"):
            before, after = (f"{value / MIB:,.3g}" for value in (self.before, self.after))
            return f"MiB {self.figure.removeprefix('bytes ')} {before} -> {after}"
        return f"{self.figure} {self.before:,} -> {self.after:,}"


def differences(before: Mapping[str, int], after: Mapping[str, int]) -> list[CostChange]:
    """What differs, in the order of its names; what one lacks is 0 there."""
    found = []
    for name in dict.fromkeys([*before, *after]):
        change = CostChange(name, before.get(name, 0), after.get(name, 0))
        if change.before != change.after:
            found.append(change)
    return found


def functions(before: Cost, after: Cost) -> list[CostChange]:
    """The functions of DeepSpeed that are called more or less often, those first that changed the most."""
    found = differences(before.counts["deepspeed_calls"], after.counts["deepspeed_calls"])
    return sorted(found, key=lambda change: -abs(change.after - change.before))


def pairs(costs: Iterable[Cost]) -> Iterator[tuple[Cost, Cost]]:
    """Each release that was counted and the one before it, by strategy and mode."""
    ways: dict[tuple[str, str], list[Cost]] = {}
    for cost in costs:
        if cost.counts:
            ways.setdefault((cost.strategy, cost.mode), []).append(cost)
    for own in ways.values():
        own.sort(key=lambda cost: Version(cost.release))
        yield from pairwise(own)


def markdown(costs: Sequence[Cost], torch: str) -> str:
    rows = []
    for before, after in pairs(costs):
        changed = "; ".join(map(str, differences(before.figures, after.figures)))
        if not changed:
            continue
        most = [f"`{change.figure}` {change.before:,} -> {change.after:,}" for change in functions(before, after)]
        named = ", ".join(most[:MOST_FUNCTIONS]) or "-"
        releases = f"{before.release} -> {after.release}"
        rows.append((tables.NAMES[after.strategy], after.mode, releases, changed, named))
    parts = [INTRODUCTION, f"Native engine on a CPU, torch {torch}.\n"]
    parts.append(tables.table(["strategy", "mode", "releases", "what changed", "most changed functions"], rows))
    failed = []
    for cost in costs:
        if not cost.counts:
            failed.append((tables.NAMES[cost.strategy], cost.mode, cost.release, cost.sentence))
    if failed:
        parts.append("## What did not train\n")
        parts.append(tables.table(["strategy", "mode", "release", "why"], failed))
    return "\n".join(parts)


def to_json(costs: Sequence[Cost], torch: str) -> str:
    """Every figure, a line for each release and way of training."""
    lines = []
    for cost in costs:
        made = {"release": cost.release, "strategy": cost.strategy, "mode": cost.mode}
        made |= {"figures": cost.figures} if cost.counts else {"sentence": cost.sentence}
        lines.append(json.dumps(made))
    return f'{{"format": {FORMAT}, "torch": {json.dumps(torch)}, "costs": [\n' + ",\n".join(lines) + "\n]}\n"


def write(directory: Path, costs: Sequence[Cost], torch: str) -> None:
    """Writes release_costs.md and .json. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    ordered = sorted(costs, key=lambda cost: (cost.strategy, cost.mode, Version(cost.release)))
    write_whole(directory / "release_costs.md", markdown(ordered, torch))
    write_whole(directory / "release_costs.json", to_json(ordered, torch))
