"""How far planners are from what was measured, on one set."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean, median

from t5bench_evidence.layout_bench.cases import Case
from t5bench_evidence.layout_bench.planners import Answer


@dataclass(frozen=True)
class Errors:
    """Of one kind of figure, as shares of what was measured."""

    count: int
    mean: float
    median: float
    worst: float


@dataclass(frozen=True)
class Verdicts:
    """Whether a layout runs, or runs out of memory."""

    right: int
    count: int
    refused: int
    """Those that ran although it said that they would not fit."""
    ran_out: int
    """Those that it said would fit, and that ran out of memory."""


@dataclass(frozen=True)
class Choices:
    """What becomes of those who take the layout that a planner names."""

    count: int
    named_ran: float | None
    """In how many choices the named layout ran at all; None where every layout of the set did. Layouts that are equal
    to a planner are taken by lot."""
    regret: float
    """How much longer than the fastest the first layout takes that runs, going down the planner's list; the mean."""
    regret_90: float
    """Its 90th percentile."""
    worst: float


@dataclass(frozen=True)
class Score:
    """A planner on a set."""

    covered: int
    """Cases that it can express, of which at least one figure is compared."""
    cases: int
    reasons: Mapping[str, int]
    """Why it cannot express the others."""
    time: Errors | None
    after_factor: Errors | None
    """Of times, after one factor for each choice of two or more layouts: what is wrong among them."""
    allocated: Errors | None
    peak: Errors | None
    verdicts: Verdicts | None
    choices: Choices | None


def score(cases: Sequence[Case], answers: Mapping[str, Answer | str]) -> Score:
    """answers: by the case's name; a text is why it cannot be expressed."""
    reasons: dict[str, int] = {}
    expressed: list[tuple[Case, Answer]] = []
    for case in cases:
        answer = answers[case.name]
        if isinstance(answer, str):
            reasons[answer] = reasons.get(answer, 0) + 1
        else:
            expressed.append((case, answer))
    return Score(
        covered=len([pair for pair in expressed if _is_compared(*pair)]),
        cases=len(cases),
        reasons=reasons,
        time=_errors((answer.seconds, case.seconds) for case, answer in expressed),
        after_factor=_after_factor(expressed),
        allocated=_errors((answer.allocated, case.allocated) for case, answer in expressed),
        peak=_errors((answer.peak, case.peak) for case, answer in expressed),
        verdicts=_verdicts(expressed),
        choices=_choices(cases, answers),
    )


def _is_compared(case: Case, answer: Answer) -> bool:
    pairs = ((answer.seconds, case.seconds), (answer.allocated, case.allocated), (answer.peak, case.peak))
    is_verdict = answer.fits is not None and case.ran is not None
    is_choice = bool(case.choice) and answer.ranks and (case.seconds > 0 or case.ran is False)
    return any(said and measured for said, measured in pairs) or is_verdict or is_choice


def _errors(pairs: Iterable[tuple[float, float]]) -> Errors | None:
    """pairs: said and measured; 0 where either is missing."""
    errors = [abs(said / measured - 1) for said, measured in pairs if said and measured]
    return Errors(len(errors), mean(errors), median(errors), max(errors)) if errors else None


def _grouped(pairs: Iterable[tuple[Case, Answer]]) -> dict[str, list[tuple[Case, Answer]]]:
    groups: dict[str, list[tuple[Case, Answer]]] = {}
    for case, answer in pairs:
        if case.choice:
            groups.setdefault(case.choice, []).append((case, answer))
    return groups


def _after_factor(expressed: Sequence[tuple[Case, Answer]]) -> Errors | None:
    pairs = []
    for group in _grouped(expressed).values():
        known = [(answer.seconds, case.seconds) for case, answer in group if answer.seconds and case.seconds]
        if len(known) < 2:
            continue
        factor = exp(mean(log(measured / said) for said, measured in known))
        pairs += [(factor * said, measured) for said, measured in known]
    return _errors(pairs)


def _verdicts(expressed: Sequence[tuple[Case, Answer]]) -> Verdicts | None:
    known = [(case.ran, answer.fits) for case, answer in expressed if None not in (case.ran, answer.fits)]
    if not known:
        return None
    return Verdicts(
        right=sum(ran == fits for ran, fits in known),
        count=len(known),
        refused=sum(bool(ran) and not fits for ran, fits in known),
        ran_out=sum(not ran and bool(fits) for ran, fits in known),
    )


def _choices(cases: Sequence[Case], answers: Mapping[str, Answer | str]) -> Choices | None:
    """Those of which a planner can express every layout, of two or more."""
    choices: dict[str, list[tuple[Case, Answer]]] = {}
    inexpressible = set()
    for case in cases:
        if not case.choice or not (case.seconds or case.ran is False):
            continue
        answer = answers[case.name]
        if isinstance(answer, str) or not answer.ranks:
            inexpressible.add(case.choice)
        else:
            choices.setdefault(case.choice, []).append((case, answer))
    ran = []
    regrets = []
    for name, layouts in choices.items():
        times = [case.seconds for case, _ in layouts if case.seconds]
        if name in inexpressible or len(layouts) < 2 or not times:
            continue
        listed = [layout for layout in layouts if layout[1].fits is not False] or layouts
        ran.append(mean(float(case.ran is not False) for case in _first(listed)))
        running = [layout for layout in listed if layout[0].seconds]
        running = running or [layout for layout in layouts if layout[0].seconds]
        regrets.append(mean(case.seconds for case in _first(running)) / min(times) - 1)
    if not regrets:
        return None
    regrets.sort()
    named_ran = sum(ran) if any(case.ran is False for case in cases) else None
    return Choices(len(regrets), named_ran, mean(regrets), regrets[int(0.9 * len(regrets))], regrets[-1])


def _first(layouts: Sequence[tuple[Case, Answer]]) -> list[Case]:
    """The layout that is named, or all that are equally good to the planner."""
    best = min(answer.order for _, answer in layouts)
    return [case for case, answer in layouts if answer.order <= best * (1 + 1e-9)]
