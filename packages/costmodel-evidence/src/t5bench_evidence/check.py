"""``python -m t5bench predict --check FILE``: compares published measurements with the model, point by point.

Only its inputs decide which pairs of throughputs are compared. Nothing is fitted to a point.
"""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from itertools import combinations, groupby
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

from t5bench.costmodel import time
from t5bench.costmodel.job import UNREAD_MEMORY
from t5bench.costmodel.machine import GB, GIB, MIB
from t5bench.costmodel.memory import Memory, layer_bytes, memory_of, model_states
from t5bench.costmodel.parameters import layer_shapes
from t5bench.printed_table import text_table
from t5bench_evidence.jobs import job_of, machine_of, same_source_and_model
from t5bench_evidence.points import Point, read
from t5bench_evidence.words import Unpredictable, device_of, optimizer_states, require, software

# Those of this package; the second was collected after the model had been finished.
FILES = tuple(
    Path(__file__).with_name(f"{name}_measurements.json") for name in ("published_training", "more_published")
)
HEADINGS = {
    "memory": "Allocated memory",
    "peak": "Peak memory",
    "states": "States of a layer",
    "activation": "Activations",
    "bound": "Fits or not",
    "ratio": "Ratios of throughput within one source, differing only in layout",
    "throughput": "Throughput, samples per second",
}


@dataclass(frozen=True)
class PredictedFigure:
    """One measured and predicted figure."""

    use: str
    """A key of HEADINGS."""
    point: str
    """Its id, or those of the two points of a ratio."""
    source: str
    what: str
    measured: float
    predicted: float
    unit: str

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Missing:
    """A point that cannot be predicted for a use, and why."""

    use: str
    point: str
    reason: str


def compare_all(points: Sequence[Point]) -> list[PredictedFigure | Missing]:
    compared: list[PredictedFigure | Missing] = []
    for point in points:
        for use in point.use:
            if use in PARTS:
                compared += _compare(point, use)
    return [*compared, *ratios(points)]


def _compare(point: Point, use: str) -> Sequence[PredictedFigure | Missing]:
    try:
        is_known = use == "throughput" or software(point) not in ("", *UNREAD_MEMORY)
        require(is_known, f"it is not known what {point.origin or 'its software'} keeps in memory")
        rows = list(PARTS[use](point))
        require(rows, "it has no figure of this kind that the model predicts")
    except ValueError as reason:
        return [Missing(use, point.id, str(reason))]
    return rows


def _row(point: Point, use: str, what: str, measured: float, predicted: float, unit: str) -> PredictedFigure:
    return PredictedFigure(use, point.id, point.origin, what, measured, predicted, unit)


def _of_layers(point: Point, figure: str) -> Iterator[tuple[bool, str, Any]]:
    """Of a figure that the layers of each stack have: whether it is a decoder's, its name, and what was measured."""
    for is_decoder, stack in ((False, "encoder"), (True, "decoder")):
        measured = getattr(point.measured, f"{stack}_layer_{figure}")
        if measured:
            yield is_decoder, f"{stack} layer", measured


def _last_rank(point: Point) -> Memory:
    """The memory of the last rank, which is the one that Megatron logs."""
    has_own_sharding = point.source.repo == "NVIDIA/Megatron-LM" and (point.parallel.zero_stage or 0) > 1
    require(not has_own_sharding, "what Megatron-LM's own FSDP keeps in memory is not known")
    job = job_of(point)
    return memory_of(job, job.parallel.pipeline - 1, device_of(point))


def _memory(point: Point) -> Iterator[PredictedFigure]:
    measured = point.measured
    memory = _last_rank(point)
    job = job_of(point)
    is_known = optimizer_states(point.optimizer or "") is not None
    require(is_known, f"the states of the optimizer {point.optimizer} are not known")
    if measured.memory_allocated_bytes:
        allocated = measured.memory_allocated_bytes / GB
        yield _row(point, "memory", "allocated", allocated, memory.allocated / GB, "GB")
    if measured.peak_memory_allocated_bytes:
        peak = measured.peak_memory_allocated_bytes / GB
        yield _row(point, "peak", "peak allocated", peak, memory.peak / GB, "GB")
    if measured.memory_in_use_mib:
        in_use = measured.memory_in_use_mib * MIB / GB
        yield _row(point, "peak", "device memory in use", in_use, memory.in_use / GB, "GB")
    for is_decoder, name, size in _of_layers(point, "model_states_mib"):
        count = sum(prod(shape) for shape in layer_shapes(job.architecture, job.parallel.tensor, is_decoder))
        states, _ = model_states(job, count)
        yield _row(point, "states", name, size, sum(states.values()) / MIB, "MiB")


def _activations(point: Point) -> Iterator[PredictedFigure]:
    if point.measured.peak_minus_allocated_bytes:
        memory = _last_rank(point)
        measured = point.measured.peak_minus_allocated_bytes / GB
        predicted = (memory.peak - memory.allocated) / GB
        yield _row(point, "activation", "peak - allocated", measured, predicted, "GB")
    for is_decoder, name, size in _of_layers(point, "activation_mib"):
        yield _row(point, "activation", name, size, layer_bytes(job_of(point), is_decoder) / MIB, "MiB")
    for is_decoder, name, sizes in _of_layers(point, "activation_mb"):
        for tensor, size in sizes.items():
            predicted = layer_bytes(job_of(point, tensor), is_decoder) / MIB
            yield _row(point, "activation", f"{name}, TP {tensor}", size, predicted, "MiB")


def _bound(point: Point) -> Iterator[PredictedFigure]:
    """1 if the micro-batch is predicted to fit, as it did. A source may state the size of its GPU's memory."""
    stated = re.search(r"(\d+)\s?GB", point.hardware.gpu or "")
    device = device_of(point)
    if stated:
        memory = int(stated[1]) * GIB
    else:
        memory = device.memory if device else 0
    require(memory, "the GPU's memory is not stated")
    in_use = memory_of(job_of(point), 0, device).in_use
    what = f"{in_use / GIB:.1f} of {memory / GIB:.0f} GiB"
    yield _row(point, "bound", what, 1, float(in_use <= memory), "")


def _throughput(point: Point) -> Iterator[PredictedFigure]:
    require(point.hardware.gpu, "the GPU is not stated")
    rate, _ = predicted_rate(point)
    yield _row(point, "throughput", "", samples_per_second(point), rate, "1/s")


PARTS = {"memory": _memory, "activation": _activations, "bound": _bound, "throughput": _throughput}


def samples_per_second(point: Point) -> float:
    """Samples per second, from whichever figure a source gives. Raises Unpredictable."""
    measured = point.measured
    rate = measured.samples_per_second or measured.samples_per_second_derived or measured.sequences_per_second_derived
    length = point.lengths.encoder or point.lengths.decoder
    if not rate and measured.tokens_per_second and length:
        rate = measured.tokens_per_second / length
    seconds = (
        measured.seconds_per_iteration_median
        or measured.seconds_per_iteration
        or measured.seconds_per_iteration_derived
    )
    if not rate and seconds and point.batch:
        rate = point.batch / seconds
    if not rate:
        raise Unpredictable("it has no samples per second of training")
    return rate


def predicted_rate(point: Point) -> tuple[float, time.Time]:
    """Samples per second and the iteration's parts. Raises Unpredictable."""
    job = job_of(point)
    world = job.parallel.world
    count = point.hardware.count
    require(point.parallel.dp or count, "its data-parallel size is not stated")
    require(world == (count or world), f"its layout has {world} GPUs and its hardware {count}")
    parts = time.iteration(job, machine_of(point))
    return job.global_batch / parts.total, parts


@dataclass(frozen=True)
class Rate:
    """A point's throughput in samples per second."""

    point: Point
    measured: float
    predicted: float

    @cached_property
    def world(self) -> int:
        return job_of(self.point).parallel.world

    def over(self, base: "Rate") -> PredictedFigure:
        name = f"{self.point.id} / {base.point.id}"
        measured = self.measured / base.measured
        return PredictedFigure("ratio", name, base.point.origin, "", measured, self.predicted / base.predicted, "")


def ratios(points: Iterable[Point]) -> Iterator[PredictedFigure | Missing]:
    """Of every two points of one kind whose layouts differ, the one with more GPUs over the one with fewer."""
    kinds: dict[Hashable, list[Rate]] = {}
    for point in points:
        if "ratio" not in point.use:
            continue
        try:
            measured = samples_per_second(point)
            predicted, parts = predicted_rate(point)
            require(parts.limit != "host", "it mostly waits for the host, which was not measured")
        except ValueError as reason:
            yield Missing("ratio", point.id, str(reason))
            continue
        kinds.setdefault(same_source_and_model(point), []).append(Rate(point, measured, predicted))
    for rates in kinds.values():
        rates.sort(key=lambda rate: (rate.world, rate.point.id))
        pairs = [pair for pair in combinations(rates, 2) if pair[0].point.parallel != pair[1].point.parallel]
        for base, rate in pairs:
            yield rate.over(base)
        if not pairs:
            for rate in rates:
                yield Missing("ratio", rate.point.id, "no other point differs from it only in its layout")


def summary(rows: Sequence[PredictedFigure]) -> str:
    """Mean, median and worst of the errors; for throughput the distribution of measured / predicted."""
    if rows[0].use == "bound":
        return f"{sum(row.measured == row.predicted for row in rows)} of {len(rows)} as published"
    if rows[0].use == "throughput":
        shares = sorted(row.measured / row.predicted for row in rows)
        spread = f"{shares[0]:.2f} to {shares[-1]:.2f}, median {median(shares):.2f}"
        return f"{len(rows)} points: measured / predicted {spread}"
    errors = [abs(row.error) for row in rows]
    return f"{len(rows)} figures: mean {mean(errors):.1%}, median {median(errors):.1%}, worst {max(errors):.1%}"


def run(files: Sequence[Path], as_json: bool) -> int:
    """Prints the check of all files together; 1 if an entry is invalid. Raises Problem."""
    points: list[Point] = []
    invalid: list[str] = []
    unknown: list[str] = []
    for found, wrong, ignored in map(read, files):
        points += found
        invalid += wrong
        unknown += ignored
    entries = compare_all(points)
    missing = [entry for entry in entries if isinstance(entry, Missing)]
    order = list(HEADINGS)
    compared = [entry for entry in entries if isinstance(entry, PredictedFigure)]
    compared.sort(key=lambda row: order.index(row.use))
    if as_json:
        content = {"rows": [asdict(row) | {"error": row.error} for row in compared]}
        content |= {"missing": [asdict(entry) for entry in missing], "notes": invalid + unknown}
        print(json.dumps(content, indent=2))
        return int(bool(invalid))
    for use, rows in groupby(compared, lambda row: row.use):
        show(use, list(rows))
    print(f"\n{len(missing)} figures cannot be predicted")
    print(text_table([astuple(entry) for entry in missing]))
    for sentence in invalid + unknown:
        print(f"note: {sentence}")
    return int(bool(invalid))


def show(use: str, rows: Sequence[PredictedFigure]) -> None:
    print(f"\n{HEADINGS[use]}: {summary(rows)}")
    if use in ("ratio", "throughput"):
        for source in dict.fromkeys(row.source for row in rows):
            print(f"  {source}: {summary([row for row in rows if row.source == source])}")
    cells = [
        (row.point, row.what, f"{row.measured:.4g}", f"{row.predicted:.4g} {row.unit}", f"{row.error:+.1%}")
        for row in rows
    ]
    print(text_table(cells, ("point", "", "measured", "predicted", "error")))
