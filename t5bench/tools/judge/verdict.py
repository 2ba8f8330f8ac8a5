"""Whether two trainings are the same, by their logs: equal, different or not shown; and what a difference is like.

The bounds are those of the parity gate (docs/parity.md), measured on correct runs. A log that was rounded is given the
rounding besides.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from t5bench import Problem
from t5bench.compare.parity import TOLERANCE, blind_spots, other_training, relative_difference
from t5bench.compare.sensitivity import Tolerance
from t5bench.compare.traces import ranks_in_words
from t5bench.tools.judge.audits import of_the_ranks, ranks_apart
from t5bench.tools.judge.curves import Curves, resolution

EQUAL = "equal"
DIFFERENT = "different"
NOT_SHOWN = "not shown"
LEAST_STEPS = 3  # the first shows gradients, the second an update, the third the optimizer's memory
LEAST_MOVE = 100  # a loss that moves by fewer bounds hides a mistake in what moves it
COARSE = 10  # rounding by so many bounds hides what the bound would show
MOST_COPIES = 4096  # micro-batches or processes that a factor may come from
SAME_FACTOR = 2e-3  # relative: a factor is recognized if it is so near
DRIFT = 10  # a difference that begins so far below its largest, and so near the bound, has grown


@dataclass(frozen=True)
class Difference:
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


@dataclass(frozen=True)
class Verdict:
    verdict: str
    """One of EQUAL, DIFFERENT and NOT_SHOWN."""
    precision: str
    bounds: Tolerance
    steps: int
    """Compared."""
    differences: list[Difference] = field(default_factory=list)
    likely: str = ""
    """What the difference is like, with the reason."""
    hidden: list[str] = field(default_factory=list)
    """Why an agreement might hide a mistake."""
    notes: list[str] = field(default_factory=list)


def verdict(first: Curves, second: Curves, precision: str) -> Verdict:
    """Raises Problem where the two logs cannot be compared."""
    steps = sorted(first.loss.keys() & second.loss.keys())
    if not steps:
        spans = " and ".join(f"{min(one.loss)} to {max(one.loss)}" for one in (first, second))
        remedy = "Log the same steps, or name their column with --step"
        raise Problem(f"the logs share no step: they have {spans}", remedy)
    _check_intervals(first, second)
    bounds = TOLERANCE[precision]
    of_loss = _difference("loss", first.loss, second.loss, bounds.loss)
    of_norm = _difference("gradient norm", first.norm, second.norm, bounds.norm)
    differences = [found for found in (of_loss, of_norm) if found]
    notes = _notes(first, second, steps)
    one_rank = _of_one_rank(first, second, differences)
    if differences or one_rank:
        likely = one_rank or _likely(first, second, differences)
        return Verdict(DIFFERENT, precision, bounds, len(steps), differences, likely, notes=notes)
    hidden = _hidden(first, second, steps, bounds)
    return Verdict(NOT_SHOWN if hidden else EQUAL, precision, bounds, len(steps), hidden=hidden, notes=notes)


def _check_intervals(first: Curves, second: Curves) -> None:
    """A trainer that logs every tenth step usually logs the mean of ten."""
    if first.interval != second.interval:
        every = f"one log has a line every {first.interval} steps, the other every {second.interval}"
        remedy = "Log the same interval in both, best every step"
        raise Problem(f"{every}, and a line may be the mean of its interval", remedy)


def _difference(what: str, first: Mapping[int, float], second: Mapping[int, float], bound: float) -> Difference | None:
    rounded = resolution(first) + resolution(second)
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
    return Difference(what, step, first[step], second[step], by_step[worst], worst, bound)


def _notes(first: Curves, second: Curves, steps: list[int]) -> list[str]:
    notes = []
    alone = sorted(first.loss.keys() ^ second.loss.keys())
    if alone:
        notes.append(f"{len(alone)} steps are in one log alone, the first of them step {alone[0]}")
    if first.loss == second.loss and first.norm == second.norm:
        notes.append("both logs have the same numbers to the last digit")
    if first.run and second.run:
        for name, (ours, theirs) in other_training(first.run, second.run).items():
            notes.append(f"their settings differ: {name} is {ours} and {theirs}")
    if len(steps) > 1 and steps[0] > first.interval:
        notes.append(f"the first step that both have is {steps[0]}: what began before it looks as if it began there")
    return notes


# ---- what an agreement hides -----------------------------------------------------------------------------------------

DEAD = "a dead model, a learning rate near 0 and a wrong update all look like this"
NO_NORM = (
    "Adam divides a wrong scale of the gradients away, so the loss alone cannot show it. Log the norm before clipping"
)
ZERO_NORM = "every gradient norm is 0: nothing was trained, or it was read after the gradients were cleared"
CLIPPED_NORM = "it was probably logged after clipping, which hides its scale"


def _hidden(first: Curves, second: Curves, steps: list[int], bounds: Tolerance) -> list[str]:
    losses = [second.loss[step] for step in steps]
    hidden = []
    if len(steps) < LEAST_STEPS:
        hidden.append(f"steps that both logs have: {len(steps)}. The optimizer shows from the third on")
    largest = max(abs(loss) for loss in losses)
    move = (max(losses) - min(losses)) / largest if largest else 0.0
    if len(steps) > 1 and move < LEAST_MOVE * bounds.loss:
        hidden.append(f"the loss moves by only {move:.1e}: {DEAD}")
    hidden += _hidden_by_norms(first, second, bounds)
    hidden += _hidden_by_rounding("loss", first.loss, second.loss, bounds.loss)
    hidden += _hidden_by_rounding("gradient norm", first.norm, second.norm, bounds.norm)
    if first.run and second.run:
        hidden += blind_spots(second.run, [])
    return hidden


def _hidden_by_norms(first: Curves, second: Curves, bounds: Tolerance) -> list[str]:
    norms = [value for step, value in second.norm.items() if step in first.norm]
    if not norms:
        without = " and ".join(one.name for one in (first, second) if not one.norm) or "the steps that both logs have"
        return [f"there is no gradient norm in {without}: {NO_NORM}"]
    if not any(norms):
        return [ZERO_NORM]
    if len(norms) > 1 and max(norms) - min(norms) <= bounds.norm * max(norms):
        return [f"every gradient norm is {norms[0]:.6g}: {CLIPPED_NORM}"]
    return []


def _hidden_by_rounding(what: str, first: Mapping[int, float], second: Mapping[int, float], bound: float) -> list[str]:
    rounded = resolution(first) + resolution(second)
    smallest = min((abs(value) for value in second.values() if value), default=0.0)
    if not smallest or rounded <= COARSE * bound * smallest:
        return []
    unseen = f"differences below {rounded / smallest:.0e} cannot be seen (bound: {bound:.0e})"
    return [f"the {what} is logged with few digits, so {unseen}. Log more digits"]


# ---- what a difference is like ---------------------------------------------------------------------------------------

SUM_OF_LOSSES = "one log has the sum, the other the mean, over micro-batches, processes or tokens"
LOSS_ALONE = "the loss alone: it is averaged or reported in another way, for the gradient norms agree"
FORWARD = "from the first step on: other weights, other data, or another forward pass (dropout, masks, precision)"
SUM_OF_GRADIENTS = "gradients are summed in one training and averaged in the other, over micro-batches or processes"
NOT_REDUCED = "the norm adds up several processes' own gradients, or gradients are not reduced over them"
NORM_ALONE = (
    "the norm alone, for the losses agree: it counts some parameters twice or not at all, as replicated ones can be"
)
GRADIENTS = "the gradients from the first step on: some are not reduced, or not over the right processes"
GROWN = "rounding that grows, another order of the data, dropout, or a lower precision"
COPIES = "{who} has other parameters than the rest {where}: an update, a broadcast or a reduction left it out"
UPDATE = (
    "the update before it (learning rate, warm-up, decay, clipping, the optimizer's state), or the data from there on"
)


def _likely(first: Curves, second: Curves, differences: list[Difference]) -> str:
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
        return _of_gradients(norm, loss)
    if norm and not loss:
        return NORM_ALONE
    found = min(differences, key=lambda difference: difference.step)
    begins = relative_difference(found.first, found.second)
    if found.largest > DRIFT * begins and begins < DRIFT * found.bound and found.step > start + 1:
        return f"a drift, which passes the bound at step {found.step}: {GROWN}"
    return f"agreement until step {found.step}: {UPDATE}"


def _of_one_rank(first: Curves, second: Curves, differences: list[Difference]) -> str:
    """What the audits say of copies that are not the same on all ranks; "" if they are, or nothing is known."""
    for own, other in ((first, second), (second, first)):
        apart = own.audit.apart() if own.audit else None
        if not own.audit or not apart:
            continue
        ranks = of_the_ranks(apart, other.audit, own.audit) if other.audit else apart.ranks
        few = ranks_in_words(ranks)
        who = f"{few} of {own.name}" if len(ranks) < len(own.audit.lines[apart.step]) else f"the ranks of {own.name}"
        where = f"at step {apart.step}, first in {apart.modules[0]} ({len(apart.modules)} of {apart.of} modules)"
        kind = "one rank" if len(ranks) == 1 else "some ranks"
        return f"{kind}: {COPIES.format(who=who, where=where)}"
    loss = differences[0] if differences and differences[0].what == "loss" else None
    if first.audit and second.audit and loss and all(loss.step <= one.step for one in differences):
        ranks = ranks_apart(first.audit, second.audit, loss.step, loss.bound)
        if ranks:
            kind = "one rank" if len(ranks) == 1 else "some ranks"
            return f"{kind}: {ranks_in_words(ranks)} has another loss at step {loss.step}, and the others agree"
    return ""


def _of_gradients(norm: Difference, loss: Difference | None) -> str:
    """Of norms that differ from the first step on, while the loss agrees there."""
    later = f", and the loss differs from step {loss.step} on" if loss else ", and the losses agree, as Adam makes them"
    factor = _factor(norm)
    if factor:
        return f"the gradient norm is {factor} at the first step{later}: {SUM_OF_GRADIENTS}"
    root = _root_factor(norm)
    if root:
        return f"the gradient norm is {root} at the first step{later}: {NOT_REDUCED}"
    return GRADIENTS if loss else NORM_ALONE


def _not_finite(first: Curves, second: Curves, difference: Difference) -> str:
    step = difference.largest_step
    names = [one.name for one in (first, second) if not math.isfinite(_value(one, difference.what, step))]
    return f"the {difference.what} of {' and '.join(names)} is not a number at step {step}"


def _value(curves: Curves, what: str, step: int) -> float:
    return (curves.loss if what == "loss" else curves.norm)[step]


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
