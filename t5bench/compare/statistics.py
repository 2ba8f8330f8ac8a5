"""The time of an iteration from a run's log lines: what is left out and why, the median and its uncertainty.

Every log line is the mean over the LOG_INTERVAL iterations before it, an interval. These are left out:

- intervals in which the batch was still growing;
- intervals with an evaluation, a checkpoint or a profiled iteration in them, and those with iterations that fp16
  skipped;
- the first 20 iterations after a run was resumed from a checkpoint, and all before it that were trained in another way,
  by another strategy for example;
- warm-up: the first 20 iterations, or more where MSER finds that the run had not settled: the truncation point that
  minimises the standard error of the mean of what remains, looked for in the first half (White, "An effective
  truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997).

The result has the median, the quartiles, the median's 95 % confidence interval, which allows for the correlation of
consecutive iterations, and the number of outliers by Tukey's fences, which are kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import numpy as np

from t5bench.compare.interval import interval
from t5bench.record.log import Iteration
from t5bench.record.plan import Plan

WARM_UP_ITERATIONS = 20
FEWEST_INTERVALS = 5

EVENT = "evaluation, checkpoint or profile"
SKIPPED = "skipped by fp16"
NOT_FINITE = "no time"
WARM_UP = "warm-up"
RESUMED = "warm-up after a resume"
RAMP_UP = "growing batch"
OTHERWISE = "trained by another strategy, layout or method"


@dataclass(frozen=True)
class Estimate:
    """A median with its interval, in its holder's unit; low and high are None if there are too few values."""

    median: float
    low: float | None = None
    high: float | None = None

    def per(self, amount: float) -> "Estimate":
        """amount / this: the low end of a time gives the high end of a rate."""
        if self.low is None or self.high is None:
            return Estimate(amount / self.median)
        return Estimate(amount / self.median, amount / self.high, amount / self.low)

    def over(self, other: "Estimate") -> "Estimate":
        """The ratio this / other, with an interval that covers all that both intervals allow."""
        ratio = self.median / other.median
        if None in (self.low, self.high, other.low, other.high):
            return Estimate(ratio)
        return Estimate(ratio, self.low / other.high, self.high / other.low)


@dataclass(frozen=True)
class Timing:
    """One run's milliseconds per iteration.

    used: the iterations at which the intervals that count end; dropped: those of the others, with the reason.
    spread is the interquartile range's ends (lower and upper quartile) in ms. batch: the samples of an iteration that
    counts.
    """

    milliseconds: Estimate
    spread: tuple[float, float]
    outliers: int
    used: Sequence[int]
    dropped: Mapping[int, str]
    batch: float
    warning: str = ""


def timing(lines: Sequence[Iteration], plan: Plan) -> Timing | None:
    """The timing of a run with these lines; None if no line has a time."""
    length = plan.number("LOG_INTERVAL")
    untimed = {line.iteration: NOT_FINITE for line in lines if not 0 < line.elapsed_ms < math.inf}
    dropped = {line.iteration: SKIPPED for line in lines if line.skipped} | untimed
    clean = [line for line in lines if line.iteration not in dropped]
    if not clean:
        return None
    begin = max(lines[0].begin, lines[0].iteration - length, 0)
    warnings = []
    full = plan.number("GLOBAL_BATCH_SIZE")
    batches = {line.iteration: batch_until(line.iteration, length, plan) for line in clean}
    batch = max(batches.values())
    if batch < full:
        warnings.append(f"the batch grew until the end: these figures are for {batch:g} samples, not {full}")
    rules: dict[str, Callable[[Iteration], bool]] = {
        OTHERWISE: lambda line: line.iteration <= plan.changed_at,
        RAMP_UP: lambda line: batches[line.iteration] < batch,
        EVENT: lambda line: event_within(line.iteration - length, line.iteration, plan),
        # The run's own beginning is left to the warm-up, which handles short runs.
        RESUMED: lambda line: line.begin > begin and _early(line, line.begin, length),
    }
    for reason, applies in rules.items():
        found = {line.iteration: reason for line in clean if applies(line)}
        if len(found) == len(clean):
            warnings.append(f"excluding {reason} would leave no data, so all intervals are included")
        else:
            dropped, clean = dropped | found, [line for line in clean if line.iteration not in found]
    warm_up, warning = _warm_up(clean, begin, length)
    dropped |= dict.fromkeys((line.iteration for line in clean[:warm_up]), WARM_UP)
    values = [line.elapsed_ms for line in clean[warm_up:]]
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    reach = 1.5 * (high - low)
    return Timing(
        milliseconds=median_with_interval(values),
        spread=(low, high),
        outliers=sum(not low - reach <= value <= high + reach for value in values),
        used=[line.iteration for line in clean[warm_up:]],
        dropped=dict(sorted(dropped.items())),
        batch=batch,
        warning="; ".join(filter(None, [*warnings, warning])),
    )


def batch_until(end: int, length: int, plan: Plan) -> float:
    """The samples of an iteration, in the mean over the interval of this length that ends there."""
    return plan.samples(max(0, end - length), end) / length


def event_within(start: int, end: int, plan: Plan) -> bool:
    """Whether an evaluation, a checkpoint or a profile falls into the interval of the iterations start + 1 to end.

    The first two come after an iteration and its log line: one after iteration `start` falls into this interval, one
    after `end` into the next. A profile of iteration N begins at the end of N - 1.
    """
    if start < plan.number("PROFILE_ITERATION") <= end + 1:
        return True
    periods = [plan.number("SAVE_INTERVAL"), plan.number("EVAL_INTERVAL") if plan.number("EVAL_ITERS") else 0]
    # The last multiple before `end`; nothing comes after iteration 0.
    return any(period and (end - 1) // period * period >= max(start, 1) for period in periods)


def _early(line: Iteration, begin: int, length: int) -> bool:
    """Whether this interval begins earlier than 20 iterations after `begin`."""
    return line.iteration - length < begin + WARM_UP_ITERATIONS


def _warm_up(lines: Sequence[Iteration], begin: int, length: int) -> tuple[int, str]:
    """How many of the first intervals are warm-up, and a warning or ''. begin: the iteration before the run's first."""
    count = len(lines)
    wanted = max(sum(_early(line, begin, length) for line in lines), mser([line.elapsed_ms for line in lines]))
    fewer = min(wanted, max(1, count // 4), count - 1)
    if count - wanted >= FEWEST_INTERVALS:
        return wanted, ""
    if fewer == wanted:
        return wanted, f"only {count - wanted} interval(s) count"
    return fewer, f"short run: {fewer} of {count} intervals were dropped as warm-up ({wanted} recommended)"


def mser(values: Sequence[float]) -> int:
    """How many values MSER cuts off: it minimises the rest's squared deviation from its mean over its size squared.

    Only cuts in the first half count, because noise in a short tail would mislead it; among equals the smallest counts.
    """
    tail = np.array(values)[::-1]
    tail -= tail[0]  # against cancellation
    size = np.arange(1, len(tail) + 1)
    squares = np.cumsum(tail**2) - np.cumsum(tail) ** 2 / size
    scores = (squares / size**2)[::-1]
    return int(np.argmin(scores[: len(values) // 2 + 1]))


def median_with_interval(values: Sequence[float]) -> Estimate:
    """The median of at least one value, and its interval if the values, which are in time order, support one."""
    low, high = interval(np.array([values], dtype=np.float64))
    if math.isnan(low[0]):
        return Estimate(median(values))
    return Estimate(median(values), float(low[0]), float(high[0]))
