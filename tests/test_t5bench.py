"""Reading runs: the parser on whole and damaged lines, and the comparison's verdicts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5bench.__main__ import main
from t5bench.log import iterations, peak_memory
from t5bench.summary import largest_loss_difference, read_run

# As the patched engine printed it on a CPU.
LINE = (
    " iteration       10/      20 | consumed samples:          160 | consumed tokens:        30720 |"
    " elapsed time per iteration (ms): 419.3 | learning rate: 5.000E-05 | global batch size:    16 |"
    " lm loss: 8.265567E+00 | loss scale: 1.0 | grad norm: 1.774590E+00 | actual seqlen:   128 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 38.161 |"
    " tokens per gpu per second (tgs): 3663.451 | TFLOPs: 0.00 |"
)
MEMORY = (
    " peak memory | rank 1 | host vm | device cpu | allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB 562.4",
    " peak memory | rank 0 | host vm | device cuda:0 | allocated MiB 123.4 | reserved MiB 150.0 | host rss MiB 488.1",
)
COMMAND = (
    "env A=1 torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 pretrain_t5.py "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size {pp} --lr 1\n"
)


def test_iteration_line():
    (line,) = iterations(["noise", LINE, "more noise"])
    assert (line.iteration, line.total) == (10, 20)
    assert line.elapsed_ms == 419.3
    assert line.lm_loss == 8.265567
    assert line.learning_rate == 5e-5
    assert line.samples_per_second == 38.161
    assert line.grad_norm == 1.77459


def test_the_seed_readmes_line_without_grad_norm():
    text = (
        " iteration 20/ 1000 | consumed samples: 320 | elapsed time per iteration (ms): 1234.5 |"
        " learning rate: 9.800E-05 | global batch size: 16 | lm loss: 3.456789E+00 |"
        " samples per second: 12.345 | TFLOPs: 56.78 |"
    )
    (line,) = iterations([text])
    assert line.tflops == 56.78
    assert line.grad_norm is None


@pytest.mark.parametrize("text", ["NAN", "nan"])
def test_nan_is_read_as_nan(text: str):
    (line,) = iterations([LINE.replace("8.265567E+00", text)])
    assert line.lm_loss != line.lm_loss


def test_a_run_that_diverged_is_not_equal_to_ddp(tmp_path: Path, capsys: pytest.CaptureFixture):
    ddp = make_run(tmp_path / "ddp", [8.0, 7.0])
    diverged = make_run(tmp_path / "zero2", [8.0, float("nan")])
    assert summary(ddp, diverged) == 1
    assert "NO (nan)" in capsys.readouterr().out


@given(st.integers(min_value=0, max_value=len(LINE) - 1))
def test_a_line_cut_off_is_left_out_or_whole(length: int):
    for line in iterations([LINE[:length]]):
        assert line.tflops == 0.0
        assert line.elapsed_ms == 419.3


@given(st.text())
def test_any_text_is_survived(text: str):
    list(iterations(text.splitlines()))
    peak_memory(text.splitlines())


def test_peak_memory_by_rank():
    first, second = peak_memory(MEMORY)
    assert (first.rank, first.device_mib, first.host_mib) == (0, 123.4, 488.1)
    assert (second.rank, second.device_mib, second.host_mib) == (1, None, 562.4)


def test_peak_memory_of_ranks_that_print_into_one_line():
    glued = ["".join(MEMORY), "", MEMORY[0].replace("rank 1", "rank 2") + "12:30 INFO something"]
    assert [(peak.rank, peak.host_mib) for peak in peak_memory(glued)] == [(0, 488.1), (1, 562.4), (2, 562.4)]


def make_run(directory: Path, losses: list[float], status: str = "complete 20 iterations", pp: int = 1) -> Path:
    directory.mkdir(parents=True)
    lines = [
        LINE.replace("      10/", f"{number:8d}/").replace("8.265567E+00", f"{loss:.6E}")
        for number, loss in enumerate(losses, 1)
    ]
    (directory / "node0.log").write_text("starting\n")
    (directory / "node1.log").write_text("\n".join([*lines, *MEMORY]) + "\n")
    (directory / "node0.status").write_text(status + "\n")
    (directory / "node0.command.sh").write_text(COMMAND.format(pp=pp))
    return directory


def test_summary_compares_with_ddp(tmp_path: Path, capsys: pytest.CaptureFixture):
    ddp = make_run(tmp_path / "ddp", [8.0, 7.0])
    pipeline = make_run(tmp_path / "pipeline", [8.0, 7.00001], pp=2)
    assert summary(ddp, pipeline) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split()[:5] == ["ddp", "2", "1/1/2", "7.000000", "baseline"]
    assert rows[3].split()[:6] == ["pipeline", "2", "1/2/1", "7.000010", "yes", "(1e-06)"]


def test_summary_fails_for_another_model_a_failure_or_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture):
    ddp = make_run(tmp_path / "ddp", [8.0, 7.0])
    other = make_run(tmp_path / "zero2", [8.0, 7.1])
    failed = make_run(tmp_path / "zero3", [8.0, 7.0], status="failed 1")
    empty = make_run(tmp_path / "hybrid", [])
    assert summary(ddp, other) == 1
    assert "NO (1e-02)" in capsys.readouterr().out
    assert summary(ddp, failed) == 1
    assert "failed" in capsys.readouterr().out
    assert summary(ddp, empty) == 1
    assert summary(other) == 1


def test_summary_names_a_directory_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert summary(tmp_path / "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err


def test_loss_difference_is_over_shared_iterations(tmp_path: Path):
    long = read_run(make_run(tmp_path / "long", [8.0, 7.0, 6.0]))
    short = read_run(make_run(tmp_path / "short", [8.0, 7.7]))
    assert largest_loss_difference(short, long) == pytest.approx(0.1)
    assert largest_loss_difference(short, read_run(make_run(tmp_path / "none", []))) is None


def summary(*runs: Path) -> int:
    return main(["summary", *map(str, runs)])
