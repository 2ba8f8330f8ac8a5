"""Which layout to measure next, which one to name, and when to stop: the decisions of a search among layouts.

Each run says something of the machine (calibration.py), and so of all layouts that have not run. What is left is each
layout's own error and what the runs leave open of the machine (intervals.py). The decisions need nothing but the jobs
and the measured times, so that a replay on published times makes the same ones (t5bench_evidence/replay.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import erf, exp, log, sqrt
from statistics import median, stdev, variance

from t5bench.choose.calibration import Calibrated, MeasuredTime, calibrate
from t5bench.costmodel import intervals
from t5bench.costmodel.intervals import Shift, Z
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import Machine

TOO_CLOSE = 0.03
"""Two layouts whose times differ by less are equal: nobody would change a launcher for it."""
CERTAINTY = 0.95
LEAST_RUNS = 3
"""Before these, the machine may still be unlike everything that the model knows."""
UNLIKELY = 0.05
"""A layout is dropped if it is faster than the named one with less than this probability."""
MOST_REPEATS = 3
"""Of a layout that may be as fast as the named one, as far as one run can show."""
MOST_REGRET = 10.0
"""Where a possible regret is even larger, it does not matter how large."""


@dataclass(frozen=True)
class Option:
    """A layout that a search may measure."""

    name: str
    job: Job
    machine: Machine
    backend: str = "nccl"


@dataclass(frozen=True)
class SearchRun:
    """What the runs of an option showed."""

    seconds: float
    """Of an iteration; of several runs the median, so that one that was disturbed does not count."""
    error: float = 0.0
    """The standard deviation of the logarithm of `seconds`, as its own runs show it."""
    times: Sequence[float] = ()
    """Of each run, if there were several."""

    @property
    def repeats(self) -> int:
        return max(1, len(self.times))

    def with_another(self, run: "SearchRun") -> "SearchRun":
        """With one more run. Where one was disturbed, they differ by more than each shows of itself."""
        times = [*(self.times or [self.seconds]), run.seconds]
        count = len(times)
        logarithms = [log(seconds) for seconds in times]
        within = sqrt((self.repeats * self.error) ** 2 + run.error**2) / count
        between = stdev(logarithms) / sqrt(count)
        return SearchRun(exp(median(logarithms)), max(within, between), times)


@dataclass(frozen=True)
class Expected:
    """What is known of an option's time."""

    option: Option
    logarithm: float
    """Of its seconds."""
    deviation: float
    """The standard deviation of that."""
    is_measured: bool

    @property
    def seconds(self) -> float:
        return exp(self.logarithm)

    def probability_below(self, other: "Expected", less: float = 0.0) -> float:
        """That the logarithm of its time is by `less`, or more, below that of another option's time."""
        distance = other.logarithm - less - self.logarithm
        deviation = sqrt(self.deviation**2 + other.deviation**2)
        if not deviation:
            return float(distance > 0)
        return (1 + erf(distance / deviation / sqrt(2))) / 2


@dataclass(frozen=True)
class Standing:
    """What a search knows at one moment."""

    named: Expected
    """The one to use: the fastest measured, or before the first run the one that is predicted to be."""
    equals: Sequence[Expected]
    """Measured ones that cannot be called slower than it."""
    possible_regret: float
    """The named one is at most this much slower than the fastest of all, with 95 % certainty; 0.1 is 10 %."""
    left: Sequence[Expected]
    """Not measured, and not surely slower; the one that is expected to be the fastest, which is next, comes first."""
    dropped: int
    """Not measured, but surely slower."""
    runs: int

    @property
    def is_certain(self) -> bool:
        """Whether more runs would change nothing that matters."""
        return not self.left or (self.runs >= LEAST_RUNS and self.possible_regret <= TOO_CLOSE)


@dataclass
class Search:
    """The state of a search: what has been measured, and what failed."""

    options: Sequence[Option]
    measured: dict[str, SearchRun] = field(default_factory=dict)
    """By the option's name, in the order of the runs."""
    failed: set[str] = field(default_factory=set)
    """Options that cannot run; they are not considered any more."""

    def known(self) -> Calibrated:
        """What the runs say of the machine."""
        by_name = {option.name: option for option in self.options}
        runs = []
        for name, outcome in self.measured.items():
            option = by_name[name]
            runs.append(MeasuredTime(option.job, option.machine, outcome.seconds, option.backend))
        return calibrate(runs) if runs else Calibrated(Shift(), ())

    def expected(self) -> list[Expected]:
        """Of every option that has not failed."""
        known = self.known()
        found = []
        for option in self.options:
            if option.name in self.failed:
                continue
            outcome = self.measured.get(option.name)
            if outcome:
                error = max(outcome.error, self.between_runs / sqrt(outcome.repeats))
                found.append(Expected(option, log(outcome.seconds), error, True))
                continue
            found.append(_predicted(option, known))
        return found

    def standing(self) -> Standing:
        """Raises ValueError if every option has failed."""
        expected = self.expected()
        if not expected:
            raise ValueError("every layout has failed")
        measured = [each for each in expected if each.is_measured]
        named = min(measured or expected, key=lambda each: each.logarithm)
        others = [each for each in expected if not each.is_measured and each is not named]
        left = [each for each in others if each.probability_below(named) >= UNLIKELY]
        if not measured:
            left.append(named)
        elif self._is_young and not left:
            left = list(others)
        left.sort(key=lambda each: each.logarithm)
        equals = [each for each in measured if each is not named and are_equal(each, named)]
        return Standing(
            named=named,
            equals=sorted(equals, key=lambda each: each.logarithm),
            possible_regret=possible_regret(named, [each for each in expected if each is not named]),
            left=left,
            dropped=len(others) - len([each for each in left if each is not named]),
            runs=self.runs,
        )

    @property
    def between_runs(self) -> float:
        """The standard deviation of the logarithms of an option's times, of all that ran again together; 0 before one
        did. It speaks for options that ran once."""
        squares = 0.0
        freedom = 0
        for outcome in self.measured.values():
            if outcome.times:
                logarithms = [log(seconds) for seconds in outcome.times]
                squares += variance(logarithms) * (outcome.repeats - 1)
                freedom += outcome.repeats - 1
        return sqrt(squares / freedom) if freedom else 0.0

    @property
    def runs(self) -> int:
        """All that were made of the measured options."""
        return sum(outcome.repeats for outcome in self.measured.values())

    def to_repeat(self, standing: Standing) -> Option | None:
        """Of the named option and those that may be as fast, the one with the fewest runs; None if more runs would
        not tell them apart, or each has MOST_REPEATS.

        The named one runs twice in any case: that shows how much the runs of this machine differ.
        """
        named = self.measured.get(standing.named.option.name)
        if named and named.repeats == 1 and len(self.measured) > 1:
            return standing.named.option
        close = [each for each in standing.equals if not are_surely_equal(each, standing.named)]
        if not close:
            return None
        fewest = min([standing.named, *close], key=lambda each: self.measured[each.option.name].repeats)
        return fewest.option if self.measured[fewest.option.name].repeats < MOST_REPEATS else None

    @property
    def _is_young(self) -> bool:
        return len(self.measured) < LEAST_RUNS


def _predicted(option: Option, known: Calibrated) -> Expected:
    seconds = known.seconds(option.job, option.machine, option.backend)
    responses = known.responses(option.job, option.machine, option.backend)
    down, _ = intervals.factors(responses, known.own(option.job, option.machine))
    return Expected(option, log(seconds), log(down) / Z, False)


def are_equal(one: Expected, other: Expected) -> bool:
    """Whether two measured times differ by less than matters, or than the runs can show."""
    return abs(one.logarithm - other.logarithm) <= max(log(1 + TOO_CLOSE), _shown(one, other))


def are_surely_equal(one: Expected, other: Expected) -> bool:
    """Whether the runs show that they differ by less than matters."""
    return abs(one.logarithm - other.logarithm) + _shown(one, other) <= log(1 + TOO_CLOSE)


def _shown(one: Expected, other: Expected) -> float:
    """Two measured times must differ by more, in their logarithm, to be called different."""
    return Z * sqrt(one.deviation**2 + other.deviation**2)


def possible_regret(named: Expected, others: Sequence[Expected]) -> float:
    """How much longer than the fastest of all the named one takes at most, with 95 % certainty."""

    def certainty(regret: float) -> float:
        """The probability that none of the others is so much faster."""
        product = 1.0
        for each in others:
            product *= 1 - each.probability_below(named, log(1 + regret))
        return product

    if certainty(0.0) >= CERTAINTY:
        return 0.0
    low = 0.0
    high = MOST_REGRET
    for _ in range(40):
        middle = (low + high) / 2
        if certainty(middle) >= CERTAINTY:
            high = middle
        else:
            low = middle
    return high


def steps(
    search: Search, measure: Callable[[Option], SearchRun | None], may_go_on: Callable[[Search], bool]
) -> Iterator[Standing]:
    """Measures one option after another; yields what is known before the first run and after each.

    measure: None for an option that cannot run. may_go_on: whether the budget allows another run. It ends when the
    answer is certain, the named option ran twice, and those that one run cannot tell apart were repeated in turn, or
    when the budget is spent.
    Raises ValueError if every option fails.
    """
    standing = search.standing()
    yield standing
    while may_go_on(search):
        option = search.to_repeat(standing) if standing.is_certain else standing.left[0].option
        if not option:
            return
        outcome = measure(option)
        before = search.measured.get(option.name)
        if outcome:
            search.measured[option.name] = before.with_another(outcome) if before else outcome
        else:
            search.measured.pop(option.name, None)
            search.failed.add(option.name)
        standing = search.standing()
        yield standing
