"""Who is where, and the process groups of a layout, as Megatron numbers its ranks: tensor fastest, then data, then
pipeline. The native engine's mesh (pipeline, data, tensor) is the same.
"""

from itertools import product

from t5bench.model.job import Job, Parallel

Groups = dict[str, list[tuple[int, ...]]]


def rank_of(parallel: Parallel, stage: int, data: int, tensor: int) -> int:
    return (stage * parallel.data + data) * parallel.tensor + tensor


def place_of(parallel: Parallel, rank: int) -> tuple[int, int]:
    """The node of a rank, and its number on that node."""
    return divmod(rank, parallel.devices_per_node)


def coordinates(parallel: Parallel, rank: int) -> tuple[int, int, int]:
    """A rank's (pipeline stage, data-parallel rank, tensor-parallel rank)."""
    rest, tensor = divmod(rank, parallel.tensor)
    return (*divmod(rest, parallel.data), tensor)


def groups(parallel: Parallel, encoder_decoder: bool = True) -> Groups:
    """Every group by its kind, each with its members in order.

    "embedding": the stages that hold the tied word embedding; "position": those that hold the positions' table, in an
    encoder-decoder the first of each stack (Megatron-DeepSpeed, megatron/core/parallel_state.py).
    """
    stages, replicas, slices = range(parallel.pipeline), range(parallel.data), range(parallel.tensor)
    pipelines = [tuple(rank_of(parallel, stage, d, t) for stage in stages) for d, t in product(replicas, slices)]
    split = parallel.decoder_stage if encoder_decoder and parallel.pipeline > 1 else None
    ends = _distinct([0, split, parallel.pipeline - 1])
    starts = _distinct([0, split])
    return {
        "tensor": [tuple(rank_of(parallel, s, d, t) for t in slices) for s, d in product(stages, replicas)],
        "data": [tuple(rank_of(parallel, s, d, t) for d in replicas) for s, t in product(stages, slices)],
        "pipeline": pipelines,
        "model": [tuple(rank_of(parallel, s, d, t) for s, t in product(stages, slices)) for d in replicas],
        "embedding": [tuple(ranks[stage] for stage in ends) for ranks in pipelines],
        "position": [tuple(ranks[stage] for stage in starts) for ranks in pipelines],
        "world": [tuple(range(parallel.world))],
    }


def groups_of(job: Job) -> Groups:
    return groups(job.parallel, job.architecture.cross_attention)


def _distinct(stages: list[int | None]) -> list[int]:
    return sorted({stage for stage in stages if stage is not None})
