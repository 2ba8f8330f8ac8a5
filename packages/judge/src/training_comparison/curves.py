"""Two trainings' curves of loss and gradient norm compared, step by step, within bounds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Tolerance(NamedTuple):
    """Relative differences of loss and gradient norm."""

    loss: float
    norm: float

    def __str__(self) -> str:
        return f"loss {self.loss:.0e}, norm {self.norm:.0e}"


# What is allowed, far above what correct trainings differ by (docs/parity_evidence.md), by precision.
TOLERANCE = {"fp32": Tolerance(loss=5e-6, norm=5e-6), "bf16": Tolerance(loss=2e-3, norm=2e-2)}
# The longest training for which these were measured. Rounding grows with every update, so later it may pass them.
MEASURED_STEPS = 12
LOSS = "loss"
NORM = "gradient norm"


@dataclass(frozen=True)
class Curves:
    """What a training logged, by step."""

    loss: Mapping[int, float]
    norm: Mapping[int, float] = field(default_factory=dict)
    """Of the gradients, before clipping; empty where none was logged."""
    name: str = ""


@dataclass(frozen=True)
class Difference:
    """How far one quantity of two trainings is apart."""

    what: str
    """LOSS or NORM."""
    step: int | None
    """The first step at which it differs by more than the bound; None if it does nowhere."""
    first: float
    """The value of the first training at that step, or where the two are farthest apart."""
    second: float
    largest: float
    """The largest relative difference, of the steps beyond the bound if there are any; nan if one is not finite."""
    largest_step: int
    bound: float
    """Relative; what the logs' rounding adds at a step is not in it."""

    @property
    def is_beyond(self) -> bool:
        return self.step is not None

    @property
    def share(self) -> float:
        """The largest difference in units of the bound."""
        return self.largest / self.bound if self.largest else 0.0

    def __str__(self) -> str:
        return f"{self.largest:.1e} (it. {self.largest_step})"


@dataclass(frozen=True)
class ComparedCurves:
    """Two trainings, and how far they are apart."""

    first: Curves
    second: Curves
    bounds: Tolerance
    loss: Difference | None
    """None if they share no step."""
    norm: Difference | None

    @property
    def beyond(self) -> list[Difference]:
        """What differs by more than its bound."""
        return [found for found in (self.loss, self.norm) if found and found.is_beyond]

    @property
    def largest_share(self) -> float:
        """The largest difference, in units of its bound."""
        return max((found.share for found in (self.loss, self.norm) if found), default=0.0)

    @property
    def start(self) -> int:
        """The first step that both have."""
        return min(self.first.loss.keys() & self.second.loss.keys())


class Rounding(NamedTuple):
    """Of a value of the loss and of the norm: how far, absolute, the logs' rounding may have moved their two values
    together."""

    loss: Callable[[float], float]
    norm: Callable[[float], float]


def exact(_: float) -> float:
    return 0.0


EXACT = Rounding(exact, exact)


def compare(first: Curves, second: Curves, bounds: Tolerance, rounded: Rounding = EXACT) -> ComparedCurves:
    return ComparedCurves(
        first,
        second,
        bounds,
        difference(LOSS, first.loss, second.loss, bounds.loss, rounded.loss),
        difference(NORM, first.norm, second.norm, bounds.norm, rounded.norm),
    )


def difference(
    what: str,
    first: Mapping[int, float],
    second: Mapping[int, float],
    bound: float,
    rounded: Callable[[float], float] = exact,
) -> Difference | None:
    """How far two curves are apart; None if they share no step."""
    apart: dict[int, float] = {}
    beyond: list[int] = []
    for step in sorted(first.keys() & second.keys()):
        reference = second[step]
        apart[step] = relative_difference(first[step], reference)
        by_rounding = rounded(reference) / abs(reference) if reference and math.isfinite(reference) else 0.0
        if not apart[step] <= bound + by_rounding:
            beyond.append(step)
    if not apart:
        return None
    worst = max(beyond or apart, key=lambda step: (math.isnan(apart[step]), apart[step]))
    begin = beyond[0] if beyond else None
    shown = worst if begin is None else begin
    return Difference(what, begin, first[shown], second[shown], apart[worst], worst, bound)


def relative_difference(value: float, reference: float) -> float:
    """|value - reference| / |reference|; 0 if they are equal, nan if one is not finite."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.nan
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf
