"""What the engines are measured against: the device's ceilings, an iteration's floor, Hugging Face's T5."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from harness import REPO_ROOT
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(REPO_ROOT / "scripts"))

from t5bench.acceptance import baseline, bound, floor, launchers
from t5bench.model import flops

TINY = flops.Shape(2, 2, 64, 4, 16, 128, 128, 64, 4352)


def test_an_iterations_bytes_by_hand():
    shape = flops.Shape(1, 1, 4, 2, 2, 8, 3, 2, 10)  # hidden 4, attention 4 wide, FFN 8, lengths 3 and 2
    # Encoder: 3 tokens x (q, k, v and output 4 x 4, FFN 8, residuals 2 x 4); decoder: 2 x (6 x 4 + 8 + 3 x 4); cross
    # keys and values 3 x 2 x 4; two bytes, written and read.
    assert bound.activation_bytes(shape) == 4 * (3 * 32 + 2 * 44 + 3 * 8)
    # 8 samples in micro-batches of 4: 28 AdamW + 2 copy + 4 norm + 2 x 4 weights + (2 x 8 - 4) gradients.
    assert bound.least_bytes(shape, 8, 4) == 54 * flops.parameters(shape) + 8 * bound.activation_bytes(shape)


def test_an_iterations_floor_by_hand():
    rates = {"matmul_tflops": 800.0, "copy_gb_per_s": 4000.0}
    products, traffic = bound.iteration_ms(TINY, 16, 8, rates)
    assert products == pytest.approx(flops.flops_per_iteration(TINY, 16) / 800e12 * 1000)
    assert traffic == pytest.approx(bound.least_bytes(TINY, 16, 8) / 4e12 * 1000)


def test_the_device_is_measured():
    measured = floor.measure(torch.device("cpu"))
    assert measured.device == "cpu"
    rates = [measured.matmul_tflops, *(shape["tflops"] for shape in measured.matmul_shapes)]
    assert len(rates) == 4 and all(0 < rate < 1000 for rate in rates)
    assert 0 < measured.copy_gb_per_s < 100_000
    assert measured.host_to_device_gb_per_s is None


def test_the_baseline_has_the_launchers_dimensions():
    settings = launchers.settings("ddp", "large")
    large = flops.Shape.of_settings(lambda name: int(settings[name]), 32128)
    assert large == flops.Shape(24, 24, 1024, 16, 64, 2816, 512, 128, 32128)


def test_the_baselines_matrix_products_are_those_that_are_counted():
    loop = baseline.Loop(TINY, launchers.settings("ddp", "tiny"), torch.device("cpu"), 2)
    with FlopCounterMode(display=False) as counter:
        loop.iterate(loop.samples(2))
    assert counter.get_total_flops() == pytest.approx(flops.flops_per_iteration(TINY, 2), rel=0.02)


def run_baseline(monkeypatch: pytest.MonkeyPatch, output: Path, sizes: str, **chosen: object) -> int:
    arguments = {
        "preset": "tiny", "device": "cpu", "micro_batch_sizes": sizes, "global_batch_size": 4, "vocabulary": 4352,
        "compile": "", "backend": "aot_eager", "seconds": 300.0, "output": output,
    }  # fmt: skip
    monkeypatch.setattr(baseline, "parse", lambda: Namespace(**(arguments | chosen)))
    return baseline.main()


def points(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow
def test_points_of_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "points.jsonl"
    assert run_baseline(monkeypatch, output, "2,4") == 0
    small, large = points(output)
    assert (small["micro_batch"], large["micro_batch"]) == (2, 4)
    for point in (small, large):
        milliseconds = point["milliseconds"]["median"]
        assert point["status"] == "complete"
        assert point["samples_per_second"] == pytest.approx(4000 / milliseconds)
        assert point["tflops"] == pytest.approx(flops.flops_per_iteration(TINY, 4) / milliseconds / 1e9)
        assert point["attention"] in ("eager", "sdpa")
        assert point["peak_allocated_mib"] is None
        assert 7 < point["final_loss"] < 9.5  # ln 4352 is 8.4
    # Half the micro-batch size: twice the matrix products, on the same tokens.
    products = [{e["name"]: e["count"] for e in point["profile"]["by_name"]}["aten::mm"] for point in (small, large)]
    assert products[0] == 2 * products[1]


def test_memory_that_runs_out_is_a_result_and_a_failure_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def measure(loop: baseline.Loop, micro_batch: int) -> dict:
        if micro_batch == 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")
        if micro_batch == 2:
            raise RuntimeError("the compiler failed")
        return {"samples_per_second": 1.0}

    monkeypatch.setattr(baseline.Loop, "measure", measure)
    output = tmp_path / "points.jsonl"
    assert run_baseline(monkeypatch, output, "1,4") == 0
    assert [point["status"] for point in points(output)] == ["complete", "out-of-memory"]
    assert points(output)[1]["reason"].endswith("Tried to allocate 2.00 GiB")
    # Those are there already: only the new one is tried.
    assert run_baseline(monkeypatch, output, "1,2,4") == 1
    assert [point["status"] for point in points(output)] == ["complete", "out-of-memory", "crashed"]


def test_no_point_begins_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "points.jsonl"
    assert run_baseline(monkeypatch, output, "1", seconds=-1.0) == 3
    assert not output.exists()


def test_sizes_that_do_not_divide_the_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_baseline(monkeypatch, tmp_path / "points.jsonl", "3") == 2
    assert "no multiple" in capsys.readouterr().err
