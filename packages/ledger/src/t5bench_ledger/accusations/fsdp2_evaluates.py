"""FSDP2: after an evaluation between backward() and step(), clipping sees no gradient, and the model keeps old weights.

Library: torch
Pairs: fsdp2, evaluates=between micro-batches
Promised: fully_shard() keeps the root's "unsharded parameters in memory after forward and avoids the all-gather in
backward": nothing about clipping, or about a step that the next forward does not see.
Not by design: open. Training goes on without an error.
Reported: not found in the threads of pytorch that were searched.
Today: call the root's reshard() after such an evaluation.
"""

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

print("torch", torch.__version__, flush=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for evaluates in (False, True):
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(63, 5, bias=False), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(63)
    loss = model(inputs).sum()
    loss.backward()  # the loss is linear in the weights: its gradient is the inputs
    if evaluates:
        with torch.no_grad():
            model(inputs)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    share = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) / float(5**0.5 * inputs.norm())
    optimizer.step()
    change = float(loss.detach() - model(inputs).detach().sum()) / float(0.05 * inputs.square().sum())
    said = "as promised" if abs(share - 1) + abs(change - 1) < 0.01 else "NOT as promised"
    print(f"evaluates {evaluates}: the norm is {share:.3f} of the right one, the loss's change {change:.3f}: {said}")
