"""FSDP2 with tensor parallelism, two by two processes, compared with one process: six iterations of SGD.

What tensor parallelism replicates, such as the weight of a LayerNorm over a part of the sequence, has its gradient
added up over one mesh and then averaged over the other. With --bf16 the model runs in bf16, and its gradients are to be
reduced in fp32. The two halves of the data almost cancel, so that a sum in bf16 shows, several hundred times as large
as in a model whose gradients do not cancel. So it trains a second time without that: a release that is right there
rounds more than it was asked to, but trains no other model.

Of the project it needs only the guard of its output, so PyTorch's developers can try it:

    torchrun --nproc_per_node 4 packages/ledger/src/t5bench_ledger/two_meshes.py --bf16
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from t5bench.text import guard_streams

ITERATIONS = 6
WIDTH = 64
TOKENS = 8
"""Of a process and iteration."""
HALVES = 2
"""Of the data, and of the sequence."""
CANCELLED = 0.997
"""How much of the first half's gradient the second half takes away, roughly."""
RATE = 0.5
ROUNDS = "rounds more than asked"


class Model(nn.Module):
    """A LayerNorm, as in the residual stream of a transformer under sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.norm(inputs)
        return output


def batches(sequence_part: int, data_part: int, cancelled: float) -> Iterator[tuple[Tensor, Tensor]]:
    """A process's inputs and their factors in the loss, [1, TOKENS, WIDTH] each."""
    generator = torch.Generator().manual_seed(1234 + sequence_part)
    own = torch.Generator().manual_seed(5678 + HALVES * data_part + sequence_part)
    while True:
        inputs = torch.randn(1, TOKENS, WIDTH, generator=generator)
        factors = torch.randn(1, TOKENS, WIDTH, generator=generator)
        noise = torch.randn(1, TOKENS, WIDTH, generator=own) * (1 - cancelled)
        yield inputs, noise + (factors if data_part == 0 else -cancelled * factors)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    inputs, factors = batch
    output = model(inputs.to(dtype))
    local = output.to_local() if isinstance(output, DTensor) else output
    # Far from zero, because it is compared relative to its size.
    return 1 + (local.float() * factors).sum() / WIDTH


def plain(dtype: torch.dtype, cancelled: float) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each iteration in one process, with weights and sums in fp32."""
    masters = Model()
    model = Model().to(dtype)
    data = [
        [batches(sequence_part, data_part, cancelled) for sequence_part in range(HALVES)] for data_part in range(HALVES)
    ]
    optimizer = torch.optim.SGD(masters.parameters(), lr=RATE)
    losses = []
    norms = []
    for _ in range(ITERATIONS):
        total = 0.0
        for master in masters.parameters():
            master.grad = torch.zeros_like(master)
        for half in data:
            for part in half:
                model.zero_grad()
                loss = loss_of(model, next(part), dtype)
                loss.backward()
                total += loss.item() / HALVES
                for master, copy in zip(masters.parameters(), model.parameters(), strict=True):
                    if master.grad is not None and copy.grad is not None:
                        master.grad += copy.grad.float() / HALVES
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), float("inf"))))
        losses.append(total)
        optimizer.step()
        model.load_state_dict(masters.state_dict())
    return losses, norms


def sharded(dtype: torch.dtype, cancelled: float) -> tuple[list[float], list[float]]:
    """The same with FSDP2 over the halves of the data and tensor parallelism over those of the sequence."""
    mesh = init_device_mesh("cpu", (HALVES, HALVES), mesh_dim_names=("data", "sequence"))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = Model()
    parallelize_module(model, mesh["sequence"], {"norm": SequenceParallel()})
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    data = batches(mesh["sequence"].get_local_rank(), mesh["data"].get_local_rank(), cancelled)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    norms = []
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        loss = loss_of(model, next(data), dtype)
        loss.backward()
        total = loss.detach() / HALVES
        dist.all_reduce(total)
        gradients = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
        norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))
        losses.append(float(total))
        optimizer.step()
    return losses, norms


def compared(dtype: torch.dtype, cancelled: float) -> dict[str, list[float]]:
    losses, norms = sharded(dtype, cancelled)
    expected, expected_norms = plain(dtype, cancelled)
    return {"losses": losses, "expected": expected, "norms": norms, "expected_norms": expected_norms}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    dtype = torch.bfloat16 if parser.parse_args().bf16 else torch.float32
    dist.init_process_group("gloo")
    printed: dict[str, Any] = compared(dtype, CANCELLED)
    printed["otherwise"] = {ROUNDS: compared(dtype, 0.0)}
    if dist.get_rank() == 0:
        print(json.dumps(printed), flush=True)
    dist.barrier()


if __name__ == "__main__":
    guard_streams()
    main()
