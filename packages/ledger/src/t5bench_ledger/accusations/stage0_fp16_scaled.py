"""Stage 0 in fp16 divides gradients by the scale, and has not multiplied the loss by it.

Library: deepspeed
Strategies: stage 0
Modes: fp16 overflow
Pairs: zero0, precision=fp16; zero0, precision=fp16 with a fixed scale
Promised: fp16's loss_scale is the "loss scaling value": the loss is multiplied by it, gradients are divided by it.
Not by design: with ZeRO-1 the update is right. engine.backward() scales the loss for ZeRO's optimizers alone;
FP16_UnfusedOptimizer.step() divides by the scale whatever the stage.
Reported: deepspeed#8393, which is open, mends it.
Today: take stage 1 in fp16, or an optimizer like Adam, which hides a constant factor until eps matters.
"""

import os

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch
from torch import distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # PyTorch computes it on any CPU
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
inputs = torch.randn(63, generator=torch.Generator().manual_seed(1)).half()
expected = inputs.float().expand(5, -1)  # the loss is linear in the weights: its gradient is the inputs
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for stage, loss_scale in ((0, 0), (0, 256), (1, 0)):  # 0: it adapts itself, and begins with 256
    torch.manual_seed(0)
    model = torch.nn.Linear(63, 5, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "loss_scale": loss_scale, "initial_scale_power": 8},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    before = engine.module.weight.detach().float().clone()
    engine.backward(engine(inputs).sum())
    engine.step()
    applied = (before - engine.module.weight.detach().float()) / 0.5
    share = float((applied * expected).sum() / (expected * expected).sum())
    said = "as promised" if abs(share - 1) < 0.02 else "NOT as promised"
    print(f"stage {stage}, loss_scale {loss_scale}: {share:.4f} of the gradient is applied: {said}")
