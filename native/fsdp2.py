"""FSDP2 (https://arxiv.org/abs/2304.11277, `fully_shard`): data parallelism in which nobody keeps a whole model.

Each process keeps 1/N of every parameter, gradient and optimizer state. A layer's parameters are gathered when it
computes, and freed after its forward and after its backward pass. What belongs to no layer (embeddings, the last norms,
the head's bias) is the root's: gathered for the whole micro-batch.

Gradients are reduced once, in the last micro-batch's backward pass; until then each process adds up whole gradients.
"""

import warnings
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from native.data import Batch
from native.data_parallel import TorchTrainer, make_optimizer
from native.layers import Layer
from native.model import build, initialise
from native.parallel import Axis, Mesh, clip_gradients, local_part, mesh_device

# The model returns a view, the losses; nothing changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class FSDP2Trainer(TorchTrainer):
    """FSDP2 over the data-parallel processes, with tensor parallelism within each layer.

    With --bf16 the parameters are the fp32 masters: what is gathered is their bf16 copy. Gradients are accumulated and
    reduced in fp32, as DDP's are.

    --fsdp2-keep-parameters: parameters stay gathered until the iteration's last backward pass, so that they are
    gathered once an iteration and not twice a micro-batch. --fsdp2-shard-size: that many processes share one copy of
    the states, and the copies reduce their gradients among each other (HSDP).
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        self.args = args
        self.mesh = mesh
        shards = args.fsdp2_shard_size or mesh.dp.size
        replicas = mesh.dp.size // shards
        sizes = (mesh.pp.size, replicas, shards, mesh.tp.size)
        groups = init_device_mesh(mesh_device(args.device), sizes, mesh_dim_names=("pp", "replica", "shard", "tp"))
        self.shards = Axis(shards, groups.get_local_rank("shard"), groups.get_group("shard"))
        with torch.device("meta"):  # no process ever has the whole model
            self.model = build(args, mesh)
        marks = {name: dict(vars(parameter)) for name, parameter in self.model.named_parameters()}
        self.divide(groups["replica", "shard"] if replicas > 1 else groups["shard"])
        self.model.to_empty(device=args.device)
        for name, parameter in self.model.named_parameters():  # new ones, without the attributes of the old
            for mark, value in marks[name].items():
                setattr(parameter, mark, value)
        initialise(self.model, args, mesh, fill)
        self.optimizer = make_optimizer(self.model, args)

    def divide(self, mesh: DeviceMesh) -> None:
        """Divides each layer's parameters, and what belongs to no layer, over the processes of `mesh`."""
        precision = MixedPrecisionPolicy(param_dtype=self.args.dtype, reduce_dtype=torch.float32)
        frees_parameters = not self.args.fsdp2_keep_parameters
        for module in self.model.modules():
            if isinstance(module, Layer):
                fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=frees_parameters)
        # The backward pass begins with what the forward pass ends with.
        fully_shard(self.model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)

    def forward(self, micro_batch: Batch, received: Tensor | None = None, part: int = 0) -> Tensor:
        return self.model(*micro_batch)

    def backward(self, output: Tensor, gradient: Tensor | None = None, *, is_last: bool, part: int = 0) -> None:
        """Adds to the gradients, and reduces them during an iteration's last backward pass."""
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_is_last_backward(is_last)
        if self.args.fsdp2_keep_parameters:
            self.model.set_reshard_after_backward(is_last)
        output.backward(gradient)

    def update(self) -> Tensor:
        norm = clip_gradients(self.model, (), self.mesh, self.args.clip_grad, self.shards)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        loss = super().evaluate(batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return loss

    def replicas_of_states(self) -> range:
        return range(self.shards.rank, self.mesh.dp.size, self.shards.size)

    def rows_of(self, parameter: nn.Parameter) -> tuple[int, int]:
        """fully_shard gives the first processes equal numbers of rows, and the last ones what is left."""
        each = -(-len(parameter) // self.shards.size)
        begin = min(self.shards.rank * each, len(parameter))
        return begin, begin + len(local_part(parameter))


def divided_like(parameter: nn.Parameter, whole: Tensor) -> DTensor:
    """This process's part of a whole tensor, cut as the parameter is; nothing is sent."""
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def fill(parameter: nn.Parameter, whole: Tensor) -> None:
    parameter.copy_(divided_like(parameter, whole))
