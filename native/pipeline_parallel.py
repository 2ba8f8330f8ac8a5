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

    def forward_backward(self, parts: list[Batch]) -> Tensor:
        return self.last_stage(parts) if self.layout.last_stage else self.first_stage(parts)

    def first_stage(self, parts: list[Batch]) -> Tensor:
        outputs: list[Tensor] = []
        for number, part in enumerate(parts, 1):
            outputs.append(self.forward(part))
            gradient = self.exchange(outputs[-1], receives=number > 1)
            if gradient is not None:
                self.backward(outputs.pop(0), gradient, is_last=False)
        self.backward(outputs.pop(), self.exchange(receives=True), is_last=True)
        return torch.zeros((), device=self.args.device)

    def last_stage(self, parts: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.args.device)
        received = self.exchange(receives=True)
        for number, part in enumerate(parts, 1):
            received.requires_grad_()
            loss = mean_loss(self.forward(part, received), part[-1]) / len(parts)
            self.backward(loss, is_last=number == len(parts))
            received = self.exchange(received.grad, receives=number < len(parts))
            total += loss.detach()
        return total

    def exchange(self, sent: Tensor | None = None, *, receives: bool = False) -> Tensor | None:
        """Sends to the other stage and receives from it at once; otherwise each would wait for the other's message."""
        args, pp = self.args, self.layout.pp
        other = dist.get_global_rank(pp.group, 1 - pp.rank)
        place = "cpu" if dist.get_backend() == "gloo" else args.device  # gloo sends only from host memory
        shape = args.micro_batch_size, self.model.stage_length, args.hidden_size
        received = torch.empty(shape, dtype=args.dtype, device=place) if receives else None
        operations = [dist.P2POp(dist.irecv, received, other, pp.group)] if receives else []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.detach().to(place), other, pp.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received.to(args.device) if receives else None

    def loss(self, part: Batch) -> Tensor:
        if self.layout.last_stage:
            return mean_loss(self.model(*part, self.exchange(receives=True)), part[-1])
        self.exchange(self.model(*part))
        return torch.zeros((), device=self.args.device)
