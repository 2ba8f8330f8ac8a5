"""Megatron's memory-mapped indexed dataset: reading, checking and writing `<prefix>.bin` and `<prefix>.idx`.

Launchers import this file and have 0.15 s of CPU in all, hence nothing heavier than `array` and `struct`.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from itertools import accumulate, repeat
from operator import le, mul
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
# magic, version (uint64), dtype code (uint8), number of sequences (uint64), number of document boundaries (uint64)
INDEX_HEADER = struct.Struct("<9sQBQQ")
# dtype code in the index: (numpy's name, array's type code)
TOKEN_DTYPES = {
    1: ("uint8", "B"),
    2: ("int8", "b"),
    3: ("int16", "h"),
    4: ("int32", "i"),
    5: ("int64", "q"),
    8: ("uint16", "H"),
}
# Megatron's own limit for 16-bit token ids; it leaves some room below 65536.
UINT16_VOCABULARY_LIMIT = 65500


class DataError(ValueError):
    """Something is wrong with the data; `str()` says what in one line, `remedy` what to do about it."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(" ".join(problem.split()))
        self.remedy = remedy


class IndexInfo(NamedTuple):
    """What the index of `<prefix>.bin` says.

    dtype: numpy's name of a token id's type. documents, sequences, tokens: counts; a document is one or more sequences.
    sizes: tokens of each sequence, int32, (sequences,). pointers: offset of each sequence in the .bin in bytes, int64,
    (sequences,). doc_idx: first sequence of each document and the number of sequences, int64, (documents + 1,).
    bin_bytes, idx_bytes: sizes of the two files.
    """

    dtype: str
    documents: int
    sequences: int
    tokens: int
    sizes: array[int]
    pointers: array[int]
    doc_idx: array[int]
    bin_bytes: int
    idx_bytes: int


def read_index(prefix: str | Path) -> IndexInfo:
    """Read `<prefix>.idx` and check it, and the size of `<prefix>.bin`, against what its header announces.

    The index is little-endian: 9 bytes `MMIDIDX\\0\\0`, the version 1 (uint64), the dtype's code (uint8), the numbers
    of sequences S and of document boundaries D (uint64 each), then sizes (int32, S), pointers (int64, S) and doc_idx
    (int64, D), as Megatron-LM's MMapIndexedDataset reads them.

    Raises DataError (a ValueError) with one line that says what is missing, truncated or inconsistent.
    """
    bin_path, idx_path = dataset_paths(prefix)
    bin_bytes, idx_bytes = _size_of(bin_path), _size_of(idx_path)
    with idx_path.open("rb") as stream:
        code, sequences, boundaries = _read_header(stream, idx_path, idx_bytes)
        sizes = _read_array(stream, "i", sequences)
        pointers = _read_array(stream, "q", sequences)
        doc_idx = _read_array(stream, "q", boundaries)
    dtype, typecode = TOKEN_DTYPES[code]
    itemsize = array(typecode).itemsize
    tokens = _check_layout(idx_path, itemsize, sizes, pointers, doc_idx)
    expected = tokens * itemsize
    if bin_bytes != expected:
        word = "truncated" if bin_bytes < expected else "not the file that its index describes"
        raise DataError(f"{bin_path} is {word}: {tokens} {dtype} tokens take {expected} bytes, but it has {bin_bytes}")
    return IndexInfo(dtype, boundaries - 1, sequences, tokens, sizes, pointers, doc_idx, bin_bytes, idx_bytes)


class IndexedDatasetWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`, a document at a time, each document one sequence.

    A context manager: both files appear, complete, when its block ends; if the block raises, neither does and older
    ones stay. Memory: 4 bytes per document.

        with IndexedDatasetWriter("data/corpus", token_dtype(32100)) as writer:
            writer.add_document([8774, 296, 1])
    """

    def __init__(self, prefix: str | Path, dtype: str = "uint16") -> None:
        """dtype: numpy's name of a token id's type, see `token_dtype`. Raises DataError for an unknown one."""
        codes = {name: (code, typecode) for code, (name, typecode) in TOKEN_DTYPES.items()}
        if dtype not in codes:
            raise DataError(f"'{dtype}' is not a type for token ids; it may be one of {', '.join(codes)}")
        self.dtype = dtype
        self._code, self._typecode = codes[dtype]
        self._sizes = array("i")
        self._paths = dataset_paths(prefix)
        self._partial = tuple(partial_name(path) for path in self._paths)
        self._bin = self._partial[0].open("wb")

    def add_document(self, ids: Sequence[int]) -> None:
        """Append one document: ids, (tokens,). Raises DataError when there are none or the dtype cannot hold one."""
        if not len(ids):
            raise DataError("a document without a single token cannot be part of an indexed dataset")
        try:
            tokens = array(self._typecode, ids)
        except OverflowError as error:
            raise DataError(f"a token id does not fit into {self.dtype}: {error}") from error
        self._bin.write(_little_endian(tokens))
        self._sizes.append(len(ids))

    def commit(self) -> None:
        """Give both files their names. Raises DataError when no document was added."""
        if not self._sizes:
            raise DataError("there is not a single document to write")
        itemsize = array(self._typecode).itemsize
        count = len(self._sizes)
        with self._partial[1].open("wb") as stream:
            stream.write(INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, self._code, count, count + 1))
            stream.write(_little_endian(self._sizes))
            stream.write(_little_endian(_offsets(self._sizes, itemsize)[:-1]))
            stream.write(_little_endian(array("q", range(count + 1))))
            _to_disk(stream)
        _to_disk(self._bin)
        self._bin.close()
        for partial, path in zip(self._partial, self._paths, strict=True):
            partial.replace(path)

    def discard(self) -> None:
        """Remove what was written so far."""
        self._bin.close()
        for partial in self._partial:
            partial.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()


def token_dtype(vocabulary: int) -> str:
    """Megatron's choice of type for the ids of a vocabulary of this size."""
    return "uint16" if vocabulary < UINT16_VOCABULARY_LIMIT else "int32"


def partial_name(path: Path) -> Path:
    """A name in the same directory for a file that is not complete yet."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def dataset_paths(prefix: str | Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def _size_of(path: Path) -> int:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"Missing or empty Megatron indexed dataset files: {path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not size:
        raise DataError(f"Missing or empty Megatron indexed dataset files: {path} is empty")
    return size


def _read_header(stream: BinaryIO, path: Path, size: int) -> tuple[int, int, int]:
    """dtype code, number of sequences and number of document boundaries."""
    header = stream.read(INDEX_HEADER.size)
    if not header.startswith(INDEX_MAGIC[: len(header)]):
        raise DataError(f"{path} is not the index of a memory-mapped Megatron dataset: it does not begin with MMIDIDX")
    if len(header) < INDEX_HEADER.size:
        raise DataError(f"{path} is truncated: {size} bytes do not even hold its header")
    _, version, code, sequences, boundaries = INDEX_HEADER.unpack(header)
    if version != INDEX_VERSION:
        raise DataError(f"{path} has format version {version}; only version {INDEX_VERSION} is known")
    if code not in TOKEN_DTYPES:
        raise DataError(f"{path} is corrupt: {code} is not the code of an integer token type")
    expected = INDEX_HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        word = "truncated" if size < expected else "corrupt"
        announced = f"its header announces {sequences} sequences, which take {expected} bytes"
        raise DataError(f"{path} is {word}: {announced}, but it has {size}")
    return code, sequences, boundaries


def _read_array(stream: BinaryIO, typecode: str, count: int) -> array[int]:
    values = array(typecode)
    values.fromfile(stream, count)
    return _little_endian(values)


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values


def _offsets(sizes: array[int], itemsize: int) -> array[int]:
    """Offset of each sequence in bytes and, last, the offset of the end: (sequences + 1,)."""
    return array("q", accumulate(map(mul, sizes, repeat(itemsize)), initial=0))


def _check_layout(idx_path: Path, itemsize: int, sizes: array[int], pointers: array[int], doc_idx: array[int]) -> int:
    """The number of tokens that a consistent index describes; raises DataError otherwise."""
    if not sizes:
        raise DataError(f"{idx_path} describes a dataset without a single document")
    if min(sizes) < 1:
        raise DataError(f"{idx_path} is corrupt: it lists a sequence of {min(sizes)} tokens")
    offsets = _offsets(sizes, itemsize)
    end = offsets.pop()
    if pointers != offsets:
        raise DataError(f"{idx_path} is corrupt: its offsets do not follow from its sequence lengths")
    # One sequence per document is what is written here, and comparing with that is the fastest.
    one_per_document = doc_idx == array("q", range(len(sizes) + 1))
    if not one_per_document and not _are_boundaries(doc_idx, len(sizes)):
        raise DataError(f"{idx_path} is corrupt: its document boundaries do not run from 0 to {len(sizes)}")
    return end // itemsize


def _are_boundaries(doc_idx: array[int], sequences: int) -> bool:
    return len(doc_idx) > 1 and doc_idx[0] == 0 and doc_idx[-1] == sequences and all(map(le, doc_idx, doc_idx[1:]))


def _to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
