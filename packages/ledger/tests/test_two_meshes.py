"""FSDP2 with tensor parallelism: is it told apart in which precision gradients are added up over the second mesh?"""

import json
import os
import subprocess
import sys

import pytest
from support import REPO_ROOT

from t5bench.plan.ports import free_port
from t5bench_ledger.measure import processes_of, program_of
from t5bench_ledger.modes import FSDP2_TENSOR, MODES
from training_comparison.curves import TOLERANCE

# FSDP2 gives each gradient to tensor parallelism in this method: here in the precision that the case asks for.
TRAININGS = """
import json
import torch
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from t5bench_ledger import two_meshes

dist.init_process_group("gloo")
torch.set_num_threads(1)
usual = FSDPParam._get_grad_inner_tensor
found = {}
for name, dtype, reduced in (
    ("fp32", torch.float32, torch.float32),
    ("bf16, reduced in fp32", torch.bfloat16, torch.float32),
    ("bf16, reduced in bf16", torch.bfloat16, torch.bfloat16),
):
    FSDPParam._get_grad_inner_tensor = lambda self, gradient: usual(self, gradient.to(reduced)).float()
    found[name] = [*two_meshes.sharded(dtype), *two_meshes.plain(dtype)]
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_precision_of_the_second_reduction_decides():
    (fp32,) = (mode for mode in MODES if mode.name == "fp32")
    count = processes_of(FSDP2_TENSOR, fp32)
    assert program_of(FSDP2_TENSOR, fp32).endswith("two_meshes.py")
    environment = os.environ | {
        "PYTHONPATH": str(REPO_ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAININGS],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    printed = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    found = json.loads(printed[0].splitlines()[-1])
    for name in ("fp32", "bf16, reduced in fp32"):
        losses, norms, expected, expected_norms = found[name]
        bound = TOLERANCE[name.partition(",")[0]]
        assert losses == pytest.approx(expected, rel=bound.loss), name
        assert norms == pytest.approx(expected_norms, rel=TOLERANCE["fp32"].norm), name
    _, norms, _, expected_norms = found["bf16, reduced in bf16"]
    largest = max(abs(own / its - 1) for own, its in zip(norms, expected_norms, strict=True))
    assert largest > 2 * TOLERANCE["bf16"].norm
