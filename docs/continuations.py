"""The page of continuations: the largest differences that tests/native/continuations.py has measured."""

import json
from collections.abc import Mapping
from pathlib import Path

MEASURED = Path(__file__).resolve().parent / "generated" / "continuations.json"
FAMILIES = {"t5": "T5", "gpt": "GPT"}
BOUNDS = {"fp32": (5e-6, 5e-6), "bf16": (2e-3, 2e-2)}
"""The largest relative difference of a loss and of a gradient norm that the parity gate allows."""
Pairs = Mapping[str, Mapping[str, tuple[float, float]]]
"""For each set-up that continues, for each that had saved: the largest differences of a loss and of a norm."""

BEGINNING = """\
# Every strategy continues every other's run

A run of the native engine is saved after iteration 3, and each set-up continues it until iteration 6.
The differences are relative, from the run that the new set-up trained without an interruption.
The number after a strategy is that of its processes.
Tiny models without dropout, on a CPU with gloo.
`tests/native/continuations.py` trains them, and `continuations.json` beside this page has every pair.
Before each continuation everything that the processes hold is made nan.
Of a kind that `MODEL` takes, six set-ups drawn by its name continue each other in a ring.
In a row with a seed, four set-ups drawn by the kind's name and this number each continue the other three.

"""

TABLE = """\
| Model | Pairs | Largest difference of a loss | Allowed | Largest difference of a gradient norm | Allowed |
|---|--:|---|--:|---|--:|
"""


def page(measured: Mapping[str, Pairs]) -> str:
    rows = [row(title, pairs) for title, pairs in measured.items()]
    setups = "; ".join(next(iter(measured.values())))
    after = f"\nThe parity gate ([parity.md](../parity.md)) allows these differences.\nThe set-ups: {setups}.\n"
    of_kinds = [title for title in measured if title.rsplit(maxsplit=1)[0] not in FAMILIES]
    tried = [tried_of(title, measured[title]) for title in of_kinds]
    table = BEGINNING + verdict(measured) + "\n\n" + TABLE + "".join(rows) + after
    return table + "\n## The pairs of the kinds\n\n" + "".join(tried)


def tried_of(title: str, pairs: Pairs) -> str:
    """Who continues whom."""
    model, precision = title.rsplit(maxsplit=1)
    each = [f"{after} continues {', and '.join(saved)}" for after, saved in pairs.items()]
    return f"- {model} in {precision}: {'; '.join(each)}\n"


def verdict(measured: Mapping[str, Pairs]) -> str:
    """How many of all pairs stay within the gate's bounds, in one sentence."""
    pairs = 0
    above = 0
    for title, continued in measured.items():
        loss_bound, norm_bound = BOUNDS[title.split()[-1]]
        for saved in continued.values():
            for loss, norm in saved.values():
                pairs += 1
                above += loss > loss_bound or norm > norm_bound
    if above:
        return f"**Of {pairs} pairs, {above} differ by more than the parity gate allows.**"
    return f"**All {pairs} pairs stay below the bounds of the parity gate.**"


def row(title: str, pairs: Pairs) -> str:
    model, precision = title.rsplit(maxsplit=1)
    loss_bound, norm_bound = BOUNDS[precision]
    number = sum(len(saved) for saved in pairs.values())
    cells = [
        f"{FAMILIES.get(model, model)} in {precision}",
        str(number),
        largest(pairs, 0),
        f"{loss_bound:.0e}",
        largest(pairs, 1),
        f"{norm_bound:.0e}",
    ]
    return f"| {' | '.join(cells)} |\n"


def largest(pairs: Pairs, position: int) -> str:
    """The largest difference of a loss (0) or a norm (1), and between which set-ups."""
    difference, after, before = max(
        (saved[before][position], after, before) for after, saved in pairs.items() for before in saved
    )
    return f"{difference:.1e}: {after} continues {before}"


def write(folder: Path) -> None:
    (folder / "continuations.md").write_text(page(json.loads(MEASURED.read_text())))
