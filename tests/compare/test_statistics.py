"""The statistics of a run, against numbers worked out by hand."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from made_runs import made_plan

from t5bench.compare import statistics
from t5bench.compare.statistics import (
    EVENT,
    NOT_FINITE,
    OTHERWISE,
    RAMP_UP,
    RESUMED,
    SKIPPED,
    WARM_UP,
    event_within,
    mser,
    timing,
)
from t5bench.record.log import Iteration

LINE = Iteration(1, 10_000, 100.0, 8.0, 1e-4, 160.0, 0.01)


def lines_of(times: Sequence[float], log_interval: int = 1, begin: int = 0) -> list[Iteration]:
    numbered = enumerate(times, 1)
    return [replace(LINE, iteration=begin + number * log_interval, elapsed_ms=float(time)) for number, time in numbered]


def timing_of(times: Sequence[float], log_interval: int = 1, begin: int = 0, **settings: str) -> statistics.Timing:
    plan = made_plan(settings={"LOG_INTERVAL": str(log_interval)} | settings)
    return timing(lines_of(times, log_interval, begin), plan)


def burdened(start: int, end: int, **settings: int) -> bool:
    return event_within(start, end, made_plan(settings={name: str(value) for name, value in settings.items()}))


@given(st.integers(0, 500), st.integers(1, 60), st.integers(0, 70), st.integers(0, 70), st.integers(0, 2))
def test_events_as_they_are_defined(start, length, save, evaluate, eval_iters):
    """The start of a run is no event, and evaluations count only when there are any."""
    periods = [save] * (save > 0) + [evaluate] * (evaluate > 0 and eval_iters > 0)
    events = {e for period in periods for e in range(period, start + length + 1, period)}
    found = burdened(start, start + length, SAVE_INTERVAL=save, EVAL_INTERVAL=evaluate, EVAL_ITERS=eval_iters)
    assert found == any(start <= e < start + length for e in events)
    # A profile burdens its iteration and the one before.
    assert [end for end in range(1, 10) if burdened(end - 1, end, PROFILE_ITERATION=5)] == [4, 5]


def test_intervals_with_checkpoints_are_dropped_unless_all_have_one():
    # Lines at 10, 20 ... 100; checkpoints after 40 and 80 burden those that end at 50 and 90.
    found = timing_of([100] * 10, 10, SAVE_INTERVAL="40")
    assert found.dropped == {10: WARM_UP, 20: WARM_UP, 50: EVENT, 90: EVENT}
    assert found.used == [30, 40, 60, 70, 80, 100]
    found = timing_of([100] * 10, 10, SAVE_INTERVAL="5")
    assert EVENT not in found.dropped.values() and "would leave no data" in found.warning


def test_only_the_full_batch_counts():
    plan = made_plan(settings={"LOG_INTERVAL": "1", "TRAIN_ITERS": "60", "RAMPUP_BATCH_SIZE": "4 4 48"})
    # 16 samples at 4 and at 8 and, after 44, once more at 12.
    assert plan.ramp == [4] * 4 + [8] * 2 + [12] * 2 and plan.iterations == 8 + (60 * 16 - 56) // 16
    assert (plan.samples(0, 5), plan.samples(8, 10)) == (24, 32)
    found = timing(lines_of([50] * 8 + [100] * 52), plan)
    assert found.batch == 16 and list(found.dropped.values()).count(RAMP_UP) == 8
    short = timing(lines_of([50] * 6), plan)
    assert short.batch == 8 and "for 8 samples, not 16" in short.warning


def test_twenty_iterations_are_warm_up():
    found = timing_of([100] * 50)
    assert found.dropped == dict.fromkeys(range(1, 21), WARM_UP)
    assert found.used == [*range(21, 51)] and not found.warning
    assert list(timing_of([100] * 50, 20).dropped) == [20]
    # (0, 15] and (15, 30] begin before iteration 20 is over.
    assert list(timing_of([100] * 50, 15).dropped) == [15, 30]
    # From where a resumed run began.
    assert list(timing_of([100] * 50, 20, begin=500).dropped) == [520]


def test_what_another_strategy_trained_is_no_time_of_this_one():
    lines = [replace(line, begin=40 * (line.iteration > 40)) for line in lines_of([900] * 40 + [100] * 60)]
    plan = replace(made_plan(settings={"LOG_INTERVAL": "1"}), changed_at=40)
    found = timing(lines, plan)
    assert [number for number, reason in found.dropped.items() if reason == OTHERWISE] == [*range(1, 41)]
    assert found.milliseconds.median == 100 and found.used == [*range(61, 101)]


def test_twenty_iterations_after_a_resume_are_warm_up_too():
    lines = [replace(line, begin=40 * (line.iteration > 40)) for line in lines_of([100] * 100)]
    found = timing(lines, made_plan(settings={"LOG_INTERVAL": "1", "SAVE_INTERVAL": "50"}))
    assert [number for number, reason in found.dropped.items() if reason == RESUMED] == [*range(41, 51), *range(52, 61)]
    assert found.dropped[51] == EVENT and found.used == [*range(21, 41), *range(61, 101)]


def test_a_run_that_settles_late_loses_what_came_before():
    # 30 slow intervals, then 70 that go up and down: the truncation with the least standard error is at 30.
    found = timing_of([200.0] * 30 + [100.0, 101.0] * 35)
    assert found.used[0] == 31
    assert found.milliseconds.median == 100.5


def test_mser_by_hand():
    # Squared deviations of the rest over its size squared: 24.75/16, 0.667/9 and, at the last cut looked at, 0/4.
    assert mser([7, 2, 1, 1]) == 2
    # 6/36, 4.8/25, 4/16, 2.67/9: nothing to cut from what only alternates.
    assert mser([1, 3, 1, 3, 1, 3]) == 0
    assert mser([5.0] * 9) == 0


def test_a_short_run_drops_fewer_and_warns():
    found = timing_of([300, 100, 101, 102, 103, 104, 105, 106])
    # 20 iterations would be everything: a quarter of 8 is 2.
    assert list(found.dropped) == [1, 2]
    assert "2 of 8" in found.warning
    assert timing_of([300]).used == [1]
    assert timing_of([300, 100]).used == [2]
    assert timing_of([300, 100, 100]).used == [2, 3]
    assert timing([], made_plan()) is None


def test_skipped_iterations_and_lines_without_a_time_do_not_count():
    lines = lines_of([100.0] * 40)
    lines[30] = replace(lines[30], skipped=1, elapsed_ms=10.0)
    lines[35] = replace(lines[35], elapsed_ms=math.inf)
    found = timing(lines, made_plan())
    assert found.dropped[31] == SKIPPED and found.dropped[36] == NOT_FINITE
    assert Counter(found.dropped.values()) == {WARM_UP: 20, SKIPPED: 1, NOT_FINITE: 1}
    assert found.milliseconds.median == 100.0


times = st.lists(st.floats(1, 1e5), min_size=1, max_size=120)


@given(times, st.integers(1, 30), st.integers(0, 40), st.integers(0, 40))
def test_something_always_counts_and_nothing_is_lost(values, log_interval, save, evaluate):
    settings = {"SAVE_INTERVAL": str(save), "EVAL_INTERVAL": str(evaluate), "EVAL_ITERS": "1"}
    found = timing_of(values, log_interval, **settings)
    assert found.used
    assert sorted([*found.used, *found.dropped]) == [number * log_interval for number in range(1, len(values) + 1)]
    assert min(values) <= found.milliseconds.median <= max(values)
    if len(found.used) < statistics.FEWEST_INTERVALS and len(values) > 1:
        assert found.warning


def test_outliers_and_quartiles_by_hand():
    # Of what counts, the values after the twentieth, the quartiles are 2 and 4, and the fences -1 and 7.
    found = timing_of([1] * 20 + [1, 2, 3, 4, 100])
    assert (found.spread, found.outliers) == ((2, 4), 1)
    assert timing_of([1] * 20 + [1, 2, 3, 4, 7]).outliers == 0
    assert (timing_of([5]).spread, timing_of([5]).outliers) == ((5, 5), 0)
