"""XSum or the bundled sample as an indexed dataset: what scripts/prepare_xsum_megatron.sh runs, with its settings."""

import filecmp
import os
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from t5bench import REPOSITORY, Problem
from t5bench.corpus import common
from t5bench.corpus.build import build
from t5bench.corpus.checksum import tokenizer_checksum
from t5bench.corpus.export import Source, export, is_current, make_source
from t5bench.corpus.tokenizer import DocumentEncoder, copy_tokenizer, find_tokenizer

TEXT, DATASET = "xsum_text", "xsum_text_document"
DEFAULT_WORKERS = min(8, len(os.sched_getaffinity(0)))
BINARIES = [f"{DATASET}.bin", f"{DATASET}.idx"]
OUTPUTS = ["tokenizer", f"{TEXT}.jsonl", f"{TEXT}.meta.json", *BINARIES, f"{DATASET}.meta.json"]


def prepare(settings: Mapping[str, str]) -> None:
    """Export, tokenise and publish, as the script's settings say. Raises Problem."""
    directory, tokenizer = Path(settings["MEGATRON_DATA_DIR"]), settings["TOKENIZER_MODEL"]
    source = make_source(settings["XSUM_SOURCE"], settings["XSUM_SPLIT"], int(settings["XSUM_LIMIT"] or 0) or None)
    force = settings["FORCE"] == "1"
    if not force:
        check_replacement(directory, source, tokenizer)
    with staging(directory) as staged:
        # The copy itself tokenises, so that it is known to be complete; before the export, which may take long.
        copy_tokenizer(find_tokenizer(tokenizer), staged / "tokenizer")
        encoder = DocumentEncoder(staged / "tokenizer", int(settings["WORKERS"] or DEFAULT_WORKERS))
        articles = directory / f"{TEXT}.jsonl"
        if not force and is_current(source, articles):
            common.note(f"Using {articles}, exported earlier from the same source (FORCE=1 exports again)")
        else:
            common.note(f"Exporting: {source.describe()}")
            articles = staged / f"{TEXT}.jsonl"
            export(source, articles)
        common.note(f"Tokenising with {tokenizer}")
        build(articles, staged / DATASET, encoder, tokenizer)
        publish(staged, directory)
    tell_next_command(directory, Path(settings["CALLED_FROM"]), sample=settings["SAMPLE"] == "1")


def check_replacement(directory: Path, source: Source, tokenizer: str) -> None:
    """Raise Problem when the directory holds data that were not made from this source and with this tokenizer."""
    existing = [directory / name for name in (*BINARIES, f"{TEXT}.jsonl") if (directory / name).exists()]
    if not existing:
        return
    built = existing[0].name in BINARIES
    record, name = common.read_record(directory / (DATASET if built else TEXT)), common.recorded_name(tokenizer)
    is_copy = Path(tokenizer).is_dir() and record.get("tokenizer_checksum") == tokenizer_checksum(Path(tokenizer))
    if not record:
        problem = "exists and nothing beside it says where it came from"
    elif record["source"] != source.describe():
        problem = f"was made from {record['source']}, and this run would replace it by {source.describe()}"
    elif built and record.get("tokenizer") != name and not is_copy:
        problem = f"was made with the tokenizer {record.get('tokenizer')}, and this run would use {name}"
    else:
        return
    raise Problem(f"{existing[0]} {problem}", "Set FORCE=1 to replace it, or MEGATRON_DATA_DIR to keep both")


@contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """A directory inside `directory` for this run alone, gone afterwards. Raises Problem while another run has it.

    It is the lock as well: it gets its name by renaming, with its owner inside, which only one run at a time can do.
    """
    created = not directory.is_dir()
    directory.mkdir(parents=True, exist_ok=True)
    mine, staged = Path(tempfile.mkdtemp(prefix=".prepare-", dir=directory)), directory / ".prepare"
    try:
        (mine / "owner").write_text(f"{os.getpid()} {socket.gethostname()}\n")
        try:
            mine.rename(staged)
        except OSError:
            refuse_living_owner(staged)
            shutil.rmtree(staged)
            mine.rename(staged)
        mine = staged
        yield staged
    except KeyboardInterrupt:
        common.note(f"interrupted: nothing in {directory} was changed")
        raise
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        if created:
            with suppress(OSError):
                directory.rmdir()


def refuse_living_owner(staged: Path) -> None:
    """Raise Problem unless a staging directory is what remains of a run that was killed on this host."""
    with suppress(FileNotFoundError, ProcessLookupError):
        pid, host = (staged / "owner").read_text().split()
        if host == socket.gethostname():
            with suppress(PermissionError):  # it runs for another user
                os.kill(int(pid), 0)
        remedy = f"Wait for it, or end it; if it no longer runs, remove {staged}"
        raise Problem(f"process {pid} on {host} is preparing data in {staged.parent}", remedy)


def publish(staged: Path, directory: Path) -> None:
    """Give the staged files their places; what they replace goes with the staging directory."""
    for number in common.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The engine names its index maps after the run's settings, not after the data, and would use them with other data.
    if filecmp.cmpfiles(staged, directory, BINARIES, shallow=False)[0] != BINARIES:
        for outdated in directory.glob(f"{DATASET}_*indexmap*.npy"):
            outdated.unlink()
    with suppress(FileNotFoundError):
        (directory / "tokenizer").rename(staged / "tokenizer.replaced")
    for name in OUTPUTS:
        with suppress(FileNotFoundError):
            (staged / name).rename(directory / name)


def tell_next_command(directory: Path, called_from: Path, *, sample: bool) -> None:
    launcher = "scripts/run_megatron_t5_ddp.sh"
    if not called_from.samefile(REPOSITORY):
        launcher = shlex.quote(f"{REPOSITORY}/{launcher}")
    quoted = shlex.quote(str(directory))
    words = "" if directory == REPOSITORY / "megatron_data" else f"MEGATRON_DATA_DIR={quoted} "
    words += "MODEL_PRESET=tiny " if sample else ""
    print(f"Written to {directory}. Next:\n  {words}bash {launcher}")
    if not sample:
        print("Nodes that do not share this file system need a copy in the same place, for example:")
        print(f'  scp -r {quoted}/{{{DATASET}.{{bin,idx,meta.json}},tokenizer}} "${{NODE1}}":{quoted}/')


if __name__ == "__main__":
    common.run(lambda: prepare(os.environ))
