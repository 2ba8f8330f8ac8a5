"""``python -m t5bench predict --check FILE``: compares published measurements with the model, point by point.

Only its inputs decide which pairs of throughputs are compared. Nothing is fitted to a point.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from statistics import mean, median

from tabulate import tabulate

from t5bench.model import time
from t5bench.model.activations import layer_bytes
from t5bench.model.machine import GIB, MIB
from t5bench.model.memory import memory_of, model_states
from t5bench.model.parameters import layer_shapes
from t5bench.predict import published
from t5bench.predict.published import Point, Unpredictable, device_of, job_of

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
    """One measured and predicted figure. use: a key of HEADINGS."""

    use: str
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
GB = 1e9


def compare_all(points: Sequence[Point]) -> list[Comparison | Missing]:
    found: list[Comparison | Missing] = []
    for point, use in ((one, use) for one in points for use in one.use if use in PARTS):
        try:
            if use != "throughput" and not published.software(point):
                raise Unpredictable(f"it is not known what {point.source.repo or point.source.url} keeps in memory")
            rows = [
                Comparison(kind, point.id, point.source.repo or point.source.url or "", *rest)
                for kind, *rest in PARTS[use](point)
            ]
            found += rows or [Missing(use, point.id, "it has no figure of this kind that the model predicts")]
        except (Unpredictable, ValueError) as reason:
            found.append(Missing(use, point.id, str(reason)))
    return [*found, *ratios(points)]


def _memory(point: Point) -> Figures:
    """The memory of the last rank, which is the one that Megatron logs."""
    measured, job = point.measured, job_of(point)
    if published.optimizer_states(point.optimizer or "") is None:
        raise Unpredictable(f"the states of the optimizer {point.optimizer} are not known")
    found = memory_of(job, job.parallel.pipeline - 1, device_of(point))
    if size := measured.get("memory_allocated_bytes"):
        yield "memory", "allocated", size / GB, found.allocated / GB, "GB"
    if size := measured.get("peak_memory_allocated_bytes"):
        yield "peak", "peak allocated", size / GB, found.peak / GB, "GB"
    if size := measured.get("memory_in_use_mib"):
        yield "peak", "device memory in use", size * MIB / GB, found.in_use / GB, "GB"
    for decoder, name in enumerate(("encoder", "decoder")):
        if size := measured.get(f"{name}_layer_model_states_mib"):
            count = sum(map(prod, layer_shapes(job.architecture, job.parallel.tensor, bool(decoder))))
            yield "states", f"{name} layer", size, sum(model_states(job, count)[0].values()) / MIB, "MiB"


def _activations(point: Point) -> Figures:
    measured = point.measured
    if size := measured.get("peak_minus_allocated_bytes"):
        job = job_of(point)
        found = memory_of(job, job.parallel.pipeline - 1, device_of(point))
        yield "activation", "peak - allocated", size / GB, (found.peak - found.allocated) / GB, "GB"
    for decoder, name in enumerate(("encoder", "decoder")):
        if size := measured.get(f"{name}_layer_activation_mib"):
            yield "activation", f"{name} layer", size, layer_bytes(job_of(point), bool(decoder)) / MIB, "MiB"
        for tensor, size in measured.get(f"{name}_layer_activation_mb", {}).items():  # mebibytes, by their parameters
            predicted = layer_bytes(job_of(point, int(tensor)), bool(decoder))
            yield "activation", f"{name} layer, TP {tensor}", size, predicted / MIB, "MiB"


def _bound(point: Point) -> Figures:
    """1 if the micro-batch is predicted to fit, as it did. A source may state the size of its GPU's memory."""
    stated, device = re.search(r"(\d+)\s?GB", point.hardware.gpu or ""), device_of(point)
    memory = int(stated[1]) * GIB if stated else device and device.memory
    if not memory:
        raise Unpredictable("the GPU's memory is not stated")
    used = memory_of(job_of(point), 0, device).in_use
    yield "bound", f"{used / GIB:.1f} of {memory / GIB:.0f} GiB", 1, float(used <= memory), ""


def _throughput(point: Point) -> Figures:
    if not point.hardware.gpu:
        raise Unpredictable("the GPU is not stated")
    yield "throughput", "", samples_per_second(point), predicted_rate(point)[0], "1/s"


PARTS = {"memory": _memory, "activation": _activations, "bound": _bound, "throughput": _throughput}


def samples_per_second(point: Point) -> float:
    """Samples per second, from whichever figure a source gives. Raises Unpredictable."""
    measured, batch = point.measured, point.global_batch or point.global_batch_inferred
    for name in ("samples_per_second", "samples_per_second_derived", "sequences_per_second_derived"):
        if name in measured:
            return measured[name]
    if "tokens_per_second" in measured and (length := point.lengths.encoder or point.lengths.decoder):
        return measured["tokens_per_second"] / length
    for name in ("seconds_per_iteration_median", "seconds_per_iteration", "seconds_per_iteration_derived"):
        if name in measured and batch:
            return batch / measured[name]
    raise Unpredictable("it has no samples per second of training")


def predicted_rate(point: Point) -> tuple[float, time.Time]:
    """Samples per second and the iteration's parts. Raises Unpredictable."""
    job = job_of(point)
    if job.parallel.world != (point.hardware.count or job.parallel.world):
        raise Unpredictable(f"its layout has {job.parallel.world} GPUs and its hardware {point.hardware.count}")
    found = time.iteration(job, published.machine_of(point))
    return job.global_batch / found.total, found


def _kind(point: Point) -> str:
    """What two points must share to differ only in layout: everything that is stated except parallelism and batches."""
    source, recomputation = point.source, point.activation_checkpointing
    trained = point.model, point.lengths, point.precision, point.optimizer, point.dropout, recomputation
    origin = source.repo, source.commit, source.path, source.url, point.how_counted
    return repr((origin, trained, point.attention_kernel, point.hardware.gpu))


def ratios(points: Iterable[Point]) -> Iterator[Comparison | Missing]:
    """Of every two points of one kind whose layouts differ, the one with more GPUs over the one with fewer."""
    kinds: dict[str, list[tuple[Point, float, float]]] = {}
    for point in points:
        if "ratio" not in point.use:
            continue
        try:
            rate, (predicted, parts) = samples_per_second(point), predicted_rate(point)
            if parts.limit == "host":
                raise Unpredictable("launching its kernels takes longest, and that depends on the host")
        except (Unpredictable, ValueError) as reason:
            yield Missing("ratio", point.id, str(reason))
            continue
        kinds.setdefault(_kind(point), []).append((point, rate, predicted))
    for members in kinds.values():
        members.sort(key=lambda member: (job_of(member[0]).parallel.world, member[0].id))
        pairs = [pair for pair in itertools.combinations(members, 2) if pair[0][0].parallel != pair[1][0].parallel]
        if not pairs:
            for point, *_ in members:
                yield Missing("ratio", point.id, "no other point differs from it only in its layout")
        for (base, base_rate, base_predicted), (point, rate, predicted) in pairs:
            names = f"{point.id} / {base.id}"
            measured, expected = rate / base_rate, predicted / base_predicted
            yield Comparison("ratio", names, base.source.repo or base.source.url or "", "", measured, expected, "")


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
    sentences = [*invalid, *unknown]
    found = compare_all(points)
    rows = {use: [row for row in found if isinstance(row, Comparison) and row.use == use] for use in HEADINGS}
    missing = [entry for entry in found if isinstance(entry, Missing)]
    if args.json:
        content = {"rows": [asdict(row) | {"error": row.error} for use in rows.values() for row in use]}
        print(json.dumps(content | {"missing": [asdict(entry) for entry in missing], "notes": sentences}, indent=2))
        return int(bool(invalid))
    for use, entries in rows.items():
        if entries:
            show(use, entries)
    print(f"\n{len(missing)} figures cannot be predicted")
    print(tabulate([(entry.use, entry.point, entry.reason) for entry in missing], tablefmt="plain"))
    for sentence in sentences:
        print(f"note: {sentence}")
    return int(bool(invalid))


def show(use: str, rows: Sequence[Comparison]) -> None:
    print(f"\n{HEADINGS[use]}: {summary(rows)}")
    if use in ("ratio", "throughput"):
        for source in dict.fromkeys(row.source for row in rows):
            print(f"  {source}: {summary([row for row in rows if row.source == source])}")
    cells = []
    for row in rows:
        figures = f"{row.measured:.4g}", f"{row.predicted:.4g} {row.unit}", f"{row.error:+.1%}"
        cells.append((row.point, row.what, *figures))
    print(tabulate(cells, headers=("point", "", "measured", "predicted", "error"), disable_numparse=True))
