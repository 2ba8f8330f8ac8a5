"""A comparison as one HTML file that asks nothing of any network."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from t5bench.compare import interval, repeats, statistics
from t5bench.compare.comparable import differing, show
from t5bench.compare.comparison import Comparison
from t5bench.compare.limits import limits
from t5bench.compare.parity import DIFFERENT, EQUAL
from t5bench.compare.rows import Row
from t5bench.record.records import Run
from t5bench.record.status import COMPLETE
from t5bench.report import tables
from t5bench.report.costs import all_figures
from t5bench.report.drawing import drawings, styles
from t5bench.report.figures import LONGEST_NAME, Figure, rows_of
from t5bench.report.profiles import why

HERE = Path(__file__).parent
SCRIPTS = ("vendor/chart-4.5.1.umd.min.js", "page.js")
MOST_BYTES, BYTES_OF_ROW, BYTES_OF_REST = 880_000, 3_000, 320_000
DRAWN = 2.2  # the bytes of a figure as data and drawn, for one as data
MOST_ROWS = (64, 32, 16, 8, 4, 2)  # in the figures
MINOR = 15  # columns up to this importance stand in a line below their row


def _facts(run: Run) -> dict[str, Any]:
    """All that is known of a run before it begins, by name."""
    plan, record = run.plan, run.record
    facts: dict[str, Any] = {name: setting.value for name, setting in plan.settings.items()} | asdict(run.layout)
    for part, of in (("version of", "versions"), ("commit of", "commits"), ("data:", "data")):
        facts |= {f"{part} {name}": value for name, value in record[of].items()}
    return facts | {
        "padded_vocab_size": run.padded_vocab_size,
        "engine": plan.engine,
        "engine patches": plan.engine_patches,
        "engine arguments": " ".join(f"{name} {value}".strip() for name, value in plan.engine_arguments.items()),
        "device": plan.device,
        "ds_config": json.dumps(plan.ds_config),
        "hosts": " ".join(node["host"] for node in run.nodes),
        "directory": str(run.directory),
    }


def _cell(column: tables.Column, row: Row) -> tuple[str, str, str]:
    """Its text, what stands small below that (an interval, or a remark in brackets), and its class."""
    whole = column.text(row)
    brackets = re.search(r" [\[(]", whole)
    text = whole[: brackets.start()] if brackets else whole
    if text in (EQUAL, COMPLETE):
        return text, whole[len(text) :], "yes"
    return text, whole[len(text) :], "no" if text == DIFFERENT or column.title == "status" else ""


def command(run: Run) -> str:
    """What starts the run again: every setting that is not at its default, but for where this run was put."""
    plan = run.plan
    chosen = {
        name: one.value
        for name, one in plan.settings.items()
        if one.value not in (one.default, plan.output_dir) and one.role != "label" and not one.is_secret
    }
    words = [f"{name}={shlex.quote(value)}" for name, value in chosen.items()]
    words += ["bash", f"scripts/run_megatron_t5_{plan.strategy.name}.sh"]
    words += [shlex.quote(plan.master_address), "0"] if run.layout.nnodes > 1 else []
    return " ".join([*words, *(["--", *map(shlex.quote, plan.arguments.extra)] if plan.arguments.extra else [])])


def _figures(comparison: Comparison, root: Path, rows: int) -> tuple[list[Figure], int]:
    """Of as many rows as a page of MOST_BYTES has room for, and of how many."""
    room = MOST_BYTES - BYTES_OF_REST - BYTES_OF_ROW * rows
    for most in MOST_ROWS:
        figures = all_figures(comparison, root, most)
        if DRAWN * len(msgspec.json.encode(figures)) < room:
            break
    return figures, min(most, rows)


def render(comparison: Comparison, root: Path = Path()) -> str:
    """The page, complete. root: what the runs' directories are relative to."""
    loader = FileSystemLoader(HERE)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    columns, different = tables.columns(comparison), differing(_facts, comparison.runs)
    short = [f"{name}: {label}" for label, name in tables.short_labels(comparison, LONGEST_NAME).items()]
    rows, style = rows_of(comparison), styles(comparison)
    figures, drawn = _figures(comparison, root, len(rows))
    looks = {name: style[row.strategy] for name, row in rows.items()}
    about = {}
    for name, row in rows.items():
        colour, dashes = looks[name]
        about[name] = {"strategy": row.strategy, "processes": row.run.world_size, "engine": row.run.engine}
        about[name] |= {"colour": colour, "dashes": [3 * length for length in dashes]}
    data = msgspec.json.encode({"rows": about, "figures": figures}).decode()
    days = sorted({run.record["started"][:10] for run in comparison.runs})
    return environment.get_template("page.html.j2").render(
        comparison=comparison,
        tables=tables,
        names={(row.label, row.run.directory): name for name, row in rows.items()},
        choices={
            key: list(dict.fromkeys(its[key] for its in about.values())) for key in ("strategy", "processes", "engine")
        },
        columns=[column for column in columns if column.importance > MINOR],
        minor=[column for column in columns if column.importance <= MINOR],
        cell=_cell,
        command=command,
        colours={strategy: colour for strategy, (colour, _) in style.items()},
        remarks=short + tables.remarks(comparison),
        # Paragraphs and list items, without the line breaks that they were written with.
        paper=[part for of in (statistics, interval, repeats) for part in re.split(r"\n\n|\n(?=- )", of.__doc__ or "")],
        # The only texts that are not escaped: matplotlib escaped what it drew, and these are scripts and their data.
        figures=list(zip(figures, map(Markup, drawings(looks, figures)), strict=True)),
        data=Markup(data.replace("<", "\\u003c")),
        scripts=[Markup((HERE / name).read_text()) for name in SCRIPTS],
        drawn=drawn,
        limits=[(name, row, text, why(row.run, root)) for name, row in rows.items() if (text := limits(row))],
        dates=" to ".join(dict.fromkeys([days[0], days[-1]])),
        show=show,
        different=different,
        same={name: value for name, value in _facts(comparison.runs[0]).items() if name not in different},
    )
