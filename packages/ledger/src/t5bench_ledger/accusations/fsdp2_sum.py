"""FSDP2 over gloo adds the processes' gradients up, and does not divide them.

Library: torch
Strategies: fsdp2, fsdp2 tensor
Modes: fp32, bf16, one micro-batch, resume, three processes
Promised: as in DDP, gradients are averaged over the data-parallel mesh; set_gradient_divide_factor() is there for
whoever wants another factor.
Not by design: pytorch#162338 mends it in 2.9.0.
Today: take 2.9.0 or a later release, or train on GPUs over NCCL.
"""

import tempfile

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(63, 5, bias=False)
    inputs = torch.randn(2, 63)
    expected = inputs.mean(0).expand(5, -1)  # the loss is linear in the weights: its gradient is the inputs' mean
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(inputs[rank]).sum().backward()
    gradient = model.weight.grad.full_tensor()
    share = float((gradient * expected).sum() / expected.square().sum())
    said = "as promised" if abs(share - 1) < 0.01 else "NOT as promised"
    if rank == 0:
        print(f"the gradient is {share:.3f} of the mean over the processes: {said}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
