"""Where documents come from: a local file, a directory or a pattern of files, or XSum on the Hugging Face hub.

A file has one JSON object per line, one array of JSON objects, or is Parquet. It is read block by block.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from t5bench import REPOSITORY, Problem, note
from t5bench.corpus.columns import (
    DEFAULT_NAMES,
    SAMPLE_ROWS,
    check_names,
    is_known,
    likely_column,
    other_text,
    setting,
    text_column,
)
from t5bench.corpus.tokenizer import hub, one_line
from t5bench.given_files import Repetition, without_repetition

XSUM = "EdinburghNLP/xsum"
# The dataset's main branch holds a loading script; the hub also keeps the same rows as Parquet.
PARQUET_REVISION = "refs/convert/parquet"
BESIDE_THE_TEXT = ("summary", "id")
SAMPLE = REPOSITORY / "megatron_data" / "sample"
BLOCK_BYTES = 1 << 20
BLOCK_ROWS = 512
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by how a file begins, whatever its name says
PARQUET = re.compile(r"\.(parquet|parq)$", re.IGNORECASE)
JSON = re.compile(r"\.(jsonl|ndjson|json)(\.gz|\.zst)?$", re.IGNORECASE)
KINDS = ".jsonl, .ndjson or .json (also with .gz or .zst), or .parquet"
REMEDY = (
    f"Set XSUM_SOURCE to a file that ends in {KINDS}, to a directory of such files, or to a pattern: 'data/*.jsonl'"
)
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
NOT_TEXT = "its text has half of a surrogate pair, which is not a character"


def recorded_name(name: str, kind: str = "") -> str:
    """A file or directory as records name it: `kind` and its absolute path, the bundled sample, or a hub's name."""
    path = Path(name).resolve()
    if SAMPLE.resolve() in path.parents:
        return "bundled sample"
    return f"{kind}{path}" if path.exists() else name


# ---- rows ----------------------------------------------------------------------------------------------------------


class Unusable(NamedTuple):
    """A row that cannot become a document."""

    reason: str
    """One sentence that names the file and the row."""
    remedy: str
    is_skipped: bool = False
    """Whether it is counted and left out; otherwise nothing is written."""


Row = dict[str, str] | Unusable


class Block(NamedTuple):
    """Some rows of a source, for one worker."""

    content: Any
    """Whole lines of JSON, a list of JSON objects, or a batch of a Parquet file."""
    source: str
    """The file's name in messages."""
    first: int
    """The number of the first row in the whole source, from 1."""
    done: float
    """The part of the source up to the end of this block."""
    first_in_file: int = 0
    """The number of the first row in its file, from 1; 0 if that is `first`."""
    column: str = ""
    """The column with the text, as the first rows of the file have it; "" if they have none that is known."""
    is_asked: bool = False
    """Whether the user named the column. Otherwise no row may have text in another one of a known name."""

    def rows(self) -> Iterator[Row]:
        """Text, summary and id of each row, without blank lines."""
        is_lines = isinstance(self.content, bytes)
        word = "line" if is_lines else "row"
        local = self.first_in_file or self.first
        try:
            rows = self._content()
        except ValueError as error:
            reason = f"row {local} or a later of {self.source} is not text in UTF-8 ({one_line(error)})"
            yield Unusable(reason, "Copy or download the file again")
            return
        for index, row in enumerate(rows):
            address = f"{word} {local + index} of {self.source}"
            if is_lines:
                if not row.strip():
                    continue
                row = _object(row, address, self.column)
            if isinstance(row, Mapping) and self.column and not self.is_asked:
                row = _alone(row, address, self.column)
            if isinstance(row, Unusable):
                yield row
            else:
                yield _article(row, self.first + index, address, self.column)

    def _content(self) -> Sequence[Any]:
        if isinstance(self.content, bytes):
            return self.content.split(b"\n")
        if isinstance(self.content, list):
            return self.content
        return self.content.to_pylist()


def _object(line: bytes, address: str, column: str) -> dict[str, Any] | Unusable:
    """A line's object. pandas and Python also write NaN, Infinity and half of a surrogate pair, which are no JSON."""
    try:
        # In JSON, other letters may be written in two ways.
        if line.count(b'"%s"' % column.encode()) > 1 or not column.isascii():
            json.loads(line, object_pairs_hook=without_repetition)
        return msgspec.json.decode(line, type=dict)
    except Repetition as error:
        return Unusable(f"{address} {error}", "Keep one of them, or give the other another name")
    except (ValueError, RecursionError) as error:
        reason = f"{address} is not a JSON object in UTF-8 ({one_line(error)})"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else Unusable(reason, "Correct or remove that line")


def _alone(row: Mapping[str, Any], address: str, column: str) -> Mapping[str, Any] | Unusable:
    """The row, if it has text in no other column that may be meant."""
    other = other_text(row, column)
    if not other:
        return row
    reason = f'{address} has text in "{other}", but the first rows of the file in "{column}"'
    return Unusable(reason, f"Name the column with the text: {setting(other)}, or {setting(column)}")


def _article(row: Any, number: int, address: str, column: str) -> Row:
    """number: of the row in the whole source, which identifies a document without an id."""
    if not isinstance(row, dict):
        return Unusable(f"{address} is not a JSON object", "Correct or remove it")
    known = [column] if column else [name for name in DEFAULT_NAMES if name in row]
    if len(known) != 1 or known[0] not in row:
        columns = ", ".join(row) or "nothing"
        wanted = f'no "{column}"' if column else 'neither "document" nor "text"'
        if len(known) > 1:
            wanted = 'both "document" and "text"'
        remedy = 'Write it with one text per row, in a column called "text"'
        if not column and (likely := likely_column(row)):
            remedy = f"Name the column with the text: {setting(likely)}"
        return Unusable(f"{address} has {wanted}; it has {columns}", remedy)
    key = known[0]
    text = row[key]
    if isinstance(text, float) and math.isnan(text):  # pandas writes missing text as NaN
        text = None
    if text is not None and not isinstance(text, str):
        reason = f'{address} has no string as "{key}", but {type(text).__name__}'
        return Unusable(reason, "Correct or remove it")
    if text and not _is_text(text):
        return Unusable(f"{address}: {NOT_TEXT}", "Correct or remove it", is_skipped=True)
    summary = row.get("summary")
    if not isinstance(summary, str) or not _is_text(summary):
        summary = ""
    identity = number if row.get("id") is None else row["id"]
    readable_identity = str(identity).encode(errors="replace").decode()
    return {"text": text or "", "summary": summary, "id": readable_identity}


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- sources -------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Where articles come from."""

    path: Path | None
    """A local file, a directory or a pattern; None for the hub's dataset."""
    split: str = ""
    """Of the hub's dataset."""
    limit: int | None = None
    files: tuple[Path, ...] = ()
    """The files of a directory or a pattern, in order."""
    column: str = ""
    """The column with the text, as the user named it."""

    @property
    def parts(self) -> tuple[Path, ...]:
        """The local files."""
        if self.files:
            return self.files
        return (self.path,) if self.path else ()

    def describe(self) -> str:
        """One line that is the same for the same source, as recorded and compared."""
        if self.path is None:
            name = f"{XSUM} {self.split} from the Hugging Face hub"
        elif self.files:
            name = f"{len(self.files)} files {self.path.absolute()}"
        else:
            name = recorded_name(str(self.path), "file ")
        if self.column:
            name += f", column {self.column}"
        return name if self.limit is None else f"{name}, first {self.limit} documents"

    def state(self) -> str | None:
        """Something that changes when a local file does; the hub's dataset does not change."""
        if self.path is None:
            return None
        states = [path.stat() for path in self.parts]
        if not self.files:
            return f"{states[0].st_size} bytes, modified {states[0].st_mtime_ns}"
        entries = []
        for path, state in zip(self.parts, states, strict=True):
            entries.append((str(path), state.st_size, state.st_mtime_ns))
        digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
        total = sum(state.st_size for state in states)
        return f"{len(states)} files, {total} bytes, names and times {digest[:16]}"

    def blocks(self) -> Iterator[Block]:
        """The source's blocks. Raises Problem for a damaged file, and for a hub that does not answer."""
        if self.path is None:
            yield from _parquet_blocks(_from_hub(self.split), f"{XSUM} {self.split}", self.column)
            return
        sizes = [path.stat().st_size for path in self.parts]
        all_bytes = max(1, sum(sizes))
        bytes_before = 0
        rows_before = 0
        for path, size in zip(self.parts, sizes, strict=True):
            is_parquet = PARQUET.search(path.name)
            if is_parquet:
                blocks = _parquet_blocks([path], str(path), self.column)
            else:
                blocks = _json_blocks(path, self.column)
            rows_in_file = 0
            for block in blocks:
                yield Block(
                    content=block.content,
                    source=block.source,
                    first=rows_before + block.first,
                    done=(bytes_before + block.done * size) / all_bytes,
                    first_in_file=block.first,
                    column=block.column,
                    is_asked=bool(self.column),
                )
                rows_in_file = block.first - 1 + _length(block)
            bytes_before += size
            rows_before += rows_in_file


def _length(block: Block) -> int:
    """The number of rows, blank lines included."""
    if isinstance(block.content, bytes):
        ends = block.content.count(b"\n")
        return ends if block.content.endswith(b"\n") else ends + 1
    return len(block.content)


def make_source(path: str, split: str, limit: int | None, column: str = "") -> Source:
    """The source in the settings; an empty path means the hub. Raises Problem for an unsuitable one."""
    if not path:
        return Source(None, split, limit, column=column)
    named = Path(path).expanduser()
    if named.is_file():
        if not _has_known_suffix(named):
            raise Problem(f"{path} does not have the name of a JSONL or Parquet file", REMEDY)
        return Source(named, split, limit, column=column)
    if named.is_dir():
        files = [file for file in named.rglob("*") if _is_data(file, named)]
        if not files:
            raise Problem(f"the directory {path} has no file that ends in {KINDS}", REMEDY)
    else:
        files = _matching(named, path)
    return Source(named, split, limit, _checked(sorted(files), path), column)


def _has_known_suffix(file: Path) -> bool:
    return bool(PARQUET.search(file.name) or JSON.search(file.name))


def _matching(pattern: Path, named: str) -> list[Path]:
    """The files that a pattern matches. Raises Problem if there are none, or unsuitable ones."""
    matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]  # noqa: PTH207 - perhaps absolute
    files = [file for file in matches if file.is_file()]
    for file in files:
        if not _has_known_suffix(file):
            raise Problem(f"{file} does not have the name of a JSONL or Parquet file", REMEDY)
    if not files:
        is_pattern = glob.has_magic(named)
        raise Problem(f"no file matches {named}" if is_pattern else f"there is no file {named}", REMEDY)
    return files


def _is_data(file: Path, directory: Path) -> bool:
    """Whether a file of a directory is meant: others, such as `.part.crc` and `_SUCCESS`, belong to the program that
    wrote it."""
    inside = file.relative_to(directory).parts
    is_hidden = any(part.startswith((".", "_")) for part in inside)
    return file.is_file() and not is_hidden and _has_known_suffix(file)


def _checked(files: list[Path], named: str) -> tuple[Path, ...]:
    """The files. Raises Problem if they seem to hold the same documents twice."""
    kinds = {bool(PARQUET.search(file.name)) for file in files}
    if len(kinds) > 1:
        remedy = f"Name one kind, for example '{named.rstrip('/')}/*.parquet'"
        raise Problem(f"{named} has both JSON and Parquet files, which may be the same documents twice", remedy)
    plain: dict[str, Path] = {}
    for file in files:
        name = JSON.sub("", str(file))
        other = plain.setdefault(name, file)
        if other != file:
            remedy = "Remove one of them, or name a pattern that matches one"
            raise Problem(f"{other} and {file} seem to be the same documents twice", remedy)
    return tuple(files)


# ---- files ---------------------------------------------------------------------------------------------------------


def _json_blocks(path: Path, asked: str) -> Iterator[Block]:
    """A file's blocks of lines, or of an array's objects, numbered from 1. asked: the column of the text, or ""."""
    size = max(1, path.stat().st_size)
    with path.open("rb") as file:
        stream: Any = file
        try:
            begins = file.read(max(map(len, COMPRESSED)))
            file.seek(0)
            compressed = next((kind for sign, kind in COMPRESSED.items() if begins.startswith(sign)), "")
            if compressed:
                import pyarrow

                stream = io.BufferedReader(pyarrow.CompressedInputStream(file, compressed), BLOCK_BYTES)
            start = stream.read(BLOCK_BYTES)
            start = _without_mark(start, path)
            if start.lstrip()[:1] == b"[":
                yield from _array_blocks(start + stream.read(), path, asked)
                return
            first = 1
            column = None
            while start:
                content = start if start.endswith(b"\n") else start + stream.readline()
                if column is None:
                    column = text_column(_first_objects(content), asked, str(path))
                yield Block(content, str(path), first, file.tell() / size, column=column)
                first += content.count(b"\n")
                start = stream.read(BLOCK_BYTES)
        except OSError as error:
            raise Problem(f"{path} is damaged ({one_line(error)})", "Copy or download it again") from error


def _without_mark(start: bytes, path: Path) -> bytes:
    """The beginning of a file without a byte order mark. Raises Problem for another encoding than UTF-8."""
    encoding = ""
    sign = "as its byte order mark says"
    if start.startswith(UTF32):
        encoding = "UTF-32"
    elif start.startswith(UTF16):
        encoding = "UTF-16"
    elif len(start) > 3 and start[:4].count(0) == 2:
        encoding = "UTF-16"
        sign = "as its zero bytes show"
    if encoding:
        remedy = f"Convert it: iconv -f {encoding} -t UTF-8 IN >OUT"
        raise Problem(f"{path} is in {encoding}, {sign}, and must be in UTF-8", remedy)
    if start.startswith(codecs.BOM_UTF8):
        note(f"note: {path} begins with a byte order mark (BOM), which is skipped")
        return start.removeprefix(codecs.BOM_UTF8)
    return start


def _first_objects(lines: bytes) -> list[dict[str, Any]]:
    """Of lines of JSON, without those that are none, which are named when they are read."""
    objects = []
    for line in lines.split(b"\n", SAMPLE_ROWS)[:SAMPLE_ROWS]:
        with contextlib.suppress(ValueError, RecursionError):
            objects.append(json.loads(line))
    return objects


def _array_blocks(content: bytes, path: Path, asked: str) -> Iterator[Block]:
    """The objects of a file that is one JSON array, which must fit into memory."""
    try:
        rows = json.loads(content, object_pairs_hook=without_repetition)
    except Repetition as error:
        raise Problem(f"an object in {path} {error}", "Keep one of them, or give the other another name") from None
    except (ValueError, RecursionError) as error:
        problem = f"{path} begins like a JSON array but is not one ({one_line(error)})"
        raise Problem(problem, "Correct it, or write one object per line") from None
    column = text_column(rows, asked, str(path))
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows[start : start + BLOCK_ROWS]
        yield Block(part, str(path), start + 1, (start + len(part)) / len(rows), column=column)


def _parquet_blocks(paths: list[Path], name: str, asked: str) -> Iterator[Block]:
    import pyarrow
    import pyarrow.parquet

    try:
        files = [pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) for path in paths]
        first = 1
        rows = sum(file.metadata.num_rows for file in files)
        for file in files:
            names = file.schema_arrow.names
            check_names(names, asked, name)
            column = text_column(_first_rows(file), asked, name)
            wanted = {column, *BESIDE_THE_TEXT}
            read = [each for each in names if each in wanted or (is_known(each) and not asked)] if column else None
            for batch in file.iter_batches(BLOCK_ROWS, columns=read):
                yield Block(batch, name, first, (first + batch.num_rows - 1) / rows, column=column)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"{paths[0]} is damaged or not a Parquet file ({one_line(error)})"
        raise Problem(problem, "Copy or download it again") from error


def _first_rows(file: Any) -> list[dict[str, Any]]:
    """Of a Parquet file, as far as they may be text: images and vectors can be large."""
    import pyarrow

    columns = []
    for field in file.schema_arrow:
        is_number = pyarrow.types.is_primitive(field.type)
        is_large = pyarrow.types.is_fixed_size_list(field.type) or pyarrow.types.is_binary(field.type)
        if is_known(field.name) or not (is_number or is_large):
            columns.append(field.name)
    batch = next(file.iter_batches(SAMPLE_ROWS, columns=columns), None)
    try:
        return batch.to_pylist() if batch else []
    except UnicodeDecodeError:  # which is told where the rows are read
        return []


def _from_hub(split: str) -> list[Path]:
    """The Parquet files of XSum's split, downloaded or from the hub's cache. Raises Problem."""
    remedy = (
        "Check the network (HF_ENDPOINT, proxies), "
        "or download XSum elsewhere, copy it here and set XSUM_SOURCE=/path/to/xsum.parquet"
    )
    of_split = re.compile(rf"\b{re.escape(split)}/[^/]*\.parquet$")
    paths: list[Path] = []
    with hub(XSUM, remedy) as client:
        info = client.HfApi().dataset_info(XSUM, revision=PARQUET_REVISION, timeout=30)
        for name in sorted(file.rfilename for file in info.siblings):
            if of_split.search(name):
                # One after the other: the threads of snapshot_download cannot be interrupted.
                path = client.hf_hub_download(XSUM, name, repo_type="dataset", revision=info.sha)
                paths.append(Path(path))
    if not paths:
        raise Problem(f"{XSUM} has no split '{split}'", "XSUM_SPLIT is train, validation or test")
    return paths
