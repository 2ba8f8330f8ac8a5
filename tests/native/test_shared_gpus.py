"""Stages that share a GPU exchange through host memory; here real processes do so on CPUs, with real copies."""

from collections.abc import Callable
from pathlib import Path

import pytest
from native_runs import LAYOUTS, Trained, command_line, torchrun

from t5bench.record.log import iterations


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "precision"), [("pipeline", ""), ("hybrid", "--bf16")])
def test_the_way_through_host_memory_changes_no_digit(
    train: Callable[..., Trained], native_data: Path, tmp_path: Path, layout: str, precision: str
):
    flags = ["--eval-interval", "2", "--eval-iters", "1"]
    direct = train(layout, *flags, iterations=4, precision=precision)
    script = Path(__file__).with_name("pretrain_through_host.py")
    line = [*command_line(layout, native_data, tmp_path, 4, precision), *flags]
    staged = torchrun(LAYOUTS[layout][0], script, line)
    assert staged.returncode == 0, staged.stdout[-3000:] + staged.stderr[-6000:]
    assert staged.stdout.count("copied through host memory") == LAYOUTS[layout][0]

    def figures(output: str) -> list[object]:
        lines = [(line.iteration, line.lm_loss, line.grad_norm) for line in iterations(output.splitlines())]
        return lines + [line for line in output.splitlines() if "validation loss" in line]

    assert len(figures(direct.output)) == 6
    assert figures(staged.stdout) == figures(direct.output)
