"""Reading the engines' lines, whole, mixed and damaged, and records that real runs of both engines left: tiny T5, two
CPU processes, an evaluation every 4 iterations and a checkpoint every 6."""

import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import REPO_ROOT

from t5bench.record.log import iterations, peak_memory
from t5bench.record.records import load
from t5bench.record.status import CauseFinder

STORED = REPO_ROOT / "tests" / "data" / "runs"
RUNS = ["megatron-tensor", "native-zero2"]
# As the patched engine printed it on a CPU, and what four ranks with unbuffered output left beside it.
LINE = (
    " iteration       10/      20 | consumed samples:          160 | consumed tokens:        30720 |"
    " elapsed time per iteration (ms): 419.3 | learning rate: 5.000E-05 | global batch size:    16 |"
    " lm loss: 8.265567E+00 | loss scale: 1.0 | grad norm: 1.774590E+00 | actual seqlen:   128 |"
    " number of skipped iterations:   2 | number of nan iterations:   1 | samples per second: 38.161 |"
    " tokens per gpu per second (tgs): 3663.451 | TFLOPs: 0.00 |"
)
BESIDE = "[Rank 3] (after 1 iterations) memory (MB) | allocated: 447.2 | max allocated: 447.2 | reserved: 447.2 |"
MEMORY = (
    " peak memory | rank 1 | host vm | device cpu | allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB 562.4",
    " peak memory | rank 0 | host vm | device cuda:0 | allocated MiB 123.4 | reserved MiB 150.0 | host rss MiB 488.1",
)


def log_lines(name: str) -> list[str]:
    return (STORED / name / "node0.log").read_text().splitlines()


def test_iteration_line():
    (line,) = iterations(["noise", BESIDE + LINE + BESIDE, "more noise"])
    assert (line.iteration, line.total, line.elapsed_ms, line.lm_loss) == (10, 20, 419.3, 8.265567)
    assert (line.learning_rate, line.samples_per_second, line.grad_norm) == (5e-5, 38.161, 1.77459)
    assert (line.loss_scale, line.skipped, line.nan, line.tflops) == (1.0, 2, 1, 0.0)

    # Without a norm or a finite loss; pieces of two lines are none.
    (line,) = iterations([LINE.replace("8.265567E+00", "NAN").replace(" grad norm: 1.774590E+00 |", "")])
    assert line.lm_loss is not None and math.isnan(line.lm_loss) and line.grad_norm is None
    assert not list(iterations(LINE.replace("419.3", text) for text in ("419.3.1", "419.3 | learning rate: 9.0")))


def test_a_long_field_is_read_at_once():
    began = time.process_time()
    assert list(iterations([LINE.replace(" actual", "x" * 40_000 + "| actual")]))
    assert time.process_time() - began < 1  # not ten seconds, or an hour for a megabyte


@given(st.text())
def test_no_text_breaks_the_readers(text: str):
    list(iterations(text.splitlines()))
    peak_memory(text.splitlines())
    CauseFinder().read(text, 0.0)


def test_peak_memory_by_rank_even_in_mixed_lines():
    found = peak_memory(["".join(MEMORY), "", MEMORY[0].replace("rank 1", "rank 2") + "12:30 INFO something"])
    assert [(peak.rank, peak.device_mib, peak.host_mib) for peak in found] == [
        (0, 123.4, 488.1), (1, None, 562.4), (2, None, 562.4),
    ]  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run(name: str):
    run = load(STORED / name)
    assert (run.status, f"{run.engine}-{run.strategy}") == ("complete", name)
    assert [line.iteration for line in run.iterations] == [2, 4, 6, 8, 10, 12]
    assert all(8.0 < (line.lm_loss or 0) < 8.6 for line in run.iterations)
    assert (run.padded_vocab_size, run.plan.number("EVAL_INTERVAL")) == (4224, 4)
    assert [peak.rank for peak in run.peak_memory] == [0, 1]
    # It was made before there were checksums, so its log was held against its metrics.
    assert ["no checksums" in remark for remark in run.remarks] == [True]


@given(st.integers(0, 2**32), st.sampled_from(RUNS))
def test_truncated_or_mixed_lines_give_correct_values_or_none(seed: int, name: str):
    """What two writers leave that share a terminal: pieces of lines, in any mixture."""
    rng = random.Random(seed)
    lines = [line for line in log_lines(name) if "iteration" in line]
    damaged: list[str] = []
    for line in lines:
        cut = rng.randrange(len(line) + 1)
        other = rng.choice(lines)
        mixtures = [[line], [line[:cut]], [line[:cut], line[cut:]], [], [line[:cut] + other]]
        damaged += rng.choice([*mixtures, [line[:cut] + other + line[cut:]]])
    values = [{(i.iteration, i.elapsed_ms, i.lm_loss, i.tflops) for i in iterations(text)} for text in (damaged, lines)]
    assert values[0] <= values[1]
