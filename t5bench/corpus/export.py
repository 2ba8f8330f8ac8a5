"""Export XSum's articles as JSONL, one {"text": ..., "summary": ..., "id": ...} per line.

    python scripts/export_xsum_corpus.py                                   # the train split, from the Hugging Face hub
    XSUM_SOURCE=/data/xsum.parquet python scripts/export_xsum_corpus.py    # from a local file

`text` is the article (XSum's `document`), which is what the model is pretrained on; `summary` is carried along unused.
A local file is .jsonl or .parquet with the columns `document` and `summary`, and perhaps `id`. Articles without text
are left out and counted. Beside the output, `<output without .jsonl>.meta.json` records where it came from.

Exit status: 0, or 2 with one sentence on standard error; then nothing was written and an older file is as it was.
"""

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from t5bench import REPOSITORY, Problem
from t5bench.corpus import common
from t5bench.corpus.tokenizer import hub

XSUM = "EdinburghNLP/xsum"
# The dataset's main branch holds a loading script; beside it the hub keeps the same rows as Parquet.
PARQUET_REVISION = "refs/convert/parquet"


class Source(NamedTuple):
    """Where articles come from: a local file (`path`), or the hub's dataset (`split`)."""

    path: Path | None
    split: str
    limit: int | None

    def describe(self) -> str:
        """One line that is the same for the same source, as recorded and compared."""
        dataset = f"{XSUM} {self.split} from the Hugging Face hub"
        name = common.recorded_name(str(self.path), "file ") if self.path else dataset
        return name if self.limit is None else f"{name}, first {self.limit} documents"

    def state(self) -> str | None:
        """Something that changes when a local file does; the hub's dataset does not change."""
        found = self.path and self.path.stat()
        return found and f"{found.st_size} bytes, modified {found.st_mtime_ns}"

    def articles(self) -> Iterator[dict[str, str]]:
        """What the output's lines hold, in the source's order. Raises Problem, which names a bad row."""
        if self.path and self.path.suffix == ".jsonl":
            rows, unit, name = common.read_jsonl(self.path), "line", str(self.path)
        else:
            batches = _parquet_batches(self.path) if self.path else _hub_batches(self.split)
            rows = enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
            unit, name = "row", str(self.path or f"{XSUM} {self.split}")
        for number, row in rows:
            yield _article(row, number, f"{unit} {number} of {name}")


def make_source(path: str, split: str, limit: int | None) -> Source:
    """The source that the settings name; an empty path is the hub. Raises Problem for a file that cannot be one."""
    remedy = "XSUM_SOURCE (--source) names a .jsonl or .parquet file with the columns document and summary"
    if limit is not None and limit < 1:
        raise Problem(f"the limit must be at least 1 document, found {limit}", "Leave it out to take all")
    if path and not Path(path).is_file():
        raise Problem(f"there is no file {path}", remedy)
    if path and Path(path).suffix not in (".jsonl", ".parquet"):
        raise Problem(f"{path} is neither .jsonl nor .parquet", remedy)
    return Source(Path(path) if path else None, split, limit)


def export(source: Source, output: Path) -> dict[str, Any]:
    """Write the source's articles to `output`, whole or not at all, and beside it the record that this returns.

    Raises Problem for a bad row or a source without text.
    """
    from tqdm import tqdm

    output.parent.mkdir(parents=True, exist_ok=True)
    documents = empty = 0
    with common.replacing(output) as stream:
        for article in tqdm(source.articles(), "exporting", source.limit, unit=" documents", disable=None):
            if not article["text"].strip():
                empty += 1
                continue
            stream.write(json.dumps(article, ensure_ascii=False).encode() + b"\n")
            documents += 1
            if documents == source.limit:
                break
        if not documents:
            raise Problem(f"{source.describe()}: not a single article with text was found", "Check the source")
    record = {
        "source": source.describe(),
        "source_state": source.state(),
        "documents": documents,
        "skipped_empty": empty,
        **common.file_facts(output),
    }
    common.write_json(common.record_path(output.with_suffix("")), record)
    return record


def is_current(source: Source, output: Path) -> bool:
    """Whether `output` is a complete export of this source as it is now."""
    size = output.stat().st_size if output.is_file() else None
    recorded = map(common.read_record(output.with_suffix("")).get, ("source", "source_state", "bytes"))
    return (source.describe(), source.state(), size) == tuple(recorded)


def _article(row: dict[str, Any], number: int, place: str) -> dict[str, str]:
    if missing := [column for column in ("document", "summary") if column not in row]:
        raise Problem(
            f'{place} has no "{missing[0]}"; it has {", ".join(row) or "nothing"}',
            "XSum's columns are document and summary; rename the source's columns to these",
        )
    text = "" if row["document"] is None else common.string_in(row, "document", place)
    summary = row["summary"] if isinstance(row["summary"], str) else ""
    return {"text": text, "summary": summary, "id": str(number if row.get("id") is None else row["id"])}


def _parquet_batches(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000)
    except (pyarrow.ArrowException, OSError) as error:
        reason = f"is damaged or not a Parquet file ({common.one_line(error)})"
        raise Problem(f"{path} {reason}", "Copy or download it again") from error


def _hub_batches(split: str) -> Iterator[Any]:
    remedy = "Check the network (HF_ENDPOINT, proxies), or download XSum elsewhere, copy it here and name it: "
    with hub(XSUM, f"{remedy}XSUM_SOURCE=/path/to/xsum.parquet") as client:
        api = client.HfApi()
        try:
            found = api.dataset_info(XSUM, revision=PARQUET_REVISION, timeout=30)
        except client.errors.RevisionNotFoundError:
            # Should the main branch become Parquet itself, it is what there is to load.
            found = api.dataset_info(XSUM, timeout=30)
        names = sorted(file.rfilename for file in found.siblings or [])
        names = [name for name in names if re.search(rf"\b{re.escape(split)}[/-][^/]*\.parquet$", name)]
        # One after the other: the threads of snapshot_download cannot be interrupted.
        paths = [api.hf_hub_download(XSUM, name, repo_type="dataset", revision=found.sha) for name in names]
    if not paths:
        raise Problem(f"{XSUM} has no split '{split}'", "XSUM_SPLIT is train, validation or test")
    for path in paths:
        yield from _parquet_batches(Path(path))


def _run(args: argparse.Namespace) -> None:
    record = export(make_source(args.source, args.split, args.limit), args.output.absolute())
    skipped = f" ({record['skipped_empty']:,} without text left out)" if record["skipped_empty"] else ""
    counts = f"{record['documents']:,} documents{skipped}, {record['bytes']:,} bytes"
    print(f"{args.output}: {counts}, from {record['source']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = Path(os.environ.get("MEGATRON_DATA_DIR") or REPOSITORY / "megatron_data") / "xsum_text.jsonl"
    parser.add_argument("--output", type=Path, default=output, metavar="JSONL", help="(default: %(default)s)")
    source = {"default": os.environ.get("XSUM_SOURCE", ""), "metavar": "FILE"}
    parser.add_argument("--source", **source, help="local .jsonl or .parquet, not the hub (default: XSUM_SOURCE)")
    split = os.environ.get("XSUM_SPLIT") or "train"
    parser.add_argument("--split", default=split, help="train, validation or test (default: XSUM_SPLIT, else train)")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N documents")
    args = parser.parse_args()
    common.run(lambda: _run(args))


if __name__ == "__main__":
    main()
