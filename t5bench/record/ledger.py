"""What the ledger says of a release of DeepSpeed. ``python -m t5bench ledger`` writes it.

A launcher reads releases.json, which is in this folder: what it needs of docs/generated/ledger.json, in a seventh of
the bytes. So a node to which docs/ was not copied knows the wrong releases, too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY
from t5bench.record.files import write_whole

DATA = REPOSITORY / "docs" / "generated" / "ledger.json"
OF_LAUNCHERS = Path(__file__).with_name("releases.json")
_OF_A_CELL = ("release", "strategy", "mode", "verdict", "torch")
RIGHT = "right"
WRONG = "wrong"
UNKNOWN = "not measured"
RIGHT_IN_FP32 = "not measured in {}; right in fp32"
PIPELINE = "deepspeed-pipeline"
PIPELINE_CLIPPING = "pipeline clipping"


@dataclass(frozen=True)
class LedgerAnswer:
    """What the ledger says of a run."""

    verdict: str
    """A cell's, UNKNOWN or RIGHT_IN_FP32."""
    said: str = ""
    """In words; "" if the verdict is "right", or if only this mode of the release was not measured."""

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


def shorten(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """What launchers need of a ledger: their modes, which releases are right in each, and what is wrong with others."""
    modes = {mode["name"]: mode for mode in ledger["modes"] if is_of_launchers(mode)}
    right: dict[str, set[str]] = {}
    faults = []
    for cell in ledger["cells"]:
        if cell["mode"] not in modes:
            continue
        if cell["verdict"] != RIGHT:
            faults.append([*(cell[name] for name in _OF_A_CELL), _describe(cell)])
        elif cell["release"]:
            right.setdefault(f"{cell['strategy']}, {cell['mode']}", set()).add(cell["release"])
        else:
            right.setdefault(f"{cell['strategy']}, {cell['mode']}, torch", set()).add(cell["torch"])
    options = ("name", "precision", "micro_batches", "clipping", "offload", "resumes", "config")
    return {
        "modes": [{option: mode[option] for option in options} for mode in modes.values()],
        "right": {group: " ".join(sorted(releases)) for group, releases in sorted(right.items())},
        "faults": faults,
    }


def write_shortened(ledger: Mapping[str, Any]) -> None:
    """Writes what launchers read, one fault a line. Raises OSError."""
    parts = shorten(ledger)
    lines = [f'"{name}": [\n{_rows(parts[name])}\n]' for name in ("modes", "faults")]
    lines.insert(1, f'"right": {json.dumps(parts["right"], indent=0)}')
    write_whole(OF_LAUNCHERS, "{\n" + ",\n".join(lines) + "\n}\n")


def _rows(values: Sequence[Any]) -> str:
    return ",\n".join(map(json.dumps, values))


def _read(path: Path) -> dict[str, Any]:
    """A whole or a shortened ledger, with its cells as the whole one has them. Raises OSError and ValueError."""
    ledger = json.loads(path.read_text())
    if "cells" in ledger:
        return ledger
    cells = [dict(zip((*_OF_A_CELL, "said"), fault, strict=True)) for fault in ledger["faults"]]
    for group, releases in ledger["right"].items():
        strategy, mode, *of_torch = group.split(", ")
        for release in releases.split():
            deepspeed = "" if of_torch else release
            torch = release if of_torch else ""
            cells.append(dict(zip(_OF_A_CELL, (deepspeed, strategy, mode, RIGHT, torch), strict=True)))
    return {**ledger, "cells": cells}


def look_up(
    release: str,
    strategy: str,
    *,
    precision: str,
    micro_batches: int,
    offload: bool = False,
    resumes: bool = False,
    path: Path = OF_LAUNCHERS,
) -> LedgerAnswer:
    """The worst verdict of the modes that a run of a launcher is in.

    strategy: zero1, zero2, zero3, zero3_offload or deepspeed-pipeline. precision: fp32, bf16 or fp16. A fault in fp32
    also speaks for 16 bits, where the same way of training was not measured in them; that fp32 is right is then called
    RIGHT_IN_FP32, and a pipeline that was trained without clipping only is not called right. offload: of the
    optimizer, by another strategy than zero3_offload. A release that was not measured, between two in which a mode is
    wrong, counts as wrong.
    """
    try:
        ledger = _read(path)
    except OSError as error:
        return LedgerAnswer(UNKNOWN, f"the ledger cannot be read: {error}")
    try:
        version = version_of(release)
    except ValueError:
        return LedgerAnswer(UNKNOWN, f"the ledger does not know DeepSpeed {release}")
    measured = [cell for cell in ledger["cells"] if cell["strategy"] == strategy]

    def cells_in(precision: str, *, resumes: bool) -> list[dict[str, Any]]:
        modes = {
            mode["name"]
            for mode in ledger["modes"]
            if mode["precision"] == precision
            and (mode["micro_batches"] > 1) == (micro_batches > 1)
            and mode["offload"] == offload
            and is_of_launchers(mode)
            and mode["resumes"] == resumes
        }
        return [cell for cell in measured if cell["mode"] in modes]

    of_fp32: list[dict[str, Any]] = []
    own: list[dict[str, Any]] = []
    lacks_own_precision = False
    for how in (False, True) if resumes else (False,):
        in_fp32 = cells_in("fp32", resumes=how)
        of_fp32 += in_fp32
        in_fp32 = [cell for cell in in_fp32 if version_of(cell["release"]) == version]
        in_16_bits = [cell for cell in cells_in(precision, resumes=how) if version_of(cell["release"]) == version]
        if precision == "fp32":
            own += in_fp32
        elif precision == "bf16" and in_16_bits and strategy != PIPELINE:
            own += in_16_bits
        else:  # a fault of fp16's own scaling, or of the pipeline's, is none of fp32's, and the reverse
            own += [*in_fp32, *in_16_bits]
            lacks_own_precision |= not in_16_bits or strategy == PIPELINE
    if own:
        answer = _worst(own)
        lacks_clipping = strategy == PIPELINE and all(cell["mode"] != PIPELINE_CLIPPING for cell in own)
        if answer.verdict == RIGHT and lacks_clipping:
            return LedgerAnswer(UNKNOWN)
        if answer.verdict == RIGHT and lacks_own_precision:
            return LedgerAnswer(RIGHT_IN_FP32.format(precision))
        return answer
    if any(cell["release"] and version_of(cell["release"]) == version for cell in ledger["cells"]):
        return LedgerAnswer(UNKNOWN)
    return _between(of_fp32, version, release)


def look_up_torch(
    release: str, strategy: str, *, precision: str, resumes: bool = False, path: Path = OF_LAUNCHERS
) -> LedgerAnswer:
    """The worst verdict on a strategy that needs no DeepSpeed under this release of PyTorch.

    What was not measured is not spoken of: most releases are right.
    """
    try:
        ledger = _read(path)
        version = version_of(release)
    except (OSError, ValueError):
        return LedgerAnswer(UNKNOWN)
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
    return _worst(own) if own else LedgerAnswer(UNKNOWN)


def _worst(cells: Sequence[Mapping[str, Any]]) -> LedgerAnswer:
    faults = [cell for cell in cells if cell["verdict"] != RIGHT]
    if not faults:
        return LedgerAnswer(RIGHT)
    worst = max(faults, key=lambda cell: cell["verdict"] == WRONG)
    return LedgerAnswer(worst["verdict"], _describe(worst))


def _between(cells: Sequence[Mapping[str, Any]], version: tuple[int, ...], release: str) -> LedgerAnswer:
    """What the nearest measured releases say of one that was not measured."""
    verdicts: dict[str, set[str]] = {}
    for cell in cells:
        verdicts.setdefault(cell["release"], set()).add(cell["verdict"])
    older = max((other for other in verdicts if version_of(other) < version), key=version_of, default=None)
    newer = min((other for other in verdicts if version_of(other) > version), key=version_of, default=None)
    if older and newer and WRONG in verdicts[older] and WRONG in verdicts[newer]:
        return LedgerAnswer(WRONG, f"the nearest releases in the ledger, {older} and {newer}, train it wrong")
    return LedgerAnswer(UNKNOWN, f"the ledger does not cover DeepSpeed {release}")


def _describe(cell: Mapping[str, Any]) -> str:
    if "said" in cell:
        return str(cell["said"])
    if cell["verdict"] != WRONG:
        return f"{cell['verdict']} there with torch {cell['torch']}: {cell['sentence']}"
    size = f"by up to {cell['times']:,.0f} times the bound" if cell["times"] else "by something that is not a number"
    other = "one process's" if cell["strategy"] == "ddp" else "DDP's"
    found = f"its {cell['quantity']} differs from {other} from iteration {cell['iteration']} on, {size}"
    return f"{found} (docs/generated/ledger.md)"
