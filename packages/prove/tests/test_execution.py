"""The native engine's own step, executed without arithmetic, against the cost model's list of collectives."""

import json
import multiprocessing
from dataclasses import replace

import pytest

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.costmodel import traffic
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero
from t5bench_prove import executed, execution

SMALL = Architecture(2, 2, 256, 4, 64, 512, 128, 32, 2048)
PLAIN = Job(SMALL, micro_batch=2, engine="native", attention="fused")
WORLD = 1024
LAYOUTS = {
    "ddp": (Parallel(data=WORLD), Zero()),
    "zero1": (Parallel(data=WORLD), Zero(1)),
    "zero2": (Parallel(data=WORLD), Zero(2)),
    "zero3": (Parallel(data=WORLD), Zero(3)),
    "zero3_offload": (Parallel(data=WORLD), Zero(3, True, True)),
    "tensor": (Parallel(2, 1, WORLD // 2), Zero()),
    "pipeline": (Parallel(1, 2, WORLD // 2), Zero()),
    "hybrid": (Parallel(2, 2, WORLD // 4), Zero()),
    "tensor with sequence parallelism": (Parallel(4, 1, WORLD // 4, sequence_parallel=True), Zero()),
    "hybrid with sequence parallelism": (Parallel(2, 2, WORLD // 4, sequence_parallel=True), Zero()),
}


def job_of(strategy: str, micro_batches: int = 2) -> Job:
    parallel, zero = LAYOUTS[strategy]
    batch = PLAIN.micro_batch * parallel.data * micro_batches
    return replace(PLAIN, parallel=parallel, zero=zero, global_batch=batch)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_a_rank_of_1024_does_what_the_model_says(strategy: str):
    found = executed.compare(strategy, job_of(strategy), rank=WORLD - 3)
    assert found.collectives > 0
    assert found.differences == []
    assert abs(found.memory_error) < executed.MOST_MEMORY_ERROR, found


@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 2, 1)])
def test_sequence_parallelism_sends_and_keeps_what_the_model_says(sizes: tuple[int, int, int]):
    """Every collective, and the memory; the last rank is on the last stage."""
    parallel = Parallel(*sizes, sequence_parallel=True)
    job = replace(PLAIN, parallel=parallel, global_batch=2 * 2 * parallel.data)
    found = executed.compare("sequence", job, rank=parallel.world - 1)
    assert found.differences == []
    assert abs(found.memory_error) < executed.MOST_MEMORY_ERROR, found
    kinds = {row.kind for row in traffic.collectives_of(job) if row.what.endswith("blocks")}
    assert kinds == {"all-gather", "reduce-scatter"}


def test_the_parts_of_an_interleaved_stage_sum_their_sequence_parallel_gradients_together():
    parallel = Parallel(2, 3, 1, sequence_parallel=True, schedule="interleaved", virtual_stages=2)
    architecture = replace(SMALL, encoder_layers=3, decoder_layers=3)
    found = executed.compare(
        "sequence", replace(PLAIN, architecture=architecture, parallel=parallel, global_batch=6), 4
    )
    assert found.differences == []


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_that_reduces_once_sends_the_gradients_of_one_micro_batch(stage: int):
    """DeepSpeed's own collectives, whose bytes are those of the formula; reduced in every micro-batch beside it."""
    kind = {2: "all-reduce", 3: "reduce-scatter"}[stage]
    sent = {}
    for reduces_once in (False, True):
        parallel = Parallel(data=4)
        job = replace(PLAIN, parallel=parallel, global_batch=2 * 4 * 8, zero=Zero(stage, reduce_once=reduces_once))
        gradients = [row for row in traffic.collectives_of(job) if row.what == "gradients"]
        predicted = sum(row.count * row.bytes for row in gradients)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            executed_step = pool.apply(execution.execute, (job, 1))
        assert execution.differences(job, executed_step) == []  # nor in what is gathered
        seen = executed_step.collectives
        large = [one for one in seen if one.kind == kind and one.bytes > 1000]  # not the norm
        sent[reduces_once] = sum(one.bytes * seen[one] for one in large)
        assert sent[reduces_once] == pytest.approx(predicted, rel=0.02)
    assert sent[False] == 8 * sent[True]


def test_a_difference_names_the_collective(monkeypatch: pytest.MonkeyPatch):
    job = job_of("pipeline")
    all_collectives = traffic.collectives_of(job)
    collectives = execution.predicted(job, 0)
    but_one = [collective for collective in all_collectives if collective.group != "position"]
    monkeypatch.setattr(traffic, "collectives_of", lambda _: but_one)
    seen = execution.Execution(rank=0, collectives=collectives, allocated=1, peak=1)
    (difference,) = execution.differences(job, seen)
    assert str(difference) == (
        f"all-reduce of {128 * 256 * 4:,} bytes among 2 ranks (0, 512): executed 1 times, predicted 0"
    )


def test_a_pipeline_sends_to_the_next_stage_and_receives_from_it():
    job = job_of("pipeline", micro_batches=3)
    activations = 2 * 128 * 256 * 2
    messages = {one: count for one, count in execution.predicted(job, 5).items() if one.kind in ("send", "receive")}
    assert messages == {
        execution.ExecutedCollective("send", (5, 517), activations): 3,
        execution.ExecutedCollective("receive", (517, 5), activations): 3,
    }


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [
        (Parallel(2, 3, 1, split_rank=2), 2),  # the encoder's second stage
        (Parallel(1, 4, 2, split_rank=2), 4),  # the decoder's first of two
        (Parallel(1, 3, 1, split_rank=1, schedule="gpipe"), 1),
        (Parallel(2, 3, 2, split_rank=1, schedule="zero-bubble"), 8),
        (Parallel(1, 2, 2, split_rank=2, schedule="interleaved", virtual_stages=2), 0),  # embeds for both stacks
        (Parallel(2, 3, 1, split_rank=3, schedule="interleaved", virtual_stages=2), 4),
    ],
    ids=str,
)
def test_a_stage_of_a_deep_pipeline_sends_what_the_model_says(parallel: Parallel, rank: int):
    architecture = Architecture(6, 6, 64, 4, 16, 128, 32, 16, 512)
    batch = PLAIN.micro_batch * parallel.data * 2 * parallel.pipeline
    job = replace(PLAIN, architecture=architecture, parallel=parallel, global_batch=batch)
    found = executed.compare("pipeline", job, rank)
    assert found.collectives > 0
    assert found.differences == []


def deep(pipeline: int, schedule: str) -> Job:
    """A pipeline with twice as many micro-batches as stages."""
    chunks = 2 if schedule == "interleaved" else 1
    parallel = Parallel(1, pipeline, 2, schedule=schedule, virtual_stages=chunks)
    architecture = replace(SMALL, encoder_layers=6, decoder_layers=6)
    batch = PLAIN.micro_batch * parallel.data * 2 * pipeline
    return replace(PLAIN, architecture=architecture, parallel=parallel, global_batch=batch)


SOME_STAGES = [(4, "1f1b", 1), (4, "1f1b", 2), (6, "1f1b", 4), (3, "gpipe", 2), (3, "interleaved", 0)]
SOME_STAGES += [(4, "zero-bubble", 0), (4, "zero-bubble", 2), (3, "zero-bubble", 2)]
ALL_STAGES = [
    (pipeline, schedule, stage)
    for pipeline in (2, 3, 4, 6)
    for schedule in ("1f1b", "gpipe", "interleaved", "zero-bubble")
    for stage in range(pipeline)
]


def check_memory(job: Job, stage: int) -> None:
    found = executed.compare("pipeline", job, stage * job.parallel.tensor * job.parallel.data)
    assert abs(found.memory_error) < executed.MOST_MEMORY_ERROR, found
    executed_bytes, predicted_bytes = found.allocated
    assert executed_bytes == pytest.approx(predicted_bytes, rel=0.005), "something of an iteration stays"
    assert found.differences == []


@pytest.mark.parametrize(("pipeline", "schedule", "stage"), SOME_STAGES)
def test_a_stage_of_a_deep_pipeline_keeps_what_the_model_says(pipeline: int, schedule: str, stage: int):
    """In the middle, at the end, and with layers of both stacks."""
    check_memory(deep(pipeline, schedule), stage)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("pipeline", "schedule", "stage"), ALL_STAGES)
def test_every_stage_of_a_deep_pipeline_keeps_what_the_model_says(
    pipeline: int, schedule: str, stage: int, precision: str
):
    check_memory(replace(deep(pipeline, schedule), precision=precision), stage)


@pytest.mark.nightly
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path):
    settings = {"ENGINE": "native", "MODEL_PRESET": "tiny", "MEGATRON_DATA_DIR": str(tmp_path), "HOSTS": ""}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    only = [one for one in executed_plans() if one.strategy.name == "hybrid"]
    monkeypatch.setattr("t5bench.choose.predict.planned", lambda: only)
    assert main(["predict", "--execute", "--gpus", "4096", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["rank"], row["world"], row["differences"]) for row in rows] == [(0, 4096, []), (2048, 4096, [])]


def executed_plans():
    from t5bench.choose.predict import planned

    return planned()


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (replace(PLAIN, engine="megatron"), "only the native engine's step"),
        (replace(PLAIN, recompute="full"), "it does not recompute"),
        (PLAIN.on(pipeline=4), "needs at least 4 micro-batches"),
    ],
)
def test_what_cannot_be_executed_is_refused(job: Job, said: str):
    with pytest.raises(Problem, match=said):
        execution.execute(job, 0)


def test_more_gpus_have_a_larger_batch():
    job = executed.on_gpus(job_of("pipeline"), 4096)
    assert (job.parallel.world, job.global_batch, job.micro_batches) == (4096, 2 * 2 * 2048, 2)
    with pytest.raises(Problem, match="7 GPUs do not divide into replicas of 2"):
        executed.on_gpus(job_of("pipeline"), 7)
