"""Every layout of a model on a number of GPUs that the launchers offer, with the settings that start it.

Which is the fastest is predicted (``python -m t5bench layouts``) or measured (``scripts/search.sh``).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from t5bench import Problem
from t5bench.costmodel.job import Architecture, FullySharded, Job, Parallel, Zero, beyond_native
from t5bench.costmodel.layout import balanced_split
from t5bench.costmodel.machine import GIB, Machine
from t5bench.costmodel.memory import SURE
from t5bench.costmodel.prediction import Prediction
from t5bench.costmodel.schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, interleaving_fault
from t5bench.costmodel.ties import TIES, place_in_a_tie
from t5bench.plan.families import FAMILIES
from t5bench.plan.layout import LEAST_INTERLEAVED, has_tensor_size

TENSOR_SIZES = (1, 2, 4, 8)  # beyond a node the all-reduces of every layer cross the network
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = ("none", "selective", "full")  # the second under 1F1B alone: fused attention leaves it little to save
MOST_AS_FAST = 3.0  # a layout that takes so many times as long is slower whatever the machine is like
SHARD_SIZES = (2, 4, 8, 16)  # of HSDP: data-parallel GPUs that share one copy of the states
VIRTUAL_STAGES = 2  # parts of the model on each stage of an interleaved pipeline, as the launchers' default
# What a pipeline's schedule is called in the name of a kind.
PIPELINES = {
    ONE_F_ONE_B: "PP",
    GPIPE: "PP GPipe",
    INTERLEAVED: "PP interleaved",
    ZERO_BUBBLE: "PP zero-bubble",
}


@dataclass(frozen=True)
class Candidate(Prediction):
    """A layout with its prediction; seconds are infinite if it does not fit."""

    given: Mapping[str, str] = field(default_factory=dict)
    """The settings that a run must have, too."""
    is_launchable: bool = True
    """Whether the launchers' settings can describe the model."""

    @cached_property
    def fits(self) -> bool:
        """Whether it rather runs than runs out of memory."""
        return self.chance_to_fit >= 0.5

    @cached_property
    def seconds(self) -> float:
        return self.time.total if self.fits else inf

    @property
    def limit(self) -> str:
        return self.time.limit if self.fits else "memory"

    @cached_property
    def kind(self) -> str:
        job = self.job
        parallel = job.parallel
        parts = []
        if parallel.tensor > 1:
            parts.append("TP + SP" if parallel.sequence_parallel else "TP")
        if parallel.pipeline > 1:
            parts.append(PIPELINES[parallel.schedule])
        states = self._states
        if states:
            parts.append(states)
        return " x ".join(parts) or "DDP"

    @property
    def _states(self) -> str:
        """How data-parallel GPUs divide the states; "" if each has all."""
        zero = self.job.zero
        if self.job.fully_sharded is not None:
            name = "HSDP" if self.job.parallel.shards else "FSDP2"
            return f"{name} kept" if self.job.fully_sharded.keeps_parameters else name
        if not zero.stage:
            return ""
        if zero.offload_parameters:
            return f"ZeRO-{zero.stage} offload"
        return f"ZeRO-{zero.stage} once" if zero.reduce_once else f"ZeRO-{zero.stage}"

    @property
    def strategy(self) -> str:
        """The strategy whose launcher starts it."""
        job = self.job
        parallel = job.parallel
        if job.fully_sharded is not None:
            return "fsdp2"
        if job.zero.stage:
            if parallel.pipeline > 1:
                return "3d"
            offloads = job.zero.offload_parameters and parallel.tensor == 1  # under TP, if the stage's JSON offloads
            return "zero3_offload" if offloads else f"zero{job.zero.stage}"
        if parallel.tensor > 1:
            return "hybrid" if parallel.pipeline > 1 else "tensor"
        return "pipeline" if parallel.pipeline > 1 else "ddp"

    @property
    def title(self) -> str:
        job = self.job
        title = f"{self.kind} {job.parallel}, micro-batch {job.micro_batch}"
        if job.parallel.shards:
            title = f"{title}, shards of {job.parallel.shards}"
        return title if job.recompute == "none" else f"{title}, recompute {job.recompute}"

    @property
    def missing(self) -> str:
        """Why this harness cannot run it; "" if it can."""
        if not self.is_launchable:
            return "no: --model"
        return "" if self.start else "no: ZeRO with PP"

    @cached_property
    def start(self) -> str:
        """The command that starts it on each node; "" if this harness cannot run it."""
        if not self.is_launchable:
            return ""
        if self.job.parallel.deepspeed and self.job.architecture.cross_attention:
            return ""  # DeepSpeed's pipeline has no encoder-decoder
        settings = self.settings()
        words = [f"{name}={shlex.quote(value)}" for name, value in settings.items() if value]
        # An empty one is chosen, too: PRECISION_FLAG='' is fp32.
        words += [f"{name}={shlex.quote(value)}" for name, value in self.given.items() if name not in settings]
        launcher = f"bash scripts/run_megatron_t5_{self.strategy}.sh"
        place = "<master-host> <node-rank>" if int(settings["NNODES"]) > 1 else ""
        return " ".join(filter(None, [*words, launcher, place]))

    @property
    def count_of_settings(self) -> int:
        """How many settings its command has."""
        return len([value for value in self.settings().values() if value])

    def settings(self) -> dict[str, str]:
        """The settings that describe the layout; an empty one stays at its default."""
        job = self.job
        parallel = job.parallel
        strategy = self.strategy
        sharded = job.fully_sharded
        keeps_parameters = sharded is not None and sharded.keeps_parameters
        is_interleaved = parallel.schedule == INTERLEAVED

        def size(value: int) -> str:
            """A parallel size of 1 is every launcher's default but 3D's."""
            return str(value) if value > 1 or strategy == "3d" else ""

        return {
            "MODEL_FAMILY": "" if job.architecture.family == "t5" else job.architecture.family,
            "NNODES": str(parallel.world // parallel.devices_per_node),
            "NPROC_PER_NODE": str(parallel.devices_per_node),
            "GLOBAL_BATCH_SIZE": str(job.global_batch),
            "MICRO_BATCH_SIZE": str(job.micro_batch),
            "TENSOR_PARALLEL_SIZE": size(parallel.tensor),
            "PIPELINE_PARALLEL_SIZE": size(parallel.pipeline),
            "PIPELINE_SCHEDULE": "" if parallel.schedule == ONE_F_ONE_B else parallel.schedule,
            "VIRTUAL_PIPELINE_STAGES": str(parallel.virtual_stages) if is_interleaved else "",
            "SEQUENCE_PARALLEL": "1" if parallel.sequence_parallel else "",
            "FSDP_SHARD_SIZE": str(parallel.shards) if parallel.shards else "",
            "FSDP_KEEP_PARAMETERS": "1" if keeps_parameters else "",
            "ZERO_REDUCE_ONCE": "1" if job.zero.reduce_once else "",
            "RECOMPUTE": "" if job.recompute == "none" else job.recompute,
            "ENGINE": "" if job.engine == "megatron" else job.engine,
        }


@dataclass(frozen=True)
class EngineJob:
    """A model's training in one of the engines."""

    job: Job
    """On one GPU, with DDP."""
    zeros: Sequence[Zero]
    """Of the strategies in ZERO."""
    takes_its_file: bool = False
    """Whether its launchers train the model by its config.json, in the setting MODEL."""


def layouts(
    model: Architecture, gpus: int, per_node: int, tensor: int | None, engine: str, pipeline: int | None = None
) -> Iterator[Parallel]:
    """Sizes that divide the GPUs and each layer, and stages that the engine can make of the layers.

    tensor, pipeline: the only sizes to try.
    """
    tensor_sizes = [tensor] if tensor else [size for size in TENSOR_SIZES if size <= per_node]
    for tp in tensor_sizes:
        for pp in [pipeline] if pipeline else range(1, min(model.layers, gpus // tp) + 1):
            if gpus % (tp * pp) or not divides_layers(model, tp, engine):
                continue
            if engine == "native" or _divides(model, pp):
                split_rank = _split(model, pp) if engine == "native" else None
                yield Parallel(tp, pp, gpus // (tp * pp), split_rank, devices_per_node=per_node)


def divides_layers(model: Architecture, tensor: int, engine: str) -> bool:
    """Whether tensor-parallel ranks get equal parts of a layer: of its heads of keys and its FFN.

    Where the native engine has queries apart from keys, ranks may be more than groups of heads, and share keys.
    """
    if engine == "native" and model.keys_apart:
        return has_tensor_size(tensor, model.heads, model.kv_heads, model.ffn)
    return model.kv_heads % tensor == 0 and model.ffn % tensor == 0


def _split(model: Architecture, pp: int) -> int | None:
    """The decoder's first stage as the native engine's launchers choose it, before they know the data's vocabulary."""
    if pp == 1 or not model.cross_attention:
        return None
    return balanced_split(replace(model, padded_vocabulary=FAMILIES[model.family].vocabulary), pp)


def _divides(model: Architecture, pp: int) -> bool:
    """Whether Megatron-DeepSpeed can make the stages: each stack gets half of them, with equally many layers."""
    if model.cross_attention and pp > 1:
        half, rest = divmod(pp, 2)
        return rest == 0 and model.encoder_layers % half == 0 and model.decoder_layers % half == 0
    return model.layers % pp == 0


def strategies(job: Job, zeros: Sequence[Zero]) -> Iterator[Job]:
    """Every strategy of the job's engine in the job's layout, which has neither ZeRO nor FSDP2.

    zeros: of the strategies in ZERO.
    """
    parallel = job.parallel
    is_native = job.engine == "native"
    if is_native and beyond_native(parallel.tensor, parallel.pipeline, False, job.micro_batches):
        return
    yield from _undivided(job)
    if parallel.data == 1:
        return
    if is_native:
        if parallel.pipeline > 1:
            return
        yield from _fully_sharded(job)
        if parallel.tensor > 1:
            return
    if parallel.pipeline > 1:
        stages = 1  # DeepSpeed has no stage 2 or 3 in pipelines
    elif parallel.tensor > 1:
        stages = 3  # offload goes without tensor parallelism
    else:
        stages = 4
    for zero in zeros[:stages]:
        yield replace(job, zero=zero, parallel=replace(parallel, deepspeed=parallel.pipeline > 1))
        if is_native and zero.stage > 1 and not zero.offload_parameters and job.micro_batches > 1:
            yield replace(job, zero=replace(zero, reduce_once=True))


def _undivided(job: Job) -> Iterator[Job]:
    """Pipeline schedules and sequence parallelism, with the states whole on every data-parallel GPU."""
    parallel = job.parallel
    model = job.architecture
    is_native = job.engine == "native"
    lengths = (model.encoder_length, model.decoder_length)
    divides_tokens = is_native and parallel.tensor > 1 and all(length % parallel.tensor == 0 for length in lengths)
    schedules = [parallel]
    if parallel.pipeline > 1:
        if is_native:
            schedules.append(replace(parallel, schedule=GPIPE))
        if _interleaves(job):
            chunks = VIRTUAL_STAGES * parallel.pipeline
            split_rank = _split(model, chunks) if is_native else None
            interleaved = replace(parallel, schedule=INTERLEAVED, virtual_stages=VIRTUAL_STAGES, split_rank=split_rank)
            schedules.append(interleaved)
    for schedule in schedules:
        yield replace(job, parallel=schedule)
        if divides_tokens:
            yield replace(job, parallel=replace(schedule, sequence_parallel=True))
    if parallel.pipeline > 1 and is_native:
        yield replace(job, parallel=replace(parallel, schedule=ZERO_BUBBLE))  # not with sequence parallelism


def _interleaves(job: Job) -> bool:
    """Whether the engine can follow the interleaved schedule, with VIRTUAL_STAGES on each stage."""
    stages = job.parallel.pipeline
    layers = job.architecture.layers
    chunks = VIRTUAL_STAGES * stages
    if chunks > layers or interleaving_fault(stages, job.micro_batches):
        return False
    if job.engine == "native":
        return True
    return not job.architecture.cross_attention and stages >= LEAST_INTERLEAVED and layers % chunks == 0


def _fully_sharded(job: Job) -> Iterator[Job]:
    """FSDP2 over all data-parallel GPUs and over groups of them."""
    data = job.parallel.data
    for shards in (0, *SHARD_SIZES):
        if shards and (shards >= data or data % shards):
            continue
        parallel = replace(job.parallel, shards=shards)
        for keeps_parameters in (False, True):
            yield replace(job, parallel=parallel, fully_sharded=FullySharded(keeps_parameters))


@dataclass(frozen=True)
class Space:
    """The layouts of a job on a number of GPUs."""

    engines: Sequence[EngineJob]
    gpus: int
    machine: Machine
    batch: int
    """Samples of an iteration."""
    tensor: int | None = None
    """The only tensor-parallel size to try."""
    given: Mapping[str, str] = field(default_factory=dict)
    """The settings that a run must have, too."""
    is_launchable: bool = True
    """Whether the launchers' settings can describe the model."""
    pipeline: int | None = None
    """The only number of pipeline stages to try."""
    backend: str = "nccl"

    def jobs(self) -> Iterator[Job]:
        per_node = self.machine.devices_per_node
        for engine in self.engines:
            job = engine.job
            for parallel in layouts(job.architecture, self.gpus, per_node, self.tensor, job.engine, self.pipeline):
                for micro_batch in MICRO_BATCHES:
                    if self.batch % (micro_batch * parallel.data):
                        continue
                    plain = replace(job, parallel=parallel, micro_batch=micro_batch, global_batch=self.batch)
                    for strategy in strategies(plain, engine.zeros):
                        for recompute in RECOMPUTE:
                            if recompute != "selective" or strategy.parallel.schedule == ONE_F_ONE_B:
                                yield replace(strategy, recompute=recompute)

    def ranked(self) -> list[Candidate]:
        """Every layout, the fastest first. Raises Problem if no layout divides the model or none fits."""
        is_launchable = {each.job.engine: self.is_launchable or each.takes_its_file for each in self.engines}
        candidates = [
            Candidate(job, self.machine, self.backend, given=self.given, is_launchable=is_launchable[job.engine])
            for job in self.jobs()
        ]
        if not candidates:
            model = self.engines[0].job.architecture
            asked = f" with TP={self.tensor}" if self.tensor else ""
            asked += f" with PP={self.pipeline}" if self.pipeline else ""
            found = f"no layout of {self.gpus} GPUs{asked} divides the model and a global batch of {self.batch}"
            groups = f"{model.kv_heads} heads of keys"
            if model.keys_apart:
                groups += " (or be a multiple of these that divides those of queries)"
            sizes = f"TP must divide the GPUs, {groups} and {model.ffn} FFN columns"
            raise Problem(found, f"{sizes}, the data-parallel size the batch (--global-batch)")
        smallest = min(candidates, key=lambda candidate: candidate.memory_bytes)
        if not smallest.fits:
            device = self.machine.device
            takes = f"{smallest.title} takes {smallest.memory_bytes / GIB:.1f} GiB of {device.memory / GIB:.0f}"
            found = f"the model does not fit on {self.gpus} x {device.name}: even {takes}"
            raise Problem(found, "Use more GPUs, or ones with more memory")
        return sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.memory_bytes))


def best_to_run(candidates: Sequence[Candidate]) -> Candidate:
    """Of those that fit and that the launchers can start, the fastest, where the risk to run out of memory counts as
    time; if there is none, the first. candidates: sorted by time.
    """
    startable = [candidate for candidate in candidates if candidate.fits and candidate.start]
    return min(startable, key=lambda candidate: candidate.seconds_at_risk, default=candidates[0])


def one_to_run(candidates: Sequence[Candidate]) -> Candidate:
    """Of the layouts that are not surely slower than the fastest, that surely fit and that the launchers can start, the
    one that TIES names; if there is none, the best to run. candidates: sorted by time."""
    equal = startable_ties(candidates)
    if not equal:
        return best_to_run(candidates)
    return first_of_ties(equal)


def first_of_ties(equal: Sequence[Candidate]) -> Candidate:
    """The one that TIES names, of layouts that cannot be told apart."""
    return min(equal, key=lambda each: place_in_a_tie(each.memory_bytes, each.count_of_settings, each.seconds))


def startable_ties(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of the layouts that cannot be told from the fastest, those that surely fit and that the launchers can start."""
    return [candidate for candidate in as_fast(candidates) if candidate.start and candidate.chance_to_fit >= SURE]


def which_to_run(candidates: Sequence[Candidate]) -> str:
    """What one_to_run() is, and why, without a full stop. candidates: sorted by time."""
    chosen = one_to_run(candidates)
    about = f"{chosen.title}, {chosen.memory_bytes / GIB:.3g} GiB, predicted to take {chosen.seconds:.3g} s"
    if not startable_ties(candidates):
        return f"The first in the ranking that the launchers can start: {about}"
    count = len(as_fast(candidates))
    if count == 1:
        return f"The fastest: {about}"
    return f"Of the {count} that are too close to call, take the one with {TIES}: {about}"


def shown_first(candidates: Sequence[Candidate], top: int) -> list[Candidate]:
    """The fastest `top` that fit, and the best of each kind that is not among them. candidates: sorted by time."""
    shown = [candidate for candidate in candidates if candidate.fits]
    kinds: list[str] = []
    found: list[Candidate] = []
    for place, candidate in enumerate(shown):
        if place < top or candidate.kind not in kinds:
            found.append(candidate)
        kinds.append(candidate.kind)
    return found


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other beats in both time and memory, from candidates sorted by time."""
    front: list[Candidate] = []
    for entry in candidates:
        if entry.fits and (not front or entry.memory_bytes < front[-1].memory_bytes):
            front.append(entry)
    return front


def is_as_fast(candidate: Candidate, fastest: Candidate) -> bool:
    """Whether it is not surely slower than the fastest."""
    if not candidate.fits or candidate.seconds > MOST_AS_FAST * fastest.seconds:
        return False
    return not candidate.surely_slower_than(fastest)


def as_fast(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest and those that cannot be told from it. candidates: sorted by time."""
    return [candidate for candidate in candidates if is_as_fast(candidate, candidates[0])]


def losers(candidates: Sequence[Candidate]) -> Iterator[tuple[str, str]]:
    """The best of each other kind: (kind, why it is not the winner, and its layout)."""
    winner = candidates[0]
    best_of_kind: dict[str, Candidate] = {}
    for candidate in candidates:  # the fastest, or of those that do not fit the smallest, comes first
        best_of_kind.setdefault(candidate.kind, candidate)
    for kind, best in best_of_kind.items():
        if kind != winner.kind:
            untold = " (too close to call)" if is_as_fast(best, winner) else ""
            yield kind, f"{_loss(best, winner)}: {best.title}{untold}"


def _loss(best: Candidate, winner: Candidate) -> str:
    """Why a layout is not the winner: what of its iteration takes longer by the most."""
    if not best.fits:
        return f"does not fit: needs at least {best.memory_bytes / GIB:.1f} GiB"
    more = {part: seconds - winner.time.parts[part] for part, seconds in best.time.parts.items()}
    largest = max(more, key=lambda part: more[part])
    reason = f", mainly more {largest} time" if more[largest] > 0 else ""
    return f"{best.seconds / winner.seconds:.2f}x the time{reason}"


def not_told_apart(candidates: Sequence[Candidate]) -> str:
    """One sentence. candidates: sorted by time."""
    count = len(as_fast(candidates))
    if count == 1:
        return "The fastest is clear: every other layout is surely slower."
    return f"{count} layouts are too close to call: the first, and those that are not surely slower than it."
