"""What the parity gate would see of each number of a recipe: how far a change of it moves the loss or gradient norm.

native/sensitivity.py measures it. A mistake in a number that moves neither curve by MARGIN times what the gate allows
can hide.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from t5bench import Problem

MARGIN = 10


@dataclass(frozen=True)
class Tolerance:
    """What honest runs stay far below: relative differences of loss and gradient norm."""

    loss: float
    norm: float

    def __str__(self) -> str:
        return f"loss {self.loss:.0e}, norm {self.norm:.0e}"


@dataclass(frozen=True)
class Sensitivity:
    """How far a change of one number moves the curves: the largest relative differences of loss and gradient norm."""

    number: str
    change: str
    loss: float
    norm: float

    def times(self, tolerance: Tolerance) -> float:
        """The larger of the two in units of what the gate allows."""
        return max(self.loss / tolerance.loss, self.norm / tolerance.norm)

    def is_seen(self, tolerance: Tolerance) -> bool:
        return self.times(tolerance) >= MARGIN


def _largest_difference(curve: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(value - its) / its for value, its in zip(curve, reference, strict=True))


def read(path: Path) -> list[Sensitivity]:
    """The measurements in a file whose first line is the recipe as it is. Raises Problem."""
    try:
        recipe, *changed = map(json.loads, path.read_text().splitlines())
        return [
            Sensitivity(
                line["number"],
                line["change"],
                _largest_difference(line["losses"], recipe["losses"]),
                _largest_difference(line["norms"], recipe["norms"]),
            )
            for line in changed
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(
            f"{path} holds no measured sensitivities: {error}",
            "Measure them again: bash scripts/check_parity.sh --sensitivity",
        ) from error


def table(measured: Sequence[Sensitivity], tolerance: Tolerance) -> str:
    header = ["number of the recipe", "changed by", "loss moves by", "norm moves by", "times the bound", "seen"]
    rows = [
        [s.number, s.change, f"{s.loss:.1e}", f"{s.norm:.1e}", f"{s.times(tolerance):.0f}",
         "yes" if s.is_seen(tolerance) else "NO"]
        for s in sorted(measured, key=lambda s: s.times(tolerance))
    ]  # fmt: skip
    return tabulate(rows, header, colalign=("left", "left", *["right"] * 3, "left"), disable_numparse=True)
