"""``python -m t5bench predict --execute``: executes the native engine's step and compares it with the cost model."""

import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from t5bench import Problem
from t5bench.costmodel.job import Job
from t5bench.printed_table import text_table

MOST_MEMORY_ERROR = 0.02


@dataclass(frozen=True)
class ExecutedRank:
    """One executed rank against the model."""

    strategy: str
    world: int
    rank: int
    collectives: int
    megabytes: float  # the buffers of all collectives together
    differences: Sequence[str]
    allocated: tuple[float, float]  # bytes between iterations: executed, predicted
    peak: tuple[float, float]
    seconds: float  # that the execution took

    @property
    def memory_error(self) -> float:
        """Of the peak, which decides whether a rank fits."""
        executed, predicted = self.peak
        return predicted / executed - 1

    @property
    def is_equal(self) -> bool:
        return not self.differences and abs(self.memory_error) <= MOST_MEMORY_ERROR


def on_gpus(job: Job, gpus: int | None) -> Job:
    """The job with a data-parallel size that fills so many GPUs, and the next larger batch. Raises Problem."""
    if gpus is None:
        return job
    replica = job.parallel.tensor * job.parallel.pipeline
    if gpus % replica:
        problem = f"{gpus} GPUs do not divide into replicas of {replica}"
        raise Problem(problem, f"Give a multiple of {replica} with --gpus")
    data = gpus // replica
    step = job.micro_batch * data
    least = max(job.global_batch, step * job.parallel.pipeline)  # a pipeline needs a micro-batch for each stage
    return replace(job.on(data=data, devices_per_node=min(8, gpus)), global_batch=-(-least // step) * step)


def compare(strategy: str, job: Job, rank: int) -> ExecutedRank:
    """Executes a rank in a process of its own, because DeepSpeed keeps the process groups of a process for ever."""
    from t5bench_prove import execution

    begin = perf_counter()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        executed = pool.apply(execution.execute, (job, rank))
    allocated, peak = execution.memory(job, rank)
    return ExecutedRank(
        strategy=strategy,
        world=job.parallel.world,
        rank=rank,
        collectives=executed.collectives.total(),
        megabytes=sum(one.bytes * count for one, count in executed.collectives.items()) / 1e6,
        differences=[str(difference) for difference in execution.differences(job, executed)],
        allocated=(executed.allocated, allocated),
        peak=(executed.peak, peak),
        seconds=perf_counter() - begin,
    )


def run(jobs: Sequence[tuple[str, Job]], gpus: int | None, rank: int | None, as_json: bool) -> int:
    """Executes a rank of every job, without `rank` the first one of each stage; 1 if anything differs.

    Raises Problem if no job can be executed.
    """
    from t5bench_prove import execution

    comparisons = []
    refused = {}
    for strategy, job in jobs:
        reason = execution.unsupported(job)
        if reason:
            refused[strategy] = reason
            continue
        job = on_gpus(job, gpus)
        stage = job.parallel.tensor * job.parallel.data
        ranks = [rank] if rank is not None else range(0, job.parallel.world, stage)
        comparisons += [compare(strategy, job, one) for one in ranks]
    if not comparisons:
        raise Problem("no strategy's step can be executed", "\n".join(dict.fromkeys(refused.values())))
    if as_json:
        print(json.dumps({"rows": [_json(one) for one in comparisons], "refused": refused}, indent=2))
    else:
        show(comparisons, refused)
    return int(not all(one.is_equal for one in comparisons))


def _json(comparison: ExecutedRank) -> dict[str, Any]:
    return vars(comparison) | {"memory_error": comparison.memory_error, "is_equal": comparison.is_equal}


def show(comparisons: Sequence[ExecutedRank], refused: dict[str, str]) -> None:
    cells = [
        (
            one.strategy,
            f"{one.rank} of {one.world}",
            one.collectives,
            f"{one.megabytes:,.1f}",
            "equal" if not one.differences else f"{len(one.differences)} differ",
            f"{one.peak[0] / 1e9:.3f}",
            f"{one.peak[1] / 1e9:.3f}",
            f"{one.memory_error:+.2%}",
            f"{one.seconds:.0f}",
        )
        for one in comparisons
    ]
    headers = ("executed", "rank", "collectives", "MB", "the model's list", "peak GB", "predicted", "off", "seconds")
    print(text_table(cells, headers))
    for one in comparisons:
        for difference in one.differences:
            print(f"{one.strategy}, rank {one.rank}: {difference}")
    for strategy, reason in refused.items():
        print(f"{strategy} cannot be executed: {reason}")
    print("\nMB: what goes into or comes out of the collectives of one step. No arithmetic is done, so this says")
    print("nothing about time or losses. --json also has the memory between steps.")
