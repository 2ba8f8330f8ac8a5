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

from t5bench import Problem
from t5bench.compare import interval, repeats, statistics
from t5bench.compare.comparable import differing, show
from t5bench.compare.comparison import Comparison
from t5bench.compare.explain import Explanation
from t5bench.compare.parity import DIFFERENT, EQUAL
from t5bench.compare.rows import Row, limits
from t5bench.record.files import RecordError
from t5bench.record.profile import DOING, PARTS
from t5bench.record.records import Run
from t5bench.record.status import COMPLETE
from t5bench.record.text import processes
from t5bench.report import tables
from t5bench.report.drawing import drawings, styles
from t5bench.report.figures import LONGEST_NAME, Rows, all_figures, best, mean_parts, profile_of, rows_of

HERE = Path(__file__).parent
SCRIPTS = ("vendor/chart-4.5.1.umd.min.js", "page.js")
MOST_BYTES = 880_000
MOST_EXPLAINED = 32
MOST_ROWS = ((64, 16), (32, 8), (32, 4), (16, 4), (16, 2), (8, 2))  # in the figures, and in those that take many points
DIGITS = 6
SLOWER = 1.05  # times as long as the fastest: what differs by less needs no reason
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


def _cell(column: tables.Column, row: Row) -> tuple[str, str, str, str]:
    """Its text, what stands small below that (an interval, or a remark in brackets), its class, and what it is sorted
    by, where that is not its text."""
    whole = column.text(row)
    text = re.split(r" [\[(]", whole, maxsplit=1)[0]
    bad = text == DIFFERENT or column.title == "status"
    looks = "nothing" if text == tables.NOTHING else "yes" if text in (EQUAL, COMPLETE) else "no" * bad
    order = next((str(tables.rounded(part, DIGITS)) for part in column.parts(row).values() if part is not None), text)
    return text, whole[len(text) :], looks, order * (order != text)


def command(run: Run) -> str:
    """What starts the run again: every setting that is not at its default, but for where this run was put."""
    plan = run.plan
    chosen = {
        name: one.value
        for name, one in plan.settings.items()
        if not one.is_default and one.value != plan.output_dir and one.role != "label"
        if name != "RESUME"  # the run begins anew
    }
    words = [f"{name}={shlex.quote(value)}" for name, value in chosen.items()]
    words += ["bash", f"scripts/run_megatron_t5_{plan.strategy.name}.sh"]
    words += [shlex.quote(plan.master_address), "0"] if run.layout.nnodes > 1 else []
    return " ".join([*words, *(["--", *map(shlex.quote, plan.arguments.extra)] if plan.arguments.extra else [])])


def why_slower(rows: Rows) -> list[str]:
    """Of each strategy's fastest row, what it takes longer for than the fastest with as many processes."""
    timed = {name: row for name, row in rows.items() if row.milliseconds}
    shown, found = best(timed, len({(row.strategy, row.run.world_size) for row in timed.values()})), []
    for size in sorted({row.run.world_size for row in shown.values()}):
        of_size = ((row.milliseconds.median, name) for name, row in shown.items() if row.run.world_size == size)
        (least, first), *others = sorted(of_size, key=lambda one: one[0])
        fastest = profile_of(shown[first])
        for ms, name in others if fastest else ():
            if ms >= SLOWER * least and (profile := profile_of(shown[name])):
                ours, its = mean_parts(profile), mean_parts(fastest)
                part = max(PARTS, key=lambda part: ours[part] - its[part])
                found.append(
                    f"{name} takes {ms - least:.3g} ms longer than {first}; "
                    f"the profile shows {ours[part] - its[part]:.3g} ms more {DOING[part]}"
                )
    return found


def why(run: Run) -> list[str]:
    """Where the time of the profiled iteration went, and the causes that this names; nothing without a profile."""
    try:
        explanation = Explanation(run)
        return [explanation.sentence(), *(f"{cause.name}: {cause.evidence}" for cause in explanation.causes())]
    except RecordError as damage:
        return [str(damage)]
    except Problem:
        return []


def render(comparison: Comparison) -> str:
    """The page, with figures of as many rows as MOST_BYTES has room for."""
    rows = best(rows_of(comparison), MOST_EXPLAINED)
    explained = [(name, row, text, why(row.run)) for name, row in rows.items() if (text := limits(row))]
    for most in MOST_ROWS:
        page = _render(comparison, explained, *most)
        if len(page.encode()) < MOST_BYTES:
            break
    return page


def _render(comparison: Comparison, explained: list, most: int, most_of_large: int) -> str:
    loader = FileSystemLoader(HERE)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["processes"] = processes
    columns, different = tables.columns(comparison), differing(_facts, comparison.runs)
    rows, style = rows_of(comparison), styles(comparison)
    drawn = best(rows, most)
    figures = all_figures(comparison, drawn, most_of_large)
    looks = {name: style[row.strategy] for name, row in drawn.items()}
    chosen_by = ("strategy", "processes", "engine")
    about: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        about[name] = dict(zip(chosen_by, (row.strategy, row.run.world_size, row.run.engine), strict=True))
    for name, (colour, dashes) in looks.items():
        about[name] |= {"colour": colour, "dashes": [3 * length for length in dashes]}
    data = tables.rounded(msgspec.to_builtins({"rows": about, "figures": figures}), DIGITS)
    days = sorted({run.record["started"][:10] for run in comparison.runs})
    return environment.get_template("page.html.j2").render(
        comparison=comparison,
        tables=tables,
        names={(row.label, row.run.directory): name for name, row in rows.items()},
        choices={key: list(dict.fromkeys(its[key] for its in about.values())) for key in chosen_by},
        columns=[column for column in columns if column.importance > MINOR],
        minor=[column for column in columns if column.importance <= MINOR],
        cell=_cell,
        longest=LONGEST_NAME,
        command=command,
        colours={strategy: colour for strategy, (colour, _) in style.items()},
        remarks=tables.remarks(comparison),
        # Paragraphs and list items, without the line breaks that they were written with.
        paper=[part for of in (statistics, interval, repeats) for part in re.split(r"\n\n|\n(?=- )", of.__doc__ or "")],
        # The only texts that are not escaped: matplotlib escaped what it drew, and these are scripts and their data.
        figures=list(zip(figures, map(Markup, drawings(looks, figures)), strict=True)),
        data=Markup(msgspec.json.encode(data).decode().replace("<", "\\u003c")),
        scripts=[Markup((HERE / name).read_text()) for name in SCRIPTS],
        drawn=[len(drawn), min(most_of_large, len(drawn))],
        limits=explained,
        why_slower=why_slower(rows),
        dates=" to ".join(dict.fromkeys([days[0], days[-1]])),
        show=show,
        different=different,
        same={name: value for name, value in _facts(comparison.runs[0]).items() if name not in different},
    )
