#!/usr/bin/env python3
"""Train the bundled sample's tokenizer: how megatron_data/sample/tokenizer/ was made.

    python -m t5bench.corpus.sample_tokenizer            # writes megatron_data/sample/tokenizer/

A SentencePiece unigram model of 4000 pieces with T5's special ids (0 `<pad>`, 1 `</s>`, 2 `<unk>`, no beginning of
sequence), trained on the articles' documents and summaries, and the two JSON files that make transformers load it as a
T5 tokenizer with the sentinels `<extra_id_0>` (id 4099) to `<extra_id_99>` (id 4000).

The same release of SentencePiece (`SENTENCEPIECE_VERSION` made the bundled files) gives the same bytes every time.
"""

from __future__ import annotations

import argparse
import io
import string
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5bench.corpus.build import SAMPLE_DIR, one_line, read_jsonl, run_command, write_json
from t5bench.corpus.index import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

SENTENCEPIECE_VERSION = "0.2.3"
PIECES = 4000
SENTINELS = 100
SENTINEL_NAMES = [f"<extra_id_{index}>" for index in range(SENTINELS)]


def articles_text(path: Path) -> Iterator[str]:
    """Documents and summaries of the articles in order. Raises DataError that names a bad line."""
    for number, article in read_jsonl(path):
        for key in ("document", "summary"):
            text = article.get(key)
            if not isinstance(text, str):
                raise DataError(f'line {number} of {path} has no string under "{key}"')
            yield text


def train(articles: Path) -> bytes:
    """The serialised SentencePiece model. Raises DataError when the articles cannot be read or are too few."""
    import sentencepiece

    texts = list(articles_text(articles))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # An iterator and a writer rather than file names, which would become part of the model.
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=PIECES,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            character_coverage=1.0,
            required_chars=string.digits + string.ascii_letters + string.punctuation,
            # The sums of the expectation step depend on how the text is divided among threads.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"{articles} does not make {PIECES} pieces ({one_line(error)})") from error
    return model.getvalue()


def tokenizer_config() -> dict[str, Any]:
    """Content of tokenizer_config.json."""
    return {
        "tokenizer_class": "T5Tokenizer",
        "legacy": True,
        "extra_ids": SENTINELS,
        "additional_special_tokens": SENTINEL_NAMES,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 512,
    }


def special_tokens_map() -> dict[str, Any]:
    """Content of special_tokens_map.json."""
    return {
        "additional_special_tokens": SENTINEL_NAMES,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def save(articles: Path, directory: Path) -> None:
    """Train on `articles` and write the tokenizer's files into `directory`. Raises DataError or OSError."""
    model = train(articles)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "spiece.model").write_bytes(model)
    write_json(directory / "tokenizer_config.json", tokenizer_config())
    write_json(directory / "special_tokens_map.json", special_tokens_map())
    print(f"{directory}: {PIECES} pieces and {SENTINELS} sentinels, spiece.model {len(model):,} bytes")


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--articles", type=Path, default=SAMPLE_DIR / "articles.jsonl", metavar="JSONL")
    parser.add_argument("--output", type=Path, default=SAMPLE_DIR / "tokenizer", metavar="DIR")
    args = parser.parse_args()
    return run_command(lambda: save(args.articles, args.output))


if __name__ == "__main__":
    sys.exit(main())
