"""Whether two trainings are the same, by their logs: equal, different or not shown; and what a difference is like.

The bounds are those of the parity gate (docs/parity.md), measured on correct runs. A log that was rounded is given the
rounding besides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from t5bench import Problem
from t5bench.compare.likely import Differing, differing, likely
from t5bench.compare.parity import TOLERANCE, blind_spots, other_training
from t5bench.compare.sensitivity import Tolerance
from t5bench.compare.traces import ranks_in_words
from t5bench_judge.audits import of_the_ranks, ranks_apart
from t5bench_judge.curves import Curves, resolution

EQUAL = "equal"
DIFFERENT = "different"
NOT_SHOWN = "not shown"
LEAST_STEPS = 3  # the first shows gradients, the second an update, the third the optimizer's memory
LEAST_MOVE = 100  # a loss that moves by fewer bounds hides a mistake in what moves it
COARSE = 10  # rounding by so many bounds hides what the bound would show


@dataclass(frozen=True)
class Verdict:
    verdict: str
    """One of EQUAL, DIFFERENT and NOT_SHOWN."""
    precision: str
    bounds: Tolerance
    steps: int
    """Compared."""
    differences: list[Differing] = field(default_factory=list)
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
    of_loss = differing("loss", first.loss, second.loss, bounds.loss, _rounded(first.loss, second.loss))
    of_norm = differing("gradient norm", first.norm, second.norm, bounds.norm, _rounded(first.norm, second.norm))
    differences = [found for found in (of_loss, of_norm) if found]
    notes = _notes(first, second, steps)
    one_rank = _of_one_rank(first, second, differences)
    if differences or one_rank:
        like = one_rank or likely(first, second, differences)
        return Verdict(DIFFERENT, precision, bounds, len(steps), differences, like, notes=notes)
    hidden = _hidden(first, second, steps, bounds)
    return Verdict(NOT_SHOWN if hidden else EQUAL, precision, bounds, len(steps), hidden=hidden, notes=notes)


def _check_intervals(first: Curves, second: Curves) -> None:
    """A trainer that logs every tenth step usually logs the mean of ten."""
    if first.interval != second.interval:
        every = f"one log has a line every {first.interval} steps, the other every {second.interval}"
        remedy = "Log the same interval in both, best every step"
        raise Problem(f"{every}, and a line may be the mean of its interval", remedy)


def _rounded(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    return resolution(first) + resolution(second)


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


# ---- one rank ------------------------------------------------------------------------------------------------------

COPIES = "{who} has other parameters than the rest {where}: an update, a broadcast or a reduction left it out"


def _of_one_rank(first: Curves, second: Curves, differences: list[Differing]) -> str:
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
