"""Makes a small GPT in Transformers' format, scores texts with the commands, and again in the plainest way.

python tests/tools/convert/gpt_scores.py EMPTY_DIRECTORY; the last line of its output is a JSON object.
"""

import contextlib
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"USE_TORCH": "1", "HF_HUB_OFFLINE": "1"}

import pyarrow
import torch
import transformers
from pyarrow import parquet
from tokenizers import ByteLevelBPETokenizer

from t5bench import REPOSITORY
from t5bench.__main__ import main
from t5bench.tools.convert.scores import ordinary_spaces

LENGTH = 24
ARTICLES = REPOSITORY / "megatron_data" / "sample" / "articles.jsonl"
WIKI = ' = Robert = \n Robert has 1 @,@ 200 well @-@ known books ; he didn \'t write " all " of them ( or any ) . \n'


def make_gpt(directory: Path, **sizes: int) -> tuple[Any, Any]:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=500,
        n_positions=LENGTH,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
        **{"n_embd": 32, "n_layer": 2} | sizes,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(directory)
    pieces = ByteLevelBPETokenizer()
    pieces.train([str(ARTICLES)], vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    pieces.save_model(str(directory))
    tokenizer = transformers.GPT2Tokenizer(directory / "vocab.json", directory / "merges.txt")
    tokenizer.save_pretrained(directory)
    return model, tokenizer


def command(*words: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(words)
    assert status == 0
    return output.getvalue()


@torch.no_grad()
def next_token(model: Any, tokens: list[int]) -> torch.Tensor:
    """The log probabilities of what comes after these tokens."""
    return model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)


def by_pieces(model: Any, tokens: list[int], stride: int) -> float:
    """One forward pass for each token, with the context that it has in pieces of LENGTH."""
    total = 0.0
    for number in range(1, len(tokens)):
        piece = max(0, math.ceil((number - LENGTH) / stride))
        begin = 0 if piece == 0 else min(LENGTH + piece * stride, len(tokens) - 1) - LENGTH
        total -= float(next_token(model, tokens[begin:number])[tokens[number]])
    return total


def last_words(model: Any, tokenizer: Any, passages: list[str]) -> float:
    right = 0
    for passage in passages:
        context, _, word = passage.rpartition(" ")
        tokens = tokenizer(context).input_ids
        target = tokenizer(f" {word}").input_ids
        guessed = []
        for _ in target:
            # The target's own tokens count as context.
            given = [*tokens, *target[: len(guessed)]][-(LENGTH - len(target) + len(guessed) + 1) :]
            guessed.append(int(next_token(model, given).argmax()))
        right += guessed == target
    return right / len(passages)


def compare(directory: Path) -> dict[str, Any]:
    gpt = directory / "gpt"
    gpt.mkdir()
    model, tokenizer = make_gpt(gpt)
    text = directory / "wiki.test.tokens"
    text.write_text(WIKI * 3)
    parquet.write_table(pyarrow.table({"text": [WIKI.rstrip("\n")] * 3}), directory / "wiki.parquet")
    passages = ["The man said that he saw the", "It was a long way to the"]
    tokens = tokenizer("The house of the").input_ids
    # A passage that the model ends rightly.
    while not tokenizer.decode([likely := int(next_token(model, tokens).argmax())]).startswith(" "):
        tokens.append(likely)
    passages.append(tokenizer.decode([*tokens, likely]).strip())
    lines = [json.dumps({"text": passage}) for passage in passages]
    (directory / "lambada.jsonl").write_text("\n".join(lines) + "\n")

    found: dict[str, Any] = {}
    words = len((WIKI * 3).split())
    ids = [0, *tokenizer(ordinary_spaces(WIKI * 3)).input_ids]
    for stride in (LENGTH, 7):
        options = (
            "--wikitext",
            str(text),
            "--lambada",
            str(directory / "lambada.jsonl"),
            "--stride",
            str(stride),
            "--json",
        )
        found[str(stride)] = json.loads(command("evaluate", str(gpt), *options))
        found[f"expected {stride}"] = math.exp(by_pieces(model, ids, stride) / words)
    found["parquet"] = json.loads(
        command("evaluate", str(gpt), "--wikitext", str(directory / "wiki.parquet"), "--json")
    )
    found["expected accuracy"] = last_words(model, tokenizer, passages)
    found["texts"] = [
        command("generate", str(gpt), "--prompt", "The", "--max-new-tokens", "8", *options)
        for options in ([], ["--top-k", "50"], ["--top-k", "50"], ["--top-k", "50", "--seed", "2"], ["--top-k", "1"])
    ]
    ids = tokenizer("The").input_ids
    for _ in range(8):
        ids.append(int(next_token(model, ids).argmax()))
    found["greedy"] = tokenizer.decode(ids)
    return found


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]))))
