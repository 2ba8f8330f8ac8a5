"""The quickstart: a newcomer's first command, from a clone to the comparison of all strategies."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, processes_with, wait_for
from real_runs import environment, make_clone


def start(clone: Path, *arguments: str, **settings: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(clone / "scripts" / "quickstart.sh"), *arguments],
        env=environment(**settings),
        cwd=clone.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_help_and_wrong_use():
    output, _ = start(REPO_ROOT, "--help", PYTHON=sys.executable).communicate(timeout=30)
    assert "outputs/quickstart/" in output and "ENGINE" in output
    for argument, settings, message in (
        ("--fast", {}, "unknown option '--fast'"),
        ("", {"PYTHON": "python9"}, "'python9' is not on PATH"),
        ("", {"TRAIN_ITERS": "0"}, "TRAIN_ITERS must be a whole number of at least 1"),
    ):
        process = start(REPO_ROOT, argument, **settings)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2
        assert message in errors and errors.count("error: ") == 1


@pytest.mark.slow
def test_all_strategies_train_and_equal_ddp_and_everything_stays_in_the_checkout(quickstart: Path):
    (comparison,) = (quickstart / "outputs" / "quickstart").glob("*/comparison")
    rows = list(csv.DictReader((comparison / "comparison.csv").read_text().splitlines()))
    sizes = {(row["strategy"], row["world_size"]) for row in rows}
    assert sizes == {(s, "2") for s in STRATEGIES if s != "hybrid"} | {("hybrid", "4"), ("ddp", "4")}
    for row in rows:
        assert row["parity"] == ("baseline" if row["strategy"] == "ddp" else "yes")
        assert row["status"] == "complete"
        assert float(row["bytes_sent_per_iteration"]) > 0
    assert "not a measurement of Megatron-DeepSpeed on GPUs" in (quickstart / "outputs" / "stdout").read_text()
    assert (comparison / "index.html").is_file()
    progress = (quickstart / "outputs" / "stderr").read_text().splitlines()
    assert len([line for line in progress if line.startswith("[") and "  complete, " in line]) == len(STRATEGIES) + 1
    made = {path.name for path in quickstart.iterdir()} - {path.name for path in REPO_ROOT.iterdir()}
    assert made <= {"outputs", ".venv"}
    assert [path.name for path in quickstart.parent.iterdir()] == [quickstart.name]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(tmp_path: Path):
    """A terminal gives Ctrl-C to the whole foreground group, not to the trainer's session."""
    clone = make_clone(tmp_path)
    process = start(clone, QUICKSTART_TEST=str(clone))
    outputs = clone / "outputs" / "quickstart"
    wait_for(lambda: any("iteration" in log.read_text() for log in outputs.glob("*/repeat1/ddp/node0.log")), 120)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "INT received: stopped" in errors
    assert processes_with(f"QUICKSTART_TEST={clone}") == []
