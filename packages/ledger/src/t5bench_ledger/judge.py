"""The verdict on a cell, by the bounds of the project's parity check."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from t5bench.compare.parity import TOLERANCE, difference, relative_difference

RIGHT = "right"
WRONG = "wrong"
DOES_NOT_RUN = "does not run"
HANGS = "hangs"
# The last line of a Python traceback.
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)\b.*|error: .*)$", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What a process says because another one failed.
_BY_PEER = re.compile(r"connection|gloo|peer|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Curves:
    """What a run logged, by iteration."""

    loss: Mapping[int, float]
    norm: Mapping[int, float]  # empty where the run logs no gradient norm


@dataclass(frozen=True)
class Verdict:
    """The verdict on a cell. Of a wrong one: the first iteration beyond the bound, in which quantity, and the largest
    difference of that quantity, in units of the bound."""

    verdict: str
    iteration: int | None = None
    quantity: str = ""
    times: float | None = None
    sentence: str = ""


def judge(curves: Curves, reference: Curves, precision: str) -> Verdict:
    """Compares a run that ended well with the baseline's."""
    if curves.loss.keys() != reference.loss.keys():
        logged = f"it logged {len(curves.loss)} of {len(reference.loss)} iterations"
        return Verdict(DOES_NOT_RUN, sentence=logged)
    allowed = TOLERANCE[precision]
    beyond: list[tuple[int, str, float]] = []
    for quantity, own, its, bound in (
        ("gradient norm", curves.norm, reference.norm, allowed.norm),
        ("loss", curves.loss, reference.loss, allowed.loss),
    ):
        measured = difference(own, its, bound)
        if measured and measured.first_beyond is not None:
            beyond.append((measured.first_beyond, quantity, measured.largest / bound))
    if not beyond:
        return Verdict(RIGHT, times=largest_share(curves, reference, precision))
    iteration, quantity, times = min(beyond)
    return Verdict(WRONG, iteration, quantity, None if math.isnan(times) else times)


def largest_share(curves: Curves, reference: Curves, precision: str) -> float:
    """The largest difference of a right run, in units of its bound."""
    allowed = TOLERANCE[precision]
    shares = [0.0]
    for own, its, bound in (
        (curves.norm, reference.norm, allowed.norm),
        (curves.loss, reference.loss, allowed.loss),
    ):
        shares += [relative_difference(own[n], its[n]) / bound for n in own.keys() & its.keys()]
    return max(shares)


def why(logs: list[str]) -> str:
    """The sentence with which a run failed: an error that no other process caused, if there is one."""
    errors = [match[1].strip() for log in logs for match in _ERROR.finditer(log)]
    first_cause = [error for error in errors if not _BY_PEER.search(error)]
    chosen = (first_cause or errors or ["it ended without an error message"])[-1]
    return _COLOUR.sub("", chosen)[:300]
