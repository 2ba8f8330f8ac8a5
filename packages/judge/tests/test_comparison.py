"""Verdicts on two curves: equal, different or not shown, and the sentence for each class of planted mistake.

The trainings are made: a linear model with Adam, whose gradients, norm and clipping can be wrong in one way each.
"""

import math
from collections.abc import Callable

import pytest

from training_comparison.curves import MEASURED_STEPS, TOLERANCE, Curves, compare
from training_comparison.likely import ANOTHER_SCALE, PARTS, SUM_OF_GRADIENTS, WRONG_NORM, likely
from training_comparison.verdict import (
    DIFFERENT,
    EQUAL,
    NOT_SHOWN,
    BlindSpot,
    clip_among,
    clips_some,
    hidden_by_recipe,
    verdict_on,
)

CLIP = 4.0
PARAMETERS = 6
Change = Callable[[list[float]], list[float]]


def train(
    gradients: Change = lambda values: values, norm: Change = lambda values: values, clip: float = CLIP
) -> Curves:
    """Twelve steps of Adam on a quadratic loss, whose gradients grow before they fall.

    gradients: what a mistake makes of a step's. norm: the values of which the norm is computed.
    """
    weights = [1.0 + 0.3 * index for index in range(PARAMETERS)]
    first = [0.0] * PARAMETERS
    second = [0.0] * PARAMETERS
    losses, norms = {}, {}
    for step in range(1, 13):
        scale = 1 + 0.4 * math.sin(0.6 * step)
        losses[step] = sum(scale * weight**2 for weight in weights)
        exact = gradients([2 * scale * weight / 3 for weight in weights])
        norms[step] = math.hypot(*norm(exact))
        factor = min(1.0, clip / norms[step])
        for index, value in enumerate(exact):
            first[index] = 0.9 * first[index] + 0.1 * value * factor
            second[index] = 0.99 * second[index] + 0.01 * (value * factor) ** 2
            mean = first[index] / (1 - 0.9**step)
            size = math.sqrt(second[index] / (1 - 0.99**step))
            weights[index] -= 0.02 * mean / (size + 1e-8)
    return Curves(losses, norms, "made")


# Its first update is not clipped, a later one is.
RIGHT = train()


def test_the_first_update_is_not_clipped_and_a_later_one_is():
    assert RIGHT.norm[1] < CLIP < max(RIGHT.norm.values())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (train(lambda values: [4 * value for value in values], clip=4 * CLIP), SUM_OF_GRADIENTS),
        (train(lambda values: [0.7 * value for value in values]), ANOTHER_SCALE),
        # Every slice clips by its own norm, and a replicated parameter counts twice: the gradients are right.
        (train(norm=lambda values: values[:3]), WRONG_NORM),
        (train(norm=lambda values: [*values, values[0]]), WRONG_NORM),
        (train(lambda values: [*values[:5], 0.0]), PARTS.partition("{")[0]),
    ],
    ids=["summed", "scaled", "own norm", "counted twice", "missing"],
)
def test_a_wrong_norm_is_not_called_a_wrong_gradient(wrong: Curves, sentence: str):
    compared = compare(wrong, RIGHT, TOLERANCE["fp32"])
    assert compared.norm.step == 1
    assert sentence in likely(compared, CLIP)


def test_without_the_clipping_norm_both_causes_are_named():
    said = likely(compare(train(norm=lambda values: values[:3]), RIGHT, TOLERANCE["fp32"]))
    assert "are missing from" in said and "the norm itself is wrong, and clipping uses it" in said


def moved(by: Callable[[int], float], steps: int = 40) -> Curves:
    return Curves(
        {n: (8 - 0.1 * n) * (1 + by(n)) for n in range(1, steps)}, {n: 2 + math.sin(n) for n in range(1, steps)}
    )


@pytest.mark.parametrize(
    ("by", "verdict"),
    [
        (lambda n: 1e-6, EQUAL),
        # Rounding grows, and the bounds were measured in short trainings; within them, it is a difference.
        (lambda n: 1e-7 * 1.2**n, NOT_SHOWN),
        (lambda n: 1e-7 * 2.0**n, DIFFERENT),
        (lambda n: 1e-4 * (n > MEASURED_STEPS + 5), DIFFERENT),
        (lambda n: math.nan if n > 30 else 0.0, DIFFERENT),
    ],
)
def test_rounding_that_grows_after_the_measured_steps_is_not_shown(by: Callable[[int], float], verdict: str):
    compared = compare(moved(by), moved(lambda n: 0.0), TOLERANCE["fp32"])
    assert verdict_on(compared, []).verdict == verdict


def test_equal_curves_that_would_hide_a_mistake_are_not_shown():
    same = compare(RIGHT, RIGHT, TOLERANCE["fp32"])
    assert verdict_on(same, []).verdict == EQUAL
    assert verdict_on(same, [BlindSpot("a", "b")]).verdict == NOT_SHOWN
    norms = RIGHT.norm.values()
    assert not hidden_by_recipe(norms, CLIP, 2)
    assert [spot.what for spot in hidden_by_recipe(norms, 0.0, 1)] == ["CLIP_GRAD", "one micro-batch"]
    assert "clips the gradients of every iteration" in hidden_by_recipe(norms, 0.1, 2)[0].sentence
    close = [4.0001, 4.0002, 4.0003]
    assert clips_some(close, float(clip_among(close))), "in more digits than usual"
    assert "near 1, which all of them are" in hidden_by_recipe([1.0, 1.0], 2.0, 2)[0].sentence
