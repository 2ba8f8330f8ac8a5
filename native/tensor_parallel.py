"""Tensor parallelism (Shoeybi et al., https://arxiv.org/abs/1909.08053), and the vocabulary it divides.

Every rank holds the same activations x and a slice of each weight. A column slice needs no communication forward, but
each rank's gradient of x covers its slice alone, so backward sums them (the paper's f, `enter_tp`). A row slice gives a
partial sum of the output, so forward sums (g, `leave_tp`). Both are written here rather than left to DTensor: our fused
[q|k|v] weight is no contiguous shard, DDP does not take DTensor parameters, and on small layers DTensor's dispatch
costs more than the arithmetic.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from native.parallel import Axis
from native.precision import cast


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
    return x if tp.size == 1 else _Enter.apply(x, tp)


def leave_tp(partial: Tensor, tp: Axis) -> Tensor:
    """g: takes the output of row slices. Forward all-reduces it in place; backward sends nothing."""
    return partial if tp.size == 1 else _Leave.apply(partial.contiguous(), tp)


def sliced(*shape: int, dim: int, tp: Axis, blocks: int = 1) -> nn.Parameter:
    """One TP rank's slice of a parameter of this whole shape, cut along `dim` from each of `blocks` equal blocks."""
    own = [size // tp.size if axis == dim else size for axis, size in enumerate(shape)]
    parameter = nn.Parameter(torch.empty(own))
    parameter.tp_slice = dim, blocks
    return parameter


class ColumnLinear(nn.Module):
    """y = x W^T + b with a slice of W's rows (output features) on each TP rank; the output stays sliced.

    `blocks`: the number of blocks of rows that are sliced separately, as in the fused [q|k|v]. The input must have gone
    through enter_tp.
    """

    def __init__(self, inputs: int, outputs: int, tp: Axis, blocks: int = 1) -> None:
        super().__init__()
        self.weight = sliced(outputs, inputs, dim=0, tp=tp, blocks=blocks)
        self.bias = sliced(outputs, dim=0, tp=tp, blocks=blocks)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, cast(self.weight, x.dtype), cast(self.bias, x.dtype))


class RowLinear(nn.Module):
    """y = x W^T + b with a slice of W's columns (input features) on each TP rank; b is whole, and added once."""

    def __init__(self, inputs: int, outputs: int, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sliced(outputs, inputs, dim=1, tp=tp)
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = cast(self.weight, x.dtype), cast(self.bias, x.dtype)
        if self.tp.size == 1:
            return F.linear(x, weight, bias)
        return leave_tp(F.linear(x, weight), self.tp) + bias


class VocabEmbedding(nn.Module):
    """Token embeddings with a slice of the vocabulary on each TP rank."""

    def __init__(self, vocabulary: int, hidden: int, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        self.weight = sliced(vocabulary, hidden, dim=0, tp=tp)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[b, s] ids to [b, s, hidden]: each rank looks up its own tokens, the others are 0, and the sum has all."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight).to(dtype)
        local = tokens - self.tp.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight).to(dtype)
        return leave_tp(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp)


def vocab_cross_entropy(logits: Tensor, labels: Tensor, tp: Axis) -> Tensor:
    """Cross entropy per token, [b, s] fp32, 0 where the label is -1; logits [b, s, V/tp] are a slice of the vocabulary.

    Only three numbers per token travel: the maximum, the sum of exponentials and the label's logit.
    """
    logits = logits.float()
    if tp.size == 1:
        flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none")
        return flat.view_as(labels)
    logits = logits - tp.all_reduce(logits.detach().amax(-1), dist.ReduceOp.MAX).unsqueeze(-1)
    exp_sum = leave_tp(logits.exp().sum(-1), tp)
    local = labels - tp.rank * logits.size(-1)
    here = (local >= 0) & (local < logits.size(-1)) & (labels >= 0)
    own = logits.gather(-1, local.masked_fill(~here, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    return (exp_sum.log() - leave_tp(own, tp)).masked_fill(labels < 0, 0.0)


class SharedDropout(nn.Module):
    """Dropout of activations that every TP rank holds: all draw the same mask, otherwise their copies would diverge."""

    def __init__(self, p: float, tp: Axis) -> None:
        super().__init__()
        self.p, self.tp = p, tp

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1 or not self.training or self.p == 0:
            return F.dropout(x, self.p, self.training)
        return x * torch.empty_like(x).bernoulli_(1 - self.p, generator=self.tp.rng).div_(1 - self.p)
