"""A comparison of runs: rows with everything that is known of them, grouped by the number of processes.

Complete runs of one strategy with the same settings are one row, its repeats. A run that did not end well is a row
of its own, with its status and without figures.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from t5bench.compare import comparable, statistics
from t5bench.compare.comparable import MUST_AGREE, WORLD_SIZE, gpu_names, setting, show
from t5bench.compare.reduction import Reduction, precision, reduction_of
from t5bench.compare.statistics import Estimate
from t5bench.model import flops, peaks
from t5bench.record import samples
from t5bench.record.log import Iteration
from t5bench.record.records import Run
from t5bench.record.status import COMPLETE

# Relative, of the loss. Looser than the parity check's, for runs of any length and learning rate, in which rounding
# grows. In bf16 and fp16 a rounding is up to 2**-9 of a number, and layouts round in different places.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
# The order of the launchers' ports; a strategy that is not here comes after them.
ORDER = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "pipeline", "tensor", "hybrid")
BASELINE, EQUAL, DIFFERENT, UNKNOWN = "baseline", "yes", "NO", "-"
# Of what must agree, that which leaves the loss as it is up to rounding.
_SAME_LOSS = {WORLD_SIZE, "engine", "device", "gpu"}


@dataclass(frozen=True)
class Parity:
    """Whether a row trains as the baseline does: the largest relative difference of the loss, and its iteration."""

    verdict: str
    difference: float | None = None
    iteration: int | None = None

    def __str__(self) -> str:
        if self.difference is None:
            return self.verdict
        if math.isnan(self.difference):
            return f"{self.verdict} (not a number at {self.iteration})"
        if self.difference == 0:
            return f"{self.verdict} (0)"
        return f"{self.verdict} ({self.difference:.0e} at {self.iteration})"


@dataclass(frozen=True)
class Measured:
    """One complete run with what its lines and samples say; timing is None where it logged no interval."""

    run: Run
    timing: statistics.Timing | None
    observed: samples.Observations


@dataclass
class Row:
    """One row. Rates are for all processes together, tflops and mfu (0 to 1) per GPU; ratio is throughput / baseline's.

    marks: what differs from the baseline because it was allowed to; mfu_missing: why there is no MFU.
    reduced_unlike: the precision in which the baseline reduces gradients, when this row does in another.
    """

    label: str
    runs: Sequence[Run]
    measured: Sequence[Measured]
    reduction: Reduction
    milliseconds: Estimate | None = None
    samples_per_second: Estimate | None = None
    tokens_per_second: Estimate | None = None
    ratio: Estimate | None = None
    tflops: float | None = None
    mfu: float | None = None
    mfu_missing: str = ""
    reduced_unlike: str = ""
    parity: Parity = field(default_factory=lambda: Parity(UNKNOWN))
    marks: list[str] = field(default_factory=list)
    is_baseline: bool = False

    @property
    def run(self) -> Run:
        """The first of the repeats, which stands for what they share."""
        return self.runs[0]

    @property
    def strategy(self) -> str:
        return self.run.strategy

    @property
    def complete(self) -> bool:
        return bool(self.measured)

    @property
    def layout(self) -> str:
        return "/".join(str(self.run.layout[axis]) for axis in ("tp", "pp", "dp"))

    @property
    def run_medians(self) -> list[float]:
        """Each repeat's median milliseconds per iteration."""
        return [entry.timing.milliseconds.median for entry in self.measured if entry.timing]

    @property
    def on_gpu(self) -> bool:
        return self.run.nodes[0].get("device") == "cuda"

    @cached_property
    def peak_memory(self) -> dict[int, float]:
        """MiB by rank, the most over the repeats: on the GPU as PyTorch counts it, on a CPU the resident set."""
        peak_of: dict[int, float] = {}
        for entry in self.measured:
            for peak in entry.run.peak_memory:
                mib = peak.device_mib if self.on_gpu else peak.host_mib
                if mib is not None:
                    peak_of[peak.rank] = max(mib, peak_of.get(peak.rank, 0.0))
        return dict(sorted(peak_of.items()))

    @property
    def sent_per_iteration(self) -> float | None:
        """Bytes that the busiest node sent per iteration, the median over the repeats that have it."""
        sent = [s for entry in self.measured if (s := entry.observed.sent_per_iteration) is not None]
        return median(sent) if sent else None

    @property
    def final_loss(self) -> float | None:
        """Nats per target token on the last line that has one, the median over the repeats; nan when one diverged."""
        last = [loss for entry in self.measured if (loss := _last_loss(entry.run.iterations)) is not None]
        if any(math.isnan(loss) for loss in last):
            return math.nan
        return median(last) if last else None

    @property
    def warnings(self) -> list[str]:
        return list(dict.fromkeys(e.timing.warning for e in self.measured if e.timing and e.timing.warning))


@dataclass(frozen=True)
class Group:
    """The rows of one number of processes. baseline may belong to another group when that was allowed."""

    world_size: int
    rows: Sequence[Row]


@dataclass(frozen=True)
class Comparison:
    """All groups, and what is to be said about them.

    verdicts come first on the page; problems are why the answer is no (a run that is not complete, another loss).
    """

    groups: Sequence[Group]
    baseline: str
    verdicts: Sequence[str]
    problems: Sequence[str]
    notes: Sequence[str]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    @property
    def sound(self) -> bool:
        return not self.problems

    @property
    def not_of_gpus(self) -> str:
        """Why these figures say nothing of Megatron-DeepSpeed on GPUs; "" when they do."""
        kinds = []
        if any(not row.on_gpu for row in self.rows):
            kinds.append("CPU")
        if any(row.run.engine == "native" for row in self.rows):
            kinds.append("native engine")
        return " / ".join(kinds)

    def to_json(self) -> dict[str, Any]:
        """Everything, in units that the keys name; a number that is none (nan, inf) as text."""
        return {
            "baseline": self.baseline,
            "sound": self.sound,
            "verdicts": list(self.verdicts),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "groups": [
                {"world_size": group.world_size, "rows": [_row_json(row) for row in group.rows]}
                for group in self.groups
            ],
        }


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _row_json(row: Row) -> dict[str, Any]:
    def estimate(value: Estimate | None) -> dict[str, float | None] | None:
        return asdict(value) if value else None

    return {
        "label": row.label,
        "strategy": row.strategy,
        "world_size": row.run.world_size,
        "layout": dict(row.run.layout),
        "engine": row.run.engine,
        "device": row.run.nodes[0].get("device"),
        "gpu": gpu_names(row.run),
        "status": row.run.status,
        "reason": row.run.reason,
        "remedy": row.run.record.get("remedy", ""),
        "is_baseline": row.is_baseline,
        "milliseconds_per_iteration": estimate(row.milliseconds),
        "milliseconds_of_runs": row.run_medians,
        "samples_per_second": estimate(row.samples_per_second),
        "tokens_per_second": estimate(row.tokens_per_second),
        "throughput_ratio": estimate(row.ratio),
        "tflops_per_gpu": row.tflops,
        "mfu": row.mfu,
        "mfu_missing": row.mfu_missing,
        "peak_memory_mib": {str(rank): mib for rank, mib in row.peak_memory.items()},
        "peak_memory_of": "gpu" if row.on_gpu else "host",
        "bytes_sent_per_iteration": row.sent_per_iteration,
        "final_loss": _finite(row.final_loss),
        "parity": {
            "verdict": row.parity.verdict,
            "largest_relative_difference": _finite(row.parity.difference),
            "iteration": row.parity.iteration,
        },
        "gradient_reduction": asdict(row.reduction),
        "differs_from_baseline": row.marks,
        "baseline_reduces_in": row.reduced_unlike,
        "warnings": row.warnings,
        "limits": limits(row),
        "runs": [_run_json(run, row) for run in row.runs],
    }


def _run_json(run: Run, row: Row) -> dict[str, Any]:
    entry = next((entry for entry in row.measured if entry.run is run), None)
    timing = entry.timing if entry else None
    return {
        "directory": str(run.directory),
        "started": run.record.get("started"),
        "milliseconds_per_iteration": asdict(timing.milliseconds) if timing else None,
        "quartiles": list(timing.spread) if timing else None,
        "outliers": timing.outliers if timing else None,
        "intervals_used": len(timing.used) if timing else 0,
        "intervals_dropped": timing.dropped_by_reason() if timing else {},
        "traffic": [asdict(traffic) for traffic in entry.observed.traffic] if entry else [],
        "gpu_power_w": entry.observed.power_w if entry else None,
        "gpu_utilization_percent": entry.observed.utilization if entry else None,
        "settings": dict(run.record["settings"]),
        "versions": dict(run.record.get("versions") or {}),
        "commits": dict(run.record.get("commits") or {}),
    }


def _last_loss(lines: Sequence[Iteration]) -> float | None:
    return next((line.lm_loss for line in reversed(lines) if line.lm_loss is not None), None)


def largest_difference(run: Run, baseline: Run) -> tuple[float, int] | None:
    """The largest relative difference of the loss over the iterations that both logged, and its iteration.

    The first iteration where one of them is not a finite number counts as nan; None when they share no iteration.
    """
    reference = {line.iteration: line.lm_loss for line in baseline.iterations if line.lm_loss is not None}
    largest = None
    for line in run.iterations:
        expected = reference.get(line.iteration)
        if expected is None or line.lm_loss is None:
            continue
        if not (math.isfinite(expected) and math.isfinite(line.lm_loss)):
            return math.nan, line.iteration
        scale = abs(expected) or 1.0
        difference = abs(line.lm_loss - expected) / scale
        if largest is None or difference > largest[0]:
            largest = difference, line.iteration
    return largest


# ---- rows ------------------------------------------------------------------------------------------------------------

# What may tell two rows of one strategy apart, by the name for people; the label tells those that do.
_DISTINCTIONS: Mapping[str, Callable[[Run], Any]] = {
    **MUST_AGREE,
    "TP": lambda run: run.layout["tp"],
    "PP": lambda run: run.layout["pp"],
    "nodes": lambda run: run.layout["nnodes"],
    "gradients": reduction_of,
    "FLASH_ATTENTION": lambda run: setting(run, "FLASH_ATTENTION"),
    "ds_config": lambda run: json.dumps(run.record.get("ds_config"), sort_keys=True),
}


def _group_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Complete repeats together, every other run alone, in the order in which they came."""
    rows: dict[Any, list[Run]] = {}
    for number, run in enumerate(runs):
        key: Any = number
        if run.status == COMPLETE:
            key = (run.strategy, run.world_size, *(of(run) for of in _DISTINCTIONS.values()))
        rows.setdefault(key, []).append(run)
    return list(rows.values())


def _labels(rows: Sequence[Sequence[Run]]) -> list[str]:
    labels = []
    for runs in rows:
        alike = [other[0] for other in rows if _place(other[0]) == _place(runs[0])]
        text = runs[0].strategy
        if len(alike) > 1:
            details = [
                name if name == "ds_config" else f"{name} {show(of(runs[0]))}"
                for name, of in _DISTINCTIONS.items()
                if comparable.differing(of, alike)
            ]
            text += f" ({', '.join(details) or f'run {_path_tail(runs[0].directory)}'})"
        labels.append(text)
    return labels


def _place(run: Run) -> tuple[str, int]:
    return run.strategy, run.world_size


def _path_tail(directory: Path) -> str:
    return "/".join(directory.parts[-2:])


def shape_of(run: Run) -> flops.Shape | None:
    """The model's shape; None where the padded vocabulary is not known."""
    vocabulary = run.layout.get("padded_vocab_size")
    return flops.Shape.of_settings(run.number, int(vocabulary)) if vocabulary else None


def make_row(label: str, runs: Sequence[Run], peak: float | None = None) -> Row:
    """A row over the repeats of one run. peak: dense TFLOP/s of the GPU, where its name does not tell."""
    measured = []
    if runs[0].status == COMPLETE:
        for run in runs:
            timing = statistics.timing(run.iterations, run.record["settings"])
            measured.append(Measured(run, timing, samples.observe(run, timing.used if timing else ())))
    row = Row(label, runs, measured, reduction_of(runs[0]))
    timings = [entry.timing.milliseconds for entry in measured if entry.timing]
    if timings:
        run = row.run
        row.milliseconds = statistics.of_repeats(timings)
        row.samples_per_second = row.milliseconds.per(1000.0 * run.number("GLOBAL_BATCH_SIZE"))
        lengths = run.number("ENCODER_SEQ_LENGTH") + run.number("DECODER_SEQ_LENGTH")
        row.tokens_per_second = row.samples_per_second.times(lengths)
        _add_rates(row, peak)
    return row


def _add_rates(row: Row, peak: float | None) -> None:
    run, shape = row.run, shape_of(row.run)
    if shape is None:
        row.mfu_missing = "the record has no padded_vocab_size"
        return
    operations = flops.flops_per_iteration(shape, run.number("GLOBAL_BATCH_SIZE"))
    row.tflops = operations / (row.milliseconds.median / 1000) / run.world_size / 1e12
    if not row.on_gpu:
        row.mfu_missing = "it ran on a CPU"
        return
    name, given = gpu_names(run), setting(run, "PEAK_TFLOPS")
    peak = peak or (float(given) if given else None) or peaks.peak_tflops(name or "", precision(run))
    if peak:
        row.mfu = row.tflops / peak
    else:
        row.mfu_missing = f"no peak is known for {name or 'this GPU'} in {precision(run)}: --peak-tflops gives one"


def _differences(run: Run, baseline: Run) -> dict[str, tuple[Any, Any]]:
    """What must agree and does not: the run's value and the baseline's, by name."""
    both = {name: (of(run), of(baseline)) for name, of in MUST_AGREE.items()}
    both[WORLD_SIZE] = run.world_size, baseline.world_size
    return {name: pair for name, pair in both.items() if None not in pair and pair[0] != pair[1]}


def _distance(row: Row, baseline: Row) -> tuple[int, int]:
    other = sum(of(row.run) != of(baseline.run) for of in _DISTINCTIONS.values())
    return len(_differences(row.run, baseline.run)), other


def _compare_with(row: Row, baseline: Row, same_loss_runs: Sequence[Run]) -> None:
    differences = _differences(row.run, baseline.run)
    row.marks = [f"{name} {show(own)} instead of {show(base)}" for name, (own, base) in differences.items()]
    if row.samples_per_second and baseline.samples_per_second:
        row.ratio = row.samples_per_second.over(baseline.samples_per_second)
    own, base = row.reduction.dtype, baseline.reduction.dtype
    if row.ratio and own and base and own != base:
        row.reduced_unlike = base
    if row.complete:
        row.parity = _parity(row, set(differences) - _SAME_LOSS, same_loss_runs)


def _parity(row: Row, differences: Iterable[str], references: Sequence[Run]) -> Parity:
    run = row.run
    if excuse := ", ".join(differences):
        return Parity(f"n/a ({excuse})")
    if run.record["engine_patches"] == "megatron_t5_fixes" and run.layout["tp"] * run.layout["pp"] > 1:
        return Parity("n/a (initial weights)")
    worst: tuple[float, int] | None = None
    for own in row.runs:
        reference = next((r for r in references if _same_training(own, r)), None)
        if reference is None:
            different = [
                name for name in comparable.LOSS_SETTINGS if setting(own, name) != setting(references[0], name)
            ]
            return Parity(f"n/a ({', '.join(different)})")
        found = largest_difference(own, reference)
        if found and (worst is None or math.isnan(found[0]) or found[0] > worst[0]):
            worst = found
        if worst and math.isnan(worst[0]):
            break
    if worst is None:
        return Parity(UNKNOWN)
    if math.isnan(worst[0]):
        return Parity(DIFFERENT, *worst)
    if float(setting(run, "DROPOUT") or 0) > 0:
        return Parity("n/a (dropout)", *worst)
    return Parity(EQUAL if worst[0] <= LOSS_TOLERANCE[precision(run)] else DIFFERENT, *worst)


def _same_training(run: Run, other: Run) -> bool:
    return all(setting(run, name) == setting(other, name) for name in comparable.LOSS_SETTINGS)


# ---- the whole -------------------------------------------------------------------------------------------------------


def build(
    runs: Sequence[Run], baseline: str = "ddp", allowed: Iterable[str] = (), peak_tflops: float | None = None
) -> Comparison:
    """Compares at least one run. Raises NotComparableError where runs must not stand side by side."""
    comparable.refuse(runs, baseline, allowed)
    parts = sorted(_group_runs(runs), key=lambda part: _rank(part[0].strategy, baseline))
    rows = [make_row(label, part, peak_tflops) for label, part in zip(_labels(parts), parts, strict=True)]
    candidates = [row for row in rows if row.strategy == baseline and row.complete]
    for row in rows:
        same_size = [base for base in candidates if base.run.world_size == row.run.world_size]
        base = min(same_size or candidates, key=lambda base: _distance(row, base), default=None)
        if base is None:
            continue
        if base is row:
            row.is_baseline = True
            row.ratio = Estimate(1.0) if row.milliseconds else None
            diverged = _first_not_finite(row)
            row.parity = Parity(DIFFERENT, *diverged) if diverged else Parity(BASELINE)
        else:
            _compare_with(row, base, base.runs)
    groups = [
        Group(size, [row for row in rows if row.run.world_size == size])
        for size in sorted({row.run.world_size for row in rows})
    ]
    return Comparison(
        groups=groups,
        baseline=baseline,
        verdicts=_verdicts(groups, baseline),
        problems=_problems(rows, baseline),
        notes=[*_reductions(rows, baseline), *comparable.other_differences(runs), *_warnings(rows)],
    )


def _rank(strategy: str, baseline: str) -> int:
    if strategy == baseline:
        return -1
    return ORDER.index(strategy) if strategy in ORDER else len(ORDER)


def _first_not_finite(row: Row) -> tuple[float, int] | None:
    lines = (line for run in row.runs for line in run.iterations)
    found = next((line for line in lines if line.lm_loss is not None and not math.isfinite(line.lm_loss)), None)
    return (math.nan, found.iteration) if found else None


def _reductions(rows: Sequence[Row], baseline: str) -> list[str]:
    unlike: dict[tuple[str | None, str], list[str]] = {}
    for row in rows:
        if row.reduced_unlike:
            unlike.setdefault((row.reduction.dtype, row.reduced_unlike), []).append(row.label)
    return [
        f"gradients are reduced in {own} by {', '.join(dict.fromkeys(labels))}, in {base} by {baseline}: that is a "
        "part of their ratio to it, and GRADIENT_REDUCTION=fp32 takes it away"
        for (own, base), labels in unlike.items()
    ]


def _warnings(rows: Sequence[Row]) -> list[str]:
    rows_of: dict[str, list[str]] = {}
    for row in rows:
        for warning in row.warnings:
            labels = rows_of.setdefault(warning, [])
            labels += [row.label] if row.label not in labels else []
    return [f"{warning} ({', '.join(labels)})" for warning, labels in rows_of.items()]


def _problems(rows: Sequence[Row], baseline: str) -> list[str]:
    problems = []
    for row in rows:
        if not row.complete:
            reason = f": {row.run.reason}" if row.run.reason else ""
            problems.append(f"{row.label} is not complete but {row.run.status}{reason}")
        elif row.parity.verdict == DIFFERENT:
            what = "has a loss that is no number" if row.is_baseline else f"does not train as {baseline} does"
            problems.append(f"{row.label} {what}: {row.parity}")
        elif row.milliseconds is None:
            problems.append(f"{row.label} logged no interval (TRAIN_ITERS below LOG_INTERVAL?)")
    if not any(row.is_baseline for row in rows):
        problems.append(f"there is no complete {baseline} run to compare with")
    return problems


def _verdicts(groups: Sequence[Group], baseline: str) -> list[str]:
    sentences = [sentence for group in groups for sentence in _fastest(group, baseline)]
    rows = [row for group in groups for row in group.rows]
    judged = [row for row in rows if row.parity.verdict in (EQUAL, DIFFERENT) and not row.is_baseline]
    equal = [row for row in judged if row.parity.verdict == EQUAL]
    if judged and len(equal) == len(judged):
        largest = max(row.parity.difference or 0.0 for row in equal)
        who = f"All {len(equal)} train" if len(equal) > 1 else f"{equal[0].label} trains"
        how = f"the loss differs by {largest:.0e} of its value at most" if largest else "the losses are the same"
        sentences.append(f"{who} as {baseline} does: {how}.")
    unjudged = list(dict.fromkeys(r.parity.verdict for r in rows if r.parity.verdict.startswith("n/a")))
    if unjudged:
        sentences.append(
            f"Not judged for all: whether the loss is {baseline}'s, {', '.join(unjudged)}; "
            "scripts/check_parity.sh tells, without dropout."
        )
    return sentences


def _fastest(group: Group, baseline: str) -> list[str]:
    timed = sorted(
        (row for row in group.rows if row.samples_per_second), key=lambda row: -row.samples_per_second.median
    )
    if not timed:
        return []
    first, *rest = timed
    rate = first.samples_per_second
    sentence = f"With {group.world_size} processes {first.label} is the fastest: {rate.median:.4g} samples/s"
    if first.is_baseline:
        sentence += f", ahead of {rest[0].label} with {rest[0].samples_per_second.median:.4g}" if rest else ""
        if not rest:
            sentence = f"With {group.world_size} processes {first.label} alone was timed: {rate.median:.4g} samples/s"
    elif first.ratio:
        sentence += f", {_ratio_text(first.ratio)} of {baseline}"
    tied = [
        row.label
        for row in rest
        if rate.low is not None and row.samples_per_second.high is not None and row.samples_per_second.high >= rate.low
    ]
    if tied:
        sentence += f". Not to be told apart from it, as their 95 % intervals overlap: {', '.join(tied)}"
    elif rest and (rate.low is None or rest[0].samples_per_second.low is None):
        sentence += ". Too few intervals for a confidence interval"
    return [sentence + "."]


def _ratio_text(ratio: Estimate) -> str:
    interval = "" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.median:.2f}x{interval} the throughput"


def limits(row: Row) -> str:
    """What the measurements say of what limits a row; what was not measured and why. "" for a row without figures."""
    if not row.milliseconds:
        return ""
    observed = row.measured[0].observed
    parts = [_network_limit(observed)]
    if not row.on_gpu:
        parts.append("GPU utilisation and power: not measured, there is no GPU")
    else:
        seen = []
        if observed.utilization is not None:
            seen.append(f"a kernel ran {observed.utilization:.0f} % of the time on the busiest GPU")
        if observed.power_w is not None:
            seen.append(f"it drew {observed.power_w:.0f} W")
        parts.append(", ".join(seen) or "GPU utilisation and power: not measured, there are no samples")
    if row.mfu is not None:
        parts.append(f"the arithmetic takes {row.mfu:.1%} of the GPU's peak")
    else:
        parts.append(f"share of the GPU's peak: not known, {row.mfu_missing}")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _network_limit(observed: samples.Observations) -> str:
    sent = observed.sent_per_iteration
    if sent is None:
        return f"network: not measured, {observed.why_not_sent}"
    if observed.loopback:
        return f"network: one node, {bytes_text(sent)} per iteration over the loopback, other programs' included"
    busiest = observed.busiest_link
    if busiest is None or busiest.link_bits_per_second is None:
        return f"network: {bytes_text(sent)} per iteration and node; the link's speed is not known"
    return (
        f"network: {bytes_text(busiest.bytes_per_iteration)} per iteration over {busiest.interface} of node "
        f"{busiest.node}; "
        f"at the link's {busiest.link_bits_per_second / 1e9:g} Gbit/s that alone takes {busiest.share:.0%} of the time"
    )


def bytes_text(count: float) -> str:
    """In decimal units, as networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
