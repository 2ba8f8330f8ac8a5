"""Stage 0 in bf16 or fp16 lets the optimizer take a step before the first: AdamW decays and counts it.

Library: deepspeed
Strategies: stage 0
Modes: bf16
Pairs: zero0, precision=bf16
Promised: the optimizer that initialize() is given is "wrapped"; a step is one gradient_accumulation_steps.
Not by design: FP16_UnfusedOptimizer.initialize_optimizer_states makes the states by step() on gradients of zero. AdamW
then corrects its first moments as those of a second step, and its weights have decayed once.
Reported: deepspeed#5104, which is open, removes the step from every stage.
Today: take stage 1 in bf16, or an optimizer without a count of steps.
"""

import os

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch
from torch import distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
inputs = torch.randn(63, generator=torch.Generator().manual_seed(1)).bfloat16()
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for stage in (0, 1):
    torch.manual_seed(0)
    model = torch.nn.Linear(63, 5, bias=False)
    plain = torch.nn.Parameter(model.weight.detach().bfloat16().float())
    by_plain = torch.optim.AdamW([plain], lr=0.125, eps=1.0, weight_decay=0.0)
    plain.grad = inputs.float().expand(5, -1).clone()  # the loss is linear in the weights: its gradient is the inputs
    start = plain.detach().clone()
    by_plain.step()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, eps=1.0, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(inputs).sum())
    engine.step()
    applied = start - engine.module.weight.detach().float()
    expected = start - plain.detach()
    share = float((applied * expected).sum() / (expected * expected).sum())
    error = float((applied - expected).norm() / expected.norm())
    said = "as promised" if error < 0.02 else "NOT as promised"
    print(f"stage {stage}: {share:.3f} of PyTorch's first update by AdamW is made, {100 * error:.0f} % off: {said}")
