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
from t5bench_ledger import tables
from t5bench_ledger.changes import ISSUES
from t5bench_ledger.releases import Figure, ReleaseCost
from t5bench_ledger.spans import DATA, releases_in, spans_of

FORMAT = 1
MODES_COUNTED = ("fp32", "bf16", "one micro-batch")
PHASES = ("forward", "backward", "update", "other")
# How many functions of DeepSpeed a change names, those first whose calls changed the most.
MOST_FUNCTIONS = 3
MIB = 1 << 20
# A share of a figure that is worth a row in the first table.
LARGE = 0.05
COUNTED = DATA / "costs.json"
ZERO_1_AND_2 = ("zero1", "zero2")
ZERO_3 = ("zero3", "zero3_offload")
# What is named as an increase: which figures, and from how many times as much on.
FIGURES_NOTED: tuple[Figure, ...] = ("operators", "bytes in collectives")
MATTERS = 1.1
# What people have reported: of which release and strategies, and which release mends it.
REPORTED = {
    ("0.18.5", (*ZERO_1_AND_2, *ZERO_3)): (7885, ""),
    ("0.18.9", ZERO_3): (7885, "mends "),
    ("0.19.0", ZERO_1_AND_2): (7885, "mends "),
    ("0.19.3", ZERO_3): (8148, ""),
}
REPORTS = {
    "deepspeed#7885": "ZeRO-2 is slow: each gradient's hook counts the parameters of the whole graph again",
    "deepspeed#8148": "ZeRO-3 gathers parameters again that it had kept",
}
INTRODUCTION = """# What a release of DeepSpeed costs

One iteration of the native engine (a tiny T5, four micro-batches or one, two processes) under each release, counted on
one process and not timed: operators that PyTorch runs, copies among them, collectives, calls of Python functions of
DeepSpeed, the memory that tensors hold after it, and how much more they hold at its peak. Two runs of a release count
the same. A row says what changed against the release before it in the list; releases that changed nothing have none.
The counts are this tiny model's, with DeepSpeed's JSON of ds_configs/; no other model was counted. What ZeRO-3 gathers
depends on the sizes of the parameters and on `stage3_param_persistence_threshold`. Count your own model before you
choose a release by its costs; launchers say nothing of them.

More operators and more Python calls cost time where a GPU waits for the host: small layers, small micro-batches, fast
GPUs. Collectives and bytes cost time everywhere. A count says nothing of how fast a kernel is.

The peak is the largest sum of the storages that are alive in PyTorch at one time, those of at least 1 KiB. What kernels
and communication libraries allocate for themselves is not in it, nor what an allocator loses between blocks. ZeRO-1 and
ZeRO-2 allocate their bucket anew in every iteration: it has 500 million elements, whatever the model.

Not counted, because a CPU shows neither: on which stream a collective runs (on a CPU DeepSpeed makes no streams), and
copies between host and device (what ZeRO-3 offload moves is on the same device there, and some of its copies are left
out).

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
    def totals(self) -> dict[str, int]:
        """What costs time on a host or a network, in one figure each."""
        collectives = self.counts["collectives"]
        return {
            "operators": sum(self.counts["operators"].values()),
            "copies": sum(self.counts["copies"].values()),
            "collectives": sum(row["count"] for row in collectives),
            "bytes in collectives": sum(row["count"] * row["bytes"] for row in collectives),
            "calls of DeepSpeed's Python": sum(self.counts["deepspeed_calls"].values()),
            "bytes more at the peak": self.counts["peak_bytes"],
        }

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
        found["bytes more at the peak"] = self.counts["peak_bytes"]
        return found


@dataclass(frozen=True)
class CostChange:
    """A figure that a release changed."""

    figure: str
    before: int
    after: int

    @property
    def share(self) -> float:
        """How much it changed, relative to what it was before; 0.1 is 10 % more."""
        return self.after / self.before - 1 if self.before else 1.0

    def __str__(self) -> str:
        if self.figure.startswith("bytes"):
            before, after = (f"{value / MIB:,.2f}" for value in (self.before, self.after))
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


def most_changed(before: Cost, after: Cost) -> str:
    """The functions whose calls changed the most, in words."""
    most = [f"`{change.figure}` {change.before:,} -> {change.after:,}" for change in functions(before, after)]
    return ", ".join(most[:MOST_FUNCTIONS]) or "-"


def reported(after: Cost) -> str:
    for (release, strategies), (issue, verb) in REPORTED.items():
        if after.release == release and after.strategy in strategies:
            return f"{verb}[#{issue}]({ISSUES}/{issue})"
    return tables.NO_REPORT


def large(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The totals that changed by LARGE or more, in words; "" if none did."""
    changed = [change for change in differences(before, after) if abs(change.share) >= LARGE]
    return "; ".join(f"{change} ({change.share:+.0%})" for change in changed)


def large_changes(costs: Sequence[Cost]) -> list[tuple[str, ...]]:
    """A row for each release and strategy that changed a total by LARGE or more, in fp32; the oldest release first."""
    rows = []
    for before, after in pairs(costs):
        changed = large(before.totals, after.totals)
        if after.mode != "fp32" or not changed:
            continue
        releases = f"{before.release} -> {after.release}"
        row = (releases, tables.NAMES[after.strategy], changed, most_changed(before, after), reported(after))
        rows.append((Version(after.release), row))
    return [row for _, row in sorted(rows)]


def markdown(costs: Sequence[Cost], torch: str) -> str:
    parts = [INTRODUCTION, f"Native engine on a CPU, torch {torch}.\n", f"## Changes of {LARGE:.0%} or more, in fp32\n"]
    header = ["releases", "strategy", "what changed", "most changed functions", "reported"]
    parts.append(tables.table(header, large_changes(costs)))
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
        made |= {"totals": cost.totals, "figures": cost.figures} if cost.counts else {"sentence": cost.sentence}
        lines.append(json.dumps(made))
    return f'{{"format": {FORMAT}, "torch": {json.dumps(torch)}, "costs": [\n' + ",\n".join(lines) + "\n]}\n"


def write(data: Path, page: Path, costs: Sequence[Cost], torch: str) -> None:
    """Writes the counts, as JSON, and the page. Raises OSError."""
    ordered = sorted(costs, key=lambda cost: (cost.strategy, cost.mode, Version(cost.release)))
    write_whole(page, markdown(ordered, torch))
    write_whole(data, to_json(ordered, torch))


def read(path: Path = COUNTED) -> list[dict[str, Any]]:
    """The rows of costs.json; none without it. Raises OSError and ValueError."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["costs"]
    return [row for row in rows if "totals" in row]


def increases(rows: Iterable[Mapping[str, Any]]) -> list[ReleaseCost]:
    """Where an iteration costs at least MATTERS times as much as in the release before; modes that agree share one."""
    ways: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        ways.setdefault((row["strategy"], row["mode"]), []).append(row)
    found: dict[tuple[str, ...], ReleaseCost] = {}
    for (strategy, mode), own in ways.items():
        own.sort(key=lambda row: Version(row["release"]))
        for figure in FIGURES_NOTED:
            for increase in increases_of(strategy, figure, {row["release"]: row["totals"][figure] for row in own}):
                key = (strategy, figure, str(increase.times), increase.before, increase.releases)
                found.setdefault(key, increase).modes.append(mode)
    return sorted(found.values(), key=lambda cost: (cost.strategy, Version(first_of(cost.releases)), cost.figure))


def first_of(spans: str) -> str:
    return releases_in(spans, "deepspeed")[0]


def increases_of(strategy: str, figure: Figure, values: Mapping[str, int]) -> list[ReleaseCost]:
    """Of one figure by release, the oldest first. An increase lasts as long as the figure stays as large."""
    found = []
    releases = list(values)
    for number, (before, since) in enumerate(pairwise(releases), 1):
        least = MATTERS * values[before]
        if values[since] < least:
            continue
        times = values[since] / values[before]
        with_it = [since]
        for release in releases[number + 1 :]:
            if values[release] < least:
                break
            with_it.append(release)
        later = releases[number + len(with_it) :]
        reports = [
            f"deepspeed#{issue}"
            for (reported, strategies), (issue, verb) in REPORTED.items()
            if reported == since and strategy in strategies and not verb
        ]
        increase = ReleaseCost(
            strategy=strategy, modes=[], figure=figure, times=round(times, 2 if times < 2 else 1), before=before,
            releases=spans_of(with_it, "deepspeed"), mended_in=later[0] if later else "", upstream=reports,
        )  # fmt: skip
        found.append(increase)
    return found
