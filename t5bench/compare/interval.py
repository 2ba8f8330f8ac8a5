"""The confidence interval of the median of values that follow each other in time.

An autocorrelation-adjusted Student interval over batch means, as in N-Skart (Tafazzoli, Steiger and Wilson, IEEE
Transactions on Automatic Control 56(2), 2011), adapted to a median. docs/statistics.md explains every step.
"""

import math
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
FEWEST_VALUES = 10
FEWEST_BATCHES = 12
HIGHEST_CORRELATION = 0.98
# A run sees few states of its machine. However many iterations it has, they count for at most so many independent
# values: chosen from the traces of real runs in docs/statistics.md.
MOST_INDEPENDENT = 5
NEWTON_STEPS = 30

Array = NDArray[np.float64]


@cache
def _legendre() -> tuple[Array, Array]:
    """Points and weights of Gauss and Legendre's quadrature, from 0 to 1."""
    points, weights = np.polynomial.legendre.leggauss(24)
    return (points + 1) / 2, weights / 2


def student(degrees: float | Array, confidence: float = CONFIDENCE) -> Array:
    """The t for which Student's distribution has this share between -t and t, for at least one degree of freedom.

    With t = sqrt(df) tan(angle) its density is cos(angle) ** (df - 1), whose integral up to pi/2 is known. Newton's
    method finds the angle to the last digits of a float.
    """
    degrees = np.maximum(np.asarray(degrees, dtype=np.float64), 1.0)
    distinct, places = np.unique(degrees, return_inverse=True)
    half = np.array([math.lgamma(df / 2) - math.lgamma((df + 1) / 2) for df in distinct])
    wanted = confidence * np.exp(half) * math.sqrt(math.pi) / 2
    points, weights = _legendre()
    angle = np.arctan(NormalDist().inv_cdf((1 + confidence) / 2) / np.sqrt(distinct))
    for _ in range(NEWTON_STEPS):
        area = angle * (np.exp((distinct[:, None] - 1) * np.log(np.cos(angle[:, None] * points))) @ weights)
        new = np.minimum(angle + (wanted - area) / np.cos(angle) ** (distinct - 1), (angle + math.pi / 2) / 2)
        has_settled = np.allclose(new, angle, rtol=1e-13, atol=0)
        angle = new
        if has_settled:
            break
    return (np.sqrt(distinct) * np.tan(angle))[places].reshape(degrees.shape)


@cache
def _normal_scores(count: int) -> Array:
    return np.array([NormalDist().inv_cdf((rank + 0.5) / count) for rank in range(count)])


def _scores_in_time(values: Array, ordered: Array) -> Array:
    """The normal score of each value, scaled to variance 1; equal values share their mean, and 0 if all are equal.

    values: [series, n]. ordered: the same, sorted.
    """
    series, count = values.shape
    new = np.diff(ordered, axis=1, prepend=np.nan) != 0
    group = (np.cumsum(new.ravel()) - 1).reshape(series, count)
    total = np.bincount(group.ravel(), np.tile(_normal_scores(count), series))
    mean = (total / np.bincount(group.ravel()))[group]
    scores = np.empty_like(values)
    np.put_along_axis(scores, np.argsort(values, axis=1, kind="stable"), mean, axis=1)
    spread = scores.std(axis=1, keepdims=True)
    return scores / np.where(spread > 1e-9, spread, np.inf)


def _half_width(scores: Array, size: int) -> tuple[Array, Array]:
    """Half the interval from batches of this size, in units of the scores, and the batches' lag-1 autocorrelation."""
    series, count = scores.shape
    batches = count // size
    means = scores[:, count - batches * size :].reshape(series, batches, size).mean(axis=2)
    means = means - means.mean(axis=1, keepdims=True)
    squares = (means**2).sum(axis=1)
    lagged = (means[:, 1:] * means[:, :-1]).sum(axis=1) / np.maximum(squares, 1e-300)
    phi = np.clip((batches * lagged + 1) / (batches - 4), 0, 1)
    phi = phi + (phi > 0) * np.sqrt((1 - phi**2) / batches) * (1 if size == 1 else 0.5)
    used = np.minimum(phi, HIGHEST_CORRELATION)
    inflation = (1 + used) / (1 - used) - 2 * used * (1 - used**batches) / batches / (1 - used) ** 2
    # A correlated sample varies less than the process from which it is drawn.
    spread = squares / batches / np.maximum(1 - inflation / batches, 0.02)
    degrees = batches * (1 - used**2) / (3 + used**2)
    return student(degrees) * np.sqrt(spread * inflation / batches + (np.pi / 2 - 1) / count), phi


def interval(values: Array) -> tuple[Array, Array]:
    """The ends of the interval of each row's median; nan if a row does not support one. values: [series, n]."""
    series, count = values.shape
    nothing = np.full(series, np.nan)
    if count < FEWEST_VALUES:
        return nothing, nothing
    ordered = np.sort(values, axis=1)
    z = _normal_scores(count)
    scores = _scores_in_time(values, ordered)
    size = 1
    highest = np.zeros(series)
    half = np.full(series, student(MOST_INDEPENDENT - 1) * np.sqrt(np.pi / 2 / MOST_INDEPENDENT))
    while size == 1 or count // size >= FEWEST_BATCHES:
        own, phi = _half_width(scores, size)
        half, highest = np.maximum(half, own), np.maximum(highest, phi)
        size *= 2
    middle = np.median(values, axis=1)
    reach = np.maximum(half / z[-1], 1)
    rank = np.searchsorted(z, np.minimum(half, z[-1]))[:, None]
    low, high = (np.take_along_axis(ordered, at, axis=1)[:, 0] for at in (count - 1 - rank, rank))
    ends = middle - (middle - low) * reach, middle + (high - middle) * reach
    times = low > 0  # the ends of positive values stay positive
    ends[0][times] = middle[times] * (low[times] / middle[times]) ** reach[times]
    return tuple(np.where(highest < HIGHEST_CORRELATION, end, np.nan) for end in ends)
