"""The form of a native checkpoint: its names, its seal, and how the processes that saved it divided the model.

    checkpoints/latest_checkpointed_iteration.txt    the name of the last complete one
    checkpoints/iter_0000020/checkpoint.json         the seal, written last
    checkpoints/iter_0000020/tensors.json            which box of which tensor is where
    checkpoints/iter_0000020/__0_0.distcp ...        what each process wrote

The seal alone knows where a run stands: its iteration, the optimizer's step, the samples consumed and the schedule.
A folder's name only finds it. The seal has the size and checksum of every file, and a checksum of itself.
"""

import hashlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from t5bench import Problem
from training_comparison.given_files import read_text

# Megatron's pointer, which the native engine has too.
TRACKER = "latest_checkpointed_iteration.txt"
SEAL = "checkpoint.json"
INDEX = "tensors.json"
FIRST_INDEX = ".metadata"
"""Of form 1: DCP's own, a pickle."""
FORM = 3
FORMS_WITHOUT_CHECKSUM = (1, 2)
"""Of the seal itself; they are read."""
COPY_AGAIN = "Copy the checkpoint's files again"
BYTES_AT_ONCE = 1 << 24


def folder_of(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


@dataclass(frozen=True)
class Division:
    """How processes divide a model."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero_stage: int = 0
    fsdp2_shards: int = 0
    parts_of_a_stage: int = 1
    split: int = 0
    """The pipeline's first stage of the decoder; 0 if there is one stage, or no decoder apart."""

    @classmethod
    def of(
        cls, *, tp: int, pp: int, dp: int, zero_stage: int, has_fsdp2: bool, shard_size: int, parts: int, split: int
    ) -> "Division":
        """shard_size: of FSDP2, 0 for all of data parallelism."""
        shards = (shard_size or dp) if has_fsdp2 else 0
        return cls(tp, pp, dp, zero_stage, shards, parts or 1, split if pp > 1 else 0)

    @property
    def title(self) -> str:
        """In words: "ZeRO-3 DP 4"."""
        names = []
        if self.zero_stage:
            names.append(f"ZeRO-{self.zero_stage}")
        if self.fsdp2_shards:
            names.append("FSDP2" if self.fsdp2_shards == self.dp else "HSDP")
        sizes = (("TP", self.tp), ("PP", self.pp), ("DP", self.dp))
        names += [f"{name} {size}" for name, size in sizes if size > 1]
        return " ".join(names) or "one process"

    def draws_as(self, other: "Division") -> bool:
        """Whether each process's dropout is drawn as in the other."""
        return (self.tp, self.pp, self.dp) == (other.tp, other.pp, other.dp)


class Sums(NamedTuple):
    """Of a file."""

    size: int
    """Bytes."""
    crc: int
    """CRC-32."""


@dataclass(frozen=True)
class Seal:
    """What a native checkpoint says of itself: checkpoint.json."""

    iteration: int
    step: int
    """The optimizer's: updates so far."""
    consumed_samples: int
    division: Division
    has_dropout: bool
    """Whether it has the state of each process's random numbers."""
    precision: str = ""
    learning_rate: Mapping[str, Any] = field(default_factory=dict)
    """The schedule: the engine's arguments for it, among them the batch."""
    planned_samples: Sequence[int] = ()
    """Where each order of samples ends that the run uses, one after the other: more than one if a run was continued
    beyond its planned end."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Sums] = field(default_factory=dict)
    read_from: Sequence[Sequence[int]] = ()
    """By rank: whose files it reads if the same processes continue. Empty: all of them."""

    def encode(self) -> bytes:
        content = {"form": FORM, **asdict(self)}
        return json.dumps({**content, "checksum": checksum(content)}).encode()

    @property
    def identity(self) -> str:
        """The same for the same content, whatever its folder is called."""
        return checksum(asdict(self))

    def files_of(self, ranks: Sequence[int], division: Division) -> list[str]:
        """The files that these ranks read when they divide the model so: any, unless it is divided as it was."""
        if division != self.division or max(ranks) >= len(self.read_from):
            return sorted(self.files)
        writers = {writer for rank in ranks for writer in self.read_from[rank]}
        return [name for name in sorted(self.files) if is_index(name) or writer_of(name) in writers]


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 in hexadecimal of what JSON can say, in whichever order it is said."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_index(name: str) -> bool:
    return name in (INDEX, FIRST_INDEX)


def writer_of(name: str) -> int:
    """The rank that wrote a file of PyTorch's distributed checkpoint: 3 of __3_0.distcp; -1 of another file."""
    match = re.fullmatch(r"__(\d+)_\d+\.distcp", name)
    return int(match[1]) if match else -1


def read_seal(folder: Path) -> Seal:
    """Raises Problem for a checkpoint without one, and for one that was changed."""
    path = folder / SEAL
    if not path.exists():
        found = f"{folder.name}/{SEAL} is missing: its saving did not end, or an earlier release saved it"
        raise Problem(found, "python -m t5bench reshape RUN writes an earlier release's checkpoint anew")
    try:
        content = json.loads(read_text(path, COPY_AGAIN))
        form = content.pop("form", 1)
        told = content.pop("checksum", "")
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise Problem(f"{folder.name}/{SEAL} cannot be read: {error}", COPY_AGAIN) from error
    if (told or form not in FORMS_WITHOUT_CHECKSUM) and told != checksum({"form": form, **content}):
        raise Problem(f"{folder.name}/{SEAL} was changed: it does not match its own checksum", COPY_AGAIN)
    try:
        return _seal_of(content)
    except (KeyError, TypeError, ValueError) as error:
        found = f"{folder.name}/{SEAL} is not one that the native engine writes: {error}"
        raise Problem(found, COPY_AGAIN) from error


def _seal_of(content: Mapping[str, Any]) -> Seal:
    """Raises KeyError, TypeError, ValueError."""
    files = {name: Sums(*map(_number, sums)) for name, sums in content["files"].items()}
    strange = [name for name in files if not is_index(name) and writer_of(name) < 0]
    if strange:
        raise ValueError(f"it has a file {strange[0]!r}")
    given = {entry.name: content[entry.name] for entry in fields(Seal) if entry.name in content}
    given |= {name: _number(given[name]) for name in ("iteration", "step", "consumed_samples")}
    given["division"] = Division(**{name: _number(size) for name, size in content["division"].items()})
    given["files"] = files
    given["planned_samples"] = [_number(end) for end in content.get("planned_samples", ())]
    given["read_from"] = [[_number(rank) for rank in ranks] for ranks in content["read_from"]]
    given["has_dropout"] = bool(content["has_dropout"])
    return Seal(**given)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of this kind")
    return value


def seal_of_iteration(directory: Path, iteration: int) -> Seal:
    """Of the checkpoint in the folder of this iteration. Raises Problem, also if it is another iteration's."""
    folder = folder_of(directory, iteration)
    seal = read_seal(folder)
    if seal.iteration != iteration:
        own = folder_of(directory, seal.iteration).name
        found = f"{folder.name} holds the checkpoint of iteration {seal.iteration}; its own name is {own}"
        raise Problem(found, f"Call the folder {own}, or move it away")
    return seal


def damage_of(path: Path, sums: Sums) -> str:
    """What is wrong with a file that had this size and checksum when it was written, to follow its name in a sentence;
    '' if it is intact."""
    found = 0
    try:
        present = path.stat().st_size
        if present < sums.size:
            return f"is truncated (it has {present:,} bytes of {sums.size:,})"
        with path.open("rb") as file:
            while block := file.read(BYTES_AT_ONCE):
                found = zlib.crc32(block, found)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return "" if (present, found) == sums else "is damaged (it does not match its checksum)"


def write_whole(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new, also after a loss of power. Raises OSError."""
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with own.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        own.replace(path)
    except OSError:
        own.unlink(missing_ok=True)
        raise
