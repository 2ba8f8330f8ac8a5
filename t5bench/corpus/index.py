"""Megatron's memory-mapped indexed dataset: `<prefix>.bin` holds token ids, `<prefix>.idx` is their index, and
`<prefix>.meta.json` the record of where they came from.

An index is little-endian: 9 bytes `MMIDIDX\\0\\0`, the version 1 (uint64), the code of the token ids' type (uint8), the
numbers of sequences S and of document boundaries D (uint64 each), then sizes (int32, S), pointers (int64, S) and
doc_idx (int64, D), as Megatron-LM's MMapIndexedDataset reads them. A document is one sequence or more.

Launchers read the whole index before every run, hence nothing heavier than `array` and `struct`.
"""

from __future__ import annotations

import json
import shlex
import struct
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import le
from pathlib import Path
from typing import Any, NamedTuple

from t5bench import REPOSITORY, Problem, digest
from training_comparison.given_files import read_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# magic, version, type code, number of sequences, number of document boundaries
HEADER = struct.Struct("<9sQBQQ")
# Type code in the index: (numpy's name, array's type code).
TYPES = {1: ("uint8", "B"), 2: ("int8", "b"), 3: ("int16", "h"), 4: ("int32", "i"), 5: ("int64", "q")}
TYPES |= {8: ("uint16", "H")}
SPLIT = "949,50,1"  # of the launchers: shares of train, validation and test documents
MISSING = "Missing or empty Megatron indexed dataset files"


class Index(NamedTuple):
    """The content of the index of `<prefix>.bin`."""

    dtype: str
    """numpy's name of a token id's type."""
    tokens: int
    """Their number."""
    sizes: array[int]
    """Tokens of each sequence, int32, (sequences,)."""
    pointers: array[int]
    """Offset of each sequence in the .bin in bytes, int64, (sequences,)."""
    doc_idx: array[int]
    """First sequence of each document and, last, the number of sequences, int64, (documents + 1,)."""


def dataset_paths(prefix: str | Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def read_index(prefix: str | Path, family: str = "t5", *, repair: bool = False) -> Index:
    """Reads `<prefix>.idx`; checks that it is consistent, and that `<prefix>.bin` has the size that it implies.

    repair: whether to correct the lengths in an index of the engine's tool with --append-eod, which writes a token
    after each document and does not count it. Raises Problem, which names the file that is missing, truncated or
    inconsistent.
    """
    bin_path, idx_path = dataset_paths(prefix)
    remedy = f"Run: {command_for(bin_path.parent, family)}   (SAMPLE=1 for the bundled sample)"
    sizes = array("i")
    pointers = array("q")
    doc_idx = array("q")
    try:
        for path in (bin_path, idx_path):
            if path.exists() and not path.is_file():
                raise Problem(f"{path} is no regular file", remedy)
        bin_bytes = bin_path.stat().st_size
        idx_bytes = idx_path.stat().st_size
        if not bin_bytes or not idx_bytes:
            empty = idx_path if bin_bytes else bin_path
            raise Problem(f"{MISSING}: {empty} is empty", remedy)
        with idx_path.open("rb") as stream:
            header = stream.read(HEADER.size)
            fault = _wrong_header(header, idx_bytes)
            if fault:
                raise Problem(f"{idx_path} {fault}", remedy)
            _, _, code, sequences, boundaries = HEADER.unpack(header)
            sizes.fromfile(stream, sequences)
            pointers.fromfile(stream, sequences)
            doc_idx.fromfile(stream, boundaries)
    except FileNotFoundError as error:
        raise Problem(f"{MISSING}: {error.filename} does not exist", remedy) from None
    except OSError as error:
        raise Problem(f"{error.filename} cannot be read: {error.strerror}", "Check its permissions") from None
    dtype, typecode = TYPES[code]
    itemsize = array(typecode).itemsize
    fault = _inconsistency(itemsize, sizes, pointers, doc_idx)
    if fault:
        raise Problem(f"{idx_path} is corrupt: {fault}", remedy)
    expected = pointers[-1] + sizes[-1] * itemsize
    documents = len(doc_idx) - 1
    if bin_bytes == expected + itemsize * documents:
        if not repair:
            raise _uncounted_ends(idx_path, prefix)
        for end in doc_idx[1:]:
            sizes[end - 1] += 1
        pointers = _pointers(sizes, itemsize)
        expected = bin_bytes
    if bin_bytes != expected:
        word = "truncated" if bin_bytes < expected else "not the file that its index describes"
        takes = f"{expected // itemsize} {dtype} tokens take {expected} bytes, but it has {bin_bytes}"
        raise Problem(f"{bin_path} is {word}: {takes}", remedy)
    return Index(dtype, expected // itemsize, sizes, pointers, doc_idx)


def _uncounted_ends(idx_path: Path, prefix: str | Path) -> Problem:
    """What is wrong with an index that leaves out one token of each document."""
    problem = (
        f"{idx_path} does not count the end of each document: "
        "it was made with --append-eod by the engine's tool, "
        "and each document would begin a token earlier than the one before it"
    )
    remedy = f"Write a corrected copy: python -m t5bench merge-data NEW {shlex.quote(str(prefix))}"
    return Problem(problem, remedy)


def split_documents(shares: Sequence[float], documents: int) -> list[tuple[int, int]]:
    """The document ranges [first, end) of train, validation and test, for their three shares in any unit."""
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * documents))
    excess = bounds[-1] - documents
    return list(pairwise([0, *(bound - excess for bound in bounds[1:])]))


def lacks_validation(documents: int, split: str = SPLIT) -> Problem | None:
    """Why a dataset of so many documents cannot be evaluated during training; None if it can.

    split: the engine's argument --split. An evaluation draws the validation documents as often as it needs to, so that
    one document is enough; without any, the engine trains and evaluates nothing, and says nothing about it.
    """
    shares = [float(share) for share in split.split(",")]
    first, end = split_documents(shares, documents)[1]
    if end > first:
        return None
    enough = documents
    while first == end:
        enough += 1
        first, end = split_documents(shares, enough)[1]
    problem = f"EVAL_ITERS needs validation documents, but {split} of {documents} documents leaves none for validation"
    return Problem(problem, f"Set EVAL_ITERS=0, or prepare at least {enough} documents")


def write_index(prefix: Path, dtype: str, sizes: array[int], doc_idx: array[int]) -> None:
    """Writes `<prefix>.idx`. sizes and doc_idx: as in an Index."""
    code_of = {name: code for code, (name, _) in TYPES.items()}
    code = code_of[dtype]
    _, typecode = TYPES[code]
    header = HEADER.pack(MAGIC, VERSION, code, len(sizes), len(doc_idx))
    pointers = _pointers(sizes, array(typecode).itemsize)
    _, idx_path = dataset_paths(prefix)
    with idx_path.open("wb") as stream:
        stream.writelines([header, sizes, pointers, doc_idx])


def _pointers(sizes: array[int], itemsize: int) -> array[int]:
    """Offset in bytes of each sequence in the .bin."""
    return array("q", accumulate((size * itemsize for size in sizes), initial=0))[:-1]


def _wrong_header(header: bytes, size: int) -> str:
    """What is wrong with an index of that many bytes, or nothing."""
    if not header.startswith(MAGIC[: len(header)]):
        return "is not the index of a memory-mapped Megatron dataset: it does not begin with MMIDIDX"
    if len(header) < HEADER.size:
        return f"is truncated: its {size} bytes are less than a header"
    _, version, code, sequences, boundaries = HEADER.unpack(header)
    if version != VERSION or code not in TYPES:
        return f"is corrupt: its format version is {version}, not {VERSION}, or {code} is not the code of a token type"
    bytes_of_sequence = 4 + 8  # its size and its pointer
    bytes_of_boundary = 8
    expected = HEADER.size + bytes_of_sequence * sequences + bytes_of_boundary * boundaries
    if size == expected:
        return ""
    word = "truncated" if size < expected else "corrupt"
    announced = f"{sequences} sequences, which take {expected} bytes, but it has {size}"
    return f"is {word}: its header announces {announced}"


def _inconsistency(itemsize: int, sizes: array[int], pointers: array[int], doc_idx: array[int]) -> str:
    """What is wrong with an index, or nothing."""
    count = len(sizes)
    if min(sizes, default=0) < 1:
        return f"it lists a sequence of {min(sizes)} tokens" if sizes else "it lists no document"
    if pointers != _pointers(sizes, itemsize):
        return "its offsets do not match its sequence lengths"
    # One sequence per document is what the project writes, and comparing with that is the fastest.
    if doc_idx == array("q", range(count + 1)):
        return ""
    covers_all = len(doc_idx) > 1 and doc_idx[0] == 0 and doc_idx[-1] == count
    ascends = all(map(le, doc_idx, doc_idx[1:]))
    if not covers_all or not ascends:
        return f"its document boundaries do not run from 0 to {count}"
    return ""


def file_facts(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": digest(stream)}


def record_path(prefix: Path) -> Path:
    """The record of a dataset, or, for the prefix `xsum_text`, of the exported `xsum_text.jsonl`."""
    return Path(f"{prefix}.meta.json")


def read_record(prefix: Path) -> dict[str, Any]:
    """The record that says where the files of this prefix came from; empty if there is no such record."""
    try:
        record = json.loads(read_file(record_path(prefix)))
        return record if isinstance(record["source"], str) else {}
    except (ValueError, KeyError, TypeError, RecursionError):  # a Problem is a ValueError
        return {}


def write_record(prefix: Path, record: Mapping[str, Any]) -> None:
    record_path(prefix).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def command_for(directory: Path, family: str, settings: str = "", script: str = "prepare_xsum_megatron.sh") -> str:
    """Runs a script on the data in this directory. settings: further ones, each with a blank after it."""
    default_directory = REPOSITORY / "megatron_data"
    words = ""
    if family != "t5":
        default_directory /= family
        words += f"MODEL_FAMILY={family} "
    if directory != default_directory:
        words += f"MEGATRON_DATA_DIR={shlex.quote(str(directory))} "
    return f"{words}{settings}bash {shlex.quote(f'{REPOSITORY}/scripts/{script}')}"
