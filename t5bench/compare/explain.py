"""Why an iteration takes as long as it does, from a profile of one on all ranks (PROFILE_ITERATION).

The sentence tells the largest parts. A cause is named only where a measurement of that iteration shows it.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.record import profile
from t5bench.record.files import PROFILE
from t5bench.record.profile import BACKWARD, BUBBLE, DATA, FORWARD, HOST, LOGGING, RECOMPUTATION, SENDING
from t5bench.record.records import Run, load

# Shares of the iteration from which on a cause is named.
WORTH_NAMING, CONTENDED = 0.1, 0.25
# Bits per second that are few for any cluster; and by how much the computing of stages may differ.
SLOW_LINK, UNEQUAL_STAGES = 1e9, 1.5
# Python launches an operator in about this time: one that computes no longer gains from larger micro-batches.
SMALL_OPERATOR_MS = 0.015
COMPUTING = (FORWARD, BACKWARD, RECOMPUTATION)


@dataclass(frozen=True)
class Cause:
    """What slows a run down; share: of the iteration, what would be gained without it at most."""

    name: str
    share: float
    evidence: str


class Rank:
    """A rank's entry in profile.json."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry, self.wall = entry, entry["wall_ms"]
        self.number, self.host = entry["rank"], entry["host"]
        self.name = f"rank {self.number} ({self.host})"
        lost = (entry["processor"][key] / self.wall for key in ("queued_ms", "throttled_ms"))
        self.queued, self.throttled = (min(1.0, share) for share in lost)  # a quota's time is all processors' together
        self.computing = self.share(*COMPUTING) * self.wall

    def share(self, *parts: str) -> float:
        return sum(self.entry["parts"].get(part, 0.0) for part in parts) / self.wall

    def waited_for(self, other: "Rank") -> float:
        return self.entry["waited_for"].get(str(other.number), 0.0) / self.wall


class Explanation:
    """Of a run's profiled iteration. Raises Problem where the run has no profile of all ranks."""

    def __init__(self, run: Run) -> None:
        try:
            self.content = json.loads((run.directory / PROFILE).read_text())
            self.ranks = [Rank(entry) for entry in self.content["ranks"]]
        except (OSError, ValueError, LookupError) as error:
            remedy = "Train it with PROFILE_ITERATION, an iteration after the first few"
            raise Problem(f"{run.directory} has no profile of all ranks", remedy) from error
        self.plan, self.layout = run.plan, run.plan.layout
        self.cores = {node["host"]: node["cpu"]["cores"] for node in run.nodes if node.get("cpu")}

    def sentence(self) -> str:
        """The largest parts, and what profiling cost."""
        cost = self.content["overhead"]
        more = "" if cost is None else f". Profiling changed its time by {cost:+.0%} of the others' median"
        return f"{self.plan.strategy.name} spends of each iteration {profile.limits(self.content)}{more}"

    def causes(self) -> list[Cause]:
        """Those that are worth naming, what costs most first, each for the rank where it costs most."""
        rules = (self._own_work, self._processor, self._slow_rank, self._stages, self._link, self._micro_batches)
        found = [cause for rule in rules for cause in rule() if cause.share >= WORTH_NAMING]
        most = {cause.name: cause for cause in sorted(found, key=lambda cause: cause.share)}
        return sorted(most.values(), key=lambda cause: -cause.share)

    def _own_work(self) -> Iterator[Cause]:
        every = self.plan.number("LOG_INTERVAL")
        for name, part, times in (("data loading", DATA, 1), ("logging", LOGGING, every)):
            worst = max(self.ranks, key=lambda rank: rank.share(part))
            share = worst.share(part) / times
            yield Cause(name, share, f"{worst.name} is {profile.DOING[part]} {share:.0%} of the time")

    def _processor(self) -> Iterator[Cause]:
        for rank in self.ranks:
            neighbours, cores = [r for r in self.ranks if r.host == rank.host], self.cores.get(rank.host, 0)
            if rank.throttled >= WORTH_NAMING:
                yield Cause("throttled CPU", rank.throttled, f"a quota holds {rank.name} back {rank.throttled:.0%}")
            elif rank.queued >= CONTENDED:
                # n processes on c cores wait 1 - c/n of the time for each other.
                is_own = len(neighbours) > cores > 0 and rank.queued < 1 - cores / len(neighbours) + WORTH_NAMING
                name = "fewer cores than processes" if is_own else "another program on the core"
                yield Cause(name, rank.queued, f"{rank.name} waits for a core {rank.queued:.0%} of the time")

    def _slow_rank(self) -> Iterator[Cause]:
        """Others wait for it, and neither data, its log nor a busy core keeps it."""
        for rank in self.ranks:
            longest = max((other.waited_for(rank) for other in self.ranks), default=0.0)
            share = longest - rank.share(DATA, LOGGING) - rank.queued - rank.throttled
            yield Cause("slow rank", share, f"the others wait for {rank.name} {longest:.0%} of the time")

    def _stages(self) -> Iterator[Cause]:
        size = len(self.ranks) // self.layout.pp
        times = [max(rank.computing for rank in self.ranks[at : at + size]) for at in range(0, len(self.ranks), size)]
        ratio = max(times) / max(min(times), 1e-3)
        if ratio >= UNEQUAL_STAGES and len(times) > 1:
            share, slowest = max(rank.share(BUBBLE) for rank in self.ranks), times.index(max(times))
            yield Cause("unequal pipeline stages", share, f"stage {slowest} computes {ratio:.1f} times as long")

    def _link(self) -> Iterator[Cause]:
        """What waiting for a core may have cost does not count as the link's."""
        lost = max(rank.queued + rank.throttled for rank in self.ranks)
        for rank in self.ranks:
            for axis, link in rank.entry["links"].items():
                milliseconds = link["ms"] - lost * rank.wall
                if milliseconds > 0 and (speed := 8000 * link["bytes"] / milliseconds) < SLOW_LINK:
                    text = f"{axis} messages of {rank.name} pass at {speed / 1e9:.2g} Gbit/s"
                    yield Cause("slow link", rank.share(SENDING[axis]) - lost, text)

    def _micro_batches(self) -> Iterator[Cause]:
        worst, count = max(self.ranks, key=lambda rank: rank.share(HOST)), self.layout.micro_batches
        mean = worst.computing / max(1, worst.entry["operators"])
        if count > self.layout.pp and mean < SMALL_OPERATOR_MS:
            text = f"{count} micro-batches of {self.plan.value('MICRO_BATCH_SIZE')}, {1000 * mean:.0f} us an operator"
            yield Cause("tiny micro-batches", worst.share(HOST), text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="run directories with a profile (PROFILE_ITERATION)")


def run(arguments: argparse.Namespace) -> int:
    for directory in arguments.runs:
        explanation = Explanation(load(directory))
        print(explanation.sentence())
        for cause in explanation.causes():
            print(f"  {cause.name}: {cause.evidence}")
    return 0
