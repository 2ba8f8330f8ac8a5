"""The tokenizer of a run against the one that made its data: only plans, nothing is trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import REPO_ROOT, write_data_record, write_indexed_dataset

from t5bench.corpus.checksum import tokenizer_checksum

SAMPLE = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
HUB = "google-t5/t5-large"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data made with the hub's tokenizer, with a copy of it next to them and its files in the hub's cache."""
    directory, cache = tmp_path / "data", tmp_path / "cache" / "models--google-t5--t5-large"
    directory.mkdir()
    prefix = directory / "xsum_text_document"
    write_indexed_dataset(prefix, [[5, 6, 7, 1], [8, 9, 1]])
    shutil.copytree(SAMPLE, directory / "tokenizer")
    shutil.copytree(SAMPLE, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    write_data_record(prefix, tokenizer=HUB, tokenizer_checksum=tokenizer_checksum(SAMPLE))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.parent))
    monkeypatch.setenv("HOME", str(tmp_path))  # where checksums are remembered
    monkeypatch.delenv("TRANSFORMERS_CACHE", raising=False)
    return directory


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def findings(making: Callable, data: Path, **settings: str) -> tuple[list[str], str]:
    made = making("ddp", MEGATRON_DATA_DIR=str(data), **settings)
    return made.codes, made.said


def test_the_checksum_does_not_depend_on_the_place(making, data: Path):
    shutil.copytree(SAMPLE, elsewhere := data.parent / "elsewhere")
    edit(elsewhere / "tokenizer_config.json", model_max_length=1024, name_or_path="/once/here")
    (elsewhere / "README.md").write_text("decides nothing")
    (data.parent / "linked").symlink_to(elsewhere)
    for named in ("", HUB, "data/tokenizer", "./elsewhere/", "linked"):
        codes, said = findings(making, data, TOKENIZER_MODEL=named)
        assert codes == [] and "checksum" not in said.replace(str(data.parent), "")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: (t / "spiece.model").write_bytes((t / "spiece.model").read_bytes()[:-1] + b"x"),
        lambda t: edit(t / "tokenizer_config.json", legacy=False),
        lambda t: edit(t / "special_tokens_map.json", eos_token="<extra_id_9>"),
        lambda t: (t / "added_tokens.json").write_text('{"<new>": 4100}'),
        lambda t: (t / "tokenizer.json").write_text('{"model": {}}'),
    ],
)
def test_another_tokenizer_is_refused_with_both_checksums(making, data: Path, change: Callable):
    tokenizers = {"": data / "tokenizer", HUB: data.parent / "cache/models--google-t5--t5-large/snapshots/abc"}
    for named, tokenizer in tokenizers.items():
        change(tokenizer)
        codes, said = findings(making, data, TOKENIZER_MODEL=named)
        assert codes == ["tokenizer"]
        assert tokenizer_checksum(SAMPLE) in said and tokenizer_checksum(tokenizer) in said and "FORCE=1" in said


def test_the_tokenizer_next_to_the_data_is_used(making, data: Path):
    own = {"MEGATRON_DATA_DIR": str(data)}
    assert making("ddp").plan.tokenizer == "google-t5/t5-large"
    assert making("ddp", **own).plan.tokenizer == str(data / "tokenizer")
    assert making("ddp", **own, TOKENIZER_MODEL="a/model").plan.tokenizer == "a/model"


def test_data_that_changed_are_refused(making, data: Path):
    tokens = data / "xsum_text_document.bin"
    whole = tokens.read_bytes()
    for content, codes in ((whole, []), (whole[:-1] + b"\x01", ["data-record"]), (whole, [])):
        tokens.write_bytes(content)
        assert findings(making, data)[0] == codes
    for content in ('{"source": "s"}', "{"):
        (data / "xsum_text_document.meta.json").write_text(content)
        codes, said = findings(making, data)
        assert codes == [] and "warning: " in said and "does not record the checksum" in said and "FORCE=1" in said
    (missing,) = making("ddp", MEGATRON_DATA_DIR="/none", MODEL_FAMILY="gpt").plan.obstacles
    assert "MODEL_FAMILY=gpt MEGATRON_DATA_DIR=/none bash" in missing.remedy


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_data_copied_without_their_record_and_tokenizer_are_refused(making, data: Path, strategy: str):
    """As the former instructions said: scp megatron_data/xsum_text_document.{bin,idx}."""
    (data / "xsum_text_document.meta.json").unlink()
    shutil.rmtree(data / "tokenizer")
    place = {"MEGATRON_DATA_DIR": str(data)}
    assert making(strategy, **place).codes == []  # the hub's tokenizer is on this machine
    shutil.rmtree(data.parent / "cache")
    made = making(strategy, **place)
    assert made.codes == ["tokenizer"] and "are here without xsum_text_document.meta.json and tokenizer/" in made.said
    assert "Copy these from the node that prepared the data" in made.said and f"TOKENIZER_MODEL={HUB}" in made.said
    assert making(strategy, **place, TOKENIZER_MODEL=HUB).codes == []


def test_runs_that_cannot_be_compared_never_pass_silently(making, data: Path):
    assert findings(making, data, TOKENIZER_MODEL="a/model")[0] == ["tokenizer"]
    (data / "tokenizer" / "tokenizer_config.json").write_text("{")
    assert findings(making, data)[0] == ["data"]
    shutil.rmtree(data.parent / "cache")
    codes, said = findings(making, data, TOKENIZER_MODEL=HUB)
    assert codes == [] and "is not on this machine yet" in said
    # Whoever lacks only the tokenizer is told to fetch it; the command for new data is for this directory.
    shutil.rmtree(data / "tokenizer")
    edit(data / "xsum_text_document.meta.json", tokenizer="/own/tokenizer")
    codes, said = findings(making, data)
    assert codes == ["tokenizer"] and f"copy it to '{data / 'tokenizer'}'" in said
    assert f": MEGATRON_DATA_DIR={data} bash" in said
