"""What check_cluster.sh measured of the network, as a file: the check writes it, and predictions read it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.costmodel.machine import Link
from t5bench.given_files import number_within, read_object

MAKE_IT = "Make it with: bash scripts/check_cluster.sh --network FILE node0 node1"

COMPUTING_SECONDS = 0.004
"""Before each message of us_computing, as a layer of a small model."""
# Far beyond what any network has: a value outside is a mistake in the file.
GIGABITS = (1e-6, 1e6)
MICROSECONDS = (1e-3, 1e8)
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Figures:
    """Of all-reduces between some nodes."""

    gbit: float
    """Gbit/s that each node's link carries, as nccl-tests defines the bus bandwidth."""
    us: float
    """Microseconds of a message for which nodes only wait."""
    us_computing: float
    """Microseconds of one between nodes that compute before each message: the mean wait beyond what its bytes take."""

    @classmethod
    def of(cls, content: Any) -> "Figures":
        """Raises ValueError for a figure that is missing, or that no network has."""
        return cls(
            gbit=number_within(content, "gbit", *GIGABITS),
            us=number_within(content, "us", *MICROSECONDS),
            us_computing=number_within(content, "us_computing", *MICROSECONDS),
        )


@dataclass(frozen=True)
class Network:
    """What was measured between nodes."""

    hosts: list[str]
    """The first measures with each of the others."""
    backend: str
    """One of BACKENDS."""
    pairs: dict[str, Figures]
    """By the other host."""
    together: Figures | None = None
    """Of all hosts, if they are more than two."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Network":
        """Raises ValueError for content that is no network."""
        hosts = content.get("hosts")
        backend = content.get("backend")
        pairs = content.get("pairs")
        together = content.get("together")
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError("hosts is no list of names")
        if backend not in BACKENDS:
            raise ValueError(f"backend is none of {' '.join(BACKENDS)}")
        if not isinstance(pairs, dict) or not pairs:
            raise ValueError("it has no pair of nodes")
        unknown = sorted(pairs.keys() - set(hosts))
        if unknown:
            raise ValueError(f"it has a pair with {unknown[0]}, which is none of its hosts")
        figures = {host: Figures.of(pair) for host, pair in pairs.items()}
        return cls(hosts, backend, figures, Figures.of(together) if together is not None else None)

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
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_network(path: Path) -> Network:
    """Raises Problem for a file that is missing or is no such file."""
    try:
        return Network.of(read_object(path, MAKE_IT))
    except ValueError as error:
        raise Problem(f"{path} has no network that was measured: {error}", MAKE_IT) from error
