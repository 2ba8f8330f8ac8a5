#!/usr/bin/env python3
"""Tokenise a JSONL corpus into Megatron's memory-mapped indexed dataset, or check one that exists.

    python scripts/build_indexed_dataset.py --input megatron_data/xsum_text.jsonl \\
        --output-prefix megatron_data/xsum_text_document --tokenizer google-t5/t5-large
    python scripts/build_indexed_dataset.py --check megatron_data/xsum_text_document

`<prefix>.bin` holds the token ids of all documents one after the other, `<prefix>.idx` where each begins (the format is
described at `read_index`) and `<prefix>.meta.json` where they came from. Every document is one sequence, and its ids are
exactly those of transformers' slow `T5Tokenizer.encode`, which ends each document with one `</s>`.

Exit status: 0, or 2 with one sentence on standard error; then nothing was written and older files are as they were.
"""

# Launchers import this file and have 0.15 s of CPU in all: nothing heavier than `array` and `struct` is imported here,
# and what building needs is imported where it is used.
from __future__ import annotations

import os
import struct
import sys
from array import array
from itertools import accumulate, repeat
from operator import le, mul
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

EXIT_ERROR = 2
REPO_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SAMPLE_DIR = os.path.join(REPO_ROOT, "megatron_data", "sample")
SAMPLE_NAME = "bundled sample"

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
# Megatron's T5 sample mapping leaves out every document with a sequence longer than this (LONG_SENTENCE_LEN).
MEGATRON_LONGEST_SEQUENCE = 512

TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
    "config.json",
)
BATCH_DOCUMENTS = 512
PROGRESS_EVERY = 20_000


class DataError(ValueError):
    """Something is wrong with the data; `str()` says what in one line, `remedy` what to do about it."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(" ".join(problem.split()))
        self.remedy = remedy


# ---- the format ------------------------------------------------------------------------------------------------------


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


def read_index(prefix: str | os.PathLike[str]) -> IndexInfo:
    """Read `<prefix>.idx` and check it, and the size of `<prefix>.bin`, against what its header announces.

    The index is little-endian: the 9 bytes `MMIDIDX\\0\\0`, the version 1 (uint64), the dtype's code (uint8), the number
    of sequences S (uint64) and of document boundaries D (uint64), then sizes (int32, S), pointers (int64, S) and
    doc_idx (int64, D), as Megatron-LM's MMapIndexedDataset reads them.

    Raises DataError (a ValueError) with one line that says what is missing, truncated or inconsistent.
    """
    bin_path, idx_path = _paths(prefix)
    for path in (bin_path, idx_path):
        _require_data_in(path)
    idx_bytes, bin_bytes = os.path.getsize(idx_path), os.path.getsize(bin_path)
    with open(idx_path, "rb") as stream:
        header = stream.read(INDEX_HEADER.size)
        if header[: len(INDEX_MAGIC)] != INDEX_MAGIC[: len(header)]:
            raise DataError(f"{idx_path} is not the index of a memory-mapped Megatron dataset: it does not begin with MMIDIDX")
        if len(header) < INDEX_HEADER.size:
            raise DataError(f"{idx_path} is truncated: {idx_bytes} bytes do not even hold its header")
        _, version, code, sequences, boundaries = INDEX_HEADER.unpack(header)
        if version != INDEX_VERSION:
            raise DataError(f"{idx_path} has format version {version}; only version {INDEX_VERSION} is known")
        if code not in TOKEN_DTYPES:
            raise DataError(f"{idx_path} is corrupt: {code} is not the code of an integer token type")
        expected = INDEX_HEADER.size + 12 * sequences + 8 * boundaries
        if idx_bytes != expected:
            word = "truncated" if idx_bytes < expected else "corrupt"
            raise DataError(
                f"{idx_path} is {word}: its header announces {sequences} sequences, which take {expected} bytes, "
                f"but it has {idx_bytes}"
            )
        sizes = _read_array(stream, "i", sequences)
        pointers = _read_array(stream, "q", sequences)
        doc_idx = _read_array(stream, "q", boundaries)
    dtype, typecode = TOKEN_DTYPES[code]
    itemsize = array(typecode).itemsize
    tokens = _check_layout(idx_path, itemsize, sizes, pointers, doc_idx)
    if bin_bytes != tokens * itemsize:
        word = "truncated" if bin_bytes < tokens * itemsize else "not the file that its index describes"
        raise DataError(f"{bin_path} is {word}: {tokens} {dtype} tokens take {tokens * itemsize} bytes, but it has {bin_bytes}")
    return IndexInfo(dtype, boundaries - 1, sequences, tokens, sizes, pointers, doc_idx, bin_bytes, idx_bytes)


def check_dataset(prefix: str | os.PathLike[str]) -> IndexInfo:
    """Return what `<prefix>.idx` says; raises DataError (a ValueError) when the dataset cannot be trained on."""
    return read_index(prefix)


class IndexedDatasetWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`, a document at a time, each document one sequence.

    A context manager: both files appear, complete, when its block ends; if the block raises, neither does and older
    ones stay. Memory: 4 bytes per document.

        with IndexedDatasetWriter("data/corpus", token_dtype(32100)) as writer:
            writer.add_document([8774, 296, 1])
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: str = "uint16") -> None:
        """dtype: numpy's name of a token id's type, see `token_dtype`. Raises DataError for an unknown one."""
        codes = {name: (code, typecode) for code, (name, typecode) in TOKEN_DTYPES.items()}
        if dtype not in codes:
            raise DataError(f"'{dtype}' is not a type for token ids; it may be one of {', '.join(codes)}")
        self.dtype = dtype
        self._code, self._typecode = codes[dtype]
        self._sizes = array("i")
        self._paths = _paths(prefix)
        self._partial = tuple(partial_name(path) for path in self._paths)
        self._bin = open(self._partial[0], "wb")  # noqa: SIM115 - closed by commit or discard

    def add_document(self, ids: Sequence[int]) -> None:
        """Append one document, ids of shape (tokens,). Raises DataError for no ids, or one that the dtype cannot hold."""
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
        with open(self._partial[1], "wb") as stream:
            stream.write(INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, self._code, count, count + 1))
            stream.write(_little_endian(self._sizes))
            stream.write(_little_endian(_offsets(self._sizes, itemsize)[:-1]))
            stream.write(_little_endian(array("q", range(count + 1))))
            _to_disk(stream)
        _to_disk(self._bin)
        self._bin.close()
        for partial, path in zip(self._partial, self._paths, strict=True):
            os.replace(partial, path)

    def discard(self) -> None:
        """Remove what was written so far."""
        self._bin.close()
        for partial in self._partial:
            if os.path.exists(partial):
                os.unlink(partial)

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


def partial_name(path: str) -> str:
    """A name in the same directory for a file that is not complete yet."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.partial-{os.getpid()}")


def _paths(prefix: str | os.PathLike[str]) -> tuple[str, str]:
    return f"{os.fspath(prefix)}.bin", f"{os.fspath(prefix)}.idx"


def _require_data_in(path: str) -> None:
    try:
        empty = os.path.getsize(path) == 0
    except FileNotFoundError:
        raise DataError(f"Missing or empty Megatron indexed dataset files: {path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if empty:
        raise DataError(f"Missing or empty Megatron indexed dataset files: {path} is empty")


def _read_array(stream: Any, typecode: str, count: int) -> array[int]:
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


def _check_layout(idx_path: str, itemsize: int, sizes: array[int], pointers: array[int], doc_idx: array[int]) -> int:
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


def _to_disk(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


# ---- tokenising ------------------------------------------------------------------------------------------------------

# Compared once with the tokenizer before SentencePiece is trusted to speak for it.
PROBES = (
    "The price rose by 12.5% in Q3, to $1,234 (see page 7); nobody's happy.",
    "  Two  spaces,\na line\tand a tab ",
    "na\u00efve caf\u00e9, \ufb01ne, \u6771\u4eac, \U0001f600 \u2581 x",
    "",
)


class DocumentEncoder:
    """Token ids as transformers' slow T5 tokenizer gives them, mostly from SentencePiece itself.

    SentencePiece alone takes about a seventh of the tokenizer's time. The tokenizer is left with what it treats
    specially: documents that contain the text of a special token such as `</s>` or `<extra_id_0>`.

    vocabulary: number of ids, sentinels included. exact: whether SentencePiece is used at all.
    """

    def __init__(self, directory: str, threads: int = 1) -> None:
        """directory: of a T5 tokenizer with its spiece.model. Raises DataError when it is not one."""
        import re

        import sentencepiece

        self._threads = threads
        self._tokenizer = _load_tokenizer(directory)
        self._pieces = sentencepiece.SentencePieceProcessor(model_file=os.path.join(directory, "spiece.model"))
        self._eos: int = self._tokenizer.eos_token_id
        specials = sorted(self._tokenizer.added_tokens_encoder)
        self._special = re.compile("|".join(map(re.escape, specials)))
        self.vocabulary = len(self._tokenizer)
        # Without `legacy`, the tokenizer treats leading blanks and U+2581 in its own way.
        self.exact = getattr(self._tokenizer, "legacy", True) is not False and all(
            self._plain([probe]) == [self._tokenizer.encode(probe)] for probe in PROBES
        )

    def has_special_text(self, text: str) -> bool:
        """Whether the text contains the text of a special token."""
        return self._special.search(text) is not None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, `</s>` at the end of each. Raises TypeError or UnicodeError for half a surrogate pair."""
        if not self.exact:
            return [self._special_case(text) for text in texts]
        special = [index for index, text in enumerate(texts) if self.has_special_text(text)]
        if not special:
            return self._plain(texts)
        ids = self._plain(["" if self.has_special_text(text) else text for text in texts])
        for index in special:
            ids[index] = self._special_case(texts[index])
        return ids

    def _special_case(self, text: str) -> list[int]:
        # The slow tokenizer adds no second `</s>` to a text that ends in one; transformers 5 would.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if ids[-1:] == [self._eos] else [*ids, self._eos]

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._pieces.encode(list(texts), num_threads=self._threads)
        for document in ids:
            document.append(self._eos)
        return ids


def find_tokenizer(name: str) -> str:
    """The directory of a tokenizer: `name` itself, or the hub's files for it, of which only the tokenizer's are fetched.

    Raises DataError when there is none, or when the hub is needed and does not answer.
    """
    if os.path.isdir(name):
        directory = name
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"there is no tokenizer directory {name}", "Check TOKENIZER_MODEL (--tokenizer)")
    else:
        directory = _fetch_tokenizer(name)
    if not os.path.isfile(os.path.join(directory, "spiece.model")):
        raise DataError(
            f"{name} has no spiece.model, so it is not a SentencePiece T5 tokenizer",
            "Name a T5 tokenizer, for example google-t5/t5-large",
        )
    return directory


def copy_tokenizer(source: str, target: str) -> None:
    """Copy a tokenizer's files into the new directory `target`, complete enough to be loaded from there alone."""
    import json
    import shutil

    os.makedirs(target)
    for name in TOKENIZER_FILES:
        path = os.path.join(source, name)
        if os.path.isfile(path):
            shutil.copyfile(path, os.path.join(target, name))
    # Hub repositories leave these to the model's config.json and to the library's defaults; here they are written down.
    path = os.path.join(target, "tokenizer_config.json")
    config = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as stream:
            config = json.load(stream)
    if not {"tokenizer_class", "legacy"} <= config.keys():
        config = {"tokenizer_class": "T5Tokenizer", "legacy": True} | config
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(config, stream, indent=2)
            stream.write("\n")


def _fetch_tokenizer(name: str) -> str:
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=list(TOKENIZER_FILES))
    except Exception as error:  # noqa: BLE001 - network, hub and cache errors have no common base
        raise DataError(
            f"the tokenizer {name} could not be fetched from the Hugging Face hub ({one_line(error)})",
            "Check the name and the network, or set TOKENIZER_MODEL to a directory that holds the tokenizer's files",
        ) from error


def _load_tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, use_fast=False, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - a broken directory shows in many ways
        raise DataError(
            f"{directory} cannot be loaded as a tokenizer ({one_line(error)})",
            "Name a T5 tokenizer, for example google-t5/t5-large",
        ) from error
    if "<extra_id_0>" not in tokenizer.added_tokens_encoder or tokenizer.eos_token_id is None:
        raise DataError(
            f"{directory} is not a T5 tokenizer: it lacks <extra_id_0> or an end-of-sequence token",
            "Name a T5 tokenizer, for example google-t5/t5-large",
        )
    return tokenizer


# ---- building --------------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """One line of a JSONL corpus."""

    line: int
    text: str


def read_documents(path: str, key: str = "text") -> Iterator[Document]:
    """The documents of a JSONL file in order, blank lines left out.

    Raises DataError that names the line which is not JSON, not UTF-8, or has no string under `key`.
    """
    for number, record in read_jsonl(path):
        text = record.get(key)
        if not isinstance(text, str):
            problem = "has no" if key not in record else "does not hold a string as"
            raise DataError(f"line {number} of {path} {problem} \"{key}\"", f'Each line must be like {{"{key}": "..."}}')
        yield Document(number, text)


def read_jsonl(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 and objects of a JSONL file, blank lines left out; raises DataError that names a bad line."""
    import json

    remedy = "Correct or remove that line; each line must be one JSON object in UTF-8"
    try:
        stream = open(path, "rb")  # noqa: SIM115 - the with statement follows
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Check the path") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"line {number} of {path} is not UTF-8 text", remedy) from error
            except ValueError as error:
                raise DataError(f"line {number} of {path} is not valid JSON ({one_line(error)})", remedy) from error
            if not isinstance(record, dict):
                raise DataError(f"line {number} of {path} is not a JSON object", remedy)
            yield number, record


class Progress:
    """Progress on standard error: a bar on a terminal, otherwise a line every `PROGRESS_EVERY` documents."""

    def __init__(self, action: str, total: int | None = None) -> None:
        """action: what is being done, as in "tokenising"; total: number of documents, if known."""
        self._action, self._total, self._count = action, total, 0
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=action, unit=" documents")

    def advance(self, documents: int) -> None:
        """Count further documents as done."""
        before, self._count = self._count, self._count + documents
        if self._bar is not None:
            self._bar.update(documents)
        elif before // PROGRESS_EVERY != self._count // PROGRESS_EVERY:
            of_total = f" of {self._total}" if self._total else ""
            print(f"{self._action}: {self._count}{of_total} documents", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def build_dataset(source: str, prefix: str, encoder: DocumentEncoder, key: str = "text") -> dict[str, Any]:
    """Tokenise the JSONL file `source` into `<prefix>.bin/.idx`, in its order; empty documents are left out.

    Returns the counts that `<prefix>.meta.json` records. Raises DataError.
    """
    counts = {"skipped_empty": 0, "special_text_documents": 0, "documents_over_512_tokens": 0, "documents": 0, "tokens": 0}
    dtype = token_dtype(encoder.vocabulary)
    with Progress("tokenising", _count_lines(source)) as progress, IndexedDatasetWriter(prefix, dtype) as writer:
        for batch in _batches(read_documents(source, key), BATCH_DOCUMENTS):
            documents = [document for document in batch if document.text.strip()]
            counts["skipped_empty"] += len(batch) - len(documents)
            for document, ids in zip(documents, _encode(encoder, source, documents), strict=True):
                writer.add_document(ids)
                counts["documents"] += 1
                counts["tokens"] += len(ids)
                counts["documents_over_512_tokens"] += len(ids) > MEGATRON_LONGEST_SEQUENCE
                counts["special_text_documents"] += encoder.has_special_text(document.text)
            progress.advance(len(batch))
        if not counts["documents"]:
            raise DataError(f"{source} holds no document with text", "Check the file; it may be the wrong one")
    return counts | {"dtype": dtype}


def _encode(encoder: DocumentEncoder, source: str, documents: Sequence[Document]) -> list[list[int]]:
    try:
        return encoder.encode_batch([document.text for document in documents])
    except (TypeError, UnicodeError) as error:
        for document in documents:
            try:
                document.text.encode("utf-8")
            except UnicodeEncodeError:
                problem = f"line {document.line} of {source} holds half of a surrogate pair, which is not text"
                raise DataError(problem, "Correct or remove that line") from error
        raise


def _batches(items: Iterable[Document], size: int) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _count_lines(path: str) -> int | None:
    try:
        with open(path, "rb") as stream:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))
    except OSError:
        return None


def one_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


def file_facts(path: str) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    import hashlib

    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return {"bytes": os.path.getsize(path), "sha256": digest.hexdigest()}


def same_path(first: str, second: str) -> bool:
    """Whether both paths exist and are the same file or directory."""
    return os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second)


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write a JSON file under a temporary name and rename it."""
    import json

    partial = partial_name(path)
    try:
        with open(partial, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2)
            stream.write("\n")
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def export_meta_path(jsonl: str) -> str:
    """Where the record of an exported JSONL file stands: beside it, `.meta.json` for `.jsonl`."""
    return os.path.splitext(jsonl)[0] + ".meta.json"


def _source_of(jsonl: str) -> str:
    import json

    path = export_meta_path(jsonl)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as stream:
            return str(json.load(stream)["source"])
    return f"file {os.path.abspath(jsonl)}"


def _tokenizer_name(name: str) -> str:
    if same_path(name, os.path.join(SAMPLE_DIR, "tokenizer")):
        return SAMPLE_NAME
    return os.path.abspath(name) if os.path.isdir(name) else name


def _build(args: Any) -> None:
    import datetime
    import platform
    import shutil

    import sentencepiece
    import transformers

    prefix = os.path.abspath(args.output_prefix)
    os.makedirs(os.path.dirname(prefix), exist_ok=True)
    directory = find_tokenizer(args.tokenizer)
    copy = os.path.abspath(args.tokenizer_copy) if args.tokenizer_copy else None
    staged = partial_name(copy) if copy else None
    try:
        if staged:
            # What tokenises is the copy itself, so that it is known to be complete.
            copy_tokenizer(directory, staged)
        encoder = DocumentEncoder(staged or directory, args.workers)
        if not encoder.exact:
            print("note: this tokenizer differs from its SentencePiece model; all text takes its slower path.", file=sys.stderr)
        counts = build_dataset(args.input, prefix, encoder, args.json_key)
        if staged and copy:
            _replace_directory(staged, copy)
    finally:
        if staged and os.path.isdir(staged):
            shutil.rmtree(staged)
    names = {os.path.basename(path): path for path in (args.input, *_paths(prefix))}
    meta = {
        "source": _source_of(args.input),
        "tokenizer": _tokenizer_name(args.tokenizer),
        "tokenizer_sha256": file_facts(os.path.join(directory, "spiece.model"))["sha256"],
        "vocabulary": encoder.vocabulary,
        **counts,
        "files": {name: file_facts(path) for name, path in names.items()},
        "versions": {
            "python": platform.python_version(),
            "sentencepiece": sentencepiece.__version__,
            "transformers": transformers.__version__,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(f"{prefix}.meta.json", meta)
    _report(prefix, meta)


def _replace_directory(new: str, target: str) -> None:
    import shutil

    if not os.path.exists(target):
        os.rename(new, target)
        return
    old = f"{new}-replaced"
    os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old)


def _report(prefix: str, meta: dict[str, Any]) -> None:
    print(f"{meta['documents']:,} documents, {meta['tokens']:,} tokens ({meta['dtype']}), vocabulary {meta['vocabulary']:,}")
    for path in _paths(prefix):
        print(f"{os.path.basename(path)}: {os.path.getsize(path):,} bytes")
    if meta["skipped_empty"]:
        print(f"{meta['skipped_empty']:,} empty documents were left out.")
    if meta["special_text_documents"]:
        print(f"{meta['special_text_documents']:,} documents contain the text of a special token, which became that token.")
    if meta["documents_over_512_tokens"]:
        print(
            f"{meta['documents_over_512_tokens']:,} documents are longer than {MEGATRON_LONGEST_SEQUENCE} tokens: "
            "Megatron's T5 samples leave those out."
        )


# ---- command line ----------------------------------------------------------------------------------------------------


def run_command(command: Callable[[], None]) -> int:
    """Run a command; errors become one sentence on standard error and status 2, signals leave no temporary files."""
    import signal

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        command()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.remedy:
            print(f"       {error.remedy}", file=sys.stderr)
        return EXIT_ERROR
    except ImportError as error:
        print(f"error: the Python package {error.name} is missing from {sys.executable}", file=sys.stderr)
        print(f"       Run: pip install -r '{os.path.join(REPO_ROOT, 'requirements.txt')}'", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        print(f"error: {error.filename or 'writing'}: {error.strerror or error}", file=sys.stderr)
        print("       Check the path, its permissions and the free space", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def available_processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive_int(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def main() -> int:
    """Command line entry; returns the exit status."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--input", metavar="JSONL", help='corpus to tokenise, one {"text": "..."} per line')
    what.add_argument("--check", metavar="PREFIX", help="check PREFIX.bin and PREFIX.idx and print their counts")
    parser.add_argument("--output-prefix", metavar="PREFIX", help="where to write: PREFIX.bin, PREFIX.idx, PREFIX.meta.json")
    parser.add_argument("--tokenizer", default="google-t5/t5-large", metavar="NAME", help="hub name or directory (%(default)s)")
    parser.add_argument("--tokenizer-copy", metavar="DIR", help="also keep a copy of the tokenizer's files in DIR")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of a document's text (%(default)s)")
    workers = min(8, available_processors())
    parser.add_argument("--workers", type=positive_int, default=workers, metavar="N", help="threads that tokenise (%(default)s)")
    args = parser.parse_args()
    if args.check is not None:
        return run_command(lambda: _print_check(args.check))
    if not args.output_prefix:
        parser.error("--input needs --output-prefix")
    return run_command(lambda: _build(args))


def _print_check(prefix: str) -> None:
    try:
        info = check_dataset(prefix)
    except DataError as error:
        error.remedy = error.remedy or "Run: bash scripts/prepare_xsum_megatron.sh   (SAMPLE=1 for the bundled sample)"
        raise
    print(f"documents={info.documents} sequences={info.sequences} tokens={info.tokens} dtype={info.dtype}")
    print(f"bin_bytes={info.bin_bytes} idx_bytes={info.idx_bytes}")


if __name__ == "__main__":
    sys.exit(main())
