"""Whether a release of DeepSpeed applies the mean of the gradients. It needs DeepSpeed and PyTorch alone, and no GPU:

    pip install deepspeed==0.18.2
    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 update.py 2

The loss is linear in the weights, so the gradient is known without a model, and plain SGD with a learning rate of 1
subtracts it: each line must say 1.000 and at most 0.01 (bf16's rounding). See packages/ledger/pages/ledger.md.
"""

import argparse
import sys
from contextlib import nullcontext

import deepspeed
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("stage", type=int)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--fp32-accumulation", action="store_true")
parser.add_argument("--offload", action="store_true")
parser.add_argument("--all-reduce-fetch", action="store_true")
parser.add_argument("--micro-batches", type=int, default=4)
args = parser.parse_args()

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
deepspeed.init_distributed("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
zero = {"stage": args.stage, "overlap_comm": False}
if args.offload:
    zero["offload_optimizer"] = {"device": "cpu"}
if args.all_reduce_fetch:
    zero["stage3_use_all_reduce_for_fetch_params"] = True
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": args.micro_batches,
    "gradient_clipping": 1e6,  # never clips: unset, it is 1.0 since 0.19.3
    "zero_optimization": zero,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": args.bf16},
}
if args.fp32_accumulation:
    config["data_types"] = {"grad_accum_dtype": "fp32"}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(63, 5, bias=False), torch.nn.Linear(5, 7, bias=False))
with torch.no_grad():
    model[0].weight.zero_()
model[1].weight.requires_grad_(False)  # it makes the loss depend on what ZeRO-3 fetches
direction = model[1].weight.detach().sum(0)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model[:1].parameters(), lr=1.0), config=config)
kind = torch.bfloat16 if args.bf16 else torch.float32


def weights() -> torch.Tensor:
    parameter = engine.module[0].weight
    fetched = deepspeed.zero.GatheredParameters([parameter]) if args.stage == 3 else nullcontext()
    with fetched:
        return parameter.detach().float().clone()


for iteration in range(1, 4):
    inputs = torch.randn(world, args.micro_batches, 63)  # the same in every process
    before = weights()
    for number in range(args.micro_batches):
        engine.backward(engine(inputs[rank, number].to(kind)).sum())
        engine.step()
    update = before - weights()
    expected = torch.outer(direction, inputs.mean((0, 1)))
    norm = float(engine.get_global_grad_norm() or "nan") / expected.norm()
    if rank == 0:
        share = (update * expected).sum() / (expected * expected).sum()
        largest = (update - expected).abs().max() / expected.abs().max()
        versions = f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}"
        said = f"update {share:.3f} of the mean gradient, error at most {largest:.3f}; norm {norm:.3f} of the right one"
        print(f"{versions}, {' '.join(sys.argv[1:])}: iteration {iteration}: {said}", flush=True)
