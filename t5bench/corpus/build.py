"""Tokenise a JSONL corpus into Megatron's memory-mapped indexed dataset.

`<prefix>.bin` holds the token ids of all documents one after the other, `<prefix>.idx` where each begins and
`<prefix>.meta.json` where they came from. Every document is one sequence, and its ids are exactly those of the `encode`
of transformers' slow T5Tokenizer, which ends each document with one `</s>`.
"""

import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.corpus import common
from t5bench.corpus.checksum import tokenizer_checksum
from t5bench.corpus.index import HEADER, MAGIC, TYPES, VERSION, dataset_paths, sequence_offsets
from t5bench.corpus.tokenizer import DocumentEncoder

BATCH_DOCUMENTS = 512
# Megatron's own limit for 16-bit token ids; it leaves some room below 65536.
UINT16_VOCABULARY_LIMIT = 65500


def write_dataset(prefix: Path, dtype: str, documents: Iterable[Sequence[int]]) -> None:
    """Write `<prefix>.bin` and `.idx`, each document one sequence; older files stay if the documents raise.

    dtype: numpy's name of a token id's type. Memory: 4 bytes a document. Raises Problem when there is no document.
    """
    code, typecode = next((code, letter) for code, (name, letter) in TYPES.items() if name == dtype)
    bin_path, idx_path = dataset_paths(prefix)
    sizes = array("i")
    with common.replacing(idx_path) as index, common.replacing(bin_path) as tokens:
        for ids in documents:
            tokens.write(array(typecode, ids))
            sizes.append(len(ids))
        if not sizes:
            raise Problem("there is no document with text", "Check the source; it may be the wrong file")
        index.write(HEADER.pack(MAGIC, VERSION, code, len(sizes), len(sizes) + 1))
        index.write(sizes)
        index.write(sequence_offsets(sizes, array(typecode).itemsize))
        index.write(array("q", range(len(sizes) + 1)))


def build_dataset(source: Path, prefix: Path, encoder: DocumentEncoder) -> dict[str, Any]:
    """Tokenise the JSONL file `source` into `<prefix>.bin/.idx`, in its order; empty documents are left out.

    Returns the counts that the record holds. Raises Problem, which names a bad line.
    """
    from tqdm import tqdm

    counts = Counter(documents=0, tokens=0, skipped_empty=0, special_text_documents=0)
    dtype = "uint16" if encoder.vocabulary < UINT16_VOCABULARY_LIMIT else "int32"
    with source.open("rb") as stream:
        lines = sum(1 for _ in stream)
    records = tqdm(common.read_jsonl(source), "tokenising", lines, unit=" documents", disable=None)
    texts = (common.string_in(record, "text", f"line {number} of {source}") for number, record in records)

    def encoded() -> Iterator[list[int]]:
        while batch := list(islice(texts, BATCH_DOCUMENTS)):
            filled = [text for text in batch if text.strip()]
            counts["skipped_empty"] += len(batch) - len(filled)
            counts["special_text_documents"] += sum(map(encoder.has_special_text, filled))
            for ids in encoder.encode_batch(filled):
                counts["documents"] += 1
                counts["tokens"] += len(ids)
                yield ids

    write_dataset(prefix, dtype, encoded())
    return {**counts, "dtype": dtype, "vocabulary": encoder.vocabulary}


def build(jsonl: Path, prefix: Path, encoder: DocumentEncoder, tokenizer: str) -> None:
    """Tokenise, record where all came from, and say what came out.

    tokenizer: its name, or the directory that it was taken from. Raises Problem.
    """
    import sentencepiece
    import transformers

    if not encoder.exact:
        common.note("note: SentencePiece alone gives other ids than this tokenizer, which is slower")
    record = {
        "source": common.read_record(jsonl.with_suffix("")).get("source", f"file {jsonl}"),
        "tokenizer": common.recorded_name(tokenizer),
        "tokenizer_checksum": tokenizer_checksum(encoder.directory),
        **build_dataset(jsonl, prefix, encoder),
        "files": {path.name: common.file_facts(path) for path in (jsonl, *dataset_paths(prefix))},
        "versions": {
            "python": sys.version.split()[0],
            "sentencepiece": sentencepiece.__version__,
            "transformers": transformers.__version__,
        },
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }
    common.write_json(common.record_path(prefix), record)
    _report(record)


def _report(record: dict[str, Any]) -> None:
    print(f"{record['documents']:,} documents, {record['tokens']:,} tokens of a vocabulary of {record['vocabulary']:,}")
    for name, facts in record["files"].items():
        print(f"{name}: {facts['bytes']:,} bytes")
    if empty := record["skipped_empty"]:
        print(f"{empty:,} empty documents were left out.")
    if special := record["special_text_documents"]:
        print(f"{special:,} documents contain a special token's text, which became that token.")
