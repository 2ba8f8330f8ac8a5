"""The model of a run, t5.py or gpt.py, and its initial weights, which do not depend on the layout."""

import hashlib
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from native.gpt import GPT
from native.parallel import Axis, Mesh, Tied
from native.t5 import T5
from native.tensor_parallel import Slice
from t5bench.costmodel.job import Architecture

MODELS = {"t5": T5, "gpt": GPT}


class Parts(nn.Module):
    """What a pipeline stage has under the interleaved schedule: several parts of the model.

    Stage 0 of 2 with 2 parts has parts 0 and 2 of the model's 4, and stage 1 has parts 1 and 3. Each part is built as
    the only one of a stage in a pipeline of 4.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        super().__init__()
        stages = mesh.pp.size
        count = stages * args.virtual_pipeline_stages
        places = [Axis(count, number) for number in range(mesh.pp.rank, count, stages)]
        self.parts = nn.ModuleList(make(args, replace(mesh, pp=place)) for place in places)
        self.tied: list[Tied] = []
        for copies_of_one in zip(*(part.tied for part in self.parts), strict=True):
            holders = {number % stages for number in copies_of_one[0].stages}
            self.tied.append(Tied(holders, [copy for tied in copies_of_one for copy in tied.copies]))

    def whole_name(self, name: str) -> str:
        """The name of a parameter in the model of one process."""
        _, number, own_name = name.split(".", 2)
        return self.parts[int(number)].whole_name(own_name)


Model = T5 | GPT | Parts


def make(args: Namespace, mesh: Mesh) -> T5 | GPT:
    return MODELS[args.family](args, architecture_of(args), mesh)


def architecture_of(args: Namespace) -> Architecture:
    """The description of the model: what its parts are."""
    return Architecture.of_arguments(vars(args), args.padded_vocab_size)


def parts_of(model: Model) -> list[T5 | GPT]:
    """The parts of the model that a pipeline stage has: one, and several under the interleaved schedule."""
    return list(model.parts) if isinstance(model, Parts) else [model]


def mesh_of(args: Namespace) -> Mesh:
    """The processes of a run, whose group is there, as its arguments lay them out."""
    return Mesh.build(
        args.pp,
        args.dp,
        args.tp,
        args.device,
        args.seed,
        divides_sequence=args.sequence_parallel,
        copies_of_keys=architecture_of(args).copies_of_keys(args.tp),
    )


def build(args: Namespace, mesh: Mesh) -> Model:
    """This process's part of the model, with uninitialised parameters on the current device."""
    # PyTorch 2.11 prefers cuDNN's attention on Hopper. Some of its kernels drop only multiples of 1/16 (PyTorch
    # pull request 174245), and for some lengths its gradients with a mask are nan (issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Parts(args, mesh) if args.virtual_pipeline_stages > 1 else make(args, mesh)


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape on this tensor-parallel rank. DeepSpeed's ZeRO-3 parts with the values and keeps the shape apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def seed_of(text: str) -> int:
    """A seed of 63 bits, always the same for a text."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initial_value(name: str, shape: tuple[int, ...], model: Architecture, seed: int) -> Tensor:
    """A whole parameter's initial value, fp32 on the CPU: it depends on the seed and its name, not on the layout."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("layernorm.weight") else torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed_of(f"{seed}:{name}"))
    return torch.empty(shape).normal_(0.0, initial_std(name, shape, model), generator=generator)


def initial_std(name: str, shape: tuple[int, ...], model: Architecture) -> float:
    """The standard deviation of a weight's initial values."""
    adds_to_residual = name.endswith((".dense.weight", ".dense_4h_to_h.weight"))
    if model.initial == "scaled" and adds_to_residual:
        return model.initial_std / math.sqrt(2 * (model.encoder_layers or model.decoder_layers))
    if model.initial != "t5":
        return model.initial_std
    # T5 leaves out the scale of attention's scores, so the queries are smaller by it. initial_std is a factor.
    if name.endswith(("word_embeddings.weight", "lm_head.weight")):
        return model.initial_std
    if name.endswith("inter_attention.query.weight"):
        return model.initial_std * (model.hidden * model.head_size) ** -0.5
    if name.endswith("relative_positions.weight"):
        return model.initial_std * model.hidden**-0.5
    return model.initial_std * shape[1] ** -0.5


def copy_values(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.copy_(values)


@torch.no_grad()
def initialise(
    model: Model, args: Namespace, mesh: Mesh, fill: Callable[[nn.Parameter, Tensor], None] = copy_values
) -> None:
    """Fills the parameters of any layout with the same model, rounded to the training dtype as Megatron's are.

    `fill(parameter, values)`: how a parameter gets its values where a process has only a part of it.
    """
    architecture = architecture_of(args)
    for name, parameter in model.named_parameters():
        tp_slice: Slice | None = getattr(parameter, "tp_slice", None)
        shape = shape_of(parameter)
        if tp_slice:
            shape = tp_slice.whole_shape(shape)
        values = initial_value(model.whole_name(name), shape, architecture, args.seed)
        if tp_slice:
            values = tp_slice.cut(values, mesh.tp)
        fill(parameter, values.to(args.dtype))
