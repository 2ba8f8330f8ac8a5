"""How a run's processes divide the work: the layout, and where each rank is in it.

Ranks are laid out as in Megatron: tensor parallel fastest (neighbours talk most), then data parallel, then pipeline.
"""

from dataclasses import dataclass
from typing import NamedTuple


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
