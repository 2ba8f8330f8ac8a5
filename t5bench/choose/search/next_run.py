"""Which layout to measure next, which one to name, and when to stop: the decisions of a search among layouts.

Each run says something of the machine (calibration.py), and so of all layouts that have not run. What is left is each
layout's own error and what the runs leave open of the machine (intervals.py). The decisions need nothing but the jobs
and the measured times, so that a replay on published times makes the same ones (t5bench_evidence/replay.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import erf, exp, log, sqrt
from statistics import median, stdev, variance

from t5bench.choose.calibration import Calibrated, MeasuredTime, calibrate
from t5bench.choose.search.capacity import Capacity
from t5bench.costmodel import intervals, time
from t5bench.costmodel.intervals import Shift, Z
from t5bench.costmodel.job import Job
from t5bench.costmodel.machine import Machine
from t5bench.costmodel.ties import TOO_CLOSE

CERTAINTY = 0.95
LEAST_RUNS = 3
"""Before these, the machine may still be unlike everything that the model knows."""
UNLIKELY = 0.05
"""A layout is dropped if it is faster than the named one with less than this probability."""
LEAST_CHANCE = 1e-6
"""Of a layout to run at all, however often one tries."""
MOST_REPEATS = 3
"""Of a layout that may be as fast as the named one, as far as one run can show."""
SURPRISE = 3.0
"""A run that took so many standard deviations longer than all others led to expect was perhaps disturbed."""
USUAL_DIFFERENCE = 0.02
"""The standard deviation of the logarithms of a layout's times, as good as one repeated run: what is assumed of a
machine before its own runs show more."""
MOST_REGRET = 10.0
"""Where a possible regret is even larger, it does not matter how large."""


@dataclass(frozen=True)
class Option:
    """A layout that a search may measure."""

    name: str
    job: Job
    machine: Machine
    backend: str = "nccl"
    needed: float = 0.0
    """Bytes that the fullest device must have; 0 if that is not asked."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """What it sends: whether it divides layers, and whether it has pipeline stages. What is wrong about a link or
        a host concerns layouts of one kind alike, and no run of another kind shows it."""
        parallel = self.job.parallel
        return parallel.tensor > 1, parallel.pipeline > 1


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
    chance: float = 1.0
    """That it does not run out of memory."""

    @property
    def seconds(self) -> float:
        return exp(self.logarithm)

    def probability_below(self, other: "Expected", less: float = 0.0) -> float:
        """That the logarithm of its time is by `less`, or more, below that of another option's time."""
        distance = other.logarithm - less - self.logarithm
        deviation = sqrt(self.deviation**2 + other.deviation**2)
        if not deviation:
            return self.chance * float(distance > 0)
        return self.chance * (1 + erf(distance / deviation / sqrt(2))) / 2


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
    """Not measured, but surely slower, or too large."""
    runs: int
    new_kinds: Sequence[Expected] = ()
    """The one that is expected to be the fastest of each kind of which none ran."""
    largest_difference: float = 1.0
    """How many times as long as another run of the same layout one took; 1 before a layout ran twice."""
    has_repeats: bool = False
    """Whether a layout ran twice, so that something is known of how much runs differ."""

    @property
    def is_certain(self) -> bool:
        """Whether more runs would change nothing that matters."""
        if not self.has_repeats or self.new_kinds:
            return False
        return not self.left or (self.runs >= LEAST_RUNS and self.possible_regret <= TOO_CLOSE)


@dataclass
class Search:
    """The state of a search: what has been measured, and what failed."""

    options: Sequence[Option]
    measured: dict[str, SearchRun] = field(default_factory=dict)
    """By the option's name, in the order of the runs."""
    failed: set[str] = field(default_factory=set)
    """Options that cannot run; they are not considered any more."""
    ran_out: set[str] = field(default_factory=set)
    """Those of them that ran out of memory."""

    def known(self, without: str = "") -> Calibrated:
        """What the runs say of the machine. without: an option whose runs do not count."""
        by_name = {option.name: option for option in self.options}
        faster = self._faster_links()
        runs = []
        for name, outcome in self.measured.items():
            if name != without:
                option = by_name[name]
                machine = with_faster_links(option.machine, faster)
                runs.append(MeasuredTime(option.job, machine, outcome.seconds, option.backend))
        return calibrate(runs) if runs else Calibrated(Shift(), ())

    def _faster_links(self) -> float:
        """How many times as fast as they are said to be the links are at least, because a run took less time than
        sending alone would take."""
        faster = 1.0
        by_name = {option.name: option for option in self.options}
        for name, outcome in self.measured.items():
            option = by_name[name]
            while True:
                machine = with_faster_links(option.machine, faster)
                if time.iteration(option.job, machine, option.backend, 0.0).total <= outcome.seconds:
                    break
                faster *= 1.25
        return faster

    def capacity(self) -> Capacity:
        """What the runs say of the devices' memory."""
        ran = [option.needed for option in self.options if option.name in self.measured and option.needed]
        ran_out = [option.needed for option in self.options if option.name in self.ran_out and option.needed]
        least = min((option.needed for option in self.options if option.needed), default=0.0)
        return Capacity(self.options[0].machine.device.memory, ran, ran_out, least)

    def expected(self) -> list[Expected]:
        """Of every option that has not failed."""
        known = self.known()
        capacity = self.capacity()
        faster = self._faster_links()
        found = []
        for option in self.options:
            if option.name in self.failed:
                continue
            outcome = self.measured.get(option.name)
            if outcome:
                error = max(outcome.error, self.between_runs / sqrt(outcome.repeats))
                found.append(Expected(option, log(outcome.seconds), error, True))
                continue
            found.append(replace(_predicted(option, known, faster), chance=capacity.chance(option.needed)))
        return found

    def standing(self) -> Standing:
        """Raises ValueError if every option has failed."""
        expected = self.expected()
        if not expected:
            raise ValueError("every layout has failed")
        measured = [each for each in expected if each.is_measured]
        named = min(measured or expected, key=lambda each: each.logarithm)
        others = [each for each in expected if not each.is_measured and each is not named]
        runnable = [each for each in others if each.chance >= UNLIKELY]
        new_kinds = self._new_kinds(runnable)
        if self._is_young:
            left = list(runnable)
        else:
            left = [each for each in runnable if each.probability_below(named) >= UNLIKELY]
            left += [each for each in new_kinds if each not in left]
        if not measured:
            left.append(named)
        left.sort(key=in_turn)
        equals = [each for each in measured if each is not named and are_equal(each, named)]
        return Standing(
            named=named,
            equals=sorted(equals, key=lambda each: each.logarithm),
            possible_regret=possible_regret(named, [each for each in expected if each is not named]),
            left=left,
            dropped=len(others) - len([each for each in left if each is not named]),
            runs=self.runs,
            new_kinds=new_kinds,
            largest_difference=max((max(one.times) / min(one.times) for one in self._repeated), default=1.0),
            has_repeats=bool(self._repeated),
        )

    def _new_kinds(self, runnable: Sequence[Expected]) -> list[Expected]:
        """The one that is expected to be the fastest of each kind of which none was measured; none before a run."""
        ran = {option.kind for option in self.options if option.name in self.measured}
        best: dict[tuple[bool, bool], Expected] = {}
        if ran:
            for each in sorted(runnable, key=in_turn):
                if each.option.kind not in ran:
                    best.setdefault(each.option.kind, each)
        return list(best.values())

    @property
    def _repeated(self) -> list[SearchRun]:
        return [outcome for outcome in self.measured.values() if outcome.repeats > 1]

    @property
    def between_runs(self) -> float:
        """The standard deviation of the logarithms of an option's times, of all that ran again together, and at first
        of what is usual. It speaks for options that ran once."""
        squares = USUAL_DIFFERENCE**2
        freedom = 1
        for outcome in self._repeated:
            logarithms = [log(seconds) for seconds in outcome.times]
            squares += variance(logarithms) * (outcome.repeats - 1)
            freedom += outcome.repeats - 1
        return sqrt(squares / freedom)

    @property
    def runs(self) -> int:
        """All that were made of the measured options."""
        return sum(outcome.repeats for outcome in self.measured.values())

    def to_repeat(self, standing: Standing) -> Option | None:
        """Of the named option and those that may be as fast, the one with the fewest runs; None if more runs would
        not tell them apart, or each has MOST_REPEATS.

        The named one runs twice in any case: that shows how much the runs of this machine differ. So does one that took
        far longer than the others led to expect.
        """
        named = self.measured.get(standing.named.option.name)
        if named and named.repeats == 1:
            return standing.named.option
        disturbed = self._perhaps_disturbed(standing.named)
        if disturbed:
            return disturbed
        close = [each for each in standing.equals if not are_surely_equal(each, standing.named)]
        if not close:
            return None
        fewest = min([standing.named, *close], key=lambda each: self.measured[each.option.name].repeats)
        return fewest.option if self.measured[fewest.option.name].repeats < MOST_REPEATS else None

    def _perhaps_disturbed(self, named: Expected) -> Option | None:
        """An option whose only run took surprisingly long, and that would be as fast as the named one otherwise."""
        if len(self.measured) < LEAST_RUNS:
            return None
        faster = self._faster_links()
        known = self.known()
        for option in self.options:
            outcome = self.measured.get(option.name)
            if not outcome or outcome.repeats > 1:
                continue
            logarithm = log(outcome.seconds)
            with_it = _predicted(option, known, faster)
            if logarithm <= with_it.logarithm + with_it.deviation:
                continue  # the other runs alone are asked only where there is something to explain: it takes a while
            led_to_expect = _predicted(option, self.known(without=option.name), faster)
            is_surprising = logarithm > led_to_expect.logarithm + SURPRISE * led_to_expect.deviation
            if is_surprising and led_to_expect.probability_below(named) >= UNLIKELY:
                return option
        return None

    @property
    def _is_young(self) -> bool:
        return len(self.measured) < min(LEAST_RUNS, len(self.options)) or not self._repeated


def in_turn(each: Expected) -> tuple[bool, float]:
    """The fastest that rather runs than runs out of memory comes first; of those that rather run out of it, the one
    that is the fastest for the tries that it takes until one like it runs."""
    is_risky = each.chance < 0.5
    return is_risky, each.logarithm - (log(max(each.chance, LEAST_CHANCE)) if is_risky else 0.0)


def with_faster_links(machine: Machine, factor: float) -> Machine:
    """The machine with links of so many times the rate."""
    if factor == 1:
        return machine
    inside = replace(machine.inside, bandwidth=machine.inside.bandwidth * factor)
    between = replace(machine.between, bandwidth=machine.between.bandwidth * factor)
    return replace(machine, inside=inside, between=between)


def _predicted(option: Option, known: Calibrated, faster: float = 1.0) -> Expected:
    machine = with_faster_links(option.machine, faster)
    seconds = known.seconds(option.job, machine, option.backend)
    responses = known.responses(option.job, machine, option.backend)
    down, _ = intervals.factors(responses, known.own(option.job, machine))
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

    measure: None for an option that cannot run; if it ran out of memory, its name is in search.ran_out. may_go_on:
    whether the budget allows another run. The first layout that runs is the first to run again. It ends when the answer
    is certain, the named option ran twice, and those that one run cannot tell apart were repeated in turn, or when the
    budget is spent.
    Raises ValueError if every option fails.
    """
    standing = search.standing()
    yield standing
    while may_go_on(search):
        option = _next(search, standing)
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


def _next(search: Search, standing: Standing) -> Option | None:
    """The option to measure; None if nothing is left that matters."""
    if search.measured and not standing.has_repeats:
        return standing.named.option
    if standing.is_certain:
        return search.to_repeat(standing)
    is_near = standing.possible_regret <= TOO_CLOSE and standing.runs >= LEAST_RUNS
    if standing.new_kinds and (is_near or not standing.left):
        return standing.new_kinds[0].option
    return standing.left[0].option if standing.left else search.to_repeat(standing)
