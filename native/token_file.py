"""Token files, and what training needs to know of a tokenizer."""

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from t5bench import Problem
from t5bench.corpus.index import read_index
from t5bench.corpus.tokenizer import load_tokenizer, readable
from t5bench.costmodel.job import Architecture


class TokenFile:
    """<prefix>.idx and <prefix>.bin: `self[i]` is sentence i, and documents[d]:documents[d + 1] are document d's."""

    def __init__(self, prefix: str) -> None:
        """Raises Problem for files that are missing or damaged."""
        index = read_index(prefix)
        self.sizes = np.asarray(index.sizes)
        self.offsets = np.asarray(index.pointers)
        self.documents = np.asarray(index.doc_idx)
        self.tokens = np.memmap(f"{prefix}.bin", index.dtype, "r")

    def __getitem__(self, sentence: int) -> np.ndarray:
        start = int(self.offsets[sentence]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.sizes[sentence])]


@dataclass(frozen=True)
class Vocabulary:
    """What training needs to know of a tokenizer."""

    size: int
    """Counts every token, sentinels included, without the rows that pad an embedding."""
    pad: int
    eos: int
    sentinels: tuple[int, ...]
    """T5's <extra_id_0>, <extra_id_1> and so on."""
    continuations: frozenset[int]
    """Tokens "##...", which belong to the word before them."""

    @staticmethod
    def of(args: Namespace) -> "Vocabulary":
        """The run's. Raises Problem if there is no such tokenizer, or T5's has no sentinel tokens."""
        if args.family == "gpt":
            return Vocabulary.of_gpt(args.tokenizer_model, args.tokenizer_type)
        return Vocabulary.load(args.tokenizer_model)

    @staticmethod
    def load(name_or_directory: str) -> "Vocabulary":
        """T5's."""
        with readable(name_or_directory):
            tokenizer = load_tokenizer(name_or_directory)
        sentinels = getattr(tokenizer, "additional_special_tokens_ids", None)
        if not sentinels:  # their name from transformers 5 on
            sentinels = tokenizer.extra_special_tokens_ids
        pieces = tokenizer.get_vocab().items()
        return Vocabulary(
            size=len(tokenizer),
            pad=tokenizer.pad_token_id,
            eos=tokenizer.eos_token_id,
            sentinels=tuple(sentinels),
            continuations=frozenset(token for piece, token in pieces if piece.startswith("##")),
        )

    @staticmethod
    def of_gpt(path: str, tokenizer_type: str) -> "Vocabulary":
        """GPT's, of which only the size matters: from GPT-2's vocabulary file, or a Hugging Face tokenizer."""
        with readable(path, "gpt"):
            if tokenizer_type == "GPT2BPETokenizer":
                size = len(json.loads(Path(path).read_bytes()))
            else:
                size = len(load_tokenizer(path, "gpt"))
        return Vocabulary(size, pad=-1, eos=size - 1, sentinels=(), continuations=frozenset())


def pad_vocabulary(args: Namespace, vocabulary: Vocabulary) -> None:
    """Adds padded_vocab_size and pad_token to the arguments. Raises Problem if a described model has too few words."""
    args.pad_token = vocabulary.pad
    args.padded_vocab_size = 0
    described = Architecture.of_arguments(vars(args), 0).padded_vocabulary
    if described and described < vocabulary.size:
        found = f"the model has {described} words, the tokenizer {args.tokenizer_model} {vocabulary.size}"
        raise Problem(found, "Prepare the data with the model's own tokenizer: TOKENIZER_MODEL")
    multiple = args.make_vocab_size_divisible_by * args.tp
    args.padded_vocab_size = described or -(-vocabulary.size // multiple) * multiple
