"""Whether two trainings are the same, by their logs: equal, different or not shown; and what a difference is like.

The bounds are those of training_comparison, measured on correct runs. A log that was rounded is given the rounding
besides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from t5bench_judge.logs import Log, resolution
from training_comparison.copies import copies_apart
from training_comparison.curves import (
    LOSS,
    TOLERANCE,
    ComparedCurves,
    Curves,
    Difference,
    Rounding,
    Tolerance,
    compare,
)
from training_comparison.first_difference import ranks_by_loss, rounded_to_bf16
from training_comparison.likely import ranks_in_words
from training_comparison.problem import Problem
from training_comparison.verdict import DIFFERENT, BlindSpot, Verdict, hidden_by_recipe, verdict_on

LEAST_STEPS = 3  # the first shows gradients, the second an update, the third the optimizer's memory
LEAST_MOVE = 100  # a loss that moves by fewer bounds hides a mistake in what moves it
COARSE = 10  # rounding by so many bounds hides what the bound would show


@dataclass(frozen=True)
class Answer:
    """The verdict on two logs, and what was compared."""

    found: Verdict
    precision: str
    bounds: Tolerance
    steps: int
    """Compared."""
    notes: Sequence[str] = field(default_factory=list)


def answer(first: Log, second: Log, precision: str) -> Answer:
    """Raises Problem where the two logs cannot be compared."""
    bounds = TOLERANCE[precision]
    pair = aligned(first, second, bounds)
    steps = sorted(pair.ours.loss.keys() & pair.theirs.loss.keys())
    compared = compare(pair.ours, pair.theirs, bounds, rounding(first, second))
    notes = [*pair.notes, *_notes(first, second, pair, steps)]
    of_traces = _of_one_rank(first, second, compared) or _of_rounded_weights(first, second)
    if of_traces:
        found = Verdict(DIFFERENT, compared.beyond, of_traces)
    else:
        clip = first.clip if first.clip == second.clip else 0.0
        found = verdict_on(compared, _hidden(first, second, compared, steps), clip)
        like = equal_if_shifted(first, second, pair, bounds) if found.verdict == DIFFERENT else ""
        found = replace(found, likely=like or found.likely)
    return Answer(found, precision, bounds, len(steps), notes)


def rounding(first: Log, second: Log) -> Rounding:
    """How far the rounding of both logs may have moved their values together."""
    return Rounding(
        _of_both(resolution(first.curves.loss), resolution(second.curves.loss)),
        _of_both(resolution(first.curves.norm), resolution(second.curves.norm)),
    )


def _of_both(first: Callable[[float], float], second: Callable[[float], float]) -> Callable[[float], float]:
    return lambda value: first(value) + second(value)


# ---- which step of one log is which of the other -------------------------------------------------------------------


@dataclass(frozen=True)
class AlignedCurves:
    """Two logs' curves by the same steps."""

    ours: Curves
    theirs: Curves
    notes: Sequence[str] = ()


def aligned(first: Log, second: Log, bounds: Tolerance) -> AlignedCurves:
    """The curves by common steps, without what is not a number in both. Raises Problem."""
    notes: list[str] = []
    ours, theirs = first.curves, second.curves
    shift = _shift(first, second, bounds)
    if shift:
        ours = shifted(ours, shift)
        begins = f"{first.name} begins at step {min(first.curves.loss)}, {second.name} at {min(second.curves.loss)}"
        notes.append(f"compared as if shifted by one step, because {begins}: their lines agree in that order")
    if not ours.loss.keys() & theirs.loss.keys() and _agree_line_by_line(first, second, bounds):
        ours, theirs = by_line(ours), by_line(theirs)
        notes.append("compared line by line, because the logs count steps in other units: they agree in that order")
    if not ours.loss.keys() & theirs.loss.keys():
        spans = " and ".join(f"{min(one.curves.loss)} to {max(one.curves.loss)}" for one in (first, second))
        remedy = "Log the same steps, or name their column with --step"
        raise Problem(f"the logs share no step: they have {spans}", remedy)
    ours, theirs = _by_interval(replace(first, curves=ours), replace(second, curves=theirs), bounds, notes)
    for what in ("loss", "norm"):
        ours, theirs = _without_what_neither_knows(ours, theirs, what, notes)
    if not ours.loss.keys() & theirs.loss.keys():
        raise Problem("no loss of a common step is a number in both logs", "Log a training that has not diverged")
    return AlignedCurves(ours, theirs, notes)


def shifted(curves: Curves, by: int) -> Curves:
    loss = {step + by: value for step, value in curves.loss.items()}
    return replace(curves, loss=loss, norm={step + by: value for step, value in curves.norm.items()})


def _shift(first: Log, second: Log, bounds: Tolerance) -> int:
    """1 or -1 where one log counts steps from 0 and the other from 1, so that the same lines are one step apart."""
    by = min(second.curves.loss) - min(first.curves.loss)
    if abs(by) != 1 or first.interval != second.interval:
        return 0
    rounded = rounding(first, second)
    compared = compare(first.curves, second.curves, bounds, rounded)
    if compared.loss and not compared.beyond:
        return 0
    moved = compare(shifted(first.curves, by), second.curves, bounds, rounded)
    return by if moved.loss and moved.loss.step != moved.start else 0


def by_line(curves: Curves) -> Curves:
    """With the number of the line instead of the step."""
    line = {step: number for number, step in enumerate(sorted(curves.loss), 1)}
    norm = {line[step]: value for step, value in curves.norm.items() if step in line}
    return replace(curves, loss={line[step]: value for step, value in curves.loss.items()}, norm=norm)


def _agree_line_by_line(first: Log, second: Log, bounds: Tolerance) -> bool:
    """Whether two logs of one length have the same values, as where one counts samples and the other steps."""
    if first.interval == second.interval or len(first.curves.loss) < LEAST_STEPS:
        return False
    if len(first.curves.loss) != len(second.curves.loss):
        return False
    return not compare(by_line(first.curves), by_line(second.curves), bounds, rounding(first, second)).beyond


def equal_if_shifted(first: Log, second: Log, pair: AlignedCurves, bounds: Tolerance) -> str:
    """A sentence, if one log has at each step what the other has a step later; "" if not."""
    for by, later in ((1, second.name), (-1, first.name)):
        moved = compare(shifted(pair.ours, by), pair.theirs, bounds, rounding(first, second))
        steps = shifted(pair.ours, by).loss.keys() & pair.theirs.loss.keys()
        if len(steps) >= LEAST_STEPS and not moved.beyond:
            return f"equal if shifted by one step: {later} has each value a step later, so one of them lacks a step"
    return ""


def _by_interval(first: Log, second: Log, bounds: Tolerance, notes: list[str]) -> tuple[Curves, Curves]:
    """Where one log has fewer lines, a line may have the value of its step or the mean of its interval.

    Raises Problem where neither agrees, and the norms do not tell.
    """
    ours, theirs = first.curves, second.curves
    if first.interval == second.interval:
        return ours, theirs
    rounded = rounding(first, second)
    many = max(first.interval, second.interval)
    every = f"one log has a line every {first.interval} steps, the other every {second.interval}"
    compared = compare(ours, theirs, bounds, rounded)
    if not compared.beyond:
        notes.append(f"{every}: the steps that both have agree")
        return ours, theirs
    fine = first if first.interval < second.interval else second
    of_means = replace(fine.curves, loss=means(fine.curves.loss, many))
    pair = (of_means, theirs) if fine is first else (ours, of_means)
    if pair[0].loss.keys() & pair[1].loss.keys() and not compare(*pair, bounds, rounded).beyond:
        notes.append(f"{every}: the loss of a line is the mean of its {many} steps")
        return pair
    if compared.norm and compared.norm.is_beyond:
        return ours, theirs  # a norm is that of its step
    remedy = "Log the same interval in both, best every step"
    raise Problem(f"{every}, and a line is neither the value of its step nor the mean of its interval", remedy)


def means(curve: Mapping[int, float], length: int) -> dict[int, float]:
    """At each step, the mean of so many steps up to it, where all of them are there."""
    found = {}
    for step in curve:
        window = [curve[earlier] for earlier in range(step - length + 1, step + 1) if earlier in curve]
        if len(window) == length:
            found[step] = math.fsum(window) / length
    return found


def _without_what_neither_knows(ours: Curves, theirs: Curves, what: str, notes: list[str]) -> tuple[Curves, Curves]:
    """A step at which both have no number, such as a norm that a loss scaler skipped, is no difference."""
    own, other = getattr(ours, what), getattr(theirs, what)
    neither = [step for step in sorted(own.keys() & other.keys()) if math.isnan(own[step]) and math.isnan(other[step])]
    if not neither:
        return ours, theirs
    name = {"loss": "loss", "norm": "gradient norm"}[what]
    notes.append(f"neither log has a number as {name} at {steps_in_words(neither)}: left out")

    def rest(curve: Mapping[int, float]) -> dict[int, float]:
        return {step: value for step, value in curve.items() if step not in neither}

    return replace(ours, **{what: rest(own)}), replace(theirs, **{what: rest(other)})


def steps_in_words(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps, the first of them step {steps[0]}"


def _notes(first: Log, second: Log, pair: AlignedCurves, steps: list[int]) -> list[str]:
    notes = [*first.notes, *second.notes]
    alone = sorted(pair.ours.loss.keys() ^ pair.theirs.loss.keys())
    if alone:
        notes.append(f"{len(alone)} steps are in one log alone, the first of them step {alone[0]}")
    if first.curves.loss == second.curves.loss and first.curves.norm == second.curves.norm:
        notes.append("both logs have the same numbers to the last digit")
    for name in first.settings.keys() & second.settings.keys():
        ours, theirs = first.settings[name], second.settings[name]
        if ours != theirs:
            notes.append(f"their settings differ: {name} is {ours} and {theirs}")
    if len(steps) > 1 and steps[0] > max(first.interval, 1):
        notes.append(f"the first step that both have is {steps[0]}: what began before it looks as if it began there")
    return notes


# ---- what an agreement hides -----------------------------------------------------------------------------------------

DEAD = "a dead model, a learning rate near 0 and a wrong update all look like this. Raise the learning rate"
NO_NORM = (
    "Adam divides a wrong scale of the gradients away, so the loss alone cannot show it. Log the norm before clipping"
)
ZERO_NORM = "every gradient norm is 0: nothing was trained, or it was read after the gradients were cleared"
CLIPPED_NORM = "it was probably logged after clipping, which hides its scale. Log the norm before clipping"


def _hidden(first: Log, second: Log, compared: ComparedCurves, steps: list[int]) -> list[BlindSpot]:
    bounds = compared.bounds
    losses = [compared.second.loss[step] for step in steps]
    hidden = []
    if len(steps) < LEAST_STEPS:
        few = f"steps that both logs have: {len(steps)}. The optimizer shows from the third on. Train {LEAST_STEPS}"
        hidden.append(BlindSpot("few steps", few))
    largest = max(abs(loss) for loss in losses)
    move = (max(losses) - min(losses)) / largest if largest else 0.0
    if len(steps) > 1 and move < LEAST_MOVE * bounds.loss:
        hidden.append(BlindSpot("a loss that stays", f"the loss moves by only {move:.1e}: {DEAD}"))
    sentences = _hidden_by_norms(compared, bounds)
    rounded = rounding(first, second)
    sentences += _hidden_by_rounding("loss", compared.second.loss, rounded.loss, bounds.loss)
    sentences += _hidden_by_rounding("gradient norm", compared.second.norm, rounded.norm, bounds.norm)
    hidden += [BlindSpot("the log", sentence) for sentence in sentences]
    if first.micro_batches and second.micro_batches and second.curves.norm:
        hidden += hidden_by_recipe(second.curves.norm.values(), second.clip, second.micro_batches)
    return hidden


def _hidden_by_norms(compared: ComparedCurves, bounds: Tolerance) -> list[str]:
    ours, theirs = compared.first, compared.second
    norms = [value for step, value in theirs.norm.items() if step in ours.norm]
    if not norms:
        without = " and ".join(one.name for one in (ours, theirs) if not one.norm) or "the steps that both logs have"
        return [f"there is no gradient norm in {without}: {NO_NORM}"]
    if not any(norms):
        return [ZERO_NORM]
    if len(norms) > 1 and max(norms) - min(norms) <= bounds.norm * max(norms):
        return [f"every gradient norm is {norms[0]:.6g}: {CLIPPED_NORM}"]
    return []


def _hidden_by_rounding(
    what: str, curve: Mapping[int, float], rounded: Callable[[float], float], bound: float
) -> list[str]:
    shares = (rounded(value) / abs(value) for value in curve.values() if value and math.isfinite(value))
    coarsest = max(shares, default=0.0)
    if coarsest <= COARSE * bound:
        return []
    unseen = f"differences below {coarsest:.0e} cannot be seen (bound: {bound:.0e})"
    return [f"the {what} is logged with few digits, so {unseen}. Log more digits"]


# ---- one rank ------------------------------------------------------------------------------------------------------

COPIES = "{who} other parameters than the rest {where}: an update, a broadcast or a reduction left out a rank"
ROUNDED = (
    "bf16: every weight of {name} is a number of bf16 at step {step}, and the other's are not: it has no master"
    " weights in fp32, or has saved or loaded them in bf16"
)


def _of_one_rank(first: Log, second: Log, compared: ComparedCurves) -> str:
    """What the traces say of copies that are not the same on all ranks; "" if they are, or nothing is known."""
    for own, other in ((first, second), (second, first)):
        apart = copies_apart(own.trace, other.trace) if own.trace else None
        if not own.trace or not apart:
            continue
        where = f"at step {apart.step}, first in {apart.name} ({apart.differing} of {apart.compared} parameters)"
        if len(apart.ranks) == 1:
            who = f"one rank: {ranks_in_words(apart.ranks)} of {own.name} has"
        else:
            who = f"some ranks: {ranks_in_words(apart.ranks)} of {own.name} have"
        return COPIES.format(who=who, where=where)
    differences = compared.beyond
    loss = differences[0] if differences and differences[0].what == LOSS else None
    if first.trace and second.trace and loss and all(_begins(loss) <= _begins(one) for one in differences):
        ranks = ranks_by_loss(first.trace, second.trace, _begins(loss), loss.bound)
        if ranks:
            kind = "one rank" if len(ranks) == 1 else "some ranks"
            return f"{kind}: {ranks_in_words(ranks)} has another loss at step {loss.step}, and the others agree"
    return ""


def _of_rounded_weights(first: Log, second: Log) -> str:
    """What the checksums of two traces say of weights that one training has rounded to bf16; "" without such."""
    for own, other in ((first, second), (second, first)):
        step = rounded_to_bf16(own.trace, other.trace) if own.trace and other.trace else None
        if step is not None:
            return ROUNDED.format(name=own.name, step=step)
    return ""


def _begins(difference: Difference) -> int:
    return difference.step or 0
