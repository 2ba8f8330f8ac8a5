"""How well a GPT predicts a text: the negative log likelihood of its tokens, and of the last words of passages."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from t5bench import Problem
from t5bench.tools.convert.exported import ExportedModel
from training_comparison.given_files import open_file, read_text

MOST_BYTES_OF_TEXT = 1 << 30


@dataclass(frozen=True)
class LastWords:
    """accuracy: the share of passages whose last word's tokens are all the likeliest ones. loss: per such word."""

    accuracy: float
    loss: float
    passages: int


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Pieces of at most `length` + 1 tokens, and how many of each piece's last tokens are to be scored.

    Together these are all tokens but the first, each once. The others of a piece are what came before.
    """
    scored = 1  # the first token has nothing before it
    while scored < len(tokens):
        end = min(len(tokens), length + 1 if scored == 1 else scored + stride)
        yield tokens[max(0, end - length - 1) : end], end - scored
        scored = end


@torch.no_grad()
def log_likelihoods(model: ExportedModel, tokens: Sequence[int], scored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the last `scored` tokens: each one's log probability in fp32, and whether it was the likeliest."""
    inputs = torch.tensor([tokens[:-1]], device=model.device)
    targets = torch.tensor(tokens[-scored:], device=model.device)
    logits = model.model(input_ids=inputs).logits[0, -scored:].float()
    return -F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def total_loss(model: ExportedModel, tokens: Sequence[int], stride: int) -> float:
    """The negative log likelihood of all tokens but the first."""
    total = 0.0
    for piece, scored in windows(tokens, model.length, stride):
        total -= float(log_likelihoods(model, piece, scored)[0].double().sum())
    return total


def read_texts(path: Path) -> list[str]:
    """The column or key `text` of a .parquet or .jsonl file; any other file is one text. Raises Problem."""
    remedy = 'A .jsonl file has {"text": "..."} on each line, a .parquet file a column text'
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            with open_file(path, remedy) as file:
                return parquet.read_table(file, columns=["text"]).column("text").cast("string").to_pylist()
        text = read_text(path, remedy, MOST_BYTES_OF_TEXT)
        if path.suffix == ".jsonl":
            return [str(json.loads(line)["text"]) for line in text.splitlines() if line.strip()]
    except Problem:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # pyarrow's errors are ValueErrors
        raise Problem(f"{path} cannot be read: {error}", remedy) from error
    return [text]


def last_words(model: ExportedModel, passages: Sequence[str]) -> LastWords:
    """LAMBADA: the last word of each passage from all that comes before it. Raises Problem."""
    correct = 0
    total = 0.0
    for passage in passages:
        context, space, word = passage.strip().rpartition(" ")
        if not space:
            raise Problem(f"a passage has only one word: {passage[:80]!r}")
        target = model.tokens(f" {word}")
        before = model.tokens(context)
        tokens = [*before, *target][-model.length - 1 :]
        likelihoods, is_likeliest = log_likelihoods(model, tokens, len(target))
        correct += bool(is_likeliest.all())
        total -= float(likelihoods.double().sum())
    if not passages:
        raise Problem("there is no passage")
    # Per word, as lm-evaluation-harness counts, and not per token.
    return LastWords(correct / len(passages), total / len(passages), len(passages))


# WikiText is published with spaces around punctuation; a model has seen ordinary text. Applied in this order.
WIKITEXT_SPACES = [
    (r" @([-,.])@ ", r"\1"),  # 1 @,@ 000, well @-@ known
    (r" ([,.;:!?%)\]}])", r"\1"),
    (r"([(\[{$£]) ", r"\1"),
    (r" (n't|'(?:s|t|re|ve|ll|d|m))\b", r"\1"),
    (r'" ([^"\n]*?) "', r'"\1"'),
    (r" ' ([^'\n]*?) ' ", r" '\1' "),
    (r"(?m)^ ((?:= )+)(.*?)((?: =)+) *$", r"\1\2\3"),  # headings
    (r" \n", "\n"),
    (r"\n ", "\n"),
]


def ordinary_spaces(text: str) -> str:
    """WikiText with the spaces of ordinary English."""
    for pattern, replacement in WIKITEXT_SPACES:
        text = re.sub(pattern, replacement, text)
    return text
