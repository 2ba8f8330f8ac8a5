"""ZeRO-2 with an offloaded optimizer drops the gradient of a parameter that the last micro-batch does not use.

Library: deepspeed
Pairs: zero2, offload_optimizer=True, unused=in the last micro-batch
Promised: gradient_accumulation_steps is the "number of training steps to accumulate gradients before averaging and
applying them"; ignore_unused_parameters is true by default.
Not by design: without offload_optimizer the same training is right.
Reported: not found in the threads of deepspeed that were searched; #861 and #7981 mend what is near it.
Today: do not offload, or use every parameter in the last micro-batch, by a factor of zero if need be.
"""

import copy
import os

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch
from torch import distributed as dist

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_first = torch.nn.Linear(9, 1), torch.nn.Linear(9, 1)

    def forward(self, inputs: torch.Tensor, is_last: bool) -> torch.Tensor:
        return (self.always(inputs) if is_last else self.always(inputs) + self.at_first(inputs)).mean()


print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
torch.manual_seed(0)
plain, inputs = Model(), torch.randn(2, 4, 9)
for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
    model = copy.deepcopy(plain)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1e6,  # never clips
        "zero_optimization": {"stage": 2, "overlap_comm": False} | offload,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), config=config)
    for number in range(2):
        engine.backward(engine(inputs[number], number == 1))
        engine.step()
    share = float((plain.at_first.bias - engine.module.at_first.bias).detach() / 0.5)  # of the mean of 1 and 0
    said = "as promised" if abs(share - 1) < 0.01 else "NOT as promised"
    print(f"offload {bool(offload)}: {share:.3f} of the gradient of what is unused at last is applied: {said}")
