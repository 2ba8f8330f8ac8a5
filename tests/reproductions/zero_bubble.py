"""Why torch.distributed.pipelining's zero-bubble schedules fail on an encoder-decoder. It needs PyTorch alone:

    torchrun --nproc_per_node 2 zero_bubble.py
    torchrun --nproc_per_node 2 zero_bubble.py joined

Two processes hold four stages: two of an encoder and two of a decoder. The decoder's first stage embeds its own tokens.
The first command ends with "Trying to backward through the graph a second time". The second prints errors of 0.0e+00.
native/README.md explains why.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

MICRO_BATCHES = 4
WIDTH = 8


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Decoder(nn.Module):
    """x + out(query(x) * encoded), which stands for cross-attention, and behind it the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, received: Tensor) -> Tensor:
        x, encoded = received.chunk(2)
        return torch.cat([x + self.out(self.query(x) * encoded), encoded])


class FirstDecoder(nn.Module):
    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.tokens = tokens
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, encoded: Tensor) -> Tensor:
        x = self.embedding(self.tokens)
        if "joined" in sys.argv:  # from here on, all that is computed depends on what came in
            x, encoded = torch.cat([x, encoded]).chunk(2)
        return torch.cat([x + self.out(self.query(x) * encoded), encoded])


def loss_of(output: Tensor, _: Tensor) -> Tensor:
    return output.square().sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # the same weights in both processes
modules = nn.ModuleList([Encoder(), Encoder(), FirstDecoder(torch.randn(1, WIDTH)), Decoder()])
batch = torch.randn(MICRO_BATCHES, WIDTH)
for sample in batch.split(1):
    loss_of(nn.Sequential(*modules)(sample), sample).backward()
expected = {name: weight.grad.clone() for name, weight in modules.named_parameters()}
modules.zero_grad()

stages = [PipelineStage(modules[number], number, len(modules), torch.device("cpu")) for number in (rank, rank + 2)]
schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
schedule.step(*([batch] if rank == 0 else []), target=batch)
for name, weight in modules.named_parameters():
    if weight.grad is not None:  # this process's
        error = (weight.grad - expected[name]).abs().max()
        print(f"torch {torch.__version__}, {name}: largest error of the gradient {error:.1e}", flush=True)
dist.destroy_process_group()
