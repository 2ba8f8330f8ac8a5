"""A picture of one choice of the lab: what each layout took, what was predicted of it, and what the search starts."""

from pathlib import Path
from typing import Any

from t5bench.choose.search.runs import name_of
from t5bench.report import svg
from t5bench_evidence.lab import LabChoice

MEASURED, STARTED = "#9dbbd9", "#3b6ea5"


def write(choice: LabChoice, path: Path) -> None:
    """A file of SVG."""
    svg.write(lambda: _picture(choice), path)


def _picture(choice: LabChoice) -> Any:
    from matplotlib.figure import Figure

    candidates = {name_of(candidate): candidate for candidate in choice.candidates()}
    names = sorted(choice.seconds, key=choice.seconds.__getitem__)
    start = choice.search.start
    figure = Figure(figsize=(9, 0.36 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [choice.seconds[name] for name in names], color=MEASURED, label="measured")
    axes.barh([start], [choice.seconds[start]], color=STARTED, label="measured; the search starts it")
    predicted = [candidates[name].seconds for name in names]
    axes.plot(predicted, names, "D", color=svg.INK, label="predicted before any run")
    axes.set_yticks(range(len(names)), [candidates[name].title for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("seconds per iteration")
    figure.suptitle(f"{choice.name[0].upper()}{choice.name[1:]} parameters: CPUs, native engine")
    axes.legend(loc="upper right", frameon=True, framealpha=0.9, facecolor=svg.PAPER, edgecolor="none")
    return figure
