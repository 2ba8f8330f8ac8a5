"""DeepSpeed's pipeline engine on a model of four layers, compared with plain PyTorch: six iterations, two stages.

This needs nothing of the project, so that it can be shown to DeepSpeed's developers as it is:

    torchrun --nproc_per_node 4 packages/ledger/src/t5bench_ledger/pipeline.py --stage 1 [--bf16] [--clip-norm 0.05]
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


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """In fp32: a loss in bf16 would have fewer digits than it is compared in."""
    return nn.functional.mse_loss(output.float(), target.float())


def reference(replicas: int, dtype: torch.dtype, clip_norm: float) -> list[float]:
    """The loss of each iteration without DeepSpeed, in one process: computed in dtype, with weights kept in fp32."""
    masters = nn.Sequential(*make_layers())
    model = nn.Sequential(*make_layers()).to(dtype)
    data = [batches(replica) for replica in range(replicas)]
    optimizer = torch.optim.SGD(masters.parameters(), lr=RATE)
    losses = []
    for _ in range(ITERATIONS):
        total = 0.0
        for micro_batches in data:
            for _ in range(MICRO_BATCHES):
                inputs, targets = next(micro_batches)
                loss = loss_of(model(inputs.to(dtype)), targets.to(dtype)) / MICRO_BATCHES / replicas
                loss.backward()
                total += loss.item()
        for master, copy in zip(masters.parameters(), model.parameters(), strict=True):
            assert copy.grad is not None
            master.grad = copy.grad.float()
        if clip_norm:
            nn.utils.clip_grad_norm_(masters.parameters(), clip_norm)
        optimizer.step()
        model.load_state_dict(masters.state_dict())
        model.zero_grad()
        losses.append(total)
    return losses


def pipelined(stage: int, replicas: int, dtype: torch.dtype, clip_norm: float) -> list[float]:
    """The same with DeepSpeed's pipeline engine, in each of its processes."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    layers = make_layers()
    model = deepspeed.pipe.PipelineModule(layers, num_stages=STAGES, loss_fn=loss_of, partition_method="uniform")
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = {
        "train_batch_size": SAMPLES * MICRO_BATCHES * replicas,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": clip_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = batches(engine.grid.get_data_parallel_rank())
    in_dtype = ((inputs.to(dtype), targets.to(dtype)) for inputs, targets in data)
    return [float(engine.train_batch(in_dtype)) for _ in range(ITERATIONS)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="0: no clipping")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    replicas = int(os.environ["WORLD_SIZE"]) // STAGES
    losses = pipelined(args.stage, replicas, dtype, args.clip_norm)
    if os.environ["RANK"] == "0":
        print(json.dumps({"losses": losses, "expected": reference(replicas, dtype, args.clip_norm)}), flush=True)


if __name__ == "__main__":
    guard_streams()
    main()
