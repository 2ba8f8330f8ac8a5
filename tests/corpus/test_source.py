"""Data as people bring them: several files, kinds of JSON, encodings, unusable rows, other tools' indices."""

import codecs
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import corpus_files as corpus
import numpy as np
import pytest
from corpus_files import in_parquet, texts_of, write_jsonl
from preparation_speed import NLTK
from support import REPO_ROOT, write_indexed_dataset

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.corpus import source
from t5bench.corpus.index import lacks_validation, read_index, split_documents
from t5bench.corpus.prepare import prepare

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exports a source in this process; what it said."""
    monkeypatch.setattr("t5bench.corpus.prepare.SIGNALS", ())

    def export(named: object, **settings: str) -> str:
        prepare({"MEGATRON_DATA_DIR": str(tmp_path / "out"), "XSUM_SOURCE": str(named), "WORKERS": "1"} | settings)
        return "".join(capsys.readouterr())

    return export


def exported(tmp_path: Path) -> list[str]:
    return texts_of(tmp_path / "out" / "xsum_text.jsonl")


def row(number: int) -> dict[str, str]:
    return {"document": f"Text {number}.", "summary": "S."}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_directory_and_a_pattern_of_shards(tmp_path: Path, run: Run, kind: str) -> None:
    """In the order of their names; what a program left beside them is not read."""
    shards = tmp_path / "my shards"
    (shards / "more" / "_temporary").mkdir(parents=True)
    for number, name in enumerate(("part-0", "part-1", "more/part-2", "more/_temporary/part-9", ".part-8")):
        path = shards / f"{name}.{kind}"
        path.write_bytes(in_parquet([row(number)] * 3)) if kind == "parquet" else write_jsonl(path, [row(number)] * 3)
    (shards / "_SUCCESS").touch()
    (shards / "README.md").write_text("Not data.")
    run(shards)
    assert exported(tmp_path) == [f"Text {number}." for number in (2, 0, 1) for _ in range(3)]
    ids = [json.loads(line)["id"] for line in (tmp_path / "out" / "xsum_text.jsonl").read_text().splitlines()]
    assert ids == [str(number) for number in range(1, 10)]
    run(shards / f"part-*.{kind}", FORCE="1")
    assert exported(tmp_path) == [f"Text {number}." for number in (0, 1) for _ in range(3)]
    record = json.loads((tmp_path / "out" / "xsum_text.meta.json").read_text())
    assert record["source"] == f"2 files {shards}/part-*.{kind}" and record["source_state"].startswith("2 files, ")
    run(shards, XSUM_LIMIT="4", FORCE="1")
    assert len(exported(tmp_path)) == 4


def test_a_faulty_row_is_named_by_its_own_file(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", 30)
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", [row(n) for n in range(5)])
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "x"}\n\n{broken\n')
    with pytest.raises(Problem, match=r"line 3 of .*/b.jsonl is not a JSON object"):
        run(tmp_path / "in")


def test_sources_that_cannot_be_meant(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "notes.txt").touch()
    for named, message in (
        (folder, "has no file that ends in"),
        (folder / "*.jsonl", "no file matches"),
        (folder / "*", "notes.txt does not have the name of a JSONL"),
        (folder / "x.jsonl", "there is no file"),
    ):
        with pytest.raises(Problem, match=message) as caught:
            run(named)
        assert "XSUM_SOURCE" in caught.value.remedy
    write_jsonl(folder / "a.jsonl", [row(1)])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(Problem, match="seem to be the same documents twice"):
        run(folder)
    (folder / "a.jsonl.gz").unlink()
    (folder / "b.parquet").write_bytes(in_parquet([row(1)]))
    with pytest.raises(Problem, match="both JSON and Parquet"):
        run(folder)


LINES = b'{"text": "One."}\n{"text": "Two."}\n'
ARRAY = b' [\n {"text": "One."},\n {"text": "Two.", "score": NaN}\n]\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", LINES),
        ("a.ndjson", LINES),
        ("a.json.gz", gzip.compress(LINES, mtime=0)),
        ("A.JSONL", LINES),
        ("a.json", ARRAY),
        ("a.json.gz", gzip.compress(ARRAY, mtime=0)),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n")),
        ("a.jsonl", codecs.BOM_UTF8 + LINES),
        ("a.jsonl.gz", gzip.compress(codecs.BOM_UTF8 + LINES, mtime=0)),
        ("a.jsonl", LINES[:-1]),
        # What a file holds counts, whatever its name says.
        ("a.jsonl", ARRAY),
        ("a.jsonl", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.GZ", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.gz", LINES),
        ("a.jsonl.zst", gzip.compress(LINES, mtime=0)),
    ],
)
def test_kinds_of_json(tmp_path: Path, run: Run, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    said = run(tmp_path / name)
    assert exported(tmp_path) == ["One.", "Two."]
    plain = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    has_mark = plain.startswith(codecs.BOM_UTF8)
    assert ("begins with a byte order mark (BOM), which is skipped" in said) == has_mark


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_named(tmp_path: Path, run: Run, encoding: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES.decode().encode(encoding))
    with pytest.raises(Problem, match=rf"a.jsonl is in {encoding[:6].upper()}, .* must be in UTF-8") as caught:
        run(tmp_path / "a.jsonl")
    assert f"iconv -f {encoding[:6].upper()} -t UTF-8" in caught.value.remedy


def test_what_pandas_and_python_write_does_not_stop_a_corpus(tmp_path: Path, run: Run) -> None:
    """NaN in another column, NaN for a missing text, and half of a surrogate pair."""
    lines = ['{"text": "One.", "score": NaN, "other": -Infinity}', '{"text": NaN}', '{"text": "a \\ud83d b"}']
    lines += ['{"text": "Two.", "summary": "\\udc00", "id": "\\ud800"}', '{"text": "pair \\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    said = run(tmp_path / "a.jsonl")
    assert exported(tmp_path) == ["One.", "Two.", "pair \U0001f600"]
    assert "1 empty document was skipped" in said and "1 document with invalid text skipped" in said
    assert f"skipped: line 3 of {tmp_path}/a.jsonl: its text has half of a surrogate pair" in said
    rows = [json.loads(line) for line in (tmp_path / "out" / "xsum_text.jsonl").read_text().splitlines()]
    assert (rows[1]["summary"], rows[1]["id"]) == ("", "?")


def test_rows_that_cannot_be_used_are_reported_at_once(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", 40)
    lines = ['{"text": "fine"}'] * 10
    lines[2] = '{"text": 5}'
    lines[7] = "{"
    lines[9] = '{"txt": "x"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(Problem, match=r"^3 rows cannot be used: line 3 .*; line 8 .*; line 10 ") as caught:
        run(tmp_path / "a.jsonl")
    assert len(caught.value.remedy.splitlines()) == 3
    (tmp_path / "b.jsonl").write_text("nonsense\n" * 1000)
    with pytest.raises(Problem, match=r"^at least \d\d rows cannot be used: line 1 .*; \.\.\.$"):
        run(tmp_path / "b.jsonl")
    assert not (tmp_path / "out" / "xsum_text.jsonl").exists()


def test_a_tilde_in_quotes(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", [row(1)])
    run("~/a.jsonl")
    assert exported(tmp_path) == ["Text 1."]


def test_documents_for_validation() -> None:
    assert split_documents([949, 50, 1], 320) == [(0, 304), (304, 320), (320, 320)]
    for documents in (1, 2, 5, 10):
        problem = lacks_validation(documents)
        assert f"of {documents} documents leaves none for validation" in str(problem)
        enough = int(problem.remedy.split()[-2])
        assert lacks_validation(enough) is None and lacks_validation(enough - 1)
    assert lacks_validation(11) is None and lacks_validation(320) is None
    assert lacks_validation(10, "50,50,0") is None


def test_an_index_that_does_not_count_the_end_of_a_document(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As made-up files; test_the_engines_own_append_eod uses the engine's tool."""
    write_indexed_dataset(tmp_path / "eod", [[5, 6, 7, 1], [8, 9, 1], [4, 1]])
    right = (tmp_path / "eod.idx").read_bytes()
    tokens = (tmp_path / "eod.bin").read_bytes()
    write_indexed_dataset(tmp_path / "eod", [[5, 6, 7], [8, 9], [4]])
    (tmp_path / "eod.bin").write_bytes(tokens)
    with pytest.raises(Problem, match="it was made with --append-eod by the engine's tool") as caught:
        read_index(tmp_path / "eod")
    assert caught.value.remedy == f"Write a corrected copy: python -m t5bench merge-data NEW {tmp_path}/eod"
    assert main(["merge-data", str(tmp_path / "new"), str(tmp_path / "eod")]) == 0
    assert (tmp_path / "new.idx").read_bytes() == right and (tmp_path / "new.bin").read_bytes() == tokens
    assert "3 documents" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_engines_own_append_eod(megatron_dir: Path, tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in corpus.ARTICLES[:5]])
    bpe = megatron_dir / "examples_deepspeed" / "rebase"
    options = ["--input", str(texts), "--output-prefix", "theirs", "--workers", "1", "--seq-length", "512"]
    options += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    options += ["--vocab-file", str(bpe / "gpt2-vocab.json"), "--merge-file", str(bpe / "gpt2-merges.txt")]
    (tmp_path / "nltk.py").write_text(NLTK)
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{tmp_path}:{megatron_dir}"}
    command = [sys.executable, str(megatron_dir / "tools" / "preprocess_data.py"), *options]
    subprocess.run(command, env=environment, cwd=tmp_path, timeout=200, check=True)
    with pytest.raises(Problem, match="--append-eod"):
        read_index(tmp_path / "theirs_text_document")
    assert main(["merge-data", str(tmp_path / "new"), str(tmp_path / "theirs_text_document")]) == 0
    index = read_index(tmp_path / "new")
    tokens = np.fromfile(tmp_path / "new.bin", index.dtype)
    ends = np.cumsum(index.sizes) - 1
    assert (tokens[ends] == 50256).all() and (tokens == 50256).sum() == 5


def test_a_clone_keeps_its_line_ends(tmp_path: Path) -> None:
    """Whatever core.autocrlf says: with carriage returns no script runs, and no checksum is right."""
    origin = tmp_path / "origin"
    clone = tmp_path / "clone"
    origin.mkdir()
    for name in (".gitattributes", "scripts/common.sh", "patches/0006-gpt.patch"):
        (origin / name).parent.mkdir(exist_ok=True)
        (origin / name).write_bytes((REPO_ROOT / name).read_bytes())
    git = ["git", "-C", str(origin), "-c", "user.name=N", "-c", "user.email=n@localhost", "-c", "core.autocrlf=true"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "A checkout"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run(["git", "clone", "-q", "-c", "core.autocrlf=true", str(origin), str(clone)], check=True)
    for name in ("scripts/common.sh", "patches/0006-gpt.patch"):
        assert (clone / name).read_bytes() == (REPO_ROOT / name).read_bytes(), name
