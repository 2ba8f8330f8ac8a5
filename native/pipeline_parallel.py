"""Pipeline parallelism with two stages: T5's encoder and decoder, or the halves of a GPT's layers."""

import torch
import torch.distributed as dist
from torch import Tensor

from native.data import Batch
from native.data_parallel import TorchTrainer, mean_loss


class PipelineTrainer(TorchTrainer):
    """Two stages on separate processes, with data and tensor parallelism within each.

    One forward, one backward (1F1B): the first stage is at most two micro-batches ahead of the last. Per micro-batch
    the first stage's output [b, s, hidden] travels forward and its gradient back; every stage has the tokens itself.
    """

    def forward_backward(self, micro_batches: list[Batch]) -> Tensor:
        if self.mesh.is_last_stage:
            return self.last_stage(micro_batches)
        return self.first_stage(micro_batches)

    def first_stage(self, micro_batches: list[Batch]) -> Tensor:
        outputs: list[Tensor] = []  # sent, and waiting for their gradients
        for number, micro_batch in enumerate(micro_batches, 1):
            outputs.append(self.forward(micro_batch))
            gradient = self.exchange(outputs[-1], receives=number > 1)
            if gradient is not None:
                self.backward(outputs.pop(0), gradient, is_last=False)
        self.backward(outputs.pop(), self.exchange(receives=True), is_last=True)
        return torch.zeros((), device=self.args.device)

    def last_stage(self, micro_batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.args.device)
        received = self.exchange(receives=True)
        for number, micro_batch in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            received.requires_grad_()
            loss = mean_loss(self.forward(micro_batch, received), micro_batch[-1]) / len(micro_batches)
            self.backward(loss, is_last=is_last)
            received = self.exchange(received.grad, receives=not is_last)
            total += loss.detach()
        return total

    def exchange(self, sent: Tensor | None = None, *, receives: bool = False) -> Tensor | None:
        """Sends to the other stage and receives from it at once; otherwise each would wait for the other's message."""
        args = self.args
        group = self.mesh.pp.group
        other = dist.get_global_rank(group, 1 - self.mesh.pp.rank)
        device = "cpu" if dist.get_backend() == "gloo" else args.device  # gloo sends only from host memory
        received = None
        operations = []
        if receives:
            shape = (args.micro_batch_size, self.model.stage_length, args.hidden_size)
            received = torch.empty(shape, dtype=args.dtype, device=device)
            operations.append(dist.P2POp(dist.irecv, received, other, group))
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.detach().to(device), other, group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received.to(args.device) if receives else None

    def loss(self, micro_batch: Batch) -> Tensor:
        if self.mesh.is_last_stage:
            received = self.exchange(receives=True)
            return mean_loss(self.model(*micro_batch, received), micro_batch[-1])
        self.exchange(self.model(*micro_batch))
        return torch.zeros((), device=self.args.device)
