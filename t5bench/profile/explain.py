"""Why an iteration takes as long as it does, from a profile of one on all ranks (PROFILE_ITERATION).

The sentence tells the largest parts. A cause is named only where a measurement of that iteration shows it; a node with
slow GPUs and a slow disk show in a record without a profile too.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import cached_property

from t5bench import Problem, note
from t5bench.costmodel import schedule, time
from t5bench.costmodel.job import Job
from t5bench.costmodel.prediction import machine_of
from t5bench.profile import parts as profile
from t5bench.profile.parts import AXES, BUBBLE, DATA, HOST, LOGGING, SENDING, WAITING
from t5bench.profile.rank import BACKWARD, COMPUTING, FORWARD, OWN_WORK, ExplainedRank
from t5bench.profile.record_causes import WORTH_NAMING, Slowdown, of_record
from t5bench.profile.whatif import Gain, WhatIf, calibrated
from t5bench.record.files import PROFILE, RecordError
from t5bench.record.records import load
from t5bench.record.run import Run
from t5bench.record.status import CONFIGURATION, EXIT_CODES

# Waiting for a core is named if either of these is reached.
CONTENDED = 0.25  # of the iteration
ANOTHER_PROGRAM = 0.25  # of a core, which other programs keep busy
# A slowdown has to take this share of the iteration, beyond what the profiled iteration takes more than the others.
CHANCE = 0.05
# How many times as long as another a rank may compute for the same work: cores may share a cache or a clock.
UNEQUAL_CORES = 1.4
SLOW_LINK = 1e9  # bits per second that are few for any cluster
SLOW_STEP_MS = 0.5  # milliseconds that are many
UNEQUAL_STAGES = 1.5  # how many times as long as another a stage may compute
# Python launches an operator in about this time: one that computes no longer gains from larger micro-batches, where
# there are so many for each stage.
SMALL_OPERATOR_MS = 0.015
MANY_MICRO_BATCHES = 4
BEYOND_MODEL = 2.5  # times the cost model's time for its layers: such a stage is slow
LARGER_STAGE = 1.25  # times another stage's work by the cost model: such stages are unequal
GRADIENTS = SENDING[AXES[0]]
PARAMETERS = SENDING[AXES[3]]
# What data-parallel ranks send, in words, and from which stage of ZeRO on for every micro-batch.
SENT = {GRADIENTS: "sending gradients", PARAMETERS: "gathering parameters"}
SENT_EVERY_MICRO_BATCH = {GRADIENTS: 2, PARAMETERS: 3}
NOT_MODELLED = {"slow rank", "slow node", "data loading", "logging", "slow disk", "frequent checkpoints"}


class Explanation:
    """Of a run's profiled iteration. Raises Problem where it has none, RecordError where that is damaged."""

    def __init__(self, run: Run) -> None:
        path = run.directory / PROFILE
        if not os.path.lexists(path):
            remedy = "Train with PROFILE_ITERATION=10, for example: an iteration after the first few"
            raise Problem(f"{run.directory} has no profile", remedy)
        self.content = profile.read_profile(path)
        self.run = run
        self.plan = run.plan
        self.layout = run.layout
        entries = self.content.ranks
        if len(entries) != run.world_size:
            mismatch = f"{path} is of {len(entries)} ranks, but the run has {run.world_size}"
            raise RecordError(f"{mismatch}: it was perhaps resumed with another layout after that iteration")
        self.ranks = [ExplainedRank(entry, self.layout.coordinates(entry.rank).pp) for entry in entries]
        self.cores = {node["host"]: node["cpu"]["cores"] for node in run.nodes if node.get("cpu")}
        # What would be left of the iteration if nobody waited for a core: other causes are shares of that.
        self.unqueued = max(0.1, 1 - max(rank.lost for rank in self.ranks))
        self.rest = min(self.unqueued, self._undisturbed())

    @property
    def _is_on_cpu(self) -> bool:
        """Then it is known what each rank's main thread worked."""
        return any(rank.working for rank in self.ranks)

    def _undisturbed(self) -> float:
        """The share of the iteration that the busiest rank computes and sleeps, or sends at the link's best."""
        if not self._is_on_cpu:
            return 1.0
        busiest = 0.0
        for rank in self.ranks:
            share = rank.working + rank.asleep + rank.alone(DATA) + rank.alone(LOGGING)
            best = self.content.link
            if best:
                links = rank.entry.links.values()
                sending_ms = sum(1000 * link.bytes / best.rate + link.steps * best.latency_ms for link in links)
                share += sending_ms / rank.wall
            busiest = max(busiest, share)
        micro_batches = self.layout.micro_batches
        with_bubble = (micro_batches + self.layout.pp - 1) / micro_batches
        return max(0.05, with_bubble * busiest)

    def _of_rest(self, share: float) -> float:
        """This share of the iteration as one of what would be left of it; 0 where chance may take as much."""
        return share / self.rest if share >= CHANCE else 0.0

    @property
    def _without(self) -> str:
        return ", without waiting for a core" if self.rest <= 1 - WORTH_NAMING else ""

    # ---- the sentence ------------------------------------------------------------------------------------------------

    def sentence(self) -> str:
        """The largest parts, what would make it faster, and what profiling cost."""
        title = self.plan.strategy.title.partition(":")[0].partition(" (")[0]
        if self.run.architecture.family == "gpt":
            title += " of a GPT"
        evaluates = profile.shares(self.content.ranks)[profile.EVALUATING] > 0
        which = "this" if evaluates else "each"
        parts = profile.limits(self.content.ranks, profile.DOING | self._sent())
        parts = parts.replace("% ", f"% of {which} iteration ", 1)
        sentence = f"{title} spends {parts}"
        if self.what_if:
            gain, change = self.what_if
            sentence += f"; {change} would make it {gain:.1f} times as fast"
        if self.content.overhead is not None:
            sentence += f". {self._overhead(self.content.overhead, evaluates)}"
        return sentence

    def _sent(self) -> dict[str, str]:
        """What data-parallel ranks send, and how often."""
        if self.layout.micro_batches == 1:
            return SENT
        gathers_often = self.plan.strategy.has_fsdp2 and self.plan.value("FSDP_KEEP_PARAMETERS", "0") == "0"
        sent = dict(SENT)
        for part, first_stage in SENT_EVERY_MICRO_BATCH.items():
            if gathers_often:
                is_sent_often = part == PARAMETERS  # FSDP2 sends gradients once
            elif part == GRADIENTS and self.plan.value("ZERO_REDUCE_ONCE", "0") == "1":
                is_sent_often = False
            else:
                is_sent_often = self.plan.zero_stage >= first_stage
            if is_sent_often:
                sent[part] += " of every micro-batch"
        return sent

    def _overhead(self, overhead: float, evaluates: bool) -> str:
        """How much longer the profiled iteration took; overhead: as a share of another."""
        profiler = "the profiler and an evaluation" if evaluates else "the profiler"
        difference = f"{abs(overhead):.0%}"
        if difference == "0%":
            took = "as long as"
        else:
            took = f"{difference} {'less' if overhead < 0 else 'more'} time than"
        return f"With {profiler} this iteration took {took} the median of the others"

    # ---- what would make it faster -----------------------------------------------------------------------------------

    @cached_property
    def calibrated(self) -> WhatIf | None:
        """The cost model on a machine like this; None where it does not describe the run."""
        count = len(self.ranks)
        wall = sum(rank.wall for rank in self.ranks) / count
        exposed_share = min(rank.exposed for rank in self.ranks)
        rest = sum(rank.share(WAITING, *OWN_WORK) for rank in self.ranks) / count
        if any(self._link()):
            # Who comes late has waited for the link before, unless it computed for longer than the others.
            idle = [rank.exposed + rank.share(WAITING) for rank in self.ranks]
            exposed_share = min(idle)
            own_work = sum(rank.share(*OWN_WORK) for rank in self.ranks) / count
            rest = sum(idle) / count - exposed_share + own_work
        exposed = exposed_share * wall / 1000
        seconds = (self.content.other_iterations_ms or wall) / 1000
        if exposed >= (1 - rest) * seconds:
            seconds = wall / 1000
        links: list[profile.LinkUse] = []
        for rank in self.ranks:
            links += [link for link in rank.entry.links.values() if link.ms]
        rate = 0.0
        if links:
            rate = 1000 * sum(link.bytes for link in links) / sum(link.ms for link in links)
        return calibrated(self.run, seconds, exposed, rest * seconds, rate)

    @cached_property
    def what_if(self) -> Gain | None:
        """What the cost model says of the largest of the limits that it knows; None where that is nothing."""
        shares = profile.shares(self.content.ranks)
        causes = {cause.name: cause.share for cause in self.causes()}
        limits = {
            "link": sum(shares[part] for part in SENDING.values()),
            "bubble": shares[BUBBLE],
            "host": shares[HOST],
        }
        limit = max(limits, key=lambda name: limits[name])
        others = max(causes.get(name, WORTH_NAMING) for name in NOT_MODELLED)
        if limits[limit] < others or not self.calibrated:
            return None
        if limit == "link" and (self.layout.nnodes > 1 or "slow link" in causes):
            gains = [self.calibrated.faster_link()]
        else:
            gains = [self.calibrated.other_micro_batch()]
            if limit == "bubble":
                gains.append(self._equal_stages())
        return max((gain for gain in gains if gain[0] >= 1 + WORTH_NAMING), default=None)

    def _equal_stages(self) -> Gain:
        """What it would gain if all stages were alike and nobody waited for a core."""
        micro_batches = self.layout.micro_batches
        forward = self._by_stage(*FORWARD)
        backward = self._by_stage(*BACKWARD)
        now = schedule.duration(forward, backward, micro_batches)
        alike = schedule.duration(_evened(forward), _evened(backward), micro_batches)
        return self.unqueued / (self.unqueued - (now - alike)), "equal pipeline stages"

    def _by_stage(self, *parts: str) -> list[float]:
        """The share of an iteration that these parts of a micro-batch take on each stage's busiest rank, without what
        it waits for a core."""
        shares = [1e-3] * self.layout.pp
        for rank in self.ranks:
            shares[rank.stage] = max(shares[rank.stage], rank.share(*parts) * max(1 - rank.lost, 0.1))
        return [share / self.layout.micro_batches for share in shares]

    # ---- the causes --------------------------------------------------------------------------------------------------

    def causes(self) -> list[Slowdown]:
        """Those that are worth naming, what costs most first, each for the rank where it costs most."""
        causes: list[Slowdown] = []
        for rule in (self._own_work, self._processor, self._slow, self._stages, self._link, self._micro_batches):
            causes += [cause for cause in rule() if cause.share >= WORTH_NAMING]
        asleep = max(rank.entry.processor.saving_ms for rank in self.ranks) / 1000
        saving = max(rank.entry.parts.get(profile.SAVING, 0.0) for rank in self.ranks) / 1000
        causes += of_record(self.run, asleep, saving)
        largest = {cause.name: cause for cause in sorted(causes, key=lambda cause: cause.share)}
        if "slow node" in largest:
            largest.pop("slow rank", None)
        return sorted(largest.values(), key=lambda cause: -cause.share)

    def _own_work(self) -> Iterator[Slowdown]:
        for name, part in (("data loading", DATA), ("logging", LOGGING)):
            worst = max(self.ranks, key=lambda rank: rank.alone(part))
            share = self._of_rest(worst.alone(part))
            yield Slowdown(name, share, f"{worst.name} is {profile.DOING[part]} {share:.0%} of the time{self._without}")

    def _processor(self) -> Iterator[Slowdown]:
        for rank in self.ranks:
            if rank.throttled >= WORTH_NAMING:
                text = f"a quota holds {rank.name} back {rank.throttled:.0%} of the time"
                yield Slowdown("throttled CPU", rank.throttled, text)
                continue
            on_node = [other for other in self.ranks if other.entry.host == rank.entry.host]
            others_compute = self._others_compute(rank, on_node)
            if others_compute or rank.queued >= CONTENDED:
                yield self._contention(rank, on_node, others_compute)

    def _others_compute(self, rank: ExplainedRank, on_node: Sequence[ExplainedRank]) -> bool:
        """Whether other programs keep the rank's cores busy."""
        used = rank.entry.processor
        of_ranks = [other.entry.processor for other in on_node]
        if used.cores:
            # OMP_PROC_BIND or taskset may bind the ranks to a few cores; other programs have the others.
            of_ranks = [other for other in of_ranks if set(used.cores).intersection(other.cores)]
        computed_by_ranks = sum(processor.computed_ms for processor in of_ranks)
        return used.machine_ms - computed_by_ranks >= ANOTHER_PROGRAM * rank.wall

    def _contention(self, rank: ExplainedRank, on_node: Sequence[ExplainedRank], others_compute: bool) -> Slowdown:
        """Who has the core that a rank waits for."""
        all_cores = self.cores.get(rank.entry.host, 0)
        bound_to: set[int] = set()
        for other in on_node:
            bound_to.update(other.entry.processor.cores)
        cores = len(bound_to) or all_cores
        processes = len(on_node)
        has_too_many = processes > cores > 0
        # So many processes wait 1 - cores / processes of the time for each other.
        is_own = has_too_many and rank.queued < 1 - cores / processes + WORTH_NAMING
        is_bound = is_own and cores < all_cores
        is_known = rank.entry.processor.machine_ms > 0
        has_too_few = not others_compute and (is_own or is_known)
        if not is_bound and not has_too_few:
            name = "another program on the core"
        elif has_too_many:
            name = "fewer cores than processes"
        else:
            name = "fewer cores than threads"
        text = f"{rank.name} waits for a core {rank.queued:.0%} of the time"
        if is_bound:
            text += f": its node's ranks are bound to {cores} of {all_cores} cores"
        return Slowdown(name, rank.queued, text)

    def _slow(self) -> Iterator[Slowdown]:
        """A node or a rank for all of which the others wait, and neither data, a log line, a checkpoint nor a busy core
        keeps it."""
        suspects = [("slow rank", rank.name, [rank]) for rank in self.ranks]
        per_node = self.layout.nproc_per_node
        for node in range(len(self.ranks) // per_node):
            ranks = self.ranks[node * per_node : (node + 1) * per_node]
            suspects.append(("slow node", f"node {node} ({ranks[0].entry.host})", ranks))
        # What the profiled iteration takes beyond the others does not count, because those do not have it.
        wall = max(rank.wall for rank in self.ranks)
        only_here = max(0.0, 1 - (self.content.other_iterations_ms or wall) / wall)
        for name, called, ranks in suspects:
            others = [rank for rank in self.ranks if rank not in ranks]
            if not others:
                continue
            if self._is_on_cpu:
                share = self._of_rest(min(_works_longer(rank, others) for rank in ranks))
                text = f"{called} spends {share:.0%} of the time more than others on its work{self._without}"
                yield Slowdown(name, share, text)
                continue
            longest = max(other.waits_for(ranks) for other in others)
            if longest > CHANCE + only_here:
                yield Slowdown(name, longest, f"the others wait for {called} {longest:.0%} of the time")

    def _stages(self) -> Iterator[Slowdown]:
        """One that takes longer has more to compute, or is slower than the cost model says of its layers."""
        if self.layout.pp == 1 or not self.run.padded_vocab_size:
            return
        job = Job.of_plan(self.plan, self.run.padded_vocab_size)
        bubble = max(rank.share(BUBBLE) for rank in self.ranks)
        lost = max(rank.lost for rank in self.ranks)
        computing = self._by_stage(*COMPUTING)
        busy = self._by_stage(*COMPUTING, HOST)
        on = machine_of(None, gigabits=1, per_node=1)  # no link matters to what a stage computes
        model = []
        for stage in range(self.layout.pp):
            model.append(sum(way.seconds for way in time.stage_seconds(job, on, stage)))
        beyond_model = [share / seconds for share, seconds in zip(busy, model, strict=True)]
        slowest = beyond_model.index(max(beyond_model))
        slower = max(beyond_model) / min(beyond_model)
        largest = computing.index(max(computing))
        larger = max(computing) / min(computing)
        # The others do not wait for one that is done before them, however long it takes for its layers.
        is_waited_for = slowest == busy.index(max(busy))
        if slower >= BEYOND_MODEL and lost < CONTENDED and is_waited_for:
            text = f"stage {slowest} takes {slower:.1f} times as long as another, for the layers it has"
            yield Slowdown("slow rank", bubble - lost, text)
        elif larger >= UNEQUAL_STAGES and model[largest] >= LARGER_STAGE * min(model):
            gain, _ = self._equal_stages()
            text = f"stage {largest} computes {larger:.1f} times as long as another"
            yield Slowdown("unequal pipeline stages", 1 - 1 / gain, text)

    def _link(self) -> Iterator[Slowdown]:
        """What the messages take on the link at its best: waiting for a core takes longer, but is not the link's."""
        best = self.content.link
        if not best:
            return
        is_narrow = 8 * best.rate < SLOW_LINK
        is_late = best.latency_ms > SLOW_STEP_MS
        if not is_narrow and not is_late:
            return
        ms_per_byte = 1000 / best.rate if is_narrow else 0.0
        ms_per_step = best.latency_ms if is_late else 0.0
        speed = f"{8e-9 * best.rate:.2g} Gbit/s" if is_narrow else f"{best.latency_ms:.1f} ms per message"
        for rank in self.ranks:
            share = 0.0
            for axis, link in rank.entry.links.items():
                sending_ms = ms_per_byte * link.bytes + ms_per_step * link.steps
                share += min(sending_ms / rank.wall, rank.share(SENDING[axis]))
            share /= self.rest
            text = f"the link gives {speed} at best, which costs {rank.name} {share:.0%} of the time{self._without}"
            yield Slowdown("slow link", share, text)

    def _micro_batches(self) -> Iterator[Slowdown]:
        worst = max(self.ranks, key=lambda rank: rank.share(HOST) * (1 - rank.lost))
        count = self.layout.micro_batches
        # Without what it waits for a core meanwhile.
        computing_ms = worst.share(*COMPUTING) * worst.wall * (1 - worst.queued)
        operator_ms = computing_ms / max(1, worst.entry.operators)
        if count < MANY_MICRO_BATCHES * self.layout.pp or operator_ms >= SMALL_OPERATOR_MS:
            return
        share = worst.share(HOST) * (1 - worst.lost) / self.unqueued
        # So small messages would cost no more if they were fewer and larger.
        links = [worst.entry.links.get(axis) for axis in AXES[1:3]]
        steps = sum(link.steps for link in links if link and not link.bytes)
        step_ms = min(self.content.link.latency_ms, SLOW_STEP_MS) if self.content.link else 0.0
        share += steps * step_ms / worst.wall / self.rest
        saved = 1 - self.layout.pp / count  # by micro-batches as large as possible
        size = self.plan.value("MICRO_BATCH_SIZE")
        text = f"{count} micro-batches of {size}, {1000 * operator_ms:.0f} us per operator"
        yield Slowdown("tiny micro-batches", saved * share, text)


def _evened(shares: Sequence[float]) -> list[float]:
    return [sum(shares) / len(shares)] * len(shares)


def _works_longer(rank: ExplainedRank, others: Sequence[ExplainedRank]) -> float:
    """For how much longer than one of the others a rank sleeps, or works for the same layers."""
    of_same_stage = [other.working for other in others if other.stage == rank.stage]
    works = rank.working - UNEQUAL_CORES * min(of_same_stage, default=rank.working)
    return rank.asleep - min(other.asleep for other in others) + max(0.0, works)


def run(arguments: argparse.Namespace) -> int:
    status = 0
    for directory in arguments.runs:
        try:
            explain(load(directory))
        except Problem as problem:
            note(problem.report)
            status = EXIT_CODES[CONFIGURATION]
    return status


def explain(run: Run) -> None:
    """Prints what its profile says, or only its record where that shows a cause. Raises Problem."""
    causes = of_record(run)
    if causes and not os.path.lexists(run.directory / PROFILE):
        print(f"{run.directory} has no profile; its record shows")
    else:
        explanation = Explanation(run)
        causes = explanation.causes()
        print(explanation.sentence())
    for cause in causes:
        print(f"  {cause.name}: {cause.evidence}")
