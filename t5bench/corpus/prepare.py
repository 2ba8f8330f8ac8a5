"""XSum or the bundled sample as an indexed dataset.

`xsum_text_document.bin` holds the token ids of all documents one after the other, `.idx` where each begins and
`.meta.json` where they came from. Every document is one sequence, and its ids are exactly those of
the engine's own tool: for T5 those of transformers' slow T5Tokenizer, which ends each document with one `</s>`, for GPT
those of the tokenizer and one `<|endoftext|>`.
"""

import argparse
import fcntl
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from t5bench import SIGNALS, Interrupted, Problem, note, raise_on_signals
from t5bench.corpus.checksum import tokenizer_checksum
from t5bench.corpus.convert import convert_source
from t5bench.corpus.index import command_for, file_facts, read_record, write_record
from t5bench.corpus.source import Source, make_source, recorded_name
from t5bench.corpus.tokenizer import DocumentEncoder, copy_tokenizer, find_tokenizer, readable

TEXT, DATASET = "xsum_text", "xsum_text_document"
FEW = 1000  # documents that make a sample
BINARIES = [f"{DATASET}.bin", f"{DATASET}.idx"]
EXPORTS = [f"{TEXT}.jsonl", f"{TEXT}.meta.json"]
OUTPUTS = ["tokenizer", *EXPORTS, *BINARIES, f"{DATASET}.meta.json"]


def run(_: argparse.Namespace) -> int:
    """The command `python -m t5bench prepare-data`: all settings are in the environment. Raises Problem."""
    raise_on_signals()
    prepare(os.environ)
    return 0


def prepare(settings: Mapping[str, str]) -> None:
    """Exports, tokenises and publishes, as the settings say; without a tokenizer it only exports. Raises Problem."""
    directory, family = Path(settings["MEGATRON_DATA_DIR"]), settings.get("MODEL_FAMILY", "t5")
    limit, force = _count(settings, "XSUM_LIMIT"), settings.get("FORCE") == "1"
    source = make_source(settings.get("XSUM_SOURCE", ""), settings.get("XSUM_SPLIT") or "train", limit)
    workers = _count(settings, "WORKERS") or len(os.sched_getaffinity(0))
    tokenizer = settings.get("TOKENIZER_MODEL")
    if tokenizer and tokenizer.startswith("~"):
        tokenizer = str(Path(tokenizer).expanduser())
    if tokenizer and not force:
        check_replacement(directory, source, tokenizer)
    with staging(directory) as staged:
        encoder, rows, made_with = None, source, {}
        if tokenizer:
            # Tokenising with the copy shows that it is complete, and does so before the export, which may take long.
            found = find_tokenizer(tokenizer, family)
            with readable(tokenizer, family):
                copy_tokenizer(found, staged / "tokenizer")
                encoder = DocumentEncoder(staged / "tokenizer", family)
            if not encoder.exact:
                note("note: the fast implementations do not match this tokenizer, so its slower one is used")
            made_with = {
                "tokenizer": name_of(tokenizer),
                "tokenizer_type": encoder.kind,
                "tokenizer_checksum": tokenizer_checksum(staged / "tokenizer"),
                "dtype": encoder.dtype,
                "vocabulary": encoder.vocabulary,
            }
            if not force and is_current(source, directory):
                note(f"Using {TEXT}.jsonl, exported earlier from the same source (FORCE=1 exports again)")
                rows = Source(directory / f"{TEXT}.jsonl")
        note(f"{'Tokenising' if tokenizer else 'Exporting'}: {source.describe()}")
        states = source.state(), rows.state()
        job = [family, source.describe(), rows.describe(), states[1], made_with]
        counts = convert_source(rows, staged / TEXT, encoder, workers, job)
        if (source.state(), rows.state()) != states:
            raise Problem(f"{source.describe()} changed while it was read", "Run the command again once it is complete")
        record = {
            "source": source.describe(),
            "source_state": states[0],
            **made_with,
            **counts,
            "files": {name: file_facts(staged / name) for name in (f"{TEXT}.jsonl", *(BINARIES if tokenizer else ()))},
            "versions": {name: version(name) for name in ("sentencepiece", "tokenizers", "transformers")},
            "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        }
        for name in (TEXT, DATASET) if tokenizer else (TEXT,):
            write_record(staged / name, record)
        publish(staged, directory, OUTPUTS if tokenizer else EXPORTS)

    print(f"{directory}: {counts['documents']:,} documents" + (f", {counts['tokens']:,} tokens" if tokenizer else ""))
    if empty := counts["skipped_empty"]:
        print(f"{empty:,} empty document{'s were' if empty > 1 else ' was'} skipped.")
    if invalid := counts["skipped_invalid"]:
        print(f"{invalid:,} document{'s' if invalid > 1 else ''} with invalid text skipped.")
    if special := counts["special_text_documents"]:
        print(f"{special:,} documents contain the text of a special token, which became that token.")
    if tokenizer:
        preset = "MODEL_PRESET=tiny " if counts["documents"] < FEW else ""
        print(f"Next:\n  {command_for(directory, family, preset, 'run_megatron_t5_ddp.sh')}")


def _count(settings: Mapping[str, str], name: str) -> int | None:
    value = settings.get(name) or None
    if value and not (value.isdecimal() and int(value)):
        raise Problem(f"{name} must be a whole number of at least 1, found '{value}'", "Correct it, or unset it")
    return value and int(value)


def name_of(tokenizer: str) -> str:
    """The name of a tokenizer in records; GPT-2's is the same in every checkout of the engine."""
    return "GPT-2" if (Path(tokenizer) / "gpt2-vocab.json").exists() else recorded_name(tokenizer)


def is_current(source: Source, directory: Path) -> bool:
    """Whether the directory has a complete export of this source as it is now."""
    record, export = read_record(directory / TEXT), directory / f"{TEXT}.jsonl"
    same = (source.describe(), source.state()) == (record.get("source"), record.get("source_state"))
    return same and export.exists() and record["files"][export.name]["bytes"] == export.stat().st_size


def check_replacement(directory: Path, source: Source, tokenizer: str) -> None:
    """Raises Problem if the directory holds data from another source or tokenizer."""
    existing = [directory / name for name in (*BINARIES, f"{TEXT}.jsonl") if (directory / name).exists()]
    if not existing:
        return
    built = existing[0].name in BINARIES
    record = read_record(directory / (DATASET if built else TEXT))
    made, asked = [record.get("source", "an unknown source")], [source.describe()]
    if built:
        checksum = tokenizer_checksum(Path(tokenizer)) if Path(tokenizer).is_dir() else None
        made.append(record.get("tokenizer", "unknown"))
        asked.append(made[1] if checksum and checksum == record.get("tokenizer_checksum") else name_of(tokenizer))
    if made != asked:
        was, would_be = (" and the tokenizer ".join(parts) for parts in (made, asked))
        found = f"{existing[0]} was made from {was}, but this run would replace it with {would_be}"
        raise Problem(found, "Set FORCE=1 to replace it, or another MEGATRON_DATA_DIR to keep both")


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
            found = f"{owner.read()} is already preparing data in {directory}"
            raise Problem(found, "Wait for it, or stop it") from None
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
