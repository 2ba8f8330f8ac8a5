"""A comparison as one HTML file that asks nothing of any network."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from t5bench.compare import statistics
from t5bench.compare.comparable import setting, show
from t5bench.compare.comparison import Comparison, Row, limits
from t5bench.report import tables
from t5bench.report.figures import all_figures, page_colour


@dataclass(frozen=True)
class Fact:
    """A named value of a run; by row where rows differ."""

    name: str
    values: Sequence[str]


def _facts(rows: Sequence[Row]) -> tuple[list[Fact], list[Fact]]:
    """All settings, versions and commits: those that are the same in all rows, and those that are not."""
    named: dict[str, list[str]] = {}
    for position, row in enumerate(rows):
        for name, value in _of_run(row).items():
            named.setdefault(name, ["(none)"] * len(rows))[position] = show(value)
    same = [Fact(name, values[:1]) for name, values in named.items() if len(set(values)) == 1]
    different = [Fact(name, values) for name, values in named.items() if len(set(values)) > 1]
    return same, different


def _of_run(row: Row) -> Mapping[str, Any]:
    record = row.run.record
    facts = {name: setting(row.run, name) for name in record["settings"]}
    facts |= {f"version of {name}": value for name, value in (record.get("versions") or {}).items()}
    facts |= {f"commit ({name})": value for name, value in (record.get("commits") or {}).items()}
    facts |= {f"data: {name}": value for name, value in (record.get("data") or {}).items()}
    facts |= {
        name: row.run.layout.get(name) for name in ("tp", "pp", "dp", "nnodes", "micro_batches", "padded_vocab_size")
    }
    facts["ds_config"] = json.dumps(config) if (config := record.get("ds_config")) else None
    facts["patches"] = record.get("engine_patches")
    facts["hosts"] = " ".join(node["host"] for node in row.run.nodes)
    facts["run directories"] = ", ".join(str(run.directory) for run in row.runs)
    return facts


def _dates(comparison: Comparison) -> str:
    days = sorted({str(run.record["started"])[:10] for run in comparison.runs})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _paragraphs(text: str) -> list[str]:
    """Paragraphs and list items of a docstring, each without the line breaks that it was written with."""
    return [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=- )", text)]


def render(comparison: Comparison) -> str:
    """The page, complete."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = comparison.rows
    same, different = _facts(rows)
    return environment.get_template("page.html.j2").render(
        comparison=comparison,
        rows=rows,
        columns=[
            *(column for column in tables.columns(comparison) if column.title != tables.PROCESSES),  # in the headings
            tables.gradients_column(),
        ],
        caption=tables.caption(comparison),
        remarks=tables.remarks(comparison),
        method=tables.method(comparison),
        paper=_paragraphs((statistics.__doc__ or "").split("\n\n", 1)[1]),
        # The only text that is not escaped: matplotlib escaped what it drew.
        figures=[(figure, Markup(figure.svg)) for figure in all_figures(comparison)],
        limits=[(row, text) for row in rows if (text := limits(row))],
        colour=page_colour,
        dates=_dates(comparison),
        same=same,
        different=different,
    )
