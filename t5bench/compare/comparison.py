"""A comparison of runs: their rows, grouped by the number of processes, each compared with the baseline's."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from msgspec import to_builtins

from t5bench import Problem
from t5bench.compare import comparable, parity
from t5bench.compare.comparable import compared, differing, gpu_names, show
from t5bench.compare.repeats import FEWEST_REPEATS, against_the_fastest, excludes_one, ran_in_one_order, ratio
from t5bench.compare.rows import MeasuredRun, Row, distinctions, group_runs, labels, limits, make_row
from t5bench.compare.statistics import Estimate
from t5bench.costmodel import time
from t5bench.costmodel.ties import TIES
from t5bench.costmodel.whole_training import WholeTraining
from t5bench.record.run import Run
from t5bench.record.samples import Observations
from t5bench.text import processes


@dataclass(frozen=True)
class Group:
    """The rows with one number of processes."""

    world_size: int
    rows: Sequence[Row]
    verdict: str
    """Which is the fastest, in a sentence, if that is known; "" if no row has a time."""
    taken: Row | None
    """The fastest, or of those that cannot be told from it the one that the rule for ties names; None where the runs do
    not say."""


@dataclass(frozen=True)
class Comparison:
    """All groups, and the sentences about them.

    verdicts come first on the page; problems say why the answer is no (a run that is not complete, another loss).
    predicted_by: the basis of the rows' predicted times.
    """

    groups: Sequence[Group]
    baseline: str
    verdicts: Sequence[str]
    problems: Sequence[str]
    notes: Sequence[str]
    predicted_by: Sequence[str] = ()
    whole: WholeTraining | None = None
    """The training whose hours are asked, too."""

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
        """Why these figures say nothing about Megatron-DeepSpeed on GPUs; "" if they do."""
        reasons = []
        if any(not row.on_gpu for row in self.rows):
            reasons.append("CPU")
        if any(row.run.engine == "native" for row in self.rows):
            reasons.append("native engine")
        return " / ".join(reasons)

    def to_json(self) -> dict[str, Any]:
        """Everything, in the units that the keys name; nan and inf are text."""
        groups = []
        for group in self.groups:
            rows = [_row_json(row) | _whole_json(row, self.whole) for row in group.rows]
            groups.append({"world_size": group.world_size, "rows": rows})
        return to_builtins(
            {
                "baseline": self.baseline,
                "sound": self.sound,
                "verdicts": self.verdicts,
                "problems": self.problems,
                "notes": self.notes,
                "groups": groups,
            }
        )


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _row_json(row: Row) -> dict[str, Any]:
    run = row.run
    recomputing = {"hardware_tflops_per_gpu": row.hardware_tflops} if row.hardware_tflops else {}
    return {
        "label": row.label,
        "strategy": row.strategy,
        "is_baseline": row.is_baseline,
        "mfu": row.mfu,
        "mfu_missing": row.mfu_missing,
        "warnings": row.warnings,
        "samples_per_second": row.samples_per_second,
        "tokens_per_second": row.tokens_per_second,
        "world_size": run.world_size,
        "engine": run.engine,
        "status": run.status,
        "reason": run.reason,
        "these_runs_alone": row.alone,
        "layout": asdict(run.layout) | {"padded_vocab_size": run.padded_vocab_size},
        "device": run.plan.device,
        "gpu": gpu_names(run),
        "remedy": run.record["remedy"],
        **recomputing,
        "milliseconds_per_iteration": row.milliseconds,
        "milliseconds_predicted": row.predicted and 1000 * row.predicted.total,
        "milliseconds_of_runs": row.run_medians,
        "throughput_ratio": row.ratio,
        "tflops_per_gpu": row.tflops,
        "peak_memory_mib": {str(rank): mib for rank, mib in row.peak_memory.items()},
        "peak_memory_of": "gpu" if row.on_gpu else "host",
        "bytes_sent_per_iteration": row.sent_per_iteration,
        "final_loss": _finite(row.final_loss),
        "parity": {
            "verdict": row.parity.verdict,
            "largest_relative_difference": _finite(row.parity.difference),
            "iteration": row.parity.iteration,
        },
        "gradient_reduction": row.reduction,
        "differs_from_baseline": row.marks,
        "limits": limits(row),
        "runs": [_run_json(entry) for entry in row.measured or [MeasuredRun(run, None, Observations())]],
    }


def _whole_json(row: Row, whole: WholeTraining | None) -> dict[str, Any]:
    """What a whole training takes, where that is asked and the row has a time."""
    if not whole or not row.tokens_per_second:
        return {}
    rate = row.tokens_per_second.median
    return {"whole_training": {"hours": whole.hours(rate), "price": whole.cost(rate, row.run.world_size)}}


def _run_json(entry: MeasuredRun) -> dict[str, Any]:
    run = entry.run
    timing = entry.timing
    observed = entry.observed
    return {
        "directory": str(run.directory),
        "started": run.record["started"],
        "milliseconds_per_iteration": timing and timing.milliseconds,
        "quartiles": timing and timing.spread,
        "outliers": timing and timing.outliers,
        "intervals_used": len(timing.used) if timing else 0,
        "intervals_dropped": Counter(timing.dropped.values()) if timing else {},
        **({"evaluations": run.evaluations} if run.evaluations else {}),
        "traffic": observed.traffic,
        "gpu_power_w": observed.power_w,
        "gpu_utilization_percent": observed.utilization,
        "settings": {name: setting.value for name, setting in run.plan.settings.items()},
        "engine_arguments": run.plan.engine_arguments,
        "versions": run.record["versions"],
        "commits": run.record["commits"],
    }


def build(
    runs: Sequence[Run], baseline: str = "ddp", allowed: Collection[str] = (), peak_tflops: float | None = None
) -> Comparison:
    """Compares at least one run. Raises Problem if the runs must not be compared."""
    if peak_tflops is not None and not 0 < peak_tflops < math.inf:
        raise Problem(f"--peak-tflops must be a positive number, found {peak_tflops}", "Give a GPU's dense TFLOP/s")
    comparable.refuse(runs, baseline, allowed)
    # The baseline first, then in the order of the launchers' ports.
    parts = sorted(group_runs(runs), key=lambda part: (part[0].strategy != baseline, part[0].plan.strategy.port))
    rows = [make_row(label, part, peak_tflops) for label, part in zip(labels(parts), parts, strict=True)]
    candidates = [row for row in rows if row.strategy == baseline and row.complete]
    for row in rows:
        _compare_with_the_nearest(candidates, row)
    sizes = sorted({row.run.world_size for row in rows})
    groups = [_group(size, [row for row in rows if row.run.world_size == size]) for size in sizes]
    notes = _warnings(rows)
    if ran_in_one_order([row.repeats for row in rows]):
        what = "every repeat ran the rows in the same order, so anything periodic looks like a difference between rows"
        notes.append(f"{what}; scripts/run_megatron_t5_all.sh changes the order from repeat to repeat")
    notes += comparable.other_differences(runs)
    return Comparison(groups, baseline, _verdicts(groups, baseline), _problems(rows, baseline), notes, _predict(rows))


def _warnings(rows: Sequence[Row]) -> list[str]:
    """The rows' warnings, each once, with the rows that have it."""
    labels_by_text: dict[str, list[str]] = {}
    for row in rows:
        for text in row.warnings:
            labels_by_text.setdefault(text, []).append(row.label)
    every_label = {row.label for row in rows}
    notes = []
    for text, those in labels_by_text.items():
        distinct = list(dict.fromkeys(those))
        who = "every row" if len(every_label) == len(distinct) > 1 else ", ".join(distinct)
        notes.append(f"{text} ({who})")
    return notes


def _compare_with_the_nearest(baselines: Sequence[Row], row: Row) -> None:
    """Judges a row by the baseline that has its size if one has, and else differs least."""

    def distance(base: Row) -> tuple[bool, int, int]:
        pair = [row.run, base.run]
        other_size = row.run.world_size != base.run.world_size
        return other_size, len(differing(compared, pair)), len(differing(distinctions, pair))

    baseline = min(baselines, key=distance, default=None)
    if baseline is None:
        return
    if baseline is row:
        row.is_baseline = True
        row.parity = parity.judge_baseline(row.runs)
        row.ratio = Estimate(1.0) if row.milliseconds else None
        return
    different = differing(compared, [row.run, baseline.run])
    row.marks = [f"{name} {show(own)} instead of {show(its)}" for name, (own, its) in different.items()]
    if row.samples_per_second and baseline.samples_per_second:
        of_pairs = ratio(row.repeats, baseline.repeats)
        row.ratio = of_pairs if of_pairs.low else row.samples_per_second.over(baseline.samples_per_second)
    dtype = row.reduction.dtype
    baseline_dtype = baseline.reduction.dtype
    if row.ratio and dtype and baseline_dtype and dtype != baseline_dtype:
        row.warnings.append(
            f"gradients are reduced in {dtype}, those of {baseline.label} in {baseline_dtype}, which affects the ratio;"
            " GRADIENT_REDUCTION=fp32 makes them equal"
        )
    if row.complete:
        row.parity = parity.judge(row.runs, baseline.runs)


def _rates_are_known(row: Row) -> bool:
    """Whether a row's time can be predicted.

    A data sheet gives the rates of GPUs, the calibrating run those of CPUs, a record that of a link between nodes. What
    processes on one CPU machine cost each other is in none of these: they compete for its cores.
    """
    layout = row.run.layout
    if row.prediction is None or row.milliseconds is None:
        return False
    if row.prediction.machine.device is time.CPU and layout.nproc_per_node > 1:
        return False
    return layout.nnodes == 1 or row.measured[0].observed.busiest_link is not None


def _predict(rows: Sequence[Row]) -> list[str]:
    """Gives rows their predicted times, and says what these are based on; empty if none can be predicted.

    They are based on data sheets if every row's device has one, else on the speed of the baseline or of the first row.
    """
    known = [row for row in rows if _rates_are_known(row)]
    calibrating = None
    slower = 1.0
    source = "the devices' data sheets"
    if any(row.prediction.machine.device is time.CPU for row in known):
        calibrating = min(known, key=lambda row: not row.is_baseline)
        source = f"how fast {calibrating.label} ran"
        prediction = calibrating.prediction
        seconds = calibrating.milliseconds.median / 1000
        try:
            slower = time.calibrated(prediction.job, prediction.machine, seconds, prediction.backend)
        except ValueError as error:
            return [f"no times are predicted: {error}"]
    others = [row for row in known if row is not calibrating]
    for row in others:
        row.predicted = replace(row.prediction, slower=slower).time
    return [f"predicted times are based on {source}"] if others else []


def _problems(rows: Sequence[Row], baseline: str) -> list[str]:
    problems = []
    for row in rows:
        if not row.complete:
            reason = f": {row.run.reason}" if row.run.reason else ""
            problems.append(f"{row.label} is {row.run.status}{reason}")
        elif row.parity.verdict == parity.DIFFERENT:
            what = "has a loss that is not a number" if row.is_baseline else f"does not train as {baseline} does"
            problems.append("; ".join([f"{row.label} {what}: {row.parity}", *row.parity.reasons]))
        elif row.milliseconds is None and any(run.iterations for run in row.runs):
            problems.append(f"no interval of {row.label} can be timed: each skipped iterations (fp16), or has no time")
        elif row.milliseconds is None and not row.run.is_evaluation:
            problems.append(f"{row.label} logged no interval (TRAIN_ITERS below LOG_INTERVAL?)")
    if any(row.strategy == baseline for row in rows) and not any(row.is_baseline for row in rows):
        problems.append(f"there is no complete {baseline} run to compare with")
    return problems


def _verdicts(groups: Sequence[Group], baseline: str) -> list[str]:
    sentences = [group.verdict for group in groups if group.verdict]
    rows = [row for group in groups for row in group.rows if not row.is_baseline]
    equal = [row for row in rows if row.parity.verdict == parity.EQUAL]
    if equal and all(row.parity.verdict != parity.DIFFERENT for row in rows):
        largest = max(row.parity.difference or 0.0 for row in equal)
        of_norm = max(row.parity.norm_difference or 0.0 for row in equal)
        if len(equal) == 1:
            who = f"{equal[0].label} trains"
        elif len(equal) < len(rows):
            who = f"{len(equal)} of {len(rows)} rows train"
        else:
            who = "Both rows train" if len(equal) == 2 else f"All {len(equal)} rows train"
        sizes = f"{largest:.0e} and {of_norm:.0e} of their values"
        how = f"loss and gradient norm differ by at most {sizes}" if largest or of_norm else "all figures are the same"
        sentences.append(f"{who} as {baseline} does: {how}.")
    if not any(row.strategy == baseline for group in groups for row in group.rows):
        sentences.append(f"There is no {baseline} run here, so nobody asked whether the others train as it does.")
        return sentences
    sentences += _not_shown(rows, baseline)
    return sentences


def _not_shown(rows: Sequence[Row], baseline: str) -> list[str]:
    """One sentence for each reason why rows are not shown to train as the baseline does, with what would show it."""
    labels_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.parity.verdict == parity.NOT_SHOWN:
            for reason in row.parity.reasons:
                labels_by_reason.setdefault(reason, []).append(row.label)
    sentences = []
    for reason, who in labels_by_reason.items():
        sentences.append(
            f"Whether {', '.join(dict.fromkeys(who))} {'trains' if len(set(who)) == 1 else 'train'} as {baseline} "
            f"does is not shown: {reason}. scripts/check_parity.sh has a recipe made for this."
        )
    return sentences


def _group(world_size: int, rows: Sequence[Row]) -> Group:
    verdict, taken = _fastest(world_size, rows) if any(row.repeats for row in rows) else ("", None)
    return Group(world_size, rows, verdict, taken)


def _fastest(world_size: int, rows: Sequence[Row]) -> tuple[str, Row | None]:
    """Which row is the fastest, if that is known: a sentence for the table, the page and W&B, and the row to take."""
    timed = {number: row.repeats for number, row in enumerate(rows) if row.repeats}
    number, ratios = against_the_fastest(timed)
    labels = [f"{row.label} *" if row.marks else row.label for row in rows]
    first = labels[number]
    start = f"{processes(world_size)}:"
    speed = f"{rows[number].samples_per_second.median:.4g} samples/s"
    if not ratios:
        return f"{start} only {first} was timed: {speed}.", None
    if all(map(excludes_one, ratios.values())):
        after, faster = next(iter(ratios.items()))
        by = f"{faster.median:.2f}x [{faster.low:.2f}, {faster.high:.2f}]"
        return f"{start} {first} is the fastest: {speed}, {by} that of {labels[after]}, the next.", rows[number]
    unranked = ", ".join(labels[other] for other, faster in ratios.items() if faster.low is None)
    if unranked:
        needs = f"Run with REPEATS={FEWEST_REPEATS} to know"
        said = f"{start} {first} was fastest in this run ({speed}). {needs} whether that holds against {unranked}."
        return said, None
    unclear = ", ".join(labels[other] for other, faster in ratios.items() if not excludes_one(faster))
    why = "the intervals of their ratios over the repeats include 1"
    tied = [number, *(other for other, faster in ratios.items() if not excludes_one(faster))]
    chosen = min(tied, key=lambda place: rows[place].place_in_a_tie)
    take = f"Of these, take the one with {TIES}: {labels[chosen]}"
    said = f"{start} there is no clear difference between {first} ({speed}) and {unclear}: {why}. {take}."
    return said, rows[chosen]
