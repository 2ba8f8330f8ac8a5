"""The ledger's cells, as a page."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
from packaging.version import Version

from t5bench import Problem
from t5bench.printed_table import text_table
from t5bench.record.files import write_whole
from t5bench_ledger import pictures
from t5bench_ledger.changes import CHANGES, WITHDRAWN, Change, is_withdrawn, lacks_file, standing
from t5bench_ledger.judge import DOES_NOT_RUN, HANGS, NOTED, RIGHT, WRONG
from t5bench_ledger.modes import (
    ITERATIONS,
    LIBRARY,
    MODES,
    NAMES,
    PIPELINE_PROCESSES,
    PROCESSES,
    STRATEGIES,
    TRAINER,
    TRAINERS,
    Mode,
    library_of,
)
from t5bench_ledger.releases import ReleaseFault, Software
from t5bench_ledger.show import accusation_of
from t5bench_ledger.spans import DATA, published, releases_in, spans_of
from t5bench_ledger.words import mended_in_words, size_in_words
from training_comparison.curves import TOLERANCE

FORMAT = 1
CELLS = DATA / "cells.json"
PAGES = Path(__file__).resolve().parents[2] / "pages"
Cell = dict[str, Any]
MODE = {mode.name: mode for mode in MODES}
INTRODUCTION = """# Which release trains which strategy correctly

Made by `python -m t5bench ledger --publish`.
Every list of releases names those that were tried, one by one; `a..b` stands only where every release that was
published from a to b was tried.
What is on no list was not tried, and nothing is said of it.
The launchers refuse a run whose strategy was wrong in the installed release, in a mode in which they train.

![Which release of DeepSpeed trains which strategy correctly](ledger.svg)

![In which releases of transformers the Trainer is right](trainer.svg)
"""

WHOLE = f"""## How it is measured

Everything was measured on CPUs over gloo, for {ITERATIONS} iterations on {PROCESSES} processes unless the mode says
otherwise, hybrid and DeepSpeed's pipeline on {PIPELINE_PROCESSES}.
That shows what a release computes, not whether its CUDA kernels work.
The bounds are those of [the parity check](../../../docs/parity.md).

| What | trains | compared with |
|---|---|---|
| DeepSpeed's strategies, PyTorch's | a tiny T5 in the native engine, PyTorch's AdamW; not \
cpu_adam, fused_adam | DDP |
| DDP | the same | one process |
| DeepSpeed's pipeline | four layers, SGD ([pipeline.py](../src/t5bench_ledger/pipeline.py)) | plain PyTorch's loss |
| fp16 | two vectors, SGD ([overflow.py](../src/t5bench_ledger/overflow.py)) | losses that are known |
| FSDP2 and tensor | a LayerNorm whose gradient almost cancels \
([two_meshes.py](../src/t5bench_ledger/two_meshes.py)) | one process |
| shapes, from `used once` on | three layers ([shapes.py](../src/t5bench_ledger/shapes.py)) | plain PyTorch |
| Trainer and accelerate | a small Llama, T5, BART, BERT, or three layers \
([trainers.py](../src/t5bench_ledger/trainers.py)) | plain PyTorch on the samples of both processes at once: the mean \
over all target tokens |

A layer used twice is reported wrong in bf16 under ZeRO-2 on 16 GPUs, from 0.18.3 to 0.19.3
([#8224](https://github.com/deepspeedai/DeepSpeed/issues/8224)); on a CPU, 4, 8 and 16 processes under 0.18.3, 0.19.0
and 0.19.3 do not show it.
TRL 1.16.0's SFT and DPO trainers were tried beside four releases of transformers: right beside 5.23.0 and 5.24.0, a
quarter of the gradient beside 5.2.0 and 5.3.0, whose Trainer they inherit ([the file]\
(../src/t5bench_ledger/inherited/trl_trainers.py), [what it printed](../src/t5bench_ledger/inherited/trl_trainers.txt)).
TRL 1.15.0 needs Triton, which a CPU's PyTorch lacks.
accelerate ignores FSDP's plugin on a CPU, and its newer releases take a run with DeepSpeed's for one process: FSDP2,
and ZeRO with the Trainer, cannot be shown here.
DeepSpeed 0.14.0 asks for intel_extension_for_pytorch when it is installed for a CPU: it was not tried.
Of a run in bf16 or fp16 that only fp32 cells speak for, a launcher's record says `not measured in bf16; right in fp32`.

[cells.json](../src/t5bench_ledger/data/cells.json) has every cell; [the README](../README.md#measure) says how to
measure more. Cells of a page that are not measured again stay on it.
"""

OF_OTHER_TORCHES = """FSDP2 and tensor in bf16 was measured again under torch 2.13.0 alone.
The former figures of other releases were the test's, whose gradients cancel, and those cells count as not tried.
"""

NOT_SHOWN = """## Measured as different, and not shown

No file of plain PyTorch and the library alone has shown these in that very release.
They count as not tried; the launchers of this project refuse them all the same.
A cell is trained once. ZeRO-3's in fp16 was trained 60 times in four releases, on a busy machine: 9 trainings differed
in 0.16.3, 8 in 0.17.0, 4 in 0.16.4, none in 0.19.8. One that is right does not show that the next one is.
That is what [#8539](https://github.com/deepspeedai/DeepSpeed/pull/8539) describes and mends: over gloo, not on CUDA,
ZeRO-3 may compute with weights before they are gathered.
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


def sentence(cell: Cell) -> str:
    """What is known of a cell that is not right."""
    if cell["verdict"] not in (WRONG, *NOTED):
        return cell["sentence"]
    return f"from iteration {cell['iteration']} on the {cell['quantity']} is {size_in_words(off_by(cell))}"


def place(cell: Cell) -> str:
    """Where a wrong cell first differs; "" if it was not located."""
    return str(cell.get("where", ""))


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
class WrongCells:
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


def faults(cells: Sequence[Cell]) -> list[WrongCells]:
    merged: list[WrongCells] = []
    for strategy, mode, row in matrix(cells):
        for cell in row:
            if cell is None or cell["verdict"] == RIGHT:
                continue
            fault = WrongCells(strategy, mode, cell["verdict"], sentence(cell), (cell,))
            last = merged[-1] if merged else None
            if last and replace(last, cells=fault.cells) == fault:
                merged[-1] = replace(last, cells=(*last.cells, cell))
            else:
                merged.append(fault)
    return merged


def mended_in(fault: WrongCells, cells: Sequence[Cell]) -> str:
    """The first later release of the cells that is right in the same way of training; "" if none is."""
    last = Version(fault.releases[-1])
    for cell in sorted(cells, key=lambda cell: Version(cell["release"])):
        is_same = (cell["strategy"], cell["mode"]) == (fault.strategy, fault.mode.name)
        if is_same and cell["verdict"] == RIGHT and Version(cell["release"]) > last:
            return str(cell["release"])
    return ""


def release_faults(section: Section) -> list[ReleaseFault]:
    """The faults of a section; the same in several modes is one."""
    found: dict[bytes, ReleaseFault] = {}
    for fault in faults(section.cells):
        first = fault.cells[0]
        made = ReleaseFault(
            software=section.software,
            torch=section.torch,
            releases=spans_of(fault.releases, section.software),
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
FAULT_HEADER = ("strategy", "modes", "releases", "what happens", "right in", "upstream", "shown alone")


def what_happens(fault: ReleaseFault) -> str:
    if fault.verdict not in (WRONG, *NOTED):
        return f"{fault.verdict}: {fault.sentence}"
    if fault.verdict in NOTED:
        size = f"{fault.quantity} {size_in_words(fault.off_by)} from iteration {fault.iteration} on"
        return f"{fault.verdict}: {size}{'; ' if fault.sentence else ''}{fault.sentence}"
    said = f"{fault.quantity} {size_in_words(fault.off_by)} from iteration {fault.iteration} on"
    return f"{said}; first in {fault.where}" if fault.where else said


def fault_words(fault: ReleaseFault, tried: Sequence[str]) -> list[str]:
    """A fault's columns but the last, which has links."""
    modes = ", ".join(fault.modes)
    last = releases_in(fault.releases, fault.software)[-1]
    mended = mended_in_words(fault.mended_in, last, fault.software, tried)
    return [NAMES[fault.strategy], modes, fault.releases, what_happens(fault), mended]


def explained(fault: ReleaseFault) -> Iterator[tuple[str, str, str]]:
    """Number, address and meaning of each issue and pull request upstream."""
    for change in CHANGES:
        for name in change.names:
            if name in fault.upstream:
                yield f"#{name.partition('#')[2]}", change.address(name), change.what


def upstream(fault: ReleaseFault) -> str:
    return ", ".join(f"[{number}]({address})" for number, address, _ in explained(fault)) or NO_REPORT


def reports(found: Iterable[ReleaseFault]) -> list[list[str]]:
    """What each issue and pull request says that explains one of the faults."""
    rows = {(number, address): what for fault in found for number, address, what in explained(fault)}
    return [[f"[{number}]({address})", what] for (number, address), what in rows.items()]


def listed_names(strategies: Iterable[str]) -> str:
    return ", ".join(NAMES[strategy] for strategy in strategies)


def shown(fault: ReleaseFault) -> str:
    """The file that shows it without this project."""
    for mode in fault.modes:
        found = accusation_of(fault.software, mode, fault.strategy, releases_in(fault.releases, fault.software))
        if found and fault.verdict == WRONG:
            return f"[{found.path.stem}](../src/t5bench_ledger/accusations/{found.path.name})"
    return "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, without blanks that only align what nobody reads as text."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def not_shown(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """Strategy, modes, library, releases and difference of what was measured and no file shows."""
    for section in sections([cell for cell in cells if lacks_file(cell) and not is_withdrawn(cell)]):
        for fault in release_faults(section):
            modes = ", ".join(fault.modes)
            yield [NAMES[fault.strategy], modes, section.library, fault.releases, what_happens(fault)]


def markdown(measured: Sequence[Cell]) -> str:
    cells = standing(measured)
    parts = [INTRODUCTION, "## What is not right\n"]
    for section in sections(cells):
        parts.append(f"### {section.title}\n")
        rows = [
            [*fault_words(fault, releases_of(section.cells)), upstream(fault), shown(fault)]
            for fault in release_faults(section)
        ]
        parts.append(table(FAULT_HEADER, rows) if rows else "Everything that was tried is right.\n")
    every = [fault for section in sections(cells) for fault in release_faults(section)]
    parts.append("### What the reports say\n")
    parts.append(table(("upstream", "what"), reports(every)))
    parts.append("## Withdrawn\n")
    withdrawn = [(listed_names(each.strategies), each.mode, each.concerned, each.why) for each in WITHDRAWN]
    parts.append(table(("strategy", "mode", "from release", "why"), withdrawn))
    parts.append(OF_OTHER_TORCHES)
    unshown = list(not_shown(measured))
    parts.append(NOT_SHOWN)
    parts.append(table(("strategy", "modes", "library", "releases", "measured"), unshown) if unshown else "None.\n")
    parts.append("## What was tried\n")
    counts = [[cell["mode"] for cell in cells].count(mode.name) for mode in MODES]
    rows = [(mode.name, mode.meaning, str(count)) for mode, count in zip(MODES, counts, strict=True)]
    parts.append(table(["mode", "meaning", "cells measured"], rows))
    bounds = "; ".join(f"{precision}: {bound}" for precision, bound in TOLERANCE.items())
    within = f"within the bound ({bounds}, relative)"
    parts.append(f"A cell is right if loss and gradient norm of every iteration are {within}.\n")
    for section in sections(cells):
        tried_here = releases_of(section.cells)
        python = ", ".join(sorted({cell["python"] for cell in section.cells}))
        rows = []
        software = section.software
        for strategy, mode, row in matrix(section.cells):
            right = [cell["release"] for cell in row if cell and cell["verdict"] == RIGHT]
            tried = [cell["release"] for cell in row if cell]
            rows.append([NAMES[strategy], mode.name, spans_of(tried, software), spans_of(right, software) or "none"])
        parts.append(f"### {section.title}, Python {python}\n")
        untried = [release for release in published()[software] if release not in tried_here]
        parts.append(f"Tried: {spans_of(tried_here, software)}.\nNot tried: {spans_of(untried, software) or 'none'}.\n")
        parts.append(table(["strategy", "mode", "tried in", "right in"], rows))
    return "\n".join([*parts, WHOLE])


def write_pages(directory: Path, cells: Sequence[Cell]) -> None:
    """Writes ledger.md, and a picture if DeepSpeed or transformers was measured. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    ordered = in_order(cells)
    write_whole(directory / "ledger.md", markdown(ordered))
    stands = standing(ordered)
    if groups(stands):
        _, newest = max(groups(stands), key=lambda group: Version(group[0]))
        write_whole(directory / "ledger.svg", pictures.strategies_picture(newest))
    of_trainer = [cell for cell in stands if cell["strategy"] == TRAINER]
    if of_trainer:
        write_whole(directory / "trainer.svg", pictures.trainer_picture(of_trainer))


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (cell["torch"], Version(cell["release"] or "0")))


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    """Every cell, one a line. Raises OSError."""
    lines = ",\n".join(json.dumps(cell) for cell in in_order(cells))
    write_whole(path, f'{{"format": {FORMAT}, "cells": [\n{lines}\n]}}\n')


def read(path: Path) -> list[Cell]:
    """The cells of such a file. Raises Problem."""
    try:
        cells: list[Cell] = json.loads(path.read_text())["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(f"{path} is no ledger: {error}", "Restore it, or measure everything again") from error
    return cells


def merged(kept: Sequence[Cell], measured: Sequence[Cell]) -> list[Cell]:
    """What was measured, and of what was not measured again the cells that were kept."""
    names = ("torch", "release", "strategy", "mode")
    found = {tuple(cell[name] for name in names): cell for cell in (*kept, *measured)}
    return list(found.values())


def name_of(cell: Cell) -> str:
    """A cell's library and release."""
    return f"{LIBRARY[library_of(cell['strategy'])]} {cell['release']}".strip()


def summary(cells: Sequence[Cell]) -> str:
    """The counts of each verdict, by release."""
    rows = []
    named = [(cell["torch"], name_of(cell), cell["verdict"]) for cell in cells]
    for torch, release in dict.fromkeys(each[:2] for each in named):
        verdicts = [verdict for *key, verdict in named if key == [torch, release]]
        others = [f"{verdicts.count(name)} {name}" for name in (WRONG, DOES_NOT_RUN, HANGS, *NOTED) if name in verdicts]
        rows.append([torch, release, f"{verdicts.count(RIGHT)} of {len(verdicts)}", ", ".join(others) or "-"])
    return text_table(rows, ["torch", "release", "right", "others"])
