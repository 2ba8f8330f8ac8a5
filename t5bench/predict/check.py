"""``python -m t5bench predict --check FILE``: compares published measurements with the model, point by point.

Only its inputs decide which pairs of throughputs are compared. Nothing is fitted to a point.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from math import prod
from statistics import mean, median

from tabulate import tabulate

from t5bench.model import time
from t5bench.model.machine import GB, GIB, MIB
from t5bench.model.memory import Memory, layer_bytes, memory_of, model_states
from t5bench.model.parameters import layer_shapes
from t5bench.predict import published
from t5bench.predict.published import Point, device_of, job_of, require

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
class Comparison:
    """One measured and predicted figure."""

    use: str  # a key of HEADINGS
    point: str
    source: str
    what: str
    measured: float
    predicted: float
    unit: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Missing:
    """A point that cannot be predicted for a use, and why."""

    use: str
    point: str
    reason: str


Figures = Iterator[tuple[str, str, float, float, str]]  # use, what, measured, predicted, unit


def origin(point: Point) -> str:
    return point.source.repo or point.source.url or ""


def compare_all(points: Sequence[Point]) -> list[Comparison | Missing]:
    found: list[Comparison | Missing] = []
    for point, use in ((one, use) for one in points for use in one.use if use in PARTS):
        try:
            known = use == "throughput" or published.software(point)
            require(known, f"it is not known what {origin(point) or 'its software'} keeps in memory")
            rows = [Comparison(kind, point.id, origin(point), *rest) for kind, *rest in PARTS[use](point)]
            found += require(rows, "it has no figure of this kind that the model predicts")
        except ValueError as reason:
            found.append(Missing(use, point.id, str(reason)))
    return [*found, *ratios(points)]


def _layers(point: Point, figure: str) -> Iterator[tuple[bool, str, float]]:
    """Whether it is a decoder's, name and measured value of a figure that each stack's layers have."""
    for decoder, name in enumerate(("encoder", "decoder")):
        if size := getattr(point.measured, f"{name}_layer_{figure}"):
            yield bool(decoder), f"{name} layer", size


def _last_rank(point: Point) -> Memory:
    """The memory of the last rank, which is the one that Megatron logs."""
    own = point.source.repo == "NVIDIA/Megatron-LM" and (point.parallel.zero_stage or 0) > 1
    require(not own, "what Megatron-LM's own FSDP keeps in memory is not known")
    job = job_of(point)
    return memory_of(job, job.parallel.pipeline - 1, device_of(point))


def _memory(point: Point) -> Figures:
    measured, found, job = point.measured, _last_rank(point), job_of(point)
    states = published.optimizer_states(point.optimizer or "")
    require(states is not None, f"the states of the optimizer {point.optimizer} are not known")
    if size := measured.memory_allocated_bytes:
        yield "memory", "allocated", size / GB, found.allocated / GB, "GB"
    if size := measured.peak_memory_allocated_bytes:
        yield "peak", "peak allocated", size / GB, found.peak / GB, "GB"
    if size := measured.memory_in_use_mib:
        yield "peak", "device memory in use", size * MIB / GB, found.in_use / GB, "GB"
    for decoder, name, size in _layers(point, "model_states_mib"):
        count = sum(map(prod, layer_shapes(job.architecture, job.parallel.tensor, decoder)))
        yield "states", name, size, sum(model_states(job, count)[0].values()) / MIB, "MiB"


def _activations(point: Point) -> Figures:
    if size := point.measured.peak_minus_allocated_bytes:
        found = _last_rank(point)
        yield "activation", "peak - allocated", size / GB, (found.peak - found.allocated) / GB, "GB"
    for decoder, name, size in _layers(point, "activation_mib"):
        yield "activation", name, size, layer_bytes(job_of(point), decoder) / MIB, "MiB"
    for decoder, name, sizes in _layers(point, "activation_mb"):
        for tensor, size in sizes.items():
            yield "activation", f"{name}, TP {tensor}", size, layer_bytes(job_of(point, tensor), decoder) / MIB, "MiB"


def _bound(point: Point) -> Figures:
    """1 if the micro-batch is predicted to fit, as it did. A source may state the size of its GPU's memory."""
    stated, device = re.search(r"(\d+)\s?GB", point.hardware.gpu or ""), device_of(point)
    memory = require(int(stated[1]) * GIB if stated else device and device.memory, "the GPU's memory is not stated")
    used = memory_of(job_of(point), 0, device).in_use
    yield "bound", f"{used / GIB:.1f} of {memory / GIB:.0f} GiB", 1, float(used <= memory), ""


def _throughput(point: Point) -> Figures:
    require(point.hardware.gpu, "the GPU is not stated")
    yield "throughput", "", samples_per_second(point), predicted_rate(point)[0], "1/s"


PARTS = {"memory": _memory, "activation": _activations, "bound": _bound, "throughput": _throughput}


def samples_per_second(point: Point) -> float:
    """Samples per second, from whichever figure a source gives. Raises ValueError."""
    m, length = point.measured, point.lengths.encoder or point.lengths.decoder
    seconds = m.seconds_per_iteration_median or m.seconds_per_iteration or m.seconds_per_iteration_derived
    samples = m.samples_per_second or m.samples_per_second_derived or m.sequences_per_second_derived
    batch = point.global_batch or point.global_batch_inferred
    samples = samples or (m.tokens_per_second and length and m.tokens_per_second / length)
    return require(samples or (seconds and batch and batch / seconds), "it has no samples per second of training")


def predicted_rate(point: Point) -> tuple[float, time.Time]:
    """Samples per second and the iteration's parts. Raises ValueError."""
    job, count = job_of(point), point.hardware.count
    world = job.parallel.world
    require(point.parallel.dp or count, "its data-parallel size is not stated")
    require(world == (count or world), f"its layout has {world} GPUs and its hardware {count}")
    found = time.iteration(job, published.machine_of(point))
    return job.global_batch / found.total, found


def _kind(point: Point) -> str:
    """What two points must share to differ only in layout: everything that is stated except parallelism and batches."""
    source, recomputation = point.source, point.activation_checkpointing
    trained = point.model, point.lengths, point.precision, point.optimizer, point.dropout, recomputation
    source_table = source.repo, source.commit, source.path, source.url, point.how_counted
    return repr((source_table, trained, point.attention_kernel, point.hardware.gpu))


def ratios(points: Iterable[Point]) -> Iterator[Comparison | Missing]:
    """Of every two points of one kind whose layouts differ, the one with more GPUs over the one with fewer."""
    kinds: dict[str, list[tuple[Point, float, float]]] = {}
    for point in (one for one in points if "ratio" in one.use):
        try:
            rate, (predicted, parts) = samples_per_second(point), predicted_rate(point)
            require(parts.limit != "host", "launching its kernels takes longest, and that depends on the host")
            kinds.setdefault(_kind(point), []).append((point, rate, predicted))
        except ValueError as reason:
            yield Missing("ratio", point.id, str(reason))
    for members in kinds.values():
        members.sort(key=lambda member: (job_of(member[0]).parallel.world, member[0].id))
        pairs = [pair for pair in itertools.combinations(members, 2) if pair[0][0].parallel != pair[1][0].parallel]
        for (base, base_rate, base_predicted), (point, rate, predicted) in pairs:
            shares = rate / base_rate, predicted / base_predicted
            yield Comparison("ratio", f"{point.id} / {base.id}", origin(base), "", *shares, "")
        for point, *_ in members if not pairs else ():
            yield Missing("ratio", point.id, "no other point differs from it only in its layout")


def summary(rows: Sequence[Comparison]) -> str:
    """Mean, median and worst of the errors; for throughput the distribution of measured / predicted."""
    if rows[0].use == "bound":
        return f"{sum(row.measured == row.predicted for row in rows)} of {len(rows)} as published"
    if rows[0].use == "throughput":
        shares = sorted(row.measured / row.predicted for row in rows)
        spread = f"{shares[0]:.2f} to {shares[-1]:.2f}, median {median(shares):.2f}"
        return f"{len(rows)} points: measured / predicted {spread}"
    errors = [abs(row.error) for row in rows]
    return f"{len(rows)} figures: mean {mean(errors):.1%}, median {median(errors):.1%}, worst {max(errors):.1%}"


def run(args: argparse.Namespace) -> int:
    """Prints the check; 1 if an entry is invalid. Raises Problem."""
    points, invalid, unknown = published.read(args.check)
    found = compare_all(points)
    compared = [row for use in HEADINGS for row in found if isinstance(row, Comparison) and row.use == use]
    missing = [entry for entry in found if isinstance(entry, Missing)]
    if args.json:
        content = {"rows": [asdict(row) | {"error": row.error} for row in compared]}
        content |= {"missing": [asdict(entry) for entry in missing], "notes": invalid + unknown}
        print(json.dumps(content, indent=2))
        return int(bool(invalid))
    for use, rows in itertools.groupby(compared, lambda row: row.use):
        show(use, list(rows))
    print(f"\n{len(missing)} figures cannot be predicted")
    print(tabulate(map(astuple, missing), tablefmt="plain"))
    for sentence in invalid + unknown:
        print(f"note: {sentence}")
    return int(bool(invalid))


def show(use: str, rows: Sequence[Comparison]) -> None:
    print(f"\n{HEADINGS[use]}: {summary(rows)}")
    for source in dict.fromkeys(row.source for row in rows) if use in ("ratio", "throughput") else ():
        print(f"  {source}: {summary([row for row in rows if row.source == source])}")
    cells = [(r.point, r.what, f"{r.measured:.4g}", f"{r.predicted:.4g} {r.unit}", f"{r.error:+.1%}") for r in rows]
    print(tabulate(cells, headers=("point", "", "measured", "predicted", "error"), disable_numparse=True))
