"""Merges indexed datasets into one, byte for byte as the engine's tools/merge_datasets.py."""

import argparse
import shutil
from array import array
from pathlib import Path
from typing import Any

from t5bench import Problem, note
from t5bench.corpus import index
from t5bench.corpus.index import dataset_paths

# The facts about tokens in a record that all parts must share.
COMMON = ("tokenizer_checksum", "tokenizer_type", "tokenizer", "vocabulary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="the new dataset, a path without .bin and .idx")
    parser.add_argument("parts", metavar="IN", nargs="+", type=Path, help="a dataset, or a directory of them")


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out
    parts: list[Path] = []
    for named in arguments.parts:
        parts += _datasets(named)
    for path in (*dataset_paths(out), index.record_path(out)):
        if path.exists():
            problem = f"{path} already exists and is never overwritten"
            raise Problem(problem, "Choose another name, or delete it")
    sizes = array("i")
    doc_idx = array("q", [0])
    facts: dict[str, Any] = {}
    for part in parts:
        part_index = index.read_index(part, repair=True)
        record = index.read_record(part)
        part_facts = {"dtype": part_index.dtype} | {name: record.get(name) for name in COMMON}
        facts = facts or part_facts
        for name in ("dtype", "tokenizer_checksum"):
            if part_facts[name] != facts[name]:
                problem = f"{part} has the {name} {part_facts[name]}, but {parts[0]} has {facts[name]}"
                raise Problem(problem, "Prepare all parts with the same tokenizer")
        doc_idx.extend(len(sizes) + end for end in part_index.doc_idx[1:])
        sizes.extend(part_index.sizes)
    if not facts["tokenizer_checksum"]:
        note("warning: no part records its tokenizer, so whether all parts used the same one cannot be checked")
    out.parent.mkdir(parents=True, exist_ok=True)
    bin_path, _ = dataset_paths(out)
    with bin_path.open("wb") as stream:
        for part in parts:
            part_bin_path, _ = dataset_paths(part)
            with part_bin_path.open("rb") as tokens:
                shutil.copyfileobj(tokens, stream, 1 << 20)
    # Last, so that what an interrupted merge leaves is no dataset.
    index.write_index(out, facts["dtype"], sizes, doc_idx)
    documents = len(doc_idx) - 1
    record = {"source": f"merged from {len(parts)} datasets", "documents": documents}
    record |= {name: value for name, value in facts.items() if value is not None}
    record["files"] = {path.name: index.file_facts(path) for path in dataset_paths(out)}
    index.write_record(out, record)
    print(f"{out}: {documents:,} documents from {len(parts):,} datasets")
    return 0


def _datasets(named: Path) -> list[Path]:
    """The datasets in a directory, in the order of their names, or the single one with this name."""
    datasets = sorted(path.with_suffix("") for path in named.glob("*.idx"))
    if datasets:
        return datasets
    return [named.with_suffix("") if named.suffix in (".bin", ".idx") else named]
