"""T5's samples: span corruption, the same samples in the same order as Megatron-DeepSpeed draws them.

Nothing is cached and nothing is compiled: each process derives the order of the samples from the seed.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from native.token_file import TokenFile, Vocabulary
from t5bench import Problem

LONG_SENTENCE = 512  # documents of several sentences are skipped if one of them has more tokens
# Lengths of spans in words are drawn from a geometric distribution and clipped (SpanBERT,
# https://arxiv.org/abs/1907.10529).
SPAN_P = 0.2
MAX_SPAN = 10
ALL_BITS = (1 << 64) - 1


def mt19937_64(seed: int) -> Iterator[int]:
    """The numbers of C++'s std::mt19937_64(seed) (Nishimura, ACM TOMACS 10(4), 2000)."""
    state = [seed & ALL_BITS]
    for i in range(1, 312):
        mixed = state[-1] ^ (state[-1] >> 62)
        state.append((6364136223846793005 * mixed + i) & ALL_BITS)
    while True:
        for i in range(312):
            word = (state[i] & 0xFFFFFFFF80000000) | (state[(i + 1) % 312] & 0x7FFFFFFF)
            number = state[(i + 156) % 312] ^ (word >> 1)
            if word & 1:
                number ^= 0xB5026F5AA96619E9
            state[i] = number
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
    lengths = sizes.tolist()
    usable = [(first, end) for first, end in pairwise(documents.tolist()) if is_usable(lengths[first:end])]
    if not usable:
        raise Problem("no document in this split is usable: they are empty, or their sentences are too long")
    targets = target_lengths(max_length, short_prob, seed)
    rows: list[tuple[int, int, int]] = []
    while len(rows) < count:
        for first, end in usable:
            rows += samples_of_document(first, end, lengths, targets)
    shuffle(rows, mt19937_64(seed + 1))
    return np.array(rows, np.int64)


def is_usable(lengths: list[int]) -> bool:
    """Whether samples can be made of a document with these lengths of sentences."""
    return len(lengths) == 1 or (len(lengths) > 1 and max(lengths) <= LONG_SENTENCE)


def target_lengths(max_length: int, short_prob: float, seed: int) -> Iterator[int]:
    """The target lengths of samples, without an end."""
    random = np.random.RandomState(seed)  # seeded as C++'s std::mt19937, and full-range integers are its raw output
    one_in = round(1 / short_prob) if short_prob > 0 else 0
    while True:
        for draw in random.randint(0, 1 << 32, 4096, np.uint32).tolist():
            if one_in and draw % one_in == 0:
                yield 2 + draw % (max_length - 1)
            else:
                yield max_length


def samples_of_document(
    first: int, end: int, lengths: list[int], targets: Iterator[int]
) -> Iterator[tuple[int, int, int]]:
    """The samples of the sentences [first, end); one ends at its target length, unless a lone sentence would remain."""
    start = first
    target = next(targets)
    length = 0
    for sentence in range(first, end):
        length += lengths[sentence]
        remaining = end - sentence - 1
        if remaining == 0 or (length >= target and remaining > 1):
            yield start, sentence + 1, target
            start = sentence + 1
            target = next(targets)
            length = 0


def shuffle(rows: list[tuple[int, int, int]], random: Iterator[int]) -> None:
    for i in range(len(rows) - 1, 0, -1):
        j = next(random) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]


def choose_spans(
    tokens: list[int], budget: float, vocabulary: Vocabulary, rng: np.random.RandomState
) -> list[list[int]]:
    """Spans of whole words that do not overlap, `budget` tokens in all at most: their positions, as the text runs."""
    words = split_words(tokens, vocabulary)
    order = np.arange(len(words))
    rng.shuffle(order)
    lengths = np.minimum(rng.geometric(SPAN_P, len(words)), MAX_SPAN)  # in words
    spans: list[list[int]] = []
    covered: set[int] = set()
    for first, length in zip(order.tolist(), lengths.tolist(), strict=True):
        room = budget - len(covered)
        if room <= 0:
            break
        end = min(first + length, len(words))
        while end > first + 1 and sum(map(len, words[first:end])) > room:
            end -= 1
        span = list(itertools.chain.from_iterable(words[first:end]))
        if len(span) <= room and covered.isdisjoint(span):
            covered.update(span)
            spans.append(span)
    return sorted(spans)


def split_words(tokens: list[int], vocabulary: Vocabulary) -> list[list[int]]:
    """The positions of each word's tokens; padding and ends of texts are no words."""
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if words and token in vocabulary.continuations:
            words[-1].append(position)
        elif token not in (vocabulary.pad, vocabulary.eos):
            words.append([position])
    return words


def padded(ids: list[int], length: int, padding: int) -> np.ndarray:
    return np.array(ids + [padding] * (length - len(ids)), np.int64)


class SpanCorruption(torch.utils.data.Dataset):
    """T5's objective: spans of the text are replaced by sentinels, and the decoder writes sentinel and span in turn."""

    def __init__(
        self, args: Namespace, file: TokenFile, documents: tuple[int, int], count: int, vocabulary: Vocabulary
    ) -> None:
        """At least `count` samples from documents [first, end) of `file`. Raises Problem when none can be used."""
        self.args = args
        self.file = file
        self.vocabulary = vocabulary
        first, end = documents
        bounds = file.documents[first : end + 1]
        max_length = args.encoder_seq_length - 2  # room that Megatron keeps for two added tokens
        self.map = build_sample_map(bounds, file.sizes, count, max_length, args.short_seq_prob, args.seed)

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encoder input [s_enc], decoder input [s_dec] and labels [s_dec, -1 on padding] of a sample, int64."""
        args = self.args
        vocabulary = self.vocabulary
        first, end, target = self.map[index].tolist()
        tokens = np.concatenate([self.file[i] for i in range(first, end)])[:target].tolist()
        budget = min(args.mask_prob * target, max(1, round(len(tokens) * args.mask_prob)))
        spans = choose_spans(tokens, budget, vocabulary, np.random.RandomState(args.seed + index))
        encoder: list[int] = []
        decoder = [vocabulary.eos]  # Megatron's decoder starts with the end-of-text token
        start = 0  # of the text between the last span and the next one
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
