"""The model of a run, t5.py or gpt.py, and its initial weights, which do not depend on the layout."""

import hashlib
import math
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor, nn

from native.gpt import GPT
from native.parallel import Mesh
from native.t5 import T5
from native.tensor_parallel import Slice

Model = T5 | GPT
MODELS = {"t5": T5, "gpt": GPT}


def build(args: Namespace, mesh: Mesh) -> Model:
    """This process's part of the model, with uninitialised parameters on the current device."""
    # PyTorch 2.11 prefers cuDNN's attention on Hopper. Some of its kernels drop only multiples of 1/16 (PyTorch
    # pull request 174245), and for some lengths its gradients with a mask are nan (issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return MODELS[args.family](args, mesh)


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape on this tensor-parallel rank. DeepSpeed's ZeRO-3 parts with the values and keeps the shape apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def seed_of(text: str) -> int:
    """A seed of 63 bits, always the same for a text."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initial_value(name: str, shape: tuple[int, ...], args: Namespace) -> Tensor:
    """A whole parameter's initial value, fp32 on the CPU: it depends on the seed and its name, not on the layout."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("layernorm.weight") else torch.zeros(shape)
    std = args.init_method_std
    if name.endswith((".dense.weight", ".dense_4h_to_h.weight")):  # what is added to the residual stream
        std /= math.sqrt(2 * args.num_layers)
    generator = torch.Generator().manual_seed(seed_of(f"{args.seed}:{name}"))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def copy_values(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.copy_(values)


@torch.no_grad()
def initialise(
    model: Model, args: Namespace, mesh: Mesh, fill: Callable[[nn.Parameter, Tensor], None] = copy_values
) -> None:
    """Fills the parameters of any layout with the same model, rounded to the training dtype as Megatron's are.

    `fill(parameter, values)`: how a parameter gets its values where a process has only a part of it.
    """
    for name, parameter in model.named_parameters():
        tp_slice: Slice | None = getattr(parameter, "tp_slice", None)
        shape = shape_of(parameter)
        if tp_slice:
            shape = tp_slice.whole_shape(shape, mesh.tp)
        values = initial_value(model.whole_name(name), shape, args)
        if tp_slice:
            values = tp_slice.cut(values, mesh.tp)
        fill(parameter, values.to(args.dtype))
