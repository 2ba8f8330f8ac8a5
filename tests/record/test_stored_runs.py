"""Records that real runs of both engines left (tiny T5, two CPU processes, an evaluation every 4 iterations and a
checkpoint every 6), read as any record is; and their logs cut, mixed and damaged."""

import pytest
from harness import REPO_ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from t5bench.record.log import iterations
from t5bench.record.records import load
from t5bench.record.status import CauseFinder

STORED = REPO_ROOT / "tests" / "data" / "runs"
RUNS = ["megatron-tensor", "native-zero2"]


def log_lines(name: str) -> list[str]:
    return (STORED / name / "node0.log").read_text().splitlines()


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run(name: str):
    run = load(STORED / name)
    assert (run.status, f"{run.engine}-{run.strategy}") == ("complete", name)
    assert [line.iteration for line in run.iterations] == [2, 4, 6, 8, 10, 12]
    assert all(8.0 < (line.lm_loss or 0) < 8.6 for line in run.iterations)
    assert run.padded_vocab_size == 4224
    assert [peak.rank for peak in run.peak_memory] == [0, 1]
    assert run.plan.number("EVAL_INTERVAL") == 4
    # It was made before there were checksums, so its log was held against its metrics.
    assert ["no checksums" in remark for remark in run.remarks] == [True]


@pytest.mark.parametrize("name", RUNS)
def test_nothing_in_a_healthy_log_explains_a_failure(name: str):
    finder = CauseFinder()
    for line in log_lines(name):
        finder.read(line.partition(" ")[2], 0.0)
    assert finder.cause() is None


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(RUNS))
def test_truncated_or_mixed_lines_give_correct_values_or_none(random, name: str):
    """What two writers leave that share a terminal: pieces of lines, in any mixture."""
    lines = log_lines(name)
    true = {(i.iteration, i.elapsed_ms, i.lm_loss) for i in iterations(lines)}
    damaged = []
    for line in lines:
        cut = random.randrange(len(line) + 1)
        other = random.choice(lines)
        cases = [
            [line],
            [line[:cut]],
            [line[:cut], line[cut:]],
            [],
            [line[:cut] + other],
            [line[:cut] + other + line[cut:]],
        ]
        damaged += random.choice(cases)
    found = {(i.iteration, i.elapsed_ms, i.lm_loss) for i in iterations(damaged)}
    assert found <= true
