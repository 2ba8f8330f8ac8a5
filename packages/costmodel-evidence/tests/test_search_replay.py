"""The search's decisions: replayed on published times, and where all layouts are equal."""

import random
from math import exp
from statistics import mean

import pytest

from t5bench.choose.search.next_run import (
    LEAST_RUNS,
    Expected,
    Option,
    Search,
    SearchRun,
    are_equal,
    possible_regret,
    steps,
)
from t5bench_evidence import grid, replay
from t5bench_evidence.replay import Replayed

pytestmark = pytest.mark.slow  # ranks up to 26 layouts after each of some 240 runs


@pytest.fixture(scope="module")
def searches() -> list[Replayed]:
    found = [replay.replay(choice) for choice in replay.choices(grid.read())]
    print(replay.summary(found))
    return found


def test_a_few_runs_come_near_the_fastest(searches: list[Replayed]):
    """Measured one after another: nothing of the machine was known before. The names' order is that of each search."""
    regrets = [mean(search.regret_after(runs) for search in searches) for runs in (1, 3, 4, 5)]
    assert regrets == sorted(regrets, reverse=True)
    assert regrets[1] <= 0.015 and regrets[2] <= 0.01 and regrets[3] <= 0.005
    near = [search.runs_to_come_near for search in searches]
    assert len(searches) == 72 and sum(runs <= 3 for runs in near) >= 60 and max(near) <= 6


def test_it_stops_when_its_answer_is_certain(searches: list[Replayed]):
    assert mean(search.runs for search in searches) <= 4
    assert all(search.runs >= min(LEAST_RUNS, search.options) for search in searches)
    assert mean(search.runs / search.options for search in searches) <= 0.6
    assert mean(search.regrets[-1] for search in searches) <= 0.005


def test_what_it_says_of_the_possible_regret_holds_nineteen_times_in_twenty(searches: list[Replayed]):
    held = [
        regret <= possible
        for search in searches
        for regret, possible in zip(search.regrets, search.possible_regrets, strict=True)
    ]
    assert mean(held) >= 0.94
    last = [search.regrets[-1] <= search.possible_regrets[-1] + replay.NEAR for search in searches]
    assert mean(last) >= 0.95


def searched_with_equal_times(seed: int, noise: float) -> Search:
    """Among the layouts of the largest choice, all of which take a second."""
    cells = max(replay.choices(grid.read()), key=len)
    search = Search([Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)])
    dice = random.Random(seed)
    for _ in steps(search, lambda option: SearchRun(exp(dice.gauss(0, noise)), noise), lambda so_far: True):
        pass
    return search


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_equal_layouts_are_too_close_to_call(noise: float):
    for seed in range(3):
        search = searched_with_equal_times(seed, noise)
        standing = search.standing()
        assert standing.is_certain and standing.equals, "a winner among equals"
        repeats = max(outcome.repeats for outcome in search.measured.values())
        assert repeats == 3 if noise == 0.02 else repeats <= 3, "more runs would not tell them apart"


def test_what_one_run_cannot_tell_apart_runs_again_in_turn():
    """A disturbance made the first run of the faster one of two layouts look as slow as the other's."""
    cells = max(replay.choices(grid.read()), key=len)
    options = [Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)]
    noise = 0.04
    measured = {option.name: SearchRun(2.0) for option in options}
    measured |= {"0": SearchRun(1.0, noise), "1": SearchRun(1.0, noise)}
    later = {"0": iter([0.9, 0.9]), "1": iter([1.0, 1.0])}
    order = []

    def measure(option: Option) -> SearchRun:
        order.append(option.name)
        return SearchRun(next(later[option.name]), noise)

    search = Search(options, measured=measured)
    standings = list(steps(search, measure, lambda so_far: True))
    assert order == ["0", "1", "0"], "in turn, until they can be told apart"
    assert standings[-1].named.option.name == "0" and standings[-1].runs == len(options) + 3
    assert search.measured["0"].seconds == pytest.approx(0.9), "the median"
    assert search.measured["1"].error == pytest.approx(noise / 2**0.5), "two runs determine it better than one"
    assert search.measured["0"].error > search.measured["1"].error, "its runs differ by more than each shows"
    expected = {each.option.name: each.deviation for each in search.expected()}
    assert expected["2"] == search.between_runs > 0, "it ran once; its own iterations say nothing of another run"


def test_a_lucky_run_names_no_winner():
    """All layouts take a second, but the machine was free of other work during one run."""
    cells = max(replay.choices(grid.read()), key=len)
    options = [Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)]
    measured = {option.name: SearchRun(1.0, 0.005) for option in options} | {"0": SearchRun(0.7, 0.005)}
    search = Search(options, measured=measured)
    first, *_, last = steps(search, lambda option: SearchRun(1.0, 0.005), lambda so_far: True)
    assert first.named.option.name == "0" and not first.equals
    assert last.equals and last.named.seconds == pytest.approx(1.0), "its other two runs took as long as the others"


def test_a_layout_that_cannot_run_is_forgotten_and_the_budget_is_kept():
    cells = max(replay.choices(grid.read()), key=len)
    options = [Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)]
    search = Search(options)
    first = search.standing().left[0].option.name

    def measure(option: Option) -> SearchRun | None:
        return None if option.name == first else SearchRun(cells[int(option.name)].seconds)

    standings = list(steps(search, measure, lambda so_far: len(so_far.measured) < 2))
    assert search.failed == {first} and len(search.measured) == 2 and len(standings) == 4
    assert first not in [standings[-1].named.option.name, *(each.option.name for each in standings[-1].left)]
    again = Search(options, measured=dict(search.measured), failed=set(search.failed))
    assert again.standing().left[0].option.name == standings[-1].left[0].option.name, "it continues where it stopped"
    with pytest.raises(ValueError, match="every layout has failed"):
        Search(options, failed={option.name for option in options}).standing()


def test_the_possible_regret_is_that_of_independent_errors():
    cell = grid.read()[0]
    option = Option("", cell.job, cell.machine)
    named = Expected(option, 0.0, 0.0, True)
    one = Expected(option, 0.1, 0.1, False)
    # One of 20 such times is below exp(0.1 - 1.645 x 0.1).
    assert possible_regret(named, [one]) == pytest.approx(exp(0.0645) - 1, abs=1e-3)
    assert possible_regret(named, [one, one]) > possible_regret(named, [one])
    assert possible_regret(named, [Expected(option, 1.0, 0.1, False)]) == 0
    assert are_equal(named, Expected(option, 0.02, 0.0, True)) and not are_equal(
        named, Expected(option, 0.1, 0.0, True)
    )
    assert are_equal(named, Expected(option, 0.1, 0.1, True)), "noise may explain the difference"
