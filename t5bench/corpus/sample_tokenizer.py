"""Train the bundled sample's tokenizer: how megatron_data/sample/tokenizer/spiece.model was made.

    python -m t5bench.corpus.sample_tokenizer [DIRECTORY]     # default: megatron_data/sample/tokenizer/

A SentencePiece unigram model of 4000 pieces with T5's special ids (0 `<pad>`, 1 `</s>`, 2 `<unk>`, no beginning of
sequence), trained on the articles' documents and summaries. The two JSON files next to it make transformers load it as
a T5 tokenizer with the sentinels `<extra_id_0>` (id 4099) to `<extra_id_99>` (id 4000).

The same release of SentencePiece (`SENTENCEPIECE_VERSION` made the bundled file) gives the same bytes every time.
"""

import json
import string
import sys
from pathlib import Path

from t5bench.corpus.common import SAMPLE

SENTENCEPIECE_VERSION = "0.2.3"


def train(directory: Path) -> None:
    import sentencepiece

    articles = map(json.loads, (SAMPLE / "articles.jsonl").read_text().splitlines())
    with (directory / "spiece.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            # An iterator and a writer rather than file names, which would become part of the model.
            sentence_iterator=(article[key] for article in articles for key in ("document", "summary")),
            model_writer=model,
            model_type="unigram",
            vocab_size=4000,
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


if __name__ == "__main__":
    train(Path((sys.argv[1:] or [SAMPLE / "tokenizer"])[0]))
