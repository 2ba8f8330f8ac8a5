"""What a difference of two trainings' curves is like, in a sentence."""

import math
from collections.abc import Callable, Mapping, Sequence

from training_comparison.curves import (
    LOSS,
    MEASURED_STEPS,
    NORM,
    ComparedCurves,
    Curves,
    Difference,
    relative_difference,
)

MOST_COPIES = 4096  # micro-batches or processes that a factor may come from
SAME_FACTOR = 2e-3  # relative: a factor is recognized if it is so near
DRIFT = 10  # a difference that begins so far below its largest, and so near the bound, has grown
# A gradient norm that differs by less, and not at once, differs as rounding to 16 bits makes it; what earlier steps
# left in the gradients weighs more.
OF_16_BITS = 0.03

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
    " or those of {larger} are not reduced over all processes; or the norm itself is wrong, and clipping uses it"
)
WRONG_NORM = (
    "the norm itself is wrong, and clipping uses it: for some parameters or processes it lacks a sum or has one twice"
)
ANOTHER_SCALE = "all gradients have another scale, which Adam hides until they are clipped"
LEFT_OVER = (
    "the norm alone, and not at once: gradients of earlier steps that were not zeroed, or parameters added later"
)
LOWER_PRECISION = (
    "the norm alone, a little, and not at once: parameters, gradients or the optimizer's state in a lower precision,"
    " such as bf16"
)
GROWN = "rounding that grows, another order of the data, dropout, or a lower precision"
UPDATE = (
    "the update before it (learning rate, warm-up, decay, clipping, the optimizer's state), or the data from there on"
)


def likely(comparison: ComparedCurves, clip: float = 0.0) -> str:
    """What differences are like, and why: one sentence; "" if nothing is beyond its bound.

    clip: the norm to which both trainings clip their gradients; 0 if it is not known.
    """
    loss, norm = comparison.loss, comparison.norm
    if loss and not loss.is_beyond:
        loss = None
    if norm and not norm.is_beyond:
        norm = None
    start = comparison.start
    for found in comparison.beyond:
        if math.isnan(found.largest):
            return _not_finite(comparison, found)
    if loss and loss.step == start:
        factor = _factor(loss)
        if factor:
            return f"the loss is {factor} at the first step: {SUM_OF_LOSSES}"
        return LOSS_ALONE if comparison.norm and not norm else FORWARD
    if norm and norm.step == start:
        return _of_gradients(comparison, norm, loss, clip)
    if norm and not loss:
        begins = relative_difference(norm.first, norm.second)
        return LOWER_PRECISION if begins < OF_16_BITS else LEFT_OVER
    if not comparison.beyond:
        return ""
    first = _first(comparison)
    begins = relative_difference(first.first, first.second)
    grows = first.largest > DRIFT * begins and _begins_as_a_drift(comparison, first)
    if grows or has_drifted(comparison):
        return f"a drift, which passes the bound at step {first.step}: {GROWN}"
    return f"agreement until step {first.step}: {UPDATE}"


def has_drifted(comparison: ComparedCurves) -> bool:
    """Whether the curves agree for as long as the bounds were measured, and then grow apart as rounding does."""
    if not comparison.beyond:
        return False
    first = _first(comparison)
    is_finite = all(math.isfinite(found.largest) for found in comparison.beyond)
    is_late = (first.step or 0) > comparison.start + MEASURED_STEPS - 1
    return is_finite and is_late and _begins_as_a_drift(comparison, first)


def _first(comparison: ComparedCurves) -> Difference:
    return min(comparison.beyond, key=lambda found: found.step or 0)


def _begins_as_a_drift(comparison: ComparedCurves, first: Difference) -> bool:
    """Rounding grows from step to step; a mistake jumps."""
    begins = relative_difference(first.first, first.second)
    is_near_the_bound = begins < DRIFT * first.bound and (first.step or 0) > comparison.start + 1
    return is_near_the_bound and _difference_before(comparison, first) > begins / DRIFT


def _difference_before(comparison: ComparedCurves, found: Difference) -> float:
    """Relative, at the last common step before the first that differs."""
    ours = _curve(comparison.first, found.what)
    theirs = _curve(comparison.second, found.what)
    step = max((step for step in ours.keys() & theirs.keys() if step < (found.step or 0)), default=None)
    return 0.0 if step is None else relative_difference(ours[step], theirs[step])


def _of_gradients(comparison: ComparedCurves, norm: Difference, loss: Difference | None, clip: float) -> str:
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
    if _follows_clipping(comparison, loss, clip):
        reason = ANOTHER_SCALE if _ratio_is_constant(comparison, loss) else WRONG_NORM
        return f"the gradient norm differs at the first step{later}, after the first that was clipped: {reason}"
    smaller, larger = comparison.first.name, comparison.second.name
    if norm.first > norm.second:
        smaller, larger = larger, smaller
    return f"the gradient norm differs at the first step{later}: {PARTS.format(smaller=smaller, larger=larger)}"


def _follows_clipping(comparison: ComparedCurves, loss: Difference, clip: float) -> bool:
    """Whether updates agreed until the first that was clipped: then the gradients were right, and not their norm."""
    if not clip:
        return False
    ours, theirs = comparison.first.norm, comparison.second.norm
    clipped = [step for step in sorted(ours.keys() & theirs.keys()) if max(ours[step], theirs[step]) > clip]
    return bool(clipped) and comparison.start < clipped[0] < (loss.step or 0)


def _ratio_is_constant(comparison: ComparedCurves, loss: Difference) -> bool:
    """Whether the norms have one ratio until the losses differ, as a wrong scale of all gradients gives them."""
    ours, theirs = comparison.first.norm, comparison.second.norm
    steps = [step for step in sorted(ours.keys() & theirs.keys()) if step < (loss.step or 0) and theirs[step]]
    ratios = [ours[step] / theirs[step] for step in steps]
    return max(ratios) - min(ratios) <= DRIFT * comparison.bounds.norm * max(ratios)


def _not_finite(comparison: ComparedCurves, found: Difference) -> str:
    step = found.largest_step
    both = (comparison.first, comparison.second)
    names = [one.name for one in both if not math.isfinite(_curve(one, found.what)[step])]
    return f"the {found.what} of {' and '.join(names)} is not a number at step {step}"


def _curve(curves: Curves, what: str) -> Mapping[int, float]:
    return {LOSS: curves.loss, NORM: curves.norm}[what]


def _factor(difference: Difference) -> str:
    """N or 1/N in words; "" if the ratio of the two values is neither."""
    return _in_words(difference, lambda ratio: ratio, "{} times the second's", "1/{} of the second's")


def _root_factor(difference: Difference) -> str:
    return _in_words(difference, lambda ratio: ratio**2, "sqrt({}) times the second's", "1/sqrt({}) of the second's")


def _in_words(difference: Difference, function: Callable[[float], float], times: str, part: str) -> str:
    if not (difference.first and difference.second):
        return ""
    ratio = function(difference.first / difference.second)
    for value, words in ((ratio, times), (1 / ratio, part)):
        whole = round(value)
        if 2 <= whole <= MOST_COPIES and abs(value - whole) <= SAME_FACTOR * whole:
            return words.format(whole)
    return ""


def ranks_in_words(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
