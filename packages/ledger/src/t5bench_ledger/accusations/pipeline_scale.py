"""DeepSpeed's pipeline divides the gradients of four micro-batches by four twice, or not at all.

Library: deepspeed
Strategies: deepspeed-pipeline, deepspeed-pipeline stage 0
Modes: fp32, bf16
Promised: train_batch(): "Progress the pipeline to train the next batch of data. The engine will ingest
self.train_batch_size() total samples collectively across all workers": it is the batch's gradient that is applied.
Not by design: deepspeed#8154 mends it in 0.19.3.
Today: take 0.19.3 or a later release.
"""

import copy
import os
import tempfile

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from torch import distributed as dist
from torch import multiprocessing

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute


def train(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    deepspeed.init_distributed("gloo")
    for stage in (1, 0):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(63, 5), torch.nn.Linear(5, 1)]
        inputs = torch.randn(4, 1, 63)  # four micro-batches
        plain = copy.deepcopy(layers)
        plain[1](plain[0](inputs)).mean().backward()
        pipeline = {"num_stages": 2, "loss_fn": lambda output, _: output.mean(), "partition_method": "uniform"}
        model = deepspeed.pipe.PipelineModule(layers, **pipeline)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1e6,  # never clips
            "steps_per_print": 100,  # some releases fail if it is not set
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.train_batch(iter([(row, row) for row in inputs]))
        applied = plain[0].weight.detach() - layers[0].weight.detach()
        share = float((applied * plain[0].weight.grad).sum() / plain[0].weight.grad.square().sum())
        said = "as promised" if abs(share - 1) < 0.01 else "NOT as promised"
        if rank == 0:  # the first layer is its
            print(f"\nstage {stage}: {share:.3f} of the gradient is applied: {said}", flush=True)


if __name__ == "__main__":
    print("deepspeed", deepspeed.__version__, "torch", torch.__version__, flush=True)
    multiprocessing.start_processes(train, (tempfile.mkdtemp(),), nprocs=2, start_method="fork")
