"""The loss and gradient norm of every logged step, from the logs of any trainer.

JSON lines, CSV, transformers' trainer_state.json, TensorBoard's event files, W&B's offline runs and this project's run
directories and audits. Names of columns are chosen only where one name fits; otherwise a Problem lists what is there.
"""

import contextlib
import csv
import io
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from t5bench import Problem
from t5bench.compare.parity import curve as curve_of_run
from t5bench.given_files import read_file, read_text
from t5bench.record.records import load, looks_like_run
from t5bench.record.run import Run
from t5bench_judge.audits import Audit, is_audit

REMEDY = "Give a run directory, JSON lines, CSV, trainer_state.json, TensorBoard's or W&B's offline files"
# What trainers call them; compared without case, and with "_" for " ", "-" and ".".
STEPS = ("step", "iteration", "global_step", "train/global_step", "iter", "it", "current_step", "_step")
LOSSES = (
    "loss", "train_loss", "train/loss", "training_loss", "lm_loss", "train/lm_loss", "lm_loss_training/lm_loss",
    "loss_metrics/global_avg_loss", "loss/train", "loss/train/total",
)  # fmt: skip
NORMS = (
    "grad_norm", "gradient_norm", "train/grad_norm", "train/gradient_norm", "grad_norm/grad_norm", "total_norm",
    "gradnorm", "global_grad_norm", "train/global_grad_norm",
)  # fmt: skip
MOST_LOG_BYTES = 1 << 28
MOST_DIGITS = 17  # a float64's

# W&B's offline files (public format of LevelDB's logs, after seven bytes of its own): blocks of 32 KiB hold pieces of
# records, each behind a checksum, a length and a kind.
_WANDB_MAGIC = b":W&B"
_WANDB_HEADER = 7
_BLOCK = 1 << 15
_PIECE = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True)
class Names:
    """The names of columns that the user gave; "" where the file's own are to be recognized."""

    step: str = ""
    loss: str = ""
    norm: str = ""


@dataclass(frozen=True)
class Curves:
    """What a training logged, by step."""

    name: str
    source: str
    """The kind of log."""
    loss: Mapping[int, float]
    norm: Mapping[int, float]
    """Empty if the log has no gradient norms."""
    loss_name: str = "loss"
    run: Run | None = None
    """The record, if it is a run directory of this project."""
    audit: Audit | None = None
    """What each rank had, if audit() wrote the log."""
    others: Sequence[str] = field(default=(), repr=False)
    """The other columns."""

    @property
    def interval(self) -> int:
        """Steps from one log line to the next, usually; 1 if there is only one line."""
        steps = sorted(self.loss)
        gaps = [later - earlier for earlier, later in pairwise(steps)]
        return max(set(gaps), key=gaps.count) if gaps else 1


Row = Mapping[str, Any]


def plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_").replace(".", "_")


def read_curves(path: Path, names: Names) -> Curves:
    """Raises Problem."""
    if path.is_dir():
        return _of_directory(path, names)
    if not path.exists():
        raise Problem(f"there is no {path}", REMEDY)
    if "tfevents" in path.name:
        return _of_rows(path, "TensorBoard", list(_tensorboard_rows(path)), names)
    if path.suffix == ".wandb":
        return _of_rows(path, "W&B", list(_wandb_rows(path)), names)
    text = read_text(path, REMEDY, MOST_LOG_BYTES)
    if not text.strip():
        raise Problem(f"{path} is empty", REMEDY)
    if text.lstrip().startswith("{"):
        return _of_json(path, text, names)
    return _of_rows(path, "CSV", list(csv.DictReader(io.StringIO(text))), names)


def _of_directory(path: Path, names: Names) -> Curves:
    if looks_like_run(path):
        run = load(path)
        loss = curve_of_run(run)
        norm = curve_of_run(run, "grad_norm")
        return Curves(path.name, "record", loss, norm, "lm loss", run)
    if is_audit(path):
        audit = Audit(path)
        if not audit.loss:
            raise Problem(f"the audit in {path} has no loss", "Pass it: audit(..., loss=loss)")
        return Curves(path.name, "audit", audit.loss, audit.norm, audit=audit)
    if (path / "trainer_state.json").is_file():
        return read_curves(path / "trainer_state.json", names)
    found = sorted(path.glob("*tfevents*")) or sorted(path.glob("run-*.wandb"))
    if not found:
        raise Problem(f"{path} holds no run, no TensorBoard events and no W&B run", REMEDY)
    if len(found) > 1:
        listed = ", ".join(file.name for file in found[:3])
        raise Problem(f"{path} holds {len(found)} logs ({listed} ...)", "Name one of them")
    return read_curves(found[0], names)


def _of_json(path: Path, text: str, names: Names) -> Curves:
    """One object (trainer_state.json, or any with a list of log lines), or an object a line."""
    with contextlib.suppress(msgspec.DecodeError):
        whole = msgspec.json.decode(text)
        lines = whole.get("log_history") if isinstance(whole, dict) else None
        if isinstance(lines, list):
            # The last line sums the training up; its train_loss is no step's.
            rows = [row for row in lines if isinstance(row, dict) and "train_runtime" not in row]
            return _of_rows(path, "transformers", rows, names)
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(_with_numbers(line))
        except (msgspec.DecodeError, RecursionError) as error:
            raise Problem(f"{path}: line {number} is no JSON: {error}", REMEDY) from error
        if isinstance(row, dict):
            rows.append(row)
    return _of_rows(path, "JSON lines", rows, names)


def _with_numbers(line: str) -> str:
    """Python writes NaN and Infinity, which JSON does not have."""
    for word in ("-Infinity", "Infinity", "NaN"):
        for before in (": ", ":"):
            line = line.replace(f"{before}{word}", f'{before}"{word}"')
    return line


def _tensorboard_rows(path: Path) -> Iterator[Row]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield {"step": event.step, tag: event.value}
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            if event.tensor_proto.float_val:
                yield {"step": event.step, tag: event.tensor_proto.float_val[0]}


def _wandb_rows(path: Path) -> Iterator[Row]:
    from wandb.proto import wandb_internal_pb2

    content = read_file(path, REMEDY, MOST_LOG_BYTES)
    if not content.startswith(_WANDB_MAGIC):
        raise Problem(f"{path} is no offline run of W&B", REMEDY)
    for record in _wandb_records(content):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(record)
        if entry.WhichOneof("record_type") != "history":
            continue
        row: dict[str, Any] = {"_step": entry.history.step.num}
        for item in entry.history.item:
            name = item.key or "/".join(item.nested_key)
            with contextlib.suppress(msgspec.DecodeError):
                row[name] = msgspec.json.decode(_with_numbers(f":{item.value_json}")[1:])
        yield row


def _wandb_records(content: bytes) -> Iterator[bytes]:
    """A last record that was not written whole is left out."""
    pieces: list[bytes] = []
    place = _WANDB_HEADER
    while place + _PIECE.size <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _PIECE.size:  # too little for another piece: padding
            place += left
            continue
        _, length, kind = _PIECE.unpack_from(content, place)
        place += _PIECE.size
        if kind in (_FULL, _FIRST):
            pieces = []
        elif kind not in (_MIDDLE, _LAST):
            return
        pieces.append(content[place : place + length])
        place += length
        if kind in (_FULL, _LAST):
            yield b"".join(pieces)


def _chosen(path: Path, what: str, given: str, known: Sequence[str], columns: Sequence[str]) -> str:
    """The column's name in the file; "" if none is known. Raises Problem where choosing would be guessing."""
    if given:
        if given not in columns:
            listed = ", ".join(columns[:20])
            raise Problem(f"{path} has no column {given}", f"It has: {listed}")
        return given
    found = [column for name in known for column in columns if plain(column) == name]
    if len(found) > 1 and what != "step":
        listed = ", ".join(found)
        raise Problem(f"{path} has several columns that may be the {what}: {listed}", f"Name one: --{what} NAME")
    return found[0] if found else ""


def _number(value: Any) -> float | None:
    """None where the row has no value."""
    if value is None or value == "" or isinstance(value, bool | list | dict):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _of_rows(path: Path, source: str, rows: Sequence[Row], names: Names) -> Curves:
    columns = list(dict.fromkeys(str(column) for row in rows for column in row if column is not None))
    if not rows:
        raise Problem(f"{path} has no log line", REMEDY)
    loss_name = _chosen(path, "loss", names.loss, LOSSES, columns)
    norm_name = _chosen(path, "norm", names.norm, NORMS, columns)
    step_name = _chosen(path, "step", names.step, STEPS, columns)
    if not loss_name:
        raise Problem(f"{path} has no column that is called a loss", f"Name one with --loss: {', '.join(columns[:20])}")
    curves: dict[str, dict[int, float]] = {loss_name: {}, norm_name: {}}
    for number, row in enumerate(rows, 1):
        step = _number(row.get(step_name)) if step_name else float(number)
        if step is None or not math.isfinite(step):
            continue
        for name, curve in curves.items():
            value = _number(row.get(name)) if name else None
            if value is None:
                continue
            before = curve.setdefault(round(step), value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                remedy = "Give the log of one rank and one attempt, without evaluations"
                raise Problem(
                    f"{path} has two values of {name} at step {round(step)}: {before:g} and {value:g}", remedy
                )
    if not curves[loss_name]:
        raise Problem(f"{path} has no number in its column {loss_name}", "Name another with --loss")
    others = [column for column in columns if column not in (loss_name, norm_name, step_name)]
    norm = curves[norm_name] if norm_name else {}
    return Curves(path.name, source, curves[loss_name], norm, loss_name, others=others)


def resolution(curve: Mapping[int, float]) -> float:
    """Half of the last decimal place that any value of the curve has: how far rounding may have moved it.

    Where fewer than three values are there, or some has as many digits as a number can have, nothing was rounded: 0.
    """
    finite = [value for value in curve.values() if math.isfinite(value)]
    if len(finite) < 3:
        return 0.0
    places = max(_decimals(value) for value in finite)
    return 0.0 if places > MOST_DIGITS - 8 else 0.5 * 10.0**-places


def _decimals(value: float) -> int:
    """The decimal places with which a number is written."""
    mantissa, _, exponent = f"{value!r}".partition("e")
    decimals = len(mantissa.partition(".")[2].rstrip("0")) if "." in mantissa else 0
    return max(0, decimals - int(exponent or 0))
