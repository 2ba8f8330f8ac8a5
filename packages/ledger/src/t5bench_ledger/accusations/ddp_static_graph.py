"""DDP with static_graph=True ends in an internal assertion when the first step accumulates under no_sync().

Library: torch
Pairs: ddp, static_graph=True; accelerate, static_graph=True; trainer, ddp_static_graph=True
Promised: no_sync(): "Within this context, gradients will be accumulated on module variables, which will later be
synchronized in the first forward-backward pass exiting the context."
Not by design: the message asks to "please report a bug to PyTorch".
Reported: pytorch#143580 and accelerate#3679; pytorch#187732, which is open, mends it.
Today: leave no_sync() out of the first step.
"""

import torch
from torch import distributed as dist

print("torch", torch.__version__, flush=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for static_graph in (False, True):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(63, 5), static_graph=static_graph)
    said = "as promised"
    try:
        with model.no_sync():
            model(torch.randn(63)).sum().backward()
        model(torch.randn(63)).sum().backward()
    except RuntimeError as error:
        said = f"{str(error)[:60]}...: NOT as promised"
    print(f"static_graph={static_graph}, two micro-batches: {said}")
