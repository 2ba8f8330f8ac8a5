"""scripts/search.sh: live searches of a tiny model on this machine's CPU, with two processes."""

import json
import subprocess
from pathlib import Path

import pytest
from real_runs import environment
from support import REPO_ROOT
from warm_python import warm_python

from t5bench import Problem
from t5bench.tools.search import parity

LAYOUTS = {
    "DEVICE": "cpu", "ENGINE": "native", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "DROPOUT": "0",
    "GLOBAL_BATCH_SIZE": "4", "NPROC_PER_NODE": "2", "TRAIN_ITERS": "26",
}  # fmt: skip


def search(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(REPO_ROOT / "scripts" / "search.sh"), *arguments]
    chosen = environment(PYTHON=warm_python()) | LAYOUTS | settings
    return subprocess.run(words, env=chosen, capture_output=True, text=True, timeout=500, check=False)


def test_a_dry_run_lists_layouts_and_runs_nothing(sample_data: Path, tmp_path: Path):
    runs = tmp_path / "runs"
    result = search("--dry-run", RUNS_DIR=str(runs), MEGATRON_DATA_DIR=str(sample_data))
    assert result.returncode == 0, result.stderr
    assert "layouts may be the fastest" in result.stdout and "DDP 1/1/2, micro-batch 2" in result.stdout
    assert not runs.exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"RUNS": "0"}, "RUNS must be a whole number of at least 1"),
        ({"TRAIN_ITERS": "20"}, "TRAIN_ITERS must be a whole number of at least 25"),
        ({"TENSOR_PARALLEL_SIZE": "3"}, "no layout of 2 GPUs with TP=3"),
    ],
)
def test_what_cannot_be_searched(sample_data: Path, tmp_path: Path, settings: dict[str, str], says: str):
    result = search(RUNS_DIR=str(tmp_path / "runs"), MEGATRON_DATA_DIR=str(sample_data), **settings)
    assert result.returncode == 2 and says in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(("status", "fault"), [(0, ""), (1, "it does not train as DDP does"), (3, ""), (2, None)])
def test_only_curves_that_were_judged_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, fault: str | None
):
    monkeypatch.setattr(parity, "t5bench", lambda *_: status)
    if fault is None:
        with pytest.raises(Problem, match="ended with status 2"):
            parity.verdict(tmp_path, tmp_path)
    else:
        assert parity.verdict(tmp_path, tmp_path).startswith(fault) and bool(fault) == (status == 1)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_search_stops_at_its_budget_and_continues_without_repeating_a_run(sample_data: Path, tmp_path: Path):
    """The budget of one run, then of two: two runs in all, of which the first is not repeated."""
    where = {"RUNS_DIR": str(tmp_path / "runs"), "MEGATRON_DATA_DIR": str(sample_data)}
    first = search(RUNS="1", **where)
    assert first.returncode == 3, first.stderr
    assert "The budget ended before this was certain" in first.stdout
    assert "its curves agree with DDP's" in first.stdout and "PASS" in first.stdout
    before = json.loads((tmp_path / "runs" / "search.json").read_text())
    second = search(RUNS="2", **where)
    assert second.returncode in (0, 3), second.stderr
    after = json.loads((tmp_path / "runs" / "search.json").read_text())
    assert list(after["outcomes"].items())[:1] == list(before["outcomes"].items())
    assert len(before["outcomes"]) == 1 and len(after["outcomes"]) == 2
    assert len(list((tmp_path / "runs" / "runs").iterdir())) == 2
    assert "<svg" in (tmp_path / "runs" / "search.svg").read_text()
    named = min(after["outcomes"].items(), key=lambda item: item[1]["seconds"])[0]
    assert named in after["parity"] and "bash scripts/run_megatron_t5_" in second.stdout
    other = search(RUNS="2", GLOBAL_BATCH_SIZE="8", **{name: where[name] for name in where})
    assert other.returncode == 2 and "holds another search: GLOBAL_BATCH_SIZE is '8' and was '4'" in other.stderr
