"""A comparison as a table: for the terminal, as Markdown and as CSV. The page and W&B show the same columns."""

import csv
import io
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, is_dataclass, replace
from typing import Any

from tabulate import tabulate

from t5bench.compare.comparable import gpu_names
from t5bench.compare.comparison import Comparison
from t5bench.compare.interval import CONFIDENCE
from t5bench.compare.rows import MARK_OF_ALONE, Row, bytes_text
from t5bench.compare.statistics import Estimate
from t5bench.model.parameters import parameters
from t5bench.record.records import Run
from t5bench.record.text import processes

NOTHING = "-"
DIGITS = 9  # of a published figure: the last of a float's 17 depend on the processor, for example on AVX-512


def _significant(value: float, digits: int = 4) -> str:
    """With this many significant digits, and never in powers of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{_decimals(value, digits)}f}"


def _estimate_text(value: Estimate, digits: int = 4) -> str:
    """As many digits as are known: two of half the interval, and never more than `digits` significant ones."""
    if value.low is None or value.high is None:
        return _significant(value.median, digits)
    half, scale = (value.high - value.low) / 2, abs(value.median)
    if 0 < half < math.inf and 0 < scale < math.inf:
        known = math.floor(math.log10(scale)) - math.floor(math.log10(half)) + 2
        digits = max(2, min(digits, known))
    decimals = _decimals(value.median, digits)
    low, middle, high = (f"{number:.{decimals}f}" for number in (value.low, value.median, value.high))
    return f"{middle} [{low}, {high}]"


def _decimals(value: float, digits: int) -> int:
    """Behind the point, for so many significant digits of the value."""
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def _repeats_text(repeats: tuple[int, float | None, float | None]) -> str:
    """How many repeats, and how far their medians lie apart."""
    count, *ends = repeats
    return f"{count}: {' to '.join(map(_significant, ends))}" if count > 1 and None not in ends else NOTHING


@dataclass(frozen=True)
class Column:
    """One fact about a row, wherever it is shown.

    title: its heading in a table; a fact without one is in files alone. fields: its names in CSV and in W&B's table,
    one for each part of a value that has several. importance: a table that is too wide leaves out the lowest first.
    metric: its name in W&B's summary, by which a training run has it too.
    """

    title: str
    fields: str
    value: Callable[[Row], Any]
    importance: int = 0
    show: Callable[[Any], str] = str
    alignment: str = "right"
    metric: str = ""

    def text(self, row: Row) -> str:
        return NOTHING if (value := self.value(row)) is None else self.show(value)

    def parts(self, row: Row) -> dict[str, Any]:
        """By field, None for what was not measured."""
        value, names = self.value(row), self.fields.split()
        parts = astuple(value) if is_dataclass(value) else value if isinstance(value, tuple) else [value] * len(names)
        return dict(zip(names, parts, strict=False))


def predicted_bytes(row: Row) -> tuple[float, float | None] | None:
    """Bytes that the busiest node sends to others in an iteration, and how far that is from what was measured.

    On one node with gloo: what its processes send each other over the loopback, as if each were a node.
    """
    if not (found := row.prediction) or (row.run.layout.nnodes == 1 and found.backend != "gloo"):
        return None
    if row.run.layout.nnodes > 1:
        return _beside(max(found.node_bytes), row.sent_per_iteration)
    alone = replace(found.job, parallel=replace(found.job.parallel, devices_per_node=1))
    return _beside(sum(replace(found, job=alone).node_bytes), row.sent_per_iteration)


def predicted_memory(row: Row) -> tuple[float, float | None] | None:
    """MiB allocated on the fullest GPU at its peak, and how far that is from what was measured."""
    found = row.prediction if row.on_gpu else None
    return _beside(found.memory.peak / 2**20, max(row.peak_memory.values(), default=None)) if found else None


def predicted_time(row: Row) -> tuple[float, float | None] | None:
    """Milliseconds of an iteration, and how far that is from what was measured."""
    return _beside(1000 * row.predicted.total, row.milliseconds.median) if row.predicted and row.milliseconds else None


def _beside(predicted: float, measured: float | None) -> tuple[float, float | None]:
    return predicted, predicted / measured - 1 if measured else None


def _predicted_text(show: Callable[[float], str]) -> Callable[[tuple[float, float | None]], str]:
    return lambda value: show(value[0]) + ("" if value[1] is None else f" ({value[1]:+.1%})")


def mark(row: Row) -> str:
    """What a label ends with when a remark says how the row differs from the baseline, or what its intervals lack."""
    return MARK_OF_ALONE * row.alone + " *" * bool(row.marks)


def all_columns(comparison: Comparison) -> list[Column]:
    """Every column, whether anything of it was measured or not. Why a row has no figures is a problem, no column."""
    base, rows = comparison.baseline, comparison.rows
    device, process = ("GPU", "GPU") if any(row.on_gpu for row in rows) else ("host", "process")
    all_complete = all(row.complete for row in rows)
    loopback = " (loopback)" if any(entry.observed.loopback for row in rows for entry in row.measured) else ""
    return [
        Column("strategy", "", lambda row: row.label + mark(row), 99, alignment="left"),
        Column("", "strategy label", lambda row: (row.strategy, row.label)),
        Column("TP/PP/DP", "", lambda row: row.run.layout, 60, "{0.tp}/{0.pp}/{0.dp}".format, "center"),
        Column("", "nnodes nproc_per_node world_size tp pp dp micro_batches", lambda row: row.run.layout),
        Column("", "engine device", lambda row: (row.run.engine, row.run.plan.device)),
        Column("", "gpu precision", lambda row: (gpu_names(row.run), row.run.plan.precision)),
        Column("ms/iteration", "ms_per_iteration ms_low ms_high", lambda row: row.milliseconds, 40, _estimate_text,
               metric="elapsed time per iteration"),
        Column("samples/s", "samples_per_second samples_per_second_low samples_per_second_high",
               lambda row: row.samples_per_second, 90, _estimate_text, metric="samples per second"),
        Column("", "tokens_per_second", lambda row: row.tokens_per_second),
        Column(f"x {base}", "throughput_ratio ratio_low ratio_high", lambda row: row.ratio, 85,
               lambda value: _estimate_text(value, 3), metric="throughput relative to the baseline"),
        Column("repeats (ms)", "runs ms_lowest_run ms_highest_run",
               lambda row: (len(row.repeats or row.runs), *(end(row.run_medians, default=None) for end in (min, max))),
               15, _repeats_text),
        Column("", "interval_of", lambda row: ("this run alone" if row.alone else "repeats") if row.repeats else None),
        Column(f"TFLOP/s per {process}", "tflops_per_gpu", lambda row: row.tflops, 30,
               lambda value: _significant(value, 3), metric="TFLOPs"),
        Column("TFLOP/s with recomputation", "hardware_tflops_per_gpu", lambda row: row.hardware_tflops, 11,
               lambda value: _significant(value, 3)),
        Column("MFU", "mfu", lambda row: row.mfu, 55, "{:.1%}".format, metric="MFU"),
        Column(f"peak {device} MiB", "peak_memory_mib", lambda row: max(row.peak_memory.values(), default=None), 80,
               "{:.0f}".format, metric="peak memory MiB"),
        Column(f"sent/iteration{loopback}", "bytes_sent_per_iteration", lambda row: row.sent_per_iteration, 20,
               bytes_text),
        Column("bytes predicted (error)", "bytes_predicted bytes_predicted_off", predicted_bytes, 14,
               _predicted_text(bytes_text)),
        Column(f"{device} MiB predicted (error)", "memory_mib_predicted memory_mib_predicted_off", predicted_memory, 13,
               _predicted_text("{:.0f}".format)),
        Column("ms predicted (error)", "ms_predicted ms_predicted_off", predicted_time, 12,
               _predicted_text(_significant)),
        Column("final loss", "final_loss", lambda row: row.final_loss, 25, "{:.6f}".format, metric="lm loss"),
        Column(f"equal to {base}", "parity largest_loss_difference", lambda row: row.parity, 50, alignment="left"),
        Column("status", "status", lambda row: row.run.status, 16 if all_complete else 70,
               alignment="left"),
        Column("", "reason", lambda row: row.run.reason),
        Column("gradients reduced", "gradient_dtype gradient_overlap", lambda row: row.reduction, 10, alignment="left"),
        Column("", "differs_from_baseline", lambda row: "; ".join(row.marks)),
    ]  # fmt: skip


def columns(comparison: Comparison) -> list[Column]:
    """Those of a table: the ones that hold something for at least one row."""
    titled = [column for column in all_columns(comparison) if column.title]
    return [column for column in titled if any(column.text(row) != NOTHING for row in comparison.rows)]


def short_labels(comparison: Comparison, longest: int) -> dict[str, str]:
    """For each label that is longer than this: its strategy and a number."""
    long = dict.fromkeys((row.label, row.strategy) for row in comparison.rows if len(row.label) > longest)
    return {label: f"{strategy} [{number}]" for number, (label, strategy) in enumerate(long, 1)}


def named_rows(comparison: Comparison, longest: int = sys.maxsize) -> list[tuple[str, Row]]:
    """The rows, each by another name: its label, the number of processes where it needs that, or a number."""
    short = short_labels(comparison, longest)
    found: list[tuple[str, Row]] = []
    for row in comparison.rows:
        sizes = {other.run.world_size for other in comparison.rows if other.label == row.label}
        name = short.get(row.label, row.label) + (f" ({processes(row.run.world_size)})" if len(sizes) > 1 else "")
        earlier = sum(other.split(" #")[0] == name for other, _ in found)
        found.append((f"{name} #{earlier + 1}" if earlier else name, row))
    return found


def caption(comparison: Comparison) -> str:
    """What is the same in all rows, in one line; what differs is listed with all its values."""

    def all_of(of: Callable[[Run], str | None]) -> str:
        return " / ".join(dict.fromkeys(value for run in comparison.runs if (value := of(run))))

    def setting(name: str) -> str:
        return all_of(lambda run: run.plan.value(name))

    def name(run: Run) -> str:
        return f"{run.architecture.family.upper()} {run.plan.value('MODEL_PRESET')}"

    def model(run: Run) -> str:
        known = [each for each in comparison.runs if each.padded_vocab_size and name(each) == name(run)]
        sizes = dict.fromkeys(f"{parameters(each.architecture) / 1e6:.4g}M" for each in known)
        return name(run) + f" ({' / '.join(sizes)} parameters)" * bool(sizes)

    def lengths(run: Run) -> str:
        return "/".join(str(n) for n in (run.architecture.encoder_length, run.architecture.decoder_length) if n)

    kinds = {"cuda": "GPU of unknown name", "cpu": "CPU"}
    return (
        f"{all_of(model)}, batch {setting('GLOBAL_BATCH_SIZE')} (micro-batch {setting('MICRO_BATCH_SIZE')}), "
        f"lengths {all_of(lengths)}, "
        f"{all_of(lambda run: run.plan.precision)}, engine {all_of(lambda run: run.engine)}, "
        f"{all_of(lambda run: gpu_names(run) or kinds[run.plan.device])}"
    )


def remarks(comparison: Comparison) -> list[str]:
    """What stands under the table: marks, footnotes, notes."""
    marked = [f"* {row.label}: {', '.join(row.marks)}" for row in comparison.rows if row.marks]
    return [*marked, *comparison.notes, *comparison.predicted_by]


def method(comparison: Comparison) -> str:
    """What was left out and how the intervals are made, with this comparison's counts."""
    timings = [entry.timing for row in comparison.rows for entry in row.measured if entry.timing]
    dropped = Counter(reason for timing in timings for reason in timing.dropped.values())
    left_out = ", ".join(f"{count} for {reason}" for reason, count in dropped.items()) or "none"
    if not timings:
        return "No run has a time."
    intervals = sum(len(timing.used) for timing in timings)
    outliers = sum(timing.outliers for timing in timings)
    return (
        f"Medians over {intervals} log intervals; left out: {left_out}. Brackets hold 95 % confidence intervals. With "
        "three or more repeats they are over the runs, for ratios if these ran in turn. Otherwise they are for this "
        "run's median, allowing for autocorrelation, and a ratio's covers all that both intervals allow."
        f"{_of_many_ratios(comparison)} {outliers} outlier(s) by Tukey's fences are included."
    )


def _of_many_ratios(comparison: Comparison) -> str:
    """What a reader of several ratios has to know: each interval is right by itself, not all of them at once."""
    count = sum(bool(row.ratio and row.ratio.low and not row.is_baseline and not row.alone) for row in comparison.rows)
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


def _sentences(comparison: Comparison) -> list[str]:
    """What is to be said below a table."""
    notes = [f"note: {remark}" for remark in remarks(comparison)]
    problems = [f"problem: {problem}" for problem in comparison.problems]
    return [*comparison.verdicts, method(comparison), *notes, *problems]


def _table(shown: Sequence[Column], rows: Sequence[Row], form: str, write: Callable[[str], str] = str) -> str:
    cells = [[write(column.text(row)) for column in shown] for row in rows]
    # In a terminal one word a line, so that the figures decide how wide a column is.
    titles = [write(column.title) if form == "pipe" else column.title.replace(" ", "\n") for column in shown]
    alignment = [column.alignment for column in shown]
    return tabulate(cells, titles, tablefmt=form, colalign=alignment, disable_numparse=True)


def _fitting(shown: Sequence[Column], comparison: Comparison, width: int) -> list[Column]:
    """The most important of these columns, as many as every group's table has room for."""
    kept = list(shown)
    while len(kept) > 1:
        lines = [line for group in comparison.groups for line in _table(kept, group.rows, "simple").splitlines()]
        if max(map(len, lines)) <= width:
            break
        kept.remove(min(kept, key=lambda column: column.importance))
    return kept


def terminal(comparison: Comparison, width: int | None = None) -> str:
    """One table for each number of processes, with what is to be said above and below.

    width: of the terminal, in characters. Columns that do not fit are left out, a long label stands below the table,
    sentences are wrapped between words. None: every column, and one line for every sentence.
    """
    room = width or sys.maxsize
    # A path stays whole.
    lines = textwrap.TextWrapper(room, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    short = short_labels(comparison, room // 3)
    first, *others = columns(comparison)
    first = replace(first, value=lambda row: short.get(row.label, row.label) + mark(row))
    shown = _fitting([first, *others], comparison, room)
    absent = ", ".join(column.title for column in others if column not in shown)
    tables = [f"\n{processes(group.world_size)}\n{_table(shown, group.rows, 'simple')}" for group in comparison.groups]
    below = [f"{name}: {label}" for label, name in short.items()]
    below += [f"left out for lack of room: {absent}; --wide prints every column"] if absent else []
    above = [lines.fill(text) for text in (caption(comparison), warning(comparison)) if text]
    return "\n".join([*above, *tables, "", *map(lines.fill, [*below, *_sentences(comparison)])]) + "\n"


_MARKDOWN = str.maketrans({"|": r"\|", "<": "&lt;", ">": "&gt;", "\n": " ", "*": r"\*", "`": "'", "_": r"\_"})


def markdown(comparison: Comparison) -> str:
    """For GitHub."""

    def escape(text: str) -> str:
        return text.translate(_MARKDOWN)

    shown = columns(comparison)
    parts = ["# Comparison", escape(caption(comparison)), f"**{reason}**" if (reason := warning(comparison)) else ""]
    for group in comparison.groups:
        parts += [f"## {processes(group.world_size)}", _table(shown, group.rows, "pipe", escape)]
    parts.append("\n".join(f"- {escape(sentence)}" for sentence in _sentences(comparison)))
    return "\n\n".join(part for part in parts if part) + "\n"


def rounded(content: Any, digits: int = DIGITS) -> Any:
    """With this many significant digits of every float, also of those in dictionaries, lists and tuples."""
    if isinstance(content, dict):
        return {key: rounded(value, digits) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [rounded(value, digits) for value in content]
    return float(f"{content:.{digits}g}") if isinstance(content, float) else content


def data(comparison: Comparison) -> list[dict[str, Any]]:
    """Every field of every row, numbers in the units of the fields' names; None is what was not measured."""
    every = all_columns(comparison)
    return [
        {"name": name} | {field: rounded(part) for column in every for field, part in column.parts(row).items()}
        for name, row in named_rows(comparison)
    ]


def as_csv(comparison: Comparison) -> str:
    """One line a row; an empty cell is what was not measured."""
    text, rows = io.StringIO(), data(comparison)
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
