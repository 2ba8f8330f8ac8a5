"""The search's decisions: replayed on published times, and where all layouts are equal."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from statistics import mean

import pytest

from t5bench.choose.search.capacity import Capacity
from t5bench.choose.search.command import bound
from t5bench.choose.search.next_run import (
    LEAST_RUNS,
    UNLIKELY,
    Expected,
    Option,
    Search,
    SearchRun,
    are_equal,
    in_turn,
    possible_regret,
    steps,
)
from t5bench.costmodel.machine import GIB, MIB, Link
from t5bench.costmodel.memory import memory_of
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
    regrets = [mean(search.regret_after(runs) for search in searches) for runs in (1, 3, 4, 6)]
    assert regrets == sorted(regrets, reverse=True)
    assert regrets[1] <= 0.03 and regrets[2] <= 0.015 and regrets[3] <= 0.005
    near = [search.runs_to_come_near for search in searches]
    assert len(searches) == 72 and sum(runs <= 4 for runs in near) >= 60 and max(near) <= 7


def test_it_stops_when_its_answer_is_certain(searches: list[Replayed]):
    assert mean(search.runs for search in searches) <= 4.5
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


def cells_of_a_choice() -> list[grid.GridPoint]:
    """Nine layouts of every kind among which one would choose."""
    return max(replay.choices(grid.read()), key=len)[::3]


def searched_with_equal_times(seed: int, noise: float) -> Search:
    """Among the layouts of the largest choice, all of which take a second."""
    cells = cells_of_a_choice()
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
    cells = cells_of_a_choice()
    options = [Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)]
    noise = 0.04
    measured = {option.name: SearchRun(2.0) for option in options}
    measured |= {"0": SearchRun(1.0, noise), "1": SearchRun(1.0, noise)}
    later = {"0": iter([0.9, 0.9]), "1": iter([1.0, 1.0])}
    order = []

    def measure(option: Option) -> SearchRun:
        order.append(option.name)
        return SearchRun(next(later[option.name]) if option.name in later else 2.0, noise)

    search = Search(options, measured=measured)
    standings = list(steps(search, measure, lambda so_far: True))
    assert order.count("0") == 2 and "1" in order, "in turn, until they can be told apart"
    assert standings[-1].named.option.name == "0"
    assert search.measured["0"].seconds == pytest.approx(0.9), "the median"
    assert search.measured["1"].error == pytest.approx(noise / 2**0.5), "two runs determine it better than one"
    assert search.measured["0"].error > search.measured["1"].error, "its runs differ by more than each shows"
    once = next(name for name, outcome in search.measured.items() if outcome.repeats == 1)
    expected = {each.option.name: each.deviation for each in search.expected()}
    assert expected[once] == search.between_runs > 0, "it ran once; its own iterations say nothing of another run"


def test_a_lucky_run_names_no_winner():
    """All layouts take a second, but the machine was free of other work during one run."""
    cells = cells_of_a_choice()
    options = [Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)]
    measured = {option.name: SearchRun(1.0, 0.005) for option in options} | {"0": SearchRun(0.7, 0.005)}
    search = Search(options, measured=measured)
    first, *_, last = steps(search, lambda option: SearchRun(1.0, 0.005), lambda so_far: so_far.runs <= len(cells))
    assert first.named.option.name == "0" and not first.equals
    assert last.equals, "its second run took as long as the others"


def test_a_layout_that_cannot_run_is_forgotten_and_the_budget_is_kept():
    cells = cells_of_a_choice()
    options = [Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)]
    search = Search(options)
    first = search.standing().left[0].option.name

    def measure(option: Option) -> SearchRun | None:
        return None if option.name == first else SearchRun(cells[int(option.name)].seconds)

    standings = list(steps(search, measure, lambda so_far: len(so_far.measured) < 2))
    assert search.failed == {first} and len(search.measured) == 2 and len(standings) == 5
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


def options_of(cells: Sequence[grid.GridPoint], needed: float = 0.0) -> list[Option]:
    return [Option(str(number), cell.job, cell.machine, needed=needed) for number, cell in enumerate(cells)]


def test_the_first_layout_runs_again_before_anything_is_dropped_or_certain():
    """Here one run alone would be enough: it took so little time that no other layout is expected to be as fast."""
    cells = cells_of_a_choice()
    order = []

    def measure(option: Option) -> SearchRun:
        order.append(option.name)
        return SearchRun(0.001 if option.name == order[0] else cells[int(option.name)].seconds)

    standings = list(steps(Search(options_of(cells)), measure, lambda so_far: so_far.runs < 4))
    assert order[0] == order[1] != order[2]
    assert not standings[0].dropped and not standings[1].dropped
    assert not any(standing.has_repeats for standing in standings[:2]) and standings[2].has_repeats
    assert not any(standing.is_certain for standing in standings[:2])


def test_no_answer_is_certain_before_each_kind_of_layout_ran():
    """What is wrong about a link shows only in runs of a kind that uses it."""
    cells = cells_of_a_choice()
    kinds = {option.kind for option in options_of(cells)}
    search = Search(options_of(cells))
    for standing in steps(search, lambda option: SearchRun(cells[int(option.name)].seconds), lambda so_far: True):
        measured = {option.kind for option in search.options if option.name in search.measured}
        assert not standing.is_certain or measured == kinds
    assert standing.is_certain and len(kinds) > 2


def test_runs_that_differ_say_so_from_the_second_on():
    cells = cells_of_a_choice()
    times = iter([1.0, 2.5])
    search = Search(options_of(cells))
    *_, standing = steps(search, lambda option: SearchRun(next(times)), lambda so_far: so_far.runs < 2)
    assert standing.largest_difference == pytest.approx(2.5)
    assert standing.possible_regret > 1
    assert "differ by 2.5 times on this machine, so nothing can be said yet" in bound(standing)


def test_a_run_that_took_surprisingly_long_runs_again():
    """The layout that is the fastest was disturbed in its first run."""
    cells = cells_of_a_choice()
    fastest = min(range(len(cells)), key=lambda number: cells[number].seconds)
    seen: list[str] = []

    def measure(option: Option) -> SearchRun:
        seen.append(option.name)
        factor = 4.0 if option.name == str(fastest) and seen.count(option.name) == 1 and len(seen) > 2 else 1.0
        return SearchRun(factor * cells[int(option.name)].seconds)

    search = Search(options_of(cells))
    slow = [number for number in range(len(cells)) if number != fastest][:2]
    search.measured = {
        str(number): SearchRun(cells[number].seconds, 0.0, [cells[number].seconds] * 2) for number in slow
    }
    seen += [str(number) for number in slow for _ in range(2)]
    *_, standing = steps(search, measure, lambda so_far: True)
    assert seen.count(str(fastest)) > 1, "its first run was believed"
    assert standing.named.option.name == str(fastest)


def test_links_that_are_faster_than_they_are_said_to_be_end_no_search():
    cells = cells_of_a_choice()
    options = options_of(cells)
    slow = replace(options[0].machine, inside=Link(1e6, 1e-5), between=Link(1e6, 1e-5))
    search = Search([replace(option, machine=slow) for option in options])
    *_, standing = steps(
        search, lambda option: SearchRun(cells[int(option.name)].seconds), lambda so_far: so_far.runs < 5
    )
    assert standing.runs == 5 and len(search.measured) > 2


def test_running_out_of_memory_is_knowledge_of_all_layouts():
    """Each such run costs one run; what needs as much comes last, and the fastest that then fits comes next."""
    cells = cells_of_a_choice()
    memory = {str(number): memory_of(cell.job).needed for number, cell in enumerate(cells)}
    options = [replace(option, needed=memory[option.name]) for option in options_of(cells)]
    for share in (0.25, 0.5, 0.75):
        limit = sorted(memory.values())[int(share * len(memory))]
        search = Search(options)
        failures = 0

        def measure(option: Option, search: Search = search, limit: float = limit) -> SearchRun | None:
            nonlocal failures
            if memory[option.name] > limit:
                failures += 1
                search.ran_out.add(option.name)
                return None
            return SearchRun(cells[int(option.name)].seconds)

        *_, standing = steps(search, measure, lambda so_far: True)
        assert standing.named.is_measured and memory[standing.named.option.name] <= limit
        that_fit = [cell.seconds for number, cell in enumerate(cells) if memory[str(number)] <= limit]
        assert standing.named.seconds <= 1.1 * min(that_fit)
        too_large = sum(needed > limit for needed in memory.values())
        assert failures < too_large, "it tried all that need as much as what had failed"


def test_a_known_size_is_moved_by_what_runs_and_what_does_not():
    size = 80 * GIB
    before = Capacity(size, [], []).chance(72 * GIB)
    assert Capacity(size, [], [70 * GIB]).chance(72 * GIB) < before < Capacity(size, [75 * GIB], []).chance(72 * GIB)
    assert Capacity(0, [70 * GIB], []).chance(1000 * GIB) == 1.0, "nothing is known of the size"
    assert Capacity(0, [], [70 * GIB]).chance(69 * GIB) < 0.5 < Capacity(0, [], [70 * GIB]).chance(10 * GIB)


def test_the_first_layout_that_runs_out_of_memory_does_not_rule_out_those_that_need_a_little_more():
    """Where the device's size is not known. Some layout probably runs, or nobody would search."""
    knowing = Capacity(0, [], [680 * MIB], least=678 * MIB)
    assert Capacity(0, [], [680 * MIB]).chance(690 * MIB) < UNLIKELY < knowing.chance(690 * MIB)
    assert knowing.chance(2 * 680 * MIB) < UNLIKELY


def test_of_layouts_that_rather_run_out_of_memory_a_small_one_is_tried_before_a_faster_one():
    option = Option("", grid.read()[0].job, grid.read()[0].machine)
    small = Expected(option, log(1.1), 0.1, False, chance=0.4)
    large = Expected(option, log(1.0), 0.1, False, chance=0.1)
    likely = Expected(option, log(2.0), 0.1, False, chance=0.6)
    assert sorted([large, small, likely], key=in_turn) == [likely, small, large]
