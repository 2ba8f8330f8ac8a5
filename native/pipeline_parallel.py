"""Pipeline parallelism: each stage holds some layers, and micro-batches travel through the stages.

What stages exchange is one tensor for a micro-batch, forward, and its gradient, back; models say what is in it. Every
stage has the tokens itself.
"""

from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from native.data import Batch
from native.data_parallel import TorchTrainer, mean_loss
from native.parallel import Axis, Mesh, Tied
from t5bench.model.layout import rank_at
from t5bench.model.schedule import order


class PipelineTrainer(TorchTrainer):
    """Stages on separate processes, with data and tensor parallelism within each.

    A stage does the steps of t5bench.model.schedule.order(), from which the time of an iteration is predicted, too. A
    step waits for what it needs from a neighbour, never for what it sends.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        super().__init__(args, mesh)
        for embedding in self.model.tied:
            embedding.axis = holders_of(embedding, mesh)
        self.messages = Messages(args, mesh)

    def forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        mesh = self.mesh
        count = len(micro_batches)
        total = torch.zeros((), device=self.args.device)
        waiting: dict[int, tuple[Tensor | None, Tensor]] = {}  # what came in and went out, by micro-batch
        for way, number, _ in order(mesh.pp.rank, mesh.pp.size, count):
            if way == "F":
                received = self.receive()
                output = self.forward(micro_batches[number], received)
                if mesh.is_last_stage:
                    output = mean_loss(output, micro_batches[number][-1]) / count
                    total += output.detach()
                else:
                    self.messages.send(output, target=mesh.pp.rank + 1)
                waiting[number] = received, output
            else:
                received, output = waiting.pop(number)
                gradient = None
                if not mesh.is_last_stage:
                    gradient = self.messages.receive(output.shape, source=mesh.pp.rank + 1)
                self.backward(output, gradient, is_last=number == count - 1)
                if received is not None:
                    self.messages.send(received.grad, target=mesh.pp.rank - 1)
        self.messages.finish()
        return total

    def receive(self) -> Tensor | None:
        """What the stage before has sent; None on the first."""
        if self.mesh.is_first_stage:
            return None
        shape = (self.args.micro_batch_size, self.model.received_length, self.args.hidden_size)
        received = self.messages.receive(shape, source=self.mesh.pp.rank - 1)
        return received.requires_grad_(torch.is_grad_enabled())

    def loss(self, micro_batch: Batch) -> Tensor:
        output = self.model(*micro_batch, self.receive())
        if self.mesh.is_last_stage:
            return mean_loss(output, micro_batch[-1])
        self.messages.send(output, target=self.mesh.pp.rank + 1)
        self.messages.finish()
        return torch.zeros((), device=self.args.device)


def group_of(stages: list[int], mesh: Mesh) -> dist.ProcessGroup:
    """The processes of these stages that differ from this one in nothing else. All processes must call this at once."""
    tp = mesh.tp.size
    dp = mesh.dp.size
    groups = []
    for dp_rank in range(dp):
        for tp_rank in range(tp):
            groups.append([rank_at(stage, dp_rank, tp_rank, tp, dp) for stage in stages])
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return own


def holders_of(embedding: Tied, mesh: Mesh) -> Axis:
    """The stages that have a copy of a tied embedding, as one of them sees them."""
    stages = sorted(embedding.stages)
    if len(stages) == mesh.pp.size:
        return mesh.pp
    group = group_of(stages, mesh)
    if mesh.pp.rank not in stages:
        return Axis()
    return Axis(len(stages), stages.index(mesh.pp.rank), group)


class Messages:
    """What a stage sends to its neighbours and receives from them.

    NCCL transfers the messages of a group in their order, and each waits until its receiver is ready. There are groups
    for what goes forward and for what comes back, two of each in turns: so a stage receives from one neighbour in one
    group and sends to the other in another, and no two stages wait for each other.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        self.args = args
        self.mesh = mesh
        self.device = "cpu" if dist.get_backend() == "gloo" else args.device  # gloo sends only from host memory
        self.groups: dict[tuple[str, int], dist.ProcessGroup] = {}
        stages = list(range(mesh.pp.size))
        for way in ("forward", "back"):
            for turn in range(min(2, mesh.pp.size - 1)):
                self.groups[way, turn] = group_of(stages, mesh)
        self.sent: list[tuple[dist.Work, Tensor]] = []
        """Messages that may still be on their way."""

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        """In which a stage sends to another."""
        way = "forward" if source < target else "back"
        return self.groups[way, min(source, target) % 2]

    def send(self, tensor: Tensor, target: int) -> None:
        """To a stage; it does not wait until the message has arrived."""
        message = tensor.detach().to(self.device)
        group = self.group(self.mesh.pp.rank, target)
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]
        work = dist.isend(message, dist.get_global_rank(group, target), group)
        self.sent.append((work, message))

    def receive(self, shape: Sequence[int], source: int) -> Tensor:
        """From a stage."""
        message = torch.empty(shape, dtype=self.args.dtype, device=self.device)
        group = self.group(source, self.mesh.pp.rank)
        dist.irecv(message, dist.get_global_rank(group, source), group).wait()
        return message.to(self.args.device)

    def finish(self) -> None:
        """Waits until all messages have arrived."""
        for work, _ in self.sent:
            work.wait()
        self.sent = []
