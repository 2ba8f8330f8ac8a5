"""Which column of a source is trained on: of several that may be meant none is guessed, and a plain one is taken."""

import json
import shlex
from pathlib import Path
from typing import Any

import corpus_files as corpus
import pyarrow
import pyarrow.parquet
import pytest
from corpus_files import texts_of

from t5bench import Problem
from t5bench.corpus.prepare import prepare as prepare_here

PROSE = "The harbour was quiet that morning, and nobody saw the boat leave."
OTHER = "Nothing like this had happened in the town for a hundred years."


def prepared(directory: Path, source: Path, **settings: str) -> list[str]:
    """The texts that would be trained on."""
    prepare_here({"MEGATRON_DATA_DIR": str(directory / "out"), "XSUM_SOURCE": str(source), **settings})
    return texts_of(directory / "out" / "xsum_text.jsonl")


def written(directory: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    path = directory / f"corpus.{kind}"
    if kind == "parquet":
        path.write_bytes(corpus.in_parquet(rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        corpus.write_jsonl(path, rows)
    return path


# What each has in every row, and the column that a person means.
AMBIGUOUS = [
    ({"document": "report-17.pdf", "text": PROSE}, "text"),
    ({"text": "3f2a99", "document": PROSE}, "document"),
    ({"text": PROSE, "content": OTHER}, "content"),
    ({"document": "a/b/c.html", "body": PROSE}, "body"),
    ({"text": "Weather", "Text": PROSE}, "Text"),
    ({"text": "A title", "main_part": PROSE * 3}, "main_part"),
    ({"document": "17", "utterances": PROSE * 2}, "utterances"),
    ({"text": "天气", "正文": "今天很冷" * 9}, "正文"),
    ({"text": PROSE, "text\u200b": OTHER}, "text\u200b"),
    ({"text": OTHER, " Text": PROSE}, " Text"),
    ({"document": "report-17.pdf", "html": f"<html><p>{PROSE}</p></html>"}, "html"),
    ({"text": "main.py", "code": "def f():\n    return 1\n" * 3}, "code"),
    ({"document": "4711", "payload": json.dumps({"body": PROSE})}, "payload"),
]
NOT_TEXT = [
    {"document": "report-17.pdf", "text": [PROSE, OTHER]},
    {"document": "report-17.pdf", "text": {"raw": PROSE}},
    {"text": "Weather", "messages": [{"role": "user", "content": PROSE * 3}]},
    {"document": "report-17.pdf", "text": ""},
]
PLAIN = [
    ({"text": PROSE}, "text"),
    ({"document": PROSE, "summary": "A boat left.", "id": "7"}, "document"),
    ({"text": PROSE, "url": "https://example.org/" + "x" * 400, "timestamp": "2019-04-25 12:57:54"}, "text"),
    ({"text": PROSE, "title": "The boat", "meta": {"warc": OTHER * 9}}, "text"),
    ({"text": PROSE, "html": f"<html><p>{PROSE * 9}</p></html>"}, "text"),
    ({"text": PROSE, "document": None}, "text"),
    ({"text": None, "document": PROSE}, "document"),
    ({"text": PROSE, "content": ""}, "text"),
    ({"text": PROSE, "label": 3, "sentence": 12}, "text"),
    ({"text": PROSE, "embedding": [0.5] * 400}, "text"),
    ({"text": "Yes", "id": "row 1"}, "text"),
]
NAMES = "-".join  # of a row's columns, for a test's name


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("row", "meant"), AMBIGUOUS, ids=[NAMES(row) for row, _ in AMBIGUOUS])
def test_more_than_one_column_may_be_meant(tmp_path: Path, row: dict[str, Any], meant: str, kind: str):
    source = written(tmp_path, [row] * 3, kind)
    with pytest.raises(Problem, match="has 2 columns that may hold the text: ") as caught:
        prepared(tmp_path, source)
    assert all(f'"{name}"' in caught.value.found for name in row)
    assert f"TEXT_COLUMN={shlex.quote(meant)}" in caught.value.remedy
    assert not list((tmp_path / "out").iterdir())
    assert prepared(tmp_path, source, TEXT_COLUMN=meant) == [row[meant]] * 3


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("row", NOT_TEXT, ids=NAMES)
def test_a_column_that_is_no_text_is_not_passed_over(tmp_path: Path, row: dict[str, Any], kind: str):
    source = written(tmp_path, [row] * 3, kind)
    with pytest.raises(Problem, match="columns that may hold the text"):
        prepared(tmp_path, source)
    with pytest.raises(Problem, match=r"not texts|no document with text"):
        prepared(tmp_path, source, TEXT_COLUMN=list(row)[1])


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("value", "word"),
    [([PROSE, OTHER], "lists"), ({"value": PROSE}, "objects"), (17, "numbers"), (2.5, "numbers"), (True, "true and")],
    ids=["list", "object", "whole number", "number", "truth"],
)
def test_a_column_of_another_type_is_told_once(tmp_path: Path, value: Any, word: str, kind: str):
    source = written(tmp_path, [{"text": value, "id": "1"}] * 3, kind)
    with pytest.raises(Problem, match=f'the column "text" of .* holds {word}') as caught:
        prepared(tmp_path, source)
    assert "one text per row" in caught.value.remedy


def test_bytes_in_a_parquet_file(tmp_path: Path):
    """As older writers make them of texts."""
    with pytest.raises(Problem, match=r'the column "text" of .* holds bytes'):
        prepared(tmp_path, written(tmp_path, [{"text": PROSE.encode()}], "parquet"))
    with pytest.raises(Problem, match=r'"content" \(bytes\)'):
        prepared(tmp_path, written(tmp_path, [{"text": "a-17", "content": PROSE.encode()}], "parquet"))


# The first rows have their text in one column, later ones in another.
CHANGING = {
    "a body later": ({"text": "id-17"}, {"text": "id-18", "body": PROSE}, "body"),
    "a document later": ({"text": PROSE}, {"text": "id", "document": OTHER}, "document"),
    "another spelling later": ({"text": PROSE}, {"text": None, "Text": OTHER}, "Text"),
    "content later": ({"document": PROSE}, {"document": "", "content": OTHER}, "content"),
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", CHANGING)
def test_every_later_row_must_agree_with_the_first(tmp_path: Path, name: str, kind: str):
    early, late, other = CHANGING[name]
    columns = dict.fromkeys({**early, **late})  # a table has all columns in every row
    rows = [columns | early if kind == "parquet" else early] * 70 + [columns | late if kind == "parquet" else late]
    with pytest.raises(Problem, match=rf'71 of .* has text in "{other}", but|"{other}" \(empty\)') as caught:
        prepared(tmp_path, written(tmp_path, rows, kind))
    assert f"TEXT_COLUMN={other}" in caught.value.remedy.replace("'", "")
    assert prepared(tmp_path, written(tmp_path, rows, kind), TEXT_COLUMN=next(iter(early)))


def test_a_name_twice_that_json_may_write_in_two_ways(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"\\u6b63\\u6587": "file.txt", "正文": "two"}\n')
    with pytest.raises(Problem, match='has "正文" twice'):
        prepared(tmp_path, tmp_path / "a.jsonl", TEXT_COLUMN="正文")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("row", "meant"), PLAIN, ids=[NAMES(row) for row, _ in PLAIN])
def test_what_is_plain_is_taken(tmp_path: Path, row: dict[str, Any], meant: str, kind: str, capsys):
    assert prepared(tmp_path, written(tmp_path, [row] * 3, kind)) == [row[meant]] * 3
    assert f'The first document begins: "{row[meant][:20]}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": "file.txt", "text": "two"}\n'),
        ("a.jsonl", '{"document": "x", "summary": "s", "document" : "y"}\n'),
        ("a.json", '[{"text": "one"}, {"text": "file.txt", "text": "two"}]'),
    ],
)
def test_a_name_that_is_there_twice(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(Problem, match=r'has "(text|document)" twice'):
        prepared(tmp_path, tmp_path / name)
    # Inside another object it is another name.
    corpus.write_jsonl(tmp_path / "b.jsonl", [{"text": 'one "text"', "meta": {"text": "two"}}])
    assert prepared(tmp_path, tmp_path / "b.jsonl") == ['one "text"']


def test_a_column_that_is_there_twice(tmp_path: Path):
    for names, asked in ((["text", "text"], ""), (["body", "body"], "body"), (["text", "summary", "summary"], "")):
        table = pyarrow.table([pyarrow.array([PROSE])] * len(names), names=names)
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(Problem, match=f'has 2 columns called "{names[-1]}"'):
            prepared(tmp_path, tmp_path / "a.parquet", TEXT_COLUMN=asked)


def test_a_column_of_another_name_is_named(tmp_path: Path):
    source = written(tmp_path, [{"id": "1", "lead": "A boat", "report": PROSE}], "jsonl")
    with pytest.raises(Problem, match='neither "document" nor "text"') as caught:
        prepared(tmp_path, source)
    assert caught.value.remedy == "Name the column with the text: TEXT_COLUMN=report"
    with pytest.raises(Problem, match='has no column "review"; it has id, lead, report'):
        prepared(tmp_path, source, TEXT_COLUMN="review")


def test_only_what_could_be_taken_is_proposed(tmp_path: Path):
    """And as one types it."""
    with pytest.raises(Problem, match='neither "document" nor "text"') as caught:
        prepared(tmp_path, written(tmp_path, [{"messages": [{"content": PROSE}]}], "jsonl"))
    assert "TEXT_COLUMN" not in caught.value.remedy and "one text per row" in caught.value.remedy
    with pytest.raises(Problem) as caught:
        prepared(tmp_path, written(tmp_path, [{"the story": PROSE}], "jsonl"))
    assert caught.value.remedy.endswith("TEXT_COLUMN='the story'")


def test_each_file_of_a_directory_is_looked_at(tmp_path: Path):
    (tmp_path / "in").mkdir()
    corpus.write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": PROSE}])
    corpus.write_jsonl(tmp_path / "in" / "b.jsonl", [{"text": OTHER, "document": "b.txt"}])
    with pytest.raises(Problem, match=r"b\.jsonl has 2 columns"):
        prepared(tmp_path, tmp_path / "in")


def test_a_row_without_the_column_of_the_others_is_refused(tmp_path: Path):
    rows = [{"text": PROSE}] * 70 + [{"document": "c.txt"}]
    with pytest.raises(Problem, match=r'line 71 of .* has text in "document", but'):
        prepared(tmp_path, written(tmp_path, rows, "jsonl"))


def test_another_column_is_another_source(tmp_path: Path):
    source = written(tmp_path, [{"text": PROSE, "content": OTHER}], "jsonl")
    assert prepared(tmp_path, source, TEXT_COLUMN="text", FORCE="1") == [PROSE]
    assert prepared(tmp_path, source, TEXT_COLUMN="content", FORCE="1") == [OTHER]
