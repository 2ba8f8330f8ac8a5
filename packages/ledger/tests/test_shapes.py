"""The small models and loops in which releases of DeepSpeed are tried: are they themselves trained correctly?"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ledger_runs import PYTHONPATH, run_ledger

from t5bench.plan.ports import free_port
from t5bench_ledger.changes import CHANGES
from t5bench_ledger.judge import RIGHT, WRONG
from t5bench_ledger.modes import MODES, OVERFLOWING

SHAPES = [mode.shape for mode in MODES if mode.shape and set(mode.strategies) <= set(OVERFLOWING)]
DATA_PARALLEL = """
import json, sys
import torch
from torch import distributed as dist
from t5bench_ledger import shapes

dist.init_process_group("gloo")
torch.set_num_threads(1)
found = {}
for name, shape in shapes.SHAPES.items():
    own = shapes.plain(shape, torch.float32, [dist.get_rank()], dist.get_world_size())
    whole = shapes.plain(shape, torch.float32, range(dist.get_world_size()), dist.get_world_size())
    found[name] = [own, whole]
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def test_every_shape_is_a_mode_that_no_launcher_meets():
    from t5bench_ledger import shapes

    assert list(shapes.SHAPES) == SHAPES
    assert not any(mode.is_of_launchers for mode in MODES if mode.shape)
    named = {shape for change in CHANGES for shape in change.shapes}
    assert named <= {mode.shape for mode in MODES}


@pytest.mark.slow
def test_two_processes_train_every_shape_as_one_does():
    """Without DeepSpeed: the reference and the shapes themselves are right."""
    environment = os.environ | {
        "PYTHONPATH": PYTHONPATH,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DATA_PARALLEL],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    found = json.loads(printed[0].splitlines()[-1])
    assert list(found) == SHAPES
    for name, (own, whole) in found.items():
        assert own[0] == pytest.approx(whole[0], rel=5e-6), name
        assert own[1] == pytest.approx(whole[1], rel=5e-6), name
        assert len(set(whole[0])) == len(whole[0]) and min(whole[1]) > 0.01, f"{name}: its weights do not move"


@pytest.mark.nightly
def test_a_mistake_in_a_release_is_seen_in_a_shape(tmp_path: Path):
    """A loss of 1 % too little in a copy of the installed release."""
    (installed,) = find_spec("deepspeed").submodule_search_locations
    shutil.copytree(installed, tmp_path / "changed" / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    engine = tmp_path / "changed" / "deepspeed" / "runtime" / "engine.py"
    text = engine.read_text()
    right = "loss / self.gradient_accumulation_steps() if scale_wrt_gas"
    assert text.count(right) == 1
    engine.write_text(text.replace(right, right.replace("()", "() / 1.01")))
    (tmp_path / "nothing").mkdir()
    # Not the shapes that clip: their gradients have the same size whatever the loss is multiplied by.
    few = ("--strategies", "zero2,zero3", "--modes", "frozen,several backward passes", "--releases", "0.0.1")
    verdicts = {}
    for name, folder in (("honest", "nothing"), ("changed", "changed")):
        result = run_ledger(tmp_path / name, tmp_path / folder, *few, first_folder=tmp_path / folder)
        assert result.returncode == 0, result.stderr
        verdicts[name] = {cell["verdict"] for cell in json.loads((tmp_path / name / "cells.json").read_text())["cells"]}
    assert verdicts == {"honest": {RIGHT}, "changed": {WRONG}}
