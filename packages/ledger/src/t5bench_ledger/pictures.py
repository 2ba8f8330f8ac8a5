"""The ledger's pictures: a square for each published release of a library and each strategy, or way of training."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from t5bench_ledger.judge import DOES_NOT_RUN, HANGS, NOTED, RIGHT, WRONG
from t5bench_ledger.modes import DEEPSPEED_STRATEGIES, MODES, NAMES, OF_NO_LAUNCHER, TRAINER
from t5bench_ledger.spans import published

Cell = Mapping[str, Any]
COLOURS = {RIGHT: "#2e9f5b", WRONG: "#c8382f", DOES_NOT_RUN: "#e0a100", HANGS: "#e0a100"}
NOT_TRIED = "#e8e8e8"
PARTLY_TRIED = "right where it was tried"
COLOURS[PARTLY_TRIED] = "#a9d8bb"
# pixels
ROW = 30
HEAD = 56
LINE = 20


@dataclass(frozen=True)
class Square:
    """What a row of a picture shows of a release."""

    verdict: str
    """Of the worst cell; "" if none was measured."""
    title: str
    """What a reader sees who points at it."""
    text: str = ""


def worst(cells: Sequence[Cell]) -> str:
    """The verdict on a strategy in a release: that of its worst mode; "" if none was measured."""
    verdicts = {RIGHT if cell["verdict"] in NOTED else cell["verdict"] for cell in cells}
    return next((verdict for verdict in (WRONG, HANGS, DOES_NOT_RUN, RIGHT) if verdict in verdicts), "")


def columns_of(cells: Sequence[Cell], library: str) -> list[str]:
    """The published releases, and those of the cells that were not known as such, the oldest first."""
    tried = {cell["release"] for cell in cells}
    return sorted({*published()[library], *tried}, key=Version)


def strategies_picture(cells: Sequence[Cell]) -> str:
    """An SVG: of each strategy of DeepSpeed how many of the launchers' modes are not right. cells: of one torch."""
    releases = columns_of(cells, "deepspeed")
    rows = []
    for strategy in DEEPSPEED_STRATEGIES:
        modes = {mode.name for mode in MODES if mode.is_of_launchers and strategy in mode.strategies}
        own = [cell for cell in cells if cell["strategy"] == strategy and cell["mode"] in modes]
        if own and strategy not in OF_NO_LAUNCHER:
            rows.append((NAMES[strategy], [strategy_square(own, release, len(modes)) for release in releases]))
    legend = (
        "Green: every mode that the launchers use is right; pale, those that were tried. Red, yellow: so many train"
        " another model, or do not run. Grey: not tried.",
        f"Native engine on a CPU, torch {cells[0]['torch']}.",
    )
    return drawing("Which release of DeepSpeed trains which strategy correctly", releases, rows, legend, 200, 20)


def strategy_square(cells: Sequence[Cell], release: str, modes: int) -> Square:
    """modes: in how many the launchers train the strategy."""
    own = [cell for cell in cells if cell["release"] == release]
    if not own:
        return Square("", f"{release}: not tried")
    faulty = sum(cell["verdict"] != RIGHT for cell in own)
    title = f"{release}: {len(own) - faulty} of {modes} modes right"
    if len(own) < modes:
        title += f", {modes - len(own)} not tried or not shown"
    verdict = worst(own)
    if verdict == RIGHT and len(own) < modes:
        verdict = PARTLY_TRIED
    return Square(verdict, title, str(faulty) if faulty else "")


def trainer_picture(cells: Sequence[Cell]) -> str:
    """An SVG: each way in which transformers' Trainer was tried. cells: of one torch."""
    by_place = {(cell["release"], cell["mode"]): cell for cell in cells if cell["strategy"] == TRAINER}
    releases = columns_of(list(by_place.values()), "transformers")
    rows = []
    for mode in MODES:
        if TRAINER in mode.strategies:
            squares = []
            for release in releases:
                cell = by_place.get((release, mode.name))
                said = f"{mode.name} in {release}: {cell['verdict'] if cell else 'not tried'}"
                squares.append(Square(worst([cell] if cell else []), said))
            rows.append((mode.when or "with a Llama", squares))
    legend = (
        "Green: trains what is asked. Red: trains another model. Yellow: does not run. Grey: not tried, or not shown.",
        f"transformers' Trainer over DDP on a CPU, torch {cells[0]['torch']}.",
    )
    return drawing("In which releases of transformers the Trainer is right", releases, rows, legend, 370, 10)


def drawing(
    title: str,
    releases: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Square]]],
    legend: Sequence[str],
    label_width: int,
    column: int,
) -> str:
    """rows: a label and a square for each release. column: its width, like the labels' in pixels."""
    row_height = min(ROW, 2 * column)
    width = label_width + column * len(releases)
    height = HEAD + row_height * len(rows) + LINE * (len(legend) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        ' font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, release in enumerate(releases):
        is_tried = any(squares[number].verdict for _, squares in rows)
        colour = "black" if is_tried else "#999"
        x = label_width + column * number + column / 2 + 4
        place = f'transform="translate({x:g} {HEAD - 4}) rotate(-90)" font-size="{min(12, column)}"'
        parts.append(f'<text {place} fill="{colour}">{release}</text>')
    for number, (label, squares) in enumerate(rows):
        y = HEAD + row_height * number
        baseline = y + row_height / 2 + 4
        parts.append(f'<text x="4" y="{baseline:g}">{html.escape(label)}</text>')
        for place, square in enumerate(squares):
            x = label_width + column * place
            colour = COLOURS.get(square.verdict, NOT_TRIED)
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{column - 2}" height="{row_height - 3}" rx="2" fill="{colour}">'
                f"<title>{html.escape(square.title)}</title></rect>"
            )
            if square.text:
                middle = x + column / 2
                parts.append(
                    f'<text x="{middle:g}" y="{baseline:g}" text-anchor="middle" fill="white">{square.text}</text>'
                )
    y = HEAD + row_height * len(rows) + LINE
    for number, line in enumerate(legend):
        parts.append(f'<text x="4" y="{y + LINE * number}" fill="#555">{html.escape(line)}</text>')
    return "".join([*parts, "</svg>\n"])
