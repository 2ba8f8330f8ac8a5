"""The tokenizer library in its old and its new major version: the same tokens, whichever is installed."""

import json
from typing import Any

import pytest
from harness import REPO_ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

TOKENIZER = REPO_ROOT / "megatron_data" / "sample" / "tokenizer"
PIECES, SENTINELS, END = 4000, 100, 1


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer as the engines ask for it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.AutoTokenizer.from_pretrained(str(TOKENIZER), use_fast=False)


@pytest.fixture(scope="module")
def pieces() -> Any:
    """SentencePiece itself on the same model: what T5's tokenizer is, but for its sentinels."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    return sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER / "spiece.model"))


def articles() -> list[str]:
    lines = (TOKENIZER.parent / "articles.jsonl").read_text().splitlines()
    return [json.loads(line)["document"] for line in lines]


def test_the_samples_articles(tokenizer: Any, pieces: Any):
    """Transformers 4 has T5's slow tokenizer, which is SentencePiece; 5 reads the model in another way."""
    texts = articles()
    assert len(texts) > 100
    for text in texts:
        assert tokenizer.encode(text) == [*pieces.encode(text), END]


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), max_size=80))
def test_any_text(tokenizer: Any, pieces: Any, text: str):
    if "<" in text:  # A special token's name is no text.
        return
    assert tokenizer.encode(text) == [*pieces.encode(text), END]


def test_sentinels_count_down_from_the_end(tokenizer: Any):
    """<extra_id_0> is the last token, as in the checkpoints of T5's authors."""
    assert len(tokenizer) == PIECES + SENTINELS
    names = [f"<extra_id_{number}>" for number in range(SENTINELS)]
    expected = [PIECES + SENTINELS - 1 - number for number in range(SENTINELS)]
    assert tokenizer.convert_tokens_to_ids(names) == expected
    named = getattr(tokenizer, "additional_special_tokens_ids", None) or tokenizer.extra_special_tokens_ids
    assert list(named) == expected
