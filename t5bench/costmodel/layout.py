"""How a run's processes divide the work: the layout, and where each rank is in it.

Ranks are laid out as in Megatron: tensor parallel fastest (neighbours talk most), then data parallel, then pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from t5bench.costmodel.flops import layer_multiply_adds, multiply_adds
from t5bench.costmodel.job import Architecture


class Coordinates(NamedTuple):
    """A rank's place in the layout."""

    pp: int
    """Its pipeline stage."""
    dp: int
    tp: int


def coordinates(rank: int, tp: int, dp: int) -> Coordinates:
    """A rank's place, from the tensor- and data-parallel sizes."""
    replica, tp_rank = divmod(rank, tp)
    stage, dp_rank = divmod(replica, dp)
    return Coordinates(stage, dp_rank, tp_rank)


def rank_at(stage: int, dp_rank: int, tp_rank: int, tp: int, dp: int) -> int:
    """The rank at a place, the reverse of coordinates()."""
    return (stage * dp + dp_rank) * tp + tp_rank


def share(layers: int, stages: range, stage: int) -> range:
    """The layers of one of the pipeline stages that divide them: spread evenly, and the first stages have one more."""
    least, rest = divmod(layers, len(stages))
    before = stage - stages.start
    first = before * least + min(before, rest)
    return range(first, first + least + (1 if before < rest else 0))


def decoder_stage(encoder: Sequence[float], decoder: Sequence[float], stages: int) -> int:
    """The decoder's first stage, so that the stage with the most work has as little as possible.

    encoder, decoder: the work of each layer. Of equally good stages it is the one nearest to the middle.
    """

    def busiest(split: int) -> float:
        work = [sum(encoder[layer] for layer in share(len(encoder), range(split), stage)) for stage in range(split)]
        rest = range(split, stages)
        work += [sum(decoder[layer] for layer in share(len(decoder), rest, stage)) for stage in rest]
        return max(work)

    fitting = range(max(1, stages - len(decoder)), min(stages - 1, len(encoder)) + 1)
    return min(fitting, key=lambda split: (busiest(split), abs(2 * split - stages)))


def balanced_split(a: Architecture, stages: int) -> int:
    """The decoder's first stage of the native engine's pipeline, whose stages are to take equally long.

    A layer counts by its multiply-adds for a sample, and the last layer with the head.
    """
    encoder = [sum(layer_multiply_adds(a))] * a.encoder_layers
    decoder = [sum(layer_multiply_adds(a, decoder=True))] * a.decoder_layers
    decoder[-1] += multiply_adds(a)["head"]
    return decoder_stage(encoder, decoder, stages)


@dataclass(frozen=True)
class Layout:
    """The layout of a planned run."""

    nnodes: int
    nproc_per_node: int
    world_size: int
    tp: int
    """The tensor-parallel size."""
    pp: int
    """The pipeline-parallel size."""
    dp: int
    """The data-parallel size."""
    micro_batches: int
    """Per iteration on one data-parallel rank."""
    split_rank: int | None = None
    """The decoder's first stage."""

    def ranks_of(self, node: int) -> range:
        return range(node * self.nproc_per_node, (node + 1) * self.nproc_per_node)

    def coordinates(self, rank: int) -> Coordinates:
        return coordinates(rank, self.tp, self.dp)
