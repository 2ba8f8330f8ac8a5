"""FSDP2 with tensor parallelism: is it told apart in which precision gradients are added up over the second mesh?"""

import json
import os
import subprocess
import sys

import pytest
from ledger_runs import PYTHONPATH

from t5bench.plan.ports import free_port
from t5bench_ledger import two_meshes
from t5bench_ledger.judge import RIGHT, ROUNDS, WRONG, CellVerdict, judge, noted
from t5bench_ledger.measure import pair_of, processes_of, program_of
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
    found[name] = {each: two_meshes.compared(dtype, each) for each in (two_meshes.CANCELLED, 0.0)}
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
        "PYTHONPATH": PYTHONPATH,
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
        found_norms = found[name][str(two_meshes.CANCELLED)]
        assert found_norms["norms"] == pytest.approx(found_norms["expected_norms"], rel=TOLERANCE["fp32"].norm), name
        assert verdict_of(found[name], name.partition(",")[0]).verdict == RIGHT
    rounded = verdict_of(found["bf16, reduced in bf16"], "bf16")
    assert rounded.verdict == ROUNDS and rounded.times > 2 and "at most 0." in rounded.sentence
    twice = found["fp32"] | {}
    for curves in twice.values():
        curves["norms"] = [2 * norm for norm in curves["norms"]]
    assert verdict_of(twice, "fp32").verdict == WRONG, "a fault is one without cancellation, too"


def verdict_of(found: dict[str, dict], precision: str) -> CellVerdict:
    """Of a training whose gradients cancel, and of the same without that."""
    verdict = judge(*pair_of(found[str(two_meshes.CANCELLED)]), precision)
    return noted(verdict, {ROUNDS: pair_of(found["0.0"])}, precision)
