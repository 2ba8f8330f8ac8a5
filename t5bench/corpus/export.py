#!/usr/bin/env python3
"""Export XSum's articles as JSONL, one {"text": ..., "summary": ..., "id": ...} per line.

    python scripts/export_xsum_corpus.py                                   # the train split, from the Hugging Face hub
    XSUM_SOURCE=/data/xsum.parquet python scripts/export_xsum_corpus.py    # from a local file

`text` is the article (XSum's `document`), which is what the model is pretrained on; `summary` is carried along unused.
A local file is .jsonl or .parquet with the columns `document` and `summary`, and perhaps `id`. Articles without text
are left out and counted. Beside the output, `<output without .jsonl>.meta.json` records where it came from.

Exit status: 0, or 2 with one sentence on standard error; then nothing was written and an older file is as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from t5bench.corpus.build import (
    REPO_ROOT,
    SAMPLE_DIR,
    SAMPLE_NAME,
    Progress,
    file_facts,
    hub_problem,
    meta_path,
    one_line,
    positive_int,
    read_jsonl,
    run_command,
    same_path,
    write_json,
)
from t5bench.corpus.index import DataError, partial_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HUB_DATASET = "EdinburghNLP/xsum"
# The dataset's main branch holds a loading script, which `datasets` no longer runs since 4.0; the hub keeps this copy.
PARQUET_REVISION = "refs/convert/parquet"
COLUMNS = ("document", "summary")
READ_ROWS = 1000


class Article(NamedTuple):
    """One row of the source; `place` names it in messages."""

    place: str
    identifier: str
    document: object
    summary: object


class Source(NamedTuple):
    """Where articles come from: a local file (`path`), or the hub's dataset (`split`)."""

    path: Path | None
    split: str
    limit: int | None

    def describe(self) -> str:
        """One line that is the same for the same source, as recorded and compared."""
        if self.path is None:
            name = f"{HUB_DATASET} {self.split} from the Hugging Face hub"
        elif same_path(self.path, SAMPLE_DIR / "articles.jsonl"):
            name = SAMPLE_NAME
        else:
            name = f"file {self.path.resolve()}"
        return name if self.limit is None else f"{name}, first {self.limit} documents"

    def state(self) -> str | None:
        """Something that changes when a local file does; the hub's dataset does not change."""
        if self.path is None:
            return None
        found = self.path.stat()
        return f"{found.st_size} bytes, modified {found.st_mtime_ns}"

    def articles(self) -> Iterator[Article]:
        """All rows in order. Raises DataError when the source cannot be read, before the first row where possible."""
        if self.path is None:
            return _hub_articles(self.split)
        return _parquet_articles(self.path) if self.path.suffix == ".parquet" else _jsonl_articles(self.path)


def make_source(path: str, split: str, limit: int | None) -> Source:
    """The source that the settings name; an empty path is the hub. Raises DataError for a file that cannot be one."""
    if not path:
        return Source(None, split, limit)
    remedy = "XSUM_SOURCE (--source) names a .jsonl or .parquet file with the columns document and summary"
    if not Path(path).is_file():
        raise DataError(f"there is no file {path}", remedy)
    if Path(path).suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path} is neither .jsonl nor .parquet", remedy)
    return Source(Path(path), split, limit)


def export(source: Source, output: Path) -> dict[str, Any]:
    """Write the source's articles to `output` under a temporary name, rename it, and return its record.

    Raises DataError for a bad row or a source without text.
    """
    partial = partial_name(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as stream, Progress("exporting", source.limit) as progress:
            documents, empty = _write_articles(source.articles(), stream, source.limit, progress)
        if not documents:
            raise DataError(f"{source.describe()}: not a single article with text was found", "Check the source")
        record = {
            "source": source.describe(),
            "source_state": source.state(),
            "documents": documents,
            "skipped_empty": empty,
            **file_facts(partial),
        }
        partial.replace(output)
        write_json(meta_path(output.with_suffix("")), record)
    finally:
        partial.unlink(missing_ok=True)
    return record


def is_current(source: Source, output: Path) -> bool:
    """Whether `output` is a complete export of this source as it is now."""
    try:
        record = json.loads(meta_path(output.with_suffix("")).read_text(encoding="utf-8"))
        expected = (source.describe(), source.state(), output.stat().st_size)
        return (record["source"], record["source_state"], record["bytes"]) == expected
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_articles(articles: Iterable[Article], stream: Any, limit: int | None, progress: Progress) -> tuple[int, int]:
    documents = empty = 0
    for article in articles:
        text = _text_of(article)
        if not text.strip():
            empty += 1
            continue
        summary = article.summary if isinstance(article.summary, str) else ""
        line = json.dumps({"text": text, "summary": summary, "id": article.identifier}, ensure_ascii=False)
        try:
            stream.write(line + "\n")
        except UnicodeEncodeError as error:
            raise DataError(f"{article.place} holds half of a surrogate pair, which is not text", _MEND_ROW) from error
        documents += 1
        progress.advance(1)
        if documents == limit:
            break
    return documents, empty


_MEND_ROW = "Correct or remove that row"


def _text_of(article: Article) -> str:
    if article.document is None:
        return ""
    if not isinstance(article.document, str):
        raise DataError(f"{article.place}: the document is not text but {type(article.document).__name__}", _MEND_ROW)
    return article.document


def _require_columns(found: Iterable[str], place: str) -> None:
    found = list(found)
    missing = [column for column in COLUMNS if column not in found]
    if missing:
        raise DataError(
            f'{place} has no "{missing[0]}"; it has {", ".join(found) or "nothing"}',
            "XSum's columns are document and summary; rename the source's columns to these",
        )


def _jsonl_articles(path: Path) -> Iterator[Article]:
    for number, record in read_jsonl(path):
        place = f"line {number} of {path}"
        _require_columns(record, place)
        yield Article(place, str(record.get("id", number)), record["document"], record["summary"])


def _parquet_articles(path: Path) -> Iterator[Article]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} is not a Parquet file ({one_line(error)})", "Check that it was copied whole"
        ) from error
    names = table.schema_arrow.names
    _require_columns(names, str(path))
    columns = [name for name in (*COLUMNS, "id") if name in names]
    try:
        batches = (batch.to_pydict() for batch in table.iter_batches(READ_ROWS, columns=columns))
        yield from _column_articles(batches, str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged ({one_line(error)})", "Copy or download it again") from error


def _hub_articles(split: str) -> Iterator[Article]:
    dataset = _load_hub_dataset(split)
    _require_columns(dataset.column_names, HUB_DATASET)
    yield from _column_articles(dataset.iter(READ_ROWS), f"{HUB_DATASET} {split}")


def _column_articles(batches: Iterable[dict[str, list[Any]]], name: str) -> Iterator[Article]:
    row = 0
    for batch in batches:
        identifiers = batch.get("id") or [None] * len(batch["document"])
        for identifier, document, summary in zip(identifiers, batch["document"], batch["summary"], strict=True):
            row += 1
            yield Article(f"row {row} of {name}", str(row if identifier is None else identifier), document, summary)


def _load_hub_dataset(split: str) -> Any:
    import logging

    import datasets
    import huggingface_hub

    # Their warnings about retries would stand between the user and the one sentence that matters.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    datasets.logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    revision: str | None = PARQUET_REVISION
    unanswered: Exception | None = None
    try:
        # Asked first because load_dataset retries for half a minute before it gives up.
        huggingface_hub.HfApi().dataset_info(HUB_DATASET, revision=revision, timeout=30)
    except huggingface_hub.errors.RevisionNotFoundError:
        # Should the main branch become Parquet itself, it is what there is to load.
        revision = None
    except Exception as error:
        # Network and hub errors have no common base class. The dataset may still be in the local cache.
        unanswered = error
        datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(HUB_DATASET, revision=revision, split=split)
    except Exception as error:
        if isinstance(error, ValueError) and "split" in str(error):
            raise DataError(
                f"{HUB_DATASET} has no split '{split}'", "XSUM_SPLIT is train, validation or test"
            ) from error
        raise DataError(
            f"{HUB_DATASET} could not be loaded from the Hugging Face hub ({hub_problem(unanswered or error)})",
            "Check the network (HF_ENDPOINT, proxies), or download XSum elsewhere, copy it here and name it: "
            "XSUM_SOURCE=/path/to/xsum.parquet",
        ) from error


def _run(args: argparse.Namespace) -> None:
    source = make_source(args.source, args.split, args.limit)
    output = args.output.absolute()
    if args.print_source:
        print(source.describe())
    elif args.is_current:
        if not is_current(source, output):
            raise SystemExit(1)
    else:
        record = export(source, output)
        skipped = f" ({record['skipped_empty']:,} without text left out)" if record["skipped_empty"] else ""
        print(
            f"{output}: {record['documents']:,} documents{skipped}, {record['bytes']:,} bytes, from {record['source']}"
        )


def main() -> int:
    """Command line entry; returns the exit status."""
    directory = Path(os.environ.get("MEGATRON_DATA_DIR") or REPO_ROOT / "megatron_data")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = directory / "xsum_text.jsonl"
    parser.add_argument("--output", type=Path, default=output, metavar="JSONL", help="(default: %(default)s)")
    parser.add_argument(
        "--source",
        default=os.environ.get("XSUM_SOURCE", ""),
        metavar="FILE",
        help="local .jsonl or .parquet instead of the hub (default: XSUM_SOURCE)",
    )
    parser.add_argument(
        "--split",
        default=os.environ.get("XSUM_SPLIT") or "train",
        help="split of the hub's dataset: train, validation or test (default: XSUM_SPLIT, else train)",
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help="stop after N documents")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--print-source", action="store_true", help="print what the source is recorded as, and stop")
    mode.add_argument(
        "--is-current",
        action="store_true",
        help="only tell (status 0 or 1) whether the output is an export of the source",
    )
    args = parser.parse_args()
    return run_command(lambda: _run(args))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the libraries behind `datasets` now and then abort the interpreter while it shuts down, with all done.
    os._exit(status)
