"""The figures of costs: predicted beside measured, memory against throughput, where an iteration's time went."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from t5bench.compare.comparable import gpu_names
from t5bench.compare.comparison import Comparison
from t5bench.compare.rows import Row
from t5bench.model.machine import device_of
from t5bench.model.prediction import Prediction, machine_of
from t5bench.record.files import PROFILE, RecordError, read
from t5bench.report import figures
from t5bench.report.figures import INK, LEFT_OUT, Figure, Panel, Series, by_size
from t5bench.report.tables import prediction

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b9a400", LEFT_OUT,
           "#7766cc", "#44aa99", "#aa4466", "#a0783c", "#99bb55", "#dd8899", "#5599aa")  # fmt: skip
MOST_MS = 1e9  # eleven days
KINDS = {name: name for name in ("weights", "gradients", "optimizer")}
KINDS |= dict.fromkeys(("encoder", "decoder", "ends of stacks"), "activations") | {"logits and loss": "logits and loss"}


def all_figures(comparison: Comparison, root: Path) -> list[Figure]:
    """Those for which there is something measured. root: what the runs' directories are relative to."""
    rows = figures.rows_of(comparison)
    found = [figures.throughput(rows), _pareto(rows), _memory(rows), *_costs(rows, root)]
    found += [figures.loss(rows, comparison.baseline), figures.times(rows)]
    return [figure for figure in found if figure.panels]


def _memory(rows: Mapping[str, Row]) -> Figure:
    found, kinds, thick = [], {}, ""
    for name, row in rows.items():
        kinds[row.on_gpu] = "GPU, allocated by PyTorch" if row.on_gpu else "host, resident set"
        if not (peaks := list(row.peak_memory.values())):
            continue
        if row.on_gpu and (known := prediction(row)):
            thick = " The thick bars are what the cost model predicts for it."
            found += _stacked(name, _predicted_memory(known))
            limits = [device.get("memory_mib") for node in row.run.nodes for device in node["devices"]]
            limit = [(min(limits), name)] if limits and all(limits) else []
            found.append(Series(name, "limit", limit, "", INK, "the device's memory"))
        low, high = min(peaks), max(peaks)
        text = f"{high:,.0f}" if high - low < 0.5 else f"{low:,.0f} to {high:,.0f}"
        found.append(Series(name, "interval", [((0, high), name)], "", INK, "measured"))
        found.append(Series(name, "dots", [(peak, name) for peak in peaks], text, "", "each rank"))
    caption = "The highest use of each rank, a dot for each. The fullest decides what fits." + thick
    unit = f"peak memory in MiB ({' / '.join(kinds.values())}; less is better)"
    return Figure("Memory", unit, caption, by_size(rows, found))


def _costs(rows: Mapping[str, Row], root: Path) -> list[Figure]:
    sent, time = [], []
    profiles = {name: measured_parts(root / row.run.directory) for name, row in rows.items()}
    every = dict.fromkeys(part for parts in profiles.values() for part in parts)
    aligned = {name: {part: own.get(part, 0.0) for part in every} for name, own in profiles.items()}
    parts = [one for name, own in aligned.items() for one in _stacked(name, own)]
    for name, row in rows.items():
        known = prediction(row) if row.measured else None
        if known and row.run.layout.nnodes > 1 and row.sent_per_iteration:
            sent += _beside(name, {"predicted": max(known.node_bytes) / 1e6}, row.sent_per_iteration / 1e6)
        if known and row.milliseconds:
            time += _beside(name, _predicted_time(row, known), row.milliseconds.median)
    thick = "Thick is what the cost model predicts, thin what was measured."
    mean = "The mean of all ranks, whose parts add up to the profiled iteration; profiling makes it slower."
    of_bytes = "MB that the busiest node sends in an iteration"
    return [
        Figure("Bytes, predicted and measured", of_bytes, thick, by_size(rows, sent)),
        Figure("Time, predicted and measured", "ms of an iteration", f"{thick} By data sheets.", by_size(rows, time)),
        Figure("Where the time went", "ms of the profiled iteration", mean, by_size(rows, parts)),
    ]


def _stacked(name: str, parts: Mapping[str, float]) -> Iterator[Series]:
    """Bars end to end; a part has the same colour in every row, by its place among the parts."""
    start = 0.0
    for number, (part, size) in enumerate(parts.items()):
        if size:
            yield Series(name, "bar", [((start, start + size), name)], "", COLOURS[number % len(COLOURS)], part)
        start += size


def _beside(name: str, parts: Mapping[str, float], measured: float) -> list[Series]:
    """Nothing where nothing is predicted."""
    if not (predicted := sum(parts.values())):
        return []
    number = f"{measured:,.0f}" if measured >= 100 else f"{measured:.3g}"
    text = f"{number} (predicted {predicted / measured - 1:+.0%})"
    return [*_stacked(name, parts), Series(name, "interval", [((0, measured), name)], text, INK, "measured")]


def _predicted_memory(known: Prediction) -> dict[str, float]:
    """MiB by part."""
    parts = dict.fromkeys([*KINDS.values(), "buffers"], 0.0)
    for part, size in known.memory.components.items():
        parts[KINDS.get(part, "buffers")] += size / 2**20
    return parts


def _predicted_time(row: Row, known: Prediction) -> dict[str, float]:
    """Milliseconds by part; nothing for a device or a link of which nothing is known."""
    device, link, layout = device_of(gpu_names(row.run) or ""), row.measured[0].observed.busiest_link, row.run.layout
    if not device or row.run.plan.gpus_shared or (layout.nnodes > 1 and not link):
        return {}
    machine = machine_of(device, link.link_bits_per_second / 1e9 if link else 1.0, layout.nproc_per_node)
    time = Prediction(known.job, machine, known.backend).time
    return {part: 1000 * seconds for part, seconds in time.parts.items()} if time else {}


def measured_parts(directory: Path) -> dict[str, float]:
    """Milliseconds by part, the mean of all ranks; nothing where the run was not profiled by part."""
    try:
        ranks = json.loads(read(directory / PROFILE)).get("ranks") or []
        names = dict.fromkeys(part for rank in ranks for part in rank["parts"])
        parts = {name: sum(float(rank["parts"].get(name, 0)) for rank in ranks) / len(ranks) for name in names}
        return parts if all(0 <= ms < MOST_MS for ms in parts.values()) else {}
    except (RecordError, AttributeError, KeyError, TypeError, ValueError):
        return {}


def _pareto(rows: Mapping[str, Row]) -> Figure:
    sizes: dict[int, dict[str, tuple[float, float]]] = {}
    for name, row in rows.items():
        if row.samples_per_second and row.peak_memory:
            point = max(row.peak_memory.values()), row.samples_per_second.median
            sizes.setdefault(row.run.world_size, {})[name] = point
    panels = []
    for size, points in sizes.items():
        best = [
            p for p in points.values() if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points.values())
        ]
        front = Series("", "line", best, "", LEFT_OUT, "not beaten in both")
        dots = [Series(name, "point", [p], f"{p[1]:.4g} samples/s in {p[0]:,.0f} MiB") for name, p in points.items()]
        panels.append(Panel([front, *dots], f"{size} processes", "samples/s", height=2.4))
    caption = "Up and to the left is better. The line joins the rows that no other beats in both."
    return Figure("Memory against throughput", "peak memory of the fullest rank in MiB", caption, panels)
