"""Sequence parallelism (Korthikanti et al., https://arxiv.org/abs/2205.05198), which adds to tensor parallelism.

Between the blocks that tensor parallelism divides, every rank would hold the same activations, [b, s, hidden]: of the
norms, the dropouts and the residual stream. Here each rank holds its part of the tokens instead, [b, s / t, hidden].
Before a block the parts are gathered (the paper's g), after it they are summed and scattered. Together these send as
much as the all-reduce that they replace. Backward does the opposite.

A block's first layer keeps only its part of the input, and gathers the whole once more in backward.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from native.parallel import Axis, Mesh

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


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, bias: Tensor, weight: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        ctx.save_for_backward(part, weight)
        return F.linear(all_gather(part, tp), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        part, weight = ctx.saved_tensors
        whole = all_gather(part, ctx.tp)  # [b, s, inputs]
        part_gradient = reduce_scatter(gradient @ weight, ctx.tp)
        weight_gradient = gradient.flatten(0, 1).T @ whole.flatten(0, 1)
        return part_gradient, gradient.sum((0, 1)), weight_gradient, None


def gather_sequence(part: Tensor, tp: Axis) -> Tensor:
    """g: hands all tokens to column slices. Backward sums their gradients, and each rank keeps its part."""
    return _Gather.apply(part, tp)


def scatter_sequence(partial: Tensor, tp: Axis) -> Tensor:
    """Takes the output of row slices: each rank gets its part of the tokens' sum. Backward gathers."""
    return _Scatter.apply(partial, tp)


def gathered_linear(part: Tensor, weight: Tensor, bias: Tensor, tp: Axis) -> Tensor:
    """A column slice's x W^T + b, for x of all tokens, of which only this rank's part is kept."""
    return _GatheredLinear.apply(part, bias, weight, tp)  # DDP then gets the gradients in F.linear's order


def sum_sequence_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sums the gradients of what every rank applied to its own tokens: norms, biases of row slices, positions.

    These are the parameters that tensor parallelism does not divide. One all-reduce an iteration, in fp32.
    """
    if not mesh.tp.divides_sequence:
        return
    gradients = [parameter.grad for parameter in parameters if not hasattr(parameter, "tp_slice")]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    mesh.tp.all_reduce(together)
    summed = together.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, summed, strict=True):
        gradient.copy_(total.view_as(gradient))
