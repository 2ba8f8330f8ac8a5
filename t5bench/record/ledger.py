"""What the ledger says of a release of DeepSpeed or PyTorch, from the few kilobytes of wrong_releases.json beside this.

packages/ledger trains the cells and writes the file (its gate.py). It holds the answers: for each way in which a
launcher trains, which releases are not right. A release that was never tried is nobody's fault: the answer says so.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VERDICTS = Path(__file__).with_name("wrong_releases.json")
FORMAT = "t5bench-wrong-releases-1"
RIGHT = "right"
WRONG = "wrong"
UNKNOWN = "not measured"
NAMES = {"deepspeed": "DeepSpeed", "torch": "torch"}


@dataclass(frozen=True)
class LedgerAnswer:
    """What the ledger says of a run."""

    verdict: str
    """right, wrong, does not run, hangs, not measured, or right in fp32 alone."""
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


def run_of(*, several_micro_batches: bool, offload: bool, resumes: bool) -> int:
    """The place of such a run's answer among the eight of a strategy and a precision."""
    return 4 * several_micro_batches + 2 * offload + resumes


def look_up(
    library: str,
    release: str,
    strategy: str,
    *,
    precision: str,
    micro_batches: int = 1,
    offload: bool = False,
    resumes: bool = False,
    path: Path = VERDICTS,
) -> LedgerAnswer:
    """What was found of a run under this release of deepspeed or torch.

    strategy: zero1, zero2, zero3, zero3_offload, deepspeed-pipeline or one that needs PyTorch alone. precision: fp32,
    bf16 or fp16. offload: of the optimizer, by another strategy than zero3_offload. A release that was not tried,
    between two that train the strategy wrong, counts as wrong.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"{path} has the format '{content['format']}', not '{FORMAT}'")
        runs = content[library]["runs"].get(strategy, {}).get(precision)
        number = run_of(several_micro_batches=micro_batches > 1, offload=offload, resumes=resumes)
        usual, exceptions = content["answers"][runs[number]] if runs else (UNKNOWN, [])
        found = {version_of(each): LedgerAnswer(usual) for each in content[library]["tried"].split()}
        for verdict, releases, said in (content["exceptions"][each] for each in exceptions):
            found |= {version_of(each): LedgerAnswer(verdict, said) for each in releases.split()}
        return _answer(f"{NAMES[library]} {release}", version_of(release), found)
    except (OSError, LookupError, TypeError, AttributeError) as error:
        return LedgerAnswer(UNKNOWN, f"the ledger cannot be read: {error}")
    except ValueError as error:
        return LedgerAnswer(UNKNOWN, f"the ledger does not know {NAMES[library]} {release}: {error}")


def _answer(name: str, version: tuple[int, ...], found: Mapping[tuple[int, ...], LedgerAnswer]) -> LedgerAnswer:
    if version in found:
        return found[version]
    older = max((other for other in found if other < version and found[other].verdict != UNKNOWN), default=None)
    newer = min((other for other in found if other > version and found[other].verdict != UNKNOWN), default=None)
    if older and newer and found[older].verdict == found[newer].verdict == WRONG:
        ends = " and ".join(".".join(map(str, end)) for end in (older, newer))
        return LedgerAnswer(WRONG, f"{name} was not tried; the nearest releases that were, {ends}, train it wrong")
    return LedgerAnswer(UNKNOWN, f"{name} was not tried")
