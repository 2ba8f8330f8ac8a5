"""Token files, tokenizers, and who trains which samples; t5_samples.py and gpt_samples.py make the samples."""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from t5bench.corpus.index import read_index, split_documents
from t5bench.corpus.tokenizer import load_tokenizer, readable

# A T5's encoder input, decoder input and labels; a GPT's tokens and labels. int64, [samples, length] each.
Batch = tuple[torch.Tensor, ...]


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


def step_indices(args: Namespace, dp_rank: int, consumed: int, end: int) -> Iterator[list[int]]:
    """For each iteration, the samples of one data-parallel rank: its share of every micro-batch, in turn."""
    size = args.global_batch_size
    for start in range(consumed, end - size + 1, size):
        samples = np.arange(start, start + size).reshape(-1, args.dp, args.micro_batch_size)
        yield samples[:, dp_rank].flatten().tolist()


def batches(dataset: torch.utils.data.Dataset, args: Namespace, dp_rank: int, consumed: int) -> Iterator[Batch]:
    """One batch per iteration on its device, [micro_batches * micro_batch_size, length] each."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=list(step_indices(args, dp_rank, consumed, len(dataset))),
        num_workers=args.num_workers,
        pin_memory=args.device.type == "cuda",
        generator=torch.Generator(),  # its own, or starting the workers would take a number from dropout's
    )
    for batch in loader:
        yield tuple(tensor.to(args.device, non_blocking=True) for tensor in batch)


def samples_of(
    args: Namespace, file: TokenFile, documents: tuple[int, int], count: int, vocabulary: Vocabulary
) -> torch.utils.data.Dataset:
    """At least `count` samples of the run's model. Raises Problem when no document can be used."""
    if args.family == "gpt":
        from native.gpt_samples import GPTSamples

        return GPTSamples(args, file, documents, count)
    from native.t5_samples import SpanCorruption

    return SpanCorruption(args, file, documents, count, vocabulary)


def open_data(
    args: Namespace, dp_rank: int, file: TokenFile, vocabulary: Vocabulary, done: int = 0
) -> tuple[Iterator[Batch], Iterator[Batch]]:
    """A data-parallel rank's batches for training after `done` iterations, and for its evaluations."""
    train, validation, _ = split_documents(args.split, len(file.documents) - 1)
    size = args.global_batch_size
    training: Iterator[Batch] = iter(())
    evaluation: Iterator[Batch] = iter(())
    if not args.skip_train:
        dataset = samples_of(args, file, train, args.train_iters * size, vocabulary)
        training = batches(dataset, args, dp_rank, consumed=done * size)
    if args.eval_iters:
        evaluations = args.train_iters // args.eval_interval + 1  # one more comes at the end
        done_evaluations = done // args.eval_interval
        samples = args.eval_iters * size  # of one evaluation
        dataset = samples_of(args, file, validation, evaluations * samples, vocabulary)
        evaluation = batches(dataset, args, dp_rank, consumed=done_evaluations * samples)
    return training, evaluation


def open_test(args: Namespace, dp_rank: int, file: TokenFile, vocabulary: Vocabulary) -> Iterator[Batch] | None:
    """A data-parallel rank's batches of the test set, if that has documents."""
    _, _, test = split_documents(args.split, len(file.documents) - 1)
    first, end = test
    if first == end:
        return None
    dataset = samples_of(args, file, test, args.global_batch_size * args.eval_iters, vocabulary)
    return batches(dataset, args, dp_rank, consumed=0)
