"""The verdict on two trainings: equal, different or not shown, and what would show it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from training_comparison.curves import MEASURED_STEPS, ComparedCurves, Difference
from training_comparison.likely import has_drifted, likely

EQUAL = "equal"
DIFFERENT = "different"
NOT_SHOWN = "not shown"
# Of a program that compares two trainings; 0 where they are equal.
EXIT_DIFFERENT = 1
EXIT_NOT_SHOWN = 3
MOST_DIGITS = 17  # of a double


class BlindSpot(NamedTuple):
    """Why an agreement might hide a mistake, and what to change."""

    what: str
    """A word or two: the setting, or what the log lacks."""
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """One of EQUAL, DIFFERENT and NOT_SHOWN, with its reasons."""

    verdict: str
    differences: Sequence[Difference] = ()
    """Those beyond their bound."""
    likely: str = ""
    """What they are like."""
    hidden: Sequence[BlindSpot] = field(default_factory=list)
    """Why it is not shown."""


def verdict_on(comparison: ComparedCurves, blind_spots: Sequence[BlindSpot], clip: float = 0.0) -> Verdict:
    """blind_spots: what these curves would hide. clip: the norm to which gradients are clipped; 0 if not known."""
    differences = comparison.beyond
    if differences and has_drifted(comparison):
        return Verdict(NOT_SHOWN, differences, likely(comparison), [drift(comparison)])
    if differences:
        return Verdict(DIFFERENT, differences, likely(comparison, clip))
    return Verdict(NOT_SHOWN if blind_spots else EQUAL, hidden=blind_spots)


def drift(comparison: ComparedCurves) -> BlindSpot:
    step = min(found.step or 0 for found in comparison.beyond)
    return BlindSpot(
        "rounding grows",
        f"the curves agree until step {step}, then grow apart as rounding does, for which the bounds hold in the first "
        f"{MEASURED_STEPS} steps alone. Compare a training of {MEASURED_STEPS} steps",
    )


def clips_some(norms: Sequence[float], clip: float) -> bool:
    """Whether gradients of these norms are clipped in some steps and not in others, so that a wrong scale shows."""
    return min(norms) < clip < max(norms)


def clip_among(norms: Sequence[float]) -> str:
    """A number between the smallest and the largest of these norms, which differ, in as few digits as that takes."""
    middle = (min(norms) * max(norms)) ** 0.5
    digits = 3
    while not clips_some(norms, float(f"{middle:.{digits}g}")) and digits < MOST_DIGITS:
        digits += 1
    return f"{middle:.{digits}g}"


def hidden_by_recipe(norms: Iterable[float], clip: float, micro_batches: int) -> list[BlindSpot]:
    """What a training's recipe hides. norms: of its gradients before clipping. clip: 0 if nothing is clipped."""
    found = []
    of_steps = list(norms)
    lowest, highest = min(of_steps), max(of_steps)
    if not clips_some(of_steps, clip):
        where = "no" if clip >= highest or not clip else "every"
        between = f"between {lowest:.4g} and {highest:.4g}, for example {clip_among(of_steps)}"
        if lowest == highest:
            between = f"near {lowest:.4g}, which all of them are, and log every iteration"
        found.append(
            BlindSpot(
                "CLIP_GRAD",
                f"CLIP_GRAD={clip:g} clips the gradients of {where} iteration, so a wrong scale could go unnoticed. "
                f"For DDP's norms choose CLIP_GRAD {between}",
            )
        )
    if micro_batches < 2:
        found.append(
            BlindSpot(
                "one micro-batch",
                "an iteration has one micro-batch, so a mistake in accumulating several could go unnoticed. "
                "Lower MICRO_BATCH_SIZE, or set a larger GLOBAL_BATCH_SIZE",
            )
        )
    return found
