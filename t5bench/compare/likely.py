"""How two trainings' curves differ, and what such a difference is like, in sentences: for parity and for judge."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

MOST_COPIES = 4096  # micro-batches or processes that a factor may come from
SAME_FACTOR = 2e-3  # relative: a factor is recognized if it is so near
DRIFT = 10  # a difference that begins so far below its largest, and so near the bound, has grown


class Logged(Protocol):
    """A training's curves, by step."""

    @property
    def name(self) -> str: ...
    @property
    def loss(self) -> Mapping[int, float]: ...
    @property
    def norm(self) -> Mapping[int, float]: ...


@dataclass(frozen=True)
class Differing:
    """Where a quantity of two logs differs by more than the bound."""

    what: str
    """loss, or gradient norm."""
    step: int
    """The first such step."""
    first: float
    """The value of the first log there."""
    second: float
    largest: float
    """The largest relative difference of all steps; nan if one value is not finite."""
    largest_step: int
    bound: float
    """Relative; what the logs' rounding adds at this step is not in it."""


def relative_difference(value: float, reference: float) -> float:
    """|value - reference| / |reference|; 0 if they are equal, nan if one is not finite."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.nan
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def differing(
    what: str, first: Mapping[int, float], second: Mapping[int, float], bound: float, rounded: float = 0.0
) -> Differing | None:
    """Where two curves differ by more than the bound; None where they do not. rounded: what rounding may add."""
    by_step: dict[int, float] = {}
    beyond: list[int] = []
    for step in sorted(first.keys() & second.keys()):
        theirs = second[step]
        by_step[step] = relative_difference(first[step], theirs)
        by_rounding = rounded / abs(theirs) if theirs and math.isfinite(theirs) else 0.0
        if not by_step[step] <= bound + by_rounding:
            beyond.append(step)
    if not beyond:
        return None
    worst = max(beyond, key=lambda step: (math.isnan(by_step[step]), by_step[step]))
    step = beyond[0]
    return Differing(what, step, first[step], second[step], by_step[worst], worst, bound)


# ---- what a difference is like ---------------------------------------------------------------------------------------

SUM_OF_LOSSES = "one log has the sum, the other the mean, over micro-batches, processes or tokens"
LOSS_ALONE = "the loss alone: it is averaged or reported in another way, for the gradient norms agree"
FORWARD = (
    "from the first step on: other weights, other data, another mean over tokens or samples, or another forward pass"
    " (dropout, masks, precision)"
)
SUM_OF_GRADIENTS = "gradients are summed in one training and averaged in the other, over micro-batches or processes"
NOT_REDUCED = "the norm adds up several processes' own gradients, or gradients are not reduced over them"
NORM_ALONE = (
    "the norm alone, for the losses agree: it counts some parameters twice or not at all, as replicated ones can be,"
    " or gradients of some parameters have another scale, which Adam hides from the loss"
)
PARTS = (
    "gradients of some micro-batches, processes or parameters are missing from {smaller},"
    " or those of {larger} are not reduced over all processes"
)
LEFT_OVER = (
    "the norm alone, and not at once: gradients of earlier steps that were not zeroed, or parameters added later"
)
GROWN = "rounding that grows, another order of the data, dropout, or a lower precision"
UPDATE = (
    "the update before it (learning rate, warm-up, decay, clipping, the optimizer's state), or the data from there on"
)


def likely(first: Logged, second: Logged, differences: list[Differing]) -> str:
    """What differences are like, and why: one sentence."""
    by_name = {difference.what: difference for difference in differences}
    loss = by_name.get("loss")
    norm = by_name.get("gradient norm")
    start = min(first.loss.keys() & second.loss.keys())
    for difference in differences:
        if math.isnan(difference.largest):
            return _not_finite(first, second, difference)
    if loss and loss.step == start:
        factor = _factor(loss)
        if factor:
            return f"the loss is {factor} at the first step: {SUM_OF_LOSSES}"
        return LOSS_ALONE if first.norm and second.norm and not norm else FORWARD
    if norm and norm.step == start:
        return _of_gradients(first, second, norm, loss)
    if norm and not loss:
        return LEFT_OVER
    found = min(differences, key=lambda difference: difference.step)
    begins = relative_difference(found.first, found.second)
    grows = found.largest > DRIFT * begins and begins < DRIFT * found.bound and found.step > start + 1
    if grows and _difference_before(first, second, found) > begins / DRIFT:
        return f"a drift, which passes the bound at step {found.step}: {GROWN}"
    return f"agreement until step {found.step}: {UPDATE}"


def _difference_before(first: Logged, second: Logged, found: Differing) -> float:
    """Relative, at the last common step before the first that differs. Rounding grows from there; a mistake jumps."""
    theirs = first.loss if found.what == "loss" else first.norm
    others = second.loss if found.what == "loss" else second.norm
    step = max(step for step in theirs.keys() & others.keys() if step < found.step)
    return relative_difference(theirs[step], others[step])


def _of_gradients(first: Logged, second: Logged, norm: Differing, loss: Differing | None) -> str:
    """Of norms that differ from the first step on, while the loss agrees there."""
    later = f", and the loss differs from step {loss.step} on" if loss else ", and the losses agree, as Adam makes them"
    factor = _factor(norm)
    if factor:
        return f"the gradient norm is {factor} at the first step{later}: {SUM_OF_GRADIENTS}"
    root = _root_factor(norm)
    if root:
        return f"the gradient norm is {root} at the first step{later}: {NOT_REDUCED}"
    if not loss:
        return NORM_ALONE
    smaller, larger = (first, second) if norm.first < norm.second else (second, first)
    return (
        f"the gradient norm differs at the first step{later}: {PARTS.format(smaller=smaller.name, larger=larger.name)}"
    )


def _not_finite(first: Logged, second: Logged, difference: Differing) -> str:
    step = difference.largest_step
    names = [one.name for one in (first, second) if not math.isfinite(_value(one, difference.what, step))]
    return f"the {difference.what} of {' and '.join(names)} is not a number at step {step}"


def _value(curves: Logged, what: str, step: int) -> float:
    return (curves.loss if what == "loss" else curves.norm)[step]


def _factor(difference: Differing) -> str:
    """N or 1/N in words; "" if the ratio of the two values is neither."""
    return _in_words(difference, lambda ratio: ratio, "{} times the second's", "1/{} of the second's")


def _root_factor(difference: Differing) -> str:
    return _in_words(difference, lambda ratio: ratio**2, "sqrt({}) times the second's", "1/sqrt({}) of the second's")


def _in_words(difference: Differing, function: Callable[[float], float], times: str, part: str) -> str:
    if not (difference.first and difference.second):
        return ""
    ratio = function(difference.first / difference.second)
    for value, words in ((ratio, times), (1 / ratio, part)):
        whole = round(value)
        if 2 <= whole <= MOST_COPIES and abs(value - whole) <= SAME_FACTOR * whole:
            return words.format(whole)
    return ""
