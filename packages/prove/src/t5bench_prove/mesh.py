"""The axes of anybody's layout: a mesh of ranks, of which each axis has a name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

TOGETHER = "+"  # between the names of axes that a group goes along at once


@dataclass(frozen=True)
class MeshAxes:
    """Names the groups of a mesh. Stands in for origins.Axes, which knows the native engine's layouts."""

    rank: int
    sizes: Mapping[str, int]
    """Of each axis; ranks that are neighbours along the last one have neighbouring numbers, as in a DeviceMesh."""
    of_data: frozenset[str]
    """The axes along which ranks read other samples, or other parts of them."""

    def place(self, rank: int) -> dict[str, int]:
        found = {}
        for name in reversed(self.sizes):
            rank, found[name] = divmod(rank, self.sizes[name])
        return found

    def name(self, ranks: Sequence[int]) -> str:
        """The axes that a group goes along; "" for a set of ranks that is no row, plane or box of the mesh."""
        places = [self.place(rank) for rank in ranks]
        moving = [name for name in self.sizes if len({place[name] for place in places}) > 1]
        whole = set(product(*(range(self.sizes[name]) for name in moving)))
        covered = {tuple(place[name] for name in moving) for place in places}
        return TOGETHER.join(moving) if covered == whole and len(places) == len(whole) else ""

    def settled_by(self, axis: str) -> frozenset[str]:
        """The axes along which values are equal after a reduction along this one."""
        return frozenset(axis.split(TOGETHER)) - {""}

    def divides_tokens(self, axis: str) -> bool:
        """Whether a part that is scattered along this axis is of other tokens than the other ranks'."""
        return bool(axis)
