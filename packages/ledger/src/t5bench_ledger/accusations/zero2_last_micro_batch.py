"""ZeRO-2 trains on the last micro-batch of an iteration alone.

Library: deepspeed
Strategies: zero2
Modes: fp32, bf16, resume, three processes, four processes, clipping unset, fp32 accumulation, used once,
  used twice, several backward passes, saving
Pairs: zero2
Promised: gradient_accumulation_steps is the "number of training steps to accumulate gradients before averaging and
applying them".
Not by design: deepspeed#7718 mends it in 0.18.3.
Reported: deepspeed#7718 mends it in 0.18.3.
Today: take 0.18.3 or a later release, or one micro-batch.
"""

import os

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch
from torch import distributed as dist

MICRO_BATCHES = 4
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Linear(63, 5, bias=False)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1e6,  # never clips
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for iteration in (1, 2):
    before = engine.module.weight.detach().float().clone()
    inputs = torch.randn(MICRO_BATCHES, 63)
    for row in inputs:  # the loss is linear in the weights: its gradient is the inputs' mean
        engine.backward(engine(row.to(torch.float32)).sum())
        engine.step()
    applied = before - engine.module.weight.detach().float()
    expected = inputs.mean(0).expand(5, -1)
    share = float((applied * expected).sum() / (expected * expected).sum())
    error = float((applied - expected).norm() / expected.norm())
    norm = float(engine.get_global_grad_norm() or "nan") / float(expected.norm())
    said = "as promised" if error < 0.02 and abs(norm - 1) < 0.02 else "NOT as promised"
    print(f"iteration {iteration}: {share:.3f} of the mean gradient is applied, {100 * error:.0f} % off,", end=" ")
    print(f"norm {norm:.3f} of it: {said}")
