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

from t5bench import Problem
from t5bench.model.job import Architecture, Job, Parallel, Zero, beyond_native
from t5bench.model.machine import DEVICES, GIB, Machine
from t5bench.model.prediction import Prediction, machine_of
from t5bench.model.presets import PRESETS
from t5bench.plan.forecast import job_of
from t5bench.plan.launchers import ALONE
from t5bench.plan.planner import plan
from t5bench.predict.command import add_machine, device_for, settings_of, vocabulary_of
from t5bench.predict.ranks import at_least
from t5bench.record.plan import ROLES, Plan

TENSOR_SIZES = (1, 2, 4, 8)  # beyond a node the all-reduces of every layer cross the network
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = ("none", "selective", "full")
FULLEST = 0.95  # of the device's memory; the rest is lost to fragmentation
STRATEGIES = {"DDP": "ddp", "TP": "tensor", "PP": "pipeline", "TP x PP": "hybrid"}
STRATEGIES |= {"ZeRO-3 offload": "zero3_offload", "TP x ZeRO-3 offload": "zero3"}  # the latter if its JSON offloads
STRATEGIES |= {f"{tp}ZeRO-{stage}": f"zero{stage}" for stage in (1, 2, 3) for tp in ("", "TP x ")}
STRATEGIES |= {f"{tp}PP x ZeRO-1": "3d" for tp in ("", "TP x ")}
ZERO = ("zero1", "zero2", "zero3", "zero3_offload")


@dataclass(frozen=True)
class Candidate(Prediction):
    """A layout with its prediction; seconds are infinite if it does not fit."""

    given: Mapping[str, str] = field(default_factory=dict)  # settings that are asked for
    is_launchable: bool = True  # the model is one of the launchers' settings

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
        parallel, zero = self.job.parallel, self.job.zero
        parts = ["TP"] * (parallel.tensor > 1) + ["PP"] * (parallel.pipeline > 1)
        parts += [f"ZeRO-{zero.stage}" + " offload" * zero.offload_parameters] * (zero.stage > 0)
        return " x ".join(parts) or "DDP"

    @property
    def title(self) -> str:
        again = "" if self.job.recompute == "none" else f", recompute {self.job.recompute}"
        return f"{self.kind} {self.job.parallel}, micro-batch {self.job.micro_batch}{again}"

    @property
    def missing(self) -> str:
        """Why this harness cannot run it, or the only engine that can."""
        if not self.is_launchable:
            return "no: --model"
        if not self.start:
            return "no: ZeRO with PP"
        job, p = self.job, self.job.parallel
        reason = beyond_native(p.tensor, p.pipeline, job.zero.stage > 0, job.micro_batches, job.precision == "fp16")
        is_other = reason or job.architecture.family == "gpt" or job.recompute != "none"
        return "only ENGINE=megatron" if is_other else ""

    @cached_property
    def start(self) -> str:
        """The command that starts it on each node; "" if this harness cannot run it."""
        p, job, strategy = self.job.parallel, self.job, STRATEGIES[self.kind]
        if not self.is_launchable:
            return ""
        if p.deepspeed and job.architecture.cross_attention:  # DeepSpeed's pipeline has no encoder-decoder
            return ""
        least, nodes = 1 if strategy == "3d" else 2, p.world // p.devices_per_node  # the other launchers' default is 1
        own = {
            "MODEL_FAMILY": job.architecture.family.replace("t5", ""),
            "NNODES": nodes, "NPROC_PER_NODE": p.devices_per_node,
            "GLOBAL_BATCH_SIZE": job.global_batch, "MICRO_BATCH_SIZE": job.micro_batch,
            "TENSOR_PARALLEL_SIZE": p.tensor if p.tensor >= least else "",
            "PIPELINE_PARALLEL_SIZE": p.pipeline if p.pipeline >= least else "",
            "RECOMPUTE": job.recompute.replace("none", ""),
            "ENGINE": job.engine.replace("megatron", ""),
        }  # fmt: skip
        settings = {name: value for name, value in own.items() if value}
        settings |= {name: value for name, value in self.given.items() if name not in own}
        words = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in settings.items())
        place = " <master-host> <node-rank>" * (nodes > 1)
        return f"{words} bash scripts/run_megatron_t5_{strategy}.sh{place}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whole, gpus = at_least(1), "numbers of GPUs, separated by commas: 8,64,512,4096"
    parser.add_argument("--gpus", required=True, help=gpus)
    add_machine(parser)
    parser.add_argument("--per-node", type=whole, default=8, help="GPUs of a node (default: %(default)s)")
    parser.add_argument("--global-batch", type=whole, help="samples (default: 512, or as many as GPUs)")
    parser.add_argument("--tp", type=whole, help="only this tensor-parallel size (default: 1, 2, 4 and 8)")
    parser.add_argument("--top", type=whole, default=8, help="rows of the first table (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="memory against time, as .svg, .png or .pdf")


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    sizes = [int(size) for size in args.gpus.split(",") if size.isdecimal() and int(size)]
    if len(sizes) < len(args.gpus.split(",")):
        raise Problem(f"--gpus must be numbers of GPUs, found '{args.gpus}'", "For example: --gpus 8,64,512")
    if not args.device:
        raise Problem("--device is missing", f"Choose from: {' '.join(DEVICES)}")
    device = device_for(None, args.device)
    plain_plan, *others = plans_of_one_gpu(args)
    plain, zeros = (
        job_of(plain_plan, vocabulary_of(plain_plan, args.vocabulary)),
        [Zero.of_config(one.ds_config) for one in others],
    )
    if is_preset := args.model in PRESETS:
        plain = replace(plain, architecture=PRESETS[args.model])
    found = {}
    for size in sizes:
        per_node = min(args.per_node, size)
        if size % per_node:
            raise Problem(f"{size} GPUs do not fill nodes of {args.per_node}", "Set --per-node")
        on = machine_of(device, args.link, per_node, args.latency * 1e-6)
        found[size] = search(
            plain, zeros, size, on, args.global_batch or max(512, size), args.tp, given(plain_plan), not is_preset
        )
    if args.json:
        print(json.dumps({size: _json(candidates) for size, candidates in found.items()}, indent=2))
    else:
        for size, candidates in found.items():
            show(size, candidates, args)
    if args.picture:
        draw(found, args.picture, device.memory)
    return 0


def plans_of_one_gpu(args: argparse.Namespace) -> list[Plan]:
    """The launchers' settings, and those of a preset by its name, as plans of DDP and ZERO for one GPU."""
    one = {"NPROC_PER_NODE": "1", "GLOBAL_BATCH_SIZE": "1", "MICRO_BATCH_SIZE": "1"}
    settings = os.environ | ALONE | one | settings_of(args.model)
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


def layouts(model: Architecture, gpus: int, per_node: int, tensor: int | None) -> Iterator[Parallel]:
    """Sizes that divide the GPUs, the heads, the FFN and the layers; half of the stages are an encoder's."""
    for t in [tensor] if tensor else [size for size in TENSOR_SIZES if size <= per_node]:
        for p in range(1, min(model.layers, gpus // t) + 1):
            halves = 2 if model.cross_attention and p > 1 else 1
            stacks = (model.encoder_layers, model.decoder_layers) if halves == 2 else (model.layers,)
            uneven = p % halves or any(layers % (p // halves) for layers in stacks)
            if not (uneven or gpus % (t * p) or model.heads % t or model.ffn % t):
                yield Parallel(t, p, gpus // (t * p), devices_per_node=per_node)


def jobs(plain: Job, zeros: Sequence[Zero], gpus: int, per_node: int, batch: int, tensor: int | None) -> Iterator[Job]:
    """zeros: of the strategies in ZERO."""
    for parallel in layouts(plain.architecture, gpus, per_node, tensor):
        # DeepSpeed has no stage 2 or 3 in pipelines, and offload goes without tensor parallelism.
        usable = (1 if parallel.pipeline > 1 else 3 if parallel.tensor > 1 else 4) if parallel.data > 1 else 0
        for micro in (size for size in MICRO_BATCHES if batch % (size * parallel.data) == 0):
            for zero, recompute in product([Zero(), *zeros[:usable]], RECOMPUTE):
                own = replace(parallel, deepspeed=parallel.pipeline > 1 and zero.stage > 0)
                sizes = {"parallel": own, "micro_batch": micro, "global_batch": batch}
                yield replace(plain, **sizes, zero=zero, recompute=recompute)


def search(
    plain: Job,
    zeros: Sequence[Zero],
    gpus: int,
    on: Machine,
    batch: int,
    tensor: int | None,
    chosen: Mapping[str, str],
    is_launchable: bool = True,
) -> list[Candidate]:
    """Every layout, the fastest first. Raises Problem if no layout divides the model or none fits."""
    every = jobs(plain, zeros, gpus, on.devices_per_node, batch, tensor)
    candidates = [Candidate(job, on, given=chosen, is_launchable=is_launchable) for job in every]
    if plain.engine == "native":
        candidates = [entry for entry in candidates if not entry.missing]
    if not candidates:
        asked, model = f" with TP={tensor}" if tensor else "", plain.architecture
        sizes = f"TP must divide the GPUs, {model.heads} heads and {model.ffn} FFN columns"
        raise Problem(
            f"no layout of {gpus} GPUs{asked} divides the model and a global batch of {batch}",
            f"{sizes}, the data-parallel size the batch (--global-batch)",
        )
    least = min(candidates, key=lambda entry: entry.memory_bytes)
    if not least.fits:
        takes = f"{least.title} takes {least.memory_bytes / GIB:.1f} GiB of {on.device.memory / GIB:.0f}"
        problem = f"the model does not fit on {gpus} x {on.device.name}: even {takes}"
        raise Problem(problem, "Use more GPUs, or ones with more memory")
    return sorted(candidates, key=lambda entry: (entry.seconds, entry.memory_bytes))


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other beats in both time and memory, from candidates sorted by time."""
    front: list[Candidate] = []
    for entry in candidates:
        if entry.fits and (not front or entry.memory_bytes < front[-1].memory_bytes):
            front.append(entry)
    return front


def losers(candidates: Sequence[Candidate]) -> Iterator[tuple[str, str]]:
    """The best of each other kind: (kind, why it is not the winner, and its layout)."""
    winner, bests = candidates[0], {}
    for entry in candidates:  # the fastest, or of those that do not fit the smallest, comes first
        bests.setdefault(entry.kind, entry)
    for kind, best in bests.items():
        if kind != winner.kind:
            yield kind, f"{_loss(best, winner)}: {best.title}"


def _loss(best: Candidate, winner: Candidate) -> str:
    """Why a layout is not the winner: what of its iteration takes longer by the most."""
    if not best.fits:
        return f"does not fit: at least {best.memory_bytes / GIB:.1f} GiB"
    more = {name: seconds - winner.time.parts[name] for name, seconds in best.time.parts.items()}
    part = max(more, key=lambda name: more[name])
    reason = f", above all more {part}" if more[part] > 0 else ""
    return f"{best.seconds / winner.seconds:.2f}x the time{reason}"


def show(gpus: int, candidates: Sequence[Candidate], args: argparse.Namespace) -> None:
    fitting, front = [entry for entry in candidates if entry.fits], pareto(candidates)
    batch, counts = fitting[0].job.global_batch, f"{len(candidates)} layouts, {len(fitting)} fit"
    print(f"{gpus} x {args.device}, {args.link:g} Gbit/s a node, global batch {batch}: {counts}\n")
    table = [
        (entry.title, entry.seconds, batch / entry.seconds, entry.tflops, _percent(entry.mfu),
         entry.memory_bytes / GIB, entry.limit,
         "*" if entry in front else "", entry.missing or "yes")
        for entry in fitting[: args.top]
    ]  # fmt: skip
    headers = ("layout", "s/iteration", "samples/s", "TFLOP/s", "MFU", "GiB", "limited by", "front", "can run")
    print(tabulate(table, headers, floatfmt=".4g"))
    print("\nPareto front of memory and time:")
    for entry in front:
        print(f"  {entry.memory_bytes / GIB:6.2f} GiB  {entry.seconds:8.4g} s  {entry.title}")
    print("\nWhy not the others (the best of each):")
    for kind, reason in losers(candidates):
        print(f"  {kind:<16} {reason}")
    if starts := next((entry for entry in fitting if entry.start), None):
        print(f"\nThe fastest that this harness can start, {starts.title}:\n  {starts.start}\n")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def draw(found: Mapping[int, Sequence[Candidate]], path: Path, memory: int) -> None:
    """A panel for each number of GPUs. Raises Problem for another kind of file."""
    from matplotlib.figure import Figure

    def places(entries: Iterable[Candidate]) -> Iterator[tuple[float, ...]]:
        return zip(*((one.memory_bytes / GIB, one.seconds) for one in entries), strict=True)

    figure = Figure(figsize=(5 * len(found), 4), layout="constrained")
    for axes, (gpus, candidates) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        axes.set(title=f"{gpus} GPUs", yscale="log", xlabel="GiB on the fullest GPU", ylabel="s/iteration")
        fitting = [entry for entry in candidates if entry.fits]
        for kind in dict.fromkeys(entry.kind for entry in fitting):
            axes.scatter(*places(entry for entry in fitting if entry.kind == kind), s=9, label=kind)
        axes.step(*places(pareto(candidates)), "k-", where="post", label="front")
        axes.axvline(memory / GIB, color="grey", linestyle=":")
        axes.legend(fontsize="x-small")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise Problem(f"cannot write the picture {path}: {error}", "Give a .svg, .png or .pdf") from error


def _json(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    front = {id(entry) for entry in pareto(candidates)}
    return [
        {"name": entry.title, "kind": entry.kind, "memory": entry.memory_bytes, "limit": entry.limit,
         "missing": entry.missing, "start": entry.start, "mfu": entry.mfu, "tflops": entry.tflops,
         "seconds": entry.seconds if entry.fits else None,
         "pareto": id(entry) in front, "parallel": asdict(entry.job.parallel), "zero": asdict(entry.job.zero),
         "micro_batch": entry.job.micro_batch, "recompute": entry.job.recompute}
        for entry in candidates
    ]  # fmt: skip
