"""DeepSpeed's pipeline engine on a model of four layers, compared with plain PyTorch: six iterations, two stages.

This needs nothing of the project, so that it can be shown to DeepSpeed's developers as it is:

    torchrun --nproc_per_node 4 t5bench/ledger/pipeline.py --stage 1
"""

import argparse
import json
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from t5bench.text import guard_streams

ITERATIONS = 6
STAGES = 2
MICRO_BATCHES = 4
SAMPLES = 4
WIDTH = 16
RATE = 0.5


def make_layers() -> list[nn.Module]:
    torch.manual_seed(1234)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]


def batches(replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Input and target of each micro-batch of a data-parallel replica, [SAMPLES, WIDTH] each."""
    generator = torch.Generator().manual_seed(5678 + replica)
    while True:
        inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        targets = torch.randn(SAMPLES, WIDTH, generator=generator)
        yield inputs, targets


def reference(replicas: int) -> list[float]:
    """The loss of each iteration without DeepSpeed, in one process."""
    model = nn.Sequential(*make_layers())
    data = [batches(replica) for replica in range(replicas)]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(ITERATIONS):
        total = 0.0
        for micro_batches in data:
            for _ in range(MICRO_BATCHES):
                inputs, targets = next(micro_batches)
                loss = nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES / replicas
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def pipelined(stage: int, replicas: int) -> list[float]:
    """The same with DeepSpeed's pipeline engine, in each of its processes."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    layers = make_layers()
    model = deepspeed.pipe.PipelineModule(
        layers, num_stages=STAGES, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = {
        "train_batch_size": SAMPLES * MICRO_BATCHES * replicas,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = batches(engine.grid.get_data_parallel_rank())
    return [float(engine.train_batch(data)) for _ in range(ITERATIONS)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    args = parser.parse_args()
    replicas = int(os.environ["WORLD_SIZE"]) // STAGES
    losses = pipelined(args.stage, replicas)
    if os.environ["RANK"] == "0":
        print(json.dumps({"losses": losses, "expected": reference(replicas)}), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
