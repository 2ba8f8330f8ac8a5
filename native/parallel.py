"""Where each rank is, and what concerns all dimensions of the mesh at once: tied embeddings, the gradient norm.

Ranks are laid out as in Megatron: tensor parallel fastest (neighbours talk most), then data parallel, then pipeline.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


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
        mesh = init_device_mesh(mesh_device(device), (pp, dp, tp), mesh_dim_names=names)
        layout = Layout(*(Axis(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name)) for name in names))
        torch.manual_seed(seed + dist.get_rank())
        layout.tp.rng = torch.Generator(device).manual_seed(seed + (1 << 32) + dist.get_rank() - layout.tp.rank)
        return layout


def mesh_device(device: torch.device) -> str:
    """With gloo a mesh is one of CPUs on any device: a mesh of GPUs would choose each process's own."""
    return "cpu" if dist.get_backend() == "gloo" else device.type


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that FSDP2 has divided; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sum_tied_gradients(tied: Iterable[nn.Parameter], layout: Layout) -> None:
    """Sums the gradients of the pipeline stages' copies of the tied embeddings, so that all copies step alike.

    Sends their fp32 elements between the stages, once per iteration.
    """
    for parameter in tied:
        layout.pp.all_reduce(parameter.grad)


def clip_gradients(
    model: nn.Module, tied: Iterable[nn.Parameter], layout: Layout, max_norm: float, shards: Axis | None = None
) -> Tensor:
    """Scales the gradients to a global norm of at most `max_norm` (0: never) and returns the norm, a tensor [].

    Every parameter of the whole model counts once: what all TP ranks hold counts on the first, tied embeddings on the
    first stage. One number travels over the TP and PP axes, and over `shards` if FSDP2 has divided the gradients;
    nothing waits for the GPU.
    """
    repeated = set(tied) if layout.pp.rank > 0 else set()
    gradients = {parameter: own_part(parameter.grad) for parameter in model.parameters()}
    counted = [
        gradient
        for parameter, gradient in gradients.items()
        if parameter not in repeated and (hasattr(parameter, "tp_slice") or layout.tp.rank == 0)
    ]
    # On a CPU in float64: an fp32 sum of 3e7 squares is off by 1e-3.
    precise = torch.float64 if counted[0].device.type == "cpu" else None
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted, 2, precise))).float().square()
    if shards:
        shards.all_reduce(norm)
    norm = layout.pp.all_reduce(layout.tp.all_reduce(norm)).sqrt()
    if max_norm > 0:
        torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
