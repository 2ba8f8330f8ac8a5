"""Where documents come from: a local JSONL or Parquet file, or XSum on the Hugging Face hub, block by block."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from t5bench import Problem
from t5bench.corpus import common
from t5bench.corpus.tokenizer import hub

XSUM = "EdinburghNLP/xsum"
# The dataset's main branch holds a loading script; the hub also keeps the same rows as Parquet.
PARQUET_REVISION = "refs/convert/parquet"
COLUMNS = ("document", "summary", "id", "text")
BLOCK_BYTES, BLOCK_ROWS = 1 << 20, 512
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
REMEDY = "Set XSUM_SOURCE to a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file with document and summary, or with text"


class Block(NamedTuple):
    """Some rows of a source, for one worker: whole lines of JSON, or a batch of a Parquet file.

    place: how messages name a row, with {} for its number. first: the number of the first row, from 1. done: the part
    of the source up to the end of this block.
    """

    content: Any
    place: str
    first: int
    done: float

    def articles(self) -> Iterator[dict[str, str]]:
        """Text, summary and id of each row, without blank lines. Raises Problem, which names a bad row."""
        if isinstance(self.content, bytes):
            lines = enumerate(self.content.split(b"\n"), self.first)
            rows = ((number, _object(line, self.place.format(number))) for number, line in lines if line.strip())
        else:
            try:
                rows = enumerate(self.content.to_pylist(), self.first)
            except ValueError as error:
                found = (
                    f"{self.place.format(f'{self.first} or a later')} is not text in UTF-8 ({common.one_line(error)})"
                )
                raise Problem(found, "Copy or download the file again") from error
        for number, row in rows:
            yield _article(row, number, self.place.format(number))


class Source(NamedTuple):
    """Where articles come from: a local file (`path`), or the hub's dataset (`split`)."""

    path: Path | None
    split: str = ""
    limit: int | None = None

    def describe(self) -> str:
        """One line that is the same for the same source, as recorded and compared."""
        dataset = f"{XSUM} {self.split} from the Hugging Face hub"
        name = common.recorded_name(str(self.path), "file ") if self.path else dataset
        return name if self.limit is None else f"{name}, first {self.limit} documents"

    def state(self) -> str | None:
        """Something that changes when a local file does; the hub's dataset does not change."""
        found = self.path and self.path.stat()
        return found and f"{found.st_size} bytes, modified {found.st_mtime_ns}"

    def blocks(self) -> Iterator[Block]:
        """The source's blocks. Raises Problem for a damaged file, and for a hub that does not answer."""
        if self.path is None:
            return _parquet_blocks(_from_hub(self.split), f"row {{}} of {XSUM} {self.split}")
        name = str(self.path).replace("{", "{{").replace("}", "}}")
        if self.path.suffix == ".parquet":
            return _parquet_blocks([self.path], f"row {{}} of {name}")
        return _jsonl_blocks(self.path, f"line {{}} of {name}")


def make_source(path: str, split: str, limit: int | None) -> Source:
    """The source in the settings; an empty path means the hub. Raises Problem for an unsuitable file."""
    if path and not Path(path).is_file():
        raise Problem(f"there is no file {path}", REMEDY)
    if path and not re.search(r"\.(parquet|jsonl(\.gz|\.zst)?)$", path):
        raise Problem(f"{path} does not have the name of a JSONL or Parquet file", REMEDY)
    return Source(Path(path) if path else None, split, limit)


def _jsonl_blocks(path: Path, place: str) -> Iterator[Block]:
    first, size, stream = 1, path.stat().st_size, path.open("rb")
    with stream as file:
        if path.suffix in COMPRESSED:
            import pyarrow

            stream = io.BufferedReader(pyarrow.CompressedInputStream(file, COMPRESSED[path.suffix]), BLOCK_BYTES)
        try:
            while content := stream.read(BLOCK_BYTES):
                content += stream.readline()
                yield Block(content, place, first, file.tell() / size)
                first += content.count(b"\n")
        except OSError as error:
            raise Problem(f"{path} is damaged ({common.one_line(error)})", "Copy or download it again") from error


def _parquet_blocks(paths: list[Path], place: str) -> Iterator[Block]:
    import pyarrow
    import pyarrow.parquet

    try:
        files, first = [pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) for path in paths], 1
        rows = sum(file.metadata.num_rows for file in files)
        for file in files:
            columns = [name for name in file.schema_arrow.names if name in COLUMNS] or None
            for batch in file.iter_batches(BLOCK_ROWS, columns=columns):
                yield Block(batch, place, first, (first + batch.num_rows - 1) / rows)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        reason = f"is damaged or not a Parquet file ({common.one_line(error)})"
        raise Problem(f"{paths[0]} {reason}", "Copy or download it again") from error


def _from_hub(split: str) -> list[Path]:
    remedy = "Check the network (HF_ENDPOINT, proxies), or download XSum elsewhere, copy it here and set "
    with hub(XSUM, f"{remedy}XSUM_SOURCE=/path/to/xsum.parquet") as client:
        api = client.HfApi()
        try:
            found = api.dataset_info(XSUM, revision=PARQUET_REVISION, timeout=30)
        except client.errors.RevisionNotFoundError:
            # If the main branch becomes Parquet one day, this loads it.
            found = api.dataset_info(XSUM, timeout=30)
        names = sorted(file.rfilename for file in found.siblings or [])
        names = [name for name in names if re.search(rf"\b{re.escape(split)}[/-][^/]*\.parquet$", name)]
        # One after the other: the threads of snapshot_download cannot be interrupted.
        paths = [Path(api.hf_hub_download(XSUM, name, repo_type="dataset", revision=found.sha)) for name in names]
    if not paths:
        raise Problem(f"{XSUM} has no split '{split}'", "XSUM_SPLIT is train, validation or test")
    return paths


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict)
    except (ValueError, RecursionError):
        # Python's reader also accepts a few invalid values, such as NaN, and explains what is wrong with the rest.
        try:
            found = json.loads(line.decode())
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is not text
            if isinstance(found, dict):
                return found
            problem = "is not a JSON object"
        except (ValueError, RecursionError) as error:
            problem = f"is not valid JSON in UTF-8 ({common.one_line(error)})"
        raise Problem(f"{place} {problem}", "Correct or remove that line") from None


def _article(row: dict[str, Any], number: int, place: str) -> dict[str, str]:
    key, columns = ("text", ["text"]) if "text" in row and "document" not in row else ("document", COLUMNS[:2])
    if missing := [column for column in columns if column not in row]:
        found = f'{place} has no "{missing[0]}"; it has {", ".join(row) or "nothing"}'
        raise Problem(found, "Rename the source's columns to document and summary, or to text")
    text, summary = row[key], row.get("summary")
    if text is not None and not isinstance(text, str):
        raise Problem(f'{place} has no string as "{key}", but {type(text).__name__}', "Correct or remove it")
    identity = number if row.get("id") is None else row["id"]
    return {"text": text or "", "summary": summary if isinstance(summary, str) else "", "id": str(identity)}
