"""What launchers ask before a run, answered beforehand: t5bench/record/wrong_releases.json, at most 5 KB.

The file holds the answers to every question that a launcher can ask, so that what reads it is a look-up. Its words are
those of the cells; a way of training that was not measured is said to be so, never right.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from t5bench.record.files import write_whole
from t5bench.record.ledger import FORMAT, RIGHT, UNKNOWN, VERDICTS, WRONG, LedgerAnswer, run_of, version_of
from t5bench_ledger.modes import (
    DEEPSPEED_PIPELINE,
    DEEPSPEED_STRATEGIES,
    MODES,
    OF_NO_LAUNCHER,
    PIPELINE_CLIPPING,
    TORCH_STRATEGIES,
    Mode,
    library_of,
)
from t5bench_ledger.spans import public
from t5bench_ledger.tables import off_by
from t5bench_ledger.words import size_in_words

Cell = Mapping[str, Any]
RIGHT_IN_FP32 = "not measured in {}; right in fp32"
PRECISIONS = ("fp32", "bf16", "fp16")
OWN = {mode.name: mode for mode in MODES if mode.is_of_launchers}
EIGHT = [
    {"several_micro_batches": several, "offload": offload, "resumes": resumes}
    for several, offload, resumes in product((False, True), repeat=3)
]
assert [run_of(**run) for run in EIGHT] == list(range(len(EIGHT)))


def said_of(cell: Cell) -> str:
    """What launchers say of a cell that is not right."""
    if cell["verdict"] != WRONG:
        return f"{cell['verdict']} there with torch {public(cell['torch'])}: {cell['sentence'].partition('. ')[0]}"
    other = "one process's" if cell["strategy"] == "ddp" else "DDP's"
    size = size_in_words(off_by(cell))
    return f"its {cell['quantity']} differs from {other} from iteration {cell['iteration']} on: {size}"


def worst(cells: Sequence[Cell]) -> LedgerAnswer:
    faults = [cell for cell in cells if cell["verdict"] != RIGHT]
    if not faults:
        return LedgerAnswer(RIGHT)
    found = max(faults, key=lambda cell: cell["verdict"] == WRONG)
    return LedgerAnswer(found["verdict"], said_of(found))


def cells_of(
    cells: Sequence[Cell], precision: str, several_micro_batches: bool, offload: bool, resumes: bool
) -> list[Cell]:
    def fits(mode: Mode) -> bool:
        is_same = (mode.precision, mode.offload, mode.resumes) == (precision, offload, resumes)
        return is_same and (mode.micro_batches > 1) == several_micro_batches

    return [cell for cell in cells if cell["mode"] in OWN and fits(OWN[cell["mode"]])]


def of_deepspeed(
    cells: Sequence[Cell], strategy: str, precision: str, *, several_micro_batches: bool, offload: bool, resumes: bool
) -> LedgerAnswer:
    """The worst verdict of the modes that such a run is in, by one release's cells.

    A fault in fp32 also speaks for 16 bits, where the same way of training was not measured in them; that fp32 is
    right is then called so, and a pipeline that was trained without clipping only is not called right.
    """
    own: list[Cell] = []
    lacks_own_precision = False
    for how in (False, True) if resumes else (False,):
        in_fp32 = cells_of(cells, "fp32", several_micro_batches, offload, how)
        in_16_bits = cells_of(cells, precision, several_micro_batches, offload, how)
        if precision == "fp32":
            own += in_fp32
        elif precision == "bf16" and in_16_bits and strategy != DEEPSPEED_PIPELINE:
            own += in_16_bits
        else:  # a fault of fp16's own scaling, or of the pipeline's, is none of fp32's, and the reverse
            own += [*in_fp32, *in_16_bits]
            lacks_own_precision |= not in_16_bits or strategy == DEEPSPEED_PIPELINE
    if not own:
        return LedgerAnswer(UNKNOWN)
    answer = worst(own)
    lacks_clipping = strategy == DEEPSPEED_PIPELINE and all(cell["mode"] != PIPELINE_CLIPPING for cell in own)
    if answer.verdict == RIGHT and lacks_clipping:
        return LedgerAnswer(UNKNOWN)
    if answer.verdict == RIGHT and lacks_own_precision:
        return LedgerAnswer(RIGHT_IN_FP32.format(precision))
    return answer


def of_torch(
    cells: Sequence[Cell], strategy: str, precision: str, *, several_micro_batches: bool, offload: bool, resumes: bool
) -> LedgerAnswer:
    """The worst verdict on a strategy that needs no DeepSpeed; its number of micro-batches is not asked."""
    modes = [mode for mode in OWN.values() if mode.precision == ("bf16" if precision == "bf16" else "fp32")]
    names = {mode.name for mode in modes if resumes or not mode.resumes}
    own = [cell for cell in cells if cell["mode"] in names]
    return worst(own) if own else LedgerAnswer(UNKNOWN)


def content(cells: Sequence[Cell]) -> dict[str, Any]:
    """What the file holds: for each run of a launcher the number of its answer. An answer is the verdict on all
    releases that were tried, and the numbers of exceptions: a verdict, its releases and words."""
    made: dict[str, Any] = {"format": FORMAT}
    exceptions: list[list[str]] = []
    answers: list[list[Any]] = []
    for library, strategies, ask in (
        ("deepspeed", [name for name in DEEPSPEED_STRATEGIES if name not in OF_NO_LAUNCHER], of_deepspeed),
        ("torch", TORCH_STRATEGIES, of_torch),
    ):
        released = [(release_of(cell, library), cell) for cell in cells if library_of(cell["strategy"]) == library]
        tried = sorted({release for release, _ in released}, key=version_of)
        runs: dict[str, dict[str, list[int]]] = {}
        for strategy, precision, run in product(strategies, PRECISIONS, EIGHT):
            found: dict[LedgerAnswer, list[str]] = {}
            for release in tried:
                own = [cell for name, cell in released if name == release and cell["strategy"] == strategy]
                found.setdefault(ask(own, strategy, precision, **run), []).append(release)
            found = found or {LedgerAnswer(UNKNOWN): []}
            usual = max(found, key=lambda answer: (not answer.said, len(found[answer])))
            others = [[each.verdict, " ".join(found[each]), each.said] for each in found if each != usual]
            answer = [usual.verdict, [place_of(other, exceptions) for other in others]]
            runs.setdefault(strategy, {}).setdefault(precision, []).append(place_of(answer, answers))
        made[library] = {"tried": " ".join(tried), "runs": runs}
    return made | {"exceptions": exceptions, "answers": answers}


def place_of(value: Any, values: list[Any]) -> int:
    """Its place among the values, at whose end it is put if it is not there."""
    if value not in values:
        values.append(value)
    return values.index(value)


def release_of(cell: Cell, library: str) -> str:
    return public(cell["torch"]) if library == "torch" else str(cell["release"])


def in_lines(cells: Sequence[Cell]) -> str:
    """The file, with a line for each strategy, exception and answer."""
    made = content(cells)
    parts = [f'"format": {json.dumps(made["format"])}']
    for library in ("deepspeed", "torch"):
        lines = ",\n".join(f"{json.dumps(name)}:{compact(runs)}" for name, runs in made[library]["runs"].items())
        parts.append(f'"{library}": {{"tried": {json.dumps(made[library]["tried"])}, "runs": {{\n{lines}\n}}}}')
    for name in ("exceptions", "answers"):
        parts.append(f'"{name}": [\n' + ",\n".join(map(compact, made[name])) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def write(cells: Sequence[Cell]) -> None:
    """Raises OSError."""
    write_whole(VERDICTS, in_lines(cells))
