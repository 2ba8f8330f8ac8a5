"""A comparison's rows: complete runs of one strategy that compute the same thing in the same way are repeats of a row.

A run that failed is a separate row, with its status and without figures. ``limits`` says what limits a row.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from t5bench.compare import statistics
from t5bench.compare.comparable import NOT_GIVEN, compared, differing, gpu_names, show, trains
from t5bench.compare.parity import UNKNOWN, Parity, curve
from t5bench.compare.repeats import FEWEST_REPEATS, Repeat, of_repeats
from t5bench.compare.statistics import Estimate
from t5bench.costmodel import flops, time
from t5bench.costmodel.job import Job, Zero
from t5bench.costmodel.machine import device_of, peak_tflops
from t5bench.costmodel.prediction import Prediction, machine_of
from t5bench.costmodel.ties import place_in_a_tie
from t5bench.record import samples
from t5bench.record.reader import seconds
from t5bench.record.run import Run
from t5bench.record.status import COMPLETE, iterations_expected

METHODS = ("method", "micro-batch")  # roles of settings in which rows of one strategy differ
MARK_OF_ALONE = "\N{DAGGER}"
_ALONE = (
    f"{MARK_OF_ALONE} fewer than {FEWEST_REPEATS} repeats: these figures and intervals describe these runs only. On a "
    "steady machine the intervals are wider than necessary, and they cannot cover states of the machine that no run saw"
)

_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}  # DeepSpeed's names


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced over the data-parallel replicas: in which data type, when, and in which pieces.

    A single replica reduces nothing and has no dtype. bucket: text with its unit.
    """

    dtype: str | None
    overlap: bool = False
    bucket: str = ""

    def __str__(self) -> str:
        when = "during" if self.overlap else "after"
        return f"{self.dtype}, {when} backward, {self.bucket}" if self.dtype else self.bucket or "none (one replica)"


def reduction_of(run: Run) -> Reduction:
    """From the plan's layout, precision, engine and effective DeepSpeed JSON."""
    plan = run.plan
    layout = run.layout
    if layout.dp == 1:
        # Its two copies, on the first stage and the decoder's first stage, are still summed.
        return Reduction(None, bucket="none but the tied embedding's (one replica)" if layout.pp > 1 else "")
    if plan.ds_config:
        zero = Zero.of_config(plan.ds_config)
        dtype = _DTYPES.get(zero.reduction or plan.precision, "unknown")
        return Reduction(dtype, zero.overlap, f"buckets of {zero.reduce_bucket / 1e6:g}M elements")
    if plan.strategy.has_fsdp2:
        return Reduction("fp32", True, "one layer at a time")
    if plan.engine == "native":
        # fp32 master weights have fp32 gradients; PyTorch's DDP fills buckets of 25 MiB unless told otherwise.
        return Reduction("fp32", True, "buckets of 25 MiB")
    # Megatron's local DDP accumulates bf16's gradients in fp32, fp16's in fp16 unless told otherwise.
    told = "--accumulate-allreduce-grads-in-fp32" in plan.arguments.words
    return Reduction("fp16" if plan.precision == "fp16" and not told else "fp32", False, "one flat buffer")


def prediction_of(run: Run, gigabits: float = 1.0, batch: int = 0) -> Prediction | None:
    """The cost model's, with a link of so many Gbit/s between the nodes, at this global batch or the run's own.

    None if the vocabulary is not known. On a CPU or an unknown link its time means nothing.
    """
    if not run.padded_vocab_size:
        return None
    device = device_of(gpu_names(run) or "") if run.plan.backend == "nccl" else None
    job = Job.of_plan(run.plan, run.padded_vocab_size, batch)
    return Prediction.of_plan(run.plan, job, machine_of(device, gigabits, job.parallel.devices_per_node))


@dataclass(frozen=True)
class MeasuredRun:
    """One complete run with what its lines and samples say; a run that logged no interval has no timing."""

    run: Run
    timing: statistics.Timing | None
    observed: samples.Observations


@dataclass
class Row:
    """One row. Rates are for all processes together; one run of several stands for what they share."""

    label: str
    runs: Sequence[Run]
    measured: Sequence[MeasuredRun]
    """The runs if they are complete."""
    reduction: Reduction
    batch: float
    """Samples of an iteration that counts."""
    prediction: Prediction | None
    final_loss: float | None
    sent_per_iteration: float | None
    """Bytes of the busiest node, the median over the runs that have it."""
    runs_with_samples: int
    """How many have it."""
    peak_memory: Mapping[int, float]
    """MiB by rank, the maximum over the repeats: on a GPU what PyTorch allocated, on a CPU the resident set."""
    run_medians: Sequence[float] = ()
    """Each repeat's milliseconds per iteration."""
    repeats: Sequence[Repeat] = ()
    """The runs that have a time."""
    milliseconds: Estimate | None = None
    predicted: time.Time | None = None
    """Where an iteration's time should go."""
    samples_per_second: Estimate | None = None
    tokens_per_second: Estimate | None = None
    ratio: Estimate | None = None
    """Throughput over the baseline's."""
    tflops: float | None = None
    """Per GPU."""
    hardware_tflops: float | None = None
    """Per GPU, with recomputation; None without."""
    mfu: float | None = None
    """From 0 to 1, per GPU."""
    mfu_missing: str = ""
    """Why there is no MFU."""
    parity: Parity = field(default_factory=lambda: Parity(UNKNOWN))
    marks: list[str] = field(default_factory=list)
    """What differs from the baseline because it was allowed to."""
    warnings: list[str] = field(default_factory=list)
    """What to know about the row's figures."""
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
    def alone(self) -> bool:
        """Whether the intervals describe only these runs, for lack of repeats."""
        return 0 < len(self.repeats) < FEWEST_REPEATS

    @property
    def place_in_a_tie(self) -> tuple[int, int, float]:
        """Of a row that has a time: what decides between it and those that cannot be told from it."""
        assert self.milliseconds
        memory = max(self.peak_memory.values(), default=0.0) * 2**20
        settings = self.run.plan.settings.values()
        chosen = [one for one in settings if one.role in (*METHODS, "layout") and not one.is_default]
        return place_in_a_tie(memory, len(chosen), self.milliseconds.median)

    @property
    def on_gpu(self) -> bool:
        return self.run.plan.device == "cuda"


def _final_loss(runs: Sequence[Run]) -> float | None:
    """Nats per target token on the last line that has one, the median over the repeats; nan when one diverged.

    For an evaluation it is the evaluated loss. None where repeats differ in more of their recipe than the seed.
    """
    if differing(trains, runs).keys() - {"SEED"}:
        return None
    last = []
    for run in runs:
        if run.is_evaluation:
            last.append(run.evaluations[-1].lm_loss)
        last += list(curve(run).values())[-1:]
    if any(math.isnan(loss) for loss in last):
        return math.nan
    return median(last) if last else None


def _peak_memory(runs: Sequence[Run]) -> dict[int, float]:
    largest: dict[int, float] = {}
    for run in runs:
        for peak in run.peak_memory:
            mib = peak.device_mib if run.plan.device == "cuda" else peak.host_mib
            if mib is not None:
                largest[peak.rank] = max(mib, largest.get(peak.rank, 0.0))
    return dict(sorted(largest.items()))


def _batch(run: Run) -> str:
    """Whether the batch is to reach its full size; if not, the samples of an iteration at the end, which count."""
    plan = run.plan
    length = plan.number("LOG_INTERVAL")
    end = iterations_expected(plan.last_iteration, length)
    reached = statistics.batch_until(end, length, plan) if plan.ramp and end else math.inf
    return f"{reached:g}" if reached < plan.number("GLOBAL_BATCH_SIZE") else "full"


def distinctions(run: Run) -> dict[str, Any]:
    """The facts that distinguish two rows of one strategy, by the names used in labels."""
    settings = run.plan.settings
    return {
        **compared(run),
        "TP": run.layout.tp,
        "PP": run.layout.pp,
        "nodes": run.layout.nnodes,
        "gradients": reduction_of(run),
        "EVAL_ONLY": run.plan.value("EVAL_ONLY", "0"),  # an evaluation has no times, and another loss
        "batch": _batch(run),
        **{name: setting.value for name, setting in settings.items() if setting.role in METHODS},
        "ds_config": json.dumps(run.plan.ds_config, sort_keys=True),
    }


def group_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups complete repeats and keeps the order; every other run forms its own group."""
    rows: dict[Any, list[Run]] = {}
    for number, run in enumerate(runs):
        same = run.strategy, run.world_size, frozenset(distinctions(run).items())
        rows.setdefault(same if run.status == COMPLETE else number, []).append(run)
    return list(rows.values())


def labels(rows: Sequence[Sequence[Run]]) -> list[str]:
    """The strategy, and what distinguishes the row from others of the same strategy in its group."""
    firsts = [repeats[0] for repeats in rows]
    texts = []
    for repeats in rows:
        run = repeats[0]
        alike = [other for other in firsts if (other.strategy, other.world_size) == (run.strategy, run.world_size)]
        texts.append(f"{run.strategy} ({_details(repeats, alike)})" if len(alike) > 1 else run.strategy)
    return texts


def _details(repeats: Sequence[Run], alike: Sequence[Run]) -> str:
    """What distinguishes a row from others of its strategy. alike: a run of each of these."""
    run = repeats[0]
    facts = distinctions(run)
    details = []
    for name in differing(distinctions, alike):
        details.append(name if name == "ds_config" else f"{name} {show(facts.get(name, NOT_GIVEN))}")
    if details:
        return ", ".join(details)
    if len(repeats) > 1:
        return f"{len(repeats)} runs"
    return "run " + "/".join(run.directory.parts[-2:])


def make_row(label: str, runs: Sequence[Run], peak: float | None = None) -> Row:
    """A row over the repeats of one run. peak: the GPU's dense TFLOP/s, if its name is unknown."""
    run = runs[0]
    complete = runs if run.status == COMPLETE else ()
    measured = []
    for repeat in complete:
        timing = statistics.timing(repeat.iterations, repeat.plan)
        measured.append(MeasuredRun(repeat, timing, samples.observe(repeat, timing.used if timing else ())))
    timings = [entry.timing for entry in measured if entry.timing]
    batch = timings[0].batch if timings else run.plan.number("GLOBAL_BATCH_SIZE")
    link = measured[0].observed.busiest_link if measured else None
    # A batch that grew until the end never reached the requested size.
    prediction = prediction_of(run, link.link_bits_per_second / 1e9 if link else 1.0, round(batch))
    sent = [entry.observed.sent_per_iteration for entry in measured if entry.observed.sent_per_iteration is not None]
    row = Row(
        label=label,
        runs=runs,
        measured=measured,
        reduction=reduction_of(run),
        batch=batch,
        prediction=prediction,
        final_loss=_final_loss(complete),
        sent_per_iteration=median(sent) if sent else None,
        runs_with_samples=len(sent),
        peak_memory=_peak_memory(complete),
    )
    if timings:
        row.milliseconds = of_repeats([timing.milliseconds for timing in timings])
        row.run_medians = [timing.milliseconds.median for timing in timings]
        row.repeats = [
            Repeat(
                start=seconds(entry.run.record["started"]),
                place=str(entry.run.directory),
                speed=1000.0 * batch / entry.timing.milliseconds.median,
            )
            for entry in measured
            if entry.timing
        ]
        warnings = [timing.warning for timing in timings if timing.warning]
        if row.milliseconds.low is None:
            warnings.append("too few independent intervals for a confidence interval")
        if row.alone:
            warnings.append(_ALONE)
        row.warnings = list(dict.fromkeys(warnings))
        _add_rates(row, peak)
    return row


def _add_rates(row: Row, peak: float | None) -> None:
    run = row.run
    name = gpu_names(run)
    precision = run.plan.precision
    row.samples_per_second = row.milliseconds.per(1000.0 * row.batch)
    tokens = run.architecture.encoder_length + run.architecture.decoder_length
    row.tokens_per_second = row.milliseconds.per(1000.0 * row.batch * tokens)
    if not row.prediction:
        row.mfu_missing = "the record has no padded_vocab_size"
        return
    iteration_seconds = row.milliseconds.median / 1000
    model_flops = flops.flops_per_iteration(run.architecture, row.batch)
    row.tflops = model_flops / iteration_seconds / run.world_size / 1e12
    if row.prediction.job.recompute != "none":
        hardware_flops = flops.hardware_flops(replace(row.prediction.job, global_batch=row.batch))
        row.hardware_tflops = hardware_flops * 1000 / row.milliseconds.median / run.world_size / 1e12
    peak = peak or float(run.plan.value("PEAK_TFLOPS") or 0) or peak_tflops(name or "", precision)
    if not row.on_gpu:
        row.mfu_missing = "it ran on a CPU"
    elif peak:
        row.mfu = row.tflops / peak
    else:
        row.mfu_missing = f"the peak of {name or 'this GPU'} in {precision} is unknown: set --peak-tflops"


def limits(row: Row) -> str:
    """What limits the row, and what was not measured and why, in sentences; "" for a row without figures."""
    if not row.milliseconds:
        return ""
    sentences = [_network(row), _gpu_use(row), _share_of_the_peak(row)]
    return ". ".join(sentence[0].upper() + sentence[1:] for sentence in sentences) + "."


def _gpu_use(row: Row) -> str:
    if not row.on_gpu:
        return "GPU utilisation and power: not measured; there is no GPU"
    parts = []
    utilization = _median_of(row, "utilization")
    if utilization is not None:
        parts.append(f"kernels ran {utilization:.0f} % of the time on the busiest GPU")
    power = _median_of(row, "power_w")
    if power is not None:
        parts.append(f"it drew {power:.0f} W")
    return ", ".join(parts) or "GPU utilisation and power: not measured; there are no samples"


def _share_of_the_peak(row: Row) -> str:
    if row.mfu is None:
        return f"share of the GPU's peak: unknown, {row.mfu_missing}"
    text = f"the arithmetic reaches {row.mfu:.1%} of the GPU's peak"
    if row.hardware_tflops:
        text += f", {row.mfu * row.hardware_tflops / row.tflops:.1%} with recomputation"
    return text


def _median_of(row: Row, name: str) -> float | None:
    """Of one of a run's observations, over the runs that have it."""
    values = [getattr(entry.observed, name) for entry in row.measured]
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _network(row: Row) -> str:
    """What the cell of the table says, and what share of the link that is."""
    if row.sent_per_iteration is None:
        return f"network: not measured, {row.measured[0].observed.why_not_sent}"
    sent = f"{bytes_text(row.sent_per_iteration)} per iteration"
    if row.runs_with_samples < len(row.measured):
        sent += f" (the median of {row.runs_with_samples} of {len(row.measured)} runs; the others have too few samples)"
    if any(entry.observed.loopback for entry in row.measured):
        return f"network: one node; {sent} over the loopback, including other programs' traffic"
    links = [entry.observed.busiest_link for entry in row.measured]
    known = [link for link in links if link]
    if not known:
        return f"network: {sent} and node; the link's speed is unknown"
    share, link = median(link.share or 0.0 for link in known), known[0]
    busiest = f"{link.interface} of node {link.node}, {link.link_bits_per_second / 1e9:g} Gbit/s"
    return f"network: {sent} and node; the busiest link ({busiest}) needs {share:.0%} of the time for them"


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units, as networks count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # a number that rounds to 1000 gets the next unit
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
