"""Trains every kind of described model under every strategy, and writes the table of docs/generated/kinds.md.

    PYTHONPATH=.:tests:packages/judge/src python tests/native/kinds.py

takes a quarter of an hour on two cores. Each cell is a training of five steps in the native engine beside Transformers'
own model with the same weights, samples and optimizer, which tests/described.py trains with PyTorch alone.
"""

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import described
import strategies
import torch
from described import CONFIGS, arguments_of
from strategies import STRATEGIES, largest_difference
from support import REPO_ROOT

STEPS = 5
PAGE = REPO_ROOT / "docs" / "generated" / "kinds.md"
BEGINNING = [
    "# Every kind of model under every strategy, beside Transformers",
    "",
    "Tiny models of the kinds that `MODEL` takes, five steps in fp32 without dropout, on a CPU with gloo;"
    " `tests/native/kinds.py` trains them.",
    "A cell is the largest relative difference of a loss or a gradient norm from Transformers' own model with the same"
    " weights, samples and optimizer.",
    "The parity gate allows 5e-6.",
    "The number after a strategy is that of its processes; their configurations are in `tests/described.py`.",
    "",
]


def differences(kind: str, directory: Path) -> dict[str, float]:
    """By strategy."""
    config = CONFIGS[kind]
    reference = described.train(config, arguments_of(config), STEPS)
    found = {}
    for number, (name, strategy) in enumerate(STRATEGIES.items()):
        curve = strategies.train(config, strategy, directory / str(number), STEPS)
        found[name] = largest_difference(curve, reference)
        print(kind, name, found[name], flush=True)
    return found


def page(measured: Mapping[str, Mapping[str, float]]) -> str:
    lines = [*BEGINNING, f"| | {' | '.join(measured)} |", "|---" * (1 + len(measured)) + "|"]
    for name, strategy in STRATEGIES.items():
        cells = " | ".join(f"{of_kind[name]:.1e}" for of_kind in measured.values())
        lines.append(f"| {name} ({strategy.world}) | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measured = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, kind in enumerate(CONFIGS):
            measured[kind] = differences(kind, Path(directory, str(number)))
    PAGE.write_text(page(measured))


if __name__ == "__main__":
    main()
