"""How well the parity gate sees each number of a recipe: how far a change of it moves the loss or gradient norm.

native/sensitivity.py measures this. A mistake can hide in a number that moves neither curve by MARGIN times what the
gate allows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tabulate import tabulate

from t5bench import Problem

MARGIN = 10


class Tolerance(NamedTuple):
    """The relative differences of loss and gradient norm that the gate allows, far above those of correct runs."""

    loss: float
    norm: float

    def __str__(self) -> str:
        return f"loss {self.loss:.0e}, norm {self.norm:.0e}"


class Sensitivity(NamedTuple):
    """How far a change of one number moves the curves: the largest relative differences of loss and gradient norm."""

    number: str
    change: str
    loss: float
    norm: float

    def times(self, tolerance: Tolerance) -> float:
        """The larger of the two, in units of what the gate allows."""
        return max(self.loss / tolerance.loss, self.norm / tolerance.norm)

    def is_seen(self, tolerance: Tolerance) -> bool:
        return self.times(tolerance) >= MARGIN


class _Line(msgspec.Struct):
    number: str
    change: str
    losses: list[float]
    norms: list[float]


def _moved(curve: Sequence[float], reference: Sequence[float]) -> float:
    """A curve may end early, where its change was seen."""
    return max(abs(value - its) / its for value, its in zip(curve, reference[: len(curve)], strict=True))


def read(path: Path) -> list[Sensitivity]:
    """The measurements in a file whose first line is the recipe as it is. Raises Problem."""
    try:
        recipe, *changed = msgspec.json.Decoder(_Line).decode_lines(path.read_bytes())
        return [
            Sensitivity(line.number, line.change, _moved(line.losses, recipe.losses), _moved(line.norms, recipe.norms))
            for line in changed
        ]
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        remedy = "Measure them again: bash scripts/check_parity.sh --sensitivity"
        raise Problem(f"{path} holds no sensitivities: {error}", remedy) from error


def table(measured: Sequence[Sensitivity], tolerance: Tolerance) -> str:
    """The table of the numbers, the least visible first, and whether all are seen."""
    header = ["number of the recipe", "changed by", "loss moves by", "norm moves by", "times the bound", "seen"]
    hidden = [one.number for one in measured if not one.is_seen(tolerance)]
    rows = [
        [s.number, s.change, f"{s.loss:.1e}", f"{s.norm:.1e}", f"{s.times(tolerance):.0f}",
         "NO" if s.number in hidden else "yes"]
        for s in sorted(measured, key=lambda s: s.times(tolerance))
    ]  # fmt: skip
    shown = tabulate(rows, header, colalign=("left", "left", *["right"] * 3, "left"), disable_numparse=True)
    bound = f"The bound is {tolerance}, relative; a change is seen if it moves either by at least {MARGIN} times that."
    verdict = f"FAIL: not seen: {', '.join(hidden)}" if hidden else "PASS: every number of the recipe is seen"
    return f"{shown}\n\n{bound}\n{verdict}"
