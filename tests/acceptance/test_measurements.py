"""Measurements other than the engines': the device, and the plain loop over Hugging Face's T5."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from made_runs import made_plan
from torch.utils.flop_counter import FlopCounterMode

from t5bench.acceptance import device
from t5bench.model import flops

SIZES = {"DROPOUT": "0.1", "GLOBAL_BATCH_SIZE": "4", "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "6"}
PLAN = made_plan(settings=SIZES | {"VOCABULARY_MULTIPLE": "4352"})


@pytest.fixture(scope="module")
def baseline() -> ModuleType:
    """Imported late: transformers' T5 takes seconds, and every test process imports every module."""
    return importlib.import_module("t5bench.acceptance.baseline")


def test_the_device_is_measured():
    assert all(0 < rate < 1e5 for rate in device.rates("cpu").values())


def test_the_plain_loops_matrix_products_are_those_that_are_counted(baseline: ModuleType):
    torch.backends.cuda.enable_cudnn_sdp(True)
    loop = baseline.Loop(PLAN)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it would fail on Hopper with PyTorch 2.11
    with FlopCounterMode(display=False) as counter:
        loop.iterate()
    assert counter.get_total_flops() == pytest.approx(flops.flops_per_iteration(loop.shape, 4), rel=0.02)


def test_full_memory_is_a_result_and_a_failure_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baseline: ModuleType
):
    def measure(*_: object) -> dict:
        raise errors.pop(0)

    monkeypatch.setattr(baseline.Loop, "measure", measure)
    monkeypatch.setattr(baseline, "ask", lambda strategy: PLAN)
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")
    errors = [full, full, full, RuntimeError("the compiler failed")]
    output = tmp_path / "points.jsonl"
    assert baseline.main(output) == 0
    assert [json.loads(line)["status"] for line in output.read_text().splitlines()] == ["out-of-memory"] * 2
    assert baseline.main(output) == 1
    eager, compiled = map(json.loads, output.read_text().splitlines())
    assert eager["reason"].endswith("Tried to allocate 2.00 GiB")
    assert (compiled["status"], compiled["reason"]) == ("crashed", "RuntimeError: the compiler failed")
