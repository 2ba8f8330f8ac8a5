"""``python -m t5bench predict``: predict what each strategy will cost, or compare runs with their predictions."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tabulate import tabulate

from t5bench import Problem
from t5bench.compare.comparable import gpu_names
from t5bench.compare.rows import Row, make_row
from t5bench.evidence import check
from t5bench.model import schedule, time
from t5bench.model.job import Job, padded
from t5bench.model.machine import DEVICES, GIB, Device, device_of
from t5bench.model.prediction import Prediction, machine_of
from t5bench.model.presets import PRESETS
from t5bench.model.time import CPU
from t5bench.plan.forecast import backend_of, gpu_here, job_of, padded_vocabulary
from t5bench.plan.launchers import declarations, with_slurm_hosts
from t5bench.plan.planner import plan
from t5bench.predict import executed
from t5bench.predict.ranks import at_least
from t5bench.record.plan import Plan
from t5bench.record.records import load

SETTINGS_PRESETS = ("tiny", "small", "base", "large")  # values of MODEL_PRESET


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, help="run directories (default: the current settings)")
    add_machine(parser)
    parser.add_argument("--calibrate", type=Path, metavar="RUN", help="take the machine's speed from this run")
    link = "the link of that run (default: --link)"
    parser.add_argument("--calibrate-link", type=at_least(1e-6, float), metavar="GBIT", help=link)
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare published measurements with the model")
    parser.add_argument("--schedule", action="store_true", help="draw when each stage of a pipeline computes")
    execute = "execute a step of the native engine without arithmetic and compare collectives and memory with the model"
    parser.add_argument("--execute", action="store_true", dest="executes", help=execute)
    gpus, rank = "with --execute: this many GPUs", "with --execute: this rank (default: the first of each stage)"
    parser.add_argument("--gpus", type=at_least(1), help=gpus)
    parser.add_argument("--rank", type=at_least(0), help=rank)


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="", help="a GPU's name, as in nvidia-smi or in this project")
    link, latency = "Gbit/s of a node (default: 10)", "microseconds between nodes (default: 40)"
    parser.add_argument("--link", type=at_least(1e-6, float), default=10.0, metavar="GBIT", help=link)
    parser.add_argument("--latency", type=at_least(0, float), default=40.0, metavar="US", help=latency)
    model = f"tiny, small, base or large, which are settings, or published dimensions: {' '.join(PRESETS)}"
    parser.add_argument("--model", help=model)
    vocabulary = "tokens, before padding (default: the data's, else the model family's)"
    parser.add_argument("--vocabulary", type=at_least(1), help=vocabulary)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    if args.check:
        return check.run(args)
    if args.executes:
        jobs = [
            (one.strategy.name, job_of(one, vocabulary_of(one, args.vocabulary))) for one in planned() if one.layout
        ]
        return executed.run(jobs, args.gpus, args.rank, args.json)
    rows = [measured_row(directory) for directory in args.runs]
    slower, calibrates_cpu = calibration(args) if args.calibrate else (None, None)
    plans = [(row.run.plan, row) for row in rows] or [(plan, None) for plan in planned(args.model)]
    found = [(predicted(args, plan, row, slower), row) for plan, row in plans if plan.layout]
    wrong = [plan for plan, _ in plans if not plan.layout]
    refused = {plan.strategy.name: next(each.found for each in plan.obstacles if each.fatal) for plan in wrong}
    if not found:
        raise Problem("no strategy can run with these settings", "\n".join(dict.fromkeys(refused.values())))
    if args.calibrate and any((entry.machine.device is CPU) != calibrates_cpu for entry, _ in found):
        ran, other = ("CPUs", "GPUs") if calibrates_cpu else ("GPUs", "CPUs")
        raise Problem(f"{args.calibrate} ran on {ran}, which says nothing of {other}", "Calibrate with another run")
    if args.json:
        content = [entry.to_json() | {"measured": compared(entry, row)} for entry, row in found]
        print(json.dumps({"machine": asdict(found[0][0].machine), "rows": content, "refused": refused}, indent=2))
        return 0
    show(found, refused)
    for entry, _ in found if args.schedule else ():
        job, stages = entry.job, range(entry.job.parallel.pipeline)
        if entry.slower and len(stages) > 1:
            passes = (time.stage_seconds(job, entry.machine.device, stage) for stage in stages)
            forward, backward = ([each.seconds for each in way] for way in zip(*passes, strict=True))
            print(f"\n{entry.name}\n{schedule.draw(schedule.one_f_one_b(forward, backward, job.micro_batches))}")
    return 0


def predicted(
    args: argparse.Namespace, plan: Plan, row: Row | None, slower: float | None = None, gigabits: float | None = None
) -> Prediction:
    """A plan's prediction. row: the run that was made of it, which knows its vocabulary, GPU and batch."""
    vocabulary, gpu, batch = (row.run.padded_vocab_size, gpu_names(row.run), row.batch) if row else (None, None, 0)
    job = job_of(plan, vocabulary or vocabulary_of(plan, args.vocabulary), round(batch))
    if not row and args.model in PRESETS:
        job = with_model(job, args.model)
    device, per_node = device_for(plan, args.device or gpu), job.parallel.devices_per_node
    on = machine_of(device, gigabits or args.link, per_node, args.latency * 1e-6)
    slower = slower or (None if device is CPU else 1.0)
    return Prediction(job, on, backend_of(plan), slower, row.label if row else plan.strategy.name)


def with_model(job: Job, name: str) -> Job:
    """The job with a preset's architecture. Raises Problem if its layout cannot divide that."""
    architecture, parallel = PRESETS[name], job.parallel
    if parallel.pipeline > architecture.layers or architecture.heads % parallel.tensor:
        found = f"{architecture.layers} layers and {architecture.heads} heads"
        raise Problem(f"{name} has {found}, which TP/PP/DP {parallel} does not divide", "Choose another layout")
    return replace(job, architecture=architecture)


def planned(model: str | None = None) -> list[Plan]:
    """The plans of every strategy's launcher with the settings in the environment; no GPU is needed.

    model: a model's name, of PRESETS or of the launchers' own. Raises Problem for another one.
    """
    environment = with_slurm_hosts({"DEVICE": "cuda", "NODE_RANK": "0", **os.environ})  # this may be none of HOSTS
    if not environment.get("HOSTS"):
        # The README's hardware.
        environment = {"NNODES": "2", "MASTER_ADDR": "node0", **environment}
    environment |= settings_of(model)
    return [plan(environment, strategy) for strategy in declarations()]


def settings_of(model: str | None) -> dict[str, str]:
    """The settings that choose a model by its name. Raises Problem."""
    if model in PRESETS:
        return {"MODEL_FAMILY": PRESETS[model].family}
    if model and model not in SETTINGS_PRESETS:
        known = " ".join((*SETTINGS_PRESETS, *PRESETS))
        raise Problem(f"the model '{model}' is unknown", f"Choose from: {known}")
    return {"MODEL_PRESET": model} if model else {}


def measured_row(directory: Path) -> Row:
    return make_row("/".join(directory.resolve().parts[-2:]), [load(directory)])


def vocabulary_of(plan: Plan, vocabulary: int | None) -> int:
    """The padded vocabulary: from --vocabulary, else the data's tokenizer, else the family."""
    return padded(vocabulary, plan.number("VOCABULARY_MULTIPLE")) if vocabulary else padded_vocabulary(plan)


def device_for(plan: Plan | None, name: str | None) -> Device:
    """The device of this name, else that of a plan on this machine. Raises Problem."""
    device = device_of(name) if name else CPU if plan and plan.device == "cpu" else gpu_here()
    if not device:
        found = f"the device '{name}' is unknown" if name else "there is no GPU here to predict for"
        raise Problem(found, f"Name one with --device: {' '.join(DEVICES)}")
    return device


def calibration(args: argparse.Namespace) -> tuple[float, bool]:
    """How much slower than its own figures, as far as they are known, a measured run's machine is; whether it is a CPU.

    Raises Problem.
    """
    row = measured_row(args.calibrate)
    if not row.milliseconds:
        raise Problem(f"{args.calibrate} has no measured iterations", "Calibrate with a complete run")
    is_own = not row.on_gpu or device_of(gpu_names(row.run) or "")
    own = argparse.Namespace(**vars(args) | {"device": "" if is_own else args.device})
    entry = predicted(own, row.run.plan, row, gigabits=args.calibrate_link)
    try:
        slower = time.calibrated(entry.job, entry.machine, row.milliseconds.median / 1000, entry.backend)
        return slower, entry.machine.device is CPU
    except ValueError as error:
        found = f"{args.calibrate} was faster than its link allows: {error}"
        raise Problem(found, "Give its link's speed: --calibrate-link GBIT") from error


def show(found: Sequence[tuple[Prediction, Row | None]], refused: Mapping[str, str]) -> None:
    first, costs = found[0][0], [_cost(*pair) for pair in found]
    print(tabulate([_memory(entry) for entry, _ in found], headers="keys", floatfmt=".2f"), end="\n\n")
    formats = [".4g", ".4g", ",.1f", *[".4g"] * len(costs[0])]  # MB, the third column, has more digits than the others
    print(tabulate(costs, headers="keys", floatfmt=formats), end="\n\n")
    for name, reason in refused.items():
        print(f"{name} cannot run: {reason}")
    link = first.machine.between.bandwidth * 8 / 1e9
    print(f"MB: sent by the busiest node to others per iteration, over {link:g} Gbit/s with {first.backend}.")
    if first.slower is None:
        print("No times: the speed of this CPU is unknown. --calibrate RUN measures it from a run.")
    elif first.slower != 1:
        print(f"Calibrated: everything takes {first.slower:.3g} times as long as the device's figures say.")


def _memory(entry: Prediction) -> dict[str, str | float]:
    device, parts = entry.machine.device, dict(entry.memory.components)

    def gib(*names: str) -> float:
        return sum(parts.pop(name, 0.0) for name in names) / GIB

    cells: dict[str, str | float] = {"GiB on the fullest": entry.name, "TP/PP/DP": str(entry.job.parallel)}
    cells |= {name: gib(name) for name in ("weights", "gradients", "optimizer")}
    cells["activations"] = gib("encoder", "decoder", "ends of stacks", "recomputed layer")
    cells |= {"logits, loss": gib("logits and loss"), "buffers": gib(*parts), "allocated": entry.memory.peak / GIB}
    if device.memory:
        cells |= {"in use": entry.memory_bytes / GIB, f"of {device.name}": f"{entry.memory_bytes / device.memory:.0%}"}
    return cells | {"peak at": entry.memory.moment, "in CPU memory": sum(entry.memory.cpu.values()) / GIB}


def _cost(entry: Prediction, row: Row | None) -> dict[str, str | float]:
    """Bytes and time, what was measured of them, and how far the prediction is from that."""
    cells: dict[str, str | float] = {"seconds": entry.name, "samples": entry.job.global_batch}
    cells["MB"] = max(entry.node_bytes) / 1e6
    if found := entry.time:
        cells |= found.parts | {"all": found.total, "samples/s": entry.job.global_batch / found.total}
        cells["TFLOP/s"] = entry.tflops
        if entry.mfu is not None:
            cells["MFU"] = f"{entry.mfu:.1%}"
    cells["limited by"] = entry.limit
    for what, (measured, expected) in compared(entry, row).items():
        cells |= {f"{what} measured": measured, f"{what} off": f"{expected / measured - 1:+.1%}"}
    return cells


def compared(entry: Prediction, row: Row | None) -> dict[str, tuple[float, float]]:
    """(measured, predicted) by what: seconds of an iteration, MB of the mean node, memory of the fullest GPU."""
    found: dict[str, tuple[float, float]] = {}
    if row and row.milliseconds and entry.time:
        found["seconds"] = row.milliseconds.median / 1000, entry.time.total
    nodes, seen = len(entry.node_bytes), row.measured[0].observed.traffic if row and row.measured else ()
    if seen and any(entry.node_bytes):
        found["MB"] = sum(one.bytes_per_iteration for one in seen) / nodes / 1e6, sum(entry.node_bytes) / nodes / 1e6
    if row and row.on_gpu and row.peak_memory:
        found["allocated GiB"] = max(row.peak_memory.values()) / 1024, entry.memory.peak / GIB
    return found
