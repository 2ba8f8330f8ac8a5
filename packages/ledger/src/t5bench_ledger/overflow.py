"""ZeRO in fp16 on numbers that can be checked by hand: a gradient overflows in one process's partition only.

Two vectors of weights; their gradients are the inputs, all powers of two, so every number is exact in fp16. In the
third iteration the gradient of the second vector, which the last process keeps, overflows. Every process must then
leave out the update. Of the project it needs only the guard of its output, so DeepSpeed's developers can try it:

    torchrun --nproc_per_node 2 packages/ledger/src/t5bench_ledger/overflow.py --stage 1
"""

import argparse
import json
import os

import torch
from torch import Tensor, nn

from t5bench.text import guard_streams

ITERATIONS = 6
MICRO_BATCHES = 4
WIDTH = 64
RATE = 0.25
OVERFLOWS_IN = 2  # counted from 0
LOSS_SCALE_POWER = 8
GRADIENT = 0.5  # of every weight, summed over the micro-batches and averaged over the processes
HUGE = 32768.0  # a gradient that overflows once it is scaled


class Model(nn.Module):
    """The loss is the sum of weights times their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(WIDTH))
        self.second = nn.Parameter(torch.ones(WIDTH))

    def forward(self, of_first: Tensor, of_second: Tensor) -> Tensor:
        return (self.first.float() * of_first.float()).sum() + (self.second.float() * of_second.float()).sum()


def reference() -> list[float]:
    """The first process's loss of each iteration without DeepSpeed: no update where a gradient overflows."""
    weight = 1.0
    losses = []
    for iteration in range(ITERATIONS):
        losses.append(2 * WIDTH * GRADIENT * weight)
        if iteration != OVERFLOWS_IN:
            weight -= RATE * GRADIENT
    return losses


def trained(stage: int) -> list[float]:
    """The same with DeepSpeed: the losses of the first process, whose own gradients never overflow."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # A CPU without instructions for fp16 computes it all the same, only slower.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo", verbose=False)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = {
        "train_batch_size": MICRO_BATCHES * int(os.environ["WORLD_SIZE"]),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "fp16": {"enabled": True, "initial_scale_power": LOSS_SCALE_POWER, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=list(model.parameters())
    )
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    losses = []
    for iteration in range(ITERATIONS):
        usual = torch.full((WIDTH,), GRADIENT, dtype=torch.float16)
        overflows = is_last and iteration == OVERFLOWS_IN
        total = 0.0
        for _ in range(MICRO_BATCHES):
            of_second = torch.full_like(usual, HUGE) if overflows else usual
            loss = engine(usual, of_second)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / MICRO_BATCHES
        losses.append(total)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    args = parser.parse_args()
    losses = trained(args.stage)
    if os.environ["RANK"] == "0":
        print(json.dumps({"losses": losses, "expected": reference()}), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
