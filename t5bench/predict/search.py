"""``python -m t5bench plan``: every layout of a model on so many GPUs, ranked by the time that is predicted of it."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from t5bench import Problem
from t5bench.model import time
from t5bench.model.job import Architecture, Job, Parallel, Zero
from t5bench.model.machine import DEVICES, GIB, Machine
from t5bench.plan.forecast import job_of
from t5bench.plan.launchers import ask
from t5bench.predict.command import add_machine, device_named, layout_text, machine_of, vocabulary_of
from t5bench.predict.prediction import Prediction

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = ("none", "selective", "full")
MOST_TENSOR = 8  # beyond a node the all-reduces of every layer cross the network
FULLEST = 0.95  # of the device's memory, for what fragments it


@dataclass(frozen=True)
class Candidate:
    """A layout with what is predicted of it. missing: why this harness cannot start it, "" where it can."""

    job: Job
    seconds: float
    memory: float
    limit: str
    missing: str

    @property
    def kind(self) -> str:
        return kind_of(self.job)

    @property
    def name(self) -> str:
        job = self.job
        again = "" if job.recompute == "none" else f", recompute {job.recompute}"
        return f"{self.kind} {layout_text(job)}, micro-batch {job.micro_batch}{again}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", required=True, help="numbers of GPUs, separated by commas: 8,64,512,4096")
    add_machine(parser)
    parser.add_argument("--model", help="tiny, small, base or large; the launchers' settings count too")
    parser.add_argument("--per-node", type=int, default=8, help="GPUs of a node")
    parser.add_argument("--global-batch", type=int, default=0, help="samples (default: 512, or as many as GPUs)")
    parser.add_argument("--vocabulary", type=int, help="tokens, before padding (default: the data's, else T5's)")
    parser.add_argument("--tp", type=int, help="only this tensor-parallel size")
    parser.add_argument("--top", type=int, default=8, help="rows of each table")
    parser.add_argument("--picture", type=Path, help="memory against time, as .svg, .png or .pdf")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    try:
        sizes = [int(size) for size in args.gpus.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise Problem(f"--gpus must be numbers of GPUs, found '{args.gpus}'", "Such as --gpus 8,64,512")
    if args.link <= 0 or args.per_node < 1:
        raise Problem("--link and --per-node must be more than 0")
    if not args.device:
        raise Problem("--device is missing", f"Known: {' '.join(DEVICES)}")
    device, model = device_named(args.device), architecture(args)
    found = {}
    for size in sizes:
        machine = machine_of(args, device, min(args.per_node, size))
        found[size] = search(model, size, machine, args.global_batch or max(512, size), args.tp)
    if args.json:
        print(json.dumps({size: _json(candidates) for size, candidates in found.items()}, indent=2))
    else:
        for size, candidates in found.items():
            show(size, candidates, args)
    if args.picture:
        draw(found, args.picture, device.memory)
    return 0


def architecture(args: argparse.Namespace) -> Architecture:
    """The model of the launchers' settings, and of a preset by its name."""
    environment = dict(os.environ) | ({"MODEL_PRESET": args.model} if args.model else {})
    plan = ask("ddp", environment=environment | {"NPROC_PER_NODE": "1", "NNODES": "1", "HOSTS": ""})
    if wrong := [obstacle for obstacle in plan.obstacles if obstacle.fatal]:
        raise Problem(f"the model's settings are wrong: {wrong[0].found}", wrong[0].remedy)
    return job_of(plan, vocabulary_of(plan, args.vocabulary)).architecture


# ---- the search ------------------------------------------------------------------------------------------------------


def layouts(model: Architecture, gpus: int, per_node: int, tensor: int | None) -> Iterator[Parallel]:
    """Sizes that divide the GPUs, the heads, the FFN and the layers."""
    powers = [2**k for k in range(1 + MOST_TENSOR.bit_length())]
    for t in [tensor] if tensor else [t for t in powers if t <= min(MOST_TENSOR, per_node)]:
        if gpus % t or model.heads % t or model.ffn % t:
            continue
        for p in range(1, min(model.layers, gpus // t) + 1):
            whole = _divides(model, p)
            if whole and not gpus // t % p:
                yield Parallel(t, p, gpus // (t * p), devices_per_node=per_node)


def _divides(model: Architecture, stages: int) -> bool:
    if stages == 1:
        return True
    if not model.cross_attention:
        return model.layers % stages == 0
    half = stages // 2
    return stages % 2 == 0 and model.encoder_layers % half == 0 and model.decoder_layers % half == 0


def jobs(model: Architecture, gpus: int, per_node: int, batch: int, tensor: int | None) -> Iterator[Job]:
    for parallel in layouts(model, gpus, per_node, tensor):
        for micro in MICRO_BATCHES:
            if batch % (micro * parallel.data):
                continue
            zeros = [Zero()]
            if parallel.data > 1:
                zeros += [Zero(1)] if parallel.pipeline > 1 else [Zero(stage) for stage in (1, 2, 3)]
                zeros += [Zero(3, True, True)] if parallel.tensor == parallel.pipeline == 1 else []
            for zero in zeros:
                for recompute in RECOMPUTE:
                    yield Job(model, parallel, micro, batch, zero, recompute=recompute)


def search(model: Architecture, gpus: int, machine: Machine, batch: int, tensor: int | None = None) -> list[Candidate]:
    """Every layout, the fastest first; Problem where nothing fits or nothing divides."""
    candidates = []
    for job in jobs(model, gpus, machine.devices_per_node, batch, tensor):
        entry = Prediction("", job, machine, "nccl", time.Rates())
        fits = entry.memory_bytes <= FULLEST * machine.device.memory
        seconds = time.iteration(job, machine) if fits else None
        limit = seconds.limit if seconds else "memory"
        candidates.append(
            Candidate(job, seconds.total if seconds else float("inf"), entry.memory_bytes, limit, missing(job))
        )
    if not candidates:
        asked = f" with TP={tensor}" if tensor else ""
        raise Problem(
            f"no layout of {gpus} GPUs{asked} divides the model and a global batch of {batch}",
            f"TP must divide the GPUs, {model.heads} heads and {model.ffn} FFN columns, and the data-parallel size the"
            " batch: --global-batch gives another",
        )
    if all(entry.limit == "memory" for entry in candidates):
        least = min(candidates, key=lambda entry: entry.memory)
        raise Problem(
            f"the model fits in no layout of {gpus} x {machine.device.name}: the smallest, {least.name}, takes"
            f" {least.memory / GIB:.1f} GiB of {machine.device.memory / GIB:.0f}",
            "Use more GPUs, or ones with more memory",
        )
    return sorted(candidates, key=lambda entry: (entry.seconds, entry.memory))


def missing(job: Job) -> str:
    """Why this harness cannot run a layout."""
    parallel = job.parallel
    if job.zero.stage and parallel.tensor * parallel.pipeline > 1:
        return "ZeRO with TP or PP is not in this harness"
    if parallel.pipeline > 2:
        return "more than two stages: Megatron engine alone"
    return ""


def runnable(entry: Candidate) -> bool:
    return not (entry.job.zero.stage and entry.missing)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those than which none is both faster and smaller; candidates come fastest first."""
    front: list[Candidate] = []
    for entry in candidates:
        if entry.limit != "memory" and (not front or entry.memory < front[-1].memory):
            front.append(entry)
    return front


# ---- what is shown ---------------------------------------------------------------------------------------------------


def kind_of(job: Job) -> str:
    parallel, zero = job.parallel, job.zero
    parts = ["TP"] * (parallel.tensor > 1) + ["PP"] * (parallel.pipeline > 1)
    if zero.stage:
        parts.append(f"ZeRO-{zero.stage}" + (" offload" if zero.offload_optimizer else ""))
    return " x ".join(parts) or "DDP"


def command_of(job: Job) -> str:
    """The line that starts a layout on its nodes."""
    p, zero = job.parallel, job.zero
    offload = "_offload" if zero.offload_optimizer else ""
    sizes = {"tensor": p.tensor > 1, "pipeline": p.pipeline > 1}
    plain = next((name for name, used in sizes.items() if used), "ddp")
    strategy = "hybrid" if all(sizes.values()) else f"zero{zero.stage}{offload}" if zero.stage else plain
    settings = {"NNODES": -(-p.world // p.devices_per_node), "NPROC_PER_NODE": min(p.world, p.devices_per_node)}
    settings |= {"GLOBAL_BATCH_SIZE": job.global_batch} | {"MICRO_BATCH_SIZE": job.micro_batch}
    settings |= {"TENSOR_PARALLEL_SIZE": p.tensor} if p.tensor > 1 else {}
    settings |= {"PIPELINE_PARALLEL_SIZE": p.pipeline} if p.pipeline > 1 else {}
    again = "" if job.recompute == "none" else f" -- --recompute-granularity {job.recompute}"
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    return f"{words} bash scripts/run_megatron_t5_{strategy}.sh <master-host> <node-rank>{again}"


def losers(candidates: Sequence[Candidate]) -> list[tuple[str, str, str]]:
    """The best of each other kind, and why it is not the winner: (kind, layout, reason)."""
    winner, found, seen = candidates[0], [], set()
    for entry in candidates:
        if entry.kind in seen or entry.kind == winner.kind:
            continue
        seen.add(entry.kind)
        if entry.limit == "memory":
            smallest = min((one for one in candidates if one.kind == entry.kind), key=lambda one: one.memory)
            found.append((entry.kind, smallest.name, f"does not fit: at least {smallest.memory / GIB:.1f} GiB"))
        else:
            found.append(
                (entry.kind, entry.name, f"{entry.seconds / winner.seconds:.2f}x the time, most of it {entry.limit}")
            )
    return found


def show(gpus: int, candidates: Sequence[Candidate], args: argparse.Namespace) -> None:
    fitting = [entry for entry in candidates if entry.limit != "memory"]
    batch = fitting[0].job.global_batch
    counts = f"{len(candidates)} layouts, {len(fitting)} fit"
    print(f"{gpus} x {args.device}, {args.link:g} Gbit/s a node, global batch {batch}: {counts}\n")
    front = set(map(id, pareto(fitting)))
    table = [
        {
            "layout": entry.name,
            "s/iteration": entry.seconds,
            "samples/s": batch / entry.seconds,
            "GiB": entry.memory / GIB,
            "limited by": entry.limit,
            "front": "*" if id(entry) in front else "",
            "this harness": entry.missing or "runs",
        }
        for entry in fitting[: args.top]
    ]
    print(tabulate(table, headers="keys", floatfmt=".4g"))
    print("\nPareto front of memory and time:")
    for entry in pareto(fitting):
        print(f"  {entry.memory / GIB:6.2f} GiB  {entry.seconds:8.4g} s  {entry.name}")
    print("\nWhy not the others (the best of each):")
    for kind, name, reason in losers(candidates):
        print(f"  {kind:<14} {reason}: {name}")
    if starts := next((entry for entry in fitting if runnable(entry)), None):
        print(f"\nThe fastest that this harness starts, {starts.name}:\n  {command_of(starts.job)}\n")


def draw(found: dict[int, list[Candidate]], path: Path, memory: int) -> None:
    """A panel for each number of GPUs. Raises Problem for a file that cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 4), layout="constrained")
    for number, (gpus, candidates) in enumerate(found.items(), 1):
        axes = figure.add_subplot(1, len(found), number)
        axes.set(title=f"{gpus} GPUs", xlabel="GiB of the fullest GPU", ylabel="s/iteration", yscale="log")
        fitting = [entry for entry in candidates if entry.limit != "memory"]
        for kind in dict.fromkeys(entry.kind for entry in fitting):
            own = [entry for entry in fitting if entry.kind == kind]
            axes.scatter([e.memory / GIB for e in own], [e.seconds for e in own], s=9, label=kind)
        front = pareto(fitting)
        axes.plot(
            [e.memory / GIB for e in front], [e.seconds for e in front], "k-", drawstyle="steps-post", label="front"
        )
        axes.axvline(memory / GIB, color="grey", linestyle=":")
        axes.legend(fontsize="x-small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Problem(
            f"cannot write the picture {path}: {error}", "Give a .svg, .png or .pdf in a directory"
        ) from error


def _json(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    front = set(map(id, pareto(candidates)))
    return [
        {
            "layout": entry.name, "kind": entry.kind, "tp": entry.job.parallel.tensor,
            "pp": entry.job.parallel.pipeline, "dp": entry.job.parallel.data, "zero": entry.job.zero.stage,
            "offload": entry.job.zero.offload_optimizer, "micro_batch": entry.job.micro_batch,
            "recompute": entry.job.recompute, "memory_bytes": entry.memory, "limit": entry.limit,
            "seconds": entry.seconds if entry.limit != "memory" else None,
            "pareto": id(entry) in front, "not_in_this_harness": entry.missing, "start": command_of(entry.job),
        }
        for entry in candidates
    ]  # fmt: skip
