"""``python -m t5bench ledger --cards RUNS``: for each strategy, engine and release, what is verified, and how well.

A card's figures come from two places: the ledger's cells, and the records of runs. Nothing is trained.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tabulate import tabulate

from t5bench import Problem, note
from t5bench.compare.parity import Difference, other_training, verdict
from t5bench.compare.rows import Row, bytes_text, group_runs, make_row
from t5bench.ledger.judge import RIGHT
from t5bench.ledger.modes import BASELINE, MODES
from t5bench.ledger.tables import NAMES
from t5bench.record.ledger import is_of_launchers
from t5bench.record.records import Run
from t5bench.report.command import load_runs, run_directories
from t5bench.report.tables import predicted_bytes

NOT_TRIED = "not tried"
FIRST_DIGITS = 8  # of a commit
DECIDING = ("model", "recipe", "method", "layout")  # the roles of settings that change what is trained, or how
INTRODUCTION = """# What is verified of each strategy

A card for each strategy, with a line for each engine and release. Each figure says how it is known: `measured`, `predicted`, or `not tried`.
Parity comes from [the ledger](ledger.md), or from runs that were compared with DDP by [the parity check](parity.md). Bytes are those that the
busiest node sends in an iteration; over loopback other programs' bytes count too. Memory is the fullest process's peak: on a GPU what PyTorch
allocated; a CPU does not say it.

    python -m t5bench ledger --cards outputs/runs --page docs
"""  # noqa: E501


@dataclass(frozen=True)
class Line:
    """A line of a card."""

    strategy: str
    engine: str
    deepspeed: str
    torch: str
    device: str
    parity: str
    bytes: str
    memory: str
    command: str
    """The launcher's command, without what is at its default."""
    commit: str
    """Of this project."""


def measured_lines(places: Sequence[str]) -> Iterator[Line]:
    """The lines of complete runs. Raises Problem if there is no run."""
    runs, left_out = load_runs(run_directories(places))
    for reason in left_out:
        note(f"warning: {reason}")
    for alike in group_runs(runs):
        row = make_row(alike[0].strategy, alike)
        if row.complete:
            yield _line_of_row(row, runs)


def _line_of_row(row: Row, runs: Sequence[Run]) -> Line:
    run = row.run
    versions = run.record["versions"]
    settings = " ".join(f"{name}={shlex.quote(run.plan.settings[name].value)}" for name in _chosen(run))
    return Line(
        strategy=row.strategy,
        engine=run.engine,
        deepspeed=versions.get("deepspeed", "") if run.plan.ds_config else "",
        torch=versions.get("torch", ""),
        device=run.plan.device,
        parity=_parity(run, runs),
        bytes=_bytes(row),
        memory=_memory(row),
        command=f"{settings} bash scripts/run_megatron_t5_{row.strategy}.sh".strip(),
        commit=str(run.record["commits"].get("repository") or "")[:FIRST_DIGITS],
    )


def _chosen(run: Run) -> list[str]:
    return [name for name in run.plan.chosen if run.plan.settings[name].role in DECIDING]


def _parity(run: Run, runs: Sequence[Run]) -> str:
    if run.strategy == BASELINE:
        return "the baseline"
    baselines = [
        other
        for other in runs
        if other.strategy == BASELINE and other.engine == run.engine and not other_training(run, other)
    ]
    if not baselines:
        return NOT_TRIED
    judged = verdict(run, baselines[0])
    if not judged.passed:
        return f"measured: FAIL, {judged.reasons[0]}"
    assert isinstance(judged.loss, Difference) and isinstance(judged.norm, Difference)
    return f"measured: PASS, loss within {judged.loss.largest:.0e}, norm within {judged.norm.largest:.0e}"


def _bytes(row: Row) -> str:
    said = []
    if row.sent_per_iteration is not None:
        said.append(f"measured {bytes_text(row.sent_per_iteration)}")
    predicted = predicted_bytes(row)
    if predicted:
        said.append(f"predicted {bytes_text(predicted.value)}")
    return ", ".join(said) or NOT_TRIED


def _memory(row: Row) -> str:
    said = []
    if row.on_gpu and row.peak_memory:
        said.append(f"measured {max(row.peak_memory.values()):,.0f} MiB")
    if row.prediction:
        said.append(f"predicted {row.prediction.memory.peak / 2**20:,.0f} MiB")
    return ", ".join(said) or NOT_TRIED


def ledger_lines(cells: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """A line for each strategy and release of the ledger, over the modes in which launchers train."""
    in_launchers = {mode.name for mode in MODES if is_of_launchers(asdict(mode))}
    met: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        if cell["mode"] in in_launchers:
            met.setdefault((cell["strategy"], cell["release"], cell["torch"]), []).append(cell)
    for (strategy, release, torch), own in met.items():
        right = sum(cell["verdict"] == RIGHT for cell in own)
        others = [f"{cell['mode']} {cell['verdict']}" for cell in own if cell["verdict"] != RIGHT]
        said = f"measured: right in {right} of {len(own)} modes"
        versions = f"--torch {torch.partition('+')[0]}" if not release else f"--releases {release}"
        yield Line(
            strategy=strategy,
            engine="native",
            deepspeed=release,
            torch=torch,
            device="cpu",
            parity=": ".join([said, "; ".join(others)]) if others else said,
            bytes=NOT_TRIED,
            memory=NOT_TRIED,
            command=f"python -m t5bench ledger --strategies '{strategy}' {versions}",
            commit="",
        )


def markdown(lines: Sequence[Line]) -> str:
    """Raises Problem if there are none."""
    if not lines:
        raise Problem("there is nothing to write a card of", "Name directories with complete runs")
    header = [field.name for field in fields(Line)][1:]
    parts = [INTRODUCTION]
    names = [name for name in NAMES if any(line.strategy == name for line in lines)]
    names += sorted({line.strategy for line in lines} - set(names))
    for name in names:
        own = [line for line in lines if line.strategy == name]
        rows = [[str(value) or "-" for value in list(asdict(line).values())[1:]] for line in own]
        for row in rows:
            row[-2] = f"`{row[-2]}`"
        parts.append(f"## {NAMES.get(name, name)}\n")
        parts.append(tabulate(rows, header, tablefmt="github", disable_numparse=True) + "\n")
    return "\n".join(parts)
