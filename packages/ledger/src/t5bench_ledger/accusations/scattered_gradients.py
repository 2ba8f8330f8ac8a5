"""ZeRO-1 and ZeRO-2 without contiguous_gradients do not average gradients over the processes.

Library: deepspeed
Strategies: zero1, zero2
Modes: scattered gradients
Pairs: zero1, contiguous_gradients=False; zero2, contiguous_gradients=False
Promised: contiguous_gradients "copies the gradients to a contiguous buffer as they are produced. Avoids memory
fragmentation during backward pass": the same gradients, in other memory.
Not by design: deepspeed#8382 mends it in 0.19.8.
Reported: deepspeed#8382 mends it in 0.19.8.
Today: leave contiguous_gradients out; it is on by default.
"""

import os
import tempfile

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from torch import distributed as dist
from torch import multiprocessing

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute


def train(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    inputs = torch.randn(2, 63, generator=torch.Generator().manual_seed(1))
    expected = inputs.mean(0).expand(5, -1)  # the loss is linear in the weights: its gradient is the inputs' mean
    for stage in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Linear(63, 5, bias=False)
        before = model.weight.detach().clone()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1e6,  # never clips
            "zero_optimization": {"stage": stage, "contiguous_gradients": False, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(inputs[rank]).sum())
        engine.step()
        error = float((before - engine.module.weight.detach() - expected).norm() / expected.norm())
        said = "as promised" if error < 0.01 else "NOT as promised"
        if rank == 0:
            print(f"stage {stage}: the update is {100 * error:.0f} % off: {said}", flush=True)


if __name__ == "__main__":
    print("deepspeed", deepspeed.__version__, "torch", torch.__version__, flush=True)
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
