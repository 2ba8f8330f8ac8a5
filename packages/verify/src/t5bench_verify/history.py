"""``python -m t5bench history``: the same rows over commits, releases and drivers; how they scale; what they cost.

A change counts only where the intervals of the two throughputs leave no doubt. The records are believed as they are:
``verify`` a package from elsewhere first.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from t5bench import Problem, note
from t5bench.printed_table import table
from t5bench.report.tables import mark, rounded
from t5bench.text import visible
from t5bench_verify.trends import (
    PackageRow,
    changes,
    histories,
    history_rows,
    points_of_all,
    scaling,
    scaling_rows,
    title_of,
)


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    return table(rows)


def text_of(points: Sequence[PackageRow], price: float | None) -> str:
    """What the terminal shows."""
    parts = []
    for history in histories(points):
        parts.append(f"{title_of(history[0])}\n{_table(history_rows(history, price))}")
    for curve in scaling(points):
        fixed = "global batch" if curve[0].kind == "strong" else "batch per process"
        title = f"{curve[0].point.row.strategy}: {curve[0].kind} scaling, the same {fixed}"
        parts.append(f"{title}\n{_table(scaling_rows(curve))}")
    if any(point.row.alone for point in points):
        parts.append(f"{mark_of_alone(points)} fewer than 3 repeats: what changed may be the machine's state")
    return "\n\n".join(parts) + "\n"


def mark_of_alone(points: Sequence[PackageRow]) -> str:
    return next(mark(point.row) for point in points if point.row.alone)


def as_json(points: Sequence[PackageRow], price: float | None) -> dict[str, Any]:
    """The same for programs, in the units that the keys name."""
    return {
        "histories": [
            {
                "row": title_of(history[0]),
                "points": [
                    {
                        "place": point.place,
                        "started": point.started,
                        **point.made_with,
                        "samples_per_second": asdict(point.speed),
                        "ratio_to_the_one_before": asdict(change.ratio) if change else None,
                        "verdict": change.verdict if change else None,
                        "joules_per_sample": point.joules,
                        "cost_of_a_million_samples": point.cost(price) if price else None,
                    }
                    for point, change in zip(history, changes(history), strict=True)
                ],
            }
            for history in histories(points)
        ],
        "scaling": [
            {
                "strategy": curve[0].point.row.strategy,
                "kind": curve[0].kind,
                "points": [
                    {
                        "processes": scaled.point.run.world_size,
                        "global_batch": scaled.point.row.batch,
                        "samples_per_second": scaled.point.speed.median,
                        "speed_up": scaled.speed_up,
                        "efficiency": scaled.efficiency,
                    }
                    for scaled in curve
                ],
            }
            for curve in scaling(points)
        ],
    }


def write_page(points: Sequence[PackageRow], price: float | None, path: Path) -> None:
    """One HTML file that asks nothing of any network. Raises Problem."""
    from t5bench_verify.history_page import render

    if path.suffix != ".html":
        raise Problem(f"--output must be a .html file, found '{path}'", "For example: --output history.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(visible(render(points, price), "\t\n"), encoding="utf-8")
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error.strerror}", "Name another file: --output FILE") from error


def run(arguments: argparse.Namespace) -> int:
    """Raises Problem."""
    for place in arguments.places:
        if not Path(place).exists():
            raise Problem(f"there is no package or directory {place}", "Name packages, or directories with runs")
    points = points_of_all(arguments.places)
    if not points:
        raise Problem("none of these runs has a measured time", "Name others: complete runs with logged iterations")
    if arguments.json:
        print(json.dumps(rounded(as_json(points, arguments.price)), indent=2))
    else:
        print(visible(text_of(points, arguments.price), "\n"), end="")
    if arguments.output:
        write_page(points, arguments.price, arguments.output)
        note(f"page: {arguments.output}")
    return 0
