"""XSum or the bundled sample as an indexed dataset.

`xsum_text_document.bin` holds the token ids of all documents one after the other, `.idx` where each begins and
`.meta.json` where they came from. Every document is one sequence, and its ids are exactly those of
the engine's own tool: for T5 those of transformers' slow T5Tokenizer, which ends each document with one `</s>`, for GPT
those of the tokenizer and one `<|endoftext|>`.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from t5bench import SIGNALS, Interrupted, Problem, note, raise_on_signals
from t5bench.corpus.checksum import tokenizer_checksum
from t5bench.corpus.columns import first_words
from t5bench.corpus.convert import convert_source
from t5bench.corpus.index import command_for, file_facts, read_record, write_record
from t5bench.corpus.source import Source, make_source, recorded_name
from t5bench.corpus.tokenizer import DocumentEncoder, copy_tokenizer, find_tokenizer, readable

TEXT = "xsum_text"
DATASET = "xsum_text_document"
FEW = 1000  # documents that make a sample
BINARIES = [f"{DATASET}.bin", f"{DATASET}.idx"]
EXPORTS = [f"{TEXT}.jsonl", f"{TEXT}.meta.json"]
OUTPUTS = ["tokenizer", *EXPORTS, *BINARIES, f"{DATASET}.meta.json"]

Record = Mapping[str, Any]  # where the files came from


def run(_: argparse.Namespace) -> int:
    """The command `python -m t5bench prepare-data`: all settings are in the environment. Raises Problem."""
    raise_on_signals()
    if "MEGATRON_DATA_DIR" not in os.environ:
        script = "bash scripts/prepare_xsum_megatron.sh"
        raise Problem("MEGATRON_DATA_DIR is not set, which the script sets that calls this", f"Run: {script}")
    prepare(os.environ)
    return 0


@dataclass(frozen=True)
class Preparation:
    """What the settings ask for."""

    directory: Path
    """Of the prepared data."""
    family: str
    """t5 or gpt."""
    source: Source
    tokenizer: str
    """A directory or a name on the hub; "" exports without tokenising."""
    workers: int
    force: bool
    """Whether to replace other data, and to export again what was exported before."""
    has_model: bool
    """Whether MODEL says what is trained on them."""

    @classmethod
    def of_settings(cls, settings: Mapping[str, str]) -> "Preparation":
        """Raises Problem."""
        limit = _count(settings, "XSUM_LIMIT")
        split = settings.get("XSUM_SPLIT") or "train"
        tokenizer = settings.get("TOKENIZER_MODEL") or ""
        if tokenizer.startswith("~"):
            tokenizer = str(Path(tokenizer).expanduser())
        return cls(
            directory=Path(settings["MEGATRON_DATA_DIR"]),
            family=settings.get("MODEL_FAMILY", "t5"),
            source=make_source(settings.get("XSUM_SOURCE", ""), split, limit, settings.get("TEXT_COLUMN", "")),
            tokenizer=tokenizer,
            workers=_count(settings, "WORKERS") or len(os.sched_getaffinity(0)),
            force=settings.get("FORCE") == "1",
            has_model=bool(settings.get("MODEL")),
        )


def prepare(settings: Mapping[str, str]) -> None:
    """Exports, tokenises and publishes, as the settings say; without a tokenizer it only exports. Raises Problem."""
    asked = Preparation.of_settings(settings)
    if asked.tokenizer and not asked.force:
        check_replacement(asked.directory, asked.source, asked.tokenizer)
    with staging(asked.directory) as staged:
        if asked.tokenizer:
            record = _tokenise(asked, staged)
            publish(staged, asked.directory, OUTPUTS)
        else:
            record = _export(asked, staged)
            publish(staged, asked.directory, EXPORTS)
    _tell(asked, record)


def _export(asked: Preparation, staged: Path) -> Record:
    """Writes the documents as JSONL."""
    note(f"Exporting: {asked.source.describe()}")
    record = _convert(asked, asked.source, staged, None, {})
    write_record(staged / TEXT, record)
    return record


def _tokenise(asked: Preparation, staged: Path) -> Record:
    """Writes the documents as JSONL and as token ids."""
    # Tokenising with the copy shows that it is complete, and does so before the export, which may take long.
    files = find_tokenizer(asked.tokenizer, asked.family)
    with readable(asked.tokenizer, asked.family):
        copy_tokenizer(files, staged / "tokenizer")
        encoder = DocumentEncoder(staged / "tokenizer", asked.family)
    if not encoder.exact:
        note("note: the fast implementations do not match this tokenizer, so its slower one is used")
    made_with = {
        "tokenizer": name_of(asked.tokenizer),
        "tokenizer_type": encoder.kind,
        "tokenizer_checksum": tokenizer_checksum(staged / "tokenizer"),
        "dtype": encoder.dtype,
        "vocabulary": encoder.vocabulary,
    }
    rows = asked.source
    if not asked.force and is_current(asked.source, asked.directory):
        note(f"Using {TEXT}.jsonl, exported earlier from the same source (FORCE=1 exports again)")
        rows = Source(asked.directory / f"{TEXT}.jsonl", column="text")
    note(f"Tokenising: {asked.source.describe()}")
    record = _convert(asked, rows, staged, encoder, made_with)
    write_record(staged / TEXT, record)
    write_record(staged / DATASET, record)
    return record


def _convert(
    asked: Preparation,
    rows: Source,
    staged: Path,
    encoder: DocumentEncoder | None,
    made_with: Record,
) -> Record:
    """Converts the documents of `rows`: the source itself, or what was exported from it before. Raises Problem."""
    source = asked.source
    source_state = source.state()
    rows_state = rows.state()
    job = [asked.family, source.describe(), rows.describe(), rows_state, made_with]
    counts = convert_source(rows, staged / TEXT, encoder, asked.workers, job)
    if source.state() != source_state or rows.state() != rows_state:
        problem = f"{source.describe()} changed while it was read"
        raise Problem(problem, "Run the command again once it is complete")
    files = [f"{TEXT}.jsonl"]
    if encoder:
        files += BINARIES
    return {
        "source": source.describe(),
        "source_state": source_state,
        **made_with,
        **counts,
        "files": {name: file_facts(staged / name) for name in files},
        "versions": {name: version(name) for name in ("sentencepiece", "tokenizers", "transformers")},
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }


def _tell(asked: Preparation, record: Record) -> None:
    """What was prepared, and what to run next."""
    documents = record["documents"]
    tokens = f", {record['tokens']:,} tokens" if asked.tokenizer else ""
    print(f"{asked.directory}: {documents:,} documents{tokens}")
    with (asked.directory / f"{TEXT}.jsonl").open("rb") as lines:
        first = json.loads(lines.readline())["text"]
    print(f'The first document begins: "{first_words(first)}"')
    empty = record["skipped_empty"]
    if empty:
        print(f"{empty:,} empty document{'s were' if empty > 1 else ' was'} skipped.")
    invalid = record.get("skipped_invalid", 0)
    if invalid:
        print(f"{invalid:,} document{'s' if invalid > 1 else ''} with invalid text skipped.")
    special = record.get("special_text_documents", 0)
    if special:
        print(f"{special:,} documents contain the text of a special token, which became the token itself.")
    if asked.tokenizer:
        preset = "MODEL_PRESET=tiny " if documents < FEW and not asked.has_model else ""
        command = command_for(asked.directory, asked.family, preset, "run_megatron_t5_ddp.sh")
        print(f"Next{', with the same MODEL' if asked.has_model else ''}:\n  {command}")


def _count(settings: Mapping[str, str], name: str) -> int | None:
    value = settings.get(name)
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        problem = f"{name} must be a whole number of at least 1, found '{value}'"
        raise Problem(problem, "Correct it, or unset it")
    return int(value)


def name_of(tokenizer: str) -> str:
    """The name of a tokenizer in records; GPT-2's is the same in every checkout of the engine."""
    return "GPT-2" if (Path(tokenizer) / "gpt2-vocab.json").exists() else recorded_name(tokenizer)


def is_current(source: Source, directory: Path) -> bool:
    """Whether the directory has a complete export of this source as it is now."""
    record = read_record(directory / TEXT)
    if record.get("source") != source.describe() or record.get("source_state") != source.state():
        return False
    export = directory / f"{TEXT}.jsonl"
    return export.exists() and export.stat().st_size == record["files"][export.name]["bytes"]


def check_replacement(directory: Path, source: Source, tokenizer: str) -> None:
    """Raises Problem if the directory holds data from another source or tokenizer."""
    existing = [directory / name for name in (*BINARIES, f"{TEXT}.jsonl") if (directory / name).exists()]
    if not existing:
        return
    has_tokens = existing[0].name in BINARIES
    record = read_record(directory / (DATASET if has_tokens else TEXT))
    made_from = record.get("source", "an unknown source")
    asked_for = source.describe()
    if has_tokens:
        recorded_tokenizer = record.get("tokenizer", "unknown")
        asked_tokenizer = name_of(tokenizer)
        if Path(tokenizer).is_dir() and tokenizer_checksum(Path(tokenizer)) == record.get("tokenizer_checksum"):
            asked_tokenizer = recorded_tokenizer  # the same one under another name
        made_from += f" and the tokenizer {recorded_tokenizer}"
        asked_for += f" and the tokenizer {asked_tokenizer}"
    if made_from != asked_for:
        problem = f"{existing[0]} was made from {made_from}, but this run would replace it with {asked_for}"
        raise Problem(problem, "Set FORCE=1 to replace it, or another MEGATRON_DATA_DIR to keep both")


@contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """A private directory inside `directory`, removed afterwards unless the run was interrupted.

    Raises Problem while another run has it.
    """
    staged = directory / ".prepare"
    staged.mkdir(parents=True, exist_ok=True)
    with (staged / "owner").open("a+") as owner:
        try:
            # The system releases it when this process ends, in whatever way.
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner.seek(0)
            problem = f"{owner.read()} is already preparing data in {directory}"
            raise Problem(problem, "Wait for it, or stop it") from None
        owner.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=owner, flush=True)
        try:
            yield staged
        except Interrupted:
            note(f"interrupted: nothing in {directory} was changed; the same command continues where it stopped")
            raise
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        shutil.rmtree(staged)


def publish(staged: Path, directory: Path, names: list[str]) -> None:
    """Moves the staged files to their places; the files that they replace are removed with the staging directory."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The engine names its index maps after the run's settings, not after the data, and would use them with other data.
    if BINARIES[0] in names:
        for outdated in directory.glob(f"{DATASET}_*indexmap*.npy"):
            outdated.unlink()
    os.sync()
    for name in names:
        if (staged / name).is_dir() and (directory / name).exists():
            (directory / name).rename(staged / "replaced")
        with suppress(FileNotFoundError):
            (staged / name).rename(directory / name)
