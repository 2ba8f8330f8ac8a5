"""What an operator costs the hosts, as a file: check_cluster.sh --host measures it, and predictions read it."""

from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from t5bench import Problem
from t5bench.costmodel.machine import Host

MAKE_IT = "Make it with: bash scripts/check_cluster.sh --host FILE node0"
LEAST_UNCERTAINTY = 1.2
"""Of a measured cost: what other models of the same engine may differ by."""

Positive = Annotated[float, msgspec.Meta(gt=0)]


class HostCost(msgspec.Struct):
    """Measured with a tiny model, which leaves computing next to nothing to do."""

    engine: str
    device: str
    """cuda or cpu."""
    operator_us: dict[str, Positive]
    """Microseconds that an operator of this engine costs, by host."""

    @property
    def host(self) -> Host:
        """The slowest host's, because the others wait for it; as uncertain as the hosts differ."""
        slowest = max(self.operator_us.values())
        spread = slowest / median(self.operator_us.values())
        return Host(slowest * 1e-6, max(LEAST_UNCERTAINTY, spread))

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def read_host_cost(path: Path) -> HostCost:
    """Raises Problem for a file that is missing or is no such file."""
    try:
        cost = msgspec.json.decode(path.read_bytes(), type=HostCost)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Problem(f"{path} cannot be read: {error}", MAKE_IT) from error
    if not cost.operator_us:
        raise Problem(f"{path} has no host", MAKE_IT)
    return cost
