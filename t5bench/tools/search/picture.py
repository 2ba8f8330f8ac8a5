"""The course of a search: minutes of runs against the possible regret."""

from collections.abc import Sequence
from pathlib import Path

from t5bench.costmodel.search import TOO_CLOSE
from t5bench.tools.search.runs import Moment


def draw(moments: Sequence[Moment], path: Path) -> None:
    """An SVG file. After each run: how much slower than the fastest layout the named one is at most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    minutes = [moment.minutes for moment in moments]
    percent = [100 * moment.possible_regret for moment in moments]
    axes.step(minutes, percent, "k.-", where="post")
    axes.axhline(100 * TOO_CLOSE, color="grey", linestyle=":")
    axes.set(xlabel="minutes of runs", ylabel="possible regret, %", ylim=(0, None), xlim=(0, None))
    named = ""
    for moment in moments:
        if moment.named != named:
            axes.annotate(moment.named, (moment.minutes, 100 * moment.possible_regret), fontsize="x-small")
        named = moment.named
    figure.savefig(path, format="svg")
