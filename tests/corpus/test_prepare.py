"""Preparing data from end to end: exporting XSum from files and the hub, and prepare_xsum_megatron.sh."""

import gzip
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import corpus_files as corpus
import pyarrow
import pytest
from corpus_files import ROWS, SAMPLE, TEXTS, assert_refused, snapshot, texts_of
from support import Project, wait_for

from t5bench import Problem
from t5bench.corpus.checksum import tokenizer_checksum
from t5bench.corpus.convert import convert_source
from t5bench.corpus.prepare import prepare as prepare_here

DATASET = "xsum_text_document"
BUILT = ["xsum_text.jsonl", f"{DATASET}.bin", f"{DATASET}.idx"]
OUTPUTS = {"tokenizer", "xsum_text.meta.json", *BUILT, f"{DATASET}.meta.json"}
TOKENIZER = {"TOKENIZER_MODEL": str(SAMPLE / "tokenizer")}
REUSED = "exported earlier from the same source"
# XSum as the hub's Parquet conversion lays it out, with few rows; the last of train's two files has one.
XSUM_FILES = {
    "default/train/0000.parquet": corpus.in_parquet(ROWS * 500),
    "default/train/0001.parquet": corpus.in_parquet([{"document": "End.", "summary": "E", "id": "99"}]),
    "default/validation/0000.parquet": corpus.in_parquet(ROWS),
}
# Takes its time, and writes its journal after every few blocks; on request it is interrupted where it forks.
SLOW_PREPARATION = """
import os, signal, sys, time
from t5bench.__main__ import main
from t5bench.corpus import convert, source

def slowly(*arguments, at_full_speed=convert.convert):
    time.sleep(0.1)
    return at_full_speed(*arguments)

convert.convert, convert.JOURNAL_SECONDS, source.BLOCK_BYTES = slowly, 0.3, 3000
if "END_IN_FORK" in os.environ:
    os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))
if "DIE_AFTER_FORK" in os.environ:
    dies = lambda: os.kill(os.getpid(), signal.SIGKILL)
    os.register_at_fork(after_in_parent=dies, after_in_child=lambda: time.sleep(1))
sys.exit(main(["prepare-data"]))
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Prepares data in this process; what it said."""
    monkeypatch.setattr("t5bench.corpus.prepare.SIGNALS", ())

    def prepare(directory: Path, **settings: str) -> str:
        prepare_here({"MEGATRON_DATA_DIR": str(directory)} | settings)
        return "".join(capsys.readouterr())

    return prepare


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_export_takes_local_files(tmp_path: Path, run: Callable[..., str], suffix: str) -> None:
    source = tmp_path / f"my xsum{suffix}"
    output = tmp_path / "out dir" / "xsum_text.jsonl"
    lines = corpus.write_jsonl(tmp_path / "lines", ROWS).read_bytes()
    contents = {".jsonl": lines, ".jsonl.gz": gzip.compress(lines[:90]) + gzip.compress(lines[90:])}
    contents |= {".jsonl.zst": pyarrow.compress(lines, codec="zstd", asbytes=True), ".parquet": corpus.in_parquet(ROWS)}
    source.write_bytes(contents[suffix])
    said = run(output.parent, XSUM_SOURCE=str(source))
    assert "3 documents\n" in said and "3 empty documents were skipped" in said
    assert json.loads(output.read_text().splitlines()[1]) == {"text": "Third.", "summary": "S.", "id": "4"}
    assert texts_of(output) == TEXTS
    run(output.parent, XSUM_SOURCE=str(source), XSUM_LIMIT="2")
    assert texts_of(output) == TEXTS[:2]
    assert {path.name for path in output.parent.iterdir()} == {"xsum_text.jsonl", "xsum_text.meta.json"}


SPOILT = corpus.in_parquet([{"text": "fine"}, {"text": "spoil"}]).replace(b"spoil", b"sp\xffil")
CHECKED = corpus.in_parquet([{"text": "fine"}], write_page_checksum=True).replace(b"fine", b"find")
BAD_SOURCES = [
    ("csv", b"document,summary\n", "the name of a JSONL or Parquet file"),
    ("parquet", b"PAR1 but not really PAR1", "is damaged or not a Parquet file"),
    ("parquet", SPOILT, "row 1 or a later .* UTF-8"),
    ("parquet", CHECKED, "is damaged .*CRC"),
    ("jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9], r"is damaged \(Truncated compressed stream\)"),
    ("jsonl", b'{"text": "fine"}\n\n{"txt": "a"}\n', 'line 3 of .* has no "text"; it has txt'),
    ("jsonl", b'{"text": "fine"}\n' * 3 + b'{"text": \n', "line 4 of .* is not a JSON object"),
    ("jsonl", b'{"text": "fine"}\n{"text": 5}\n', 'line 2 of .* has no string as "text", but int'),
    ("jsonl", b'{"text": 5}\n', 'the column "text" of .* holds numbers, not texts'),
    ("jsonl", b'["text"]\n', "row 1 of .* is not a JSON object"),
    ("jsonl", b'{"text": "fine"}\n{"text": "\xff"}\n', "line 2 of .* is not a JSON object in UTF-8"),
    ("jsonl", b'{"text": " "}\n', "no document with text"),
]


@pytest.mark.parametrize(("suffix", "content", "message"), BAD_SOURCES, ids=range(len(BAD_SOURCES)))
def test_a_bad_source_is_refused(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, suffix: str, content: bytes, message: str
) -> None:
    """And nothing is changed."""
    monkeypatch.setattr("t5bench.corpus.source.BLOCK_BYTES", 20)  # two such lines
    source = tmp_path / f"{{bad}}.{suffix}"
    source.write_bytes(content)
    (tmp_path / "xsum_text.jsonl").write_text("what was there before")
    before = snapshot(tmp_path)
    with pytest.raises(Problem, match=message) as caught:
        run(tmp_path, XSUM_SOURCE=str(source))
    assert caught.value.remedy and snapshot(tmp_path) == before


def test_what_export_refuses(tmp_path: Path) -> None:
    def export(hub: str = corpus.NO_HUB, **settings: str) -> subprocess.CompletedProcess[str]:
        own = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "MEGATRON_DATA_DIR": str(tmp_path / "data")}
        return corpus.export(**{"XSUM_SPLIT": "validation"} | own | settings)

    assert_refused(export(XSUM_LIMIT="abc"), "XSUM_LIMIT must be a whole number of at least 1, found 'abc'")
    assert_refused(export(), "cannot fetch EdinburghNLP/xsum", corpus.NO_HUB)
    address, _ = corpus.serve_hub(tmp_path / "hub")
    assert_refused(export(address), "it does not exist, or it is not public", "XSUM_SOURCE=")
    corpus.add_repository(tmp_path / "hub", "datasets/EdinburghNLP/xsum", "revision/refs/convert/parquet", XSUM_FILES)
    assert_refused(export(address, XSUM_SPLIT="dev"), "EdinburghNLP/xsum has no split 'dev'", "train, validation")
    assert not list((tmp_path / "data").iterdir()) and export(address).returncode == 0
    assert texts_of(tmp_path / "data" / "xsum_text.jsonl") == TEXTS


class Prepare:
    """prepare_xsum_megatron.sh of a copy of the repository (path with spaces, no USER)."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.root = project.root
        self.data = project.root / "megatron_data"
        shutil.rmtree(self.data)
        shutil.copytree(SAMPLE, self.data / "sample")

    def start(self, **environment: str | None) -> subprocess.Popen[str]:
        hub = {"HF_ENDPOINT": corpus.NO_HUB, "HF_HOME": str(self.project.stubs / "hf")}
        options = {"env": self.project.environment_with(hub | environment), "cwd": self.root, "text": True}
        # What is started with a signal ignored, as background jobs are, leaves it so.
        options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        command = ["bash", str(self.project.script("prepare_xsum_megatron.sh"))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    def __call__(self, *, status: int = 0, **environment: str | None) -> subprocess.CompletedProcess[str]:
        process = self.start(**environment)
        output = process.communicate(timeout=120)
        assert process.returncode == status, output
        return subprocess.CompletedProcess("", status, *output)

    def refuses(self, *message: str, **environment: str | None) -> None:
        assert_refused(self(status=2, **environment), *message)


@pytest.fixture
def prepare(project: Project) -> Prepare:
    return Prepare(project)


def test_impossible_settings_are_refused_and_the_sample_is_prepared_offline(prepare: Prepare) -> None:
    # -S leaves out site-packages, and with them every package.
    prepare.project.add_stub("bare", f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    prepare.refuses("but found XSUM_SOURCE=", " TOKENIZER_MODEL=", SAMPLE="1", XSUM_SOURCE="x.jsonl", **TOKENIZER)
    prepare.refuses("there is no file", "no/such.jsonl", XSUM_SOURCE="no/such.jsonl")
    prepare.refuses("/proc/nowhere", SAMPLE="1", MEGATRON_DATA_DIR="/proc/nowhere")
    prepare.refuses("named 'msgspec'", "pip install", SAMPLE="1", PYTHON="bare", PYTHONPATH=None)
    assert {path.name for path in prepare.data.iterdir()} == {"sample"}
    said = prepare(SAMPLE="1").stdout
    assert {path.name for path in prepare.data.iterdir()} == OUTPUTS | {"sample"}
    assert texts_of(prepare.data / "xsum_text.jsonl") == corpus.ARTICLES
    assert snapshot(prepare.data / "tokenizer") == snapshot(SAMPLE / "tokenizer")
    meta = json.loads((prepare.data / f"{DATASET}.meta.json").read_text())
    expected = {"source": "bundled sample", "tokenizer": "bundled sample", "documents": 320, "tokens": 62452}
    assert meta == meta | expected | {"dtype": "uint16", "vocabulary": 4101, "skipped_empty": 0}
    assert "320 documents, 62,452 tokens" in said
    assert meta["tokenizer_checksum"] == tokenizer_checksum(SAMPLE / "tokenizer")
    for name in BUILT:
        content = (prepare.data / name).read_bytes()
        assert meta["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert said.endswith("/scripts/run_megatron_t5_ddp.sh'\n") and "\n  MODEL_PRESET=tiny bash '" in said
    assert "\nNext, with the same MODEL:\n  bash '" in prepare(SAMPLE="1", MODEL="t5-small").stdout


def test_the_sample_for_gpt(prepare: Prepare, megatron_dir: Path) -> None:
    gpt = {"MODEL_FAMILY": "gpt", "SAMPLE": "1"}
    prepare.refuses("there is no GPT-2 tokenizer", "setup_megatron.sh", MEGATRON_DIR="nowhere", **gpt)
    said = prepare(MEGATRON_DIR=str(megatron_dir), **gpt).stdout
    assert "\n  MODEL_FAMILY=gpt MODEL_PRESET=tiny bash " in said
    assert {path.name for path in (prepare.data / "gpt").iterdir()} == OUTPUTS
    assert {path.name for path in (prepare.data / "gpt" / "tokenizer").iterdir()} == {"vocab.json", "merges.txt"}
    meta = json.loads((prepare.data / "gpt" / f"{DATASET}.meta.json").read_text())
    expected = {"tokenizer": "GPT-2", "tokenizer_type": "GPT2BPETokenizer", "documents": 320, "vocabulary": 50257}
    assert meta == meta | expected
    assert meta["tokenizer_checksum"] == tokenizer_checksum(prepare.data / "gpt" / "tokenizer")
    # The copy is the same tokenizer, and data for T5 do not get in the way.
    copy = prepare.data / "gpt" / "tokenizer"
    source = prepare.data / "sample" / "articles.jsonl"
    prepare(MODEL_FAMILY="gpt", TOKENIZER_MODEL=str(copy), XSUM_SOURCE=str(source))
    prepare(SAMPLE="1")
    (copy / "merges.txt").write_text("#version: 0.2\n")
    prepare.refuses("merges.txt is incomplete", MODEL_FAMILY="gpt", TOKENIZER_MODEL=str(copy), FORCE="1")


def test_hub_data_with_the_default_tokenizer(prepare: Prepare, tmp_path: Path) -> None:
    # A T5 repository as google-t5's are: a bare tokenizer_config.json, the model type in config.json, weights.
    t5 = {
        "spiece.model": (SAMPLE / "tokenizer" / "spiece.model").read_bytes(),
        "tokenizer_config.json": b'{"model_max_length": 512}',
        "config.json": b'{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}',
    }
    hub = tmp_path / "hub"
    directory = prepare.root / "data here"
    corpus.add_repository(hub, "google-t5/t5-large", "revision/main", t5 | {"model.safetensors": b"not asked for"})
    corpus.add_repository(hub, "datasets/EdinburghNLP/xsum", "revision/refs/convert/parquet", XSUM_FILES)
    address, downloads = corpus.serve_hub(hub)
    said = prepare(HF_ENDPOINT=address, MEGATRON_DATA_DIR="data here").stdout
    assert f"MEGATRON_DATA_DIR='{directory}' bash '" in said
    assert {path.name for path in directory.iterdir()} == OUTPUTS
    assert texts_of(directory / "xsum_text.jsonl") == TEXTS * 500 + ["End."]
    assert set(downloads) == {*t5, "default/train/0000.parquet", "default/train/0001.parquet"}
    config = json.loads((directory / "tokenizer" / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "T5Tokenizer", "legacy": True, "model_max_length": 512}
    meta = json.loads((directory / f"{DATASET}.meta.json").read_text())
    bare = hub / "google-t5" / "t5-large" / "resolve" / corpus.COMMIT
    assert meta["tokenizer_checksum"] == tokenizer_checksum(directory / "tokenizer") == tokenizer_checksum(bare)
    hub_source = {"source": "EdinburghNLP/xsum train from the Hugging Face hub", "tokenizer": "google-t5/t5-large"}
    assert meta == meta | hub_source | {"documents": 1501}
    # The local cache, or the tokenizer's copy, serves instead of the hub, which is gone, and so does the export.
    for tokenizer in ("", "data here/tokenizer"):
        again = prepare(MEGATRON_DATA_DIR="data here", TOKENIZER_MODEL=tokenizer)
        assert REUSED in again.stderr


def test_an_earlier_export_is_used_while_its_source_is_the_same(tmp_path: Path, run: Callable[..., str]) -> None:
    source = tmp_path / "articles.jsonl"
    data = tmp_path / "data"
    shutil.copy(SAMPLE / "articles.jsonl", source)

    def is_used(**settings: str) -> bool:
        return REUSED in run(data, XSUM_SOURCE=str(source), **TOKENIZER, **settings)

    # As on a cluster whose login node has the network and whose compute nodes do not.
    assert corpus.export(XSUM_SOURCE=str(source), MEGATRON_DATA_DIR=str(data)).returncode == 0
    assert is_used()
    first = snapshot(data)
    output = data / "xsum_text.jsonl"
    output.write_text(output.read_text()[:-1])
    assert not is_used()
    os.utime(source, (1, 1))
    assert not is_used() and not is_used(FORCE="1") and is_used()
    after = snapshot(data)
    assert all(after[name] == first[name] for name in first if not name.endswith("meta.json"))


def test_a_failed_run_leaves_nothing(
    tmp_path: Path, run: Callable[..., str], sample_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shutil.copytree(sample_data, tmp_path / "data")
    source = corpus.write_jsonl(tmp_path / "other.jsonl", ROWS)
    before = snapshot(data)
    settings = {"XSUM_SOURCE": str(source), "FORCE": "1"}
    (tmp_path / "empty").mkdir()
    for tokenizer, message in (("./none", "there is no tokenizer directory"), ("empty", "has no spiece.model")):
        with pytest.raises(Problem, match=message):
            run(data, **settings, TOKENIZER_MODEL=str(tmp_path / tokenizer))
    source.write_text(source.read_text() + "{broken\n")
    for directory in (data, tmp_path / "not yet"):
        with pytest.raises(Problem, match=r"line 7 of .* is not a JSON object"):
            run(directory, **settings, **TOKENIZER)
    for name, content in (("tokenizer_config.json", b"{"), ("tokenizer_config.json", b"[]"), ("spiece.model", b"")):
        damaged = shutil.copytree(SAMPLE / "tokenizer", tmp_path / "damaged", dirs_exist_ok=True)
        (damaged / name).write_bytes(content)
        with pytest.raises(Problem, match=f"^{damaged} cannot be loaded as a tokenizer"):
            run(data, **settings, TOKENIZER_MODEL=str(damaged))
    source = corpus.write_jsonl(tmp_path / "growing.jsonl", ROWS)

    def grow(*arguments: object) -> object:
        source.write_text(source.read_text() * 2)
        return convert_source(*arguments)

    monkeypatch.setattr("t5bench.corpus.prepare.convert_source", grow)
    with pytest.raises(Problem, match=r"growing.jsonl changed while it was read"):
        run(data, XSUM_SOURCE=str(source))
    assert snapshot(data) == before and not list((tmp_path / "not yet").iterdir())


def test_one_preparation_at_a_time_and_an_interrupted_one_continues(prepare: Prepare, sample_data: Path) -> None:
    # Without the index maps of other tests' trainings: new data would remove them.
    shutil.copytree(sample_data, prepare.data, ignore=shutil.ignore_patterns("*.npy"), dirs_exist_ok=True)
    before = snapshot(prepare.data)
    journal = prepare.data / ".prepare" / "xsum_text.journal"
    python = shlex.quote(sys.executable)
    instead = f"[ \"$*\" != '-m t5bench prepare-data' ] || exec {python} -c '{SLOW_PREPARATION}'"
    prepare.project.add_stub("slow", f'#!/bin/sh\n{instead}\nexec {python} "$@"\n')
    settings = {"SAMPLE": "1", "FORCE": "1", "WORKERS": "2", "PYTHON": "slow"}
    assert prepare.start(**settings, END_IN_FORK="1").wait(60) == 128 + signal.SIGTERM
    prepare.start(**settings, DIE_AFTER_FORK="1").communicate(timeout=30)  # until its processes have gone, too
    journal.unlink(missing_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        earlier = journal.read_bytes() if journal.exists() else b""
        process = prepare.start(**settings)
        wait_for(lambda earlier=earlier: journal.exists() and journal.read_bytes() != earlier)
        if not earlier:
            process.send_signal(signal.SIGSTOP)
            owner = f"process {process.pid} on {socket.gethostname()}"
            prepare.refuses(f"{owner} is already preparing data", SAMPLE="1", FORCE="1")
            process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), stderr
        assert "Traceback" not in stderr and ("Continuing after" in stderr) == bool(earlier)
        assert number == signal.SIGKILL or "interrupted: nothing in" in stderr
        assert {name: content for name, content in snapshot(prepare.data).items() if name in before} == before
    assert "Continuing after" in prepare(**settings).stderr
    after = snapshot(prepare.data)
    assert after.keys() == before.keys() and all(after[name] == before[name] for name in BUILT)


def test_data_from_another_source_are_replaced_only_on_request(
    tmp_path: Path, run: Callable[..., str], sample_data: Path
) -> None:
    data = shutil.copytree(sample_data, tmp_path / "data")
    before = snapshot(data)
    hub = {"TOKENIZER_MODEL": "google-t5/t5-large"}
    other = {"XSUM_SOURCE": str(corpus.write_jsonl(tmp_path / "other.jsonl", ROWS))}
    sample = {"XSUM_SOURCE": str(SAMPLE / "articles.jsonl")}
    for settings, message in (
        (hub, "was made from bundled sample and .* with EdinburghNLP/xsum train"),
        (other | TOKENIZER, f"was made from bundled sample and .* with file {other['XSUM_SOURCE']}"),
        (sample | hub, "and the tokenizer bundled sample, .* and the tokenizer google-t5/t5-large"),
        (sample | TOKENIZER | {"XSUM_LIMIT": "9"}, "with bundled sample, first 9 documents"),
    ):
        with pytest.raises(Problem, match=message) as caught:
            run(data, **settings)
        assert "FORCE=1" in caught.value.remedy and "MEGATRON_DATA_DIR" in caught.value.remedy
    assert snapshot(data) == before
    stale = data / "xsum_text_document_train_indexmap_800mns_510msl_0.00ssp_1234s.npy"
    stale.write_bytes(b"made from the data before")
    run(data, **other, **TOKENIZER, FORCE="1")
    assert texts_of(data / "xsum_text.jsonl") == TEXTS and not stale.exists()
    (data / f"{DATASET}.meta.json").unlink()
    with pytest.raises(Problem, match=f"{DATASET}.bin was made from an unknown source and "):
        run(data, **sample, **TOKENIZER)
