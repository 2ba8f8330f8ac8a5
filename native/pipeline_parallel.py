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
from native.zero_bubble import WeightGradients
from t5bench.costmodel.layout import rank_at
from t5bench.costmodel.schedule import order


class PipelineTrainer(TorchTrainer):
    """Stages on separate processes, with data and tensor parallelism within each.

    A stage does the steps of t5bench.costmodel.schedule.order(), from which its time is also predicted. A
    step waits for what it needs from a neighbour, never for what it sends. Under the interleaved schedule a stage has
    several parts of the model, and what the last stage sends forward goes to the first. Under the zero-bubble schedule
    it computes gradients of weights in steps of their own.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        super().__init__(args, mesh)
        for embedding in self.model.tied:
            embedding.axis = holders_of(embedding, mesh)
        self.messages = Messages(args, mesh)
        self.weight_gradients = WeightGradients(self.model, args, mesh)

    def begins(self, part: int) -> bool:
        """Whether the part is the model's first."""
        return part == 0 and self.mesh.is_first_stage

    def ends(self, part: int) -> bool:
        """Whether the part is the model's last, which computes the loss."""
        return part == len(self.parts) - 1 and self.mesh.is_last_stage

    def forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        stage = self.mesh.pp.rank
        count = len(micro_batches)
        total = torch.zeros((), device=self.args.device)
        waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # for their backward steps
        for way, number, part in order(stage, self.mesh.pp.size, count, len(self.parts), self.args.pipeline_schedule):
            if way == "F":
                received, output = self.forward_step(micro_batches[number], count, part)
                waiting[number, part] = received, output
                if self.ends(part):
                    total += output.detach()
                del received, output
            elif way == "B":
                received, output = waiting.pop((number, part))
                self.weight_gradients.micro_batch = number
                self.backward_step(received, output, part, is_last=number == count - 1)
                del received, output
            else:
                self.weight_gradients.compute(number, is_last=number == count - 1)
        self.messages.finish()
        return total

    def forward_step(self, micro_batch: Batch, count: int, part: int) -> tuple[Tensor | None, Tensor]:
        """What came in, and what goes out: hidden states, and from the model's last part its share of the loss."""
        received = self.receive(part)
        output = self.forward(micro_batch, received, part)
        if self.ends(part):
            return received, mean_loss(output, micro_batch[-1]) / count
        self.messages.send("forward", output)
        return received, output

    def backward_step(self, received: Tensor | None, output: Tensor, part: int, is_last: bool) -> None:
        """is_last: it is the part's last one of the iteration."""
        gradient = None if self.ends(part) else self.messages.receive("back", output.shape)
        self.backward(output, gradient, is_last=is_last, part=part)
        if received is not None:
            self.messages.send("back", received.grad)

    def receive(self, part: int) -> Tensor | None:
        """What the part before has sent; None for the model's first."""
        if self.begins(part):
            return None
        shape = (self.args.micro_batch_size, self.parts[part].received_length, self.args.hidden_size)
        return self.messages.receive("forward", shape).requires_grad_(torch.is_grad_enabled())

    def loss(self, micro_batch: Batch) -> Tensor:
        loss = torch.zeros((), device=self.args.device)
        for part, model in enumerate(self.parts):
            output = model(*micro_batch, self.receive(part))
            if self.ends(part):
                loss = mean_loss(output, micro_batch[-1])
            else:
                self.messages.send("forward", output)
        self.messages.finish()
        return loss


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
    """What a stage sends to its neighbours and receives from them: "forward" to the next, "back" to the one before.

    The stages are a ring. NCCL transfers the messages of a group in their order, and each waits until its receiver is
    ready. So each way has several groups, and neighbouring links are in different ones: what a stage receives does not
    wait for what it sends.
    """

    def __init__(self, args: Namespace, mesh: Mesh) -> None:
        self.args = args
        self.pp = mesh.pp
        self.device = "cpu" if dist.get_backend() == "gloo" else args.device  # gloo sends only from host memory
        is_closed = args.virtual_pipeline_stages > 1
        links = range(mesh.pp.size if is_closed else mesh.pp.size - 1)
        stages = list(range(mesh.pp.size))
        lanes = sorted({self.lane(link) for link in links})
        self.groups = {(way, lane): group_of(stages, mesh) for way in ("forward", "back") for lane in lanes}
        self.sent: list[tuple[dist.Work, Tensor]] = []
        """Messages that may still be on their way."""

    def lane(self, link: int) -> int:
        """A number that neighbouring links do not share. link: the stage from which it goes forward."""
        closes_odd_ring = link == self.pp.size - 1 and self.pp.size % 2
        return 2 if closes_odd_ring else link % 2

    def group(self, way: str, source: int, target: int) -> dist.ProcessGroup:
        """In which a stage sends to another."""
        link = source if way == "forward" else target
        return self.groups[way, self.lane(link)]

    def send(self, way: str, tensor: Tensor) -> None:
        """It does not wait until the message has arrived."""
        message = tensor.detach().to(self.device)
        target = (self.pp.rank + (1 if way == "forward" else -1)) % self.pp.size
        group = self.group(way, self.pp.rank, target)
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]
        work = dist.isend(message, dist.get_global_rank(group, target), group)
        self.sent.append((work, message))

    def receive(self, way: str, shape: Sequence[int]) -> Tensor:
        message = torch.empty(shape, dtype=self.args.dtype, device=self.device)
        source = (self.pp.rank - (1 if way == "forward" else -1)) % self.pp.size
        group = self.group(way, source, self.pp.rank)
        dist.irecv(message, dist.get_global_rank(group, source), group).wait()
        return message.to(self.args.device)

    def finish(self) -> None:
        """Waits until all messages have arrived."""
        for work, _ in self.sent:
            work.wait()
        self.sent = []
