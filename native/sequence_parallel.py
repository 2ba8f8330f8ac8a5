"""Sequence parallelism (Korthikanti et al., https://arxiv.org/abs/2205.05198), which adds to tensor parallelism.

Between the blocks that tensor parallelism divides, every rank would hold the same activations, [b, s, hidden]: of the
norms, the dropouts and the residual stream. Here each rank holds its part of the tokens instead, [b, s / t, hidden].
Before a block the parts are gathered (the paper's g), after it they are summed and scattered. Together these send as
much as the all-reduce that they replace. Backward does the opposite.

A block's first layer keeps only its part of the input, and gathers the whole once more in backward.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from native.parallel import Axis, Mesh, local_part

# PyTorch 2.13 gave them other names.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_part(whole: Tensor, tp: Axis, dim: int = 1) -> Tensor:
    """This rank's part of the tokens, which are the dimension `dim`."""
    return whole.chunk(tp.size, dim)[tp.rank]


def all_gather(part: Tensor, tp: Axis) -> Tensor:
    """The whole, [b, s, hidden], of the ranks' parts, [b, s / t, hidden]."""
    parts = torch.empty(tp.size, *part.shape, dtype=part.dtype, device=part.device)
    gather_into(parts.flatten(0, 1), part.contiguous(), group=tp.group)
    return parts.transpose(0, 1).flatten(1, 2)


def reduce_scatter(partial: Tensor, tp: Axis) -> Tensor:
    """This rank's part, [b, s / t, hidden], of the sum of the ranks' tensors, [b, s, hidden] each."""
    parts = partial.unflatten(1, (tp.size, -1)).transpose(0, 1).contiguous()  # [t, b, s / t, hidden]
    own = torch.empty_like(parts[0])
    reduce_into(own, parts.flatten(0, 1), group=tp.group)
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return all_gather(part, tp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, ctx.tp), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return reduce_scatter(partial, tp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, ctx.tp), None


class _GatheredLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tp: Axis, *biases_and_weights: Tensor | None) -> tuple[Tensor, ...]:
        ctx.tp = tp
        biases = biases_and_weights[::2]
        weights = biases_and_weights[1::2]
        ctx.save_for_backward(part, *weights)
        whole = all_gather(part, tp)
        return tuple(F.linear(whole, weight, bias) for bias, weight in zip(biases, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, *weights = ctx.saved_tensors
        whole = all_gather(part, ctx.tp)  # [b, s, inputs]
        to_input = [gradient @ weight for gradient, weight in zip(gradients, weights, strict=True)]
        part_gradient = reduce_scatter(functools.reduce(torch.add, to_input), ctx.tp)
        found: list[Tensor | None] = []
        for number, gradient in enumerate(gradients):
            found.append(gradient.sum((0, 1)) if ctx.needs_input_grad[2 + 2 * number] else None)
            found.append(gradient.flatten(0, 1).T @ whole.flatten(0, 1))
        return part_gradient, None, *found


def gather_sequence(part: Tensor, tp: Axis) -> Tensor:
    """g: hands all tokens to column slices. Backward sums their gradients, and each rank keeps its part."""
    return _Gather.apply(part, tp)


def scatter_sequence(partial: Tensor, tp: Axis) -> Tensor:
    """Takes the output of row slices: each rank gets its part of the tokens' sum. Backward gathers."""
    return _Scatter.apply(partial, tp)


def gathered_linears(part: Tensor, layers: Sequence[tuple[Tensor, Tensor | None]], tp: Axis) -> list[Tensor]:
    """Column slices' x W^T + b, for x of all tokens, of which only this rank's part is kept. layers: (W, b) of each."""
    inputs = [tensor for weight, bias in layers for tensor in (bias, weight)]  # DDP then gets F.linear's order
    return list(_GatheredLinears.apply(part, tp, *inputs))


def sum_partial_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sums the gradients that tensor-parallel ranks have terms of. One all-reduce an iteration for each kind, in fp32.

    Sequence parallelism: of what every rank applied to its own tokens: norms, biases of row slices, positions. These
    are the parameters that are not divided. Without it: of norms that every rank applied to its own heads. And of keys
    and values, of which several ranks hold the same part, but each for its own queries.
    """
    if mesh.tp.size == 1:
        return
    parameters = list(parameters)
    whole = [parameter for parameter in parameters if not hasattr(parameter, "tp_slice")]
    if not mesh.tp.divides_sequence:
        whole = [parameter for parameter in whole if hasattr(parameter, "is_partial")]
    copied = [parameter for parameter in parameters if hasattr(parameter, "tp_slice") and parameter.tp_slice.copies > 1]
    sum_together(whole, mesh.tp)
    sum_together(copied, mesh.copies)


def sum_together(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    """Sums these parameters' gradients over the axis, in one message."""
    if not parameters:
        return
    gradients = [local_part(parameter.grad) for parameter in parameters]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    axis.all_reduce(together)
    summed = together.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, summed, strict=True):
        gradient.copy_(total.view_as(gradient))
