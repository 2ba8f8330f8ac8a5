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
from pathlib import Path

import corpus_files as corpus
import pyarrow
import pytest
from corpus_files import ROWS, SAMPLE, TEXTS, assert_refused, snapshot, texts_of
from harness import Project, wait_for

from t5bench.corpus.checksum import tokenizer_checksum

DATASET = "xsum_text_document"
BUILT = ["xsum_text.jsonl", f"{DATASET}.bin", f"{DATASET}.idx"]
OUTPUTS = {"tokenizer", "xsum_text.meta.json", *BUILT, f"{DATASET}.meta.json"}
TOKENIZER = {"TOKENIZER_MODEL": str(SAMPLE / "tokenizer")}
# XSum as the hub's Parquet conversion lays it out, with few rows; the last of train's two files has one.
XSUM_FILES = {
    "default/train/0000.parquet": corpus.in_parquet(ROWS * 500),
    "default/train/0001.parquet": corpus.in_parquet([{"document": "End.", "summary": "E", "id": "99"}]),
    "default/validation/0000.parquet": corpus.in_parquet(ROWS),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_export_takes_local_files(tmp_path: Path, suffix: str) -> None:
    source, output = tmp_path / f"my xsum{suffix}", tmp_path / "out dir" / "xsum_text.jsonl"
    lines = corpus.write_jsonl(tmp_path / "lines", ROWS).read_bytes()
    contents = {".jsonl": lines, ".jsonl.gz": gzip.compress(lines[:90]) + gzip.compress(lines[90:])}
    contents |= {".jsonl.zst": pyarrow.compress(lines, codec="zstd", asbytes=True), ".parquet": corpus.in_parquet(ROWS)}
    source.write_bytes(contents[suffix])
    settings = {"XSUM_SOURCE": str(source), "MEGATRON_DATA_DIR": str(output.parent)}
    said = corpus.export(**settings).stdout
    assert "3 documents" in said and "3 empty documents were skipped" in said
    assert json.loads(output.read_text().splitlines()[1]) == {"text": "Third.", "summary": "S.", "id": "4"}
    assert texts_of(output) == TEXTS
    corpus.export(**settings, XSUM_LIMIT="2")
    assert texts_of(output) == TEXTS[:2]
    assert {path.name for path in output.parent.iterdir()} == {"xsum_text.jsonl", "xsum_text.meta.json"}


BAD_SOURCES = {
    "articles.csv": (b"document,summary\n", "the name of a JSONL or Parquet file"),
    "column.jsonl": (b'{"article": "a", "summary": "b"}\n', 'has no "document"; it has article, summary'),
    "number.jsonl": (b'{"document": 7, "summary": "b"}\n', 'no string as "document", but int'),
    "empty.jsonl": (b'{"document": " ", "summary": "b"}\n', "no document with text"),
    "broken.parquet": (b"PAR1 but not really PAR1", "is damaged or not a Parquet file"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "is damaged (Truncated compressed stream)"),
    "column.parquet": (corpus.in_parquet([{"document": "a"}]), "row 1 of"),
}


def test_export_refuses_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "xsum_text.jsonl").write_text("what was there before")
    for name, (content, message) in BAD_SOURCES.items():
        (tmp_path / name).write_bytes(content)
        before = snapshot(tmp_path)
        said = corpus.export(XSUM_SOURCE=str(tmp_path / name), MEGATRON_DATA_DIR=str(tmp_path))
        assert_refused(said, message)
        assert snapshot(tmp_path) == before


def test_export_says_what_the_hub_lacks(tmp_path: Path) -> None:
    def export(hub: str, split: str = "validation") -> subprocess.CompletedProcess[str]:
        settings = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "MEGATRON_DATA_DIR": str(tmp_path / "data")}
        return corpus.export(XSUM_SPLIT=split, **settings)

    assert_refused(export(corpus.NO_HUB), "cannot fetch EdinburghNLP/xsum", f"{corpus.NO_HUB} does not answer")
    address, _ = corpus.serve_hub(tmp_path / "hub")
    assert_refused(export(address), "it does not exist, or it is not public", "XSUM_SOURCE=")
    # Without a conversion to Parquet, the main branch is taken.
    corpus.add_repository(tmp_path / "hub", "datasets/EdinburghNLP/xsum", "index.html", XSUM_FILES)
    assert_refused(export(address, "dev"), "EdinburghNLP/xsum has no split 'dev'", "train, validation or test")
    assert not (tmp_path / "data").exists() and export(address).returncode == 0
    assert texts_of(tmp_path / "data" / "xsum_text.jsonl") == TEXTS


class Prepare:
    """prepare_xsum_megatron.sh of a copy of the repository (path with spaces, no USER)."""

    def __init__(self, project: Project) -> None:
        self.project, self.root, self.data = project, project.root, project.root / "megatron_data"
        shutil.rmtree(self.data)
        shutil.copytree(SAMPLE, self.data / "sample")

    def start(self, *arguments: str, **environment: str | None) -> subprocess.Popen[str]:
        command = ["bash", str(self.project.script("prepare_xsum_megatron.sh")), *arguments]
        hub = {"HF_ENDPOINT": corpus.NO_HUB, "HF_HOME": str(self.project.stubs / "hf")}
        options = {"env": self.project.environment_with(hub | environment), "cwd": self.root, "text": True}
        # What is started with a signal ignored, as background jobs are, leaves it so.
        options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    def __call__(self, *arguments: str, status: int = 0, **environment: str | None) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        output = process.communicate(timeout=120)
        assert process.returncode == status, output
        return subprocess.CompletedProcess("", status, *output)

    def refuses(self, *message: str, **environment: str | None) -> None:
        assert_refused(self(status=2, **environment), *message)

    def outputs(self) -> dict[str, bytes]:
        assert not list(self.data.glob(".*"))
        return {name: content for name, content in snapshot(self.data).items() if not name.startswith("sample/")}


@pytest.fixture
def prepare(project: Project) -> Prepare:
    return Prepare(project)


@pytest.fixture
def prepared(prepare: Prepare, sample_data: Path) -> Prepare:
    """`prepare`, with the sample already prepared."""
    shutil.copytree(sample_data, prepare.data, dirs_exist_ok=True)
    return prepare


def test_the_sample_is_prepared_offline(prepare: Prepare) -> None:
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
    copy, source = prepare.data / "gpt" / "tokenizer", prepare.data / "sample" / "articles.jsonl"
    prepare(MODEL_FAMILY="gpt", TOKENIZER_MODEL=str(copy), XSUM_SOURCE=str(source))
    prepare(SAMPLE="1")


def test_hub_data_with_the_default_tokenizer(prepare: Prepare, tmp_path: Path) -> None:
    # A T5 repository as google-t5's are: a bare tokenizer_config.json, the model type in config.json, weights.
    t5 = {
        "spiece.model": (SAMPLE / "tokenizer" / "spiece.model").read_bytes(),
        "tokenizer_config.json": b'{"model_max_length": 512}',
        "config.json": b'{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}',
    }
    hub, directory = tmp_path / "hub", prepare.root / "data here"
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
        assert "exported earlier from the same source" in again.stderr


def test_an_earlier_export_is_used_while_its_source_is_the_same(prepare: Prepare) -> None:
    def is_used(**environment: str) -> bool:
        return "exported earlier from the same source" in prepare(SAMPLE="1", **environment).stderr

    # As on a cluster whose login node has the network and whose compute nodes do not.
    source, output = prepare.data / "sample" / "articles.jsonl", prepare.data / "xsum_text.jsonl"
    script = [sys.executable, prepare.project.script("export_xsum_corpus.py")]
    subprocess.run(script, env=prepare.project.environment_with({"XSUM_SOURCE": str(source)}), check=True)
    assert is_used()
    first = prepare.outputs()
    output.write_text(output.read_text()[:-1])
    assert not is_used()
    os.utime(source, (1, 1))
    assert not is_used() and not is_used(FORCE="1") and is_used()
    after = prepare.outputs()
    assert all(after[name] == first[name] for name in first if not name.endswith("meta.json"))


def test_a_failed_run_leaves_nothing(prepared: Prepare) -> None:
    before, source = prepared.outputs(), corpus.write_jsonl(prepared.root / "other.jsonl", ROWS)
    prepared.refuses("cannot fetch the tokenizer google-t5/t5-large", XSUM_SOURCE=str(source), FORCE="1")
    source.write_text(source.read_text() + "{broken\n")
    prepared.refuses("line 7 of", "is not valid JSON", XSUM_SOURCE="other.jsonl", FORCE="1", **TOKENIZER)
    assert prepared.outputs() == before
    prepared.refuses("line 7 of", XSUM_SOURCE=str(source), MEGATRON_DATA_DIR="not yet", **TOKENIZER)
    assert not (prepared.root / "not yet").exists()


def test_one_preparation_at_a_time_and_an_interrupted_one_continues(prepared: Prepare) -> None:
    before, journal = prepared.outputs(), prepared.data / ".prepare" / "xsum_text.journal"
    source = prepared.root / "many.jsonl"
    source.write_text('{"document": "It rained, and <s> the price rose.", "summary": "Rain."}\n' * 400_000)
    settings = {"XSUM_SOURCE": str(source), "FORCE": "1", "WORKERS": "2", **TOKENIZER}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        earlier = journal.read_bytes() if journal.exists() else b""
        process = prepared.start(**settings)
        wait_for(lambda earlier=earlier: journal.exists() and journal.read_bytes() != earlier)
        prepared.refuses(
            f"process {process.pid} on {socket.gethostname()} is already preparing data", SAMPLE="1", FORCE="1"
        )
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), stderr
        assert "Traceback" not in stderr and ("Continuing after" in stderr) == bool(earlier)
        assert number == signal.SIGKILL or "interrupted: nothing in" in stderr
        assert {name: content for name, content in snapshot(prepared.data).items() if name in before} == before
    assert "Continuing after" in prepared(**settings).stderr
    resumed = prepared.outputs()
    assert texts_of(prepared.data / "xsum_text.jsonl") == ["It rained, and <s> the price rose."] * 400_000
    assert "Continuing" not in prepared(**settings).stderr
    assert all(prepared.outputs()[name] == resumed[name] for name in BUILT)


def test_data_from_another_source_are_replaced_only_on_request(prepared: Prepare) -> None:
    before, refuses = prepared.outputs(), prepared.refuses
    other = {"XSUM_SOURCE": str(corpus.write_jsonl(prepared.root / "other.jsonl", ROWS))}
    sample = {"XSUM_SOURCE": str(prepared.data / "sample" / "articles.jsonl")}
    refuses("was made from bundled sample", "with EdinburghNLP/xsum train", "FORCE=1", "MEGATRON_DATA_DIR")
    refuses("was made from bundled sample", f"with file {other['XSUM_SOURCE']}", **other, **TOKENIZER)
    refuses("was made with the tokenizer bundled sample", "google-t5/t5-large", **sample)
    refuses("with bundled sample, first 9 documents", **sample, **TOKENIZER, XSUM_LIMIT="9")
    assert prepared.outputs() == before
    stale = prepared.data / "xsum_text_document_train_indexmap_800mns_510msl_0.00ssp_1234s.npy"
    stale.write_bytes(b"made from the data before")
    prepared(**other, **TOKENIZER, FORCE="1")
    assert texts_of(prepared.data / "xsum_text.jsonl") == TEXTS
    assert not stale.exists()
    (prepared.data / f"{DATASET}.meta.json").unlink()
    refuses(f"{DATASET}.bin exists without a record of its source", SAMPLE="1")


def test_impossible_settings_are_refused(prepare: Prepare) -> None:
    # -S leaves out site-packages, and with them every package.
    prepare.project.add_stub("bare", f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    prepare.refuses("but found XSUM_SOURCE=", " TOKENIZER_MODEL=", SAMPLE="1", XSUM_SOURCE="x.jsonl", **TOKENIZER)
    prepare.refuses("there is no file", "no/such.jsonl", XSUM_SOURCE="no/such.jsonl")
    prepare.refuses("/proc/nowhere: ", SAMPLE="1", MEGATRON_DATA_DIR="/proc/nowhere")
    prepare.refuses("named 'msgspec'", "pip install", SAMPLE="1", PYTHON="bare", PYTHONPATH=None)
    assert_refused(prepare("--helpme", status=2), "unknown option '--helpme'")
    assert {path.name for path in prepare.data.iterdir()} == {"sample"}
    assert "\n  SAMPLE  " in prepare("--help").stdout
