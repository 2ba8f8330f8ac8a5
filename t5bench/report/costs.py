"""The figures of costs: predicted beside measured, and memory against throughput."""

from collections.abc import Mapping, Sequence

from t5bench.compare.comparison import Comparison
from t5bench.compare.rows import Row
from t5bench.model.prediction import Prediction
from t5bench.report import figures, profiles
from t5bench.report.figures import INK, LEFT_OUT, Figure, Panel, Series, by_size, stacked
from t5bench.report.tables import predicted_bytes

KINDS = {name: name for name in ("weights", "gradients", "optimizer")}
KINDS |= dict.fromkeys(("encoder", "decoder", "ends of stacks"), "activations") | {"logits and loss": "logits and loss"}
STRETCHES = 100  # of the timeline, for each row; one takes about 100 bytes, drawn and as data
THICK = "Thick is what the cost model predicts, thin what was measured."


def all_figures(comparison: Comparison, rows: Mapping[str, Row], most: int) -> list[Figure]:
    """Those for which something is measured; of what takes many points, only so many rows."""
    found = [figures.throughput(rows), _pareto(rows), _memory(rows), _bytes(rows), _time(rows, comparison.predicted_by)]
    large = figures.best(rows, most)
    profiled = profiles.profiles_of(large)
    found += [profiles.parts(large, profiled), profiles.timeline(large, profiled, STRETCHES * most)]
    found += [figures.loss(large, comparison.baseline), figures.times(large)]
    return [figure for figure in found if figure.panels]


def _memory(rows: Mapping[str, Row]) -> Figure:
    found, kinds, thick = [], {}, ""
    for name, row in rows.items():
        kinds[row.on_gpu] = "GPU, allocated by PyTorch" if row.on_gpu else "host, resident set"
        if not (peaks := list(row.peak_memory.values())):
            continue
        if row.on_gpu and (known := row.prediction):
            thick = " The thick bars are what the cost model predicts for it."
            found += stacked(name, _predicted_memory(known))
            limits = [device.get("memory_mib") for node in row.run.nodes for device in node["devices"]]
            limit = [(min(limits), name)] if limits and all(limits) else []
            found.append(Series(name, "limit", limit, "", INK, "the device's memory"))
        low, high = min(peaks), max(peaks)
        text = f"{high:,.0f}" if high - low < 0.5 else f"{low:,.0f} to {high:,.0f}"
        found.append(Series(name, "interval", [((0, high), name)], "", INK, "measured"))
        found.append(Series(name, "dots", [(peak, name) for peak in peaks], text, "", "each rank"))
    caption = "The peak of each rank, one dot each. The fullest rank decides what fits." + thick
    unit = f"peak memory in MiB ({' / '.join(kinds.values())}; less is better)"
    return Figure("Memory", unit, caption, by_size(rows, found))


def _predicted_memory(known: Prediction) -> dict[str, float]:
    """MiB by part."""
    parts = dict.fromkeys([*KINDS.values(), "buffers"], 0.0)
    for part, size in known.memory.components.items():
        parts[KINDS.get(part, "buffers")] += size / 2**20
    return parts


def _bytes(rows: Mapping[str, Row]) -> Figure:
    found = []
    for name, row in rows.items():
        if row.sent_per_iteration and (predicted := predicted_bytes(row)):
            found += _beside(name, {"predicted": predicted[0] / 1e6}, row.sent_per_iteration / 1e6)
    unit = "MB that the busiest node sends per iteration (on one node: that its processes exchange)"
    return Figure("Bytes, predicted and measured", unit, THICK, by_size(rows, found))


def _time(rows: Mapping[str, Row], rests_on: Sequence[str]) -> Figure:
    found = []
    for name, row in rows.items():
        if row.predicted and row.milliseconds:
            parts = {part: 1000 * seconds for part, seconds in row.predicted.parts.items()}
            found += _beside(name, parts, row.milliseconds.median)
    caption = " ".join([THICK, *(f"{text[:1].upper()}{text[1:]}." for text in rests_on)])
    return Figure("Time, predicted and measured", "ms of an iteration", caption, by_size(rows, found))


def _beside(name: str, parts: Mapping[str, float], measured: float) -> list[Series]:
    """Nothing where nothing is predicted."""
    if not (predicted := sum(parts.values())):
        return []
    number = f"{measured:,.0f}" if measured >= 100 else f"{measured:.3g}"
    text = f"{number} (predicted {predicted / measured - 1:+.0%})"
    return [*stacked(name, parts), Series(name, "interval", [((0, measured), name)], text, INK, "measured")]


def _pareto(rows: Mapping[str, Row]) -> Figure:
    sizes: dict[int, dict[str, tuple[float, float]]] = {}
    for name, row in rows.items():
        if row.samples_per_second and row.peak_memory:
            point = max(row.peak_memory.values()), row.samples_per_second.median
            sizes.setdefault(row.run.world_size, {})[name] = point
    panels = []
    for size, points in sizes.items():
        ends = points.values()
        best = sorted(p for p in ends if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in ends))
        front = Series("", "line", best, "", LEFT_OUT, "not beaten in both")
        dots = [Series(name, "point", [p], f"{p[1]:.4g} samples/s in {p[0]:,.0f} MiB") for name, p in points.items()]
        panels.append(Panel([front, *dots], f"{size} processes", "samples/s", height=2.4))
    caption = "Up and to the left is better. The line joins the rows that no other beats in both."
    return Figure("Memory against throughput", "peak memory of the fullest rank in MiB", caption, panels)
