"""Whether FSDP2 averages gradients over the processes on a CPU. It needs PyTorch alone:

    pip install torch==2.8.0
    torchrun --nproc_per_node 2 fsdp2_mean.py

It must print 1.000. See packages/ledger/pages/ledger.md.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
for dtype in (None, torch.float32):
    model = torch.nn.Linear(8, 4, bias=False)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    inputs = torch.randn(world, 8, generator=torch.Generator().manual_seed(1))
    model(inputs[rank]).sum().backward()
    gradient = model.weight.grad.full_tensor()
    expected = inputs.mean(0).expand(4, 8)
    if rank == 0:
        share = float((gradient * expected).sum() / (expected * expected).sum())
        print(f"torch {torch.__version__}, reduce_dtype {dtype}: {share:.3f} of the mean gradient", flush=True)
dist.destroy_process_group()
