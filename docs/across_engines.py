"""The page of runs that the other engine continues, as tests/tools/convert/across_engines.py has measured them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).resolve().parent / "generated" / "across_engines.json"
BOUND = 1e-6
"""Of a relative difference."""
Figures = Sequence[Sequence[float]]
"""A loss and a gradient norm for each iteration."""

BEGINNING = """\
# One engine continues the other's run

A run is saved after iteration 10, and `reshape` writes its checkpoint for the other engine.
That engine's own loader continues it until iteration 20.
The differences are relative, from the run that went on without a change; the engines print seven digits.
Tiny models in fp32 without dropout, on a CPU with gloo.
`tests/tools/convert/across_engines.py` trains them, and `across_engines.json` beside this page has every iteration.

"""

TABLE = """\
| Pair | Loss of iteration 11: unchanged, continued | Of iteration 20 | Largest difference of a loss | Of a norm |
|---|---|---|--:|--:|
"""

COMMANDS = """
The commands, followed by the other launcher with `RESUME=1`, the new `OUTPUT_DIR` and the run's other settings:

| Pair | Command |
|---|---|
"""


def page(measured: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [row(title, pair["uninterrupted"], pair["continued"]) for title, pair in measured.items()]
    commands = [f"| {name_of(title)} | `{pair['reshape']}` |\n" for title, pair in measured.items()]
    return BEGINNING + verdict(measured) + "\n\n" + TABLE + "".join(rows) + COMMANDS + "".join(commands)


def verdict(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """How many pairs stay within the bound, in one sentence."""
    above = 0
    for pair in measured.values():
        above += max(differences(pair["uninterrupted"], pair["continued"])) > BOUND
    if above:
        return f"**Of {len(measured)} pairs, {above} differ by more than {BOUND:.0e} somewhere.**"
    return f"**All {len(measured)} pairs stay within {BOUND:.0e} in every loss and gradient norm.**"


def differences(expected: Figures, found: Figures) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a norm."""
    losses = [abs(own[0] / other[0] - 1) for own, other in zip(found, expected, strict=True)]
    norms = [abs(own[1] / other[1] - 1) for own, other in zip(found, expected, strict=True)]
    return max(losses), max(norms)


def row(title: str, expected: Figures, found: Figures) -> str:
    loss, norm = differences(expected, found)
    ends = [f"{expected[place][0]:.6f}, {found[place][0]:.6f}" for place in (0, -1)]
    return f"| {name_of(title)} | {ends[0]} | {ends[1]} | {loss:.1e} | {norm:.1e} |\n"


def name_of(title: str) -> str:
    """As the page has it: "T5: native DDP → Megatron DDP"."""
    family, _, pair = title.partition(": ")
    return f"{family.upper()}: {pair.replace('->', '→').replace('megatron', 'Megatron')}"


def write(folder: Path) -> None:
    (folder / "across_engines.md").write_text(page(json.loads(MEASURED.read_text())))
