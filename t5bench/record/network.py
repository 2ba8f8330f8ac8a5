"""What check_cluster.sh measured of the network, as a file: the check writes it, and predictions read it."""

from math import sqrt
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from t5bench import Problem
from t5bench.costmodel.machine import Link
from t5bench.given_files import read_json

MAKE_IT = "Make it with: bash scripts/check_cluster.sh --network FILE node0 node1"

COMPUTING_SECONDS = 0.004
"""Before each message of us_computing, as a layer of a small model."""
# Far beyond what any network has: a value outside is a mistake in the file.
Gigabits = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Microseconds = Annotated[float, msgspec.Meta(ge=1e-3, le=1e8)]


class Figures(msgspec.Struct):
    """Of all-reduces between some nodes."""

    gbit: Gigabits
    """Gbit/s that each node's link carries, as nccl-tests defines the bus bandwidth."""
    us: Microseconds
    """Microseconds of a message for which nodes only wait."""
    us_computing: Microseconds
    """Microseconds of one between nodes that compute before each message: the mean wait beyond what its bytes take."""


class Network(msgspec.Struct):
    """What was measured between nodes."""

    hosts: list[str]
    """The first measures with each of the others."""
    backend: Literal["gloo", "nccl"]
    pairs: dict[str, Figures]
    """By the other host."""
    together: Figures | None = None
    """Of all hosts, if they are more than two."""

    @property
    def link(self) -> Link:
        """Between the nodes of a ring, as all of them together measured it."""
        slowest = self.together or min(self.pairs.values(), key=lambda pair: pair.gbit)
        steps = 2 * (len(self.hosts) - 1) if self.together else 2
        waiting = steps * (slowest.us_computing - slowest.us) * 1e-6
        return Link(
            slowest.gbit * 1e9 / 8,
            slowest.us * 1e-6,
            is_measured=True,
            straggling=max(0.0, waiting) / sqrt(COMPUTING_SECONDS),
        )

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def read_network(path: Path) -> Network:
    """Raises Problem for a file that is missing or is no such file."""
    network = read_json(path, Network, MAKE_IT)
    if not network.pairs:
        raise Problem(f"{path} has no pair of nodes", MAKE_IT)
    unknown = sorted(network.pairs.keys() - set(network.hosts))
    if unknown:
        raise Problem(f"{path} has a pair with {unknown[0]}, which is none of its hosts", MAKE_IT)
    return network
