"""Reads documents, block by block, and turns them into JSONL and token ids in several processes.

They come from a local JSONL or Parquet file, or XSum on the Hugging Face hub. Only their lengths stay in memory.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import re
import signal
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from t5bench import REPOSITORY, SIGNALS, Problem, later_signals, note
from t5bench.corpus.index import write_index
from t5bench.corpus.tokenizer import DocumentEncoder, hub, one_line

XSUM = "EdinburghNLP/xsum"
# The dataset's main branch holds a loading script; the hub also keeps the same rows as Parquet.
PARQUET_REVISION = "refs/convert/parquet"
COLUMNS = ("document", "summary", "id", "text")
SAMPLE = REPOSITORY / "megatron_data" / "sample"
BLOCK_BYTES, BLOCK_ROWS = 1 << 20, 512
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
JOURNAL_SECONDS = 1
PR_SET_PDEATHSIG = 1
REMEDY = "Set XSUM_SOURCE to a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file with document and summary, or with text"


def recorded_name(name: str, kind: str = "") -> str:
    """A file or directory as records name it: `kind` and its absolute path, the bundled sample, or a hub's name."""
    path = Path(name).resolve()
    if SAMPLE.resolve() in path.parents:
        return "bundled sample"
    return f"{kind}{path}" if path.exists() else name


class Block(NamedTuple):
    """Some rows of a source, for one worker: whole lines of JSON, or a batch of a Parquet file.

    source: its name in messages. first: the number of the first row, from 1. done: the part of the source up to the
    end of this block.
    """

    content: Any
    source: str
    first: int
    done: float

    def articles(self) -> Iterator[dict[str, str]]:
        """Text, summary and id of each row, without blank lines. Raises Problem, which names a bad row."""
        lines = isinstance(self.content, bytes)
        try:
            rows = self.content.split(b"\n") if lines else self.content.to_pylist()
        except ValueError as error:
            found = f"row {self.first} or a later of {self.source} is not text in UTF-8 ({one_line(error)})"
            raise Problem(found, "Copy or download the file again") from error
        for number, row in enumerate(rows, self.first):
            place = f"{'line' if lines else 'row'} {number} of {self.source}"
            if not lines:
                yield _article(row, number, place)
            elif row.strip():
                yield _article(_object(row, place), number, place)


class Source(NamedTuple):
    """Where articles come from: a local file (`path`), or the hub's dataset (`split`)."""

    path: Path | None
    split: str = ""
    limit: int | None = None

    def describe(self) -> str:
        """One line that is the same for the same source, as recorded and compared."""
        dataset = f"{XSUM} {self.split} from the Hugging Face hub"
        name = recorded_name(str(self.path), "file ") if self.path else dataset
        return name if self.limit is None else f"{name}, first {self.limit} documents"

    def state(self) -> str | None:
        """Something that changes when a local file does; the hub's dataset does not change."""
        found = self.path and self.path.stat()
        return found and f"{found.st_size} bytes, modified {found.st_mtime_ns}"

    def blocks(self) -> Iterator[Block]:
        """The source's blocks. Raises Problem for a damaged file, and for a hub that does not answer."""
        if self.path is None:
            return _parquet_blocks(_from_hub(self.split), f"{XSUM} {self.split}")
        return _parquet_blocks([self.path], str(self.path)) if self.path.suffix == ".parquet" else _lines(self.path)


def make_source(path: str, split: str, limit: int | None) -> Source:
    """The source in the settings; an empty path means the hub. Raises Problem for an unsuitable file."""
    if path and not Path(path).is_file():
        raise Problem(f"there is no file {path}", REMEDY)
    if path and not re.search(r"\.(parquet|jsonl(\.gz|\.zst)?)$", path):
        raise Problem(f"{path} does not have the name of a JSONL or Parquet file", REMEDY)
    return Source(Path(path) if path else None, split, limit)


def _lines(path: Path) -> Iterator[Block]:
    first, size, stream = 1, path.stat().st_size, path.open("rb")
    with stream as file:
        if path.suffix in COMPRESSED:
            import pyarrow

            stream = io.BufferedReader(pyarrow.CompressedInputStream(file, COMPRESSED[path.suffix]), BLOCK_BYTES)
        try:
            while content := stream.read(BLOCK_BYTES):
                content += stream.readline()
                yield Block(content, str(path), first, file.tell() / size)
                first += content.count(b"\n")
        except OSError as error:
            raise Problem(f"{path} is damaged ({one_line(error)})", "Copy or download it again") from error


def _parquet_blocks(paths: list[Path], name: str) -> Iterator[Block]:
    import pyarrow
    import pyarrow.parquet

    try:
        files, first = [pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) for path in paths], 1
        rows = sum(file.metadata.num_rows for file in files)
        for file in files:
            columns = [column for column in file.schema_arrow.names if column in COLUMNS] or None
            for batch in file.iter_batches(BLOCK_ROWS, columns=columns):
                yield Block(batch, name, first, (first + batch.num_rows - 1) / rows)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        found = f"{paths[0]} is damaged or not a Parquet file ({one_line(error)})"
        raise Problem(found, "Copy or download it again") from error


def _from_hub(split: str) -> list[Path]:
    remedy = "Check the network (HF_ENDPOINT, proxies), or download XSum elsewhere, copy it here and set "
    with hub(XSUM, f"{remedy}XSUM_SOURCE=/path/to/xsum.parquet") as client:
        found = client.HfApi().dataset_info(XSUM, revision=PARQUET_REVISION, timeout=30)
        names = sorted(file.rfilename for file in found.siblings)
        names = [name for name in names if re.search(rf"\b{re.escape(split)}/[^/]*\.parquet$", name)]
        # One after the other: the threads of snapshot_download cannot be interrupted.
        paths = [Path(client.hf_hub_download(XSUM, name, repo_type="dataset", revision=found.sha)) for name in names]
    if not paths:
        raise Problem(f"{XSUM} has no split '{split}'", "XSUM_SPLIT is train, validation or test")
    return paths


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict)
    except (ValueError, RecursionError) as error:
        found = f"{place} is not a JSON object in UTF-8 ({one_line(error)})"
        raise Problem(found, "Correct or remove that line") from None


def _article(row: dict[str, Any], number: int, place: str) -> dict[str, str]:
    key = "document" if "document" in row else "text"
    if key not in row:
        found = f'{place} has neither "document" nor "text"; it has {", ".join(row) or "nothing"}'
        raise Problem(found, "Rename the source's columns to document and summary, or to text")
    text, summary = row[key], row.get("summary")
    if text is not None and not isinstance(text, str):
        raise Problem(f'{place} has no string as "{key}", but {type(text).__name__}', "Correct or remove it")
    identity = number if row.get("id") is None else row["id"]
    return {"text": text or "", "summary": summary if isinstance(summary, str) else "", "id": str(identity)}


# A block's documents, converted: their numbers, lines of JSON, token ids, and the number of ids of each as int32.
Piece = tuple[Counter[str], tuple[bytes, bytes, bytes]]


def convert(block: Block, encoder: DocumentEncoder | None, limit: int | None = None) -> Piece:
    """The block's first `limit` documents with text; without ids if there is no encoder. Raises Problem."""
    counts, articles = Counter(skipped_empty=0), []
    for article in block.articles():
        if article["text"].strip():
            articles.append(article)
        else:
            counts["skipped_empty"] += 1
        if len(articles) == limit:
            break
    texts = [article["text"] for article in articles]
    # Some tokenizers find no token in a text although it is not only white space.
    ids = [found for found in encoder.encode_batch(texts) if len(found)] if encoder else []
    sizes, tokens = array("i", map(len, ids)), b""
    counts["documents"] = len(sizes if encoder else texts)
    counts["skipped_empty"] += len(texts) - counts["documents"]
    if encoder:
        counts.update(tokens=sum(sizes), special_text_documents=sum(map(encoder.has_special_text, texts)))
        tokens = np.concatenate([np.array([], np.int32), *ids]).astype(encoder.dtype).tobytes()
    lines = b"".join(msgspec.json.encode(article) + b"\n" for article in articles)
    return counts, (lines, tokens, sizes.tobytes())


def convert_source(
    source: Source, output: Path, encoder: DocumentEncoder | None, workers: int, job: object = None
) -> Counter[str]:
    """Writes a source's documents in order to `<output>.jsonl` and, with an encoder, `<output>_document.bin/.idx`.

    Continues an interrupted conversion if it was the same job. Returns the numbers of documents and tokens. Raises
    Problem for a bad row or a source without text.
    """
    from tqdm import tqdm

    journal, prefix = Path(f"{output}.journal"), Path(f"{output}_document")
    paths = [Path(f"{output}.jsonl"), Path(f"{prefix}.bin"), Path(f"{prefix}.sizes")]  # the last two may stay empty
    done, counts, lengths = _read_journal(journal, job, paths)
    # Without a terminal, print a line now and then.
    seconds = 0 if sys.stderr.isatty() else 60
    style = "{percentage:3.0f}% of the source, {elapsed} gone, {remaining} left{postfix}"
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("ab")) for path in paths]
        for stream, length in zip(streams, lengths, strict=True):
            stream.seek(stream.truncate(length))  # else tell() counts from the old end
        bar = stack.enter_context(tqdm(total=1, bar_format=style, mininterval=seconds or 0.1, delay=seconds))
        saved = time.monotonic()
        blocks = (block for block in source.blocks() if block.first > done)
        for block, (found, contents) in _pieces(blocks, encoder, workers):
            left = source.limit and source.limit - counts["documents"]
            if left and found["documents"] >= left:
                found, contents = convert(block, encoder, left)
            for stream, content in zip(streams, contents, strict=True):
                stream.write(content)
            counts.update(found)
            bar.set_postfix(documents=counts["documents"], refresh=False)
            bar.update(block.done - bar.n)
            if counts["documents"] == source.limit:
                break
            if time.monotonic() > saved + JOURNAL_SECONDS:
                lengths, saved = [stream.tell() for stream in streams], time.monotonic()
                for stream in streams:
                    stream.flush()
                entry = msgspec.json.encode([job, block.first, counts, lengths])
                journal.with_suffix(".new").write_bytes(entry)
                journal.with_suffix(".new").replace(journal)
    if not counts["documents"]:
        raise Problem(f"{source.describe()}: no document with text was found", "Check the source")
    if encoder:
        sizes = array("i", paths[2].read_bytes())
        write_index(prefix, encoder.dtype, sizes, array("q", range(len(sizes) + 1)))
    return counts


def _read_journal(journal: Path, job: object, paths: list[Path]) -> tuple[int, Counter[str], list[int]]:
    """The first row after the last finished block, the counts until then, and the lengths of the files."""
    try:
        known, done, counts, lengths = msgspec.json.decode(journal.read_bytes())
        if known == job and all(path.stat().st_size >= length for path, length in zip(paths, lengths, strict=True)):
            note(f"Continuing after {counts['documents']:,} documents, where the previous run stopped")
            return done, Counter(counts), lengths
    except (OSError, ValueError):
        pass
    return 0, Counter(), [0] * len(paths)


def _pieces(blocks: Iterator[Block], encoder: DocumentEncoder | None, workers: int) -> Iterator[tuple[Block, Piece]]:
    """All converted blocks, in order; for a source of few blocks, other processes are not worth starting."""
    first = blocks if workers == 1 else list(islice(blocks, 3))
    yield from ((block, convert(block, encoder)) for block in first)
    context, waiting = multiprocessing.get_context("fork"), deque()
    with ProcessPoolExecutor(workers, context, _start_worker, (encoder, os.getpid())) as pool:
        try:
            for block in blocks:
                with later_signals():  # the first time, this forks
                    waiting.append((block, pool.submit(_convert, block)))
                if len(waiting) > 2 * workers:
                    block, piece = waiting.popleft()
                    yield block, piece.result()
            yield from ((block, piece.result()) for block, piece in waiting)
        except BrokenProcessPool:
            found = "a tokenising process was killed, perhaps because memory ran out"
            raise Problem(found, "Free memory, or set WORKERS to a smaller number") from None
        finally:
            pool.shutdown(cancel_futures=True)


_encoder: DocumentEncoder | None = None


def _start_worker(encoder: DocumentEncoder | None, parent: int) -> None:
    global _encoder
    _encoder = encoder
    # Only the parent process handles interruptions; and it may be killed.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that
        os._exit(1)


def _convert(block: Block) -> Piece:
    return convert(block, _encoder)
