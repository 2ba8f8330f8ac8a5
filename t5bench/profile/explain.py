"""Why an iteration takes as long as it does, from a profile of one on all ranks (PROFILE_ITERATION).

The sentence tells the largest parts. A cause is named only where a measurement of that iteration shows it; a node with
slow GPUs and a slow disk show in a record without a profile too.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median

from t5bench import Problem, note
from t5bench.compare.statistics import event_within
from t5bench.model import schedule, time
from t5bench.model.job import Job
from t5bench.profile import parts as profile
from t5bench.profile.parts import AXES, BUBBLE, DATA, HOST, LOGGING, SENDING, WAITING
from t5bench.profile.whatif import Gain, WhatIf, calibrated
from t5bench.record.files import PROFILE, RecordError
from t5bench.record.log import evaluation
from t5bench.record.reader import log_lines
from t5bench.record.records import Run, load
from t5bench.record.status import CONFIGURATION, EXIT_CODES

WORTH_NAMING = 0.1  # share of the iteration from which on a cause is named
# A checkpoint that is not slow: seconds that every one takes, and sleeps, and bytes per second that any disk writes.
CHECKPOINT_SECONDS, ASLEEP_SECONDS, DISK = 1.0, 0.1, 100e6
# Share of the iteration from which on waiting for a core is named where other programs keep less than this much of a
# core busy.
CONTENDED, ANOTHER_PROGRAM = 0.25, 0.25
# A slowdown has to take this share of the iteration, beyond what the profiled iteration takes more than the others. And
# how many times as long as another a rank may compute for the same work, for cores that share a cache or a clock.
CHANCE, UNEQUAL_CORES = 0.05, 1.4
# Bits per second that are few for any cluster, and milliseconds that are many; by how much stages may differ.
SLOW_LINK, SLOW_STEP_MS, UNEQUAL_STAGES = 1e9, 0.5, 1.5
# Python launches an operator in about this time: one that computes no longer gains from larger micro-batches, where
# there are so many for each stage.
SMALL_OPERATOR_MS, MANY = 0.015, 4
# How much longer than another a stage has to take for its layers, by the cost model, before it counts as slow; and how
# much more it has to compute, by the model, before stages count as unequal.
BEYOND_MODEL, LARGER_STAGE = 2.5, 1.25
FORWARD, BACKWARD = (profile.FORWARD,), (profile.BACKWARD, profile.RECOMPUTATION)
COMPUTING, OWN_WORK = (*FORWARD, *BACKWARD), (DATA, LOGGING, profile.SAVING, profile.EVALUATING)
SHARED_WORK = (*COMPUTING, profile.STEP, HOST, profile.TRANSFER)
# What data-parallel ranks send, in words; for every micro-batch from this stage of ZeRO on.
SENT = {SENDING[AXES[0]]: ("sending gradients", 2), SENDING[AXES[3]]: ("gathering parameters", 3)}
NOT_MODELLED = {"slow rank", "slow node", "data loading", "logging", "slow disk", "frequent checkpoints"}


@dataclass(frozen=True)
class Cause:
    """What slows a run down; share: of the iteration, what would be gained without it at most."""

    name: str
    share: float
    evidence: str


def of_record(run: Run, asleep: float = 0.0, saving: float = 0.0) -> list[Cause]:
    """asleep: seconds for which a rank sleeps in a checkpoint, which its profile tells; saving: what one took there."""
    found = (*_slow_clocks(run), *_checkpoints(run, asleep, saving))
    return [cause for cause in found if cause.share >= WORTH_NAMING]


def _slow_clocks(run: Run) -> Iterator[Cause]:
    """A node whose GPUs run at lower clocks than those of the other nodes, which wait for it."""
    clocks = {}
    for node, samples in run.samples.items():
        busy = [gpu for sample in samples for gpu in sample["gpus"] if gpu["utilization"]]
        if seen := [gpu["sm_mhz"] for gpu in busy if gpu.get("sm_mhz")]:
            clocks[node] = median(seen)
    if len(clocks) > 1:
        slowest = min(clocks, key=clocks.__getitem__)
        usual = median(clock for node, clock in clocks.items() if node != slowest)
        host = next(node["host"] for node in run.nodes if node["node"] == slowest)
        text = f"GPUs of node {slowest} ({host}) run at {clocks[slowest]:.0f} MHz, the others' at {usual:.0f} MHz"
        yield Cause("slow node", 1 - clocks[slowest] / usual, text)


def _checkpoints(run: Run, asleep: float, saving: float) -> Iterator[Cause]:
    """What saving adds to an iteration: the intervals with a checkpoint against those without, by the engine's own
    clock where there are none. An evaluation comes before the checkpoint of its iteration."""
    every, timed = run.plan.number("SAVE_INTERVAL"), [line for line in run.iterations if line.time]
    if not every or not timed:
        return
    path, with_one, without = run.directory / f"node{run.nodes[-1]['node']}.log", [], []
    lines = log_lines(path) if run.evaluations and path.exists() else ()
    evaluated = {found.iteration: time for _, time, text in lines if (found := evaluation(text))}
    for before, after in pairwise(timed):
        start, end = before.iteration, after.iteration
        begin = max([start, *(number for number in evaluated if start < number < end)])
        seconds = after.time - evaluated.get(begin, before.time)
        if after.begin != before.begin or start < run.plan.number("PROFILE_ITERATION") <= end + 1:
            continue  # until a run was resumed, or a profile was written, any time may pass
        if saved := (end - 1) // every - (begin - 1) // every:
            with_one.append((seconds, end - begin, saved))
        elif not event_within(start, end, run.plan):
            without.append(seconds / (end - start))
    own = median(without or [line.elapsed_ms / 1000 for line in timed])
    each = median([(seconds - iterations * own) / saved for seconds, iterations, saved in with_one] or [saving])
    folders = [folder for folder in (run.directory / "checkpoints").glob("*") if folder.is_dir()]
    size = max((sum(file.stat().st_size for file in folder.rglob("*")) for folder in folders), default=0)
    limits = (each, CHECKPOINT_SECONDS), (asleep, ASLEEP_SECONDS)
    is_slow = size and any(seconds > 2 * (usual + size / DISK) for seconds, usual in limits)
    takes = f"{each:.{1 if each >= 1 else 3}f} s every {f'{every} iterations' if every > 1 else 'iteration'}"
    name, text = "slow disk" if is_slow else "frequent checkpoints", f"saving {size / 1e6:,.0f} MB takes {takes}"
    yield Cause(name, each / (each + every * own), text)


class Rank:
    """A rank's entry in profile.json; queued, throttled, lost, asleep and working are shares of the iteration."""

    def __init__(self, entry: profile.Rank, stage: int) -> None:
        self.entry, self.stage, self.wall = entry, stage, entry.wall_ms
        self.name, used = f"rank {entry.rank} ({entry.host})", entry.processor
        # Several threads together may wait for longer than the iteration takes.
        self.queued, self.throttled = (min(1.0, ms / self.wall) for ms in (used.queued_ms, used.throttled_ms))
        self.lost = max(self.queued, self.throttled)  # who is held back also waits for a core meanwhile
        self.asleep, self.working = used.asleep_ms / self.wall, used.working_ms / self.wall  # known on a CPU
        self.exposed = self.share(BUBBLE, *SENDING.values())

    def share(self, *parts: str) -> float:
        return sum(self.entry.parts.get(part, 0.0) for part in parts) / self.wall

    def alone(self, part: str) -> float:
        """The share that a part takes without waiting for a core, in other iterations too."""
        own = self.entry.parts.get(part, 0.0)
        return min(own, self.entry.processor.alone_ms.get(part, own)) / self.wall

    def waits_for(self, others: Sequence["Rank"]) -> float:
        """For how long, as far as all of these take longer than this one for something that has no name already."""
        waits = sum(self.entry.waited_for.get(other.entry.rank, 0.0) for other in others) / self.wall
        waits -= min(other.beyond(self, OWN_WORK) for other in others)
        return min(waits, *(other.beyond(self, SHARED_WORK) - max(0.0, other.lost - self.lost) for other in others))

    def beyond(self, other: "Rank", parts: Sequence[str]) -> float:
        """How much longer than another it takes for these, where it does."""
        return sum(max(0.0, self.share(part) - other.share(part)) for part in parts)


class Explanation:
    """Of a run's profiled iteration. Raises Problem where it has none, RecordError where that is damaged."""

    def __init__(self, run: Run) -> None:
        place = run.directory / PROFILE
        if not os.path.lexists(place):
            remedy = "Train it with PROFILE_ITERATION, an iteration after the first few"
            raise Problem(f"{run.directory} has no profile of all ranks", remedy)
        self.content = profile.read_profile(place)
        self.run, self.plan, self.layout, entries = run, run.plan, run.layout, self.content.ranks
        if len(entries) != run.world_size:
            found = f"{place} is of {len(entries)} ranks, but the run has {run.world_size}"
            raise RecordError(f"{found}: it was perhaps resumed with another layout after that iteration")
        self.ranks = [Rank(entry, entry.rank * self.layout.pp // run.world_size) for entry in entries]
        self.cores = {node["host"]: node["cpu"]["cores"] for node in run.nodes if node.get("cpu")}
        # What would be left of the iteration if nobody waited for a core: other causes are shares of that.
        self.unqueued = max(0.1, 1 - max(rank.lost for rank in self.ranks))
        self.rest = min(self.unqueued, self._undisturbed())

    def _undisturbed(self) -> float:
        """The share of the iteration that the busiest rank computes and sleeps, or sends at the link's best."""
        if not any(rank.working for rank in self.ranks):
            return 1.0  # of GPUs it is not known
        best, several = self.content.link, (self.layout.micro_batches + self.layout.pp - 1) / self.layout.micro_batches
        found = [rank.working + rank.asleep + rank.alone(DATA) + rank.alone(LOGGING) for rank in self.ranks]
        for rank in self.ranks if best else ():
            sent = [1000 * link.bytes / best.rate + link.steps * best.latency_ms for link in rank.entry.links.values()]
            found[rank.entry.rank] += sum(sent) / rank.wall
        return max(0.05, several * max(found))

    def _of_rest(self, share: float) -> float:
        """This share of the iteration as one of what would be left of it; 0 where chance may take as much."""
        return share / self.rest if share >= CHANCE else 0.0

    @property
    def _without(self) -> str:
        return ", without waiting for a core" if self.rest <= 1 - WORTH_NAMING else ""

    def sentence(self) -> str:
        """The largest parts, what would make it faster, and what profiling cost."""
        name, _, _ = self.plan.strategy.title.partition(":")[0].partition(" (")
        of_gpt = " of a GPT" * (self.run.architecture.family == "gpt")
        every = " of every micro-batch" * (self.layout.micro_batches > 1)
        sent = {part: words + every * (self.plan.zero_stage >= since) for part, (words, since) in SENT.items()}
        evaluates = profile.shares(self.content.ranks)[profile.EVALUATING] > 0
        share = f"% of {'this' if evaluates else 'each'} iteration "
        parts = profile.limits(self.content.ranks, profile.DOING | sent).replace("% ", share, 1)
        said = f"{name}{of_gpt} spends {parts}"
        if self.what_if:
            gain, change = self.what_if
            said += f"; {change} would make it {gain:.1f} times as fast"
        if (cost := self.content.overhead) is not None:
            difference, profiler = f"{abs(cost):.0%}", "the profiler" + " and an evaluation" * evaluates
            took = "as long as" if difference == "0%" else f"{difference} {'less' if cost < 0 else 'more'} time than"
            said += f". With {profiler} this iteration took {took} the median of the others"
        return said

    def causes(self) -> list[Cause]:
        """Those that are worth naming, what costs most first, each for the rank where it costs most."""
        rules = (self._own_work, self._processor, self._slow, self._stages, self._link, self._micro_batches)
        found = [cause for rule in rules for cause in rule() if cause.share >= WORTH_NAMING]
        asleep = max(rank.entry.processor.saving_ms for rank in self.ranks) / 1000
        saving = max(rank.entry.parts.get(profile.SAVING, 0.0) for rank in self.ranks) / 1000
        found += of_record(self.run, asleep, saving)
        most = {cause.name: cause for cause in sorted(found, key=lambda cause: cause.share)}
        if "slow node" in most:
            most.pop("slow rank", None)
        return sorted(most.values(), key=lambda cause: -cause.share)

    @cached_property
    def calibrated(self) -> WhatIf | None:
        """The cost model on a machine like this; None where it does not describe the run."""
        walls = [rank.wall for rank in self.ranks]
        wall, share = sum(walls) / len(walls), min(rank.exposed for rank in self.ranks)
        rest = sum(rank.share(WAITING, *OWN_WORK) for rank in self.ranks) / len(self.ranks)
        if any(self._link()):
            # Who comes late has waited for the link before, unless it computed for longer than the others.
            idle = [rank.exposed + rank.share(WAITING) for rank in self.ranks]
            share = min(idle)
            rest = sum(idle) / len(idle) - share + sum(rank.share(*OWN_WORK) for rank in self.ranks) / len(idle)
        seconds, exposed = (self.content.other_iterations_ms or wall) / 1000, share * wall / 1000
        seconds = seconds if exposed < (1 - rest) * seconds else wall / 1000
        links = [link for rank in self.ranks for link in rank.entry.links.values() if link.ms]
        rate = 1000 * sum(link.bytes for link in links) / sum(link.ms for link in links) if links else 0.0
        return calibrated(self.run, seconds, exposed, rest * seconds, rate)

    @cached_property
    def what_if(self) -> Gain | None:
        """What the cost model says of the largest of the limits that it knows; None where that is nothing."""
        shares, causes = profile.shares(self.content.ranks), {cause.name: cause.share for cause in self.causes()}
        sending = sum(shares[part] for part in SENDING.values())
        limits = {"link": sending, "bubble": shares[BUBBLE], "host": shares[HOST]}
        limit = max(limits, key=limits.__getitem__)
        others = max(causes.get(name, WORTH_NAMING) for name in NOT_MODELLED)
        if limits[limit] < others or not self.calibrated:
            return None
        found = [self.calibrated.other_micro_batch()]
        if limit == "link" and (self.layout.nnodes > 1 or "slow link" in causes):
            found = [self.calibrated.faster_link()]
        elif limit == "bubble":
            found.append(self._equal_stages())
        return max((gain for gain in found if gain[0] >= 1 + WORTH_NAMING), default=None)

    def _equal_stages(self) -> Gain:
        """What it would gain if all stages were alike and nobody waited for a core."""
        count, ways = self.layout.micro_batches, [self._by_stage(*way) for way in (FORWARD, BACKWARD)]
        alike = [[sum(way) / len(way)] * len(way) for way in ways]
        gained = schedule.duration(*ways, count) - schedule.duration(*alike, count)
        return self.unqueued / (self.unqueued - gained), "equal pipeline stages"

    def _by_stage(self, *parts: str) -> list[float]:
        """The share of an iteration that these parts of a micro-batch take on each stage's busiest rank, without what
        it waits for a core."""
        found = [1e-3] * self.layout.pp
        for rank in self.ranks:
            found[rank.stage] = max(found[rank.stage], rank.share(*parts) * max(1 - rank.lost, 0.1))
        return [share / self.layout.micro_batches for share in found]

    def _own_work(self) -> Iterator[Cause]:
        for name, part in (("data loading", DATA), ("logging", LOGGING)):
            worst = max(self.ranks, key=lambda rank: rank.alone(part))
            share = self._of_rest(worst.alone(part))
            yield Cause(name, share, f"{worst.name} is {profile.DOING[part]} {share:.0%} of the time{self._without}")

    def _processor(self) -> Iterator[Cause]:
        for rank in self.ranks:
            used, all_cores = rank.entry.processor, self.cores.get(rank.entry.host, 0)
            neighbours = [other.entry.processor for other in self.ranks if other.entry.host == rank.entry.host]
            # OMP_PROC_BIND or taskset may bind the ranks to a few of them; other programs have the others.
            cores = len(set().union(*(other.cores for other in neighbours))) or all_cores
            sharing = [other for other in neighbours if not used.cores or set(used.cores).intersection(other.cores)]
            computed = sum(other.computed_ms for other in sharing)
            is_others = used.machine_ms - computed >= ANOTHER_PROGRAM * rank.wall
            if rank.throttled >= WORTH_NAMING:
                yield Cause("throttled CPU", rank.throttled, f"a quota holds {rank.name} back {rank.throttled:.0%}")
            elif is_others or rank.queued >= CONTENDED:
                # n processes on c cores wait 1 - c/n of the time for each other.
                is_many = len(neighbours) > cores > 0
                is_own = is_many and rank.queued < 1 - cores / len(neighbours) + WORTH_NAMING
                is_bound = is_own and cores < all_cores
                name = "another program on the core"
                if is_bound or (not is_others and (is_own or used.machine_ms > 0)):
                    name = f"fewer cores than {'processes' if is_many else 'threads'}"
                bound = f": its node's ranks are bound to {cores} of {all_cores} cores" * is_bound
                yield Cause(name, rank.queued, f"{rank.name} waits for a core {rank.queued:.0%} of the time{bound}")

    def _slow(self) -> Iterator[Cause]:
        """A node or a rank for all of which the others wait, and neither data, a log line, a checkpoint nor a busy core
        keeps it."""
        size, wall = self.layout.nproc_per_node, max(rank.wall for rank in self.ranks)
        nodes = [self.ranks[first : first + size] for first in range(0, len(self.ranks), size)]
        suspects = [("slow node", ranks, f"node {node} ({ranks[0].entry.host})") for node, ranks in enumerate(nodes)]
        suspects += [("slow rank", [rank], rank.name) for rank in self.ranks]
        for name, ranks, called in suspects:
            if not (others := [rank for rank in self.ranks if rank not in ranks]):
                continue
            if any(rank.working for rank in self.ranks):
                share = self._of_rest(min(self._beyond(rank, others) for rank in ranks))
                text = f"{called} needs {share:.0%} of the time more than others for its work{self._without}"
                yield Cause(name, share, text)
                continue
            longest = max(other.waits_for(ranks) for other in others)
            # What the profiled iteration takes beyond the others does not count, because those do not have it.
            if longest > CHANCE + max(0.0, 1 - (self.content.other_iterations_ms or wall) / wall):
                yield Cause(name, longest, f"the others wait for {called} {longest:.0%} of the time")

    def _beyond(self, rank: Rank, others: Sequence[Rank]) -> float:
        """For how much longer than one of the others a rank sleeps, or works for the same layers."""
        same = [other.working for other in others if other.stage == rank.stage]
        works = rank.working - UNEQUAL_CORES * min(same, default=rank.working)
        return rank.asleep - min(other.asleep for other in others) + max(0.0, works)

    def _stages(self) -> Iterator[Cause]:
        """One that takes longer has more to compute, or is slower than the cost model says of its layers."""
        if self.layout.pp == 1 or not self.run.padded_vocab_size:
            return
        job, stages = Job.of_plan(self.plan, self.run.padded_vocab_size), range(self.layout.pp)
        share, lost = max(rank.share(BUBBLE) for rank in self.ranks), max(rank.lost for rank in self.ranks)
        times, busy = self._by_stage(*COMPUTING), self._by_stage(*COMPUTING, HOST)
        model = [sum(way.seconds for way in time.stage_seconds(job, time.CPU, stage)) for stage in stages]
        beyond = [own / usual for own, usual in zip(busy, model, strict=True)]
        slower, largest = max(beyond) / min(beyond), times.index(max(times))
        ratio, slowest = max(times) / min(times), beyond.index(max(beyond))
        # The others do not wait for one that is done before them, however long it takes for its layers.
        if slower >= BEYOND_MODEL and lost < CONTENDED and slowest == busy.index(max(busy)):
            text = f"stage {slowest} takes {slower:.1f} times as long for its layers as another"
            yield Cause("slow rank", share - lost, text)
        elif ratio >= UNEQUAL_STAGES and model[largest] >= LARGER_STAGE * min(model):
            saved = 1 - 1 / self._equal_stages()[0]
            yield Cause("unequal pipeline stages", saved, f"stage {largest} computes {ratio:.1f} times as long")

    def _link(self) -> Iterator[Cause]:
        """What the messages take on the link at its best: waiting for a core takes longer, but is not the link's."""
        if not (best := self.content.link):
            return
        per_byte = 1000 / best.rate * (8 * best.rate < SLOW_LINK)
        per_step = best.latency_ms * (best.latency_ms > SLOW_STEP_MS)
        at_best = f"{8e-9 * best.rate:.2g} Gbit/s" if per_byte else f"{best.latency_ms:.1f} ms a step"
        for rank in self.ranks if per_byte or per_step else ():
            takes = {axis: per_byte * link.bytes + per_step * link.steps for axis, link in rank.entry.links.items()}
            share = sum(min(ms / rank.wall, rank.share(SENDING[axis])) for axis, ms in takes.items()) / self.rest
            text = f"messages pass at {at_best} at best, which takes {rank.name} {share:.0%} of the time{self._without}"
            yield Cause("slow link", share, text)

    def _micro_batches(self) -> Iterator[Cause]:
        worst = max(self.ranks, key=lambda rank: rank.share(HOST) * (1 - rank.lost))
        count = self.layout.micro_batches
        # Without what it waits for a core meanwhile.
        mean = worst.share(*COMPUTING) * worst.wall * (1 - worst.queued) / max(1, worst.entry.operators)
        if count >= MANY * self.layout.pp and mean < SMALL_OPERATOR_MS:
            text = f"{count} micro-batches of {self.plan.value('MICRO_BATCH_SIZE')}, {1000 * mean:.0f} us an operator"
            saved = 1 - self.layout.pp / count  # by micro-batches as large as possible
            share = worst.share(HOST) * (1 - worst.lost) / self.unqueued
            # So small messages would cost no more if they were fewer and larger.
            links = [worst.entry.links.get(axis) for axis in AXES[1:3]]
            steps = sum(link.steps for link in links if link and not link.bytes)
            step_ms = min(self.content.link.latency_ms, SLOW_STEP_MS) if self.content.link else 0.0
            share += steps * step_ms / worst.wall / self.rest
            yield Cause("tiny micro-batches", saved * share, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, help="run directories with a profile (PROFILE_ITERATION)")


def run(arguments: argparse.Namespace) -> int:
    status = 0
    for directory in arguments.runs:
        try:
            found = load(directory)
            causes = of_record(found)
            if causes and not os.path.lexists(directory / PROFILE):
                print(f"{directory} has no profile; its record shows")
            else:
                explanation = Explanation(found)
                causes = explanation.causes()
                print(explanation.sentence())
            for cause in causes:
                print(f"  {cause.name}: {cause.evidence}")
        except Problem as problem:
            note(problem.report)
            status = EXIT_CODES[CONFIGURATION]
    return status
