"""Where each rank is, and the process groups of a layout, in Megatron's numbering: tensor fastest, then data, then
pipeline. The native engine's mesh (pipeline, data, tensor) is the same.
"""

from itertools import product

from t5bench.model.job import Parallel

Groups = dict[str, list[tuple[int, ...]]]


def place_of(parallel: Parallel, rank: int) -> tuple[int, int]:
    """The node of a rank, and its number on that node."""
    return divmod(rank, parallel.devices_per_node)


def coordinates(parallel: Parallel, rank: int) -> tuple[int, int, int]:
    """A rank's (pipeline stage, data-parallel rank, tensor-parallel rank)."""
    rest, tensor = divmod(rank, parallel.tensor)
    return (*divmod(rest, parallel.data), tensor)


def groups(parallel: Parallel, encoder_decoder: bool = True) -> Groups:
    """Every group by its kind, each with its members in order.

    "embedding": the stages that hold the tied word embedding. "position": those that hold the positions' table, which
    in an encoder-decoder are the first of each stack (Megatron-DeepSpeed, megatron/core/parallel_state.py).
    """
    t, d, world = parallel.tensor, parallel.data, parallel.world
    stage, last = t * d, parallel.pipeline - 1  # how many ranks a stage has, and the last one's number
    pipelines = [tuple(range(first, world, stage)) for first in range(stage)]
    starts = {0, parallel.decoder_stage} if encoder_decoder and last else {0}
    return {
        "tensor": [tuple(range(first, first + t)) for first in range(0, world, t)],
        "data": [tuple(range(at + i, at + stage, t)) for at, i in product(range(0, world, stage), range(t))],
        "pipeline": pipelines,
        "model": [tuple(at + i for at in range(j * t, world, stage) for i in range(t)) for j in range(d)],
        "embedding": [tuple(ranks[at] for at in sorted(starts | {last})) for ranks in pipelines],
        "position": [tuple(ranks[at] for at in sorted(starts)) for ranks in pipelines],
        "world": [tuple(range(world))],
    }
