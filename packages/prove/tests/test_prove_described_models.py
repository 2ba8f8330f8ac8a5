"""What the step of a model that a config.json describes sends is what the cost model says, and sums every gradient."""

from dataclasses import replace
from multiprocessing import get_context

import pytest
from described import CONFIGS, description_of
from torch.utils.flop_counter import FlopCounterMode

from t5bench.costmodel.flops import hardware_flops, layer_multiply_adds
from t5bench.costmodel.job import FullySharded, Job, Parallel
from t5bench_prove import execution
from t5bench_prove.hollow import HollowTensors

PARALLEL = {
    "tensor of 4, sequence": Parallel(tensor=4, sequence_parallel=True),
    "pipeline of 4": Parallel(pipeline=4, data=2, split_rank=2),
    "interleaved": Parallel(pipeline=2, split_rank=2, virtual_stages=2, schedule="interleaved"),
    "hybrid": Parallel(tensor=2, pipeline=2, data=2, split_rank=1),
    "tensor of 4, fsdp2": Parallel(tensor=4, data=2),
}
CASES = [("llama", "tensor of 4, sequence"), ("qwen3", "tensor of 4, fsdp2"), ("t5 v1.1", "pipeline of 4")]


def findings(kind: str, name: str) -> list[str]:
    """Of the first rank of each stage."""
    parallel = PARALLEL[name]
    sharding = FullySharded() if "fsdp2" in name else None
    job = Job(
        description_of(CONFIGS[kind]), parallel, 2, 8 * parallel.data, fully_sharded=sharding, precision="fp32",
        engine="native", dropout=0.0, attention="fused",
    )  # fmt: skip
    found = []
    for rank in range(0, parallel.world, parallel.tensor * parallel.data):
        with get_context("fork").Pool(1) as pool:
            watch, differences = pool.apply(execution.watched, (replace(job), rank))
        found += [*watch.findings, *differences]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_step_sends_what_is_predicted_and_sums_every_gradient_once(kind: str, name: str):
    assert findings(kind, name) == []


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_its_peak_is_predicted(kind: str):
    """Gates, rotated queries and keys, norms of heads, attention and feed-forward with the same input."""
    job = Job(description_of(CONFIGS[kind]), Parallel(), 2, 8, precision="fp32", engine="native", dropout=0.0)
    with get_context("fork").Pool(1) as pool:
        executed = pool.apply(execution.execute, (job, 0))
    _, predicted = execution.memory(job, 0)
    assert predicted == pytest.approx(executed.peak, rel=0.01)


CORNERS = {
    "one process": (Parallel(), None),
    "tensor of 4, one replica": (Parallel(tensor=4), None),
    "fsdp2, one replica": (Parallel(), FullySharded()),
    "fsdp2 kept, one replica": (Parallel(), FullySharded(keeps_parameters=True)),
    "fsdp2 of 4": (Parallel(data=4), FullySharded()),
}


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_its_peak_is_predicted_in_the_corners(name: str, micro_batches: int):
    """Gradients that are forgotten after an iteration, and of one micro-batch come while activations go."""
    parallel, sharding = CORNERS[name]
    batch = 2 * micro_batches * parallel.data
    job = Job(
        description_of(CONFIGS["llama"]), parallel, 2, batch, fully_sharded=sharding, precision="fp32",
        engine="native", dropout=0.0,
    )  # fmt: skip
    with get_context("fork").Pool(1) as pool:
        executed = pool.apply(execution.execute, (job, 0))
    allocated, peak = execution.memory(job, 0)
    assert allocated == pytest.approx(executed.allocated, rel=0.015)
    assert peak == pytest.approx(executed.peak, rel=0.04)


def flops_of_weights(job: Job) -> int:
    """Of the products with weights in a step of the first rank, without attention's core."""
    with execution.joined(job, 0):
        arguments = execution.native_arguments(job, 0)
        counter = FlopCounterMode(display=False)
        with execution.GpuKernels(), HollowTensors():
            trainer = execution.make_trainer(arguments, execution.mesh_of(arguments))
            batch = execution.tokens(job, arguments)
            with counter:
                execution.take_step(trainer, batch, arguments.lr)
    return sum(count for operator, count in counter.get_flop_counts()["Global"].items() if "bmm" not in str(operator))


@pytest.mark.parametrize(("kind", "tensor"), [("llama", 4), ("qwen3", 4), ("t5 v1.1", 1)])
def test_its_flops_are_predicted(kind: str, tensor: int):
    """Those of keys and values that several ranks compute, too."""
    model = replace(description_of(CONFIGS[kind]), padded_vocabulary=252)
    job = Job(model, Parallel(tensor=tensor), 2, 8, precision="fp32", engine="native", dropout=0.0)
    with get_context("fork").Pool(1) as pool:
        executed = pool.apply(flops_of_weights, (job,))
    cores = ((model.encoder_layers, False), (model.decoder_layers, True))
    of_cores = 6 * job.global_batch * sum(count * layer_multiply_adds(model, way)[1] for count, way in cores)
    assert executed * tensor == hardware_flops(job) - of_cores


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_sends_what_is_predicted_in_every_layout(kind: str):
    found = {name: findings(kind, name) for name in PARALLEL}
    assert not any(found.values()), found
