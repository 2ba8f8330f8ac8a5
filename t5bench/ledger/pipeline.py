"""DeepSpeed's pipeline engine on a model of four layers, compared with plain PyTorch: six iterations, two stages.

This needs nothing of the project, so that it can be shown to DeepSpeed's developers as it is:

    torchrun --nproc_per_node 2 t5bench/ledger/pipeline.py
"""

import json
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

ITERATIONS, MICRO_BATCHES, SAMPLES, WIDTH, RATE = 6, 2, 4, 16, 0.5


def make_layers() -> list[nn.Module]:
    torch.manual_seed(1234)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Input and target of each micro-batch, [SAMPLES, WIDTH] each."""
    generator = torch.Generator().manual_seed(5678)
    while True:
        yield tuple(torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))


def reference() -> list[float]:
    """The loss of each iteration without DeepSpeed."""
    model, data, losses = nn.Sequential(*make_layers()), batches(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(ITERATIONS):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            inputs, targets = next(data)
            loss = nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def pipelined() -> list[float]:
    """The same with DeepSpeed's pipeline engine, in each of its two processes."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    layers = make_layers()
    model = deepspeed.pipe.PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = {
        "train_batch_size": SAMPLES * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = batches()
    return [float(engine.train_batch(data)) for _ in range(ITERATIONS)]


if __name__ == "__main__":
    losses, expected = pipelined(), reference()
    if os.environ["RANK"] == "0":
        print(json.dumps({"losses": losses, "expected": expected}), flush=True)
