"""Turns the documents of a source into JSONL and token ids in several processes.

Only their lengths stay in memory.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from t5bench import SIGNALS, Problem, later_signals, note
from t5bench.corpus.index import write_index
from t5bench.corpus.source import Block, Source, Unusable
from t5bench.corpus.tokenizer import DocumentEncoder
from t5bench.text import Steering

if TYPE_CHECKING:
    from tqdm import tqdm

JOURNAL_SECONDS = 1
PR_SET_PDEATHSIG = 1
MOST_UNUSABLE = 20  # rows, after which the rest of a source is not read any more to name others
MOST_NAMED = 5


class ConvertedBlock(NamedTuple):
    """A block's documents, converted."""

    counts: Counter[str]
    lines: bytes
    """Of JSON."""
    tokens: bytes
    """Token ids."""
    sizes: bytes
    """The number of ids of each document as int32."""
    unusable: tuple[Unusable, ...] = ()
    """Rows that cannot become documents."""


def convert(block: Block, encoder: DocumentEncoder | None, limit: int | None = None) -> ConvertedBlock:
    """The block's first `limit` documents with text; without ids if there is no encoder."""
    counts: Counter[str] = Counter(skipped_empty=0)
    articles: list[dict[str, str]] = []
    unusable: list[Unusable] = []
    for row in block.rows():
        if isinstance(row, Unusable):
            unusable.append(row)
            counts["skipped_invalid"] += row.is_skipped
        elif row["text"].strip():
            articles.append(row)
        else:
            counts["skipped_empty"] += 1
        if len(articles) == limit:
            break
    texts = [article["text"] for article in articles]
    ids: list[np.ndarray] = []
    if encoder:
        # Some tokenizers find no token in a text although it is not only white space.
        ids = [tokens for tokens in encoder.encode_batch(texts) if len(tokens)]
    sizes = array("i", map(len, ids))
    tokens = b""
    counts["documents"] = len(sizes if encoder else texts)
    counts["skipped_empty"] += len(texts) - counts["documents"]
    if encoder:
        counts.update(tokens=sum(sizes), special_text_documents=sum(map(encoder.has_special_text, texts)))
        tokens = np.concatenate([np.array([], np.int32), *ids]).astype(encoder.dtype).tobytes()
    lines = b"".join(msgspec.json.encode(article) + b"\n" for article in articles)
    return ConvertedBlock(counts, lines, tokens, sizes.tobytes(), tuple(unusable))


class ConversionProgress(NamedTuple):
    """How far a conversion is, and where an interrupted one continues."""

    row: int
    """The first row of the last finished block, from 1; 0 before that."""
    counts: Counter[str]
    lengths: list[int]
    """Of the files, in bytes."""


class Journal:
    """The progress of a conversion in a file, `<output>.journal`."""

    def __init__(self, output: Path, job: object) -> None:
        """job: what the conversion is of; another one begins anew."""
        self.path = Path(f"{output}.journal")
        self.job = job

    def read(self, paths: Sequence[Path]) -> ConversionProgress:
        """The progress of the same job, if the files still have what it wrote, or none."""
        try:
            job, row, counts, lengths = msgspec.json.decode(self.path.read_bytes())
            are_complete = all(path.stat().st_size >= length for path, length in zip(paths, lengths, strict=True))
        except (OSError, ValueError):
            return ConversionProgress(0, Counter(), [0] * len(paths))
        if job != self.job or not are_complete:
            return ConversionProgress(0, Counter(), [0] * len(paths))
        note(f"Continuing after {counts['documents']:,} documents, where the previous run stopped")
        return ConversionProgress(row, Counter(counts), lengths)

    def write(self, progress: ConversionProgress) -> None:
        unfinished = self.path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode([self.job, *progress]))
        unfinished.replace(self.path)


def convert_source(
    source: Source, output: Path, encoder: DocumentEncoder | None, workers: int, job: object = None
) -> Counter[str]:
    """Writes a source's documents in order to `<output>.jsonl` and, with an encoder, `<output>_document.bin/.idx`.

    Continues an interrupted conversion if it was the same job. Returns the numbers of documents and tokens. Raises
    Problem for a bad row or a source without text.
    """
    prefix = Path(f"{output}_document")
    sizes_path = Path(f"{prefix}.sizes")
    paths = [Path(f"{output}.jsonl"), Path(f"{prefix}.bin"), sizes_path]  # the last two may stay empty
    counts = _write_pieces(source, paths, encoder, workers, Journal(output, job))
    if not counts["documents"]:
        raise Problem(f"{source.describe()}: no document with text was found", "Check the source")
    if encoder:
        sizes = array("i", sizes_path.read_bytes())
        write_index(prefix, encoder.dtype, sizes, array("q", range(len(sizes) + 1)))
    return counts


def _write_pieces(
    source: Source,
    paths: Sequence[Path],
    encoder: DocumentEncoder | None,
    workers: int,
    journal: Journal,
) -> Counter[str]:
    """Appends the lines, tokens and sizes of all documents to the three files; their counts. Raises Problem."""
    unusable: list[Unusable] = []
    done, counts, lengths = journal.read(paths)
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("ab")) for path in paths]
        for stream, length in zip(streams, lengths, strict=True):
            stream.seek(stream.truncate(length))  # else tell() counts from the old end
        bar = stack.enter_context(_progress_bar())
        saved = time.monotonic()
        blocks = (block for block in source.blocks() if block.first > done)
        for block, whole_piece in _pieces(blocks, encoder, workers):
            left = source.limit - counts["documents"] if source.limit else math.inf
            is_too_long = whole_piece.counts["documents"] >= left
            piece = convert(block, encoder, left) if is_too_long else whole_piece
            unusable += [row for row in piece.unusable if not row.is_skipped]
            if len(unusable) >= MOST_UNUSABLE:
                break
            _name_skipped(piece, counts["skipped_invalid"])
            contents = (piece.lines, piece.tokens, piece.sizes)
            for stream, content in zip(streams, contents, strict=True):
                stream.write(content)
            counts.update(piece.counts)
            bar.set_postfix(documents=counts["documents"], refresh=False)
            bar.update(block.done - bar.n)
            if counts["documents"] == source.limit:
                break
            # What comes after a row that stops the conversion is only read to name other such rows.
            if time.monotonic() > saved + JOURNAL_SECONDS and not unusable:
                lengths = [stream.tell() for stream in streams]
                saved = time.monotonic()
                for stream in streams:
                    stream.flush()
                journal.write(ConversionProgress(block.first, counts, lengths))
    if unusable:
        raise _all_of(unusable)
    return counts


def _progress_bar() -> tqdm:
    from tqdm import tqdm

    # Without a terminal, print a line now and then.
    seconds = 0 if sys.stderr.isatty() else 60
    style = "{percentage:3.0f}% of the source, {elapsed} gone, {remaining} left{postfix}"
    return tqdm(file=Steering(sys.stderr), total=1, bar_format=style, mininterval=seconds or 0.1, delay=seconds)


def _name_skipped(piece: ConvertedBlock, skipped_before: int) -> None:
    """Names rows that are left out, as long as they are few."""
    if skipped_before + piece.counts["skipped_invalid"] > MOST_NAMED:
        return
    for row in piece.unusable:
        if row.is_skipped:
            note(f"skipped: {row.reason}")


def _all_of(unusable: list[Unusable]) -> Problem:
    """One problem that names the rows, as far as they were read."""
    remedies = list(dict.fromkeys(row.remedy for row in unusable))
    if len(unusable) == 1:
        return Problem(unusable[0].reason, remedies[0])
    count = f"at least {len(unusable)}" if len(unusable) >= MOST_UNUSABLE else str(len(unusable))
    reasons = "; ".join(row.reason for row in unusable[:MOST_NAMED])
    more = "; ..." if len(unusable) > MOST_NAMED else ""
    return Problem(f"{count} rows cannot be used: {reasons}{more}", "\n".join(remedies[:MOST_NAMED]))


def _pieces(
    blocks: Iterator[Block], encoder: DocumentEncoder | None, workers: int
) -> Iterator[tuple[Block, ConvertedBlock]]:
    """All converted blocks, in order; for a source of few blocks, other processes are not worth starting."""
    converted_here = blocks if workers == 1 else list(islice(blocks, 3))
    for block in converted_here:
        yield block, convert(block, encoder)
    context = multiprocessing.get_context("fork")
    waiting: deque[tuple[Block, Future[ConvertedBlock]]] = deque()
    with ProcessPoolExecutor(workers, context, _start_worker, (encoder, os.getpid())) as pool:
        try:
            for block in blocks:
                with later_signals():  # the first time, this forks
                    waiting.append((block, pool.submit(_convert, block)))
                if len(waiting) > 2 * workers:
                    block, piece = waiting.popleft()
                    yield block, piece.result()
            for block, piece in waiting:
                yield block, piece.result()
        except BrokenProcessPool:
            problem = "a tokenising process was killed, perhaps because memory ran out"
            raise Problem(problem, "Free memory, or set WORKERS to a smaller number") from None
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


def _convert(block: Block) -> ConvertedBlock:
    return convert(block, _encoder)
