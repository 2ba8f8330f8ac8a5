"""FSDP2 (https://arxiv.org/abs/2304.11277, `fully_shard`): data parallelism in which nobody keeps a whole model.

Each process keeps 1/N of every parameter, gradient and optimizer state. A layer's parameters are gathered when it
computes, and freed after its forward and after its backward pass. What belongs to no layer (embeddings, the last norms,
the head's bias) is the root's: gathered for the whole micro-batch.

Gradients are reduced once, in the last micro-batch's backward pass; until then each process adds up whole gradients.
"""

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from native.data import Batch
from native.data_parallel import TorchTrainer, make_optimizer
from native.layers import Layer
from native.model import build, initialise
from native.parallel import Axis, Mesh, clip_gradients, mesh_device

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
        slices = {name: p.tp_slice for name, p in self.model.named_parameters() if hasattr(p, "tp_slice")}
        self.divide(groups["replica", "shard"] if replicas > 1 else groups["shard"])
        self.model.to_empty(device=args.device)
        for name, parameter in self.model.named_parameters():  # new ones, without the attributes of the old
            if name in slices:
                parameter.tp_slice = slices[name]
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

    def save(self, directory: Path) -> None:
        """Writes the file that DDP would write: whole tensors, gathered one at a time, by the first process."""
        optimizer = self.optimizer.state_dict()
        moments = {}
        for number, entry in optimizer["state"].items():
            moments[number] = {name: self.gathered(value) for name, value in entry.items()}
        model = {name: self.gathered(parameter) for name, parameter in self.model.named_parameters()}
        if self.mesh.dp.rank == 0:
            path = self.shard(directory)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model, "optimizer": optimizer | {"state": moments}}, path)

    def gathered(self, value: Any) -> Any:
        """The whole of a divided tensor in host memory, on the process that writes it; None on the others."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu() if self.mesh.dp.rank == 0 else None

    def load(self, directory: Path) -> None:
        """Each process reads its parts alone; mmap leaves the others on the disk."""
        state = torch.load(self.shard(directory), map_location="cpu", weights_only=True, mmap=True)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                fill(parameter, state["model"][name])
        # The optimizer numbers its parameters through all groups.
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, entry in state["optimizer"]["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = divided_like(parameters[number], entry[name])
        self.optimizer.load_state_dict(state["optimizer"])


def divided_like(parameter: nn.Parameter, whole: Tensor) -> DTensor:
    """This process's part of a whole tensor, cut as the parameter is; nothing is sent."""
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def fill(parameter: nn.Parameter, whole: Tensor) -> None:
    parameter.copy_(divided_like(parameter, whole))
