"""How well the parity gate sees each number of a recipe: how far a change of it moves the loss or gradient norm."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from t5bench import Problem
from t5bench.printed_table import text_table
from training_comparison.curves import Tolerance
from training_comparison.given_files import read_text

MARGIN = 10  # a mistake can hide in a number whose change moves neither curve by so many times the tolerance


MEASURE_AGAIN = "Measure them again: bash scripts/check_parity.sh --sensitivity"


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


def read(path: Path) -> list[Sensitivity]:
    """From a file of native/sensitivity.py, whose first line is the recipe as it is. Raises Problem."""
    found = []
    try:
        recipe, *changed = map(json.loads, read_text(path, MEASURE_AGAIN).splitlines())
        for line in changed:
            moved = [  # a curve may end early, where its change was seen
                max(abs(value - its) / its for value, its in zip(line[name], recipe[name], strict=False))
                for name in ("losses", "norms")
            ]
            found.append(Sensitivity(line["number"], line["change"], *moved))
    except Problem:
        raise
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        raise Problem(f"{path} holds no sensitivities: {error}", MEASURE_AGAIN) from error
    return found


def table(measured: Sequence[Sensitivity], tolerance: Tolerance) -> str:
    """The table of the numbers, the least visible first, and whether all are seen."""
    header = ["number of the recipe", "changed by", "loss moves by", "norm moves by", "times the bound", "seen"]
    hidden = [one.number for one in measured if not one.is_seen(tolerance)]
    rows = []
    for one in sorted(measured, key=lambda one: one.times(tolerance)):
        seen = "NO" if one.number in hidden else "yes"
        moves = (f"{one.loss:.1e}", f"{one.norm:.1e}")
        rows.append([one.number, one.change, *moves, f"{one.times(tolerance):.0f}", seen])
    shown = text_table(rows, header, ("left", "left", *["right"] * 3, "left"))
    bound = f"The bound is {tolerance}, relative; a change is seen if it moves either by at least {MARGIN} times that."
    said = f"FAIL: not seen: {', '.join(hidden)}" if hidden else "PASS: every number of the recipe is seen"
    return f"{shown}\n\n{bound}\n{said}"
