"""Merges indexed datasets into one, byte for byte as the engine's tools/merge_datasets.py."""

from __future__ import annotations

import argparse
import shutil
from array import array
from pathlib import Path

from t5bench import Problem, note
from t5bench.corpus import common
from t5bench.corpus.index import dataset_paths, read_index, write_index

# The facts about tokens in a record that all parts must share.
COMMON = ("tokenizer_checksum", "tokenizer_type", "tokenizer", "vocabulary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="the new dataset, a path without .bin and .idx")
    parser.add_argument("parts", metavar="IN", nargs="+", type=Path, help="a dataset, or a directory of them")


def run(arguments: argparse.Namespace) -> int:
    out, parts = arguments.out, [part for named in arguments.parts for part in _datasets(named)]
    for path in (*dataset_paths(out), common.record_path(out)):
        if path.exists():
            raise Problem(f"{path} already exists and is never overwritten", "Choose another name, or delete it")
    index, record = _joined(parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.partial")
    try:
        write_index(new, *index)
        with dataset_paths(new)[0].open("wb") as stream:
            for part in parts:
                with dataset_paths(part)[0].open("rb") as tokens:
                    shutil.copyfileobj(tokens, stream, 1 << 20)
        for written, path in zip(dataset_paths(new), dataset_paths(out), strict=True):
            written.replace(path)
    finally:
        for path in dataset_paths(new):
            path.unlink(missing_ok=True)
    record["files"] = {path.name: common.file_facts(path) for path in dataset_paths(out)}
    common.write_record(out, record)
    print(f"{out}: {record['documents']:,} documents from {len(parts):,} datasets")
    return 0


def _datasets(named: Path) -> list[Path]:
    """The datasets in a directory, in the order of their names, or the single one with this name."""
    found = sorted(path.with_suffix("") for path in named.glob("*.idx"))
    return found or [named.with_suffix("") if named.suffix in (".bin", ".idx") else named]


def _joined(parts: list[Path]) -> tuple[tuple[str, array[int], array[int]], dict[str, object]]:
    """dtype, sizes and doc_idx of the whole, and its record. Raises Problem for parts that do not go together."""
    sizes, doc_idx, first = array("i"), array("q", [0]), dict[str, object]()
    for part in parts:
        index, record = read_index(part), common.read_record(part)
        says = {"dtype": index.dtype} | {name: record.get(name) for name in COMMON}
        first = first or says
        for name in ("dtype", "tokenizer_checksum"):
            if says[name] != first[name]:
                found = f"{part} has the {name} {says[name]}, but {parts[0]} has {first[name]}"
                raise Problem(found, "Prepare all parts with the same tokenizer")
        doc_idx.extend(len(sizes) + end for end in index.doc_idx[1:])
        sizes.extend(index.sizes)
    if not first["tokenizer_checksum"]:
        note("warning: no part records its tokenizer, so nothing shows that all parts used the same one")
    known = {name: value for name, value in first.items() if value is not None}
    record = {"source": f"merged from {len(parts)} datasets", "documents": len(doc_idx) - 1, **known}
    return (index.dtype, sizes, doc_idx), record
