"""What a layout's memory does to the choice."""

from dataclasses import replace

import pytest

from t5bench.choose.search import command
from t5bench.choose.space import Candidate, best_to_run
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero
from t5bench.costmodel.machine import DEVICES, Link
from t5bench.costmodel.memory import HALF_RUN, SURE
from t5bench.costmodel.parameters import parameters
from t5bench.costmodel.prediction import with_link
from t5bench.costmodel.time import CPU

MODEL = Architecture(
    encoder_layers=0,
    decoder_layers=2,
    hidden=256,
    heads=4,
    head_size=64,
    ffn=1024,
    encoder_length=0,
    decoder_length=64,
    padded_vocabulary=4096,
    family="gpt",
)
JOB = Job(MODEL, Parallel(data=2, devices_per_node=1), global_batch=2, precision="fp32", engine="native")


def candidate(job: Job, size: int = 0) -> Candidate:
    """size: bytes of a GPU's memory; 0 for a CPU."""
    device = replace(DEVICES["a100"], memory=size) if size else CPU
    return Candidate(job, with_link(device, Link(1e9, 1e-4), 1), "nccl" if size else "gloo")


def test_what_a_bucket_never_holds_takes_no_memory_on_a_cpu():
    zero = candidate(replace(JOB, zero=Zero(1)))
    option = command.option_of("", zero)
    several_copies = 60 * parameters(MODEL, JOB.parallel, 0)
    assert option.needed < command.PYTHON + several_copies < zero.memory.peak
    on_gpu = candidate(replace(JOB, zero=Zero(1)), size=80 * 2**30)
    assert command.option_of("", on_gpu).needed == on_gpu.memory.needed


@pytest.mark.parametrize(("margin", "is_named"), [(1.02, False), (1.08, True)])
def test_a_layout_that_may_run_out_of_memory_counts_as_slower(margin: float, is_named: bool):
    """It is faster by less than its risk is worth, or has room enough."""
    slow = replace(JOB, recompute="full")
    needed = candidate(JOB, size=2**40).memory.needed
    size = int(margin * needed / HALF_RUN)
    fast = candidate(JOB, size)
    safe = candidate(slow, 100 * size)
    assert 0.5 < fast.chance_to_fit < SURE < safe.chance_to_fit and fast.seconds < safe.seconds
    assert (best_to_run([fast, safe]) is fast) == is_named
