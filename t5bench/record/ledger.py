"""What the ledger says of a release of DeepSpeed or PyTorch, from the few kilobytes of releases.json in this folder.

``python -m t5bench ledger`` trains the cells and writes the file (packages/ledger's releases.py says what is in it,
docs/generated/releases.schema.json says it to other projects). A node to which docs/ was not copied has it, too.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY

DATA = REPOSITORY / "docs" / "generated" / "ledger.json"
VERDICTS = Path(__file__).with_name("releases.json")
FORMAT = "t5bench-releases-2"
RIGHT = "right"
WRONG = "wrong"
UNKNOWN = "not measured"
RIGHT_IN_FP32 = "not measured in {}; right in fp32"
PIPELINE = "deepspeed-pipeline"
PIPELINE_CLIPPING = "pipeline clipping"
SPAN = ".."


@dataclass(frozen=True)
class LedgerAnswer:
    """What the ledger says of a run."""

    verdict: str
    """A cell's, UNKNOWN or RIGHT_IN_FP32."""
    said: str = ""
    """In words; "" if the verdict is "right", or if only this mode of the release was not measured."""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.said}" if self.said else self.verdict

    @property
    def is_right(self) -> bool:
        """Also if it was measured in fp32 alone."""
        return self.verdict == RIGHT or self.verdict.endswith(RIGHT_IN_FP32.partition("; ")[2])


@dataclass(frozen=True)
class Increase:
    """What an iteration costs more in some releases of DeepSpeed than in the one before: a tenth, or more than that."""

    figure: str
    """operators or bytes in collectives."""
    times: float
    """As many as in the release before."""
    before: str
    """The last release without the increase."""
    since: str
    last: str
    """The last release that was counted with it."""
    mended_in: str
    """The first later release without it; "" if none that was counted."""
    upstream: Sequence[str]
    """Such as deepspeed#7885."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Increase":
        """From an entry of releases.json. Raises LookupError."""
        named = [content[name] for name in ("figure", "times", "before", "since", "last")]
        return cls(*named, content.get("mended_in", ""), content.get("upstream", []))

    def holds_in(self, release: str) -> bool:
        """Whether a release is one of those, or between two of them."""
        try:
            return version_of(self.since) <= version_of(release) <= version_of(self.last)
        except ValueError:
            return False

    @property
    def size(self) -> str:
        more = f"{100 * (self.times - 1):.0f} % more" if self.times < 2 else f"{self.times:g} times as many"
        return f"{more} {self.figure} {'than' if self.times < 2 else 'as'} under {self.before}"

    def __str__(self) -> str:
        mended = (
            f"{self.mended_in} is without it" if self.mended_in else "no later release that was counted is without it"
        )
        reported = f" ({', '.join(self.upstream)})" if self.upstream else ""
        return f"{self.size}, since {self.since}{reported}; {mended}"


def version_of(release: str) -> tuple[int, ...]:
    """The numbers of a release: (0, 18, 2) of "0.18.2+cu124". Raises ValueError for a pre-release or none."""
    numbers = re.fullmatch(r"(\d+(?:\.\d+)*)(?:\+.*)?", release)
    if not numbers:
        raise ValueError(f"'{release}' is not a release")
    return tuple(map(int, numbers[1].split(".")))


def spans_of(releases: Sequence[str], measured: Sequence[str]) -> str:
    """Releases as Spans; ``measured`` are those that the library was measured in, the oldest first."""
    runs: list[list[str]] = []
    for number, release in enumerate(measured):
        if release not in releases:
            continue
        if runs and runs[-1][-1] == measured[number - 1]:
            runs[-1].append(release)
        else:
            runs.append([release])
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}{SPAN}{run[-1]}" for run in runs)


def releases_in(spans: str, measured: Sequence[str]) -> list[str]:
    """The releases that Spans name."""
    named = []
    for span in spans.split():
        first, _, last = span.partition(SPAN)
        named += measured[measured.index(first) : measured.index(last or first) + 1]
    return named


def size_in_words(off_by: float | None) -> str:
    """A relative difference as people say it: "off by 56 %", "3 times as large", "not a number"."""
    if off_by is None:
        return "not a number"
    if off_by < 1:
        return f"off by {100 * off_by:.2g} %"
    times = float(f"{1 + off_by:.2g}")
    return f"{times:,.0f} times as large" if times >= 10 else f"{times:g} times as large"


def _read(path: Path) -> dict[str, Any]:
    """The modes in which launchers train, and their cells. Raises OSError and ValueError.

    Plain JSON: planning imports no package (packages/ledger/src/t5bench_ledger/releases.py has the file's types).
    """
    content = json.loads(path.read_bytes())
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"{path} has the format '{content['format']}', not '{FORMAT}'")
        modes = [mode for mode in content["modes"] if mode["launchers"]]
        names = {mode["name"] for mode in modes}
        return {"modes": modes, "cells": [cell for cell in _cells(content) if cell["mode"] in names]}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no verdicts: {error}") from error


def _cells(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A cell for each release, strategy and mode; ``release`` is DeepSpeed's, and empty if PyTorch alone was tried."""
    by_library = {(each["software"], each["torch"]): each["releases"] for each in content["measured"]}
    for measured in content["measured"]:
        for strategy, by_mode in measured["right"].items():
            for mode, spans in by_mode.items():
                right = {"strategy": strategy, "mode": mode, "verdict": RIGHT, "said": ""}
                for release in releases_in(spans, measured["releases"]):
                    yield _versions(measured, release) | right
    for fault in content["faults"]:
        wrong = {"strategy": fault["strategy"], "verdict": fault["verdict"], "said": _fault_in_words(fault)}
        for release in releases_in(fault["releases"], by_library[fault["software"], fault.get("torch", "")]):
            for mode in fault["modes"]:
                yield _versions(fault, release) | wrong | {"mode": mode}


def _versions(of: Mapping[str, Any], release: str) -> dict[str, str]:
    if of["software"] == "torch":
        return {"release": "", "torch": release}
    return {"release": release, "torch": of["torch"]}


def _fault_in_words(fault: Mapping[str, Any]) -> str:
    if fault["verdict"] != WRONG:
        with_torch = f" with torch {fault['torch']}" if "torch" in fault else ""
        return f"{fault['verdict']} there{with_torch}: {fault.get('sentence', '')}"
    other = "one process's" if fault["strategy"] == "ddp" else "DDP's"
    size = size_in_words(fault.get("off_by"))
    found = f"its {fault['quantity']} differs from {other} from iteration {fault['iteration']} on: {size}"
    return f"{found} (docs/generated/ledger.md)"


def look_up(
    release: str,
    strategy: str,
    *,
    precision: str,
    micro_batches: int,
    offload: bool = False,
    resumes: bool = False,
    path: Path = VERDICTS,
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
    except (OSError, ValueError) as error:
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


def look_up_costs(
    release: str, strategy: str, *, precision: str, micro_batches: int, offload: bool = False, path: Path = VERDICTS
) -> list[Increase]:
    """What an iteration costs more in this release of DeepSpeed, in the way of training that a run is in.

    What was counted in fp32 alone speaks for 16 bits: the same operators and collectives run there.
    """
    try:
        content = json.loads(path.read_bytes())
        modes = [
            mode
            for mode in content["modes"]
            if mode["launchers"]
            and (mode["micro_batches"] > 1) == (micro_batches > 1)
            and mode["offload"] == offload
            and not mode["resumes"]
        ]
        counted = {name for cost in content["costs"] for name in cost["modes"]}
        own = {mode["name"] for mode in modes if mode["precision"] == precision} & counted
        names = own or {mode["name"] for mode in modes if mode["precision"] == "fp32"}
        costs = [
            cost for cost in content["costs"] if cost["strategy"] == strategy and names.intersection(cost["modes"])
        ]
        return [increase for increase in map(Increase.of, costs) if increase.holds_in(release)]
    except (OSError, ValueError, LookupError, TypeError):
        return []  # look_up says that the file cannot be read


def look_up_torch(
    release: str, strategy: str, *, precision: str, resumes: bool = False, path: Path = VERDICTS
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
    return LedgerAnswer(worst["verdict"], worst["said"])


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
