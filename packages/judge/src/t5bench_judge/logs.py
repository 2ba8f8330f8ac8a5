"""The loss and gradient norm of every logged step, from the logs of any trainer.

Tables, JSON, the lines that trainers print, TensorBoard's event files, W&B's offline runs, run directories of
T5-Parallelism and traces.
"""

import gzip
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from t5bench_judge import columns, lines
from t5bench_judge.columns import Names, Row
from t5bench_judge.event_files import tensorboard_rows, wandb_rows
from training_comparison.curves import TOLERANCE, Curves, exact, relative_difference
from training_comparison.given_files import read_file
from training_comparison.problem import Problem
from training_comparison.traces import Trace, is_trace, read_trace

REMEDY = (
    "Give a log with a line for each step that names the step, the loss and the gradient norm: JSON lines, CSV, what "
    "the trainer prints, trainer_state.json, TensorBoard's or W&B's offline files, or a run directory"
)
MOST_LOG_BYTES = 1 << 28
MOST_METRICS = 1000  # files of a directory that has one for each
# MLflow's file of one metric: milliseconds, the value, the step.
METRIC_LINE = re.compile(r"\d{12,14} (?P<value>\S+) (?P<step>\d+)(?: \S+)*")
TRAINING_ROLES = ("model", "recipe")  # of settings that decide what is trained
MOST_DIGITS = 17  # a float64's
SAME = TOLERANCE["fp32"].loss  # relative: a step that stands twice has one value
KINDS = {
    b"PAR1": "a Parquet file: write it as CSV",
    b"PK\x03\x04": "a checkpoint of PyTorch or a ZIP archive",
    b"SQLite": "an SQLite database: export the metrics as CSV",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
    b"ARROW1": "an Arrow file: write it as CSV",
    b"\x89PNG": "a picture",
    b"%PDF": "a PDF",
}


@dataclass(frozen=True)
class Log:
    """What a training logged, by step, and what is known of its recipe."""

    name: str
    source: str
    """The kind of log."""
    curves: Curves
    loss_name: str = "loss"
    precision: str = ""
    """"" if the log does not say."""
    clip: float = 0.0
    """The norm to which gradients are clipped; 0 if they are not, or it is not known."""
    micro_batches: int = 0
    """Of an iteration; 0 if it is not known."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Those that decide what is trained, if the log says them."""
    trace: Trace | None = None
    """What each rank computed, if the log is such a trace."""
    notes: Sequence[str] = ()

    @property
    def interval(self) -> int:
        """Steps from one log line to the next, usually; 1 if there is only one line."""
        steps = sorted(self.curves.loss)
        gaps = [later - earlier for earlier, later in pairwise(steps)]
        return max(set(gaps), key=gaps.count) if gaps else 1


def read_log(path: Path, names: Names) -> Log:
    """Raises Problem."""
    if path.is_dir():
        return _of_directory(path, names)
    if not path.exists():
        raise Problem(f"there is no {path}", REMEDY)
    if "tfevents" in path.name:
        return of_rows(path.name, "TensorBoard", list(tensorboard_rows(path)), names)
    if path.suffix == ".wandb":
        return of_rows(path.name, "W&B", list(wandb_rows(path)), names)
    return of_text(path.name, text_of(path), names)


def of_text(name: str, text: str, names: Names) -> Log:
    """Raises Problem."""
    text = lines.without_colours(text)
    if not text.strip():
        raise Problem(f"{name} is empty", REMEDY)
    if text.lstrip().startswith(("{", "[")):
        rows = lines.json_rows(text)
        if rows:
            printed = lines.text_in(rows, names)
            if printed:
                return of_text(name, printed, names)
            source = "transformers" if '"log_history"' in text[:100_000] else "JSON"
            return of_rows(name, source, rows, names)
    rows = metric_rows(name, text)
    if rows:
        return of_rows(name, "MLflow", rows, names)
    rows = lines.json_after_words(text)
    if rows:
        return of_rows(name, "JSON", rows, names)
    rows = lines.table_rows(text, names)
    if rows is not None:
        return of_rows(name, "table", rows, names)
    rows = lines.printed_rows(text, names)
    if rows:
        return of_rows(name, "lines", rows, names)
    raise _no_loss(name, text)


def metric_rows(name: str, text: str) -> list[Row]:
    """Of MLflow's file of one metric, which is called as the metric: a time in ms, a value and a step a line; [] of
    any other."""
    found = [METRIC_LINE.fullmatch(line) for line in text.splitlines() if line.strip()]
    rows = [{"step": line["step"], name: line["value"]} for line in found if line]
    return rows if len(rows) == len(found) else []


def _no_loss(name: str, text: str) -> Problem:
    found = lines.likely_columns(text)
    if {columns.plain(column) for column in found} == {"wall_time", "step", "value"}:
        return Problem(f"{name} is TensorBoard's CSV of one scalar", "If it is the loss, say so: --loss Value")
    if found:
        return Problem(
            f"{name} has no column that is called a loss", f"Name one with --loss: {columns.in_words(found)}"
        )
    if lines.is_numbers_alone(text):
        said = f"{name} has numbers alone, and no line that says what they are"
        return Problem(said, "Put a line of names above them, such as: step,loss,grad_norm")
    said = lines.names_in(text)
    instead = f": they say {columns.in_words(said)}" if said else ""
    return Problem(f"no line of {name} says a loss{instead}", REMEDY)


def text_of(path: Path) -> str:
    """Raises Problem for what is no text."""
    content = read_file(path, REMEDY, MOST_LOG_BYTES)
    if content.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(MOST_LOG_BYTES)
        except (OSError, EOFError) as error:
            raise Problem(f"{path} cannot be unpacked: {error}", REMEDY) from error
    for begin, kind in KINDS.items():
        if content.startswith(begin):
            raise Problem(f"{path} is {kind}", REMEDY)
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):  # as PowerShell writes what a program prints
        return content.decode("utf-16", "replace")
    if b"\0" in content:
        raise Problem(f"{path} is no text", REMEDY)
    return content.decode("utf-8-sig", "replace")


# ---- directories -----------------------------------------------------------------------------------------------------


def _of_directory(path: Path, names: Names) -> Log:
    if (path / "run.json").is_file() or any(path.glob("node[0-9]*.json")):
        return _of_run(path)
    if is_trace(path):
        trace = read_trace(path)
        if not trace.losses:
            raise Problem(f"the trace in {path} has no loss", "Pass it: trace.step(step, loss)")
        curves = Curves(trace.losses, trace.norms, path.name)
        return Log(path.name, "trace", curves, precision=trace.header.precision, trace=trace)
    events = sorted(path.glob("*tfevents*"))
    if events:  # one for each time that the training was resumed
        return of_rows(path.name, "TensorBoard", [row for file in events for row in tensorboard_rows(file)], names)
    for pattern in ("trainer_state.json", "metrics.csv", "metrics.jsonl", "run-*.wandb"):
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            listed = ", ".join(file.name for file in found[:3])
            raise Problem(f"{path} holds {len(found)} logs ({listed} ...)", "Name one of them")
        if found:
            return read_log(found[0], names)
    rows = _rows_of_metrics(path)
    if rows:
        return of_rows(path.name, "a file for each metric", rows, names)
    raise Problem(f"{path} holds no run, no TensorBoard events, no W&B run and no log", REMEDY)


def _rows_of_metrics(path: Path) -> list[Row]:
    """Of a directory with a file for each metric: MLflow's, in it or in its metrics/, or CSV files of a step and a
    value."""
    rows: list[Row] = []
    metrics = path / "metrics" if (path / "metrics").is_dir() else path
    for file in sorted(file for file in metrics.rglob("*") if file.is_file())[:MOST_METRICS]:
        name = file.relative_to(metrics).as_posix()
        if file.suffix == ".csv":
            text = text_of(file)
            of_header = text.partition("\n")[0].rpartition(",")[2]
            rows += lines.table_rows(text, Names(norm=of_header)) or []
        elif not file.suffix:
            rows += metric_rows(name, text_of(file))
    return rows


def _of_run(path: Path) -> Log:
    """A run directory of T5-Parallelism: its lines, and the recipe in its plan."""
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise Problem(f"the run in {path} logged no iteration", "See its status in run.json")
    rows = [row for row in lines.json_rows(text_of(metrics)) or [] if "iteration" in row]
    norm = "grad_norm" if any("grad_norm" in row for row in rows) else ""
    found = of_rows(path.name, "record", rows, Names("iteration", "lm_loss", norm))
    plan = _plan(path)
    settings = settings_of(plan)
    trains = {name: value for role in TRAINING_ROLES for name, value in settings.get(role, {}).items()}
    layout = plan.get("layout")
    micro_batches = layout.get("micro_batches") if isinstance(layout, dict) else None
    return Log(
        path.name,
        "record",
        found.curves,
        "lm loss",
        precision=trains.get("PRECISION_FLAG", "").removeprefix("--") or "fp32",
        clip=columns.number(trains.get("CLIP_GRAD")) or 0.0,
        micro_batches=micro_batches if isinstance(micro_batches, int) else 0,
        settings=trains,
        notes=found.notes,
    )


def _plan(path: Path) -> Mapping[str, Any]:
    """The first node's, as its part of the record has it; {} where that cannot be read."""
    for file in (*sorted(path.glob("node*.json")), path / "run.json"):
        try:
            content = json.loads(read_file(file, REMEDY))
        except (Problem, ValueError, RecursionError):
            continue
        plan = content.get("plan") if isinstance(content, dict) else None
        if isinstance(plan, dict):
            return plan
    return {}


def settings_of(plan: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The values by role and name, as plans of today and of earlier versions have them."""
    by_role = plan.get("settings_by_role")
    if isinstance(by_role, dict):
        return {role: dict(named) for role, named in by_role.items() if isinstance(named, dict)}
    found: dict[str, dict[str, str]] = {}
    settings = plan.get("settings")
    for name, one in settings.items() if isinstance(settings, dict) else ():
        if isinstance(one, dict):
            found.setdefault(str(one.get("role")), {})[name] = str(one.get("value") or "")
    return found


# ---- rows ------------------------------------------------------------------------------------------------------------


def of_rows(name: str, source: str, rows: Sequence[Row], names: Names) -> Log:
    """Raises Problem."""
    rows = [row for row in rows if not columns.sums_up(row)]
    if not rows:
        raise Problem(f"{name} has no log line", REMEDY)
    rows = columns.by_step(rows)
    notes: list[str] = []
    loss_name = columns.loss_column(name, names.loss, rows, notes)
    norm_name = columns.norm_column(name, names.norm, rows, notes)
    sampled = columns.note_of_sampling(name, columns.columns_of(rows))
    if sampled:
        notes.append(sampled)
    with_loss = columns.columns_of([row for row in rows if columns.number(row.get(loss_name)) is not None])
    step_name = columns.step_column(name, names.step, with_loss)
    if not step_name:
        notes.append(f"{name} says no step: its lines are counted")
    loss = curve_of(name, loss_name, list(values_of(rows, step_name, loss_name)), notes)
    norm = curve_of(name, norm_name, list(values_of(rows, step_name, norm_name)), notes) if norm_name else {}
    if not loss:
        raise Problem(f"{name} has no number in its column {loss_name}", "Name another with --loss")
    if len(loss) == 1:
        raise Problem(f"{name} has one line with a loss: a summary, no curve", REMEDY)
    return Log(name, source, Curves(loss, norm, name), loss_name, notes=notes)


def values_of(rows: Sequence[Row], step_name: str, column: str) -> Iterator[tuple[int, float]]:
    """The steps and values of a column, in the order of the file. Without a column of steps, lines are counted."""
    count = 0
    for row in rows:
        value = columns.number(row.get(column))
        if value is None:
            continue
        count += 1
        step = columns.step_number(row.get(step_name)) if step_name else count
        if step is not None:
            yield step, value


def curve_of(name: str, column: str, values: Sequence[tuple[int, float]], notes: list[str]) -> dict[int, float]:
    """The value of each step. Of a resumed training, steps that stand twice have the later value, from which it went
    on. Raises Problem where a step has two values for another reason."""
    curve: dict[int, float] = {}
    again: dict[int, float] = {}
    is_resumed = False
    last = None
    for step, value in values:
        if last is not None and step < last:
            is_resumed = step > min(curve)
        elif step not in curve:
            is_resumed = False
        if step in curve:
            again[step] = 0.0 if repr(value) == repr(curve[step]) else relative_difference(value, curve[step])
            if not again[step] <= SAME and (not is_resumed or step == last):
                remedy = "Give the log of one rank and one attempt, without evaluations"
                two = f"{curve[step]!r} and {value!r}"
                raise Problem(f"{name} has two values of {column} at step {step}: {two}", remedy)
        curve[step] = value
        last = step
    if again:
        largest = max(again.values(), key=lambda apart: (math.isnan(apart), apart))
        steps = f"steps {min(again)} to {max(again)}" if len(again) > 1 else f"step {min(again)}"
        stand = "stand" if len(again) > 1 else "stands"
        agree = "with the same values" if largest == 0 else f"with values up to {largest:.1e} apart; the later count"
        notes.append(f"{name}: {column} of {steps} {stand} there twice, {agree}")
    return curve


def resolution(curve: Mapping[int, float]) -> Callable[[float], float]:
    """Half of the last place with which a value of this size is logged: how far rounding may have moved it.

    A log has either the same number of decimal places everywhere, or the same number of digits. Where fewer than three
    values are there, or some has as many digits as a number can have, nothing was rounded: 0.
    """
    finite = [value for value in curve.values() if math.isfinite(value) and value]
    places = max(map(_decimals, finite), default=0)
    if len(finite) < 3 or places > MOST_DIGITS - 8:
        return exact
    of_size: dict[int, int] = {}
    for value in finite:
        of_size[_size(value)] = max(of_size.get(_size(value), 0), _decimals(value))
    digits = {size + decimals for size, decimals in of_size.items()}
    if len(of_size) > 1 and len(digits) == 1:
        return lambda value: 0.5 * 10.0 ** (_size(value) - max(digits)) if value else 0.0
    return lambda _: 0.5 * 10.0**-places


def _size(value: float) -> int:
    """The power of ten of the first digit."""
    return int(f"{value:e}".partition("e")[2])


def _decimals(value: float) -> int:
    """The decimal places with which a number is written."""
    mantissa, _, exponent = f"{value!r}".partition("e")
    decimals = len(mantissa.partition(".")[2].rstrip("0")) if "." in mantissa else 0
    return max(0, decimals - int(exponent or 0))
