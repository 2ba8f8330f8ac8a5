"""A decoder's samples: all documents one after another, cut into pieces; the same pieces in the same order as
Megatron's. Or, with --document-samples, one document each.

Documents are shuffled, then joined, then cut every `seq_length` tokens, and the pieces are shuffled. A piece has one
token more, the label of its last one.
"""

from argparse import Namespace
from itertools import pairwise

import numpy as np
import torch

from native.token_file import TokenFile
from t5bench import Problem

# A last epoch of which less than this share is needed is shuffled apart: the others are used to their end.
MOST_OF_AN_EPOCH = 0.80


class GPTSamples(torch.utils.data.Dataset):
    def __init__(self, args: Namespace, file: TokenFile, documents: tuple[int, int], count: int) -> None:
        """At least `count` samples from documents [first, end) of `file`. Raises Problem when there are no tokens."""
        self.file = file
        self.length = args.seq_length
        first, end = documents
        tokens = int(file.sizes[first:end].sum())  # of an epoch
        if tokens < 2:
            raise Problem("no document in this split is usable: they are empty")
        epochs = max(1, -(-(count * self.length + 1) // tokens))
        pieces = (epochs * tokens - 1) // self.length
        pieces_before_last_epoch = ((epochs - 1) * tokens - 1) // self.length
        needed_of_last_epoch = count - pieces_before_last_epoch
        pieces_of_an_epoch = (tokens - 1) // self.length

        # Numbers of epochs, and ranges of pieces, that are shuffled together.
        epoch_groups = [epochs]
        piece_bounds = [0, pieces]
        if epochs > 1 and needed_of_last_epoch < int(MOST_OF_AN_EPOCH * pieces_of_an_epoch):
            epoch_groups = [epochs - 1, 1]
            piece_bounds = [0, pieces_before_last_epoch, pieces]

        random = np.random.RandomState(args.seed)
        an_epoch = np.arange(first, end)
        self.documents = np.concatenate([shuffled(np.tile(an_epoch, group), random) for group in epoch_groups])
        self.ends = np.cumsum(file.sizes[self.documents], dtype=np.int64)  # of each document among all tokens
        self.order = np.concatenate([shuffled(np.arange(*bounds), random) for bounds in pairwise(piece_bounds)])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of a sample, int64 [s] each."""
        start = int(self.order[index]) * self.length
        stop = start + self.length + 1
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop, side="left"))
        text = np.concatenate([self.file[document] for document in self.documents[first : last + 1]])
        text_start = int(self.ends[first - 1]) if first else 0
        piece = text[start - text_start : stop - text_start].astype(np.int64)  # [s + 1]
        return piece[:-1], piece[1:]


class DocumentSamples(torch.utils.data.Dataset):
    """The first `seq_length` tokens of a document each, padded behind its end. Attention is causal, so that no token of
    the document sees the padding, and the padding's own labels are -1, which carry no loss."""

    def __init__(self, args: Namespace, file: TokenFile, documents: tuple[int, int], count: int) -> None:
        """At least `count` samples, shuffled anew in each epoch. Raises Problem when no document has two tokens."""
        self.file = file
        self.length = args.seq_length
        usable = np.arange(*documents)[file.sizes[slice(*documents)] > 1]
        if not len(usable):
            raise Problem("no document in this split is usable: none has two tokens")
        random = np.random.RandomState(args.seed)
        epochs = -(-count // len(usable))
        self.documents = np.concatenate([shuffled(usable.copy(), random) for _ in range(max(1, epochs))])

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of a sample, int64 [s] each."""
        text = self.file[self.documents[index]][: self.length + 1].astype(np.int64)
        padding = (0, self.length + 1 - len(text))
        return np.pad(text[:-1], padding), np.pad(text[1:], padding, constant_values=-1)


def shuffled(values: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(values)
    return values
