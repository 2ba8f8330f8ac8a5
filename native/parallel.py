"""Where each rank is, and the communication that no library does for us: tensor parallelism and the tied embeddings.

Ranks are laid out as in Megatron: tensor parallel fastest (neighbours talk most), then data parallel, then pipeline.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F


@dataclass
class Axis:
    """One dimension of the mesh as this process sees it: the processes that differ from it only in this dimension."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    rng: torch.Generator | None = None  # of tensor parallelism: the same numbers on all its ranks

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces `tensor` in place over the axis; does nothing on an axis of size one."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


@dataclass
class Layout:
    """This process's place in the mesh (pipeline, data, tensor)."""

    pp: Axis = field(default_factory=Axis)
    dp: Axis = field(default_factory=Axis)
    tp: Axis = field(default_factory=Axis)

    @property
    def last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @staticmethod
    def build(pp: int, dp: int, tp: int, device: torch.device, seed: int) -> "Layout":
        """Creates the process groups and seeds dropout: one stream per process, and one that the TP ranks share."""
        names = ("pp", "dp", "tp")
        # With gloo the mesh is one of CPUs on any device: a mesh of GPUs would choose each process's own.
        mesh_device = "cpu" if dist.get_backend() == "gloo" else device.type
        mesh = init_device_mesh(mesh_device, (pp, dp, tp), mesh_dim_names=names)
        layout = Layout(*(Axis(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name)) for name in names))
        torch.manual_seed(seed + dist.get_rank())
        layout.tp.rng = torch.Generator(device).manual_seed(seed + (1 << 32) + dist.get_rank() - layout.tp.rank)
        return layout


_copies: dict[nn.Parameter, Tensor] = {}


def cast(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A parameter in the dtype of the activations: fp32 masters are copied to bf16 once, for all micro-batches.

    Autograd goes through the copy, so the masters receive fp32 gradients. forget_copies() ends an iteration.
    """
    if parameter.dtype == dtype:
        return parameter
    if torch.compiler.is_compiling():  # a compiled layer fuses the copy instead
        return parameter.to(dtype)
    if parameter not in _copies:
        _copies[parameter] = parameter.to(dtype)
    return _copies[parameter]


def forget_copies() -> None:
    _copies.clear()


# Tensor parallelism (Shoeybi et al., https://arxiv.org/abs/1909.08053). Every rank holds the same activations x and a
# slice of each weight. A column slice needs no communication forward, but each rank's gradient of x covers its slice
# alone, so backward sums them (the paper's f). A row slice gives a partial sum of the output, so forward sums (g).
# Both are written here rather than left to DTensor: our fused [q|k|v] weight is no contiguous shard, DDP does not take
# DTensor parameters, and on small layers DTensor's dispatch costs more than the arithmetic.


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


def sum_tied_gradients(model: nn.Module, layout: Layout) -> None:
    """Sums the gradients of the two pipeline stages' copies of the embeddings, so that both copies step alike.

    Sends (vocabulary/tp + positions) * hidden fp32 elements between the two stages, once per iteration.
    """
    if layout.pp.size > 1:
        for parameter in model.language_model["embedding"].parameters():
            layout.pp.all_reduce(parameter.grad)


def clip_gradients(model: nn.Module, layout: Layout, max_norm: float) -> Tensor:
    """Scales the gradients to a global norm of at most `max_norm` (0: never) and returns the norm, a tensor [].

    Every parameter of the whole model counts once: what all TP ranks hold counts on the first, tied embeddings on the
    encoder's stage. One number travels over the TP and PP axes; nothing waits for the GPU.
    """
    tied = set() if layout.pp.rank == 0 else set(model.language_model["embedding"].parameters())
    parameters = list(model.parameters())
    counted = [p.grad for p in parameters if p not in tied and (hasattr(p, "tp_slice") or layout.tp.rank == 0)]
    # On a CPU in float64: an fp32 sum of 3e7 squares is off by 1e-3.
    precise = torch.float64 if counted[0].device.type == "cpu" else None
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted, 2, precise))).float().square()
    norm = layout.pp.all_reduce(layout.tp.all_reduce(norm)).sqrt()
    if max_norm > 0:
        torch._foreach_mul_([p.grad for p in parameters], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
