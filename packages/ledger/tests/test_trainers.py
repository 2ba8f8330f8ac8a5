"""transformers' Trainer and accelerate's loop in the ledger: is a trainer whose accumulation is wrong found?"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_runs import PYTHONPATH, run_ledger

from t5bench.__main__ import main
from t5bench.plan.ports import free_port
from t5bench_ledger import environments, judge, tables, trainers
from t5bench_ledger.judge import RIGHT, WRONG
from t5bench_ledger.measure import TRAINERS_PROGRAM, logs, printed_curves
from t5bench_ledger.modes import ACCELERATE, BESIDE, MODES, RELEASES_OF, TRAINER, TRAINERS, library_of
from t5bench_ledger.spans import published

# What trainers.py asks of accelerate, in a few lines over DDP: the test needs no release.
STAND_IN = """
from contextlib import contextmanager, nullcontext
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

__version__ = "0"

def DataLoaderConfiguration():
    return None

class Accelerator:
    def __init__(self, *, cpu, gradient_accumulation_steps, mixed_precision, dataloader_config):
        dist.init_process_group("gloo")
        self.steps = gradient_accumulation_steps
        self.number = 0
        self.sync_gradients = True

    def prepare(self, model, optimizer, loader):
        own = loader.dataset[dist.get_rank() :: dist.get_world_size()]
        self.stepped = optimizer
        return DistributedDataParallel(model), self, DataLoader(own, batch_size=loader.batch_size)

    def step(self):
        if self.sync_gradients:
            self.stepped.step()

    def zero_grad(self):
        if self.sync_gradients:
            self.stepped.zero_grad()

    @contextmanager
    def accumulate(self, model):
        self.number += 1
        self.sync_gradients = self.number % self.steps == 0
        with nullcontext() if self.sync_gradients else model.no_sync():
            yield

    def no_sync(self, model):
        return model.no_sync()

    def backward(self, loss):
        (loss / self.steps).backward()

    def gather(self, value):
        gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, value)
        return torch.stack(gathered)

    def clip_grad_norm_(self, parameters, norm):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)
"""
# Each is trained in a case and differs in what, from which step on.
FAULTS = {
    "none": ("", "", "equal targets", None, ""),
    "none, with the guide's loop": ("", "", "unequal targets", None, ""),
    "sums micro-batches": ("(loss / self.steps)", "loss", "equal targets", 1, "gradient norm"),
    "forgets the other process": ("torch.stack(gathered)", "2 * value[None]", "unequal targets", 1, "gradient norm"),
    "synchronises too little": (
        "if self.sync_gradients else model",
        "if False else model",
        "equal targets",
        1,
        "gradient norm",
    ),
    "does not clip": ("(parameters, norm)\n", "(parameters, 1e9)\n", "equal targets", 2, "gradient norm"),
}
# Like the ledger's worker: torch is imported once, and two processes are forked for each training.
TRAIN_ALL = """
import json, sys
import torch
from t5bench_ledger import worker

torch.set_num_threads(1)
for cell in json.load(sys.stdin):
    sys.path.insert(0, cell["directory"])
    print(json.dumps(worker.run_cell(cell)))
    sys.path.pop(0)
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, judge.CellVerdict]:
    """What the ledger says of the loop with each fault, on two processes."""
    folders = {}
    cells = []
    for name, (right, wrong, case, *_) in FAULTS.items():
        folder = tmp_path_factory.mktemp("release")
        (folder / "accelerate").mkdir()
        assert STAND_IN.count(right) == 1 or not right
        (folder / "accelerate" / "__init__.py").write_text(STAND_IN.replace(right, wrong) if right else STAND_IN)
        folders[name] = folder
        common = {
            "program": str(TRAINERS_PROGRAM),
            "processes": 2,
            "poisons_memory": False,
            "limit": 100,
            "patience": 5,
        }
        cells.append(common | {"directory": str(folder), "words": ["--case", case], "port": str(free_port())})
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN_ALL]
    subprocess.run(command, input=json.dumps(cells), env=environment, text=True, check=True, timeout=300)
    found = {}
    for name, folder in folders.items():
        measured, reference, _ = printed_curves(folder)
        assert len(measured.norm) == trainers.ITERATIONS, logs(folder)
        found[name] = judge.judge(measured, reference, "fp32")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_trainer_with_a_planted_fault_is_found_and_a_right_one_is_not_accused(verdicts, fault):
    *_, iteration, quantity = FAULTS[fault]
    found = verdicts[fault]
    expected = (WRONG, iteration, quantity) if iteration else (RIGHT, None, "")
    assert (found.verdict, found.iteration, found.quantity) == expected
    if found.verdict == RIGHT:
        assert found.times is not None and found.times < 0.5, "near the bound"


def test_every_case_is_a_mode_that_no_launcher_meets():
    modes = [mode for mode in MODES if set(mode.strategies) & set(TRAINERS)]
    assert sorted(mode.shape for mode in modes) == sorted(trainers.CASES)
    for mode in modes:
        assert set(mode.strategies) <= set(TRAINERS) and not mode.is_of_launchers
        assert mode.micro_batches == trainers.CASES[mode.shape].micro_batches


def test_the_page_has_every_release_of_the_trainers():
    cells = tables.read(tables.CELLS)
    for library, strategy in (("transformers", TRAINER), ("accelerate", ACCELERATE)):
        own = [cell for cell in cells if cell["strategy"] == strategy]
        assert {cell["release"] for cell in own} >= set(RELEASES_OF[library])
        beside = ", ".join(f"{name} {release}" for name, release in BESIDE[library].items())
        assert {cell["beside"] for cell in own} == {beside}


@pytest.mark.parametrize("strategy", [TRAINER, ACCELERATE])
def test_every_published_release_was_tried_so_each_change_lies_between_neighbours(strategy):
    """What was tried and is not spoken of counts as not tried."""
    library = library_of(strategy)
    spoken_of = tables.standing(tables.read(tables.CELLS))
    (section,) = tables.of_trainers([cell for cell in spoken_of if cell["strategy"] == strategy])
    for _, mode, row in tables.matrix(section.cells):
        assert [cell["release"] for cell in row if cell] == list(published()[library]), mode.name
    for fault in tables.release_faults(section):
        assert "not tried" not in " ".join(tables.fault_words(fault, tables.releases_of(section.cells))), fault


def test_what_the_ledger_says_of_a_trainers_release(capsys):
    assert main(["ledger", "--answer", "transformers==4.45.2"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("transformers 4.45.2: Trainer over DDP trains another model with unequal numbers of target")
    assert "(unequal targets): gradient norm off by" in said and "transformers#34191" in said
    main(["ledger", "--answer", "transformers==5.24.0"])
    said = capsys.readouterr().out
    assert (
        "gradient norm 8 times as large" in said
        and "with T5, with BART and with a classifier" in said
        and "transformers#47688" in said
    )
    assert main(["ledger", "--answer", "accelerate==99.0"]) == 3
    assert "python -m t5bench ledger --releases accelerate==99.0" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_planted_mistake_in_real_releases_is_found(tmp_path):
    """A loss of 1 % too little in a copy of the newest accelerate, under the newest Trainer and in its own loop."""
    python = Path(sys.executable)
    real = {
        library: environments.release_folder(RELEASES_OF[library][-1], python, None, library)
        for library in ("transformers", "accelerate")
    }
    changed = tmp_path / "changed"
    shutil.copytree(real["accelerate"], changed, ignore=shutil.ignore_patterns("__pycache__"))
    code = changed / "accelerate" / "accelerator.py"
    right = "loss = loss / self.gradient_accumulation_steps"
    assert code.read_text().count(right) == 1
    code.write_text(code.read_text().replace(right, f"{right} / 1.01"))
    few = ("--strategies", "trainer,accelerate", "--modes", "equal targets,unequal targets,continued")
    names = ",".join(f"{library}=={RELEASES_OF[library][-1]}" for library in real)
    for name, folder, verdict in (("honest", real["accelerate"], RIGHT), ("changed", changed, WRONG)):
        # In place of the folder of each release; transformers' own stands behind it.
        result = run_ledger(tmp_path / name, real["transformers"], *few, "--releases", names, first_folder=folder)
        assert result.returncode == 0, result.stderr
        cells = json.loads((tmp_path / name / "cells.json").read_text())["cells"]
        assert len(cells) == 6
        assert {cell["verdict"] for cell in cells} == {verdict}, cells


@pytest.mark.nightly
def test_the_newest_and_the_oldest_release_get_the_verdicts_of_the_page(tmp_path):
    names = [f"{library}=={RELEASES_OF[library][end]}" for library in ("transformers", "accelerate") for end in (0, -1)]
    output = tmp_path / "output"
    words = ["--strategies", ",".join(TRAINERS), "--releases", ",".join(names), "--output", str(output)]
    assert main(["ledger", *words]) == 0
    committed = tables.read(tables.CELLS)
    on_page = {(cell["release"], cell["strategy"], cell["mode"]): cell for cell in committed}
    measured = json.loads((output / "cells.json").read_text())["cells"]
    assert measured
    for cell in measured:
        expected = on_page[cell["release"], cell["strategy"], cell["mode"]]
        assert cell["verdict"] == expected["verdict"], cell
