"""A comparison as a table: for the terminal, as Markdown and as CSV. The page and W&B show the same columns."""

import csv
import io
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, is_dataclass, replace
from typing import Any, NamedTuple

from t5bench.compare.comparable import gpu_names
from t5bench.compare.comparison import Comparison
from t5bench.compare.interval import CONFIDENCE
from t5bench.compare.rows import MARK_OF_ALONE, Row, bytes_text
from t5bench.compare.statistics import Estimate, Timing
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.whole_training import WholeTraining
from t5bench.printed_table import text_table
from t5bench.profile.parts import BUBBLE, Profile, read_profile, shares
from t5bench.record.files import PROFILE, RecordError
from t5bench.record.run import Run
from t5bench.text import processes

NOTHING = "-"
MOST_LINES_OF_NOTES = 5  # below a table in a terminal
KINDS_OF_DEVICE = {"cuda": "GPU of unknown name", "cpu": "CPU"}
DIGITS = 9  # of a published figure: the last of a float's 17 depend on the processor, for example on AVX-512


def significant(value: float, digits: int = 4) -> str:
    """With this many significant digits, and never in powers of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{_decimals(value, digits)}f}"


def duration_text(milliseconds: float, digits: int = 3) -> str:
    """A time in a sentence or at a bar: in seconds from a thousand milliseconds on."""
    if round(abs(milliseconds)) < 1000:
        return f"{significant(milliseconds, digits)} ms"
    return f"{significant(milliseconds / 1000, digits)} s"


def estimate_text(value: Estimate, digits: int = 4) -> str:
    """As many digits as are known: two of half the interval, and never more than `digits` significant ones."""
    if value.low is None or value.high is None:
        return significant(value.median, digits)
    half = (value.high - value.low) / 2
    scale = abs(value.median)
    if 0 < half < math.inf and 0 < scale < math.inf:
        known = math.floor(math.log10(scale)) - math.floor(math.log10(half)) + 2
        digits = max(2, min(digits, known))
    decimals = _decimals(value.median, digits)
    interval = f"[{value.low:.{decimals}f}, {value.high:.{decimals}f}]"
    return f"{value.median:.{decimals}f} {interval}"


def _decimals(value: float, digits: int) -> int:
    """Behind the point, for so many significant digits of the value."""
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


class RepeatMedians(NamedTuple):
    """The repeats of a row, and the lowest and the highest of their medians in milliseconds."""

    count: int
    lowest: float | None
    highest: float | None


def _repeat_medians(row: Row) -> RepeatMedians:
    lowest = min(row.run_medians, default=None)
    highest = max(row.run_medians, default=None)
    return RepeatMedians(len(row.repeats or row.runs), lowest, highest)


def _repeats_text(repeats: RepeatMedians) -> str:
    """How many repeats, and how far their medians lie apart."""
    if repeats.count < 2 or repeats.lowest is None or repeats.highest is None:
        return NOTHING
    return f"{repeats.count}: {significant(repeats.lowest)} to {significant(repeats.highest)}"


@dataclass(frozen=True)
class Column:
    """One fact about a row, wherever it is shown."""

    title: str
    """Its heading in a table; a fact without one is in files alone."""
    fields: str
    """Its names in CSV and in W&B's table, one for each part of a value that has several."""
    value: Callable[[Row], Any]
    importance: int = 0
    """A table that is too wide leaves out the lowest first."""
    show: Callable[[Any], str] = str
    alignment: str = "right"
    metric: str = ""
    """Its name in W&B's summary, by which a training run has it too."""

    def text(self, row: Row) -> str:
        value = self.value(row)
        return NOTHING if value is None else self.show(value)

    def parts(self, row: Row) -> dict[str, Any]:
        """By field, None for what was not measured."""
        value = self.value(row)
        names = self.fields.split()
        if is_dataclass(value):
            parts = astuple(value)
        elif isinstance(value, tuple):
            parts = value
        else:
            parts = [value] * len(names)
        return dict(zip(names, parts, strict=False))


class Predicted(NamedTuple):
    """What the cost model says, beside what was measured."""

    value: float
    error: float | None
    """Of the prediction, relative to what was measured; None where nothing was."""


class Bubble(NamedTuple):
    """The share of time in which pipeline stages wait for each other."""

    predicted: float
    """Of an iteration's forward and backward passes."""
    measured: float | None
    """Of the profiled iteration, the mean of all ranks; None without a profile."""


def predicted_bytes(row: Row) -> Predicted | None:
    """Bytes that the busiest node sends to others in an iteration.

    On one node with gloo: what its processes send each other over the loopback, as if each were a node. Other programs
    use the loopback too, so that a difference from what was measured there is no error of the prediction.
    """
    prediction = row.prediction
    if not prediction:
        return None
    if row.run.layout.nnodes > 1:
        return _beside(max(prediction.node_bytes), row.sent_per_iteration)
    if prediction.backend != "gloo":
        return None
    parallel = replace(prediction.job.parallel, devices_per_node=1)
    on_own_nodes = replace(prediction, job=replace(prediction.job, parallel=parallel))
    sent = None if is_on_loopback(row) else row.sent_per_iteration
    return _beside(sum(on_own_nodes.node_bytes), sent)


def predicted_memory(row: Row) -> Predicted | None:
    """MiB allocated on the fullest GPU at its peak."""
    if not row.on_gpu or not row.prediction:
        return None
    return _beside(row.prediction.memory.peak / 2**20, _highest_peak(row))


def predicted_time(row: Row) -> Predicted | None:
    """Milliseconds of an iteration."""
    if not row.predicted or not row.milliseconds:
        return None
    return _beside(1000 * row.predicted.total, row.milliseconds.median)


def profile_of(row: Row) -> Profile | None:
    """None for a row that was not profiled by part."""
    try:
        return read_profile(row.run.directory / PROFILE)
    except RecordError:
        return None


def bubble_of(row: Row) -> Bubble | None:
    """None without pipeline stages."""
    if not row.prediction or row.prediction.bubble is None:
        return None
    profile = profile_of(row)
    return Bubble(row.prediction.bubble, shares(profile.ranks)[BUBBLE] if profile else None)


def _bubble_text(bubble: Bubble) -> str:
    measured = "" if bubble.measured is None else f" ({bubble.measured:.0%})"
    return f"{bubble.predicted:.0%}{measured}"


def _beside(predicted: float, measured: float | None) -> Predicted:
    return Predicted(predicted, predicted / measured - 1 if measured else None)


def _predicted_text(show: Callable[[float], str]) -> Callable[[Predicted], str]:
    def text(predicted: Predicted) -> str:
        error = "" if predicted.error is None else f" ({predicted.error:+.1%})"
        return show(predicted.value) + error

    return text


def _three_digits(value: float) -> str:
    return significant(value, 3)


def _ratio_text(value: Estimate) -> str:
    return estimate_text(value, 3)


def _highest_peak(row: Row) -> float | None:
    """Peak memory of the fullest rank in MiB."""
    return max(row.peak_memory.values(), default=None)


def _interval_of(row: Row) -> str | None:
    """What the row's intervals are about."""
    if not row.repeats:
        return None
    return "this run alone" if row.alone else "repeats"


def micro_batch_of(row: Row) -> int:
    return int(row.run.plan.number("MICRO_BATCH_SIZE"))


def mark(row: Row) -> str:
    """What a label ends with when a remark says how the row differs from the baseline, or what its intervals lack."""
    of_alone = MARK_OF_ALONE if row.alone else ""
    of_remark = " *" if row.marks else ""
    return of_alone + of_remark


def is_on_loopback(row: Row) -> bool:
    """Whether its bytes are those of the loopback, with other programs' traffic."""
    return any(entry.observed.loopback for entry in row.measured)


def all_columns(comparison: Comparison) -> list[Column]:
    """Every column, whether anything of it was measured or not. Why a row has no figures is a problem, no column."""
    base = comparison.baseline
    rows = comparison.rows
    on_gpu = any(row.on_gpu for row in rows)
    device = "GPU" if on_gpu else "host"
    process = "GPU" if on_gpu else "process"
    all_complete = all(row.complete for row in rows)
    whole = comparison.whole
    loopback = " (loopback)" if any(map(is_on_loopback, rows)) else ""
    return [
        Column(
            title="strategy",
            fields="",
            value=lambda row: row.label + mark(row),
            importance=99,
            alignment="left",
        ),
        Column(
            title="",
            fields="strategy label",
            value=lambda row: (row.strategy, row.label),
        ),
        Column(
            title="TP/PP/DP",
            fields="",
            value=lambda row: row.run.layout,
            importance=60,
            show="{0.tp}/{0.pp}/{0.dp}".format,
            alignment="center",
        ),
        Column(
            title="micro-batch" if len({micro_batch_of(row) for row in rows}) > 1 else "",
            fields="micro_batch",
            value=micro_batch_of,
            importance=59,
        ),
        Column(
            title="",
            fields="nnodes nproc_per_node world_size tp pp dp micro_batches",
            value=lambda row: row.run.layout,
        ),
        Column(
            title="",
            fields="engine device",
            value=lambda row: (row.run.engine, row.run.plan.device),
        ),
        Column(
            title="",
            fields="gpu precision",
            value=lambda row: (gpu_names(row.run), row.run.plan.precision),
        ),
        Column(
            title="ms/iteration",
            fields="ms_per_iteration ms_low ms_high",
            value=lambda row: row.milliseconds,
            importance=40,
            show=estimate_text,
            metric="elapsed time per iteration",
        ),
        Column(
            title="samples/s",
            fields="samples_per_second samples_per_second_low samples_per_second_high",
            value=lambda row: row.samples_per_second,
            importance=90,
            show=estimate_text,
            metric="samples per second",
        ),
        Column(
            title="tokens/s" if whole else "",
            fields="tokens_per_second",
            value=lambda row: row.tokens_per_second,
            importance=35,
            show=estimate_text,
        ),
        *([_hours(whole)] if whole else []),
        *([_price(whole)] if whole and whole.price else []),
        Column(
            title=f"x {base}",
            fields="throughput_ratio ratio_low ratio_high",
            value=lambda row: row.ratio,
            importance=85,
            show=_ratio_text,
            metric="throughput relative to the baseline",
        ),
        Column(
            title="repeats (ms)",
            fields="runs ms_lowest_run ms_highest_run",
            value=_repeat_medians,
            importance=15,
            show=_repeats_text,
        ),
        Column(
            title="",
            fields="interval_of",
            value=_interval_of,
        ),
        Column(
            title=f"TFLOP/s per {process}",
            fields="tflops_per_gpu",
            value=lambda row: row.tflops,
            importance=30,
            show=_three_digits,
            metric="TFLOPs",
        ),
        Column(
            title="TFLOP/s with recomputation",
            fields="hardware_tflops_per_gpu",
            value=lambda row: row.hardware_tflops,
            importance=29,
            show=_three_digits,
        ),
        Column(
            title="MFU",
            fields="mfu",
            value=lambda row: row.mfu,
            importance=55,
            show="{:.1%}".format,
            metric="MFU",
        ),
        Column(
            title=f"peak {device} MiB",
            fields="peak_memory_mib",
            value=_highest_peak,
            importance=80,
            show="{:.0f}".format,
            metric="peak memory MiB",
        ),
        Column(
            title=f"sent/iteration{loopback}",
            fields="bytes_sent_per_iteration",
            value=lambda row: row.sent_per_iteration,
            importance=20,
            show=bytes_text,
        ),
        Column(
            title="bytes predicted (error)",
            fields="bytes_predicted bytes_predicted_off",
            value=predicted_bytes,
            importance=14,
            show=_predicted_text(bytes_text),
        ),
        Column(
            title=f"{device} MiB predicted (error)",
            fields="memory_mib_predicted memory_mib_predicted_off",
            value=predicted_memory,
            importance=13,
            show=_predicted_text("{:.0f}".format),
        ),
        Column(
            title="ms predicted (error)",
            fields="ms_predicted ms_predicted_off",
            value=predicted_time,
            importance=12,
            show=_predicted_text(significant),
        ),
        Column(
            title="bubble predicted (measured)",
            fields="bubble_predicted bubble_measured",
            value=bubble_of,
            importance=11,
            show=_bubble_text,
        ),
        Column(
            title="final loss",
            fields="final_loss",
            value=lambda row: row.final_loss,
            importance=25,
            show="{:.6f}".format,
            metric="lm loss",
        ),
        Column(
            title=f"equal to {base}",
            fields="parity largest_loss_difference",
            value=lambda row: row.parity,
            importance=50,
            alignment="left",
        ),
        Column(
            title="status",
            fields="status",
            value=lambda row: row.run.status,
            importance=16 if all_complete else 70,
            alignment="left",
        ),
        Column(
            title="",
            fields="reason",
            value=lambda row: row.run.reason,
        ),
        Column(
            title="gradients reduced",
            fields="gradient_dtype gradient_overlap",
            value=lambda row: row.reduction,
            importance=10,
            alignment="left",
        ),
        Column(
            title="",
            fields="differs_from_baseline",
            value=lambda row: "; ".join(row.marks),
        ),
    ]


def _hours(whole: WholeTraining) -> Column:
    """Of a whole training at the row's rate."""
    return Column(
        title=whole.title_of_hours,
        fields="hours",
        value=lambda row: row.tokens_per_second and whole.hours(row.tokens_per_second.median),
        importance=88,
        show=_three_digits,
    )


def _price(whole: WholeTraining) -> Column:
    """Of a whole training at the row's rate."""
    return Column(
        title=whole.title_of_price,
        fields="price",
        value=lambda row: row.tokens_per_second and whole.cost(row.tokens_per_second.median, row.run.world_size),
        importance=87,
        show=_three_digits,
    )


def columns(comparison: Comparison) -> list[Column]:
    """Those of a table: the ones that hold something for at least one row."""
    shown = []
    for column in all_columns(comparison):
        is_measured = any(column.text(row) != NOTHING for row in comparison.rows)
        if column.title and is_measured:
            shown.append(column)
    return shown


def short_labels(comparison: Comparison, longest: int) -> dict[str, str]:
    """For each label that is longer than this: its strategy and a number."""
    strategy_of = {row.label: row.strategy for row in comparison.rows if len(row.label) > longest}
    return {label: f"{strategy_of[label]} [{number}]" for number, label in enumerate(strategy_of, 1)}


def named_rows(comparison: Comparison, longest: int = sys.maxsize) -> list[tuple[str, Row]]:
    """The rows, each by another name: its label, the number of processes where it needs that, or a number."""
    short = short_labels(comparison, longest)
    named: list[tuple[str, Row]] = []
    for row in comparison.rows:
        name = short.get(row.label, row.label)
        sizes = {other.run.world_size for other in comparison.rows if other.label == row.label}
        if len(sizes) > 1:
            name += f" ({processes(row.run.world_size)})"
        earlier = [other for other, _ in named if other.split(" #")[0] == name]
        if earlier:
            name += f" #{len(earlier) + 1}"
        named.append((name, row))
    return named


def caption(comparison: Comparison) -> str:
    """What is the same in all rows, in one line; what differs is listed with all its values."""

    def every(fact: Callable[[Run], str | None]) -> str:
        """The values of a fact in all runs, each once."""
        values = [fact(run) for run in comparison.runs]
        return " / ".join(dict.fromkeys(value for value in values if value))

    batch = every(lambda run: run.plan.value("GLOBAL_BATCH_SIZE"))
    micro_batch = every(lambda run: run.plan.value("MICRO_BATCH_SIZE"))
    facts = [
        every(lambda run: _model(run, comparison.runs)),
        f"batch {batch} (micro-batch {micro_batch})",
        f"lengths {every(_lengths)}",
        every(lambda run: run.plan.precision),
        f"engine {every(lambda run: run.engine)}",
        every(lambda run: gpu_names(run) or KINDS_OF_DEVICE[run.plan.device]),
    ]
    return ", ".join(facts)


def _model(run: Run, runs: Sequence[Run]) -> str:
    """The model's name and its size, which is known only with the size of the vocabulary."""
    name = _model_name(run)
    sizes = []
    for other in runs:
        if other.padded_vocab_size and _model_name(other) == name:
            sizes.append(f"{parameters(other.architecture) / 1e6:.4g}M")
    if not sizes:
        return name
    return f"{name} ({' / '.join(dict.fromkeys(sizes))} parameters)"


def _model_name(run: Run) -> str:
    kind = run.architecture.kind  # of a model that a config.json describes
    return kind or f"{run.architecture.family.upper()} {run.plan.value('MODEL_PRESET')}"


def _lengths(run: Run) -> str:
    """Of the encoder's and the decoder's sequences."""
    lengths = (run.architecture.encoder_length, run.architecture.decoder_length)
    return "/".join(str(length) for length in lengths if length)


def remarks(comparison: Comparison) -> list[str]:
    """What stands under the table: marks, footnotes, notes."""
    marked = [f"* {row.label}: {', '.join(row.marks)}" for row in comparison.rows if row.marks]
    return [*marked, *comparison.notes, *comparison.predicted_by]


def method(comparison: Comparison) -> str:
    """What was left out and how the intervals are made, with this comparison's counts."""
    timings: list[Timing] = []
    for row in comparison.rows:
        timings += [entry.timing for entry in row.measured if entry.timing]
    if not timings:
        return "No run has a measured time."
    dropped: Counter[str] = Counter()
    for timing in timings:
        dropped.update(timing.dropped.values())
    left_out = ", ".join(f"{count} for {reason}" for reason, count in dropped.items()) or "none"
    intervals = sum(len(timing.used) for timing in timings)
    outliers = sum(timing.outliers for timing in timings)
    return (
        f"Medians over {intervals} log intervals; left out: {left_out}. Brackets hold 95 % confidence intervals. With "
        "three or more repeats they cover the runs, for ratios if these took turns. Otherwise they cover only this "
        "run's median, allowing for autocorrelation, and a ratio's interval covers everything both allow."
        f"{_of_many_ratios(comparison)} {outliers} outlier(s) by Tukey's fences are included."
    )


def _of_many_ratios(comparison: Comparison) -> str:
    """What a reader of several ratios has to know: each interval is right by itself, not all of them at once."""
    compared = [row for row in comparison.rows if not row.is_baseline and not row.alone]
    count = len([row for row in compared if row.ratio and row.ratio.low])
    if count < 2:
        return ""
    return (
        f" Each of the {count} ratios has its own interval: if all rows were equally fast, at least one would exclude "
        f"1 in up to {1 - CONFIDENCE**count:.0%} of sweeps. Only the sentence about the fastest allows for that."
    )


def warning(comparison: Comparison) -> str:
    """What these figures do not say; "" where they are of the real engine on GPUs."""
    reason = comparison.not_of_gpus
    return reason and f"{reason}: not a measurement of Megatron-DeepSpeed on GPUs"


def _sentences_below(comparison: Comparison) -> list[str]:
    """What is to be said below a table, in full."""
    notes = [f"note: {remark}" for remark in remarks(comparison)]
    problems = [f"problem: {problem}" for problem in comparison.problems]
    return [method(comparison), *notes, *problems]


def _table(shown: Sequence[Column], rows: Sequence[Row], form: str, write: Callable[[str], str] = str) -> str:
    cells = []
    for row in rows:
        cells.append([write(column.text(row)) for column in shown])
    # In a terminal one word a line, so that the figures decide how wide a column is.
    titles = [write(column.title) if form == "pipe" else column.title.replace(" ", "\n") for column in shown]
    alignment = [column.alignment for column in shown]
    return text_table(cells, titles, alignment, is_markdown=form == "pipe")


def _fitting(shown: Sequence[Column], comparison: Comparison, width: int) -> list[Column]:
    """The most important of these columns, as many as every group's table has room for."""
    kept = list(shown)
    while len(kept) > 1 and _width(kept, comparison) > width:
        kept.remove(min(kept, key=lambda column: column.importance))
    return kept


def _width(shown: Sequence[Column], comparison: Comparison) -> int:
    """Of the widest group's table, in characters."""
    lines: list[str] = []
    for group in comparison.groups:
        lines += _table(shown, group.rows, "simple").splitlines()
    return max(map(len, lines))


def terminal(comparison: Comparison, width: int | None = None, told: Collection[str] = ()) -> str:
    """The verdicts, one table for each number of processes, and what is to be said below.

    width: of the terminal, in characters. Columns that do not fit are left out, a long label stands below the table,
    sentences are wrapped between words, and of the notes a few lines are shown. None: every column, and one line for
    every sentence. told: verdicts that stand elsewhere already.
    """
    room = width or sys.maxsize
    # A path stays whole.
    wrapper = textwrap.TextWrapper(
        room,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    short = short_labels(comparison, room // 3)
    first, *others = columns(comparison)
    first = replace(first, value=lambda row: short.get(row.label, row.label) + mark(row))
    shown = _fitting([first, *others], comparison, room)
    verdicts = [sentence for sentence in comparison.verdicts if sentence not in told]
    above = [warning(comparison), *verdicts, caption(comparison)]
    lines = [wrapper.fill(text) for text in above if text]
    for group in comparison.groups:
        lines += ["", processes(group.world_size), _table(shown, group.rows, "simple")]
    lines.append("")
    for label, name in short.items():
        lines.append(wrapper.fill(f"{name}: {label}"))
    absent = ", ".join(column.title for column in others if column not in shown)
    if absent:
        lines.append(wrapper.fill(f"left out for lack of room: {absent}; --wide prints every column"))
    if width is None:
        lines += map(wrapper.fill, _sentences_below(comparison))
    else:
        lines += _short_notes(comparison, wrapper)
        lines += [wrapper.fill(f"problem: {problem}") for problem in comparison.problems]
    return "\n".join(lines) + "\n"


def _short_notes(comparison: Comparison, wrapper: textwrap.TextWrapper) -> list[str]:
    """The notes for which a terminal has room, and where the others are."""
    lines: list[str] = []
    notes = remarks(comparison)
    shown = 0
    for note in notes:
        wrapped = wrapper.fill(f"note: {note}").splitlines()
        if len(lines) + len(wrapped) >= MOST_LINES_OF_NOTES:
            break
        lines += wrapped
        shown += 1
    further = len(notes) - shown
    others = f"{further} more note{'' if further == 1 else 's'} and " if further else ""
    return [*lines, f"{others}how the figures are made: on the page, or with --wide".capitalize()]


_MARKDOWN = str.maketrans({"|": r"\|", "<": "&lt;", ">": "&gt;", "\n": " ", "*": r"\*", "`": "'", "_": r"\_"})


def markdown(comparison: Comparison) -> str:
    """For GitHub."""

    def escape(text: str) -> str:
        return text.translate(_MARKDOWN)

    shown = columns(comparison)
    parts = ["# Comparison", escape(caption(comparison))]
    reason = warning(comparison)
    if reason:
        parts.append(f"**{reason}**")
    for group in comparison.groups:
        parts += [f"## {processes(group.world_size)}", _table(shown, group.rows, "pipe", escape)]
    sentences = [*comparison.verdicts, *_sentences_below(comparison)]
    parts.append("\n".join(f"- {escape(sentence)}" for sentence in sentences))
    return "\n\n".join(parts) + "\n"


def rounded(content: Any, digits: int = DIGITS) -> Any:
    """With this many significant digits of every float, also of those in dictionaries, lists and tuples."""
    if isinstance(content, dict):
        return {key: rounded(value, digits) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [rounded(value, digits) for value in content]
    return float(f"{content:.{digits}g}") if isinstance(content, float) else content


def data(comparison: Comparison) -> list[dict[str, Any]]:
    """Every field of every row, numbers in the units of the fields' names; None is what was not measured."""
    columns_of_files = all_columns(comparison)
    rows = []
    for name, row in named_rows(comparison):
        fields: dict[str, Any] = {"name": name}
        for column in columns_of_files:
            fields |= rounded(column.parts(row))
        rows.append(fields)
    return rows


def as_csv(comparison: Comparison) -> str:
    """One line a row; an empty cell is what was not measured."""
    rows = data(comparison)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
