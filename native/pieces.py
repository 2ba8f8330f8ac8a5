"""Which part of the whole model a process holds: boxes of the parameters that a model of one process has.

Every division comes down to boxes. A tensor-parallel slice is one box (the fused [q|k|v]: three), FSDP2's rows are one,
and a stretch of a parameter laid end to end, as ZeRO cuts it, is at most three: the rest of a row, whole rows, and the
beginning of a row.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

# What is kept of a parameter: its fp32 weights, and AdamW's two averages of its gradients.
WEIGHTS = "model"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHTS, *MOMENTS)


class Piece(NamedTuple):
    """A box of a whole tensor."""

    key: str
    """The kind and the whole model's name of the parameter: exp_avg.lm_head.bias."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in it."""
    tensor: Tensor
    """The box's elements: a view of what this process holds."""
    writer: int
    """The rank that writes it, of those that hold it."""


class Box(NamedTuple):
    """A box of a whole tensor, and where its elements are in the tensor that a process has of it."""

    offsets: tuple[int, ...]
    dim: int
    """The local tensor's dimension along which the box is cut out."""
    begin: int
    length: int

    def of(self, local: Tensor) -> Tensor:
        return local.narrow(self.dim, self.begin, self.length)


def boxes_of_rows(
    dimensions: int, dim: int, stretches: Sequence[tuple[int, int, int]], rows: tuple[int, int]
) -> list[Box]:
    """The boxes in the rows [begin, end) of a tensor-parallel rank's slice.

    dim: along which tensor parallelism cuts. stretches: where each begins along it in the slice and in the whole
    tensor, and its length.
    """
    first, end = rows
    boxes = []
    for local, whole, length in stretches:
        offsets = [0] * dimensions
        if dim == 0:
            begin = max(local, first)
            length = min(local + length, end) - begin
            offsets[0] = whole + begin - local
            begin -= first
        else:
            begin = local
            offsets[0] = first
            offsets[dim] = whole
        if length > 0 and first < end:
            boxes.append(Box(tuple(offsets), dim, begin, length))
    return boxes


def boxes_of_stretch(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that are the elements [begin, end) of a tensor laid end to end, in their order."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    first = -(-begin // row)  # the first row that is whole
    last = end // row  # the row after the last that is
    if first > last:
        yield from _boxes_of_row(shape, last, begin, end)
        return
    yield from _boxes_of_row(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _boxes_of_row(shape, last, last * row, end)


def _boxes_of_row(
    shape: Sequence[int], number: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Those of elements that are all in one row."""
    before = number * math.prod(shape[1:])
    for offsets, sizes in boxes_of_stretch(shape[1:], begin - before, end - before):
        yield (number, *offsets), (1, *sizes)


def shared_out(sizes: Sequence[int], writers: int) -> list[int]:
    """Which of so many writers writes each of these: always the one that has least to write, the first of several.

    All that hold the same come to the same answer without a message.
    """
    load = [0] * writers
    chosen = []
    for size in sizes:
        writer = load.index(min(load))
        load[writer] += size
        chosen.append(writer)
    return chosen
