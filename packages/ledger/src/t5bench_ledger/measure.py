"""Trains every strategy under releases of libraries: which are right?

Each release is installed in a folder of its own (environments.py), and its cells are trained by one process that
imports it once (worker.py). A cell is compared with DDP, and DDP with one process, by the bounds of the parity check.
With ``--locate`` a wrong one is trained once more with a trace, which says where it first differs. Finished cells are
kept: the same command continues after an interruption.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, Problem, need_checkout, note, raise_on_signals
from t5bench.plan.launchers import accepted, declared
from t5bench.plan.ports import free_port
from t5bench.printed_table import text_table
from t5bench.record.log import iterations
from t5bench.record.plan import Plan
from t5bench.sweep.launch import Launch, PlannedRun
from t5bench_ledger import costs, environments, gate, judge, page, tables, verdicts
from t5bench_ledger.answer import chosen
from t5bench_ledger.bisection import next_releases
from t5bench_ledger.changes import is_withdrawn
from t5bench_ledger.modes import (
    ACCELERATE_STAGES,
    BASELINE,
    BESIDE,
    DEEPSPEED_STRATEGIES,
    FSDP2_TENSOR,
    HYBRID_PROCESSES,
    ITERATIONS,
    MODES,
    OVERFLOWING,
    PIPELINE_CLIP_NORM,
    PIPELINE_CLIPPING,
    PIPELINE_PROCESSES,
    PIPELINES,
    PROCESSES,
    RELEASES_OF,
    SAVED_AFTER,
    SETTINGS,
    STAGE_0,
    STRATEGIES,
    TORCH_STRATEGIES,
    TRAINER,
    TRAINERS,
    TWO_MESHES_PROCESSES,
    ZERO_STRATEGIES,
    Mode,
    arguments,
    deepspeed_json,
    library_of,
    reference_mode,
)
from t5bench_ledger.spans import published
from t5bench_ledger.words import size_in_words
from training_comparison.curves import Curves
from training_comparison.first_difference import first_difference
from training_comparison.traces import trace_of_run

PATIENCE_SECONDS = 15
EVERY = "every"
SECONDS = "seconds.jsonl"
# They import torch, which the command does not.
PIPELINE_PROGRAM = Path(__file__).with_name("pipeline.py")
OVERFLOW_PROGRAM = Path(__file__).with_name("overflow.py")
SHAPES_PROGRAM = Path(__file__).with_name("shapes.py")
TRAINERS_PROGRAM = Path(__file__).with_name("trainers.py")
TWO_MESHES_PROGRAM = Path(__file__).with_name("two_meshes.py")
# What the native engine trains with; a small program is one file.
NATIVE_CODE = ("native/*.py", "packages/ledger/src/t5bench_ledger/modes.py")


@dataclass(frozen=True)
class Cell:
    """One measured cell. torch and python: the versions with which it was trained. seconds: how long that took."""

    release: str  # of the strategy's library; empty if it needs PyTorch alone
    strategy: str
    mode: str
    verdict: str
    iteration: int | None
    quantity: str
    times: float | None
    sentence: str
    torch: str
    python: str
    seconds: float
    code: str
    where: str = ""
    """Of a wrong cell that was trained again with a trace: where it first differs from DDP, in words."""
    beside: str = ""
    """What else a trainer's release was tried with, as "accelerate 1.15.0"; torch has its own field."""


def releases_of(text: str, library: str) -> list[str]:
    """The releases of a library in what --releases names. Raises Problem."""
    found = []
    for name in chosen(text, (), "release"):
        whose, _, release = name.rpartition("==")
        if (whose or "deepspeed") not in RELEASES_OF:
            raise Problem(
                f"--releases has no '{whose}'", f"Choose from: {', '.join(RELEASES_OF)}; --torch has PyTorch's"
            )
        if (whose or "deepspeed") == library:
            found += published()[library] if release == EVERY else [release]
    return found


@cache
def native_digest() -> str:
    found = hashlib.sha256()
    for pattern in NATIVE_CODE:
        for path in sorted(REPOSITORY.glob(pattern)):
            found.update(path.read_bytes())
    return found.hexdigest()


def code_digest(strategy: str, mode: Mode) -> str:
    """Of what decides what a cell trains: cells of other code are trained again. Words for readers are none of it."""
    program = program_of(strategy, mode)
    code = hashlib.sha256(Path(program).read_bytes()).hexdigest() if program else native_digest()
    trained = {name: value for name, value in asdict(mode).items() if name not in ("meaning", "strategies", "when")}
    return hashlib.sha256(f"{code} {strategy} {trained}".encode()).hexdigest()[:16]


def prepare_data(directory: Path) -> Path:
    """The bundled sample as an indexed dataset. Raises Problem."""
    need_checkout("measuring a release")
    settings = {"SAMPLE": "1", "TOKENIZER_MODEL": "", "MODEL_FAMILY": "t5", "MEGATRON_DATA_DIR": str(directory)}
    script = ["bash", str(REPOSITORY / "scripts" / "prepare_xsum_megatron.sh")]
    result = subprocess.run(script, env=os.environ | settings, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Problem("cannot prepare the bundled sample", result.stderr)
    return directory


def processes_of(strategy: str, mode: Mode) -> int:
    if strategy in PIPELINES:
        return PIPELINE_PROCESSES
    if strategy == FSDP2_TENSOR:
        return TWO_MESHES_PROCESSES
    return HYBRID_PROCESSES if strategy == "hybrid" else mode.processes


def program_of(strategy: str, mode: Mode) -> str:
    """The small program that trains a cell; "" if the native engine does."""
    if strategy in PIPELINES:
        return str(PIPELINE_PROGRAM)
    if strategy in TRAINERS:
        return str(TRAINERS_PROGRAM)
    if strategy == FSDP2_TENSOR:
        return str(TWO_MESHES_PROGRAM)
    if mode.shape:
        return str(SHAPES_PROGRAM)
    return str(OVERFLOW_PROGRAM) if mode.precision == "fp16" else ""


def read_plans(output: Path, data: Path) -> dict[str, Plan]:
    """The launchers' plans of the strategies that need no DeepSpeed. Raises Problem."""
    launch = Launch(SETTINGS | {"MEGATRON_DATA_DIR": str(data), "MODEL_FAMILY": "t5"}, arguments=RECIPE)
    rows = [PlannedRun(name, name, HYBRID_PROCESSES if name == "hybrid" else PROCESSES) for name in TORCH_STRATEGIES]
    return {row.strategy: accepted(launch.ask(row, output / "plan" / row.name)) for row in rows}


def stage_configs() -> dict[str, dict[str, Any]]:
    """The ZeRO strategies' JSON in ds_configs/. Their launchers' plans would refuse a release that is known to be
    wrong; the rest of their command line has no effect in the native engine."""
    folder = REPOSITORY / "ds_configs"
    return {name: json.loads((folder / declared(name).ds_config).read_text()) for name in ZERO_STRATEGIES}


# As in scripts/check_parity.sh: numbers that have no setting.
RECIPE = ("--adam-beta1", "0.9", "--adam-beta2", "0.9", "--adam-eps", "0.01", "--init-method-std", "0.1")


class Worker:
    """The process that trains a release's cells. Its answers come one a line."""

    def __init__(
        self, python: Path, folders: Sequence[Path], tokenizer: str, log: Path, library: str = "deepspeed"
    ) -> None:
        added = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [str(python), "-m", "t5bench_ledger.worker", tokenizer, library],
                env=environments.environment(folders, added),
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # one group with the processes that it forks
            )
        self.asked = 0
        self.versions = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": f"its process ended with status {self.process.wait()}"}

    def train(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """What became of a cell; an answer to another, for which nobody waited to its end, is passed over."""
        assert self.process.stdin
        self.asked += 1
        self.process.stdin.write(json.dumps({**cell, "number": self.asked}) + "\n")
        self.process.stdin.flush()
        while True:
            answer = self._answer()
            if "failed" in answer or answer["number"] == self.asked:
                return answer

    def end(self) -> None:
        """Ends it and what it trains, also in the middle of a cell."""
        with contextlib.suppress(ProcessLookupError):  # it could not import its release
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Ledger:
    """Trains cells and judges them."""

    def __init__(self, plans: Mapping[str, Plan], output: Path, limit: float) -> None:
        self.plans = plans  # of the strategies that need no DeepSpeed
        self.output = output
        self.limit = limit
        self.stage_configs = stage_configs()
        self.references: dict[tuple[str, int, int, bool, bool], Curves] = {}

    def words(self, strategy: str, mode: Mode, directory: Path) -> list[str]:
        """The command line of a cell, whose JSON is written to its directory."""
        if strategy in PIPELINES:
            in_bf16 = ["--bf16"] if mode.precision == "bf16" else []
            clips = ["--clip-norm", str(PIPELINE_CLIP_NORM)] if mode.name == PIPELINE_CLIPPING else []
            return ["--stage", str(PIPELINES[strategy]), *in_bf16, *clips]
        if strategy in TRAINERS:
            in_bf16 = ["--bf16"] if mode.precision == "bf16" else []
            by = "trainer" if strategy == TRAINER else "accelerate"
            stage = str(ACCELERATE_STAGES.get(strategy, 0))
            checkpoints = str(directory / "checkpoints")
            return ["--by", by, "--stage", stage, "--case", mode.shape, "--directory", checkpoints, *in_bf16]
        if strategy == FSDP2_TENSOR:
            return ["--bf16"] if mode.precision == "bf16" else []
        if mode.shape:
            in_bf16 = ["--bf16"] if mode.precision == "bf16" else []
            return ["--stage", str(OVERFLOWING[strategy]), "--shape", mode.shape, *in_bf16]
        if mode.precision == "fp16":
            return ["--stage", str(OVERFLOWING[strategy])]
        planned = self.plans.get(strategy, self.plans[BASELINE])
        words = [*planned.arguments.words, *arguments(mode)]
        if strategy in DEEPSPEED_STRATEGIES:
            config = self.stage_configs["zero1" if strategy == STAGE_0 else strategy]
            path = directory / "ds_config.json"
            path.write_text(json.dumps(deepspeed_json(config, strategy, mode), indent=2))
            words += ["--deepspeed", "--deepspeed_config", str(path)]
        return words

    def train(
        self,
        worker: Worker,
        strategy: str,
        mode: Mode,
        directory: Path,
        *,
        alone: bool = False,
        with_trace: bool = False,
        counts: Path | None = None,
    ) -> dict[str, Any]:
        """The worker's answer; a mode that resumes trains twice. alone: in one process, with the same batch. counts:
        where rank 0 writes what an iteration costs."""
        directory.mkdir(parents=True, exist_ok=True)
        for log in directory.glob("rank*.log"):
            log.unlink()
        words = self.words(strategy, mode, directory)
        if with_trace:
            words += ["--trace", "--tensorboard-dir", str(directory / "tensorboard")]
        cell = {
            "directory": str(directory),
            "program": program_of(strategy, mode),
            "processes": 1 if alone else processes_of(strategy, mode),
            "poisons_memory": mode.poisons_memory,
            "counts": str(counts) if counts else "",
            "limit": self.limit,
            "patience": PATIENCE_SECONDS,
        }
        checkpoints = str(directory / "checkpoints")
        attempts: list[list[str]] = [[]]
        if mode.resumes:
            first = ["--save", checkpoints, "--save-interval", str(SAVED_AFTER), "--exit-interval", str(SAVED_AFTER)]
            attempts = [first, ["--load", checkpoints]]
        seconds = 0.0
        for added in attempts:
            answer = worker.train(cell | {"words": [*words, *added], "port": str(free_port())})
            seconds += answer.get("seconds", 0.0)
            if not has_ended_well(answer):
                break
        return answer | {"seconds": seconds}

    def reference(self, worker: Worker, mode: Mode, *, alone: bool) -> Curves:
        """The baseline's curves in what the mode has in common with it, trained when first needed. Raises Problem.

        alone: the baseline's own reference, which one process trains.
        """
        key = (*reference_mode(mode), alone)
        if key not in self.references:
            directory = self.train_reference(worker, mode, alone=alone)
            self.references[key] = curves(directory)
        return self.references[key]

    def train_reference(self, worker: Worker, mode: Mode, *, alone: bool, with_trace: bool = False) -> Path:
        """The directory of the baseline's run. Raises Problem."""
        plain = replace(
            mode,
            name="reference",
            offload=False,
            fp32_accumulation=False,
            resumes=False,
            poisons_memory=False,
            config={},
        )
        name = "-".join(map(str, (*reference_mode(mode), alone, *(["traced"] if with_trace else []))))
        directory = self.output / "runs" / BASELINE / name
        answer = self.train(worker, BASELINE, plain, directory, alone=alone, with_trace=with_trace)
        if not has_ended_well(answer):
            raise Problem(f"the baseline does not train: {judge.why(logs(directory))}", f"See {directory}")
        return directory

    def locate(self, worker: Worker, strategy: str, mode: Mode, directory: Path) -> str:
        """Where a wrong cell, trained again, first differs from its reference, in words."""
        traced = directory / "traced"
        if not has_ended_well(self.train(worker, strategy, mode, traced, with_trace=True)):
            return f"it cannot be traced: {judge.why(logs(traced))}"
        try:
            reference = self.train_reference(worker, mode, alone=strategy == BASELINE, with_trace=True)
            place = first_difference(trace_of_run(traced), trace_of_run(reference))
        except Problem as problem:
            return f"it cannot be traced: {problem.found}"
        return f"first in {place.where('iteration')}" if place else "its trace shows no difference beyond rounding"

    def measure(self, worker: Worker, strategy: str, mode: Mode, directory: Path) -> tuple[judge.CellVerdict, float]:
        """The verdict on a cell, and the seconds that it took."""
        answer = self.train(worker, strategy, mode, directory)
        if answer.get("failed"):
            return judge.CellVerdict(judge.DOES_NOT_RUN, sentence=judge.in_brief(answer["failed"])), 0.0
        if answer["hangs"]:
            sentence = f"it did not end within {self.limit:.0f} s"
            return judge.CellVerdict(judge.HANGS, sentence=sentence), answer["seconds"]
        if any(answer["statuses"]):
            return judge.CellVerdict(judge.DOES_NOT_RUN, sentence=judge.why(logs(directory))), answer["seconds"]
        if program_of(strategy, mode):
            measured, reference, otherwise = printed_curves(directory)
        else:
            measured = curves(directory)
            reference = self.reference(worker, mode, alone=strategy == BASELINE)
            otherwise = {}
        precision = "bf16" if mode.precision == "bf16" else "fp32"
        verdict = judge.noted(judge.judge(measured, reference, precision), otherwise, precision)
        return verdict, answer["seconds"]


def has_ended_well(answer: Mapping[str, Any]) -> bool:
    return not (answer.get("failed") or answer["hangs"] or any(answer["statuses"]))


def lacks_place(cell: Cell, mode: Mode) -> bool:
    """Whether a trace could still say where a cell first differs."""
    writes_trace = not program_of(cell.strategy, mode) and not mode.resumes
    return cell.verdict == judge.WRONG and writes_trace and not cell.where


def logs(directory: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(directory.glob("rank*.log"))]


def curves(directory: Path) -> Curves:
    loss: dict[int, float] = {}
    norm: dict[int, float] = {}
    for log in logs(directory):
        for line in iterations(log.splitlines()):
            loss[line.iteration] = line.lm_loss if line.lm_loss is not None else float("nan")
            if line.grad_norm is not None:
                norm[line.iteration] = line.grad_norm
    # An optimizer that reports no norm is no fault, as long as the losses are numbers.
    if all(math.isnan(value) for value in norm.values()) and not any(math.isnan(value) for value in loss.values()):
        norm = {}
    return Curves(loss, norm)


Pair = tuple[Curves, Curves]


def printed_curves(directory: Path) -> tuple[Curves, Curves, dict[str, Pair]]:
    """What a small program trained, what it expected, and by name the same of what would explain a difference."""
    for line in "\n".join(logs(directory)).splitlines():
        if line.startswith('{"losses"'):
            printed = json.loads(line)
            otherwise = {name: pair_of(content) for name, content in printed.get("otherwise", {}).items()}
            return *pair_of(printed), otherwise
    return Curves({}, {}), Curves(dict.fromkeys(range(1, ITERATIONS + 1), 1.0), {}), {}


def pair_of(printed: Mapping[str, Any]) -> Pair:
    """Of lists by iteration."""
    measured = dict(enumerate(printed["losses"], 1))
    expected = dict(enumerate(printed["expected"], 1))
    norms = dict(enumerate(printed.get("norms", []), 1))
    if all(math.isnan(norm) for norm in norms.values()):
        norms = {}
    expected_norms = dict(enumerate(printed.get("expected_norms", []), 1)) if norms else {}
    return Curves(measured, norms), Curves(expected, expected_norms)


def read_cells(path: Path) -> list[Cell]:
    """The cells that earlier commands measured, the oldest first."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Cell(**json.loads(line)) for line in lines]


def wanted_cells(strategies: Iterable[str], modes: Iterable[str]) -> Iterator[tuple[str, Mode]]:
    names = list(modes)
    for strategy in strategies:
        for mode in MODES:
            if mode.name in names and strategy in mode.strategies:
                yield strategy, mode


def describe(cell: Cell) -> str:
    if cell.verdict == judge.WRONG or cell.verdict in judge.NOTED:
        where = f"; {cell.where}" if cell.where else ""
        size = size_in_words(tables.off_by(asdict(cell)))
        return f"{cell.verdict} from iteration {cell.iteration} on: {cell.quantity} {size}{where}"
    return f"{cell.verdict}: {cell.sentence}" if cell.sentence else cell.verdict


@dataclass(frozen=True)
class EnvironmentColumn:
    """The cells of one environment."""

    torch: str | None
    """PyTorch's release; None for the running Python's."""
    release: str
    """Of the library; empty for strategies that need PyTorch alone."""
    cells: Sequence[tuple[str, Mode]]
    """Strategies and modes."""
    library: str = "deepspeed"
    """torch, deepspeed, transformers or accelerate."""

    @property
    def name(self) -> str:
        release = self.release if self.library in ("torch", "deepspeed") else f"{self.library} {self.release}"
        if not self.torch:
            return release or "torch"
        return f"{release} torch {self.torch}".strip()

    @property
    def needed(self) -> dict[str, str]:
        """By library the releases that it needs before the packages of its Python."""
        return {self.library: self.release} | BESIDE[self.library] if self.release else {}

    def folders(self, python: Path) -> list[Path]:
        """Where these are; they are installed first."""
        return [
            environments.release_folder(release, python, self.torch, library)
            for library, release in self.needed.items()
        ]

    @property
    def is_installed(self) -> bool:
        """Whether uv has nothing to do."""
        found = [environments.folder_of(release, self.torch, library) for library, release in self.needed.items()]
        return not self.torch and all(folder.exists() for folder in found)


def columns(args: argparse.Namespace) -> list[EnvironmentColumn]:
    """Raises Problem."""
    torches: Sequence[str | None] = chosen(args.torch, (), "torch") if args.torch else [None]
    strategies = chosen(args.strategies, STRATEGIES, "strategy")
    every = [mode.name for mode in MODES]
    modes = chosen(args.modes, every, "mode") if args.modes else every
    wanted = list(wanted_cells(strategies, modes))
    made = []
    for torch in torches:
        made.append(EnvironmentColumn(torch, "", [cell for cell in wanted if library_of(cell[0]) == "torch"], "torch"))
        for library in RELEASES_OF:
            own = [cell for cell in wanted if library_of(cell[0]) == library]
            made += [EnvironmentColumn(torch, release, own, library) for release in releases_of(args.releases, library)]
    return [column for column in made if column.cells]


class CellProgress:
    """Counts the cells, and says of each what came out and how long the rest will take."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.number = 0
        self.trained = 0
        self.trained_seconds = 0.0

    def label(self, column: EnvironmentColumn, strategy: str, mode: Mode) -> str:
        self.number += 1
        return f"[{self.number:{len(str(self.total))}}/{self.total}] {column.name} {strategy} {mode.name}"

    def tell(self, label: str, cell: Cell, seconds: float) -> None:
        self.trained += 1
        self.trained_seconds += seconds
        left = timedelta(seconds=round(self.trained_seconds / self.trained * (self.total - self.number)))
        note(f"{label}  {describe(cell)}, {cell.seconds:.0f} s; about {left} left")


def is_current(cell: Cell) -> bool:
    """Whether today's code trained it."""
    modes = [mode for mode in MODES if mode.name == cell.mode and cell.strategy in mode.strategies]
    return any(cell.code == code_digest(cell.strategy, mode) for mode in modes)


def known_cells(column: EnvironmentColumn, known: Iterable[Cell]) -> dict[tuple[str, str], Cell]:
    """Those of the column's releases, by strategy and mode."""
    own_torch = "" if column.torch else metadata.version("torch")

    def has_its_torch(cell: Cell) -> bool:
        if column.torch:  # which build of it is installed does not matter
            return cell.torch.partition("+")[0] == column.torch.partition("+")[0]
        return cell.torch == own_torch

    of_release = [cell for cell in known if cell.release == column.release]
    return {(cell.strategy, cell.mode): cell for cell in of_release if has_its_torch(cell)}


def measure_column(
    ledger: Ledger,
    column: EnvironmentColumn,
    tokenizer: Path,
    progress: CellProgress,
    known: list[Cell],
    *,
    locates: bool,
) -> None:
    """Adds the cells that are not known yet to those that are, also in the file. Raises Problem."""
    of_column = known_cells(column, known)
    column_begin = time.monotonic()
    installing = 0.0
    trained = 0
    with contextlib.ExitStack() as stack:
        worker = None
        for strategy, mode in column.cells:
            label = progress.label(column, strategy, mode)
            before = of_column.get((strategy, mode.name))
            code = code_digest(strategy, mode)
            if before and before.code == code and not (locates and lacks_place(before, mode)):
                note(f"{label}  {describe(before)} (known)")
                continue
            begin = time.monotonic()
            if worker is None:
                worker = start_worker(ledger, column, tokenizer)
                stack.callback(worker.end)
                installing = time.monotonic() - begin
            cell = measure_cell(ledger, worker, column, strategy, mode, code, locates=locates)
            known.append(cell)
            with (ledger.output / "cells.jsonl").open("a") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
            progress.tell(label, cell, time.monotonic() - begin)
            trained += 1
    if trained:
        seconds = {"release": column.name, "cells": trained, "beginning": round(installing, 1)}
        seconds["all"] = round(time.monotonic() - column_begin, 1)
        with (ledger.output / SECONDS).open("a") as file:
            file.write(json.dumps(seconds) + "\n")


def seconds_table(path: Path) -> str:
    """What each release took, of those that were measured with this output; "" if none was."""
    lines = path.read_text().splitlines() if path.exists() else []
    taken = [json.loads(line) for line in lines]
    rows = [[each["release"], str(each["cells"]), f"{each['all']:.0f}", f"{each['beginning']:.0f}"] for each in taken]
    header = ["release", "cells", "seconds", "of them until the first"]
    return text_table(rows, header) if rows else ""


def runs_folder(ledger: Ledger, column: EnvironmentColumn) -> Path:
    return ledger.output / "runs" / column.name.replace(" ", "-")


def start_worker(ledger: Ledger, column: EnvironmentColumn, tokenizer: Path) -> Worker:
    """The process of a column, whose releases are installed first. Raises Problem."""
    python = environments.base_python(column.torch)
    ledger.references.clear()  # by this torch
    log = runs_folder(ledger, column) / "worker.log"
    return Worker(python, column.folders(python), str(tokenizer), log, column.library)


def measure_cell(
    ledger: Ledger, worker: Worker, column: EnvironmentColumn, strategy: str, mode: Mode, code: str, *, locates: bool
) -> Cell:
    directory = runs_folder(ledger, column) / strategy / mode.name.replace(" ", "-")
    versions = worker.versions
    if "failed" in versions:
        verdict = judge.CellVerdict(judge.DOES_NOT_RUN, sentence=judge.in_brief(versions["failed"]))
        seconds = 0.0
    else:
        verdict, seconds = ledger.measure(worker, strategy, mode, directory)
    cell = Cell(
        column.release, strategy, mode.name, **asdict(verdict), torch=versions.get("torch", column.torch or ""),
        python=versions.get("python", ""), seconds=round(seconds, 1), code=code,
        beside=", ".join(f"{name} {versions.get(name, '')}" for name in BESIDE.get(column.library, {})),
    )  # fmt: skip
    if locates and lacks_place(cell, mode):
        cell = replace(cell, where=ledger.locate(worker, strategy, mode, directory))
    return cell


def count_costs(args: argparse.Namespace) -> int:
    """Counts what releases cost, and writes the page. Raises Problem."""
    releases = releases_of(args.releases, "deepspeed")
    strategies = [name for name in chosen(args.strategies, STRATEGIES, "strategy") if name in ZERO_STRATEGIES]
    output = (args.output or REPOSITORY / "outputs" / "ledger").resolve()
    data = prepare_data(output / "data")
    ledger = Ledger(read_plans(output, data), output, args.limit)
    python = environments.base_python(None)
    modes = [mode for mode in MODES if mode.name in costs.MODES_COUNTED]
    wanted = [(strategy, mode) for strategy in strategies for mode in modes]
    found: list[costs.Cost] = []
    torch = ""
    for number, release in enumerate(releases, 1):
        folder = environments.release_folder(release, python, None)
        runs = output / "costs" / release
        worker = Worker(python, [folder], str(data / "tokenizer"), runs / "worker.log")
        torch = worker.versions.get("torch", torch)
        try:
            for strategy, mode in wanted:
                found.append(count_cell(ledger, worker, release, strategy, mode, runs))
        finally:
            worker.end()
        note(f"[{number}/{len(releases)}] DeepSpeed {release}: {len(wanted)} ways of training counted")
    table = tables.PAGES / "costs.md" if args.publish else output / "costs.md"
    costs.write(costs.COUNTED if args.publish else output / "costs.json", table, found, torch)
    if args.publish:
        publish(tables.read(tables.CELLS))
    note(f"the table: {table}")
    return 0


def publish(cells: Sequence[tables.Cell]) -> None:
    """Writes what is made of the cells and counts: the data of answers, what launchers ask, and the pages.

    Raises OSError.
    """
    verdicts.write(cells)
    verdicts.write_schema()
    gate.write([cell for cell in cells if not is_withdrawn(cell)])
    tables.write_pages(tables.PAGES, cells)
    page.write(tables.PAGES / "is_my_release_right.html", verdicts.shorten(cells))


def count_cell(ledger: Ledger, worker: Worker, release: str, strategy: str, mode: Mode, runs: Path) -> costs.Cost:
    if "failed" in worker.versions:
        return costs.Cost(release, strategy, mode.name, {}, worker.versions["failed"])
    directory = runs / strategy / mode.name
    counted = directory / "counts.json"
    counted.unlink(missing_ok=True)
    answer = ledger.train(worker, strategy, mode, directory, counts=counted)
    if not has_ended_well(answer):
        return costs.Cost(release, strategy, mode.name, {}, judge.why(logs(directory)).partition(". ")[0])
    return costs.Cost(release, strategy, mode.name, json.loads(counted.read_text()))


def run(args: argparse.Namespace) -> int:
    """Raises Problem."""
    raise_on_signals()
    if args.costs:
        return count_costs(args)
    wanted = columns(args)
    # That there is no uv is said before the first cell, not at each release.
    if not all(column.is_installed for column in wanted):
        environments.uv_command()
    output = (args.output or REPOSITORY / "outputs" / "ledger").resolve()
    data = prepare_data(output / "data")
    ledger = Ledger(read_plans(output, data), output, args.limit)
    progress = CellProgress(sum(len(column.cells) for column in wanted))
    known = read_cells(output / "cells.jsonl")
    failed: set[str] = set()
    while wanted:
        for column in wanted:
            try:
                measure_column(ledger, column, data / "tokenizer", progress, known, locates=args.locate)
            except Problem as problem:
                note(f"error: {column.name} was not measured: {problem.found}")
                note(f"       {problem.remedy}")
                failed.add(column.name)
        wanted = []
        if args.bisect:
            more = boundaries(known, tables.read(tables.CELLS) if args.publish else [])
            wanted = [column for column in more if column.name not in failed]
            progress.total += sum(len(column.cells) for column in wanted)
    cells = [asdict(cell) for cell in known if is_current(cell)]
    if args.publish:
        cells = tables.merged(tables.read(tables.CELLS), cells)
        tables.write_cells(tables.CELLS, cells)
        publish(cells)
    else:
        tables.write_cells(output / "cells.json", cells)
        tables.write_pages(output, cells)
    note(f"the table: {(tables.PAGES if args.publish else output) / 'ledger.md'}")
    print(tables.summary(cells))
    print(seconds_table(output / SECONDS))
    return 1 if failed else 0


def boundaries(known: Sequence[Cell], kept: Sequence[tables.Cell]) -> list[EnvironmentColumn]:
    """What to try next, so that each change of a verdict lies between neighbouring releases. With the running torch."""
    torch = metadata.version("torch")
    measured = {(cell.release, cell.strategy, cell.mode): cell for cell in known if cell.torch == torch}
    for cell in kept:
        if cell["torch"] == torch:
            measured.setdefault((cell["release"], cell["strategy"], cell["mode"]), Cell(**cell))
    mode_of = {mode.name: mode for mode in MODES}
    made = []
    for library in RELEASES_OF:
        own = [cell for cell in measured.values() if cell.release and library_of(cell.strategy) == library]
        for release, ways in next_releases(own, library).items():
            cells = [(strategy, mode_of[mode]) for strategy, mode in ways]
            made.append(EnvironmentColumn(None, release, cells, library))
    return made
