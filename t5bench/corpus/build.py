#!/usr/bin/env python3
"""Tokenise a JSONL corpus into Megatron's memory-mapped indexed dataset, or check one that exists.

    python -m t5bench.corpus.build --input megatron_data/xsum_text.jsonl \\
        --output-prefix megatron_data/xsum_text_document --tokenizer google-t5/t5-large
    python -m t5bench.corpus.build --check megatron_data/xsum_text_document

`<prefix>.bin` holds the token ids of all documents one after the other, `<prefix>.idx` where each begins (`read_index`
describes the format) and `<prefix>.meta.json` where they came from. Every document is one sequence, and its ids are
exactly those of the `encode` of transformers' slow T5Tokenizer, which ends each document with one `</s>`.

Exit status: 0, or 2 with one sentence on standard error; then nothing was written and older files are as they were.
"""

# `--check` needs none of the tokenizer's packages, which take seconds to import: they are imported where they are used.
from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from t5bench import REPOSITORY as REPO_ROOT
from t5bench.corpus.index import DataError, IndexedDatasetWriter, dataset_paths, partial_name, read_index, token_dtype

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

EXIT_ERROR = 2

SAMPLE_DIR = REPO_ROOT / "megatron_data" / "sample"
SAMPLE_NAME = "bundled sample"

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

    def __init__(self, directory: Path, threads: int = 1) -> None:
        """directory: of a T5 tokenizer with its spiece.model. Raises DataError when it is not one."""
        import re

        self._threads = threads
        self._pieces = _load_pieces(directory)
        self._tokenizer = _load_tokenizer(directory)
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
        special = {index for index, text in enumerate(texts) if self.has_special_text(text)}
        ids = self._plain(["" if index in special else text for index, text in enumerate(texts)])
        for index in special:
            ids[index] = self._special_case(texts[index])
        return ids

    def _special_case(self, text: str) -> list[int]:
        # The slow tokenizer adds no second `</s>` to a text that ends in one; transformers 5 would.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if ids[-1:] == [self._eos] else [*ids, self._eos]

    def _plain(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._pieces.encode(texts, num_threads=self._threads)
        for document in ids:
            document.append(self._eos)
        return ids


def find_tokenizer(name: str) -> Path:
    """The directory of a tokenizer: `name` itself, or where the hub's tokenizer files of that name were fetched to.

    Raises DataError when there is none, or when the hub is needed and does not answer.
    """
    if Path(name).is_dir():
        directory = Path(name)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"there is no tokenizer directory {name}", "Correct TOKENIZER_MODEL (--tokenizer)")
    else:
        directory = _fetch_tokenizer(name)
    if not (directory / "spiece.model").is_file():
        raise DataError(f"{name} has no spiece.model, so it is not a SentencePiece T5 tokenizer", _NAME_A_T5)
    return directory


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files into the new directory `target`, complete enough to be loaded from there alone."""
    import json
    import shutil

    target.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    # Hub repositories leave these two to the model's config.json and the library's defaults.
    config_path = target / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    if not {"tokenizer_class", "legacy"} <= config.keys():
        write_json(config_path, {"tokenizer_class": "T5Tokenizer", "legacy": True} | config)


_NAME_A_T5 = "Name a T5 tokenizer in TOKENIZER_MODEL (--tokenizer), for example google-t5/t5-large"


def _fetch_tokenizer(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(TOKENIZER_FILES)))
    except Exception as error:
        # Network, hub and cache errors have no common base class.
        raise DataError(
            f"the tokenizer {name} could not be fetched from the Hugging Face hub ({hub_problem(error)})",
            "Check the name and the network, or set TOKENIZER_MODEL to a directory that holds the tokenizer's files",
        ) from error


def hub_problem(error: Exception) -> str:
    """Why the hub did not give what was asked for, in a few words."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and it is not in the local cache"
    # Both HTTP libraries that huggingface_hub has used name these so, and neither is imported here.
    unreachable = {"ConnectionError", "ConnectTimeout", "ReadTimeout", "ConnectError", "ProxyError", "SSLError"}
    if isinstance(error, errors.LocalEntryNotFoundError) or type(error).__name__ in unreachable:
        return f"{constants.ENDPOINT} does not answer and it is not in the local cache"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is none of that name, or it is not public"
    return one_line(error)


def _load_pieces(directory: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(directory / "spiece.model"))
    except (OSError, RuntimeError) as error:
        raise DataError(f"{directory / 'spiece.model'} is not a SentencePiece model", _NAME_A_T5) from error


def _load_tokenizer(directory: Path) -> Any:
    # Without its PyTorch models transformers loads in one second, not in four; release 5 has no such choice.
    os.environ.setdefault("USE_TORCH", "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, use_fast=False, local_files_only=True)
    except Exception as error:
        # A broken directory shows in many ways.
        raise DataError(f"{directory} cannot be loaded as a tokenizer ({one_line(error)})", _NAME_A_T5) from error
    if "<extra_id_0>" not in tokenizer.added_tokens_encoder or tokenizer.eos_token_id is None:
        raise DataError(
            f"{directory} is not a T5 tokenizer: it lacks <extra_id_0> or an end-of-sequence token", _NAME_A_T5
        )
    return tokenizer


# ---- building --------------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """One line of a JSONL corpus."""

    line: int
    text: str


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a JSONL file in order, blank lines left out.

    Raises DataError that names the line which is not JSON, not UTF-8, or has no string as `text`.
    """
    for number, record in read_jsonl(path):
        text = record.get("text")
        if not isinstance(text, str):
            raise DataError(
                f'line {number} of {path} has no string as "text"', 'Each line must be like {"text": "..."}'
            )
        yield Document(number, text)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 and objects of a JSONL file, blank lines left out; raises DataError that names a bad line."""
    import json

    remedy = "Correct or remove that line; each line must be one JSON object in UTF-8"
    with path.open("rb") as stream:
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


def build_dataset(source: Path, prefix: Path, encoder: DocumentEncoder) -> dict[str, Any]:
    """Tokenise the JSONL file `source` into `<prefix>.bin/.idx`, in its order; empty documents are left out.

    Returns the counts that `<prefix>.meta.json` records. Raises DataError.
    """
    documents = tokens = empty = special = 0
    dtype = token_dtype(encoder.vocabulary)
    with Progress("tokenising", _count_lines(source)) as progress, IndexedDatasetWriter(prefix, dtype) as writer:
        for batch in _batches(read_documents(source), BATCH_DOCUMENTS):
            filled = [document for document in batch if document.text.strip()]
            empty += len(batch) - len(filled)
            documents += len(filled)
            for document, ids in zip(filled, _encode(encoder, source, filled), strict=True):
                writer.add_document(ids)
                tokens += len(ids)
                special += encoder.has_special_text(document.text)
            progress.advance(len(batch))
        if not documents:
            raise DataError(f"{source} holds no document with text", "Check the file; it may be the wrong one")
    return {
        "documents": documents,
        "tokens": tokens,
        "dtype": dtype,
        "vocabulary": encoder.vocabulary,
        "skipped_empty": empty,
        "special_text_documents": special,
    }


def _encode(encoder: DocumentEncoder, source: Path, documents: Sequence[Document]) -> list[list[int]]:
    try:
        return encoder.encode_batch([document.text for document in documents])
    except (TypeError, UnicodeError) as error:
        for document in documents:
            if any("\ud800" <= character <= "\udfff" for character in document.text):
                problem = f"line {document.line} of {source} holds half of a surrogate pair, which is not text"
                raise DataError(problem, "Correct or remove that line") from error
        raise


def _batches(items: Iterable[Document], size: int) -> Iterator[list[Document]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _count_lines(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))


def one_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


def file_facts(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    import hashlib

    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def same_path(first: Path, second: Path) -> bool:
    """Whether both paths exist and are the same file or directory."""
    return first.exists() and second.exists() and first.samefile(second)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file under a temporary name and rename it."""
    import json

    partial = partial_name(path)
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# ---- where data came from --------------------------------------------------------------------------------------------


def meta_path(prefix: Path) -> Path:
    """The record of a dataset, or, for the prefix `xsum_text`, of the exported `xsum_text.jsonl`."""
    return Path(f"{prefix}.meta.json")


def check_replacement(prefix: Path, jsonl: Path, source: str, tokenizer: str) -> None:
    """Raise DataError when `<prefix>.bin/.idx` or `jsonl` exist and were not made from this source and tokenizer."""
    built = [path for path in dataset_paths(prefix) if path.exists()]
    existing = [*built, *([jsonl] if jsonl.exists() else [])]
    if not existing:
        return
    remedy = "Set FORCE=1 to replace it, or MEGATRON_DATA_DIR to keep both"
    record = _read_record(meta_path(prefix if built else jsonl.with_suffix("")))
    if record is None:
        raise DataError(f"{existing[0]} exists and nothing beside it says where it came from", remedy)
    if record["source"] != source:
        raise DataError(
            f"{existing[0]} was made from {record['source']}, and this run would replace it by {source}", remedy
        )
    name = _tokenizer_name(tokenizer)
    if built and record.get("tokenizer") != name and record.get("tokenizer_sha256") != _pieces_digest(tokenizer):
        problem = f"was made with the tokenizer {record.get('tokenizer')}, and this run would use {name}"
        raise DataError(f"{existing[0]} {problem}", remedy)


def _read_record(path: Path) -> dict[str, Any] | None:
    import json

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("source"), str) else None


def _tokenizer_name(name: str) -> str:
    if same_path(Path(name), SAMPLE_DIR / "tokenizer"):
        return SAMPLE_NAME
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _pieces_digest(tokenizer: str) -> str | None:
    """SHA-256 of the pieces of a tokenizer that is on this machine, else None."""
    path = Path(tokenizer) / "spiece.model"
    return file_facts(path)["sha256"] if path.is_file() else None


def _versions() -> dict[str, str]:
    import platform

    import sentencepiece
    import transformers

    return {
        "python": platform.python_version(),
        "sentencepiece": sentencepiece.__version__,
        "transformers": transformers.__version__,
    }


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
        print(f"       Run: pip install -r '{REPO_ROOT / 'requirements.txt'}'", file=sys.stderr)
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


def _build(args: argparse.Namespace) -> None:
    import shutil
    from datetime import datetime, timezone

    # Importing transformers with torch takes three times as long, and a tokenizer needs no torch.
    os.environ.setdefault("USE_TORCH", "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    jsonl, prefix = args.input.absolute(), args.output_prefix.absolute()
    prefix.parent.mkdir(parents=True, exist_ok=True)
    directory = find_tokenizer(args.tokenizer)
    copy = args.tokenizer_copy and args.tokenizer_copy.absolute()
    staged = copy and partial_name(copy)
    try:
        if staged:
            # The copy itself tokenises, so that it is known to be complete.
            copy_tokenizer(directory, staged)
        encoder = DocumentEncoder(staged or directory, args.workers)
        if not encoder.exact:
            print("note: SentencePiece alone gives other ids than this tokenizer, which is slower", file=sys.stderr)
        counts = build_dataset(jsonl, prefix, encoder)
        pieces = file_facts(directory / "spiece.model")["sha256"]
        if staged:
            _replace_directory(staged, copy)
    finally:
        if staged:
            shutil.rmtree(staged, ignore_errors=True)
    export_record = _read_record(meta_path(jsonl.with_suffix("")))
    meta = {
        "source": export_record["source"] if export_record else f"file {jsonl}",
        "tokenizer": _tokenizer_name(args.tokenizer),
        "tokenizer_sha256": pieces,
        **counts,
        "files": {path.name: file_facts(path) for path in (jsonl, *dataset_paths(prefix))},
        "versions": _versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(meta_path(prefix), meta)
    _report(prefix, meta)


def _replace_directory(new: Path, target: Path) -> None:
    import shutil

    old = target.with_name(f"{new.name}-old")
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _report(prefix: Path, meta: dict[str, Any]) -> None:
    print(f"{meta['documents']:,} documents, {meta['tokens']:,} tokens of a vocabulary of {meta['vocabulary']:,}")
    for path in dataset_paths(prefix):
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    if meta["skipped_empty"]:
        print(f"{meta['skipped_empty']:,} empty documents were left out.")
    if meta["special_text_documents"]:
        print(f"{meta['special_text_documents']:,} documents contain a special token's text, which became that token.")


def _check(args: argparse.Namespace) -> None:
    try:
        info = read_index(args.check)
    except DataError as error:
        error.remedy = "Run: bash scripts/prepare_xsum_megatron.sh   (SAMPLE=1 for the bundled sample)"
        raise
    print(f"documents={info.documents} sequences={info.sequences} tokens={info.tokens} dtype={info.dtype}")
    print(f"bin_bytes={info.bin_bytes} idx_bytes={info.idx_bytes}")


def main() -> int:
    """Command line entry; returns the exit status."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--input", type=Path, metavar="JSONL", help='corpus to tokenise, one {"text": "..."} per line')
    what.add_argument("--check", type=Path, metavar="PREFIX", help="check PREFIX.bin and .idx and print their counts")
    parser.add_argument("--output-prefix", type=Path, metavar="PREFIX", help="write PREFIX.bin, .idx and .meta.json")
    parser.add_argument("--tokenizer", default="google-t5/t5-large", metavar="NAME", help="hub name or directory")
    parser.add_argument(
        "--tokenizer-copy", type=Path, metavar="DIR", help="keep a copy of the tokenizer's files in DIR"
    )
    workers = min(8, available_processors())
    parser.add_argument("--workers", type=positive_int, default=workers, metavar="N", help="threads (%(default)s)")
    parser.add_argument(
        "--only-replace", metavar="SOURCE", help="only tell (status 0 or 2) whether existing files are SOURCE's"
    )
    args = parser.parse_args()
    if args.check:
        return run_command(lambda: _check(args))
    if not args.output_prefix:
        parser.error("--input needs --output-prefix")
    if args.only_replace is not None:
        return run_command(lambda: check_replacement(args.output_prefix, args.input, args.only_replace, args.tokenizer))
    return run_command(lambda: _build(args))


if __name__ == "__main__":
    sys.exit(main())
