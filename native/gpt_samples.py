"""GPT's samples: all documents one after another, cut into pieces; the same pieces in the same order as Megatron's.

Documents are shuffled, then joined, then cut every `seq_length` tokens, and the pieces are shuffled. A piece has one
token more, the label of its last one.
"""

from argparse import Namespace
from itertools import pairwise

import numpy as np
import torch

from native.data import TokenFile
from t5bench import Problem

# With less than this share of the last epoch needed, its documents and pieces are shuffled apart from the others.
MOST_OF_AN_EPOCH = 0.80


class GPTSamples(torch.utils.data.Dataset):
    def __init__(self, args: Namespace, file: TokenFile, documents: tuple[int, int], count: int) -> None:
        """At least `count` samples from documents [first, end) of `file`. Raises Problem when there are no tokens."""
        self.file, self.length = file, args.seq_length
        tokens = int(file.sizes[documents[0] : documents[1]].sum())
        if tokens < 2:
            raise Problem("no document in this split is usable: they are empty")
        epochs = max(1, -(-(count * self.length + 1) // tokens))
        pieces = (epochs * tokens - 1) // self.length
        pieces_before_last = ((epochs - 1) * tokens - 1) // self.length
        needed = count - pieces_before_last
        is_last_apart = epochs > 1 and needed < int(MOST_OF_AN_EPOCH * ((tokens - 1) // self.length))
        random = np.random.RandomState(args.seed)
        own = np.arange(*documents)
        parts = [epochs - 1, 1] if is_last_apart else [epochs]
        self.documents = np.concatenate([shuffled(np.tile(own, times), random) for times in parts])
        self.ends = np.cumsum(file.sizes[self.documents], dtype=np.int64)
        bounds = [0, pieces_before_last, pieces] if is_last_apart else [0, pieces]
        parts = [np.arange(first, end) for first, end in pairwise(bounds)]
        self.order = np.concatenate([shuffled(part, random) for part in parts])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of a sample, int64 [s] each."""
        start = int(self.order[index]) * self.length
        stop = start + self.length + 1
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop, side="left"))
        text = np.concatenate([self.file[document] for document in self.documents[first : last + 1]])
        offset = start - (int(self.ends[first - 1]) if first else 0)
        piece = text[offset : offset + self.length + 1].astype(np.int64)
        return piece[:-1], piece[1:]


def shuffled(values: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(values)
    return values
