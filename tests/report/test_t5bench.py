"""Reading the engines' lines: whole and damaged ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5bench.record.log import iterations, peak_memory

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


def test_another_ranks_output_before_the_lines_end():
    """As four ranks with unbuffered output left it."""
    memory = "[Rank {}] (after 1 iterations) memory (MB) | allocated: 447.2 | max allocated: 447.2 | reserved: 447.2 |"
    (line,) = iterations([memory.format(3) + LINE + memory.format(2) + memory.format(0)])
    assert (line.iteration, line.lm_loss, line.grad_norm) == (10, 8.265567, 1.77459)


@pytest.mark.parametrize("text", ["NAN", "nan"])
def test_nan_is_read_as_nan(text: str):
    (line,) = iterations([LINE.replace("8.265567E+00", text)])
    assert line.lm_loss != line.lm_loss


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
