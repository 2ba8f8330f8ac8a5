"""Reading the engines' lines: whole and damaged ones."""

import math

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
# As four ranks with unbuffered output left it.
BESIDE = "[Rank 3] (after 1 iterations) memory (MB) | allocated: 447.2 | max allocated: 447.2 | reserved: 447.2 |"
MEMORY = (
    " peak memory | rank 1 | host vm | device cpu | allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB 562.4",
    " peak memory | rank 0 | host vm | device cuda:0 | allocated MiB 123.4 | reserved MiB 150.0 | host rss MiB 488.1",
)


@pytest.mark.parametrize("text", [LINE, BESIDE + LINE + BESIDE])
def test_iteration_line(text: str):
    (line,) = iterations(["noise", text, "more noise"])
    assert (line.iteration, line.total, line.elapsed_ms, line.lm_loss) == (10, 20, 419.3, 8.265567)
    assert (line.learning_rate, line.samples_per_second, line.grad_norm) == (5e-5, 38.161, 1.77459)


def test_the_line_of_an_engine_that_logs_no_grad_norm():
    (line,) = iterations([LINE.replace(" grad norm: 1.774590E+00 |", "").replace("TFLOPs: 0.00", "TFLOPs: 56.78")])
    assert (line.tflops, line.grad_norm) == (56.78, None)


@pytest.mark.parametrize("text", ["NAN", "nan"])
def test_nan_is_read_as_nan(text: str):
    (line,) = iterations([LINE.replace("8.265567E+00", text)])
    assert line.lm_loss is not None and math.isnan(line.lm_loss)


@given(st.integers(min_value=0, max_value=len(LINE) - 1))
def test_a_truncated_line_is_left_out_or_complete(length: int):
    for line in iterations([LINE[:length]]):
        assert (line.tflops, line.elapsed_ms) == (0.0, 419.3)


@given(st.text())
def test_no_text_breaks_the_reader(text: str):
    list(iterations(text.splitlines()))
    peak_memory(text.splitlines())


def test_peak_memory_by_rank_even_in_mixed_lines():
    found = peak_memory(["".join(MEMORY), "", MEMORY[0].replace("rank 1", "rank 2") + "12:30 INFO something"])
    assert [(peak.rank, peak.device_mib, peak.host_mib) for peak in found] == [
        (0, 123.4, 488.1), (1, None, 562.4), (2, None, 562.4),
    ]  # fmt: skip
