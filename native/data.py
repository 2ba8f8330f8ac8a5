"""Token files and T5 span corruption: the same samples, in the same order, as Megatron-DeepSpeed draws them.

Nothing is cached and nothing is compiled: each process derives the order of the samples from the seed.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from t5bench import Problem
from t5bench.corpus.index import read_index, split_documents
from t5bench.corpus.tokenizer import load_tokenizer, readable

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # encoder input, decoder input, labels
LONG_SENTENCE = 512  # documents of several sentences are skipped if one of them has more tokens
MAX_SPAN, SPAN_P = 10, 0.2  # span lengths in words: geometric, clipped (SpanBERT, https://arxiv.org/abs/1907.10529)


class TokenFile:
    """<prefix>.idx and <prefix>.bin: `self[i]` is sentence i, and documents[d]:documents[d + 1] are document d's."""

    def __init__(self, prefix: str) -> None:
        """Raises Problem for files that are missing or damaged."""
        index = read_index(prefix)
        self.sizes, self.offsets, self.documents = map(np.asarray, (index.sizes, index.pointers, index.doc_idx))
        self.tokens = np.memmap(f"{prefix}.bin", index.dtype, "r")

    def __getitem__(self, sentence: int) -> np.ndarray:
        start = int(self.offsets[sentence]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.sizes[sentence])]


@dataclass(frozen=True)
class Vocabulary:
    """What training needs to know of a tokenizer; `size` counts every token, sentinels included, without padding."""

    size: int
    pad: int
    eos: int
    sentinels: tuple[int, ...]
    continuations: frozenset[int]  # tokens "##...", which belong to the word before them

    @staticmethod
    def load(name_or_directory: str) -> "Vocabulary":
        """Raises Problem if there is no such tokenizer or it has no sentinel tokens."""
        with readable(name_or_directory):
            tokenizer = load_tokenizer(name_or_directory)
        names = "additional_special_tokens_ids", "extra_special_tokens_ids"  # until transformers 4, and from 5 on
        sentinels = tuple(next(ids for name in names if (ids := getattr(tokenizer, name, None))))
        pieces = tokenizer.get_vocab().items()
        continuations = frozenset(token for piece, token in pieces if piece.startswith("##"))
        return Vocabulary(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, sentinels, continuations)


def mt19937_64(seed: int) -> Iterator[int]:
    """The numbers of C++'s std::mt19937_64(seed) (Nishimura, ACM TOMACS 10(4), 2000)."""
    state = [seed & ((1 << 64) - 1)]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & ((1 << 64) - 1))
    while True:
        for i in range(312):
            word = (state[i] & 0xFFFFFFFF80000000) | (state[(i + 1) % 312] & 0x7FFFFFFF)
            number = state[i] = state[(i + 156) % 312] ^ (word >> 1) ^ (0xB5026F5AA96619E9 if word & 1 else 0)
            number ^= (number >> 29) & 0x5555555555555555
            number ^= (number << 17) & 0x71D67FFFEDA60000
            number ^= (number << 37) & 0xFFF7EEE000000000
            yield number ^ (number >> 43)


def build_sample_map(
    documents: np.ndarray, sizes: np.ndarray, count: int, max_length: int, short_prob: float, seed: int
) -> np.ndarray:
    """Which sentences make each sample: [n, 3] of (first sentence, end sentence, target length), n >= count, shuffled.

    Whole epochs, until there are `count` samples. With probability `short_prob` a target is shorter than `max_length`.
    Raises Problem when no document can be used.
    """
    ratio = round(1 / short_prob) if short_prob > 0 else 0

    def target_lengths() -> Iterator[int]:
        rng = np.random.RandomState(seed)  # seeded as C++'s std::mt19937, and full-range integers are its raw output
        while True:
            for draw in rng.randint(0, 1 << 32, 4096, np.uint32).tolist():
                yield 2 + draw % (max_length - 1) if ratio and draw % ratio == 0 else max_length

    bounds, lengths, rows = documents.tolist(), sizes.tolist(), []
    usable = [
        (first, end)
        for first, end in pairwise(bounds)
        if end - first == 1 or (end > first and max(lengths[first:end]) <= LONG_SENTENCE)
    ]
    if not usable:
        raise Problem("no document in this split is usable: they are empty, or their sentences are too long")
    targets = target_lengths()
    while len(rows) < count:
        for first, end in usable:
            target, start, length = next(targets), first, 0
            for sentence in range(first, end):
                length, left = length + lengths[sentence], end - sentence - 1
                if left == 0 or (length >= target and left > 1):
                    rows.append((start, sentence + 1, target))
                    target, start, length = next(targets), sentence + 1, 0
    random = mt19937_64(seed + 1)
    for i in range(len(rows) - 1, 0, -1):
        j = next(random) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return np.array(rows, np.int64)


def choose_spans(
    tokens: list[int], budget: float, vocabulary: Vocabulary, rng: np.random.RandomState
) -> list[list[int]]:
    """Spans of whole words that do not overlap, `budget` tokens in all at most: their positions, as the text runs."""
    words: list[list[int]] = []
    for i, token in enumerate(tokens):
        if words and token in vocabulary.continuations:
            words[-1].append(i)
        elif token not in (vocabulary.pad, vocabulary.eos):
            words.append([i])
    order = np.arange(len(words))
    rng.shuffle(order)
    lengths = np.minimum(rng.geometric(SPAN_P, len(words)), MAX_SPAN)
    ends = np.cumsum([0] + [len(word) for word in words]).tolist()
    spans: list[list[int]] = []
    covered: set[int] = set()
    for first, length in zip(order.tolist(), lengths.tolist(), strict=True):
        room = budget - len(covered)
        if room <= 0:
            break
        last = min(first + length, len(words))
        while last > first + 1 and ends[last] - ends[first] > room:
            last -= 1
        span = [i for word in words[first:last] for i in word]
        if len(span) <= room and covered.isdisjoint(span):
            covered.update(span)
            spans.append(span)
    return sorted(spans)


def padded(ids: list[int], length: int, padding: int) -> np.ndarray:
    return np.array(ids + [padding] * (length - len(ids)), np.int64)


class SpanCorruption(torch.utils.data.Dataset):
    """T5's objective: spans of the text are replaced by sentinels, and the decoder writes sentinel and span in turn."""

    def __init__(
        self, args: Namespace, file: TokenFile, documents: tuple[int, int], count: int, vocabulary: Vocabulary
    ) -> None:
        """At least `count` samples from documents [first, end) of `file`. Raises Problem when none can be used."""
        self.args, self.file, self.vocabulary = args, file, vocabulary
        bounds = file.documents[documents[0] : documents[1] + 1]
        max_length = args.encoder_seq_length - 2  # room that Megatron keeps for two added tokens
        self.map = build_sample_map(bounds, file.sizes, count, max_length, args.short_seq_prob, args.seed)

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encoder input [s_enc], decoder input [s_dec] and labels [s_dec, -1 on padding] of a sample, int64."""
        args, vocabulary = self.args, self.vocabulary
        first, end, target = self.map[index].tolist()
        tokens = np.concatenate([self.file[i] for i in range(first, end)])[:target].tolist()
        budget = min(args.mask_prob * target, max(1, round(len(tokens) * args.mask_prob)))
        spans = choose_spans(tokens, budget, vocabulary, np.random.RandomState(args.seed + index))
        encoder, decoder, start = [], [vocabulary.eos], 0  # Megatron's decoder starts with the end-of-text token
        for sentinel, span in zip(vocabulary.sentinels, spans, strict=False):
            encoder += [*tokens[start : span[0]], sentinel]
            decoder += [sentinel, *(tokens[i] for i in span)]
            start = span[-1] + 1
        encoder += tokens[start:]
        labels = [*decoder[1:], vocabulary.eos]
        if len(spans) > len(vocabulary.sentinels) or len(decoder) > args.decoder_seq_length:
            found = f"a sample has {len(spans)} spans and {len(decoder)} decoder tokens"
            raise ValueError(f"{found}: too many for this run")
        return (
            padded(encoder, args.encoder_seq_length, vocabulary.pad),
            padded(decoder, args.decoder_seq_length, vocabulary.pad),
            padded(labels, args.decoder_seq_length, -1),
        )


def step_indices(args: Namespace, dp_rank: int, consumed: int, end: int) -> Iterator[list[int]]:
    """For each iteration, the samples of one data-parallel rank: its share of every micro-batch, in turn."""
    for start in range(consumed, end - args.global_batch_size + 1, args.global_batch_size):
        samples = np.arange(start, start + args.global_batch_size).reshape(-1, args.dp, args.micro_batch_size)
        yield samples[:, dp_rank].flatten().tolist()


def batches(dataset: SpanCorruption, args: Namespace, dp_rank: int, consumed: int) -> Iterator[Batch]:
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


def open_data(
    args: Namespace, dp_rank: int, file: TokenFile, vocabulary: Vocabulary, done: int = 0
) -> tuple[Iterator[Batch], Iterator[Batch]]:
    """A data-parallel rank's batches for training after `done` iterations, and for its evaluations."""
    train, validation, _ = split_documents(args.split, len(file.documents) - 1)
    size, evaluation = args.global_batch_size, args.global_batch_size * args.eval_iters  # samples of each
    dataset = SpanCorruption(args, file, train, args.train_iters * size, vocabulary)
    training = batches(dataset, args, dp_rank, done * size)
    if not args.eval_iters:
        return training, iter(())
    count = (args.train_iters // args.eval_interval + 1) * evaluation  # one more comes at the end
    dataset = SpanCorruption(args, file, validation, count, vocabulary)
    return training, batches(dataset, args, dp_rank, done // args.eval_interval * evaluation)
