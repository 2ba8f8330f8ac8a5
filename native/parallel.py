"""The mesh of processes, and what concerns all its dimensions at once: tied embeddings, the gradient norm."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from t5bench.costmodel.layout import coordinates

# Keeps the seeds of the tensor-parallel ranks' shared dropout apart from those of single processes.
SHARED_SEEDS = 1 << 32


@dataclass
class Axis:
    """One dimension of the mesh as this process sees it: the processes that differ from it only in this dimension."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    rng: torch.Generator | None = None
    """Of the tensor-parallel axis: a generator that gives the same numbers on all its ranks."""
    divides_sequence: bool = False
    """Of the tensor-parallel axis: each rank holds a part of the tokens between the layers (sequence_parallel.py)."""

    @property
    def sequence_parts(self) -> int:
        """Over how many ranks the tokens between the layers are divided."""
        return self.size if self.divides_sequence else 1

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces `tensor` in place over the axis; does nothing on an axis of size one."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor) -> None:
        """Gives all processes of the axis what its first one has, in place."""
        if self.size > 1:
            dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)


@dataclass
class Mesh:
    """This process's place in the mesh: pipeline, data and tensor parallelism."""

    pp: Axis = field(default_factory=Axis)
    dp: Axis = field(default_factory=Axis)
    tp: Axis = field(default_factory=Axis)
    copies: Axis = field(default_factory=Axis)
    """The tensor-parallel ranks that hold the same keys and values, if there are fewer groups of heads than ranks."""

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @staticmethod
    def build(
        pp: int,
        dp: int,
        tp: int,
        device: torch.device,
        seed: int,
        *,
        divides_sequence: bool = False,
        copies_of_keys: int = 1,
    ) -> "Mesh":
        """Creates the process groups and seeds dropout: one stream per process, and one that the TP ranks share."""
        rank = dist.get_rank()
        place = coordinates(rank, tp, dp)
        groups = init_device_mesh(mesh_device(device), (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        mesh = Mesh(
            pp=Axis(pp, place.pp, groups.get_group("pp")),
            dp=Axis(dp, place.dp, groups.get_group("dp")),
            tp=Axis(tp, place.tp, groups.get_group("tp"), divides_sequence=divides_sequence),
        )
        if copies_of_keys > 1:
            group, _ = dist.new_subgroups(copies_of_keys)
            mesh.copies = Axis(copies_of_keys, place.tp % copies_of_keys, group)
        torch.manual_seed(seed + rank)
        first_tp_rank = rank - place.tp
        mesh.tp.rng = torch.Generator(device).manual_seed(seed + SHARED_SEEDS + first_tp_rank)
        return mesh


def mesh_device(device: torch.device) -> str:
    """With gloo a mesh is one of CPUs on any device: a mesh of GPUs would choose each process's own."""
    return "cpu" if dist.get_backend() == "gloo" else device.type


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds if FSDP2 has divided it; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass
class Tied:
    """A parameter of which several pipeline stages have copies: embeddings, and a stack's relative positions."""

    stages: set[int]
    """That have one."""
    copies: list[nn.Parameter]
    """This stage's; several if it has several parts of the model."""
    axis: Axis = field(default_factory=Axis)
    """The processes that differ from this one only in the stage, and have a copy."""

    def repeated(self, mesh: Mesh) -> list[nn.Parameter]:
        """This stage's copies but for the first one of the first stage, which stands for all."""
        return self.copies[1:] if mesh.pp.rank == min(self.stages) else self.copies


def sum_tied_gradients(tied: Iterable[Tied]) -> None:
    """Sums the gradients of the pipeline stages' copies of the tied embeddings, so that all copies step alike.

    Sends their fp32 elements between the stages that have a copy, once per iteration.
    """
    for embedding in tied:
        if not embedding.copies:
            continue
        first, *others = (copy.grad for copy in embedding.copies)
        for gradient in others:
            first += gradient
        embedding.axis.all_reduce(first)
        for gradient in others:
            gradient.copy_(first)


def clip_gradients(
    model: nn.Module, tied: Iterable[Tied], mesh: Mesh, max_norm: float, shards: Axis | None = None
) -> Tensor:
    """Scales the gradients to a global norm of at most `max_norm` (0: never) and returns the norm, a tensor [].

    Every parameter of the whole model counts once: what several TP ranks hold counts on the first, what is tied by the
    first stage's first copy. One number travels over the TP and PP axes, and over `shards` if FSDP2 has divided the
    gradients; nothing waits for the GPU.
    """
    repeated = {copy for embedding in tied for copy in embedding.repeated(mesh)}
    gradients = {parameter: local_part(parameter.grad) for parameter in model.parameters()}
    counted = []
    for parameter, gradient in gradients.items():
        tp_slice = getattr(parameter, "tp_slice", None)
        is_first = tp_slice.is_first_copy(mesh.tp) if tp_slice else mesh.tp.rank == 0
        if parameter not in repeated and is_first:
            counted.append(gradient)

    squared_norm = norm_of(counted).square()
    if shards:
        shards.all_reduce(squared_norm)
    mesh.tp.all_reduce(squared_norm)
    mesh.pp.all_reduce(squared_norm)
    norm = squared_norm.sqrt()
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients.values()), factor)
    return norm


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements, fp32 []."""
    if tensors[0].device.type != "cpu":
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
    # On a CPU, an fp32 sum of 3e7 squares is off by 1e-3, and float64 copies of all gradients take a twentieth of an
    # iteration: so the norms of rows are fp32, and only their sum is float64.
    rows = [torch.linalg.vector_norm(tensor, dim=-1).flatten() for tensor in tensors]
    return torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).float()
