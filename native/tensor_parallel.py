"""Tensor parallelism (Shoeybi et al., https://arxiv.org/abs/1909.08053), and the vocabulary it divides.

Every rank holds the same activations x and a slice of each weight. A column slice needs no communication forward, but
each rank's gradient of x covers its slice alone, so backward sums them (the paper's f, `enter_tp`). A row slice gives a
partial sum of the output, so forward sums (g, `leave_tp`). Both are written here rather than left to DTensor: our fused
[q|k|v] weight is no contiguous shard, DDP does not take DTensor parameters, and on small layers DTensor's dispatch
costs more than the arithmetic.

With sequence parallelism (sequence_parallel.py) a rank holds a part of the tokens of x instead of all; f and g then
gather and scatter them.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from native.parallel import Axis
from native.precision import cast, cast_or_none
from native.sequence_parallel import gather_sequence, gathered_linears, own_part, scatter_sequence
from t5bench.costmodel.layout import share


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(gradient.contiguous()), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: Axis) -> Tensor:
        ctx.mark_dirty(partial)
        return tp.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter_tp(x: Tensor, tp: Axis) -> Tensor:
    """f: hands x to column slices. Forward sends nothing; backward all-reduces x's gradient, x.numel() elements."""
    if tp.divides_sequence:
        return gather_sequence(x, tp)
    return x if tp.size == 1 else _Enter.apply(x, tp)


def leave_tp(partial: Tensor, tp: Axis) -> Tensor:
    """g: takes the output of row slices. Forward all-reduces it in place; backward sends nothing."""
    if tp.divides_sequence:
        return scatter_sequence(partial, tp)
    return partial if tp.size == 1 else _Leave.apply(partial.contiguous(), tp)


class Slice(NamedTuple):
    """How the tensor-parallel ranks divide a parameter."""

    dim: int
    """The dimension along which it is cut."""
    blocks: int
    """Equal blocks along `dim`, of each of which a rank has its part: three in the fused [q|k|v], else one."""
    length: int
    """Of the whole along `dim`."""
    copies: int = 1
    """Ranks, one after the other, that hold the same part: keys and values, if there are fewer groups than ranks."""

    def part(self, tp: Axis) -> range:
        """This rank's part of each block; if they do not divide evenly, the first ranks have one more."""
        return share(self.length // self.blocks, range(tp.size // self.copies), tp.rank // self.copies)

    def local_shape(self, whole: tuple[int, ...], tp: Axis) -> tuple[int, ...]:
        return (*whole[: self.dim], self.blocks * len(self.part(tp)), *whole[self.dim + 1 :])

    def whole_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        return (*local[: self.dim], self.length, *local[self.dim + 1 :])

    def stretches(self, tp: Axis) -> list[tuple[int, int, int]]:
        """Along `dim`, for each block: where this rank's part begins in what it holds and in the whole, its length."""
        part = self.part(tp)
        each = self.length // self.blocks
        return [(block * len(part), block * each + part.start, len(part)) for block in range(self.blocks)]

    def cut(self, whole: Tensor, tp: Axis) -> Tensor:
        """This rank's part of a whole tensor."""
        parts = [whole.narrow(self.dim, begin, length) for _, begin, length in self.stretches(tp)]
        return torch.cat(parts, self.dim)

    def is_first_copy(self, tp: Axis) -> bool:
        """Whether this is the first rank that holds its part."""
        return tp.rank % self.copies == 0


def sliced(*shape: int, dim: int, tp: Axis, blocks: int = 1, copies: int = 1) -> nn.Parameter:
    """One TP rank's slice of a parameter of this whole shape; the slice's description is its attribute `tp_slice`."""
    tp_slice = Slice(dim, blocks, shape[dim], copies)
    parameter = nn.Parameter(torch.empty(tp_slice.local_shape(shape, tp)))
    parameter.tp_slice = tp_slice
    return parameter


def linear(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> Tensor:
    """x W^T + b in x's dtype."""
    # The weight first: the order of the copies decides the order of gradients, and with that DDP's buckets.
    weight = cast(weight, x.dtype)
    return F.linear(x, weight, cast_or_none(bias, x.dtype))


class ColumnLinear(nn.Module):
    """y = x W^T + b with a slice of W's rows (output features) on each TP rank; the output stays sliced.

    `blocks`: the number of blocks of rows that are sliced separately, as in the fused [q|k|v]. `copies`: ranks that
    hold the same slice. `enters`: the input goes through enter_tp here; otherwise it has done so before.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        tp: Axis,
        blocks: int = 1,
        *,
        copies: int = 1,
        enters: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.enters = enters
        self.linear = linear  # unless zero_bubble.py puts its own here
        self.weight = sliced(outputs, inputs, dim=0, tp=tp, blocks=blocks, copies=copies)
        self.bias = sliced(outputs, dim=0, tp=tp, blocks=blocks, copies=copies) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.enters:
            return column_outputs(x, self)[0]
        return self.linear(x, self.weight, self.bias)


def column_outputs(x: Tensor, *columns: ColumnLinear) -> list[Tensor]:
    """What several column slices make of the same input, which enters them together."""
    tp = columns[0].tp
    if tp.divides_sequence:
        pairs = [(cast(column.weight, x.dtype), cast_or_none(column.bias, x.dtype)) for column in columns]
        return gathered_linears(x, pairs, tp)
    x = enter_tp(x, tp)
    return [column.linear(x, column.weight, column.bias) for column in columns]


class RowLinear(nn.Module):
    """y = x W^T + b with a slice of W's columns (input features) on each TP rank; b is whole, and added once."""

    def __init__(self, inputs: int, outputs: int, tp: Axis, *, bias: bool = True) -> None:
        super().__init__()
        self.tp = tp
        self.linear = linear  # unless zero_bubble.py puts its own here
        self.weight = sliced(outputs, inputs, dim=1, tp=tp)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self.linear(x, self.weight, self.bias)
        summed = leave_tp(self.linear(x, self.weight), self.tp)
        return summed if self.bias is None else summed + cast(self.bias, x.dtype)


class VocabEmbedding(nn.Module):
    """Token embeddings with a slice of the vocabulary on each TP rank."""

    def __init__(self, vocabulary: int, hidden: int, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sliced(vocabulary, hidden, dim=0, tp=tp)
        self.words = self.weight.tp_slice.part(tp)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[b, s] ids to [b, s, hidden]: each rank looks up its own words, the others are 0, and the sum has all."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight).to(dtype)
        local = tokens - self.words.start  # [b, s]
        is_elsewhere = (local < 0) | (local >= len(self.words))
        embedded = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight).to(dtype)  # [b, s, hidden]
        return leave_tp(embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.tp)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, words: range) -> Tensor:
        logits = logits.detach()  # to be overwritten
        largest = tp.all_reduce(logits.amax(-1), dist.ReduceOp.MAX)  # [b, s]
        local = labels - words.start  # [b, s]
        is_here = (local >= 0) & (local < len(words)) & (labels >= 0)
        places = local.masked_fill(~is_here, 0).unsqueeze(-1)  # [b, s, 1]
        label_logits = logits.gather(-1, places).squeeze(-1) - largest
        label_logits = tp.all_reduce(label_logits.masked_fill(~is_here, 0.0))
        exponentials = logits.sub_(largest.unsqueeze(-1)).exp_()
        exp_sum = tp.all_reduce(exponentials.sum(-1))
        ctx.save_for_backward(exponentials, exp_sum, places, is_here, labels)
        return (exp_sum.log() - label_logits).masked_fill(labels < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, exp_sum, places, is_here, labels = ctx.saved_tensors
        gradient = gradient.masked_fill(labels < 0, 0.0)  # [b, s]
        of_logits = exponentials.mul_((gradient / exp_sum).unsqueeze(-1))  # the probabilities, times the gradient
        of_logits.scatter_add_(-1, places, -gradient.masked_fill(~is_here, 0.0).unsqueeze(-1))
        return of_logits, None, None, None


def vocab_cross_entropy(logits: Tensor, labels: Tensor, tp: Axis, vocabulary: int) -> Tensor:
    """Cross entropy per token, [b, s] fp32, 0 where the label is -1; logits [b, s, V/tp] are a slice of the vocabulary.

    Only three numbers per token travel: the maximum, the sum of exponentials and the label's logit. The logits are the
    largest of all tensors, so what was computed takes their place: fp32 logits are overwritten, here and in backward.
    """
    return _CrossEntropy.apply(logits.float(), labels, tp, share(vocabulary, range(tp.size), tp.rank))


class SharedDropout(nn.Module):
    """Dropout of activations that every TP rank holds: all draw the same mask, otherwise their copies would diverge.

    With sequence parallelism each rank applies its part of that mask to its tokens, so the model is the same one.
    """

    def __init__(self, p: float, tp: Axis) -> None:
        super().__init__()
        self.p = p
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1 or not self.training or self.p == 0:
            return F.dropout(x, self.p, self.training)
        kept = 1 - self.p
        if self.tp.divides_sequence:
            whole = x.new_empty(x.size(0), x.size(1) * self.tp.size, x.size(2))
            mask = own_part(whole.bernoulli_(kept, generator=self.tp.rng), self.tp).clone()  # a view would keep it all
        else:
            mask = torch.empty_like(x).bernoulli_(kept, generator=self.tp.rng)
        return x * mask.div_(kept)
