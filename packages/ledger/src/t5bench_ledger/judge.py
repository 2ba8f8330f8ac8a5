"""The verdict on a cell, by the bounds of the project's parity check."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from training_comparison.curves import TOLERANCE, Curves, compare

RIGHT = "right"
WRONG = "wrong"
DOES_NOT_RUN = "does not run"
HANGS = "hangs"
# What a release does that differs from the reference, but trains no other model, or one that its documentation
# promises. A program that can tell says so by curves in which a release that does this alone is right.
ROUNDS = "rounds more than asked"
BY_ITS_SHARE = "weighs a short last window by its share"
LOGS = "logs another loss"
NOTED = (ROUNDS, BY_ITS_SHARE, LOGS)
# The last line of a Python traceback.
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)\b.*|error: .*)$", re.MULTILINE)
# Its escape may have been made visible.
_COLOUR = re.compile(r"(?:\x1b|\\x1b)\[[0-9;]*m")
_PORT = re.compile(r"(?<=\[127\.0\.0\.1\]):\d+")
# Of a path, where this machine has it; of an address, nothing.
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^\s/'\"]+/)+")
# What a process says because another one failed.
_BY_PEER = re.compile(r"connection|gloo|peer|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class CellVerdict:
    """The verdict on a cell. Of a wrong one: the first iteration beyond the bound, in which quantity, and the largest
    difference of that quantity, in units of the bound."""

    verdict: str
    iteration: int | None = None
    quantity: str = ""
    times: float | None = None
    sentence: str = ""


def judge(curves: Curves, reference: Curves, precision: str) -> CellVerdict:
    """Compares a run that ended well with the baseline's."""
    if curves.loss.keys() != reference.loss.keys():
        logged = f"it logged {len(curves.loss)} of {len(reference.loss)} iterations"
        return CellVerdict(DOES_NOT_RUN, sentence=logged)
    compared = compare(curves, reference, TOLERANCE[precision])
    if not compared.beyond:
        return CellVerdict(RIGHT, times=compared.largest_share)
    first = min(compared.beyond, key=lambda found: (found.step, found.what))
    # The first loss is that of the initial weights: where it differs and no gradient ever does, the log alone is wrong.
    has_right_norms = curves.norm.keys() == reference.loss.keys() and not (compared.norm and compared.norm.is_beyond)
    verdict = LOGS if has_right_norms and first.step == min(reference.loss) else WRONG
    return CellVerdict(verdict, first.step, first.what, None if math.isnan(first.share) else first.share)


def noted(verdict: CellVerdict, otherwise: Mapping[str, tuple[Curves, Curves]], precision: str) -> CellVerdict:
    """The verdict, or what a wrong run does that explains it: by name, curves and their references that are alike
    if it does this alone."""
    if verdict.verdict != WRONG:
        return verdict
    for name, (curves, reference) in otherwise.items():
        found = judge(curves, reference, precision)
        if found.verdict == RIGHT and found.times is not None:
            allowed = TOLERANCE[precision]
            share = 100 * found.times * max(allowed.norm, allowed.loss)
            sentence = f"at most {share:.2g} % is left of it where the test does not magnify" if name == ROUNDS else ""
            return replace(verdict, verdict=name, sentence=sentence)
    return verdict


def why(logs: list[str]) -> str:
    """The sentence with which a run failed: an error that no other process caused, if there is one."""
    errors = [match[1].strip() for log in logs for match in _ERROR.finditer(log)]
    first_cause = [error for error in errors if not is_by_peer(error)]
    chosen = (first_cause or errors or ["it ended without an error message"])[-1]
    return in_brief(chosen)


def is_by_peer(error: str) -> bool:
    """Whether another process caused it."""
    return bool(_BY_PEER.search(error))


def in_brief(error: str) -> str:
    """An error without what is another's in the next run: colours, folders and ports."""
    for passing in (_COLOUR, _FOLDERS, _PORT):
        error = passing.sub("", error)
    return error[:300]
