"""ZeRO-1 in bf16 that accumulates in fp32 applies nothing, or one process's gradients, or has 65536 times the norm.

Library: deepspeed
Strategies: zero1
Modes: fp32 accumulation
Promised: "data_types.grad_accum_dtype: Specifies the data type in which to do gradient accumulation."
Not by design: deepspeed#7839 and #7985 mend it.
Today: take 0.19.0 or a later release, or leave grad_accum_dtype out.
"""

import os
import tempfile

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from torch import distributed as dist
from torch import multiprocessing

MICRO_BATCHES = 4
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute


def train(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(63, 5, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1e6,  # never clips
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    before = engine.module.weight.detach().float().clone()
    inputs = torch.randn(2, MICRO_BATCHES, 63)
    for row in inputs[rank]:  # the loss is linear in the weights: its gradient is the inputs' mean
        engine.backward(engine(row.bfloat16()).sum())
        engine.step()
    expected = inputs.mean((0, 1)).expand(5, -1)
    error = float((before - engine.module.weight.detach().float() - expected).norm() / expected.norm())
    norm = float(engine.get_global_grad_norm()) / float(expected.norm())
    said = "as promised" if error < 0.02 and abs(norm - 1) < 0.02 else "NOT as promised"
    if rank == 0:
        print(f"the update is {100 * error:.0f} % off, the norm {norm:.3f} of the mean gradient's: {said}", flush=True)


if __name__ == "__main__":
    print("deepspeed", deepspeed.__version__, "torch", torch.__version__, flush=True)
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
