"""The quickstart: a newcomer's first command, from a clone to the comparison of all strategies."""

import csv
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, processes_with, wait_for

# Nothing that tells pip where packages are, nor the runs where they are.
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "VIRTUAL_ENV", "SLURM_", "WANDB_"))}


def make_clone(directory: Path) -> Path:
    """The files of the repository, with the virtual environment that runs these tests: nothing has to be downloaded."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run in a virtual environment that the clone could use")
    target = directory / "a fresh clone" / "T5-Parallelism"
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache")
    shutil.copytree(REPO_ROOT, target, ignore=ignored)
    (target / ".venv").symlink_to(sys.prefix)
    return target


def start(clone: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(clone / "scripts" / "quickstart.sh"), *arguments],
        env=CLEAN | environment,
        cwd=clone.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which the quickstart ran to its end; what it said is in files beside it."""
    target = make_clone(tmp_path_factory.mktemp("quickstart"))
    process = start(target)
    output, errors = process.communicate(timeout=590)
    assert process.returncode == 0, errors + output
    (target / "outputs" / "stdout").write_text(output)
    (target / "outputs" / "stderr").write_text(errors)
    return target


@pytest.fixture
def comparison(clone: Path) -> Path:
    (directory,) = (clone / "outputs" / "quickstart").glob("*/comparison")
    return directory


def test_help_and_wrong_use():
    output, _ = start(REPO_ROOT, "--help", PYTHON=sys.executable).communicate(timeout=30)
    assert "outputs/quickstart/" in output and "ENGINE" in output
    for argument, environment, message in (
        ("--fast", {}, "unknown option '--fast'"),
        ("", {"PYTHON": "python9"}, "there is no 'python9' on PATH"),
        ("", {"TRAIN_ITERS": "0"}, "TRAIN_ITERS must be a whole number of at least 1"),
    ):
        process = start(REPO_ROOT, argument, **environment)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2
        assert message in errors and errors.count("error: ") == 1


@pytest.mark.slow
def test_all_strategies_train_and_equal_ddp(comparison: Path):
    rows = list(csv.DictReader((comparison / "comparison.csv").read_text().splitlines()))
    sizes = {(row["strategy"], row["world_size"]) for row in rows}
    assert sizes == {(s, "2") for s in STRATEGIES if s != "hybrid"} | {("hybrid", "4"), ("ddp", "4")}
    for row in rows:
        assert row["parity"] == ("baseline" if row["strategy"] == "ddp" else "yes")
        assert row["status"] == "complete"
        assert float(row["bytes_sent_per_iteration"]) > 0


@pytest.mark.slow
def test_what_a_newcomer_sees(clone: Path, comparison: Path):
    assert "not a measurement of Megatron-DeepSpeed on GPUs" in (clone / "outputs" / "stdout").read_text()
    assert (comparison / "index.html").is_file()
    progress = [line for line in (clone / "outputs" / "stderr").read_text().splitlines() if line.startswith("[")]
    assert len(progress) == len(STRATEGIES) + 1


@pytest.mark.slow
def test_everything_stays_in_the_checkout(clone: Path):
    made = {path.name for path in clone.iterdir()} - {path.name for path in REPO_ROOT.iterdir()}
    assert made <= {"outputs", ".venv"}
    assert [path.name for path in clone.parent.iterdir()] == [clone.name]


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
