"""Shapes of models and training loops under ZeRO, compared with plain PyTorch in one process: six iterations of SGD.

Of the project it needs only the guard of its output, so DeepSpeed's developers can try it (stage 0: without DeepSpeed):

    torchrun --nproc_per_node 2 packages/ledger/src/t5bench_ledger/shapes.py --stage 2 --shape "used twice" --bf16
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from t5bench.text import guard_streams

ITERATIONS = 6
SAMPLES = 4
WIDTH = 16
RATE = 0.5


@dataclass(frozen=True)
class Shape:
    """What is special in a model or its training loop."""

    micro_batches: int = 1
    uses: int = 1
    """How often a forward pass calls the layer in the middle."""
    checkpointing: str = ""
    """reentrant or non-reentrant; of the layer in the middle."""
    special: str = ""
    """What Model adds, or what the training loop does between micro-batches."""
    clip_norm: float = 0.0
    """0: no clipping."""
    config: dict[str, Any] = field(default_factory=dict)
    """What it adds to DeepSpeed's JSON."""
    zero: dict[str, Any] = field(default_factory=dict)
    """What it adds to that JSON's zero_optimization."""


SHAPES = {
    # The same training as "used twice", without what is special in it.
    "used once": Shape(micro_batches=8, clip_norm=1.0),
    "used twice": Shape(micro_batches=8, uses=2, clip_norm=1.0),
    "frozen": Shape(special="frozen"),
    "unused": Shape(special="unused"),
    "empty last": Shape(special="empty last"),
    "empty inside": Shape(special="empty inside"),
    # The weight has 256 elements.
    "large parameter": Shape(config={"communication_data_type": "fp32"}, zero={"reduce_bucket_size": 100}),
    "reentrant checkpointing": Shape(checkpointing="reentrant"),
    "checkpointing": Shape(checkpointing="non-reentrant"),
    "checkpointed twice": Shape(uses=2, checkpointing="reentrant"),
    "several backward passes": Shape(micro_batches=4, special="several backward passes"),
    "evaluation": Shape(special="evaluation"),
    "saving": Shape(micro_batches=4, special="saving"),
    "scattered gradients": Shape(zero={"contiguous_gradients": False}),
}


class Empty(nn.Module):
    """A parameter without elements. A module's own parameters come before those of the modules in it, so it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.weight.sum() * 0


class Model(nn.Module):
    """Three linear layers, and what the shape adds."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.shape = shape
        self.first = nn.Linear(WIDTH, WIDTH)
        if shape.special == "empty inside":
            self.empty = Empty()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        if shape.special == "unused":
            self.unused = nn.Linear(WIDTH, WIDTH)
        if shape.special == "empty last":
            self.empty = Empty()
        if shape.special == "frozen":
            self.middle.requires_grad_(requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(self.shape.uses):
            if self.shape.checkpointing:
                is_reentrant = self.shape.checkpointing == "reentrant"
                hidden = checkpoint(self.middle, hidden, use_reentrant=is_reentrant)
            else:
                hidden = self.middle(hidden)
            hidden = torch.tanh(hidden)
        output: Tensor = self.last(hidden)
        if self.shape.special.startswith("empty"):
            output = self.empty(output)
        return output


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and target of each micro-batch of a process, [SAMPLES, WIDTH] each."""
    generator = torch.Generator().manual_seed(5678 + rank)
    while True:
        inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        targets = torch.randn(SAMPLES, WIDTH, generator=generator)
        yield inputs, targets


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """In fp32: a loss in bf16 would have fewer digits than it is compared in."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets.to(dtype).float())


def plain(shape: Shape, dtype: torch.dtype, ranks: Sequence[int], processes: int) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each iteration without DeepSpeed, with weights and sums in fp32.

    ranks: those whose batches this process trains; what is missing of all ``processes`` is added up over them.
    """
    masters = Model(shape)
    model = Model(shape).to(dtype)
    pairs = [pair for pair in zip(masters.parameters(), model.parameters(), strict=True) if pair[1].requires_grad]
    data = [batches(rank) for rank in ranks]
    optimizer = torch.optim.SGD([master for master, _ in pairs], lr=RATE)
    losses = []
    norms = []
    for _ in range(ITERATIONS):
        total = torch.zeros(())
        for master, _ in pairs:
            master.grad = torch.zeros_like(master)
        for micro_batches in data:
            for _ in range(shape.micro_batches):
                model.zero_grad()
                loss = loss_of(model, next(micro_batches), dtype) / shape.micro_batches / processes
                loss.backward()
                total += loss.detach()
                for master, copy in pairs:
                    if copy.grad is not None and master.grad is not None:
                        master.grad += copy.grad.float()
        if len(ranks) < processes:
            for tensor in (total, *(master.grad for master, _ in pairs)):
                dist.all_reduce(tensor)
        norm = nn.utils.clip_grad_norm_([master for master, _ in pairs], shape.clip_norm or float("inf"))
        optimizer.step()
        model.load_state_dict(masters.state_dict())
        losses.append(float(total))
        norms.append(float(norm))
    return losses, norms


def sharded(shape: Shape, dtype: torch.dtype, stage: int) -> tuple[list[float], list[float]]:
    """The same with DeepSpeed, in each of its processes."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    processes = dist.get_world_size()
    model = Model(shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    several_passes = shape.special == "several backward passes"
    accumulated = 1 if several_passes else shape.micro_batches
    config = {
        "train_batch_size": SAMPLES * accumulated * processes,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": shape.clip_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage} | shape.zero,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    } | shape.config
    optimizer = torch.optim.SGD(trained, lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, model_parameters=trained)
    data = batches(rank)
    losses = []
    norms = []
    for _ in range(ITERATIONS):
        total = torch.zeros(())
        for number in range(shape.micro_batches):
            is_last = number == shape.micro_batches - 1
            loss = loss_of(engine, next(data), dtype)
            total += loss.detach() / shape.micro_batches / processes
            if several_passes:
                engine.set_gradient_accumulation_boundary(is_last)
                engine.backward(loss / shape.micro_batches)
            else:
                engine.backward(loss)
            if is_last or not several_passes:
                engine.step()
            if shape.special == "saving" and number == 1:
                save(engine)
        if shape.special == "evaluation":
            engine.eval()
            with torch.no_grad():
                loss_of(engine, next(batches(rank)), dtype)
            engine.train()
        dist.all_reduce(total)
        norm = engine.get_global_grad_norm()
        losses.append(float(total))
        norms.append(float("nan") if norm is None else float(norm))
    return losses, norms


def save(engine: Any) -> None:
    """Every process must name the same directory."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        engine.save_checkpoint(names[0])
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    processes = int(os.environ["WORLD_SIZE"])
    if args.stage:
        losses, norms = sharded(shape, dtype, args.stage)
    else:
        dist.init_process_group("gloo")
        losses, norms = plain(shape, dtype, [dist.get_rank()], processes)
    if os.environ["RANK"] == "0":
        expected, expected_norms = plain(shape, dtype, range(processes), processes)
        printed = {"losses": losses, "expected": expected, "norms": norms, "expected_norms": expected_norms}
        print(json.dumps(printed), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
