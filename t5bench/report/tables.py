"""A comparison as a table: for the terminal, as Markdown and as CSV."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from t5bench.compare.comparable import gpu_names, setting
from t5bench.compare.comparison import Comparison, Row, bytes_text, shape_of
from t5bench.compare.reduction import precision
from t5bench.compare.statistics import Estimate
from t5bench.model import flops

NOTHING = "-"
PROCESSES = "processes"


def _significant(value: float, digits: int = 4) -> str:
    """With this many significant digits, and never in powers of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def estimate_text(value: Estimate | None, digits: int = 4) -> str:
    if value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return _significant(value.median, digits)
    low, middle, high = (_significant(v, digits) for v in (value.low, value.median, value.high))
    return f"{middle} [{low}, {high}]"


def _or_nothing(value: float | None, text: Callable[[float], str]) -> str:
    return NOTHING if value is None else text(value)


def _ratio(row: Row) -> str:
    if row.is_baseline:
        return "1"
    return estimate_text(row.ratio, 3)


def repeats_text(row: Row) -> str:
    """How many repeats, and how far their medians lie apart."""
    medians = row.run_medians
    return f"{len(medians)}: {_significant(min(medians))} to {_significant(max(medians))}" if len(medians) > 1 else "1"


@dataclass(frozen=True)
class Column:
    title: str
    text: Callable[[Row], str]
    alignment: str = "right"


def gradients_column() -> Column:
    """How each row reduces its gradients; wide, so the terminal has it in notes."""
    return Column("gradients reduced", lambda row: str(row.reduction), "left")


def columns(comparison: Comparison) -> list[Column]:
    """Those that hold something for at least one row; the first six always. Why a row has no figures is a problem."""
    rows = comparison.rows
    on_gpu = any(row.on_gpu for row in rows)
    loopback = any(entry.observed.loopback for row in rows for entry in row.measured)
    always = [
        Column("strategy", lambda row: row.label + (" *" if row.marks else ""), "left"),
        Column(PROCESSES, lambda row: str(row.run.world_size)),
        Column("TP/PP/DP", lambda row: row.layout, "center"),
        Column("ms/iteration", lambda row: estimate_text(row.milliseconds)),
        Column("samples/s", lambda row: estimate_text(row.samples_per_second)),
        Column(f"x {comparison.baseline}", _ratio),
    ]
    where_known = [
        Column("runs: ms", lambda row: repeats_text(row) if len(row.run_medians) > 1 else NOTHING),
        Column(
            f"TFLOP/s per {'GPU' if on_gpu else 'process'}",
            lambda row: _or_nothing(row.tflops, lambda v: _significant(v, 3)),
        ),
        Column("MFU", lambda row: _or_nothing(row.mfu, "{:.1%}".format)),
        Column(
            f"peak {'GPU' if on_gpu else 'host'} MiB",
            lambda row: _or_nothing(max(row.peak_memory.values(), default=None), "{:.0f}".format),
        ),
        Column(
            "sent/iteration" + (" (loopback)" if loopback else ""),
            lambda row: _or_nothing(row.sent_per_iteration, bytes_text),
        ),
        Column("final loss", lambda row: _or_nothing(row.final_loss, "{:.6f}".format)),
        Column(f"equal to {comparison.baseline}", lambda row: str(row.parity), "left"),
        Column("status", lambda row: row.run.status, "left"),
    ]
    known = [column for column in where_known if any(column.text(row) != NOTHING for row in rows)]
    return [*always, *known]


def caption(comparison: Comparison) -> str:
    """What is the same in all rows, in one line; what differs is listed with all its values."""
    runs = comparison.runs

    def all_of(values: Sequence[str]) -> str:
        return " / ".join(dict.fromkeys(value for value in values if value))

    engine = all_of([run.engine for run in runs])
    kinds = {"cuda": "GPU of unknown name", "cpu": "CPU"}
    device = all_of([gpu_names(run) or kinds.get(run.nodes[0].get("device"), "") for run in runs])
    model = all_of([setting(run, "MODEL_PRESET") or "" for run in runs])
    shapes = [shape for run in runs if (shape := shape_of(run))]
    size = all_of([f"{flops.parameters(shape) / 1e6:.4g}M parameters" for shape in shapes])
    batch = all_of([setting(run, "GLOBAL_BATCH_SIZE") or "" for run in runs])
    micro = all_of([setting(run, "MICRO_BATCH_SIZE") or "" for run in runs])
    lengths = all_of([f"{setting(run, 'ENCODER_SEQ_LENGTH')}/{setting(run, 'DECODER_SEQ_LENGTH')}" for run in runs])
    parts = [
        f"T5 {model}" + (f" ({size})" if size else ""),
        f"batch {batch} (micro-batch {micro})",
        f"lengths {lengths}",
    ]
    parts += [all_of([precision(run) for run in runs]), f"engine {engine}", device]
    return ", ".join(part for part in parts if part)


def remarks(comparison: Comparison) -> list[str]:
    """What stands under the table: marks, footnotes, notes."""
    marked = [f"* {row.label}: {', '.join(row.marks)}" for row in comparison.rows if row.marks]
    return [*marked, *comparison.notes]


def method(comparison: Comparison) -> str:
    """What was left out and how the intervals are made, with this comparison's counts."""
    dropped: dict[str, int] = {}
    used = outliers = 0
    for row in comparison.rows:
        for entry in row.measured:
            if entry.timing:
                used += len(entry.timing.used)
                outliers += entry.timing.outliers
                for reason, count in entry.timing.dropped_by_reason().items():
                    dropped[reason] = dropped.get(reason, 0) + count
    left_out = ", ".join(f"{count} for {reason}" for reason, count in dropped.items()) or "none"
    return (
        f"Medians over {used} log intervals; left out: {left_out}. In brackets the 95 % confidence interval of the "
        "median by order statistics; of repeats the hull of theirs, of ratios all that both intervals allow. "
        f"{outliers} outlier(s) by Tukey's fences stay in."
    )


def _reductions(comparison: Comparison) -> list[tuple[str, list[str]]]:
    rows: dict[str, list[str]] = {}
    for row in comparison.rows:
        labels = rows.setdefault(str(row.reduction), [])
        labels += [row.label] if row.label not in labels else []
    return list(rows.items())


def terminal(comparison: Comparison) -> str:
    """One table for each number of processes, with what is to be said above and below."""
    shown = columns(comparison)
    lines = [caption(comparison), ""]
    if comparison.not_of_gpus:
        lines[1:1] = [f"({comparison.not_of_gpus}: not a measurement of Megatron-DeepSpeed on GPUs)"]
    for group in comparison.groups:
        cells = [[column.text(row) for column in shown] for row in group.rows]
        # One word a line, so that the figures decide how wide a column is.
        titles = [column.title.replace(" ", "\n") for column in shown]
        alignment = [column.alignment for column in shown]
        lines += [tabulate(cells, titles, colalign=alignment, disable_numparse=True), ""]
    lines += [*comparison.verdicts, method(comparison)]
    lines += [f"gradients reduced: {reduction}: {', '.join(labels)}" for reduction, labels in _reductions(comparison)]
    lines += [f"note: {remark}" for remark in remarks(comparison)]
    lines += [f"problem: {problem}" for problem in comparison.problems]
    return "\n".join(lines) + "\n"


_MARKDOWN = str.maketrans({"|": r"\|", "<": "&lt;", ">": "&gt;", "\n": " ", "*": r"\*", "`": "'", "_": r"\_"})


def _escape(text: str) -> str:
    return text.translate(_MARKDOWN)


def markdown(comparison: Comparison) -> str:
    """For GitHub."""
    shown = [*columns(comparison), gradients_column()]
    rule = {"left": ":--", "right": "--:", "center": ":-:"}
    lines = ["# Comparison", "", _escape(caption(comparison)), ""]
    if comparison.not_of_gpus:
        lines += [f"**{comparison.not_of_gpus}: not a measurement of Megatron-DeepSpeed on GPUs**", ""]
    lines += [*(f"- {_escape(verdict)}" for verdict in comparison.verdicts), ""]
    for group in comparison.groups:
        lines += ["| " + " | ".join(_escape(column.title) for column in shown) + " |"]
        lines += ["|" + "|".join(rule[column.alignment] for column in shown) + "|"]
        lines += ["| " + " | ".join(_escape(column.text(row)) for column in shown) + " |" for row in group.rows]
        lines += [""]
    lines += [_escape(method(comparison)), ""]
    lines += [f"- {_escape(remark)}" for remark in remarks(comparison)]
    lines += [f"- **problem**: {_escape(problem)}" for problem in comparison.problems]
    return "\n".join(lines).rstrip() + "\n"


CSV_COLUMNS = (
    "strategy", "label", "world_size", "nnodes", "tp", "pp", "dp", "micro_batches", "engine", "device", "gpu",
    "precision", "status", "reason", "runs", "ms_per_iteration", "ms_low", "ms_high", "ms_lowest_run",
    "ms_highest_run", "samples_per_second", "samples_per_second_low", "samples_per_second_high", "tokens_per_second",
    "throughput_ratio", "ratio_low", "ratio_high", "tflops_per_gpu", "mfu", "peak_memory_mib",
    "bytes_sent_per_iteration", "gradient_dtype", "gradient_overlap", "final_loss", "parity",
    "largest_loss_difference", "differs_from_baseline",
)  # fmt: skip


def as_csv(comparison: Comparison) -> str:
    """One line a row, plain numbers in the units of the column names; an empty cell is what was not measured."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in comparison.rows:
        nothing = Estimate(math.nan)
        time, rate, ratio = (row.milliseconds or nothing, row.samples_per_second or nothing, row.ratio or nothing)
        medians = row.run_medians
        layout = {key: row.run.layout[key] for key in ("nnodes", "world_size", "tp", "pp", "dp", "micro_batches")}
        values = layout | {
            "strategy": row.strategy,
            "label": row.label,
            "engine": row.run.engine,
            "device": row.run.nodes[0].get("device"),
            "gpu": gpu_names(row.run),
            "precision": precision(row.run),
            "status": row.run.status,
            "reason": row.run.reason,
            "runs": len(row.runs),
            "ms_per_iteration": time.median,
            "ms_low": time.low,
            "ms_high": time.high,
            "ms_lowest_run": min(medians, default=None),
            "ms_highest_run": max(medians, default=None),
            "samples_per_second": rate.median,
            "samples_per_second_low": rate.low,
            "samples_per_second_high": rate.high,
            "tokens_per_second": row.tokens_per_second.median if row.tokens_per_second else None,
            "throughput_ratio": ratio.median,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "tflops_per_gpu": row.tflops,
            "mfu": row.mfu,
            "peak_memory_mib": max(row.peak_memory.values(), default=None),
            "bytes_sent_per_iteration": row.sent_per_iteration,
            "gradient_dtype": row.reduction.dtype,
            "gradient_overlap": row.reduction.overlap if row.reduction.dtype else None,
            "final_loss": row.final_loss,
            "parity": row.parity.verdict,
            "largest_loss_difference": row.parity.difference,
            "differs_from_baseline": "; ".join(row.marks),
        }
        absent = (None, "") if row.milliseconds else (None, "", time.median)
        writer.writerow({key: "" if value in absent else value for key, value in values.items()})
    return text.getvalue()
