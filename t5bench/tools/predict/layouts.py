"""``python -m t5bench layouts``: every layout of a model on a number of GPUs, ranked by predicted time."""

import argparse
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path

from tabulate import tabulate

from t5bench import Problem, note
from t5bench.arguments import at_least
from t5bench.costmodel.job import Architecture, FullySharded, Job, Parallel, Zero, beyond_native
from t5bench.costmodel.layout import balanced_split
from t5bench.costmodel.machine import DEVICES, GIB, Machine
from t5bench.costmodel.prediction import Prediction, with_link
from t5bench.costmodel.presets import NOTES, PRESETS
from t5bench.costmodel.schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE, interleaving_fault
from t5bench.plan.families import FAMILIES
from t5bench.plan.launchers import ALONE, ENGINES
from t5bench.plan.layout import LEAST_INTERLEAVED
from t5bench.plan.planner import plan
from t5bench.record.plan import ROLES, Plan
from t5bench.record.settings import BY_NAME, Integer
from t5bench.tools.predict.command import (
    add_machine,
    device_for,
    host_of,
    link_of,
    range_text,
    settings_left_out,
    settings_of,
    vocabulary_of,
)

TENSOR_SIZES = (1, 2, 4, 8)  # beyond a node the all-reduces of every layer cross the network
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = ("none", "selective", "full")  # the second under 1F1B alone: fused attention leaves it little to save
MOST_AS_FAST = 3.0  # a layout that takes so many times as long is slower whatever the machine is like
FULLEST = 0.95  # of the device's memory; the rest is lost to fragmentation
SHARD_SIZES = (2, 4, 8, 16)  # of HSDP: data-parallel GPUs that share one copy of the states
VIRTUAL_STAGES = 2  # parts of the model on each stage of an interleaved pipeline, as the launchers' default
# What a pipeline's schedule is called in the name of a kind.
PIPELINES = {
    ONE_F_ONE_B: "PP",
    GPIPE: "PP GPipe",
    INTERLEAVED: "PP interleaved",
    ZERO_BUBBLE: "PP zero-bubble",
}
# Settings that choose among the layouts, each of which is ranked; DDP's plan would refuse the first two.
LAYOUT_SETTINGS = (
    "TENSOR_PARALLEL_SIZE",
    "PIPELINE_PARALLEL_SIZE",
    "PIPELINE_SCHEDULE",
    "VIRTUAL_PIPELINE_STAGES",
    "SEQUENCE_PARALLEL",
    "FSDP_SHARD_SIZE",
    "FSDP_KEEP_PARAMETERS",
    "ZERO_REDUCE_ONCE",
)
ZERO = ("zero1", "zero2", "zero3", "zero3_offload")


@dataclass(frozen=True)
class Candidate(Prediction):
    """A layout with its prediction; seconds are infinite if it does not fit."""

    given: Mapping[str, str] = field(default_factory=dict)
    """The settings that a run must have, too."""
    is_launchable: bool = True
    """Whether the launchers' settings can describe the model."""

    @cached_property
    def fits(self) -> bool:
        return self.memory_bytes <= FULLEST * self.machine.device.memory

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
        settings = self._settings()
        settings |= {name: value for name, value in self.given.items() if name not in settings}
        words = [f"{name}={shlex.quote(value)}" for name, value in settings.items() if value]
        launcher = f"bash scripts/run_megatron_t5_{self.strategy}.sh"
        place = "<master-host> <node-rank>" if int(settings["NNODES"]) > 1 else ""
        return " ".join(filter(None, [*words, launcher, place]))

    def _settings(self) -> dict[str, str]:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whole = at_least(1)
    parser.add_argument("--gpus", help="one or more numbers of GPUs: 8,64,512,4096")
    add_machine(parser)
    parser.add_argument("--per-node", type=whole, default=8, help="GPUs per node (default: %(default)s)")
    batch = "samples per iteration (default: GLOBAL_BATCH_SIZE, but at least one per GPU)"
    parser.add_argument("--global-batch", type=whole, help=batch)
    tensor = "rank only this tensor-parallel size (default: TENSOR_PARALLEL_SIZE or TP_SIZE, else 1, 2, 4, 8)"
    parser.add_argument("--tp", type=whole, help=tensor)
    pipeline = "rank only this number of stages (default: PIPELINE_PARALLEL_SIZE or PP_SIZE, else all that fit)"
    parser.add_argument("--pp", type=whole, help=pipeline)
    parser.add_argument(
        "--top",
        type=whole,
        default=8,
        help="rows in the first table before the best of each other kind (default: %(default)s)",
    )
    parser.add_argument("--picture", type=Path, help="plot memory against time: a .svg, .png or .pdf file")
    page = "write the planner as an offline page (default: layouts.html); the other options preset its inputs"
    parser.add_argument("--page", type=Path, nargs="?", const=Path("layouts.html"), metavar="FILE", help=page)


def numbers_of_gpus(text: str) -> list[int]:
    """Raises Problem."""
    words = text.split(",")
    sizes = [int(word) for word in words if word.isdecimal() and int(word)]
    if len(sizes) < len(words):
        raise Problem(f"--gpus must be numbers of GPUs, found '{text}'", "For example: --gpus 8,64,512")
    return sizes


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    with settings_left_out(args.defaults):
        return rank(args)


def rank(args: argparse.Namespace) -> int:
    if args.page:
        from t5bench.tools.predict import page

        if args.network:
            raise Problem("the page has an input for the link's rate, and --network is more", "Give --link instead")
        if args.host:
            raise Problem("the page has no input for a measured host", "Leave out --host")
        start = numbers_of_gpus(args.gpus or "8")[0]
        args.page.write_text(page.text(args, start))
        print(f"Wrote {args.page}; open it in a browser")
        return 0
    if args.model in NOTES:
        note(f"{args.model}: {NOTES[args.model]}")
    sizes = numbers_of_gpus(args.gpus or "")
    if not args.device:
        raise Problem("--device is missing", f"Choose from: {' '.join(DEVICES)}")
    device = device_for(None, args.device)
    tensor = args.tp or asked_size("TENSOR_PARALLEL_SIZE", "TP_SIZE")
    pipeline = args.pp or asked_size("PIPELINE_PARALLEL_SIZE", "PP_SIZE")
    batch = args.global_batch or default_batch()
    model = asked_model(args)
    link = link_of(args.network, args.link, args.latency)
    ranked = {}
    for size in sizes:
        per_node = min(args.per_node, size)
        if size % per_node:
            raise Problem(f"{size} GPUs do not fill nodes of {args.per_node}", "Set --per-node")
        space = Space(
            engines=model.engines,
            gpus=size,
            machine=with_link(device, link, per_node, host_of(args.host)),
            batch=args.global_batch or max(batch, size),
            tensor=tensor,
            pipeline=pipeline,
            given=model.given,
            is_launchable=model.is_launchable,
        )
        ranked[size] = space.ranked()
    if args.json:
        print(json.dumps({size: _json(candidates) for size, candidates in ranked.items()}, indent=2))
    else:
        for size, candidates in ranked.items():
            show(size, candidates, args)
        if len(ranked) > 1:
            print(tabulate(against_the_smallest(ranked), headers="keys", floatfmt=".4g"))
    if args.picture:
        draw(ranked, args.picture, device.memory)
    return 0


def default_batch() -> int:
    """The samples of an iteration that the launchers' setting asks for. Raises Problem."""
    return whole_setting("GLOBAL_BATCH_SIZE") or int(BY_NAME["GLOBAL_BATCH_SIZE"].default)


def whole_setting(name: str) -> int | None:
    """A setting in the environment. Raises Problem if it is not a whole number of at least 1."""
    value = os.environ.get(name, "")
    fault = Integer(1).fault(name, value) if value else None
    if fault:
        raise Problem(*fault)
    return int(value) if value else None


def asked_size(name: str, short_name: str) -> int | None:
    """The only parallel size to try, from the setting or from its name in other projects' scripts; None to try all.

    Raises Problem.
    """
    for asked in (name, short_name):
        size = whole_setting(asked)
        if size:
            note(f"{asked}={size}: only such layouts are ranked; unset it to rank all")
            return size
    return None


@dataclass(frozen=True)
class EngineJob:
    """A model's training in one of the engines."""

    job: Job
    """On one GPU, with DDP."""
    zeros: Sequence[Zero]
    """Of the strategies in ZERO."""


@dataclass(frozen=True)
class AskedModel:
    """The model to rank, with what a run of it needs."""

    engines: Sequence[EngineJob]
    """The environment's ENGINE; both if it names none."""
    given: Mapping[str, str]
    """The settings that a run must have, too."""
    is_launchable: bool
    """Whether the launchers' settings can describe the model."""


def asked_model(args: argparse.Namespace) -> AskedModel:
    """Raises Problem."""
    asked = os.environ.get("ENGINE")
    engines = []
    kept: dict[str, str] = {}
    is_launchable = True
    for engine in [asked] if asked else ENGINES:
        ddp, *zeros = plans_of_one_gpu(args, engine)
        job = Job.of_plan(ddp, vocabulary_of(ddp, args.vocabulary))
        if args.model in PRESETS:
            architecture = PRESETS[args.model]
            is_launchable = replace(job.architecture, padded_vocabulary=architecture.padded_vocabulary) == architecture
            job = replace(job, architecture=architecture)
        kept |= given(ddp)
        engines.append(EngineJob(job, [Zero.of_config(each.ds_config) for each in zeros]))
    # fp16 needs the loss scaling that the native engine lacks; it stays where it was asked for.
    able = [each for each in engines if asked or each.job.engine != "native" or each.job.precision != "fp16"]
    return AskedModel(able, kept, is_launchable)


def plans_of_one_gpu(args: argparse.Namespace, engine: str) -> list[Plan]:
    """The launchers' settings, and those of a preset by its name, as plans of DDP and ZERO for one GPU."""
    one = {"NPROC_PER_NODE": "1", "GLOBAL_BATCH_SIZE": "1", "MICRO_BATCH_SIZE": "1", "ENGINE": engine}
    settings = os.environ | ALONE | one | settings_of(args.model)
    for name in LAYOUT_SETTINGS:
        settings.pop(name, None)
    plans = [plan(settings, strategy) for strategy in ("ddp", *ZERO)]
    for planned in plans:
        if planned.layout is None or (planned.strategy.ds_config and not planned.ds_config):
            wrong = next(obstacle for obstacle in planned.obstacles if obstacle.fatal)
            raise Problem(f"the model's settings are wrong: {wrong.found}", wrong.remedy)
    return plans


def given(planned: Plan) -> dict[str, str]:
    """The settings of the model and its training that are not at their defaults: a run must have them too."""
    return {
        name: one.value
        for name, one in planned.settings.items()
        if not one.is_default and (ROLES[one.role].kept or name == "MODEL_PRESET")
    }


def layouts(
    model: Architecture, gpus: int, per_node: int, tensor: int | None, engine: str, pipeline: int | None = None
) -> Iterator[Parallel]:
    """Sizes that divide the GPUs, the heads of keys and the FFN, and stages that the engine can make of the layers.

    tensor, pipeline: the only sizes to try.
    """
    tensor_sizes = [tensor] if tensor else [size for size in TENSOR_SIZES if size <= per_node]
    for tp in tensor_sizes:
        for pp in [pipeline] if pipeline else range(1, min(model.layers, gpus // tp) + 1):
            if gpus % (tp * pp) or model.kv_heads % tp or model.ffn % tp:
                continue
            if engine == "native" or _divides(model, pp):
                split_rank = _split(model, pp) if engine == "native" else None
                yield Parallel(tp, pp, gpus // (tp * pp), split_rank, devices_per_node=per_node)


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
        candidates = [
            Candidate(job, self.machine, given=self.given, is_launchable=self.is_launchable) for job in self.jobs()
        ]
        if not candidates:
            model = self.engines[0].job.architecture
            asked = f" with TP={self.tensor}" if self.tensor else ""
            asked += f" with PP={self.pipeline}" if self.pipeline else ""
            found = f"no layout of {self.gpus} GPUs{asked} divides the model and a global batch of {self.batch}"
            sizes = f"TP must divide the GPUs, {model.kv_heads} heads of keys and {model.ffn} FFN columns"
            raise Problem(found, f"{sizes}, the data-parallel size the batch (--global-batch)")
        smallest = min(candidates, key=lambda candidate: candidate.memory_bytes)
        if not smallest.fits:
            device = self.machine.device
            takes = f"{smallest.title} takes {smallest.memory_bytes / GIB:.1f} GiB of {device.memory / GIB:.0f}"
            found = f"the model does not fit on {self.gpus} x {device.name}: even {takes}"
            raise Problem(found, "Use more GPUs, or ones with more memory")
        return sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.memory_bytes))


def best_to_run(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest that the launchers can start; if they can start none, the fastest. candidates: sorted by time."""
    for candidate in candidates:
        if candidate.fits and candidate.start:
            return candidate
    return candidates[0]


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


def show(gpus: int, candidates: Sequence[Candidate], args: argparse.Namespace) -> None:
    fitting = [candidate for candidate in candidates if candidate.fits]
    front = pareto(candidates)
    batch = fitting[0].job.global_batch
    gigabits = fitting[0].machine.between.bandwidth * 8 / 1e9
    print(
        f"{gpus} x {args.device}, {gigabits:.4g} Gbit/s a node, global batch {batch}:"
        f" {len(candidates)} layouts, {len(fitting)} fit\n"
    )
    rows = [
        {
            "layout": candidate.title,
            "s/iteration": candidate.seconds,
            "90 %": range_text(candidate.seconds_interval),
            "samples/s": batch / candidate.seconds,
            "TFLOP/s": candidate.tflops,
            "MFU": mfu_text(candidate),
            "GiB": candidate.memory_bytes / GIB,
            "limited by": candidate.limit,
            "front": "*" if candidate in front else "",
            "engine": candidate.job.engine,
            "can run": candidate.missing or "yes",
        }
        for candidate in shown_first(candidates, args.top)
    ]
    print(tabulate(rows, headers="keys", floatfmt=".4g"))
    print(f"\n{not_told_apart(candidates)}")
    print("\nPareto front of memory and time:")
    frontier = [
        {
            "GiB": candidate.memory_bytes / GIB,
            "s/iteration": candidate.seconds,
            "TFLOP/s": candidate.tflops,
            "MFU": mfu_text(candidate),
            "layout": candidate.title,
        }
        for candidate in front
    ]
    print(tabulate(frontier, headers="keys", floatfmt=".4g"))
    print("\nWhy not the others (the best of each):")
    for kind, reason in losers(candidates):
        print(f"  {kind:<24}  {reason}")
    commands = {candidate.kind: candidate.start for candidate in reversed(fitting) if candidate.start}
    print("\nHow to start the best of each kind:")
    for kind, command in sorted(commands.items()):
        print(f"  {kind}\n    {command}")
    fastest = best_to_run(candidates)
    if fastest.start:
        print(f"\nThe fastest that the launchers can start, {fastest.title}:\n  {fastest.start}\n")


def against_the_smallest(ranked: Mapping[int, Sequence[Candidate]]) -> list[dict[str, str | float]]:
    """What more GPUs buy: a row for each number, with the fastest layout to run and its gain on the smallest number."""
    smallest = min(ranked)
    base = best_to_run(ranked[smallest])
    base_rate = base.job.global_batch / base.seconds
    rows: list[dict[str, str | float]] = []
    for gpus, candidates in sorted(ranked.items()):
        best = best_to_run(candidates)
        rate = best.job.global_batch / best.seconds
        gain = rate / base_rate
        rows.append(
            {
                "GPUs": gpus,
                "nodes": gpus // best.machine.devices_per_node,
                "the fastest to run": best.title,
                "batch": best.job.global_batch,
                "samples/s": rate,
                f"against {smallest} GPUs": f"{gain:.2f}x",
                "of that many times": f"{gain * smallest / gpus:.0%}",
            }
        )
    return rows


def mfu_text(candidate: Candidate) -> str:
    """ "" where the GPU's peak in this precision is unknown."""
    return "" if candidate.mfu is None else f"{candidate.mfu:.1%}"


def not_told_apart(candidates: Sequence[Candidate]) -> str:
    """One sentence. candidates: sorted by time."""
    count = len(as_fast(candidates))
    if count == 1:
        return "The fastest is clear: every other layout is surely slower."
    return f"{count} layouts are too close to call: the first, and those that are not surely slower than it."


def draw(ranked: Mapping[int, Sequence[Candidate]], path: Path, memory: int) -> None:
    """A panel for each number of GPUs. memory: bytes of one. Raises Problem for another kind of file."""
    from matplotlib.figure import Figure

    def coordinates(candidates: Iterable[Candidate]) -> tuple[list[float], list[float]]:
        shown = list(candidates)
        return [each.memory_bytes / GIB for each in shown], [each.seconds for each in shown]

    figure = Figure(figsize=(5 * len(ranked), 4), layout="constrained")
    panels = figure.subplots(1, len(ranked), squeeze=False)[0]
    for axes, (gpus, candidates) in zip(panels, ranked.items(), strict=True):
        axes.set(title=f"{gpus} GPUs", yscale="log", xlabel="GiB on the fullest GPU", ylabel="s/iteration")
        fitting = [candidate for candidate in candidates if candidate.fits]
        for kind in dict.fromkeys(candidate.kind for candidate in fitting):
            of_kind = [candidate for candidate in fitting if candidate.kind == kind]
            axes.scatter(*coordinates(of_kind), s=9, label=kind)
        axes.step(*coordinates(pareto(candidates)), "k-", where="post", label="front")
        axes.axvline(memory / GIB, color="grey", linestyle=":")
        axes.legend(fontsize="x-small")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise Problem(f"cannot write the picture {path}: {error}", "Give a .svg, .png or .pdf") from error


def _json(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    front = {id(candidate) for candidate in pareto(candidates)}
    fast = {id(candidate) for candidate in as_fast(candidates)}
    return [
        {
            "name": candidate.title,
            "kind": candidate.kind,
            "memory": candidate.memory_bytes,
            "limit": candidate.limit,
            "missing": candidate.missing,
            "engine": candidate.job.engine,
            "start": candidate.start,
            "mfu": candidate.mfu,
            "tflops": candidate.tflops,
            "seconds": candidate.seconds if candidate.fits else None,
            "seconds_interval": candidate.seconds_interval if candidate.fits else None,
            "memory_interval": candidate.memory_interval,
            "told_from_the_fastest": id(candidate) not in fast,
            "pareto": id(candidate) in front,
            "parallel": asdict(candidate.job.parallel),
            "zero": asdict(candidate.job.zero),
            "micro_batch": candidate.job.micro_batch,
            "recompute": candidate.job.recompute,
        }
        for candidate in candidates
    ]
