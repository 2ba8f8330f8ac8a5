"""The ledger as a page of Markdown, as HTML, as a picture and as JSON."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version
from tabulate import tabulate

from t5bench.compare.parity import TOLERANCE
from t5bench.record.ledger import is_of_launchers
from t5bench.tools.ledger.changes import CHANGES, ISSUES, Change
from t5bench.tools.ledger.judge import DOES_NOT_RUN, HANGS, RIGHT, WRONG
from t5bench.tools.ledger.modes import (
    DEEPSPEED_PIPELINE,
    DEEPSPEED_STRATEGIES,
    ITERATIONS,
    MODES,
    PIPELINE_PROCESSES,
    PIPELINE_STAGE_0,
    PROCESSES,
    STAGE_0,
    STRATEGIES,
    Mode,
)

FORMAT = 1
Cell = dict[str, Any]
MODE = {mode.name: mode for mode in MODES}
NAMES = {
    "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_offload": "ZeRO-3 + offload",
    STAGE_0: "stage 0", DEEPSPEED_PIPELINE: "DeepSpeed's pipeline, ZeRO-1",
    PIPELINE_STAGE_0: "DeepSpeed's pipeline, stage 0", "ddp": "DDP", "tensor": "Tensor", "pipeline": "Pipeline",
    "hybrid": "Hybrid", "fsdp2": "FSDP2",
}  # fmt: skip
INTRODUCTION = f"""# Which release of DeepSpeed trains which strategy correctly

Several releases of DeepSpeed train another model than they were asked to, without an error. `python -m t5bench ledger`
finds them. It installs each release in a folder of its own, trains a tiny T5 with the native engine under each strategy
in the modes below, and compares loss and gradient norm of every iteration with DDP's, which needs no DeepSpeed. The
bounds are those of [the parity check](../parity.md). DeepSpeed's own pipeline engine, which the native engine does not
use, trains four layers instead; its loss is compared with plain PyTorch's. In fp16, which the native engine does not
have, ZeRO trains two vectors whose losses are known. ZeRO's optimizer is PyTorch's AdamW, for the pipeline and the
vectors plain SGD: DeepSpeed's own, which must be compiled (cpu_adam, fused_adam), are not tried.

The strategies that need no DeepSpeed are trained under each release of PyTorch, and compared with DDP; DDP is compared
with one process.

All cells were measured on a CPU over gloo, for {ITERATIONS} iterations, with {PROCESSES} processes unless the mode says
otherwise, hybrid and DeepSpeed's pipeline with {PIPELINE_PROCESSES}. That shows what a release computes, but not
whether its CUDA kernels work. `right` means: within the bound in this mode. Releases and modes that are not in the
table were not measured: of a run in bf16 or fp16 that only fp32 cells speak for, a launcher's record says `not measured
in bf16; right in fp32`.

```
python -m t5bench ledger                                              # all releases, all modes
python -m t5bench ledger --releases 0.18.2,0.19.8 --strategies zero2
python -m t5bench ledger --torch 2.8.0,2.15.0 --strategies ddp,tensor,pipeline,hybrid,fsdp2
python -m t5bench ledger --releases 0.18.2 --locate                   # a wrong cell: in which step and module
python -m t5bench ledger --page docs/generated                        # writes this page
```

The command needs uv. It installs nothing into your environment, keeps its own in `~/.cache/t5-parallelism/ledger`, and
continues after an interruption. Cells of a page that are not measured again stay on it. The launchers refuse a run
whose strategy this page found wrong in its release, in a mode in which they train.
"""

ISOLATED = """## Shown without this project

[update.py](../../tests/reproductions/update.py) needs DeepSpeed and PyTorch alone. Its gradient is known without a
model, so it prints what share of it a release applies:

| arguments | processes | releases | what it prints |
|---|---|---|---|
| `2` | 2 | 0.17.6 | 0.15 to 0.29 of the mean gradient is applied |
| `2 --offload` | 2 | 0.17.6, 0.18.3, 0.18.5, 0.18.6 | 0.45 to 0.56 of the mean gradient is applied |
| `1 --bf16 --fp32-accumulation` | 2 | 0.17.6 | the norm is 65,411 times too large, so clipping takes the update away |
| | | 0.18.3 | nothing is applied |
| | | 0.18.5, 0.18.6, 0.18.9 | the error is 0.68 of the largest gradient, the norm 1.16 of the right one |
| `0 --bf16` | 2 | 0.17.6 | the norm is 65,411 times too large; gradients of earlier iterations are applied again |
| | | 0.18.3, 0.18.5 | nothing is applied |
| `1` | 2 | 0.18.9 | `Output 0 of Split is a view and is being modified inplace` (torch 2.13.0) |

[fsdp2_mean.py](../../tests/reproductions/fsdp2_mean.py) needs PyTorch alone. Under torch 2.8.0 it prints that two
processes on a CPU get 2.000 times the mean gradient from FSDP2, which adds gradients up and does not divide them; Adam
hides that in the loss. Under 2.13.0 it prints 1.000.

It prints the right update for all of these in 0.19.8, and for stage 0 in bf16 from 0.18.6 on: there the ledger's cells
are beyond the bound by a factor of two, which rounding may explain. It does not show the fault of all-reduce fetch.
"""


def releases_of(cells: Sequence[Cell]) -> list[str]:
    return sorted({cell["release"] for cell in cells}, key=Version)


def short(cell: Cell | None) -> str:
    """A cell in a few characters."""
    if cell is None:
        return "-"
    if cell["verdict"] == WRONG:
        return f"WRONG {cell['times']:.0e}" if cell["times"] else "WRONG nan"
    return cell["verdict"]


def sentence(cell: Cell) -> str:
    """What is known of a cell that is not right."""
    if cell["verdict"] != WRONG:
        return cell["sentence"]
    size = f"up to {cell['times']:,.0f} times the bound" if cell["times"] else "not a number"
    return f"from iteration {cell['iteration']} on the {cell['quantity']} differs, {size}"


def place(cell: Cell) -> str:
    """Where a wrong cell first differs; "" if it was not located."""
    return str(cell.get("where", ""))


def with_place(said: str, where: str) -> str:
    return f"{said}; {where}" if where else said


def matrix(cells: Sequence[Cell]) -> list[tuple[str, Mode, list[Cell | None]]]:
    """A row for each strategy and mode, with a cell for each release."""
    by_key = {(cell["strategy"], cell["mode"], cell["release"]): cell for cell in cells}
    releases = releases_of(cells)
    rows = []
    for strategy in STRATEGIES:
        for mode in MODES:
            row = [by_key.get((strategy, mode.name, release)) for release in releases]
            if any(row):
                rows.append((strategy, mode, row))
    return rows


def groups(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """DeepSpeed's cells by torch."""
    own = [cell for cell in cells if cell["release"]]
    torches = sorted({cell["torch"] for cell in own})
    return [(torch, [cell for cell in own if cell["torch"] == torch]) for torch in torches]


def of_torch(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that need no DeepSpeed: their release is that of PyTorch."""
    return [cell | {"release": cell["torch"].partition("+")[0]} for cell in cells if not cell["release"]]


def sections(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """The tables: their titles and cells."""
    made = [(f"Native engine, torch {torch}", own) for torch, own in groups(cells)]
    alone = of_torch(cells)
    return [*made, ("Releases of PyTorch, native engine", alone)] if alone else made


@dataclass(frozen=True)
class Fault:
    """Cells that are not right: consecutive releases of which the same was measured."""

    strategy: str
    mode: Mode
    verdict: str
    said: str
    """What was measured, in words."""
    cells: tuple[Cell, ...]
    """Of one release each."""

    @property
    def releases(self) -> list[str]:
        return [cell["release"] for cell in self.cells]

    @property
    def changes(self) -> list[Change]:
        """Those upstream that explain it in all of its releases."""
        if self.verdict != WRONG:
            return []
        return [
            change
            for change in CHANGES
            if all(change.concerns(release, self.strategy, self.mode) for release in self.releases)
        ]

    @property
    def places(self) -> str:
        """Where those that were located first differ."""
        located: dict[str, list[str]] = {}
        for cell in self.cells:
            if place(cell):
                located.setdefault(place(cell), []).append(cell["release"])
        if list(located.values()) == [self.releases]:
            return "; ".join(located)
        return "; ".join(f"{name} ({', '.join(releases)})" for name, releases in located.items())

    @property
    def words(self) -> list[str]:
        releases = ", ".join(self.releases)
        return [NAMES[self.strategy], self.mode.name, self.verdict, releases, with_place(self.said, self.places)]


def faults(cells: Sequence[Cell]) -> list[Fault]:
    merged: list[Fault] = []
    for strategy, mode, row in matrix(cells):
        for cell in row:
            if cell is None or cell["verdict"] == RIGHT:
                continue
            fault = Fault(strategy, mode, cell["verdict"], sentence(cell), (cell,))
            last = merged[-1] if merged else None
            if last and replace(last, cells=fault.cells) == fault:
                merged[-1] = replace(last, cells=(*last.cells, cell))
            else:
                merged.append(fault)
    return merged


def upstream(fault: Fault) -> str:
    if fault.verdict == WRONG and not fault.changes:
        return "no change upstream that we know of"
    return "; ".join(f"{change.links}: {change.what}" for change in fault.changes)


def markdown(cells: Sequence[Cell]) -> str:
    parts = [INTRODUCTION, "## The modes\n"]
    measured = [[cell["mode"] for cell in cells].count(mode.name) for mode in MODES]
    rows = [(mode.name, mode.meaning, count) for mode, count in zip(MODES, measured, strict=True)]
    parts.append(tabulate(rows, ["mode", "meaning", "cells measured"], tablefmt="github") + "\n")
    bounds = "; ".join(f"{precision}: {bound}" for precision, bound in TOLERANCE.items())
    parts.append(
        f"`WRONG 7e+04` means that loss or norm differs by up to 7e+04 times the bound ({bounds}, relative).\n"
    )
    for title, own in sections(cells):
        python = ", ".join(sorted({cell["python"] for cell in own}))
        parts.append(f"## {title}, Python {python}\n")
        header = ["strategy", "mode", *releases_of(own)]
        rows = [[NAMES[strategy], mode.name, *map(short, row)] for strategy, mode, row in matrix(own)]
        parts.append(tabulate(rows, header, tablefmt="github", disable_numparse=True) + "\n")
        parts.append("What is not right, and the change upstream that broke or mended it:\n")
        lines = [[*fault.words, upstream(fault)] for fault in faults(own)]
        header = ["strategy", "mode", "verdict", "releases", "measured", "upstream"]
        parts.append(tabulate(lines, header, tablefmt="github", disable_numparse=True) + "\n")
    return "\n".join([*parts, ISOLATED])


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #1b1b1b }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border: 1px solid #ccc; padding: .25rem .5rem; text-align: left }
td.right { background: #dff2df }
td.wrong { background: #f7c6c5; font-weight: 600 }
td.does-not-run, td.hangs { background: #fbe8c3 }
.wide { overflow-x: auto }
"""
TITLE = "Which release of DeepSpeed trains which strategy correctly"


def html_table(header: Sequence[str], rows: Sequence[str]) -> str:
    """A table whose rows are HTML already."""
    head = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in header)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def html_row(strategy: str, mode: Mode, row: Sequence[Cell | None]) -> str:
    columns = [f"<th scope='row'>{html.escape(NAMES[strategy])}</th><td>{html.escape(mode.meaning)}</td>"]
    for cell in row:
        kind = cell["verdict"].replace(" ", "-") if cell else "not-measured"
        title = with_place(sentence(cell), place(cell)) if cell and cell["verdict"] != RIGHT else ""
        columns.append(f"<td class='{kind}' title='{html.escape(title, quote=True)}'>{html.escape(short(cell))}</td>")
    return f"<tr>{''.join(columns)}</tr>"


def html_fault(fault: Fault) -> str:
    links = [f"<a href='{ISSUES}/{pull}'>#{pull}</a>" for change in fault.changes for pull in change.pulls]
    columns = "".join(f"<td>{html.escape(word)}</td>" for word in fault.words)
    return f"<tr>{columns}<td>{', '.join(links)}</td></tr>"


def page(cells: Sequence[Cell]) -> str:
    """One self-contained HTML page."""
    parts = []
    for title, own in sections(cells):
        parts.append(f"<h2>{html.escape(title)}, on a CPU</h2>")
        rows = [html_row(*row) for row in matrix(own)]
        parts.append(html_table(["strategy", "mode", *releases_of(own)], rows))
        rows = [html_fault(fault) for fault in faults(own)]
        parts.append(html_table(["strategy", "mode", "verdict", "releases", "measured", "upstream"], rows))
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{TITLE}</title><style>{STYLE}</style>"
        f"</head>\n<body><h1>{TITLE}</h1><p>Each cell was trained on a CPU and compared with DDP, within the bounds of"
        f" the parity check. Point at a cell to read what was measured.</p>\n{''.join(parts)}</body></html>\n"
    )


COLOURS = {RIGHT: "#2e9f5b", WRONG: "#c8382f", DOES_NOT_RUN: "#e0a100", HANGS: "#e0a100"}
NOT_MEASURED = "#d5d5d5"
# pixels
LABEL_WIDTH = 210
COLUMN = 50
ROW = 30


def worst(cells: Sequence[Cell]) -> str:
    """The verdict on a strategy in a release: that of its worst mode; "" if none was measured."""
    verdicts = {cell["verdict"] for cell in cells}
    return next((verdict for verdict in (WRONG, HANGS, DOES_NOT_RUN, RIGHT) if verdict in verdicts), "")


def picture(cells: Sequence[Cell]) -> str:
    """An SVG: a square for each strategy and DeepSpeed's release, with the number of the launchers' modes that are
    right, under the newest torch that was measured."""
    torch, newest = max(groups(cells), key=lambda group: Version(group[0]))
    releases = releases_of(newest)
    in_launchers = {mode.name for mode in MODES if is_of_launchers(asdict(mode))}
    met = [
        cell for cell in newest if cell["mode"] in in_launchers and cell["strategy"] not in (STAGE_0, PIPELINE_STAGE_0)
    ]
    strategies = [strategy for strategy in DEEPSPEED_STRATEGIES if any(cell["strategy"] == strategy for cell in met)]
    width = LABEL_WIDTH + COLUMN * len(releases)
    height = ROW * (len(strategies) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"',
        ' font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>{TITLE}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, release in enumerate(releases):
        x = LABEL_WIDTH + COLUMN * column + COLUMN / 2
        parts.append(f'<text x="{x:g}" y="20" text-anchor="middle">{release}</text>')
    for row, strategy in enumerate(strategies, 1):
        y = ROW * row
        parts.append(f'<text x="4" y="{y + 20}">{html.escape(NAMES[strategy])}</text>')
        for column, release in enumerate(releases):
            own = [cell for cell in met if cell["strategy"] == strategy and cell["release"] == release]
            right = sum(cell["verdict"] == RIGHT for cell in own)
            x = LABEL_WIDTH + COLUMN * column
            colour = COLOURS.get(worst(own), NOT_MEASURED)
            parts.append(
                f'<rect x="{x + 2}" y="{y + 2}" width="{COLUMN - 4}" height="{ROW - 4}" rx="4" fill="{colour}"/>'
                f'<text x="{x + COLUMN / 2:g}" y="{y + 20}" text-anchor="middle" fill="white">{right}/{len(own)}</text>'
            )
    legend = f"right, of the modes in which the launchers train: native engine on a CPU, torch {torch}"
    kinds = "green: all right; red: some train another model; yellow: some do not run"
    y = ROW * (len(strategies) + 1) + 20
    parts.append(f'<text x="4" y="{y}" fill="#555">{html.escape(legend)}. {html.escape(kinds)}</text>')
    return "".join([*parts, "</svg>\n"])


def write(directory: Path, cells: Sequence[Cell]) -> None:
    """Writes ledger.md, ledger.html and ledger.json, and ledger.svg if DeepSpeed was measured."""
    directory.mkdir(parents=True, exist_ok=True)
    ordered = sorted(cells, key=lambda cell: (cell["torch"], Version(cell["release"] or "0")))
    data = {"format": FORMAT, "modes": [asdict(mode) for mode in MODES], "cells": ordered}
    (directory / "ledger.md").write_text(markdown(ordered))
    (directory / "ledger.html").write_text(page(ordered))
    if groups(ordered):
        (directory / "ledger.svg").write_text(picture(ordered))
    lines = ",\n  ".join(json.dumps(cell) for cell in ordered)
    rest = json.dumps({"format": data["format"], "modes": data["modes"]}, indent=1)[:-2]
    (directory / "ledger.json").write_text(f'{rest},\n "cells": [\n  {lines}\n ]\n}}\n')


def summary(cells: Sequence[Cell]) -> str:
    """The counts of each verdict, by release."""
    rows = []
    for torch, release in dict.fromkeys((cell["torch"], cell["release"]) for cell in cells):
        verdicts = [cell["verdict"] for cell in cells if (cell["torch"], cell["release"]) == (torch, release)]
        others = [f"{verdicts.count(name)} {name}" for name in (WRONG, DOES_NOT_RUN, HANGS) if name in verdicts]
        rows.append([torch, release or "-", f"{verdicts.count(RIGHT)} of {len(verdicts)}", ", ".join(others) or "-"])
    return tabulate(rows, ["torch", "DeepSpeed", "right", "others"], disable_numparse=True)
