"""Turns the documents of a source into JSONL and token ids in several processes.

Only their lengths stay in memory.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
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
from typing import NamedTuple

import msgspec
import numpy as np

from t5bench import SIGNALS, Problem, later_signals, note
from t5bench.corpus.index import write_index
from t5bench.corpus.source import Block, Source, Unusable
from t5bench.corpus.tokenizer import DocumentEncoder

JOURNAL_SECONDS = 1
PR_SET_PDEATHSIG = 1
MOST_UNUSABLE = 20  # rows, after which the rest of a source is not read any more to name others
MOST_NAMED = 5


class Piece(NamedTuple):
    """A block's documents, converted."""

    counts: Counter[str]
    contents: tuple[bytes, bytes, bytes]
    """Lines of JSON, token ids, and the number of ids of each document as int32."""
    unusable: tuple[Unusable, ...] = ()
    """Rows that cannot become documents."""


def convert(block: Block, encoder: DocumentEncoder | None, limit: int | None = None) -> Piece:
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
    return Piece(counts, (lines, tokens, sizes.tobytes()), tuple(unusable))


def convert_source(
    source: Source, output: Path, encoder: DocumentEncoder | None, workers: int, job: object = None
) -> Counter[str]:
    """Writes a source's documents in order to `<output>.jsonl` and, with an encoder, `<output>_document.bin/.idx`.

    Continues an interrupted conversion if it was the same job. Returns the numbers of documents and tokens. Raises
    Problem for a bad row or a source without text.
    """
    from tqdm import tqdm

    unusable: list[Unusable] = []
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
        for block, converted in _pieces(blocks, encoder, workers):
            left = source.limit and source.limit - counts["documents"]
            piece = convert(block, encoder, left) if left and converted.counts["documents"] >= left else converted
            unusable += [row for row in piece.unusable if not row.is_skipped]
            if len(unusable) >= MOST_UNUSABLE:
                break
            for row in piece.unusable:
                if row.is_skipped and counts["skipped_invalid"] + piece.counts["skipped_invalid"] <= MOST_NAMED:
                    note(f"skipped: {row.reason}")
            for stream, content in zip(streams, piece.contents, strict=True):
                stream.write(content)
            counts.update(piece.counts)
            bar.set_postfix(documents=counts["documents"], refresh=False)
            bar.update(block.done - bar.n)
            if counts["documents"] == source.limit:
                break
            # What comes after a row that stops the conversion is only read to name other such rows.
            if time.monotonic() > saved + JOURNAL_SECONDS and not unusable:
                lengths, saved = [stream.tell() for stream in streams], time.monotonic()
                for stream in streams:
                    stream.flush()
                entry = msgspec.json.encode([job, block.first, counts, lengths])
                journal.with_suffix(".new").write_bytes(entry)
                journal.with_suffix(".new").replace(journal)
    if unusable:
        raise _all_of(unusable)
    if not counts["documents"]:
        raise Problem(f"{source.describe()}: no document with text was found", "Check the source")
    if encoder:
        sizes = array("i", paths[2].read_bytes())
        write_index(prefix, encoder.dtype, sizes, array("q", range(len(sizes) + 1)))
    return counts


def _all_of(unusable: list[Unusable]) -> Problem:
    """One problem that names the rows, as far as they were read."""
    remedies = list(dict.fromkeys(row.remedy for row in unusable))
    if len(unusable) == 1:
        return Problem(unusable[0].reason, remedies[0])
    count = f"at least {len(unusable)}" if len(unusable) >= MOST_UNUSABLE else str(len(unusable))
    reasons = "; ".join(row.reason for row in unusable[:MOST_NAMED])
    more = "; ..." if len(unusable) > MOST_NAMED else ""
    return Problem(f"{count} rows cannot be used: {reasons}{more}", "\n".join(remedies[:MOST_NAMED]))


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
