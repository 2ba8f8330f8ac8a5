"""A comparison as one HTML file that asks nothing of any network."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from t5bench import Problem
from t5bench.compare import interval, repeats, statistics
from t5bench.compare.comparable import differing, show
from t5bench.compare.comparison import Comparison
from t5bench.compare.parity import DIFFERENT, EQUAL
from t5bench.compare.rows import Row, limits
from t5bench.profile.explain import Explanation
from t5bench.profile.parts import DOING, PARTS, Profile, shares
from t5bench.record.files import RecordError
from t5bench.record.run import Run
from t5bench.record.settings import OWN_RECIPE
from t5bench.record.status import COMPLETE
from t5bench.report import picture, tables
from t5bench.report.drawing import drawings, styles
from t5bench.report.figures import LONGEST_NAME, Rows, all_figures, best, rows_of
from t5bench.text import processes

HERE = Path(__file__).parent
SCRIPT = HERE / "page.js"
MOST_BYTES = 600_000
MOST_EXPLAINED = 32
# In the figures, and in those that take many points: the most that MOST_BYTES has room for is taken.
MOST_ROWS = ((64, 16), (32, 8), (32, 4), (16, 4), (16, 2), (8, 2))
DIGITS = 6
MINOR = 15  # columns up to this importance stand in a line below their row


def _facts(run: Run) -> dict[str, Any]:
    """All that is known of a run before it begins, by name."""
    plan = run.plan
    record = run.record
    facts: dict[str, Any] = {name: setting.value for name, setting in plan.settings.items()}
    facts |= asdict(run.layout)
    facts |= {f"version of {name}": version for name, version in record["versions"].items()}
    facts |= {f"commit of {name}": commit for name, commit in record["commits"].items()}
    facts |= {f"data: {name}": value for name, value in record["data"].items()}
    arguments = [f"{name} {value}".strip() for name, value in plan.engine_arguments.items()]
    return facts | {
        "padded_vocab_size": run.padded_vocab_size,
        "engine": plan.engine,
        "engine patches": plan.engine_patches,
        "engine arguments": " ".join(arguments),
        "release, by the ledger": plan.ledger,
        "device": plan.device,
        "ds_config": json.dumps(plan.ds_config),
        "hosts": " ".join(node["host"] for node in run.nodes),
        "directory": str(run.directory),
    }


class TableCell(NamedTuple):
    """A cell of the page's table."""

    text: str
    detail: str
    """What stands small below the text: an interval, or a remark in brackets."""
    css_class: str
    order: str
    """What it is sorted by, where that is not its text."""


def _cell(column: tables.Column, row: Row) -> TableCell:
    whole = column.text(row)
    text = re.split(r" [\[(]", whole, maxsplit=1)[0]
    detail = whole[len(text) :]
    if text == tables.NOTHING:
        css_class = "nothing"
    elif text in (EQUAL, COMPLETE):
        css_class = "yes"
    elif text == DIFFERENT or column.title == "status":
        css_class = "no"
    else:
        css_class = ""
    known = [part for part in column.parts(row).values() if part is not None]
    order = str(tables.rounded(known[0], DIGITS)) if known else text
    return TableCell(text, detail, css_class, "" if order == text else order)


def command(run: Run, *, with_recipe: bool = True) -> str:
    """What starts the run again: every setting that is not at its default, but for where this run was put.

    with_recipe: whether with its recipe and what watched it, too.
    """
    plan = run.plan
    words = []
    for name, setting in plan.settings.items():
        is_chosen = not setting.is_default and setting.role != "label"
        is_recipe = setting.role in ("recipe", "watch") or name in OWN_RECIPE
        # The run begins anew, and elsewhere.
        if is_chosen and setting.value != plan.output_dir and name != "RESUME" and (with_recipe or not is_recipe):
            words.append(f"{name}={shlex.quote(setting.value)}")
    words += ["bash", f"scripts/run_megatron_t5_{plan.strategy.name}.sh"]
    if run.layout.nnodes > 1:
        words += [shlex.quote(plan.master_address), "0"]
    if plan.arguments.extra:
        words += ["--", *map(shlex.quote, plan.arguments.extra)]
    return " ".join(words)


def why_slower(rows: Rows) -> list[str]:
    """Of each strategy's fastest row, what it takes longer for than the fastest with as many processes, in their order.

    Nothing of those whose fastest was not profiled. A difference that the headline calls unclear has no reason.
    """
    timed = {name: row for name, row in rows.items() if row.milliseconds}
    kinds = {(row.strategy, row.run.world_size) for row in timed.values()}
    fastest_rows = best(timed, len(kinds))
    sentences = []
    for size in sorted({row.run.world_size for row in fastest_rows.values()}):
        of_size = {name: row for name, row in fastest_rows.items() if row.run.world_size == size}
        fastest, *others = sorted(of_size, key=lambda name: of_size[name].milliseconds.median)
        if not tables.profile_of(of_size[fastest]):
            continue
        for name in others:
            sentences.append(_compared_with_the_fastest(name, of_size[name], fastest, of_size[fastest]))
    return sentences


def _compared_with_the_fastest(name: str, row: Row, fastest_name: str, fastest: Row) -> str:
    """How much longer a row takes, and for which part, of the same iteration that the bars divide."""
    if row.repeats and fastest.repeats:
        _, ratios = repeats.against_the_fastest({0: fastest.repeats, 1: row.repeats})
        if any(ratio.low is not None and not repeats.excludes_one(ratio) for ratio in ratios.values()):
            return f"{name}: no clear difference from {fastest_name}"
    longer = row.milliseconds.median - fastest.milliseconds.median
    said = f"{name} takes {tables.duration_text(longer)} longer than {fastest_name}"
    profile = tables.profile_of(row)
    if not profile:
        return f"{said}; it was not profiled"
    parts = _parts_of_iteration(row, profile)
    fastest_parts = _parts_of_iteration(fastest, tables.profile_of(fastest))
    more = {part: parts[part] - fastest_parts[part] for part in PARTS}
    slowest_part = max(PARTS, key=more.__getitem__)
    return f"{said}; it spends {tables.duration_text(more[slowest_part])} more {DOING[slowest_part]}"


def _parts_of_iteration(row: Row, profile: Profile) -> dict[str, float]:
    """Milliseconds of each part in the median iteration, which is shorter than the one that was profiled."""
    share_of = shares(profile.ranks)
    return {part: row.milliseconds.median * share_of[part] for part in PARTS}


def why(run: Run) -> list[str]:
    """Where the time of the profiled iteration went, and the causes that this names; nothing without a profile."""
    try:
        explanation = Explanation(run)
        causes = [f"{cause.name}: {cause.evidence}" for cause in explanation.causes()]
        return [explanation.sentence(), *causes]
    except RecordError as damage:
        return [str(damage)]
    except Problem:
        return []


class Explained(NamedTuple):
    """What the page says in sentences of a row."""

    name: str
    row: Row
    limits: str
    causes: list[str]


def render(comparison: Comparison) -> str:
    """The page, with figures of as many rows as MOST_BYTES has room for."""
    explained = []
    for name, row in best(rows_of(comparison), MOST_EXPLAINED).items():
        sentence = limits(row)
        if sentence:
            explained.append(Explained(name, row, sentence, why(row.run)))
    for most, most_of_large in MOST_ROWS:
        page = _render(comparison, explained, most, most_of_large)
        if len(page.encode()) < MOST_BYTES:
            break
    return page


def _render(comparison: Comparison, explained: Sequence[Explained], most: int, most_of_large: int) -> str:
    """most: rows in the figures; most_of_large: in those that take many points."""
    columns = tables.columns(comparison)
    different = differing(_facts, comparison.runs)
    rows = rows_of(comparison)
    look_of = styles(comparison)
    drawn = best(rows, most)
    figures = all_figures(comparison, drawn, most_of_large)
    looks = {name: look_of[row.strategy] for name, row in drawn.items()}
    drawn_figures = [Markup(svg) for svg in drawings(looks, figures)]
    bars = picture.panels(comparison, rows)
    days = sorted({run.record["started"][:10] for run in comparison.runs})
    facts = _facts(comparison.runs[0])
    return _template().render(
        comparison=comparison,
        tables=tables,
        names={(row.label, row.run.directory): name for name, row in rows.items()},
        bars=bars,
        kinds=picture.kinds(bars),
        bars_caption=picture.caption(bars),
        titles=[panel.title for panel in bars],
        choices=_choices(rows),
        facts_of=_facts_to_choose_by,
        columns=[column for column in columns if column.importance > MINOR],
        minor=[column for column in columns if column.importance <= MINOR],
        cell=_cell,
        longest=LONGEST_NAME,
        command=command,
        colours={strategy: look.colour for strategy, look in look_of.items()},
        remarks=tables.remarks(comparison),
        paper=_method_in_full(),
        # The only texts that are not escaped: what was escaped when it was drawn, and our own script.
        figures=list(zip(figures, drawn_figures, strict=True)),
        script=Markup(SCRIPT.read_text()),
        drawn=[len(drawn), min(most_of_large, len(drawn))],
        limits=explained,
        why_slower=why_slower(rows),
        dates=" to ".join(dict.fromkeys([days[0], days[-1]])),
        show=show,
        different=different,
        same={name: value for name, value in facts.items() if name not in different},
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["processes"] = processes
    return environment.get_template("page.html.j2")


def _facts_to_choose_by(row: Row) -> dict[str, Any]:
    """What a reader may choose rows by."""
    return {"strategy": row.strategy, "processes": row.run.world_size, "engine": row.run.engine}


def _choices(rows: Rows) -> dict[str, list[Any]]:
    """The values of each such fact, each once."""
    values: dict[str, dict[Any, None]] = {}
    for row in rows.values():
        for name, value in _facts_to_choose_by(row).items():
            values.setdefault(name, {})[value] = None
    return {name: list(of_name) for name, of_name in values.items()}


def _method_in_full() -> list[str]:
    """Paragraphs and list items, without the line breaks that they were written with."""
    paragraphs: list[str] = []
    for module in (statistics, interval, repeats):
        paragraphs += re.split(r"\n\n|\n(?=- )", module.__doc__ or "")
    return paragraphs
