"""The page of continuations: what tests/native/continuations.py has measured, as tables."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

MEASURED = Path(__file__).resolve().parent / "generated" / "continuations.json"
FAMILIES = {"t5": "T5", "gpt": "GPT"}
Pairs = Mapping[str, Mapping[str, tuple[float, float]]]

BEGINNING = [
    "# Every strategy continues every other's run",
    "",
    "A run of the native engine is saved after iteration 3, and each set-up continues it until iteration 6.",
    "A cell has the largest relative differences of a loss and of a gradient norm from the run that the new set-up"
    " trained without an interruption.",
    "The number after a strategy is that of its processes.",
    "Tiny models without dropout, on a CPU with gloo; `tests/native/continuations.py` trains them.",
    "Before each continuation everything that the processes hold is made nan.",
    "",
    "The parity gate allows 5e-6 in fp32; in bf16, where set-ups round at different places, 2e-3 of a loss and 2e-2 of"
    " a norm ([parity.md](../parity.md)).",
    "",
]


def page(measured: Mapping[str, Pairs]) -> str:
    lines = [*BEGINNING]
    for title, pairs in measured.items():
        lines += table(title, pairs)
    return "\n".join(lines)


def table(title: str, pairs: Pairs) -> Iterator[str]:
    family, precision = title.split()
    numbers = {name: number for number, name in enumerate(pairs, 1)}
    losses, norms = zip(*(pair for row in pairs.values() for pair in row.values()), strict=True)
    yield f"## {FAMILIES[family]} in {precision}"
    yield ""
    yield f"Of {len(losses)} pairs, the largest difference of a loss is {max(losses):.1e}, of a norm {max(norms):.1e}."
    yield ""
    yield f"| Continues what was saved by | {' | '.join(str(number) for number in numbers.values())} |"
    yield f"|{'---|' * (len(numbers) + 1)}"
    for after, row in pairs.items():
        cells = [f"{loss:.0e} {norm:.0e}" for loss, norm in (row[before] for before in numbers)]
        yield f"| {numbers[after]} {after} | {' | '.join(cells)} |"
    yield ""


def write(folder: Path) -> None:
    text = page(json.loads(MEASURED.read_text()))
    (folder / "continuations.md").write_text(text.replace("0e+00", "0"))
