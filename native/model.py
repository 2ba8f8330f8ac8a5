"""The model of a run, t5.py or gpt.py, and its initial weights, which do not depend on the layout."""

import hashlib
import math
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor, nn

from native.gpt import GPT
from native.parallel import Axis, Layout
from native.t5 import T5

Model = T5 | GPT
MODELS = {"t5": T5, "gpt": GPT}


def build(args: Namespace, layout: Layout) -> Model:
    """This process's part of the model, with uninitialised parameters on the current device."""
    # PyTorch 2.11 prefers cuDNN's attention on Hopper. Some of its kernels drop only multiples of 1/16 (PyTorch
    # pull request 174245), and for some lengths its gradients with a mask are nan (issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return MODELS[args.family](args, layout)


def initial_value(name: str, shape: list[int], args: Namespace) -> Tensor:
    """A whole parameter's initial value, fp32 on the CPU: it depends on the seed and its name, not on the layout."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("layernorm.weight") else torch.zeros(shape)
    seed = int.from_bytes(hashlib.sha256(f"{args.seed}:{name}".encode()).digest()[:8], "big") >> 1
    output = name.endswith((".dense.weight", ".dense_4h_to_h.weight"))
    std = args.init_method_std / (math.sqrt(2 * args.num_layers) if output else 1)
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def copy_values(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.copy_(values)


@torch.no_grad()
def initialise(
    model: Model, args: Namespace, layout: Layout, fill: Callable[[nn.Parameter, Tensor], None] = copy_values
) -> None:
    """Fills the parameters of any layout with the same model, rounded to the training dtype as Megatron's are.

    `fill(parameter, values)`: how a parameter gets its values where a process has only a part of it.
    """
    for name, parameter in model.named_parameters():
        # DeepSpeed's ZeRO-3 keeps the shape and parts with the values.
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        tp, (dim, blocks) = (layout.tp, parameter.tp_slice) if hasattr(parameter, "tp_slice") else (Axis(), (0, 1))
        shape[dim] *= tp.size
        whole = initial_value(model.whole_name(name), shape, args)
        own = torch.cat([block.chunk(tp.size, dim)[tp.rank] for block in whole.chunk(blocks, dim)], dim)
        fill(parameter, own.to(args.dtype))
