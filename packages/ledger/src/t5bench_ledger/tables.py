"""The ledger as a page of Markdown, as HTML, as a picture and as JSON."""

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
from packaging.version import Version

from t5bench.compare.parity import TOLERANCE
from t5bench.printed_table import text_table
from t5bench.record.ledger import releases_in, size_in_words, spans_of
from t5bench_ledger.changes import CHANGES, Change
from t5bench_ledger.judge import DOES_NOT_RUN, HANGS, RIGHT, WRONG
from t5bench_ledger.modes import (
    DEEPSPEED_PIPELINE,
    DEEPSPEED_STRATEGIES,
    FSDP2_TENSOR,
    ITERATIONS,
    MODES,
    OF_NO_LAUNCHER,
    PIPELINE_PROCESSES,
    PIPELINE_STAGE_0,
    PROCESSES,
    STAGE_0,
    STRATEGIES,
    TRAINERS,
    Mode,
    library_of,
)
from t5bench_ledger.releases import ReleaseFault, Software

FORMAT = 1
Cell = dict[str, Any]
MODE = {mode.name: mode for mode in MODES}
NAMES = {
    "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_offload": "ZeRO-3 + offload",
    STAGE_0: "stage 0", DEEPSPEED_PIPELINE: "DeepSpeed's pipeline, ZeRO-1",
    PIPELINE_STAGE_0: "DeepSpeed's pipeline, stage 0", "ddp": "DDP", "tensor": "Tensor", "pipeline": "Pipeline",
    "hybrid": "Hybrid", "fsdp2": "FSDP2", FSDP2_TENSOR: "FSDP2 and tensor", "trainer": "Trainer, DDP",
    "accelerate": "accelerate, DDP", "accelerate zero2": "accelerate, ZeRO-2", "accelerate zero3": "accelerate, ZeRO-3",
}  # fmt: skip
LIBRARY = {
    "deepspeed": "DeepSpeed", "torch": "PyTorch", "transformers": "transformers", "accelerate": "accelerate",
}  # fmt: skip
INTRODUCTION = """# Which release of DeepSpeed trains which strategy correctly

Several releases of DeepSpeed, one of PyTorch and every one of transformers' Trainer that was tried train another model
than they were asked to, in some way and without an error.
Ask about your own:

```
python -m t5bench ledger --mine              # the installed releases
python -m t5bench ledger --answer 0.18.2     # or torch==2.8.0, transformers==4.45.2, accelerate==1.2.1
```

[ledger.html](ledger.html) answers the same for a release and a strategy that you choose. Other programs read
[releases.json](../../t5bench/record/releases.json), whose fields [its schema](releases.schema.json) describes.
The launchers refuse a run whose strategy was wrong in the installed release, in a mode in which they train.

![Which release trains which strategy correctly](ledger.svg)
"""

WHOLE = f"""## How it is measured

`python -m t5bench ledger` installs each release in a folder of its own, trains a tiny T5 with the native engine under
each strategy in the modes above, and compares loss and gradient norm of every iteration with DDP's, which needs no
DeepSpeed. The bounds are those of [the parity check](../parity.md). DeepSpeed's own pipeline engine, which the native
engine does not use, trains four layers instead; its loss is compared with plain PyTorch's. In fp16, which the native
engine does not have, ZeRO trains two vectors whose losses are known. ZeRO's optimizer is PyTorch's AdamW, for the
pipeline and the vectors plain SGD: DeepSpeed's own, which must be compiled (cpu_adam, fused_adam), are not tried. The
strategies that need no DeepSpeed are trained under each release of PyTorch and compared with DDP, and DDP with one
process. FSDP2 and tensor parallelism together, two by two processes, train a LayerNorm over halves of the sequence
([two_meshes.py](../../packages/ledger/src/t5bench_ledger/two_meshes.py)), whose gradient almost cancels between the
halves of the data: rounding that a model hides is seen there. No launcher trains so.

Shapes of models and of training loops, from `used once` on, are those of three linear layers
([shapes.py](../../packages/ledger/src/t5bench_ledger/shapes.py)), compared with plain PyTorch in one process. No
launcher meets them.
A layer used twice is reported wrong in bf16 under ZeRO-2 on 16 GPUs, from 0.18.3 to 0.19.3
([#8224](https://github.com/deepspeedai/DeepSpeed/issues/8224)). On a CPU, 4, 8 and 16 processes do not show it either,
tried under 0.18.3, 0.19.0 and 0.19.3 with eight micro-batches and clipping, and on 16 also with two calls of the model
before a backward pass, with small buckets and with overlapping communication.

transformers' Trainer and accelerate's loop train a small Llama, T5 or three layers
([trainers.py](../../packages/ledger/src/t5bench_ledger/trainers.py)) over DDP and are compared with plain PyTorch in
one process, on
the samples that both processes took for the step, all at once. Its loss is the mean of the cross-entropy over all
target tokens of the step, whichever process and micro-batch they are in; the Trainer's is the loss that it logs, before
it is rounded. accelerate ignores FSDP's plugin on a CPU, and its newer releases take a run with DeepSpeed's for one
process: FSDP2, and ZeRO with the Trainer, cannot be shown here. The loop over ZeRO divides the data on its own.

All cells were measured on a CPU over gloo, for {ITERATIONS} iterations, with {PROCESSES} processes unless the mode says
otherwise, hybrid and DeepSpeed's pipeline with {PIPELINE_PROCESSES}. That shows what a release computes, but not
whether its CUDA kernels work. Releases and modes that are not on this page were not tried: of a run in bf16 or fp16
that only fp32 cells speak for, a launcher's record says `not measured in bf16; right in fp32`.
[ledger.json](ledger.json) has every cell.

```
python -m t5bench ledger                                              # all releases, all modes
python -m t5bench ledger --releases 0.18.2,0.19.8 --strategies zero2
python -m t5bench ledger --torch 2.8.0,2.15.0 --strategies ddp,tensor,pipeline,hybrid,fsdp2
python -m t5bench ledger --releases transformers==4.45.2,accelerate==1.2.1 --strategies trainer,accelerate
python -m t5bench ledger --releases 0.18.2 --locate                   # a wrong cell: in which step and module
python -m t5bench ledger --releases 0.20.0 --page docs/generated      # adds a new release to this page
```

The command needs uv. It installs nothing into your environment, keeps its own in `~/.cache/t5-parallelism/ledger`, and
continues after an interruption. Cells of a page that are not measured again stay on it.
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


def off_by(cell: Cell) -> float | None:
    """The largest relative difference of a wrong cell's quantity from its reference; None: it is not a number."""
    if not cell["times"]:
        return None
    precision = "bf16" if MODE[cell["mode"]].precision == "bf16" else "fp32"
    allowed = TOLERANCE[precision]
    bound = allowed.norm if cell["quantity"] == "gradient norm" else allowed.loss
    return float(f"{cell['times'] * bound:.2g}")


def short(cell: Cell | None) -> str:
    """A cell in a few characters."""
    if cell is None:
        return "-"
    if cell["verdict"] == WRONG:
        quantity = cell["quantity"].removeprefix("gradient ")
        return f"WRONG: {quantity} {size_in_words(off_by(cell))}"
    return cell["verdict"]


def sentence(cell: Cell) -> str:
    """What is known of a cell that is not right."""
    if cell["verdict"] != WRONG:
        return cell["sentence"]
    return f"from iteration {cell['iteration']} on the {cell['quantity']} is {size_in_words(off_by(cell))}"


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
    own = [cell for cell in cells if library_of(cell["strategy"]) == "deepspeed"]
    torches = sorted({cell["torch"] for cell in own})
    return [(torch, [cell for cell in own if cell["torch"] == torch]) for torch in torches]


def of_torch(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that need PyTorch alone: their release is PyTorch's."""
    return [cell | {"release": cell["torch"].partition("+")[0]} for cell in cells if not cell["release"]]


@dataclass(frozen=True)
class Section:
    """The cells of the releases of one library."""

    software: Software
    torch: str
    """PyTorch's release beside that of the library; "" where it is the library itself."""
    title: str
    cells: Sequence[Cell]

    @property
    def library(self) -> str:
        return LIBRARY[self.software]


def of_trainers(cells: Sequence[Cell]) -> list[Section]:
    made = []
    for software in get_args(Software):
        own = [cell for cell in cells if library_of(cell["strategy"]) == software and cell["strategy"] in TRAINERS]
        for torch in sorted({cell["torch"] for cell in own}):
            alike = [cell for cell in own if cell["torch"] == torch]
            beside = " or ".join(sorted({cell["beside"] for cell in alike}))
            title = f"{LIBRARY[software]}, with torch {torch} and {beside}"
            made.append(Section(software, torch.partition("+")[0], title, alike))
    return made


def sections(cells: Sequence[Cell]) -> list[Section]:
    made = []
    for torch, own in groups(cells):
        made.append(Section("deepspeed", torch.partition("+")[0], f"DeepSpeed, with torch {torch}", own))
    alone = of_torch(cells)
    made += [Section("torch", "", "PyTorch", alone)] if alone else []
    return made + of_trainers(cells)


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
        found = []
        for change in CHANGES:
            if all(change.concerns(release, self.strategy, self.mode, self.verdict) for release in self.releases):
                found.append(change)
        return found

    @property
    def located(self) -> str:
        """The places alone, of those that were found."""
        found = dict.fromkeys(place(cell) for cell in self.cells if place(cell).startswith("first in "))
        return "; ".join(name.removeprefix("first in ") for name in found)


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


def mended_in(fault: Fault, cells: Sequence[Cell]) -> str:
    """The first later release of the cells that is right in the same way of training; "" if none is."""
    last = Version(fault.releases[-1])
    for cell in sorted(cells, key=lambda cell: Version(cell["release"])):
        is_same = (cell["strategy"], cell["mode"]) == (fault.strategy, fault.mode.name)
        if is_same and cell["verdict"] == RIGHT and Version(cell["release"]) > last:
            return str(cell["release"])
    return ""


def release_faults(section: Section) -> list[ReleaseFault]:
    """The faults of a section; the same in several modes is one."""
    releases = releases_of(section.cells)
    found: dict[bytes, ReleaseFault] = {}
    for fault in faults(section.cells):
        first = fault.cells[0]
        made = ReleaseFault(
            software=section.software,
            torch=section.torch,
            releases=spans_of(fault.releases, releases),
            strategy=fault.strategy,
            modes=[],
            verdict=fault.verdict,
            iteration=first["iteration"],
            quantity=first["quantity"],
            off_by=off_by(first),
            sentence=first["sentence"].partition(". ")[0],
            where=fault.located,
            upstream=[name for change in fault.changes for name in change.names],
            mended_in=mended_in(fault, section.cells),
        )
        found.setdefault(msgspec.json.encode(made), made).modes.append(fault.mode.name)
    return list(found.values())


NO_REPORT = "no report that we know of"
FAULT_HEADER = ("strategy", "modes", "releases", "what happens", "right again in", "upstream")


def what_happens(fault: ReleaseFault) -> str:
    if fault.verdict != WRONG:
        return f"{fault.verdict}: {fault.sentence}"
    said = f"{fault.quantity} {size_in_words(fault.off_by)} from iteration {fault.iteration} on"
    return f"{said}; first in {fault.where}" if fault.where else said


def fault_words(fault: ReleaseFault) -> list[str]:
    """A fault's columns but the last, which has links."""
    modes = ", ".join(fault.modes)
    mended = fault.mended_in or "no later release"
    return [NAMES[fault.strategy], modes, fault.releases, what_happens(fault), mended]


def explained(fault: ReleaseFault) -> Iterator[tuple[str, str, str]]:
    """Number, address and meaning of each issue and pull request upstream."""
    for change in CHANGES:
        for name in change.names:
            if name in fault.upstream:
                yield f"#{name.partition('#')[2]}", change.address(name), change.what


def upstream(fault: ReleaseFault) -> str:
    return "; ".join(f"[{number}]({address}): {what}" for number, address, what in explained(fault)) or NO_REPORT


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, without blanks that only align what nobody reads as text."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def markdown(cells: Sequence[Cell]) -> str:
    parts = [INTRODUCTION, "## What is not right\n"]
    for section in sections(cells):
        parts.append(f"### {section.title}\n")
        rows = [[*fault_words(fault), upstream(fault)] for fault in release_faults(section)]
        parts.append(table(FAULT_HEADER, rows) if rows else "Everything that was tried is right.\n")
    parts.append("## What was tried\n")
    measured = [[cell["mode"] for cell in cells].count(mode.name) for mode in MODES]
    rows = [(mode.name, mode.meaning, str(count)) for mode, count in zip(MODES, measured, strict=True)]
    parts.append(table(["mode", "meaning", "cells measured"], rows))
    bounds = "; ".join(f"{precision}: {bound}" for precision, bound in TOLERANCE.items())
    within = f"within the bound ({bounds}, relative)"
    parts.append(f"A cell is right if loss and gradient norm of every iteration are {within}.\n")
    for section in sections(cells):
        releases = releases_of(section.cells)
        python = ", ".join(sorted({cell["python"] for cell in section.cells}))
        rows = []
        for strategy, mode, row in matrix(section.cells):
            right = [cell["release"] for cell in row if cell and cell["verdict"] == RIGHT]
            tried = [cell["release"] for cell in row if cell]
            rows.append([NAMES[strategy], mode.name, spans_of(tried, releases), spans_of(right, releases) or "none"])
        parts.append(f"### {section.title}, Python {python}\n")
        parts.append(table(["strategy", "mode", "tried in", "right in"], rows))
    return "\n".join([*parts, WHOLE, ISOLATED])


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #1b1b1b }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border: 1px solid #ccc; padding: .25rem .5rem; text-align: left }
td.right { background: #dff2df }
td.wrong { background: #f7c6c5; font-weight: 600 }
td.does-not-run, td.hangs { background: #fbe8c3 }
.wide { overflow-x: auto }
.wide svg { max-width: 100%; height: auto }
select { font: inherit; margin-right: 1rem }
#answer { border-left: .3rem solid #999; padding: .1rem 1rem; margin: 1rem 0 }
#answer.right { border-color: #2e9f5b }
#answer.wrong { border-color: #c8382f }
"""
TITLE = "Which release of DeepSpeed trains which strategy correctly"
SCRIPT = """
const right = JSON.parse(document.getElementById("right").textContent);
const release = document.getElementById("release");
const strategy = document.getElementById("strategy");
const rows = [...document.querySelectorAll("tr[data-releases]")];

function option(select, name) {
  const made = document.createElement("option");
  made.value = made.textContent = name;
  select.append(made);
}

function strategies() {
  const before = strategy.value;
  strategy.replaceChildren();
  ["all strategies", ...Object.keys(right[release.value])].forEach(name => option(strategy, name));
  if ([...strategy.options].some(each => each.value === before)) strategy.value = before;
}

function answer() {
  const chosen = strategy.value;
  let shown = 0;
  for (const row of rows) {
    const fits = JSON.parse(row.dataset.releases).includes(release.value)
      && (chosen === "all strategies" || row.dataset.strategy === chosen);
    row.hidden = !fits;
    shown += fits;
  }
  const lines = Object.entries(right[release.value])
    .filter(([name]) => chosen === "all strategies" || name === chosen)
    .map(([name, modes]) => `${name}: right in ${modes || "no mode that was tried"}`);
  const box = document.getElementById("answer");
  box.className = shown ? "wrong" : "right";
  box.replaceChildren(...[shown ? `${shown} of what was tried is not right:` : "Everything that was tried is right.",
    ...lines].map(line => Object.assign(document.createElement("p"), { textContent: line })));
  document.getElementById("faults").hidden = !shown;
}

Object.keys(right).forEach(name => option(release, name));
function choose() {  // #DeepSpeed 0.18.2/ZeRO-2 in the address is a link to an answer
  const [wanted, ofWhich] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (wanted in right) release.value = wanted;
  strategies();
  if (ofWhich in right[release.value]) strategy.value = ofWhich;
  answer();
}

release.onchange = () => { strategies(); answer(); };
strategy.onchange = answer;
window.onhashchange = choose;
choose();
document.getElementById("ask").hidden = false;
"""


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


def html_fault(fault: ReleaseFault, section: Section) -> str:
    columns = "".join(f"<td>{html.escape(word)}</td>" for word in fault_words(fault))
    links = [f"<a href='{address}'>{number}</a>: {html.escape(what)}" for number, address, what in explained(fault)]
    named = releases_in(fault.releases, releases_of(section.cells))
    releases = html.escape(json.dumps([f"{section.library} {release}" for release in named]), quote=True)
    data = f"data-releases='{releases}' data-strategy='{html.escape(NAMES[fault.strategy], quote=True)}'"
    return f"<tr {data}>{columns}<td>{'; '.join(links) or NO_REPORT}</td></tr>"


def right_modes(cells: Sequence[Cell], library: str) -> dict[str, dict[str, str]]:
    """By release, the newest first, and strategy: the modes in which it is right."""
    found: dict[str, dict[str, str]] = {}
    for release in reversed(releases_of(cells)):
        modes: dict[str, list[str]] = {}
        for strategy, mode, row in matrix(cells):
            for cell in row:
                if cell and cell["release"] == release:
                    own = modes.setdefault(NAMES[strategy], [])
                    own += [mode.name] if cell["verdict"] == RIGHT else []
        found[f"{library} {release}"] = {strategy: ", ".join(names) for strategy, names in modes.items()}
    return found


def page(cells: Sequence[Cell]) -> str:
    """One self-contained HTML page; without scripts it shows all faults."""
    tables = []
    lines = []
    right: dict[str, dict[str, str]] = {}
    for section in sections(cells):
        own = section.cells
        right |= right_modes(own, section.library)
        lines += [html_fault(fault, section) for fault in release_faults(section)]
        tables.append(f"<h2>{html.escape(section.title)}, on a CPU</h2>")
        tables.append(html_table(["strategy", "mode", *releases_of(own)], [html_row(*row) for row in matrix(own)]))
    drawn = picture(cells) if groups(cells) else ""
    data = json.dumps(right).replace("<", "\\u003c")
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width'><title>{TITLE}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{TITLE}</h1>\n<div id='ask' hidden><label>I have <select id='release'></select></label>"
        f"<label>and train <select id='strategy'></select></label><div id='answer'></div></div>\n"
        f"<div id='faults'>{html_table(FAULT_HEADER, lines)}</div>\n<div class='wide'>{drawn}</div>\n"
        f"<p>Each cell was trained on a CPU and compared with DDP, within the bounds of the parity check. Point at a"
        f" cell to read what was measured.</p>\n{''.join(tables)}\n"
        f"<script type='application/json' id='right'>{data}</script><script>{SCRIPT}</script></body></html>\n"
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
    in_launchers = {mode.name for mode in MODES if mode.is_of_launchers}
    met = [cell for cell in newest if cell["mode"] in in_launchers and cell["strategy"] not in OF_NO_LAUNCHER]
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


def name_of(cell: Cell) -> str:
    """A cell's library and release."""
    return f"{LIBRARY[library_of(cell['strategy'])]} {cell['release']}".strip()


def summary(cells: Sequence[Cell]) -> str:
    """The counts of each verdict, by release."""
    rows = []
    named = [(cell["torch"], name_of(cell), cell["verdict"]) for cell in cells]
    for torch, release in dict.fromkeys(each[:2] for each in named):
        verdicts = [verdict for *key, verdict in named if key == [torch, release]]
        others = [f"{verdicts.count(name)} {name}" for name in (WRONG, DOES_NOT_RUN, HANGS) if name in verdicts]
        rows.append([torch, release, f"{verdicts.count(RIGHT)} of {len(verdicts)}", ", ".join(others) or "-"])
    return text_table(rows, ["torch", "release", "right", "others"])
