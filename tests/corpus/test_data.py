"""Preparing data: export, tokenising, the indexed dataset's format, the bundled sample, prepare_xsum_megatron.sh."""

import hashlib
import http.server
import io
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import string
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from harness import REPO_ROOT, Project, wait_for, write_indexed_dataset

SCRIPTS = REPO_ROOT / "scripts"
SAMPLE = REPO_ROOT / "megatron_data" / "sample"

import t5bench.corpus.build as bid
import t5bench.corpus.sample_tokenizer as train_sample_tokenizer

OUTPUTS = {
    "tokenizer",
    "xsum_text.jsonl",
    "xsum_text.meta.json",
    "xsum_text_document.bin",
    "xsum_text_document.idx",
    "xsum_text_document.meta.json",
}
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}
SPECIAL_TEXTS = [
    "a </s> b",
    "It ends here. </s>",
    "</s>",
    "</s></s>",
    "<extra_id_0>",
    "a<extra_id_3> b <extra_id_10>.",
    "<pad> and  <unk> ",
    "<s> is no special token of T5",
    "<extra_id_100> and </s",
    "",
    " ",
    "\n\n",
    "\u2581 b\u2581",
    "na\u00efve \ufb01ne \u6771\u4eac \U0001f600 \u202f \x00 a\u2028b",
]


def articles() -> list[dict[str, str]]:
    return [json.loads(line) for line in (SAMPLE / "articles.jsonl").read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def run_script(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            {"build_indexed_dataset.py": "t5bench.corpus.build", "export_xsum_corpus.py": "t5bench.corpus.export"}.get(
                name, name
            ),
            *map(str, arguments),
        ],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str, remedy: bool = True) -> None:
    """Status 2, one error of one sentence and, unless that says it all, what to do; together they hold the parts."""
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert not remedy or re.search(r"^       \S", result.stderr, re.MULTILINE), f"no remedy in: {result.stderr}"
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def numpy_documents(prefix: Path) -> list[list[int]]:
    """The documents of an indexed dataset, read with numpy and none of the project's code."""
    index = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, boundaries = struct.unpack("<9sQBQQ", index[:34])
    assert (magic, version, boundaries) == (b"MMIDIDX\0\0", 1, sequences + 1)
    sizes = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    doc_idx = np.frombuffer(index, "<i8", boundaries, 34 + 12 * sequences)
    assert doc_idx.tolist() == list(range(sequences + 1))
    dtype = {8: "<u2", 4: "<i4"}[code]
    data = Path(f"{prefix}.bin").read_bytes()
    return [np.frombuffer(data, dtype, s, p).tolist() for s, p in zip(sizes, pointers, strict=True)]


# ---- the format ------------------------------------------------------------------------------------------------------

DOCUMENTS = [[5, 6, 7, 1], [8, 9, 1], [65535, 1], [1]]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    prefix = tmp_path / "corpus_document"
    with bid.IndexedDatasetWriter(prefix) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return prefix


def test_writer_gives_the_bytes_of_the_format(dataset: Path, tmp_path: Path) -> None:
    write_indexed_dataset(tmp_path / "expected", DOCUMENTS)
    assert Path(f"{dataset}.idx").read_bytes() == (tmp_path / "expected.idx").read_bytes()
    assert Path(f"{dataset}.bin").read_bytes() == (tmp_path / "expected.bin").read_bytes()
    assert numpy_documents(dataset) == DOCUMENTS


def test_reader_returns_what_was_written(dataset: Path) -> None:
    info = bid.read_index(dataset)
    assert (info.documents, info.sequences, info.tokens, info.dtype) == (4, 4, 10, "uint16")
    assert list(info.sizes) == [4, 3, 2, 1]
    assert list(info.pointers) == [0, 8, 14, 18]
    assert list(info.doc_idx) == [0, 1, 2, 3, 4]
    assert (info.bin_bytes, info.idx_bytes) == (20, Path(f"{dataset}.idx").stat().st_size)


def test_large_vocabularies_take_32_bits(tmp_path: Path) -> None:
    assert [bid.token_dtype(n) for n in (32100, 65499, 65500, 250112)] == ["uint16", "uint16", "int32", "int32"]
    with bid.IndexedDatasetWriter(tmp_path / "wide", "int32") as writer:
        writer.add_document([250000, 1])
    assert bid.read_index(tmp_path / "wide").dtype == "int32"
    assert numpy_documents(tmp_path / "wide") == [[250000, 1]]


def test_several_sequences_per_document_can_be_read(tmp_path: Path) -> None:
    prefix = tmp_path / "sentences"
    write_indexed_dataset(prefix, [[2, 3], [4], [5, 6]])
    index = prefix.with_suffix(".idx").read_bytes()
    boundaries = struct.pack("<3q", 0, 2, 3)
    prefix.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3) + index[34:70] + boundaries
    )
    assert (bid.read_index(prefix).documents, bid.read_index(prefix).sequences) == (2, 3)


@pytest.mark.parametrize("bad", [[70000, 1], [-1, 1], []])
def test_writer_refuses_what_cannot_be_stored_and_keeps_the_old_files(dataset: Path, bad: list[int]) -> None:
    before = snapshot(dataset.parent)
    with pytest.raises(bid.DataError), bid.IndexedDatasetWriter(dataset) as writer:
        writer.add_document([3, 1])
        writer.add_document(bad)
    assert snapshot(dataset.parent) == before


def test_an_unfinished_or_empty_dataset_leaves_nothing(dataset: Path) -> None:
    before = snapshot(dataset.parent)
    with pytest.raises(RuntimeError, match="power cut"), bid.IndexedDatasetWriter(dataset) as writer:
        writer.add_document([3, 1])
        raise RuntimeError("power cut")
    with pytest.raises(bid.DataError, match="not a single document"), bid.IndexedDatasetWriter(dataset):
        pass
    assert snapshot(dataset.parent) == before


def test_every_truncation_is_found(dataset: Path) -> None:
    for suffix in (".idx", ".bin"):
        path = Path(f"{dataset}{suffix}")
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            expected = "is empty" if size == 0 else "is truncated"
            with pytest.raises(ValueError, match=expected) as caught:
                bid.read_index(dataset)
            assert "\n" not in str(caught.value)
            assert str(path) in str(caught.value)
        path.write_bytes(whole)
    bid.read_index(dataset)


@pytest.mark.parametrize(
    ("suffix", "offset", "replacement", "message"),
    [
        (".idx", 0, b"TNTIDX\0\0", "does not begin with MMIDIDX"),
        (".idx", 9, b"\x02", "format version 2"),
        (".idx", 17, b"\x07", "7 is not the code"),
        (".idx", 18, b"\x05", "is truncated"),
        (".idx", 18, b"\x03", "is corrupt: its header announces 3 sequences"),
        (".idx", 34, b"\x05", "offsets do not follow"),
        (".idx", 46, b"\0\0\0\0", "a sequence of 0 tokens"),
        (".idx", 46, b"\xff\xff\xff\xff", "a sequence of -1 tokens"),
        (".idx", 58, b"\x02", "offsets do not follow"),
        (".idx", 82, b"\x01", "document boundaries"),
        (".idx", 90, b"\x04", "document boundaries"),
        (".idx", 114, b"\x05", "document boundaries"),
        (".idx", 122, b"more", "is corrupt"),
        (".bin", 20, b"\0\0", "not the file that its index describes"),
    ],
)
def test_every_inconsistency_is_named(
    dataset: Path, suffix: str, offset: int, replacement: bytes, message: str
) -> None:
    path = Path(f"{dataset}{suffix}")
    content = bytearray(path.read_bytes())
    assert content[offset : offset + len(replacement)] != replacement
    content[offset : offset + len(replacement)] = replacement
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        bid.read_index(dataset)


def test_check_prints_counts_or_one_sentence(dataset: Path) -> None:
    result = run_script("build_indexed_dataset.py", "--check", dataset)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == [
        "documents=4",
        "sequences=4",
        "tokens=10",
        "dtype=uint16",
        "bin_bytes=20",
        f"idx_bytes={Path(f'{dataset}.idx').stat().st_size}",
    ]
    Path(f"{dataset}.idx").unlink()
    result = run_script("build_indexed_dataset.py", "--check", dataset)
    assert_refused(
        result, "Missing or empty Megatron indexed dataset files", "does not exist", "prepare_xsum_megatron.sh"
    )


def test_check_is_light_enough_for_a_launcher(dataset: Path) -> None:
    heavy = "{'numpy', 'sentencepiece', 'transformers', 'torch', 'json', 'hashlib', 'tqdm', 'dataclasses', 'inspect'}"
    code = f"import sys, indexed_dataset as d; d.read_index(sys.argv[1]); print(*{heavy} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code, str(dataset)], cwd=SCRIPTS, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == []
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_script("build_indexed_dataset.py", "--check", dataset)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.15


# ---- tokenising ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def slow_tokenizer():
    from transformers import T5Tokenizer

    return T5Tokenizer.from_pretrained(SAMPLE / "tokenizer", local_files_only=True)


@pytest.fixture(scope="session")
def encoder() -> bid.DocumentEncoder:
    return bid.DocumentEncoder(SAMPLE / "tokenizer")


def random_texts(count: int) -> list[str]:
    draw = random.Random(20)
    blocks = [(32, 127), (32, 127), (0, 0x300), (0x2000, 0x3000), (0x4E00, 0x5000), (0x1F300, 0x1F700)]
    return [
        "".join(chr(draw.randrange(*draw.choice(blocks))) for _ in range(draw.randrange(1, 60))) for _ in range(count)
    ]


def test_ids_are_those_of_the_slow_tokenizer(encoder: bid.DocumentEncoder, slow_tokenizer) -> None:
    assert encoder.exact
    assert encoder.vocabulary == len(slow_tokenizer) == 4100
    texts = [article["document"] for article in articles()] + SPECIAL_TEXTS + random_texts(1000)
    ids = encoder.encode_batch(texts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "This sequence already has </s>"
        expected = [slow_tokenizer.encode(text) for text in texts]
    for text, mine, theirs in zip(texts, ids, expected, strict=True):
        assert mine == theirs, repr(text)
    assert all(document[-1] == 1 for document in ids)


def test_each_plain_document_has_one_end_and_no_unknown_piece(encoder: bid.DocumentEncoder) -> None:
    for ids in encoder.encode_batch([article["document"] for article in articles()]):
        assert ids.count(1) == 1
        assert 2 not in ids
    assert encoder.encode_batch(["It ends here.", "It ends here. </s>"])[1].count(1) == 1


def test_only_special_text_takes_the_slow_path(encoder: bid.DocumentEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = encoder._tokenizer.encode
    monkeypatch.setattr(encoder._tokenizer, "encode", lambda text, **kw: asked.append(text) or original(text, **kw))
    encoder.encode_batch(["plain <text>", "a <extra_id_7> b", "plain again", "x </s>"])
    assert asked == ["a <extra_id_7> b", "x </s>"]


def test_a_tokenizer_that_departs_from_its_pieces_encodes_everything(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="transformers needs protobuf for tokenizers without `legacy`")
    from transformers import T5Tokenizer

    directory = shutil.copytree(SAMPLE / "tokenizer", tmp_path / "modern")
    config = train_sample_tokenizer.tokenizer_config() | {"legacy": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    modern = T5Tokenizer.from_pretrained(directory)
    encoder = bid.DocumentEncoder(directory)
    texts = ["Hello <extra_id_0>.", "  leading blanks", "a \u2581 b", "Plain."]
    assert not encoder.exact
    assert encoder.encode_batch(texts) == [modern.encode(text) for text in texts]


def test_building_keeps_order_and_counts(encoder: bid.DocumentEncoder, tmp_path: Path) -> None:
    texts = [article["document"] for article in articles()] * 4
    texts[700:700] = ["", " \n", "one <extra_id_1> two", "word " * 600]
    source = write_jsonl(tmp_path / "text.jsonl", [{"text": text, "other": 1} for text in texts])
    source.write_text(source.read_text() + "\n\n")
    assert len(texts) > 2 * bid.BATCH_DOCUMENTS
    counts = bid.build_dataset(source, tmp_path / "one", encoder)
    filled = [text for text in texts if text.strip()]
    assert numpy_documents(tmp_path / "one") == encoder.encode_batch(filled)
    assert counts["documents"] == len(filled)
    assert counts["tokens"] == bid.read_index(tmp_path / "one").tokens
    assert (counts["skipped_empty"], counts["special_text_documents"]) == (2, 1)
    assert (counts["dtype"], counts["vocabulary"]) == ("uint16", 4100)
    bid.build_dataset(source, tmp_path / "four", bid.DocumentEncoder(SAMPLE / "tokenizer", threads=4))
    assert (tmp_path / "four.bin").read_bytes() == (tmp_path / "one.bin").read_bytes()
    assert (tmp_path / "four.idx").read_bytes() == (tmp_path / "one.idx").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "fine"}\n{"text": \n', "line 2 of .* is not valid JSON"),
        (b'{"text": "fine"}\n\n{"txt": "a"}\n', 'line 3 of .* has no string as "text"'),
        (b'{"text": 5}\n', 'line 1 of .* has no string as "text"'),
        (b'["text"]\n', "line 1 of .* is not a JSON object"),
        (b'{"text": "fine"}\n{"text": "\xff"}\n', "line 2 of .* is not UTF-8"),
        (b'{"text": "fine"}\n{"text": "half \\ud83d"}\n', "line 2 of .* half of a surrogate pair"),
        (b'{"text": " "}\n', "no document with text"),
        (b"", "no document with text"),
    ],
)
def test_a_bad_corpus_is_refused_by_line(
    encoder: bid.DocumentEncoder, dataset: Path, content: bytes, message: str
) -> None:
    source = dataset.with_name("bad.jsonl")
    source.write_bytes(content)
    before = snapshot(dataset.parent)
    with pytest.raises(bid.DataError, match=message) as caught:
        bid.build_dataset(source, dataset, encoder)
    assert caught.value.remedy
    assert snapshot(dataset.parent) == before


def test_build_command_refuses_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}])
    base = ("build_indexed_dataset.py", "--input", source, "--output-prefix", tmp_path / "out")
    assert_refused(run_script(*base, "--tokenizer", tmp_path / "nowhere"), "there is no tokenizer directory")
    (tmp_path / "empty").mkdir()
    assert_refused(run_script(*base, "--tokenizer", tmp_path / "empty"), "no spiece.model")
    broken = shutil.copytree(SAMPLE / "tokenizer", tmp_path / "broken")
    (broken / "spiece.model").write_bytes(b"not a model")
    copy = ("--tokenizer-copy", tmp_path / "tokenizer")
    assert_refused(run_script(*base, "--tokenizer", broken, *copy), "is not a SentencePiece model")
    assert {path.name for path in tmp_path.iterdir()} == {"text.jsonl", "empty", "broken"}


UPSTREAM = """
import sys, types
from importlib.machinery import ModuleSpec
from pathlib import Path
try:
    import nltk
except ImportError:  # used for splitting sentences only, but preprocess_data needs the names when it is imported
    nltk = types.ModuleType("nltk")
    nltk.__spec__ = ModuleSpec("nltk", None)
    nltk.tokenize = types.SimpleNamespace(punkt=types.SimpleNamespace(PunktLanguageVars=object))
    sys.modules["nltk"] = nltk
engine, jsonl, tokenizer, theirs, ours = sys.argv[1:]
sys.path[:0] = [engine, engine + "/tools"]
sys.argv = ["preprocess_data.py", "--input", jsonl, "--output-prefix", theirs, "--tokenizer-type", "HFTokenizer",
            "--tokenizer-model", tokenizer, "--workers", "1", "--seq-length", "512"]
import preprocess_data
preprocess_data.main()
from megatron.data.indexed_dataset import MMapIndexedDataset
dataset = MMapIndexedDataset(ours, skip_warmup=True)
Path(ours + ".read").write_text(repr([dataset[i].tolist() for i in range(len(dataset))]))
"""


def test_files_are_those_of_megatron_s_own_tool(
    encoder: bid.DocumentEncoder, megatron_dir: Path, tmp_path: Path
) -> None:
    # No text with "<s>": the engine adds that token to the tokenizer, T5 itself does not have it.
    texts = [article["document"] for article in articles()] + [text for text in SPECIAL_TEXTS if text.strip()]
    texts = [text for text in texts if "<s>" not in text]
    jsonl = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    bid.build_dataset(jsonl, tmp_path / "ours", encoder)
    arguments = [megatron_dir, jsonl, SAMPLE / "tokenizer", tmp_path / "theirs", tmp_path / "ours"]
    result = subprocess.run(
        [sys.executable, "-c", UPSTREAM, *map(str, arguments)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs_text_document.bin").read_bytes()
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs_text_document.idx").read_bytes()
    assert (tmp_path / "ours.read").read_text() == repr(encoder.encode_batch(texts))


# ---- the bundled sample ----------------------------------------------------------------------------------------------


def test_sample_articles_are_clean_and_different() -> None:
    rows = articles()
    assert len(rows) == 320
    assert [row["id"] for row in rows] == [f"sample-{number:04d}" for number in range(1, len(rows) + 1)]
    assert all(set(row) == {"id", "document", "summary"} for row in rows)
    sentences: dict[str, str] = {}
    for row in rows:
        for text in (row["document"], row["summary"]):
            assert text.isascii() and text == text.strip()
            assert not re.search(r"[\t\r]|  |\n\n", text)
        assert 500 <= len(row["document"]) <= 1000
        assert 60 <= len(row["summary"]) <= 200 and "\n" not in row["summary"] and row["summary"].endswith(".")
        for sentence in re.split(r'(?<=[.!?"])\s+', f"{row['document']}\n{row['summary']}"):
            if len(sentence.split()) > 3:
                assert sentences.setdefault(sentence, row["id"]) == row["id"], sentence
    assert len({row["document"] for row in rows}) == len({row["summary"] for row in rows}) == len(rows)


def test_sample_readme_tells_the_truth(encoder: bid.DocumentEncoder) -> None:
    readme = (SAMPLE / "README.md").read_text()
    documents = [article["document"] for article in articles()]
    tokens = sum(map(len, encoder.encode_batch(documents)))
    lengths = [len(document) for document in documents]
    assert f"{len(documents)} documents of {min(lengths)} to {max(lengths)} characters" in readme
    assert f"({round(sum(lengths), -3):,} in all" in readme
    assert f"{tokens:,} tokens" in readme
    assert f"sentencepiece {train_sample_tokenizer.SENTENCEPIECE_VERSION}" in readme


def test_sample_tokenizer_is_what_its_script_makes(tmp_path: Path) -> None:
    import sentencepiece

    if sentencepiece.__version__ != train_sample_tokenizer.SENTENCEPIECE_VERSION:
        pytest.skip(f"made with sentencepiece {train_sample_tokenizer.SENTENCEPIECE_VERSION}, this is another release")
    result = run_script("train_sample_tokenizer.py", "--output", tmp_path / "a tokenizer")
    assert result.returncode == 0, result.stderr
    assert snapshot(tmp_path / "a tokenizer") == snapshot(SAMPLE / "tokenizer")


def test_sample_tokenizer_has_t5_s_special_ids(slow_tokenizer) -> None:
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(SAMPLE / "tokenizer", use_fast=False, local_files_only=True)
    assert type(auto) is type(slow_tokenizer)
    assert (auto.pad_token_id, auto.eos_token_id, auto.unk_token_id, auto.bos_token_id) == (0, 1, 2, None)
    assert auto.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_99>"]) == [4099, 4000]
    assert len(auto.additional_special_tokens) == 100
    assert 2 not in auto.encode(string.printable)
    assert auto.decode(auto.encode("A bell rang; 12 people (or so) left."), skip_special_tokens=True) == (
        "A bell rang; 12 people (or so) left."
    )


def test_training_a_tokenizer_names_bad_articles(tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", [{"document": "Too little.", "summary": "Much too little."}])
    result = run_script("train_sample_tokenizer.py", "--articles", few, "--output", tmp_path / "out")
    assert result.returncode == 2 and "does not make 4000 pieces" in result.stderr
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"document": "No summary."}])
    result = run_script("train_sample_tokenizer.py", "--articles", bad, "--output", tmp_path / "out")
    assert result.returncode == 2 and "line 1 of" in result.stderr
    assert not (tmp_path / "out").exists()


# ---- export ----------------------------------------------------------------------------------------------------------

ROWS = [
    {"document": "First.\nIt rained \u2014 a lot.", "summary": "One", "id": "11"},
    {"document": "", "summary": "Nothing", "id": "12"},
    {"document": " \n", "summary": "Blank", "id": "13"},
    {"document": "Third.", "summary": "Three", "id": "14"},
    {"document": None, "summary": "Null", "id": "15"},
    {"document": "Last.", "summary": "Four", "id": "16"},
]
EXPORTED = [
    {"text": "First.\nIt rained \u2014 a lot.", "summary": "One", "id": "11"},
    {"text": "Third.", "summary": "Three", "id": "14"},
    {"text": "Last.", "summary": "Four", "id": "16"},
]


def write_parquet(path: Path | io.BytesIO, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_export_takes_local_files(tmp_path: Path, suffix: str) -> None:
    source, output = tmp_path / f"my xsum{suffix}", tmp_path / "out dir" / "xsum_text.jsonl"
    write_jsonl(source, ROWS) if suffix == ".jsonl" else write_parquet(source, ROWS)
    result = run_script("export_xsum_corpus.py", "--output", output, XSUM_SOURCE=str(source))
    assert result.returncode == 0, result.stderr
    assert [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] == EXPORTED
    assert "3 documents (3 without text left out)" in result.stdout
    record = json.loads(output.with_name("xsum_text.meta.json").read_text())
    assert (record["documents"], record["skipped_empty"], record["source"]) == (3, 3, f"file {source}")
    assert record["sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()
    assert {path.name for path in output.parent.iterdir()} == {"xsum_text.jsonl", "xsum_text.meta.json"}


def test_export_limit_counts_documents_with_text(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "xsum.jsonl", ROWS)
    output = tmp_path / "out.jsonl"
    run_script("export_xsum_corpus.py", "--source", source, "--output", output, "--limit", 2)
    assert texts_of(output) == [row["text"] for row in EXPORTED[:2]]


def test_export_without_ids_counts_lines(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "xsum.jsonl", [{"document": "A.", "summary": "a"}, {"document": "B.", "summary": "b"}]
    )
    run_script("export_xsum_corpus.py", "--source", source, "--output", tmp_path / "out.jsonl")
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["1", "2"]


def test_export_knows_whether_it_is_current(tmp_path: Path) -> None:
    source, output = write_jsonl(tmp_path / "xsum.jsonl", ROWS), tmp_path / "out.jsonl"
    base = ("export_xsum_corpus.py", "--source", source, "--output", output)

    def current(*more: object) -> bool:
        return run_script(*base, "--is-current", *more).returncode == 0

    assert not current()
    run_script(*base)
    assert current()
    assert not current("--limit", 2)
    write_jsonl(source, ROWS[:-1])
    assert not current()
    run_script(*base)
    assert current()
    output.write_text(output.read_text()[:-1])
    assert not current()


BAD_SOURCES = {
    "missing.jsonl": (None, "there is no file"),
    "articles.csv": (b"document,summary\n", "neither .jsonl nor .parquet"),
    "broken.jsonl": (b'{"document": "a", "summary": "b"}\n{"document"\n', "line 2 of"),
    "column.jsonl": (b'{"article": "a", "summary": "b"}\n', 'has no "document"; it has article, summary'),
    "number.jsonl": (b'{"document": 7, "summary": "b"}\n', "the document is not text but int"),
    "surrogate.jsonl": (b'{"document": "a \\ud83d", "summary": "b"}\n', "line 1 of"),
    "empty.jsonl": (b'{"document": " ", "summary": "b"}\n', "not a single article with text"),
    "broken.parquet": (b"PAR1 but not really PAR1", "is not a Parquet file"),
    "column.parquet": ([{"document": "a", "highlights": "b"}], 'has no "summary"; it has document, highlights'),
    "number.parquet": ([{"document": 7, "summary": "b"}], "row 1 of"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_export_refuses_bad_sources(tmp_path: Path, name: str) -> None:
    content, message = BAD_SOURCES[name]
    source = tmp_path / name
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content:
        write_parquet(source, content)
    output = tmp_path / "out" / "xsum_text.jsonl"
    output.parent.mkdir()
    output.write_text("what was there before")
    result = run_script("export_xsum_corpus.py", "--output", output, XSUM_SOURCE=str(source))
    assert_refused(result, message)
    assert snapshot(output.parent) == {"xsum_text.jsonl": b"what was there before"}


def test_export_says_that_the_hub_does_not_answer(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the hub's dataset needs the datasets package")
    begun = time.monotonic()
    result = run_script(
        "export_xsum_corpus.py", "--output", tmp_path / "o.jsonl", HF_HOME=str(tmp_path / "hf"), **NO_HUB
    )
    assert time.monotonic() - begun < 20, "load_dataset was left to retry"
    assert_refused(
        result, "EdinburghNLP/xsum could not be loaded", "http://127.0.0.1:9 does not answer", "XSUM_SOURCE="
    )
    assert not list(tmp_path.glob("*o*.jsonl*"))


# ---- a hub on this machine -------------------------------------------------------------------------------------------

PARQUET = "refs/convert/parquet"


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as loading a dataset and a tokenizer asks for, after its public HTTP API."""

    repositories: dict[str, dict[str, dict[str, bytes]]]  # name: revision: file: content
    downloads: list[str]
    commit = ""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path).split("?")[0].removeprefix("/api").removeprefix("/models").strip("/")
        name = next((name for name in self.repositories if path.startswith(name)), None)
        if name is None:
            self.answer_json({"error": "Repository not found"}, 404, "RepoNotFound")
            return
        action, _, rest = path.removeprefix(name).strip("/").partition("/")
        self.answer_revision(name, action, rest or "main")

    def answer_revision(self, name: str, action: str, rest: str) -> None:
        for revision, files in self.repositories[name].items():
            for spelling in (revision, commit_of(revision)):
                if rest == spelling or rest.startswith(f"{spelling}/"):
                    self.commit = commit_of(revision)
                    self.answer_action(name, action, rest.removeprefix(spelling).strip("/"), files)
                    return
        self.answer_json({"error": "Revision not found"}, 404, "RevisionNotFound")

    def answer_action(self, name: str, action: str, path: str, files: dict[str, bytes]) -> None:
        if action == "resolve":
            self.answer_file(path, files.get(path))
        elif action == "tree":
            self.answer_json(self.tree(files, path))
        else:
            siblings = [{"rfilename": file} for file in files]
            self.answer_json({"id": name.removeprefix("datasets/"), "sha": self.commit, "siblings": siblings})

    def tree(self, files: dict[str, bytes], folder: str) -> list[dict]:
        inside = [file for file in files if file.startswith(f"{folder}/" if folder else "")]
        folders = {"/".join(file.split("/")[:depth]) for file in inside for depth in range(1, file.count("/") + 1)}
        entries = [{"type": "directory", "oid": self.commit, "size": 0, "path": path} for path in sorted(folders)]
        entries += [{"type": "file", "oid": self.commit, "size": len(files[path]), "path": path} for path in inside]
        if "recursive=True" not in self.path:
            depth = folder.count("/") + 1 if folder else 0
            entries = [entry for entry in entries if entry["path"].count("/") == depth]
        return [entry for entry in entries if entry["path"] != folder]

    def answer_file(self, name: str, content: bytes | None) -> None:
        if content is None:
            self.answer_json({"error": "Entry not found"}, 404, "EntryNotFound")
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.downloads.append(name)
            self.wfile.write(content)

    def answer_json(self, content: object, status: int = 200, error: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        if self.commit:
            self.send_header("X-Repo-Commit", self.commit)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve_hub(repositories: dict[str, dict[str, dict[str, bytes]]]) -> Iterator[tuple[str, list[str]]]:
    """The hub's address and the list of files that are fetched from it."""
    downloads: list[str] = []
    handler = type("ThisHub", (Hub,), {"repositories": repositories, "downloads": downloads})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloads
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def xsum_in_parquet() -> dict[str, bytes]:
    """XSum as the hub's Parquet conversion lays it out, with few rows; the last of train's two files has one."""
    splits = {"train/0000": ROWS * 500, "train/0001": [{"document": "End.", "summary": "E", "id": "99"}]}
    splits |= {"validation/0000": ROWS, "test/0000": ROWS[:1]}
    files = {}
    for name, rows in splits.items():
        buffer = io.BytesIO()
        write_parquet(buffer, rows)
        files[f"default/{name}.parquet"] = buffer.getvalue()
    return files


def t5_on_the_hub() -> dict[str, bytes]:
    """A T5 repository as google-t5's are: a bare tokenizer_config.json, the model type in config.json, weights."""
    return {
        "spiece.model": (SAMPLE / "tokenizer" / "spiece.model").read_bytes(),
        "tokenizer_config.json": b'{"model_max_length": 512}',
        "config.json": b'{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}',
        "model.safetensors": b"weights that nobody asked for",
        "README.md": b"# T5",
    }


def test_export_takes_the_main_branch_when_there_is_no_conversion(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the hub's dataset needs the datasets package")
    output = tmp_path / "xsum_text.jsonl"
    with serve_hub({"datasets/EdinburghNLP/xsum": {"main": xsum_in_parquet()}}) as (address, _):
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "XSUM_SPLIT": "validation"}
        result = run_script("export_xsum_corpus.py", "--output", output, **environment)
        assert result.returncode == 0, result.stderr
        assert texts_of(output) == [row["text"] for row in EXPORTED]
    with serve_hub({}) as (address, _):
        result = run_script(
            "export_xsum_corpus.py", "--output", output, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "other")
        )
    assert_refused(result, "there is none of that name, or it is not public")


# ---- prepare_xsum_megatron.sh ----------------------------------------------------------------------------------------


@pytest.fixture
def prepare(project: Project):
    """Run prepare_xsum_megatron.sh of a copy of the repository (path with spaces, no USER) without data."""
    for path in (project.root / "megatron_data").iterdir():
        path.unlink()
    shutil.copytree(SAMPLE, project.root / "megatron_data" / "sample")

    def run(*arguments: str, cwd: Path | None = None, **environment: str | None) -> subprocess.CompletedProcess[str]:
        assert "USER" not in project.environment
        return subprocess.run(
            ["bash", str(project.script("prepare_xsum_megatron.sh")), *arguments],
            env=project.environment_with(NO_HUB | {"HF_HOME": str(project.root.parent / "hf")} | environment),
            cwd=cwd or project.root,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    run.project = project
    run.data = project.root / "megatron_data"
    return run


@pytest.fixture
def prepared(prepare, sample_data: Path):
    """`prepare`, with the sample already prepared."""
    shutil.copytree(sample_data, prepare.data, dirs_exist_ok=True)
    return prepare


@pytest.fixture(scope="session")
def sample_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What SAMPLE=1 writes, made once."""
    directory = tmp_path_factory.mktemp("sample") / "data"
    result = subprocess.run(
        ["bash", str(SCRIPTS / "prepare_xsum_megatron.sh")],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHON": sys.executable, "SAMPLE": "1"}
        | {"MEGATRON_DATA_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return directory


def outputs(directory: Path) -> dict[str, bytes]:
    return {name: content for name, content in snapshot(directory).items() if not name.startswith("sample/")}


def test_the_sample_is_prepared_offline_in_seconds(prepare, encoder: bid.DocumentEncoder) -> None:
    begun = time.monotonic()
    result = prepare(SAMPLE="1")
    seconds = time.monotonic() - begun
    assert result.returncode == 0, result.stderr
    assert {path.name for path in prepare.data.iterdir()} == OUTPUTS | {"sample"}
    documents = [article["document"] for article in articles()]
    assert texts_of(prepare.data / "xsum_text.jsonl") == documents
    assert numpy_documents(prepare.data / "xsum_text_document") == encoder.encode_batch(documents)
    assert snapshot(prepare.data / "tokenizer") == snapshot(SAMPLE / "tokenizer")
    assert seconds < 60

    meta = json.loads((prepare.data / "xsum_text_document.meta.json").read_text())
    info = bid.read_index(prepare.data / "xsum_text_document")
    assert (meta["source"], meta["tokenizer"]) == ("bundled sample", "bundled sample")
    assert (meta["documents"], meta["tokens"], meta["dtype"]) == (320, info.tokens, "uint16")
    for name in ("xsum_text.jsonl", "xsum_text_document.bin", "xsum_text_document.idx"):
        content = (prepare.data / name).read_bytes()
        assert meta["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert set(meta["versions"]) == {"python", "sentencepiece", "transformers"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", meta["date"])

    assert f"320 documents, {info.tokens:,} tokens" in result.stdout
    assert f"xsum_text_document.bin: {info.bin_bytes:,} bytes" in result.stdout
    command = result.stdout.splitlines()[-1].strip()
    assert command == "MODEL_PRESET=tiny bash scripts/run_megatron_t5_ddp.sh"
    dry_run = subprocess.run(
        ["bash", "-c", f"{command} --dry-run"],
        env=prepare.project.environment,
        cwd=prepare.project.root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert dry_run.returncode == 0, dry_run.stderr
    arguments = shlex.split(dry_run.stdout.split("\n{")[0])
    assert str(prepare.data / "tokenizer") in arguments
    assert str(prepare.data / "xsum_text_document") in arguments


def test_a_second_run_uses_the_export_and_gives_the_same_files(prepared) -> None:
    before = outputs(prepared.data)
    # The copy of the repository has its own articles file, with a time of its own.
    result = prepared(SAMPLE="1")
    assert result.returncode == 0, result.stderr
    again = prepared(SAMPLE="1")
    assert "exported earlier from the same source" in again.stderr
    after = outputs(prepared.data)
    for name in before:
        if not name.endswith("meta.json"):
            assert after[name] == before[name]
    assert not list(prepared.data.glob(".*"))


def test_hub_data_with_the_default_tokenizer(prepare) -> None:
    pytest.importorskip("datasets", reason="the hub's dataset needs the datasets package")
    script = {"xsum.py": b"raise SystemExit('a loading script')", "README.md": b"# XSum"}
    repositories = {
        "datasets/EdinburghNLP/xsum": {"main": script, PARQUET: xsum_in_parquet()},
        "google-t5/t5-large": {"main": t5_on_the_hub()},
    }
    with serve_hub(repositories) as (address, downloads):
        unknown = prepare(HF_ENDPOINT=address, XSUM_SPLIT="dev")
        assert_refused(unknown, "EdinburghNLP/xsum has no split 'dev'", "train, validation or test")
        result = prepare(HF_ENDPOINT=address, MEGATRON_DATA_DIR="data here")
    assert result.returncode == 0, result.stderr
    directory = prepare.project.root / "data here"
    assert {path.name for path in directory.iterdir()} == OUTPUTS
    texts = texts_of(directory / "xsum_text.jsonl")
    assert texts == [row["text"] for row in EXPORTED] * 500 + ["End."]
    assert bid.read_index(directory / "xsum_text_document").documents == 1501
    assert set(downloads) - {name for name in downloads if name.endswith(".parquet")} <= set(bid.TOKENIZER_FILES)
    assert "spiece.model" in downloads
    config = json.loads((directory / "tokenizer" / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "T5Tokenizer", "legacy": True, "model_max_length": 512}
    meta = json.loads((directory / "xsum_text_document.meta.json").read_text())
    assert meta["source"] == "EdinburghNLP/xsum train from the Hugging Face hub"
    assert meta["tokenizer"] == "google-t5/t5-large"
    assert "scp -r " in result.stdout
    assert shlex.split(result.stdout.split("Next:\n")[1].splitlines()[0])[0] == f"MEGATRON_DATA_DIR={directory}"

    # Without the hub, what it gave before is in the local cache.
    cache = str(prepare.project.root.parent / "hf")
    cached = run_script("export_xsum_corpus.py", "--output", directory / "cached.jsonl", HF_HOME=cache, **NO_HUB)
    assert cached.returncode == 0, cached.stderr
    assert texts_of(directory / "cached.jsonl") == texts
    # The tokenizer's copy serves instead of the hub, which is gone, and the export is used again.
    copied = prepare(MEGATRON_DATA_DIR="data here", TOKENIZER_MODEL="data here/tokenizer")
    assert copied.returncode == 0, copied.stderr
    assert "exported earlier from the same source" in copied.stderr


def test_a_tokenizer_that_the_hub_does_not_give(prepared) -> None:
    before = outputs(prepared.data)
    source = str(prepared.data / "sample" / "articles.jsonl")
    result = prepared(XSUM_SOURCE=source, FORCE="1")
    assert_refused(
        result, "the tokenizer google-t5/t5-large could not be fetched", "does not answer", "TOKENIZER_MODEL"
    )
    assert outputs(prepared.data) == before
    assert not list(prepared.data.glob(".*"))


def test_a_failed_run_leaves_everything_as_it_was(prepared) -> None:
    before = outputs(prepared.data)
    source = write_jsonl(prepared.project.root / "other.jsonl", ROWS)
    source.write_text(source.read_text() + "{broken\n")
    result = prepared(XSUM_SOURCE=str(source), FORCE="1", TOKENIZER_MODEL=str(SAMPLE / "tokenizer"))
    assert_refused(result, "line 7 of", "is not valid JSON")
    assert outputs(prepared.data) == before
    fresh = prepared(XSUM_SOURCE=str(source), MEGATRON_DATA_DIR="not yet/there")
    assert_refused(fresh, "line 7 of")
    assert not (prepared.project.root / "not yet" / "there").exists()
    assert not list(prepared.data.glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_everything_as_it_was(prepared, number: signal.Signals) -> None:
    before = outputs(prepared.data)
    # Tokenising takes ten minutes here.
    real = shlex.quote(sys.executable)
    slow = f'[[ $* != *--tokenizer-copy* ]] || {{ touch "$STUB_DIR/tokenising"; exec sleep 600; }}\nexec {real} "$@"\n'
    prepared.project.add_stub("slow-python", f"#!/usr/bin/env bash\n{slow}")
    process = subprocess.Popen(
        ["bash", str(prepared.project.script("prepare_xsum_megatron.sh"))],
        env=prepared.project.environment_with({"SAMPLE": "1", "FORCE": "1", "PYTHON": "slow-python"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell cannot trap what it was started with ignored, as background jobs are.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    wait_for((prepared.project.stubs / "tokenising").exists)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert "interrupted" in stderr
    assert outputs(prepared.data) == before
    assert not (prepared.data / ".prepare").exists()


def test_an_interrupted_export_leaves_no_temporary_file(tmp_path: Path) -> None:
    source = tmp_path / "many.jsonl"
    source.write_text('{"document": "It rained.", "summary": "Rain."}\n' * 500_000)
    output = tmp_path / "out" / "xsum_text.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "export_xsum_corpus.py"), "--source", str(source), "--output", str(output)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(output.with_name(f".{output.name}.partial-{process.pid}").exists)
    process.terminate()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "Traceback" not in stderr
    assert snapshot(output.parent) == {}


def test_data_from_another_source_are_not_replaced_unasked(prepared) -> None:
    before = outputs(prepared.data)
    other = write_jsonl(prepared.project.root / "other.jsonl", ROWS)
    tokenizer = str(prepared.data / "sample" / "tokenizer")
    result = prepared()
    assert_refused(result, "was made from bundled sample", "EdinburghNLP/xsum train", "FORCE=1", "MEGATRON_DATA_DIR")
    result = prepared(XSUM_SOURCE=str(other), TOKENIZER_MODEL=tokenizer)
    assert_refused(result, "was made from bundled sample", f"file {other}")
    result = prepared(XSUM_SOURCE=str(prepared.data / "sample" / "articles.jsonl"))
    assert_refused(result, "was made with the tokenizer bundled sample", "google-t5/t5-large")
    result = prepared(
        XSUM_SOURCE=str(prepared.data / "sample" / "articles.jsonl"), TOKENIZER_MODEL=tokenizer, XSUM_LIMIT="9"
    )
    assert_refused(result, "bundled sample, first 9 documents")
    (prepared.data / "xsum_text_document.meta.json").unlink()
    assert_refused(prepared(SAMPLE="1"), "xsum_text_document.bin exists and nothing beside it says where it came from")
    kept = {name: content for name, content in before.items() if not name.endswith("meta.json")}
    assert {name: c for name, c in outputs(prepared.data).items() if not name.endswith("meta.json")} == kept

    stale = prepared.data / "xsum_text_document_train_indexmap_800mns_510msl_0.00ssp_1234s.npy"
    stale.write_bytes(b"made from the data before")
    result = prepared(XSUM_SOURCE=str(other), TOKENIZER_MODEL=tokenizer, FORCE="1")
    assert result.returncode == 0, result.stderr
    assert texts_of(prepared.data / "xsum_text.jsonl") == [row["text"] for row in EXPORTED]
    assert bid.read_index(prepared.data / "xsum_text_document").documents == 3
    assert not stale.exists()
    assert_refused(prepared(SAMPLE="1"), f"was made from file {other}")


def test_an_export_made_beforehand_is_used(prepare) -> None:
    # As on a cluster whose login node has the network and whose compute nodes do not.
    source = prepare.data / "sample" / "articles.jsonl"
    scripts = prepare.project.root / "scripts"
    export = [sys.executable, scripts / "export_xsum_corpus.py", "--source", source]
    subprocess.run(export, env=prepare.project.environment, check=True, timeout=60, capture_output=True)
    begun = (prepare.data / "xsum_text.jsonl").stat().st_mtime_ns
    result = prepare(SAMPLE="1")
    assert result.returncode == 0, result.stderr
    assert "exported earlier from the same source" in result.stderr
    assert (prepare.data / "xsum_text.jsonl").stat().st_mtime_ns == begun
    for name in ("xsum_text_document.bin", "xsum_text_document.idx", "xsum_text.meta.json"):
        (prepare.data / name).unlink()
    assert_refused(prepare(SAMPLE="1"), "xsum_text.jsonl exists and nothing beside it says where it came from")


def test_one_run_at_a_time_and_remains_of_a_killed_one(prepared) -> None:
    staging = prepared.data / ".prepare"
    staging.mkdir()
    (staging / "owner").write_text(f"{os.getpid()} {socket.gethostname()}\n")
    assert_refused(prepared(SAMPLE="1"), f"process {os.getpid()} is preparing data")
    (staging / "owner").write_text("77 another-node\n")
    assert_refused(prepared(SAMPLE="1"), "process 77 on another-node is preparing data", str(staging))
    ended = subprocess.Popen(["true"])
    ended.wait()
    (staging / "owner").write_text(f"{ended.pid} {socket.gethostname()}\n")
    (staging / "xsum_text.jsonl").write_text("half")
    result = prepared(SAMPLE="1")
    assert result.returncode == 0, result.stderr
    assert not staging.exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SAMPLE": "1", "XSUM_SOURCE": "x.jsonl"}, "XSUM_SOURCE is set as well"),
        ({"SAMPLE": "1", "TOKENIZER_MODEL": "google-t5/t5-large"}, "TOKENIZER_MODEL is set as well"),
        ({"SAMPLE": "yes"}, "SAMPLE is 'yes'"),
        ({"FORCE": "maybe"}, "FORCE is 'maybe'"),
        ({"XSUM_LIMIT": "0"}, "XSUM_LIMIT must be a whole number of at least 1"),
        ({"XSUM_SOURCE": "no/such.jsonl"}, "there is no file no/such.jsonl"),
        ({"XSUM_SOURCE": "no/such.csv"}, "there is no file no/such.csv"),
        ({"MEGATRON_DATA_DIR": "/proc/nowhere", "SAMPLE": "1"}, "/proc/nowhere cannot be created"),
        ({"MEGATRON_DATA_DIR": "", "SAMPLE": "1"}, "MEGATRON_DATA_DIR is empty"),
        ({"PYTHON": "python-that-is-not-there", "SAMPLE": "1"}, "there is no 'python-that-is-not-there' on PATH"),
    ],
)
def test_settings_that_make_no_sense_are_refused(prepare, environment: dict[str, str], message: str) -> None:
    assert_refused(prepare(**environment), message, remedy="whole number" not in message)
    assert {path.name for path in prepare.data.iterdir()} == {"sample"}


def test_missing_packages_are_named_with_the_command_that_installs_them(prepare) -> None:
    # -S leaves out site-packages, and with them every package.
    prepare.project.add_stub("bare-python", f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    result = prepare(PYTHON="bare-python", SAMPLE="1", PYTHONPATH=None)
    assert_refused(result, "lacks numpy, sentencepiece, transformers, tqdm", "pip install -r ", "requirements.txt")
    result = prepare(PYTHON="bare-python", PYTHONPATH=None)
    assert_refused(result, "datasets")


def test_python_alone_serves_where_there_is_no_python3(prepare) -> None:
    tools = prepare.project.stubs / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "mkdir", "rm", "rmdir", "mv", "cmp"):
        (tools / tool).symlink_to(shutil.which(tool))
    (tools / "python").write_text(f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tools / "python").chmod(0o755)
    result = prepare(PATH=str(tools), PYTHON=None, SAMPLE="1", XSUM_LIMIT="0")
    assert_refused(result, "XSUM_LIMIT", remedy=False)
    result = prepare(PATH=str(tools), PYTHON=None, XSUM_SOURCE="no.jsonl")
    assert_refused(result, "there is no file no.jsonl")


def test_help_names_every_setting_and_needs_nothing(prepare) -> None:
    result = prepare("--help", PYTHON="nothing")
    assert result.returncode == 0, result.stderr
    for name in ("SAMPLE", "MEGATRON_DATA_DIR", "XSUM_SOURCE", "XSUM_SPLIT", "XSUM_LIMIT", "TOKENIZER_MODEL", "FORCE"):
        assert re.search(rf"^  {name} ", result.stdout, re.MULTILINE), name
    assert_refused(prepare("--helpme"), "unknown argument '--helpme'")
    for script in ("export_xsum_corpus.py", "build_indexed_dataset.py", "train_sample_tokenizer.py"):
        assert run_script(script, "--help").returncode == 0
