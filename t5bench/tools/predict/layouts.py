"""``python -m t5bench layouts``: every layout of a model on a number of GPUs, ranked by predicted time."""

import argparse
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf
from pathlib import Path

from tabulate import tabulate

from t5bench import Problem, note
from t5bench.arguments import at_least
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero, beyond_native
from t5bench.costmodel.layout import balanced_split
from t5bench.costmodel.machine import DEVICES, GIB, Machine
from t5bench.costmodel.prediction import Prediction, with_link
from t5bench.costmodel.presets import NOTES, PRESETS
from t5bench.plan.families import FAMILIES
from t5bench.plan.launchers import ALONE
from t5bench.plan.planner import plan
from t5bench.record.plan import ROLES, Plan
from t5bench.record.settings import BY_NAME, Whole
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
RECOMPUTE = ("none", "selective", "full")
MOST_AS_FAST = 3.0  # a layout that takes so many times as long is slower whatever the machine is like
FULLEST = 0.95  # of the device's memory; the rest is lost to fragmentation
# The strategy whose launcher starts a kind of layout.
STRATEGIES = {
    "DDP": "ddp",
    "TP": "tensor",
    "PP": "pipeline",
    "TP x PP": "hybrid",
    "ZeRO-1": "zero1",
    "ZeRO-2": "zero2",
    "ZeRO-3": "zero3",
    "ZeRO-3 offload": "zero3_offload",
    "TP x ZeRO-1": "zero1",
    "TP x ZeRO-2": "zero2",
    "TP x ZeRO-3": "zero3",
    "TP x ZeRO-3 offload": "zero3",  # if its JSON offloads
    "PP x ZeRO-1": "3d",
    "TP x PP x ZeRO-1": "3d",
}
# Settings that choose among the layouts; DDP's plan would refuse them.
LAYOUT_SETTINGS = ("TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE")
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
        zero = self.job.zero
        parts = []
        if self.job.parallel.tensor > 1:
            parts.append("TP")
        if self.job.parallel.pipeline > 1:
            parts.append("PP")
        if zero.offload_parameters:
            parts.append(f"ZeRO-{zero.stage} offload")
        elif zero.stage > 0:
            parts.append(f"ZeRO-{zero.stage}")
        return " x ".join(parts) or "DDP"

    @property
    def title(self) -> str:
        title = f"{self.kind} {self.job.parallel}, micro-batch {self.job.micro_batch}"
        return title if self.job.recompute == "none" else f"{title}, recompute {self.job.recompute}"

    @property
    def missing(self) -> str:
        """Why this harness cannot run it, or the only engine that can."""
        if not self.is_launchable:
            return "no: --model"
        if not self.start:
            return "no: ZeRO with PP"
        job = self.job
        parallel = job.parallel
        is_fp16 = job.precision == "fp16"
        beyond = beyond_native(parallel.tensor, parallel.pipeline, job.zero.stage > 0, job.micro_batches, is_fp16)
        return "only ENGINE=megatron" if beyond else ""

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
        launcher = f"bash scripts/run_megatron_t5_{STRATEGIES[self.kind]}.sh"
        place = "<master-host> <node-rank>" if int(settings["NNODES"]) > 1 else ""
        return " ".join(filter(None, [*words, launcher, place]))

    def _settings(self) -> dict[str, str]:
        """The settings that describe the layout; an empty one stays at its default."""
        job = self.job
        parallel = job.parallel
        strategy = STRATEGIES[self.kind]

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
    parser.add_argument("--top", type=whole, default=8, help="rows in the first table (default: %(default)s)")
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
    ddp, *zeros = plans_of_one_gpu(args)
    job = Job.of_plan(ddp, vocabulary_of(ddp, args.vocabulary))
    is_preset = args.model in PRESETS
    if is_preset:
        job = replace(job, architecture=PRESETS[args.model])
    link = link_of(args.network, args.link, args.latency)
    ranked = {}
    for size in sizes:
        per_node = min(args.per_node, size)
        if size % per_node:
            raise Problem(f"{size} GPUs do not fill nodes of {args.per_node}", "Set --per-node")
        space = Space(
            job=job,
            zeros=[Zero.of_config(each.ds_config) for each in zeros],
            gpus=size,
            machine=with_link(device, link, per_node, host_of(args.host)),
            batch=args.global_batch or max(batch, size),
            tensor=tensor,
            pipeline=pipeline,
            given=given(ddp),
            is_launchable=not is_preset,
        )
        ranked[size] = space.ranked()
    if args.json:
        print(json.dumps({size: _json(candidates) for size, candidates in ranked.items()}, indent=2))
    else:
        for size, candidates in ranked.items():
            show(size, candidates, args)
    if args.picture:
        draw(ranked, args.picture, device.memory)
    return 0


def default_batch() -> int:
    """The samples of an iteration that the launchers' setting asks for. Raises Problem."""
    return whole_setting("GLOBAL_BATCH_SIZE") or int(BY_NAME["GLOBAL_BATCH_SIZE"].default)


def whole_setting(name: str) -> int | None:
    """A setting in the environment. Raises Problem if it is not a whole number of at least 1."""
    value = os.environ.get(name, "")
    fault = Whole(1).fault(name, value) if value else None
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


def plans_of_one_gpu(args: argparse.Namespace) -> list[Plan]:
    """The launchers' settings, and those of a preset by its name, as plans of DDP and ZERO for one GPU."""
    one = {"NPROC_PER_NODE": "1", "GLOBAL_BATCH_SIZE": "1", "MICRO_BATCH_SIZE": "1"}
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


@dataclass(frozen=True)
class Space:
    """The layouts of a job on a number of GPUs."""

    job: Job
    """On one GPU, with DDP."""
    zeros: Sequence[Zero]
    """Of the strategies in ZERO."""
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

    def _usable(self, parallel: Parallel) -> list[Zero]:
        """DDP, and the stages of ZeRO that go with a layout."""
        if parallel.data == 1:
            stages = 0
        elif parallel.pipeline > 1:
            stages = 1  # DeepSpeed has no stage 2 or 3 in pipelines
        elif parallel.tensor > 1:
            stages = 3  # offload goes without tensor parallelism
        else:
            stages = 4
        return [Zero(), *self.zeros[:stages]]

    def jobs(self) -> Iterator[Job]:
        per_node = self.machine.devices_per_node
        job = self.job
        for parallel in layouts(job.architecture, self.gpus, per_node, self.tensor, job.engine, self.pipeline):
            fitting = [size for size in MICRO_BATCHES if self.batch % (size * parallel.data) == 0]
            for micro_batch, zero, recompute in product(fitting, self._usable(parallel), RECOMPUTE):
                yield replace(
                    self.job,
                    parallel=replace(parallel, deepspeed=parallel.pipeline > 1 and zero.stage > 0),
                    micro_batch=micro_batch,
                    global_batch=self.batch,
                    zero=zero,
                    recompute=recompute,
                )

    def ranked(self) -> list[Candidate]:
        """Every layout, the fastest first. Raises Problem if no layout divides the model or none fits."""
        candidates = [
            Candidate(job, self.machine, given=self.given, is_launchable=self.is_launchable) for job in self.jobs()
        ]
        if self.job.engine == "native":
            candidates = [candidate for candidate in candidates if not candidate.missing]
        if not candidates:
            model = self.job.architecture
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
            "can run": candidate.missing or "yes",
        }
        for candidate in fitting[: args.top]
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
        print(f"  {kind:<16} {reason}")
    startable = [candidate for candidate in fitting if candidate.start]
    if startable:
        fastest = startable[0]
        print(f"\nThe fastest that the launchers can start, {fastest.title}:\n  {fastest.start}\n")


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
