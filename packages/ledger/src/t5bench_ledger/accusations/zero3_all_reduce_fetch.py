"""ZeRO-3 that fetches parameters by an all-reduce computes with memory that it has not written.

Library: deepspeed
Strategies: zero3
Modes: all-reduce fetch
Pairs: zero3, stage3_use_all_reduce_for_fetch_params=True
Promised: stage3_use_all_reduce_for_fetch_params: "Use all_reduce op when fetching module parameters at stage3. This
improves performance by reducing the overhead of concatenation and slicing": the same parameters.
Not by design: deepspeed#8158 mends it in 0.19.4.
Reported: deepspeed#8158 mends it in 0.19.4.
Today: take 0.19.4 or a later release, or leave the option out.
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
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with nan; else the fault depends on what was there
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7))  # three do not divide 7
    inputs = torch.randn(4, 7)
    expected = float(model(inputs).sum())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_use_all_reduce_for_fetch_params": True}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = float(engine(inputs).sum())
    said = "as promised" if abs(loss - expected) < 1e-5 else "NOT as promised"
    if rank == 0:
        print(f"the first loss is {loss:.6f}, PyTorch's {expected:.6f}: {said}", flush=True)


if __name__ == "__main__":
    print("deepspeed", deepspeed.__version__, "torch", torch.__version__, flush=True)
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=3, start_method="fork")
