"""The course of a search: minutes of runs against the possible regret."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t5bench.choose.search.runs import Moment
from t5bench.costmodel.ties import TOO_CLOSE

LARGEST = 100.0
"""Per cent; it does not matter how much larger a possible regret is."""


def draw(moments: Sequence[Moment], titles: Mapping[str, str], path: Path) -> None:
    """An SVG file. After each run: which layout is named, and how much slower than the fastest it is at most.

    titles: of layouts, by name.
    """
    from t5bench.report import svg

    svg.write(lambda: _course(moments, titles), path)


def _course(moments: Sequence[Moment], titles: Mapping[str, str]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    axes = figure.subplots()
    minutes = [moment.minutes for moment in moments]
    percent = [min(LARGEST, 100 * moment.possible_regret) for moment in moments]
    axes.step(minutes, percent, color="grey", linewidth=1, where="post")
    for name in dict.fromkeys(moment.named for moment in moments):
        own = [place for place, moment in enumerate(moments) if moment.named == name]
        at = [minutes[place] for place in own]
        axes.plot(at, [percent[place] for place in own], "o", label=titles.get(name, name))
    axes.axhline(100 * TOO_CLOSE, color="grey", linestyle=":", label=f"{TOO_CLOSE:.0%}: the search may stop")
    axes.set(xlabel="minutes of runs", ylabel="at most so much slower\nthan the fastest layout, %")
    axes.set(ylim=(0, None), xlim=(0, None))
    figure.legend(title="named after a run", loc="outside right upper")
    return figure
