"""Rows of TensorBoard's event files and of W&B's offline runs. Each needs its own package, an extra of this one."""

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from t5bench_judge.columns import Row
from training_comparison.given_files import read_file
from training_comparison.problem import Problem

MOST_BYTES = 1 << 28
# W&B's offline files (public format of LevelDB's logs, after seven bytes of its own): blocks of 32 KiB hold pieces of
# records, each behind a checksum, a length and a kind.
MAGIC = b":W&B"
HEADER = 7
BLOCK = 1 << 15
PIECE = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def _lacking(package: str, path: Path) -> Problem:
    remedy = f"Install it: pip install '{package}'; or export the run as CSV"
    return Problem(f"reading {path.name} needs the package {package}, which is not installed", remedy)


def tensorboard_rows(path: Path) -> Iterator[Row]:
    """Raises Problem."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise _lacking("tensorboard", path) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield {"step": event.step, tag: event.value}
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            if event.tensor_proto.float_val:
                yield {"step": event.step, tag: event.tensor_proto.float_val[0]}


def _records_of_wandb(path: Path) -> ModuleType:
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise _lacking("wandb", path) from error
    return wandb_internal_pb2


def wandb_rows(path: Path) -> Iterator[Row]:
    """Raises Problem."""
    content = read_file(path, "", MOST_BYTES)
    if not content.startswith(MAGIC):
        raise Problem(f"{path} is no offline run of W&B", "Give the run-*.wandb of an offline run, or its CSV export")
    records = _records_of_wandb(path)
    for record in pieces_together(content):
        entry = records.Record()
        entry.ParseFromString(record)
        if entry.WhichOneof("record_type") != "history":
            continue
        row: dict[str, Any] = {"_step": entry.history.step.num}
        for item in entry.history.item:
            name = item.key or "/".join(item.nested_key)
            with contextlib.suppress(ValueError):
                row[name] = json.loads(item.value_json)
        yield row


def pieces_together(content: bytes) -> Iterator[bytes]:
    """A last record that was not written whole is left out."""
    pieces: list[bytes] = []
    place = HEADER
    while place + PIECE.size <= len(content):
        left = BLOCK - place % BLOCK
        if left < PIECE.size:  # too little for another piece: padding
            place += left
            continue
        _, length, kind = PIECE.unpack_from(content, place)
        place += PIECE.size
        if kind in (FULL, FIRST):
            pieces = []
        elif kind not in (MIDDLE, LAST):
            return
        pieces.append(content[place : place + length])
        place += length
        if kind in (FULL, LAST):
            yield b"".join(pieces)
