"""Train the bundled sample's tokenizer: how megatron_data/sample/tokenizer/ was made.

    python -m t5bench.corpus.sample_tokenizer [DIRECTORY]     # default: megatron_data/sample/tokenizer/

A SentencePiece unigram model of 4000 pieces with T5's special ids (0 `<pad>`, 1 `</s>`, 2 `<unk>`, no beginning of
sequence), trained on the articles' documents and summaries, and the two JSON files that make transformers load it as a
T5 tokenizer with the sentinels `<extra_id_0>` (id 4099) to `<extra_id_99>` (id 4000).

The same release of SentencePiece (`SENTENCEPIECE_VERSION` made the bundled files) gives the same bytes every time.
"""

import string
import sys
from pathlib import Path

from t5bench.corpus import common

SENTENCEPIECE_VERSION = "0.2.3"
PIECES = 4000
SPECIAL_TOKENS = {
    "additional_special_tokens": [f"<extra_id_{index}>" for index in range(100)],
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
CONFIG = {"tokenizer_class": "T5Tokenizer", "legacy": True, "extra_ids": 100, **SPECIAL_TOKENS, "model_max_length": 512}


def train(directory: Path) -> None:
    """Train on the bundled articles, and write the tokenizer's files into `directory`."""
    import sentencepiece

    articles = common.read_jsonl(common.SAMPLE / "articles.jsonl")
    directory.mkdir(parents=True, exist_ok=True)
    with common.replacing(directory / "spiece.model") as model:
        sentencepiece.SentencePieceTrainer.train(
            # An iterator and a writer rather than file names, which would become part of the model.
            sentence_iterator=(article[key] for _, article in articles for key in ("document", "summary")),
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
    common.write_json(directory / "tokenizer_config.json", CONFIG)
    common.write_json(directory / "special_tokens_map.json", SPECIAL_TOKENS)
    print(f"{directory}: {PIECES} pieces and 100 sentinels")


if __name__ == "__main__":
    common.run(lambda: train(Path((sys.argv[1:] or [common.SAMPLE / "tokenizer"])[0])))
