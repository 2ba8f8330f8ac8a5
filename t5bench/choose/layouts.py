"""``python -m t5bench layouts``: every layout of a model on a number of GPUs, ranked by predicted time."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from t5bench import Problem, note
from t5bench.arguments import add_whole_training, asked_whole_training, at_least
from t5bench.choose.asked import (
    add_machine,
    add_model,
    asked_model,
    asked_size,
    default_batch,
    device_for,
    device_in_words,
    host_of,
    link_of,
    model_in_words,
    name_keys_not_read,
    settings_left_out,
)
from t5bench.choose.predict import in_words, range_text
from t5bench.choose.space import (
    Candidate,
    Space,
    as_fast,
    best_to_run,
    losers,
    not_told_apart,
    one_to_run,
    pareto,
    shown_first,
    which_to_run,
)
from t5bench.costmodel.machine import DEVICES, GIB
from t5bench.costmodel.prediction import with_link
from t5bench.costmodel.presets import NOTES
from t5bench.costmodel.whole_training import WholeTraining
from t5bench.packages import imported
from t5bench.printed_table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whole = at_least(1)
    parser.add_argument("--gpus", help="one or more numbers of GPUs: 8,64,512,4096")
    add_machine(parser)
    add_model(parser)
    add_whole_training(parser)
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
        page = imported("t5bench_planner_page.page")
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
    name_keys_not_read(args.model)
    whole = asked_whole_training(args)
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
        print(json.dumps({size: _json(candidates, whole) for size, candidates in ranked.items()}, indent=2))
    else:
        for size, candidates in ranked.items():
            show(size, candidates, args, whole)
        if len(ranked) > 1:
            print(table(against_the_smallest(ranked, whole)))
    if args.picture:
        draw(ranked, args.picture, device.memory)
    return 0


def show(
    gpus: int, candidates: Sequence[Candidate], args: argparse.Namespace, whole: WholeTraining | None = None
) -> None:
    fitting = [candidate for candidate in candidates if candidate.fits]
    front = pareto(candidates)
    batch = fitting[0].job.global_batch
    gigabits = fitting[0].machine.between.bandwidth * 8 / 1e9
    print(
        f"{model_in_words(args, fitting[0].job)}\n"
        f"{gpus} x {device_in_words(fitting[0].machine.device)}, {gigabits:.4g} Gbit/s a node, global batch {batch}:"
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
            "fits": candidate.fit,
            "limited by": in_words(candidate.limit),
            "front": "*" if candidate in front else "",
            "engine": candidate.job.engine,
            "can run": candidate.missing or "yes",
            **(whole.figures(candidate.job, candidate.seconds) if whole else {}),
        }
        for candidate in shown_first(candidates, args.top)
    ]
    print(table(rows))
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
    print(table(frontier))
    print("\nWhy not the others (the best of each):")
    for kind, reason in losers(candidates):
        print(f"  {kind:<24}  {reason}")
    commands: dict[str, str] = {}
    for candidate in fitting:  # the fastest of a kind comes first
        if candidate.start:
            commands.setdefault(candidate.kind, candidate.start)
    if commands:
        print("\nHow to start the best of each kind, by predicted time:")
        for kind, command in commands.items():
            print(f"  {kind}\n    {command}")
        print(f"\n{which_to_run(candidates)}:\n  {one_to_run(candidates).start}\n")


def against_the_smallest(
    ranked: Mapping[int, Sequence[Candidate]], whole: WholeTraining | None = None
) -> list[dict[str, str | float]]:
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
                "first in the ranking": best.title,
                "batch": best.job.global_batch,
                "samples/s": rate,
                f"against {smallest} GPUs": f"{gain:.2f}x",
                "of that many times": f"{gain * smallest / gpus:.0%}",
                **(whole.figures(best.job, best.seconds) if whole else {}),
            }
        )
    return rows


def mfu_text(candidate: Candidate) -> str:
    """ "" where the GPU's peak in this precision is unknown."""
    return "" if candidate.mfu is None else f"{candidate.mfu:.1%}"


def draw(ranked: Mapping[int, Sequence[Candidate]], path: Path, memory: int) -> None:
    """A panel for each number of GPUs. memory: bytes of one. Raises Problem for another kind of file."""
    from t5bench.report import svg

    try:
        svg.write(lambda: _panels(ranked, memory), path)
    except ValueError as error:
        raise Problem(f"cannot write the picture {path}: {error}", "Give a .svg, .png or .pdf") from error


def _panels(ranked: Mapping[int, Sequence[Candidate]], memory: int) -> Any:
    from matplotlib.figure import Figure

    def coordinates(candidates: Iterable[Candidate]) -> tuple[list[float], list[float]]:
        shown = list(candidates)
        return [each.memory_bytes / GIB for each in shown], [each.seconds for each in shown]

    figure = Figure(figsize=(4.5 * len(ranked) + 2.5, 6), layout="constrained")
    labelled: dict[str, Any] = {}
    panels = figure.subplots(1, len(ranked), squeeze=False)[0]
    kinds = dict.fromkeys(each.kind for candidates in ranked.values() for each in candidates if each.fits)
    for axes, (gpus, candidates) in zip(panels, ranked.items(), strict=True):
        axes.set(title=f"{gpus} GPUs", yscale="log", xlabel="GiB on the fullest GPU", ylabel="s/iteration")
        fitting = [candidate for candidate in candidates if candidate.fits]
        for number, kind in enumerate(kinds):
            of_kind = [candidate for candidate in fitting if candidate.kind == kind]
            marker = "osD^"[number // 10 % 4]
            labelled[kind] = axes.scatter(*coordinates(of_kind), s=9, color=f"C{number % 10}", marker=marker)
        (labelled["no layout is smaller and faster"],) = axes.step(
            *coordinates(pareto(candidates)), "-", color="grey", where="post"
        )
        labelled["the GPU's memory"] = axes.axvline(memory / GIB, color="grey", linestyle=":")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    figure.legend(labelled.values(), labelled.keys(), loc="outside right upper", fontsize="xx-small")
    return figure


def _json(candidates: Sequence[Candidate], whole: WholeTraining | None) -> list[dict[str, object]]:
    front = {id(candidate) for candidate in pareto(candidates)}
    fast = {id(candidate) for candidate in as_fast(candidates)}
    return [
        {
            "name": candidate.title,
            "kind": candidate.kind,
            "memory": candidate.memory_bytes,
            "chance_to_fit": candidate.chance_to_fit,
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
            **({"whole_training": whole.figures(candidate.job, candidate.seconds)} if whole and candidate.fits else {}),
        }
        for candidate in candidates
    ]
