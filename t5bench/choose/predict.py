"""``python -m t5bench predict``: predict what each strategy will cost, or compare runs with their predictions."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from t5bench import Problem, note
from t5bench.arguments import add_whole_training, asked_whole_training, at_least
from t5bench.choose.asked import (
    AskedLengths,
    add_machine,
    add_model,
    architecture_named,
    device_for,
    device_in_words,
    host_of,
    link_of,
    model_in_words,
    name_keys_not_read,
    settings_left_out,
    settings_of,
    vocabulary_of,
)
from t5bench.choose.space import divides_layers
from t5bench.costmodel import schedule, time
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import GIB
from t5bench.costmodel.memory import activation_bytes, in_flight
from t5bench.costmodel.prediction import Prediction, with_link
from t5bench.costmodel.presets import NOTES
from t5bench.costmodel.time import CPU
from t5bench.costmodel.whole_training import WholeTraining
from t5bench.packages import imported
from t5bench.plan.launchers import all_declarations, declarations, with_slurm_hosts
from t5bench.plan.planner import plan
from t5bench.printed_table import table
from t5bench.record.plan import Plan, Strategy
from t5bench.text import WAITING_FOR_HOST

if TYPE_CHECKING:
    from t5bench.compare.rows import Row

THEIR_OWN = Path("its own")  # of --check and --choice without a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=Path, help="run directories (default: the current settings)")
    add_machine(parser)
    add_model(parser)
    add_whole_training(parser)
    calibrate = "calibrate the machine's speed with this run; with several, repeat the option"
    parser.add_argument("--calibrate", type=Path, action="append", metavar="RUN", help=calibrate)
    link = "the link's speed in that run (default: --link)"
    network = "the file that check_cluster.sh --network wrote before that run (default: --network)"
    parser.add_argument("--calibrate-link", type=at_least(1e-6, float), metavar="GBIT", help=link)
    parser.add_argument("--calibrate-network", type=Path, metavar="FILE", help=network)
    check = "compare the model with published measurements, or with those of a FILE in the same form"
    parser.add_argument("--check", type=Path, nargs="?", const=THEIR_OWN, metavar="FILE", help=check)
    widths = "derive the 90 %% intervals from published measurements, and test them on others"
    parser.add_argument("--intervals", action="store_true", help=widths)
    choice = "judge the choice of layouts on 720 published times of one kind of node, or on a FILE with such columns"
    parser.add_argument("--choice", type=Path, nargs="?", const=THEIR_OWN, metavar="FILE", help=choice)
    parser.add_argument(
        "--published", action="store_true", help="print docs/generated/published.md: two tutorials' figures"
    )
    parser.add_argument(
        "--schedule", action="store_true", help="draw the pipeline schedule, and compare its cost with the others'"
    )
    execute = (
        "execute the native engine's step without arithmetic, and compare its collectives and memory with the model"
    )
    parser.add_argument("--execute", action="store_true", dest="executes", help=execute)
    gpus = "with --execute: this many GPUs"
    rank = "with --execute: this rank (default: the first of each stage)"
    parser.add_argument("--gpus", type=at_least(1), help=gpus)
    parser.add_argument("--rank", type=at_least(0), help=rank)


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    with settings_left_out(args.defaults):
        return predict(args)


def predict(args: argparse.Namespace) -> int:
    if args.check or args.intervals or args.choice or args.published:
        return against_others(args)
    if args.executes:
        jobs = [
            (plan.strategy.name, Job.of_plan(plan, vocabulary_of(plan, args.vocabulary)))
            for plan in planned()
            if plan.layout
        ]
        return imported("t5bench_prove.executed").run(jobs, args.gpus, args.rank, args.json)
    if args.gpus is not None or args.rank is not None:
        remedy = "Set NNODES and NPROC_PER_NODE, add --execute, or rank layouts: python -m t5bench layouts --gpus N"
        raise Problem("--gpus and --rank say what --execute executes, and it is not given", remedy)
    if args.model in NOTES:
        note(f"{args.model}: {NOTES[args.model]}")
    name_keys_not_read(args.model)
    whole = asked_whole_training(args)
    calibrated = None
    slower = None
    if args.calibrate:
        calibrated = measured().calibration(args)
        slower = calibrated.slower
    entries = []
    refused = {}
    for its_plan, row in plans_and_rows(args):
        reason = why_not(args, its_plan)
        if reason:
            refused[its_plan.strategy.name] = reason
            continue
        prediction = measured().predicted_run(args, row, slower) if row else predicted(args, its_plan, slower)
        entries.append(Entry(calibrated.applied(prediction) if calibrated else prediction, row))
    if not entries:
        raise Problem("no strategy can run with these settings", "\n".join(dict.fromkeys(refused.values())))
    if calibrated:
        calibrated.check([entry.prediction for entry in entries])
    if args.json:
        machine = asdict(entries[0].prediction.machine)
        content = [
            entry.prediction.to_json() | {"measured": entry.compared()} | whole_figures(entry, whole)
            for entry in entries
        ]
        print(json.dumps({"machine": machine, "rows": content, "refused": refused}, indent=2))
        return 0
    print(f"{header(args, [entry.prediction for entry in entries])}\n")
    show(entries, refused, only_elsewhere(args), whole)
    if args.schedule:
        for entry in entries:
            show_schedule(entry.prediction)
    return 0


def against_others(args: argparse.Namespace) -> int:
    """Holds the model against what others published. Raises Problem."""
    if args.check:
        check = imported("t5bench_evidence.check")
        return check.run(list(check.FILES) if args.check == THEIR_OWN else [args.check], args.json)
    if args.intervals:
        return imported("t5bench_evidence.intervals").run(args.json)
    if args.choice:
        grid = imported("t5bench_evidence.grid")
        return grid.run(grid.FILE if args.choice == THEIR_OWN else args.choice, args.json)
    print(imported("t5bench_evidence.tutorials").page(), end="")
    return 0


def measured() -> ModuleType:
    """What reads records, and needs packages for it: a question about settings alone is answered without them."""
    return imported("t5bench.choose.measured")


def plans_and_rows(args: argparse.Namespace) -> list[tuple[Plan, "Row | None"]]:
    """The plans to predict: of the runs, with what they measured, or of every strategy with the current settings."""
    if args.runs:
        rows = [measured().measured_row(directory) for directory in args.runs]
        return [(row.run.plan, row) for row in rows]
    return [(plan, None) for plan in planned(args.model, lengths=AskedLengths.of(args))]


def show_schedule(prediction: Prediction) -> None:
    """Draws when each stage of a pipeline computes, if the device's speed is known."""
    job = prediction.job
    if not prediction.slower or job.parallel.pipeline == 1:
        return
    forward = []
    backward = []
    for stage in range(job.parallel.pipeline):
        forward_pass, backward_pass = time.stage_seconds(job, prediction.machine, stage)
        forward.append(forward_pass.seconds)
        backward.append(backward_pass.seconds)
    slots = schedule.one_f_one_b(
        forward,
        backward,
        job.micro_batches,
        chunks=job.parallel.virtual_stages,
        kind=job.parallel.schedule,
        weights=time.weight_seconds(job, prediction.machine),
    )
    drawing = schedule.draw(slots)
    print(f"\n{prediction.name}\n{drawing}\n")
    print(table(schedules_beside(prediction)))


def schedules_beside(prediction: Prediction) -> list[dict[str, str | float]]:
    """What the job's own schedule and others differ in, a row each: idle time, and what stages keep meanwhile.

    The others: 1F1B, GPipe and, in the native engine, zero-bubble.
    """
    chosen = prediction.job.parallel
    rows: list[dict[str, str | float]] = []
    others = [schedule.ONE_F_ONE_B, schedule.GPIPE]
    if prediction.job.engine == "native" and not chosen.sequence_parallel:
        others.append(schedule.ZERO_BUBBLE)
    for kind in dict.fromkeys((chosen.schedule, *others)):
        sizes: dict[str, int | None] = {}
        if kind != chosen.schedule and chosen.virtual_stages > 1:
            sizes = {"virtual_stages": 1, "split_rank": None}  # the decoder's first part is counted in chunks
        other = replace(prediction, job=prediction.job.on(schedule=kind, **sizes))
        job = other.job
        kept = [sum(activation_bytes(job, stage).values()) for stage in range(job.parallel.pipeline)]
        rows.append(
            {
                "schedule": f"{kind} (chosen)" if kind == chosen.schedule else kind,
                "idle": f"{other.bubble or 0:.1%}",
                "s/iteration": other.time.total if other.time else "",
                "TFLOP/s": other.tflops or "",
                "MFU": "" if other.mfu is None else f"{other.mfu:.1%}",
                "micro-batches on stage 0": in_flight(job, 0) / job.parallel.virtual_stages,
                "GiB of activations": max(kept) / GIB,
                "GiB in all": other.memory_bytes / GIB,
            }
        )
    return rows


def predicted(args: argparse.Namespace, plan: Plan, slower: float | None = None) -> Prediction:
    """A plan's prediction. Raises Problem."""
    device = device_for(plan, args.device)
    job = Job.of_plan(plan, vocabulary_of(plan, args.vocabulary))
    architecture = architecture_named(args.model, AskedLengths.of(args))
    if architecture:
        job = replace(job, architecture=architecture)
    if slower is None and device is not CPU:
        slower = 1.0
    between = link_of(args.network, args.link, args.latency)
    machine = with_link(device, between, job.parallel.devices_per_node, host_of(args.host))
    return Prediction.of_plan(plan, job, machine, slower, plan.strategy.name)


def why_not(args: argparse.Namespace, plan: Plan) -> str:
    """Why a plan cannot be predicted; "" if it can be."""
    if not plan.layout:
        return next(each.found for each in plan.obstacles if each.fatal)
    model = None if args.runs else architecture_named(args.model, AskedLengths.of(args))
    if not model:
        return ""
    layout = plan.layout
    if layout.pp > model.layers:
        return f"{args.model} has only {model.layers} layers for {layout.pp} pipeline stages"
    if not divides_layers(model, layout.tp, plan.engine):
        return f"TP={layout.tp} does not divide the heads of keys and values of {args.model}: {model.kv_heads}"
    return ""


def planned(
    model: str | None = None,
    strategies: Sequence[Strategy] = (),
    engine: str = "",
    lengths: AskedLengths = AskedLengths(),  # noqa: B008 - it is frozen
) -> list[Plan]:
    """The plans of every strategy's launcher with the settings in the environment; no GPU is needed.

    model: a model's name, of PRESETS or of the launchers' own. strategies, engine: these alone, instead of the
    environment's. Raises Problem for another model.
    """
    environment = with_slurm_hosts({"DEVICE": "cuda", "NODE_RANK": "0", **os.environ})  # this may be none of HOSTS
    if not environment.get("HOSTS"):
        # The README's hardware, at an address of nobody: a name would be looked up, and a question needs no network.
        environment = {"NNODES": "2", "MASTER_ADDR": "192.0.2.1", **environment}
    environment |= settings_of(model, lengths)
    if engine:
        environment |= {"ENGINE": engine}
    return [plan(environment, strategy) for strategy in strategies or declarations(environment.get("MODEL_FAMILY", ""))]


def only_elsewhere(args: argparse.Namespace) -> list[str]:
    """A sentence for each strategy that only another engine has than the environment's: what it would take there."""
    sentences: list[str] = []
    if args.runs or args.calibrate:
        return sentences
    lengths = AskedLengths.of(args)
    family = settings_of(args.model, lengths).get("MODEL_FAMILY") or os.environ.get("MODEL_FAMILY") or "t5"
    here = {strategy.name for strategy in declarations(family)}
    for strategy in all_declarations():
        if strategy.name in here or family not in strategy.families:
            continue
        engine = strategy.engines[0]
        (its_plan,) = planned(args.model, [strategy], engine, lengths)
        reason = why_not(args, its_plan)
        if reason:
            sentences.append(f"{strategy.name} needs ENGINE={engine}, and there: {reason}")
            continue
        prediction = predicted(args, its_plan)
        size = f"{prediction.memory_bytes / GIB:.2f} GiB"
        takes = f"{prediction.time.total:.4g} s and {size}" if prediction.time else size
        sentences.append(f"{strategy.name} needs ENGINE={engine}, and would take {takes}.")
    return sentences


@dataclass(frozen=True)
class Entry:
    """A prediction, and the row of the runs that it is held against."""

    prediction: Prediction
    row: "Row | None"

    def compared(self) -> dict[str, tuple[float, float]]:
        """(measured, predicted) by what: seconds of an iteration, MB of the mean node, memory of the fullest GPU."""
        row = self.row
        prediction = self.prediction
        pairs: dict[str, tuple[float, float]] = {}
        if not row:
            return pairs
        if row.milliseconds and prediction.time:
            pairs["seconds"] = (row.milliseconds.median / 1000, prediction.time.total)
        traffic = row.measured[0].observed.traffic if row.measured else ()
        if traffic and any(prediction.node_bytes):
            nodes = len(prediction.node_bytes)
            sent = sum(link.bytes_per_iteration for link in traffic)
            pairs["MB"] = (sent / nodes / 1e6, sum(prediction.node_bytes) / nodes / 1e6)
        if row.on_gpu and row.peak_memory:
            pairs["allocated GiB"] = (max(row.peak_memory.values()) / 1024, prediction.memory.peak / GIB)
        return pairs


def header(args: argparse.Namespace, predictions: Sequence[Prediction]) -> str:
    """What is predicted: the models, the GPUs and the batches, each once. Raises Problem."""
    models = dict.fromkeys(model_in_words(args, each.job) for each in predictions)
    machines = dict.fromkeys(
        f"{each.job.parallel.world} x {device_in_words(each.machine.device)},"
        f" {each.machine.between.bandwidth * 8 / 1e9:.4g} Gbit/s a node, global batch {each.job.global_batch}"
        for each in predictions
    )
    return "\n".join((*models, *machines))


def whole_figures(entry: "Entry", whole: WholeTraining | None) -> dict[str, dict[str, float]]:
    """For programs: what a whole training takes, where that is asked and the time is known."""
    if not whole or not entry.prediction.time:
        return {}
    return {"whole_training": whole.figures(entry.prediction.job, entry.prediction.time.total)}


def show(
    entries: Sequence[Entry], refused: Mapping[str, str], elsewhere: Sequence[str], whole: WholeTraining | None = None
) -> None:
    """Prints the tables. refused: why not, by strategy. elsewhere: sentences on what another engine has. whole: the
    training whose hours are asked, too."""
    memory = [_memory(entry.prediction) for entry in entries]
    print(table(memory, ".2f"), end="\n\n")
    costs = [_cost(entry, whole) for entry in entries]
    print(table(costs, {"MB": ",.1f"}), end="\n\n")
    for name, reason in refused.items():
        print(f"{name} cannot run: {reason}")
    for sentence in elsewhere:
        print(sentence)
    first = entries[0].prediction
    link = first.machine.between.bandwidth * 8 / 1e9
    print(f"MB: sent by the busiest node to others per iteration, over {link:g} Gbit/s with {first.backend}.")
    if first.slower is None:
        print("No times: the speed of this CPU is unknown. --calibrate RUN measures it from a run.")
    elif first.directions:
        host = first.machine.host.operator_seconds * (first.slower or 1) * 1e6
        computing = f"computing takes {first.slower:.3g} times as long as the data sheet implies"
        print(f"Calibrated: {computing}, and an operator costs the host {host:.3g} us.")
    elif first.slower != 1:
        print(f"Calibrated: everything takes {first.slower:.3g} times as long as the device's data sheet implies.")
    for sentence in regrets(entries):
        print(sentence)


def regrets(entries: Sequence[Entry]) -> list[str]:
    """How much slower the run that the model names is than the fastest measured one; a sentence for each number of
    processes and batch of which two or more runs have a measured and a predicted time."""
    alike: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        if "seconds" in entry.compared():
            job = entry.prediction.job
            alike.setdefault((job.parallel.world, job.global_batch), []).append(entry)
    sentences = []
    for (world, _), own in alike.items():
        if len(own) < 2:
            continue
        named = min(own, key=lambda entry: entry.compared()["seconds"][1])
        fastest = min(own, key=lambda entry: entry.compared()["seconds"][0])
        slower = named.compared()["seconds"][0] / fastest.compared()["seconds"][0] - 1
        regret = "the fastest measured" if named is fastest else f"{slower:.1%} slower than {fastest.prediction.name}"
        sentences.append(f"Of {len(own)} runs in {world} processes the model names {named.prediction.name}: {regret}.")
    return sentences


def in_words(part: str) -> str:
    """A part of a predicted time, which may be what limits it, as a table says it."""
    return WAITING_FOR_HOST if part == "host" else part


def range_text(interval: tuple[float, float] | None, unit: float = 1.0) -> str:
    """An interval in few characters; "" for none."""
    return f"{interval[0] / unit:.3g}-{interval[1] / unit:.3g}" if interval else ""


def _memory(prediction: Prediction) -> dict[str, str | float]:
    """The cells of the first table."""
    device = prediction.machine.device
    memory = prediction.memory
    rest = dict(memory.components)

    def gib(*names: str) -> float:
        return sum(rest.pop(name, 0.0) for name in names) / GIB

    cells: dict[str, str | float] = {
        "GiB on the fullest": prediction.name,
        "TP/PP/DP": str(prediction.job.parallel),
        "weights": gib("weights"),
        "gradients": gib("gradients"),
        "optimizer": gib("optimizer"),
        "activations": gib("encoder", "decoder", "ends of stacks", "recomputed layer"),
        "logits, loss": gib("logits and loss"),
        "buffers": gib(*rest),
        "allocated": memory.peak / GIB,
    }
    if device.memory:
        cells["in use"] = prediction.memory_bytes / GIB
        cells["90 %"] = range_text(prediction.memory_interval, GIB)
        cells[f"of {device.name}"] = f"{prediction.memory_bytes / device.memory:.0%}"
    cells["peak at"] = memory.moment
    cells["in CPU memory"] = sum(memory.cpu.values()) / GIB
    return cells


def _cost(entry: Entry, whole: WholeTraining | None) -> dict[str, str | float]:
    """The cells of the second table: bytes and time, what was measured of them, and how far the prediction is off."""
    prediction = entry.prediction
    batch = prediction.job.global_batch
    cells: dict[str, str | float] = {
        "seconds": prediction.name,
        "samples": batch,
        "MB": max(prediction.node_bytes) / 1e6,
    }
    if prediction.time:
        cells |= {in_words(part): seconds for part, seconds in prediction.time.parts.items()}
        cells["all"] = prediction.time.total
        cells["90 %"] = range_text(prediction.seconds_interval)
        cells["samples/s"] = batch / prediction.time.total
        cells["TFLOP/s"] = prediction.tflops
        if prediction.mfu is not None:
            cells["MFU"] = f"{prediction.mfu:.1%}"
        if whole:
            cells |= whole.figures(prediction.job, prediction.time.total)
    cells["limited by"] = in_words(prediction.limit)
    for quantity, (measured, expected) in entry.compared().items():
        cells[f"{quantity} measured"] = measured
        cells[f"{quantity} off"] = f"{expected / measured - 1:+.1%}"
    return cells
