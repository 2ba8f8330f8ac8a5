"""What the ledger says of a release of DeepSpeed. ``python -m t5bench ledger`` writes it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY

DATA = REPOSITORY / "docs" / "generated" / "ledger.json"
RIGHT = "right"
WRONG = "wrong"
UNKNOWN = "not measured"


@dataclass(frozen=True)
class Answer:
    """What the ledger says of a run."""

    verdict: str  # a cell's, or UNKNOWN
    said: str = ""  # in words; "" if the verdict is "right", or if only this mode of the release was not measured

    def __str__(self) -> str:
        return f"{self.verdict}: {self.said}" if self.said else self.verdict


def version_of(release: str) -> tuple[int, ...]:
    """The numbers of a release: (0, 18, 2) of "0.18.2+cu124". Raises ValueError for a pre-release or none."""
    numbers = re.fullmatch(r"(\d+(?:\.\d+)*)(?:\+.*)?", release)
    if not numbers:
        raise ValueError(f"'{release}' is not a release")
    return tuple(map(int, numbers[1].split(".")))


def is_of_launchers(mode: Mapping[str, Any]) -> bool:
    """Whether launchers train so: they always say at which norm they clip, and set none of the other options."""
    return mode["clipping"] and not mode["config"]


def look_up(
    release: str,
    strategy: str,
    *,
    precision: str,
    micro_batches: int,
    offload: bool = False,
    resumes: bool = False,
    path: Path = DATA,
) -> Answer:
    """The worst verdict of the modes that a run of a launcher is in.

    strategy: zero1, zero2, zero3, zero3_offload or deepspeed-pipeline. precision: fp32, bf16 or fp16; the fp32 cells
    also speak for fp16, and for bf16 where it was not measured. offload: of the optimizer, by another strategy than
    zero3_offload. A release that was not measured, between two in which a mode is wrong, counts as wrong.
    """
    try:
        ledger = json.loads(path.read_text())
    except OSError as error:
        return Answer(UNKNOWN, f"the ledger cannot be read: {error}")
    try:
        version = version_of(release)
    except ValueError:
        return Answer(UNKNOWN, f"the ledger does not know DeepSpeed {release}")
    measured = [cell for cell in ledger["cells"] if cell["strategy"] == strategy]

    def cells_in(precision: str) -> list[dict[str, Any]]:
        modes = {
            mode["name"]
            for mode in ledger["modes"]
            if mode["precision"] == precision
            and (mode["micro_batches"] > 1) == (micro_batches > 1)
            and mode["offload"] == offload
            and is_of_launchers(mode)
            and (resumes or not mode["resumes"])
        }
        return [cell for cell in measured if cell["mode"] in modes]

    cells = cells_in("fp32")
    own = [cell for cell in cells if version_of(cell["release"]) == version]
    if precision == "bf16":
        in_bf16 = [cell for cell in cells_in("bf16") if version_of(cell["release"]) == version]
        own = in_bf16 or own
    if own:
        return _worst(own)
    if any(cell["release"] and version_of(cell["release"]) == version for cell in ledger["cells"]):
        return Answer(UNKNOWN)
    return _between(cells, version, release)


def look_up_torch(release: str, strategy: str, *, precision: str, resumes: bool = False, path: Path = DATA) -> Answer:
    """The worst verdict on a strategy that needs no DeepSpeed under this release of PyTorch.

    What was not measured is not spoken of: most releases are right.
    """
    try:
        ledger = json.loads(path.read_text())
        version = version_of(release)
    except (OSError, ValueError):
        return Answer(UNKNOWN)
    modes = {
        mode["name"]
        for mode in ledger["modes"]
        if mode["precision"] == ("bf16" if precision == "bf16" else "fp32") and (resumes or not mode["resumes"])
    }
    own = [
        cell
        for cell in ledger["cells"]
        if not cell["release"]
        and (cell["strategy"], version_of(cell["torch"])) == (strategy, version)
        and cell["mode"] in modes
    ]
    return _worst(own) if own else Answer(UNKNOWN)


def _worst(cells: Sequence[Mapping[str, Any]]) -> Answer:
    faults = [cell for cell in cells if cell["verdict"] != RIGHT]
    if not faults:
        return Answer(RIGHT)
    worst = max(faults, key=lambda cell: cell["verdict"] == WRONG)
    return Answer(worst["verdict"], _describe(worst))


def _between(cells: Sequence[Mapping[str, Any]], version: tuple[int, ...], release: str) -> Answer:
    """What the nearest measured releases say of one that was not measured."""
    verdicts: dict[str, set[str]] = {}
    for cell in cells:
        verdicts.setdefault(cell["release"], set()).add(cell["verdict"])
    older = max((other for other in verdicts if version_of(other) < version), key=version_of, default=None)
    newer = min((other for other in verdicts if version_of(other) > version), key=version_of, default=None)
    if older and newer and WRONG in verdicts[older] and WRONG in verdicts[newer]:
        return Answer(WRONG, f"the nearest releases in the ledger, {older} and {newer}, train it wrong")
    return Answer(UNKNOWN, f"the ledger does not cover DeepSpeed {release}")


def _describe(cell: Mapping[str, Any]) -> str:
    if cell["verdict"] != WRONG:
        return f"{cell['verdict']} there with torch {cell['torch']}: {cell['sentence']}"
    size = f"by up to {cell['times']:,.0f} times the bound" if cell["times"] else "by something that is not a number"
    other = "one process's" if cell["strategy"] == "ddp" else "DDP's"
    found = f"its {cell['quantity']} differs from {other} from iteration {cell['iteration']} on, {size}"
    return f"{found} (docs/generated/ledger.md)"
