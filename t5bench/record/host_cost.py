"""What an operator costs the hosts, as a file: check_cluster.sh --host measures it, and predictions read it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from t5bench import Problem
from t5bench.costmodel.machine import Host
from t5bench.given_files import number_within, read_object

MAKE_IT = "Make it with: bash scripts/check_cluster.sh --host FILE node0"
LEAST_UNCERTAINTY = 1.2
"""Of a measured cost: what other models of the same engine may differ by."""
MICROSECONDS = (1e-3, 1e6)  # of one operator; a value outside is a mistake in the file


@dataclass(frozen=True)
class HostCost:
    """Measured with a tiny model, which leaves computing next to nothing to do."""

    engine: str
    device: str
    """cuda or cpu."""
    operator_us: dict[str, float]
    """Microseconds that an operator of this engine costs, by host."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "HostCost":
        """Raises ValueError for content that is no such cost."""
        texts = [content.get(name) for name in ("engine", "device")]
        costs = content.get("operator_us")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("engine or device is no text")
        if not isinstance(costs, dict) or not costs:
            raise ValueError("it has no host")
        return cls(*texts, {host: number_within(costs, host, *MICROSECONDS) for host in costs})

    @property
    def host(self) -> Host:
        """The slowest host's, because the others wait for it; as uncertain as the hosts differ."""
        slowest = max(self.operator_us.values())
        spread = slowest / median(self.operator_us.values())
        return Host(slowest * 1e-6, max(LEAST_UNCERTAINTY, spread))

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_host_cost(path: Path) -> HostCost:
    """Raises Problem for a file that is missing or is no such file."""
    try:
        return HostCost.of(read_object(path, MAKE_IT))
    except ValueError as error:
        raise Problem(f"{path} has no cost of an operator: {error}", MAKE_IT) from error
