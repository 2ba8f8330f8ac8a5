"""The zero-bubble schedule ZB-H1 (Qi et al., https://arxiv.org/abs/2401.10241): gradients of weights are put off.

A backward pass computes the gradient of a stage's input, for which the stage before waits, and the gradients of its
weights, for which nobody waits until the iteration ends. Here the linear layers leave out the second half and keep what
it needs: their input and the gradient of their output. The stage computes it in steps of their own, most of them while
it would have to wait (order() in t5bench/costmodel/schedule.py).

Everything else gets its gradient at once: biases, norms and embeddings take little time. The head would have to keep
the gradient of the logits, the largest of all tensors; and its words can be an embedding of the same stage, whose
gradient DDP reduces as soon as it is there.
"""

from argparse import Namespace
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from native.parallel import Mesh
from native.precision import cast
from native.tensor_parallel import ColumnLinear, RowLinear
from t5bench.costmodel.schedule import WEIGHT_STEP, puts_off_weights


class PutOff(NamedTuple):
    """What the gradient of a linear layer's weight is computed from."""

    micro_batch: int
    parameter: nn.Parameter
    weight: Tensor
    """With which the layer computes: the parameter, or its bf16 copy."""
    x: Tensor
    """The layer's input, [b, s, inputs]."""
    gradient: Tensor
    """Of the layer's output, [b, s, outputs]."""


class WeightGradients:
    """The gradients of weights that a stage computes later than the rest of a backward pass."""

    def __init__(self, model: nn.Module, args: Namespace, mesh: Mesh) -> None:
        self.micro_batch = 0
        """Whose backward pass is being computed."""
        self.waiting: deque[PutOff] = deque()
        if puts_off_weights(mesh.pp.rank, args.pipeline_schedule):
            for module in model.modules():
                if isinstance(module, ColumnLinear | RowLinear):
                    module.linear = self.linear

    def linear(self, x: Tensor, parameter: nn.Parameter, bias: nn.Parameter | None = None) -> Tensor:
        """x W^T + b, whose backward pass puts off W's gradient."""
        layer = (parameter, cast(parameter, x.dtype))  # in a tuple autograd does not see them
        if bias is not None:
            bias = cast(bias, x.dtype)
        return _Linear.apply(x, bias, layer, self)

    @torch.no_grad()
    def compute(self, micro_batch: int, *, is_last: bool) -> None:
        """Adds the gradients that a micro-batch's backward pass has put off. is_last: it is the iteration's last.

        The last micro-batch's go through autograd: DDP's hooks then see that a weight is complete, and reduce it. When
        DDP is prepared for the last backward pass, earlier ones may still be waiting; these must not reach the hooks.
        """
        with record_function(WEIGHT_STEP):
            while self.waiting and self.waiting[0].micro_batch == micro_batch:
                _, parameter, weight, x, output_gradient = self.waiting.popleft()
                gradient = output_gradient.flatten(0, -2).T @ x.flatten(0, -2)  # [outputs, inputs]
                if is_last:
                    weight.backward(gradient)
                elif parameter.grad is None:
                    parameter.grad = gradient.to(parameter.dtype)
                else:
                    parameter.grad += gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, layer: tuple[nn.Parameter, Tensor], weights: WeightGradients
    ) -> Tensor:
        ctx.layer = layer
        ctx.weights = weights
        ctx.save_for_backward(x)
        return F.linear(x, layer[1], bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        parameter, weight = ctx.layer
        weights: WeightGradients = ctx.weights
        # Detached, or it would keep the graph behind it, and with that the gradient of what the stage has received.
        weights.waiting.append(PutOff(weights.micro_batch, parameter, weight, x.detach(), gradient))
        bias_gradient = gradient.sum((0, 1)) if ctx.needs_input_grad[1] else None
        return gradient @ weight, bias_gradient, None, None
