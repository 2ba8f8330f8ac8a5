"""Searches among published times: how many runs does a search need until it names a layout near the fastest?

Each choice of a100_grid.csv is searched, with measurements that come from the table. The decisions are those of
choose/search/next_run.py, as in a live search.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from t5bench.choose.search.next_run import Option, Search, SearchRun, Standing, steps
from t5bench_evidence.grid import GridPoint

NEAR = 0.03


@dataclass(frozen=True)
class Replayed:
    """One search to its end."""

    options: int
    regrets: Sequence[float]
    """How much slower the named layout is than the fastest, before the first run and after each."""
    possible_regrets: Sequence[float]
    """What the search would have said of that."""
    runs: int
    """Until it stopped."""

    def regret_after(self, runs: int) -> float:
        return self.regrets[min(runs, len(self.regrets) - 1)]

    @property
    def runs_to_come_near(self) -> int:
        """After how many runs the named layout is, and stays, within 3 % of the fastest."""
        far = [number for number, regret in enumerate(self.regrets) if regret > NEAR]
        return far[-1] + 1 if far else 0


def choices(cells: Iterable[GridPoint]) -> list[list[GridPoint]]:
    """The cells among which one would choose."""
    found: dict[tuple[int, int, int, int], list[GridPoint]] = {}
    for cell in cells:
        found.setdefault(cell.choice, []).append(cell)
    return list(found.values())


def replay(cells: Sequence[GridPoint]) -> Replayed:
    """Searches among the cells of one choice."""
    options = [Option(str(number), cell.job, cell.machine) for number, cell in enumerate(cells)]
    return replay_options(options, {str(number): cell.seconds for number, cell in enumerate(cells)})


def replay_options(options: Sequence[Option], seconds: Mapping[str, float]) -> Replayed:
    """seconds: what an iteration of each takes, by the option's name."""
    fastest = min(seconds.values())
    standings: list[Standing] = []
    search = Search(options)
    for standing in steps(search, lambda option: SearchRun(seconds[option.name]), lambda so_far: True):
        standings.append(standing)
    regrets = [seconds[standing.named.option.name] / fastest - 1 for standing in standings]
    return Replayed(
        options=len(options),
        regrets=regrets,
        possible_regrets=[standing.possible_regret for standing in standings],
        runs=len(search.measured),
    )


def summary(searches: Sequence[Replayed]) -> str:
    """In lines, for people."""
    options = [search.options for search in searches]
    lines = [f"{len(searches)} choices among {min(options)} to {max(options)} layouts, mean {mean(options):.0f}"]
    for runs in (0, 1, 2, 3, 4, 5, 6):
        regrets = [search.regret_after(runs) for search in searches]
        near = sum(regret <= NEAR for regret in regrets)
        lines.append(f"after {runs} runs: mean regret {mean(regrets):.1%}, worst {max(regrets):.1%}, {near} within 3 %")
    runs = [search.runs for search in searches]
    lines.append(f"stopped after {min(runs)} to {max(runs)} runs, mean {mean(runs):.1f}")
    lines.append(f"regret then: mean {mean(search.regrets[-1] for search in searches):.2%}")
    return "\n".join(lines)
