"""The generated part of LAYOUTBENCH.md and its picture."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.report import svg
from t5bench_evidence.layout_bench.bench import Entry, beside, cells, reasons
from t5bench_evidence.layout_bench.cases import CaseSet

BEGIN, END = "<!-- begin: python -m t5bench layout-bench --page -->", "<!-- end -->"
PICTURE = "layoutbench.svg"
MOST_SHOWN = 1.0
"""Where a bar of the picture ends."""


def write(path: Path, sets: Sequence[CaseSet], entries: Sequence[Entry], versions: Mapping[str, str]) -> None:
    """Writes the tables between BEGIN and END, and the picture beside the page. Raises Problem."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Problem(f"{path} has no place for the tables", f"Put these two lines into it: {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{generated(sets, entries, versions)}\n{END}{after}")
    svg.write(lambda: _picture(sets, entries), path.with_name(PICTURE))


def generated(sets: Sequence[CaseSet], entries: Sequence[Entry], versions: Mapping[str, str]) -> str:
    """The tables in Markdown."""
    parts = []
    for each in sets:
        rows = [{"planner": entry.planner} | cells(entry.score) for entry in entries if entry.set == each.name]
        covering = [row for row in rows if not row["covers"].startswith("0 of")]
        parts.append(f"### {each.name}\n\n{each.about[0].upper()}{each.about[1:]}.\n\n{_markdown(covering)}")
    parts.append(f"### Each beside this project, on what it covers\n\n{_markdown(beside(entries))}")
    rows = [
        {"planner": planner, "what it cannot express": reason, "layouts": str(count)}
        for planner, reason, count in reasons(entries)
    ]
    parts.append(f"### What each cannot express\n\n{_markdown(rows)}")
    asked = ", ".join(f"{name} {version[:12]}" for name, version in versions.items())
    parts.append(f"Asked: {asked}.")
    return "\n\n".join(parts) + "\n"


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table without the columns in which no row has anything."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [titles, ["---"] + ["--:"] * (len(titles) - 1)]
    lines += [[row[title] for title in titles] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _picture(sets: Sequence[CaseSet], entries: Sequence[Entry]) -> Any:
    from matplotlib.figure import Figure

    def error(entry: Entry) -> float | None:
        return entry.score.time.mean if entry.score.time else None

    def regret(entry: Entry) -> float | None:
        return entry.score.choices.regret if entry.score.choices else None

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, "times are off by, on average", sets, entries, error)
    _bars(right, "the named layout is slower than the fastest by, on average", sets, entries, regret)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    return figure


def _bars(
    axes: Any,
    title: str,
    sets: Sequence[CaseSet],
    entries: Sequence[Entry],
    value: Callable[[Entry], float | None],
) -> None:
    """A group of bars for each set of which two planners say something."""
    planners = list(dict.fromkeys(entry.planner for entry in entries if value(entry) is not None))
    shown = []
    for each in sets:
        known = [entry for entry in entries if entry.set == each.name and value(entry) is not None]
        if len(known) > 1:
            shown.append(each.name)
    names = list(dict.fromkeys(entry.planner for entry in entries))
    height = 0.8 / len(planners)
    for place, planner in enumerate(planners):
        of_planner = {entry.set: value(entry) for entry in entries if entry.planner == planner}
        places = []
        lengths = []
        for row, name in enumerate(shown):
            found = of_planner.get(name)
            if found is not None:
                places.append(row + place * height)
                lengths.append(min(found, MOST_SHOWN))
        axes.barh(places, lengths, height, label=planner, color=f"C{names.index(planner)}")
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(shown))], shown)
    axes.invert_yaxis()
    axes.set_title(title, fontsize="medium")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
