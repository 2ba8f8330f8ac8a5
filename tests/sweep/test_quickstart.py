"""The quickstart: a newcomer's first command, with what may be wrong on a newcomer's machine."""

import csv
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES, processes_with, wait_for

# Nothing that tells pip where packages are: the tests decide.
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "VIRTUAL_ENV", "SLURM_", "WANDB_"))}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of the repository in a path with spaces, without any virtual environment."""
    target = tmp_path / "a fresh clone" / "T5-Parallelism"
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache")
    shutil.copytree(REPO_ROOT, target, ignore=ignored)
    return target


@pytest.fixture
def ready_clone(clone: Path) -> Path:
    """A clone whose virtual environment is the one that runs these tests: nothing has to be downloaded."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run in a virtual environment that the clone could use")
    (clone / ".venv").symlink_to(sys.prefix)
    return clone


def quickstart(clone: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(clone / "scripts" / "quickstart.sh"), *arguments],
        env=CLEAN | environment,
        cwd=clone.parent,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )


def refusal(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 1
    return result.stderr


def stub_python(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python-stub"
    path.write_text(f'#!/usr/bin/env bash\n{text}\nexec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_missing_python(clone: Path):
    assert "there is no 'python9' on PATH" in refusal(quickstart(clone, PYTHON="python9"))


def test_old_python(clone: Path, tmp_path: Path):
    old = stub_python(
        tmp_path, '[[ $* == *version_info* ]] && exit 1; [[ $1 == --version ]] && echo "Python 3.8.1" && exit'
    )
    assert "is Python 3.8.1, and 3.10, 3.11 or 3.12 is needed" in refusal(quickstart(clone, PYTHON=old))


def test_python_without_venv(clone: Path, tmp_path: Path):
    bare = stub_python(tmp_path, "[[ $* == *ensurepip* ]] && exit 1")
    assert "has no venv module" in refusal(quickstart(clone, PYTHON=bare))


def test_no_network(clone: Path):
    """A port where nobody listens stands for a network that is not there; going on later completes the same venv."""
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    # Not the environment of these tests, which would lend its packages.
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    message = refusal(quickstart(clone, PYTHON=str(base), **offline))
    assert "the Python package index cannot be reached" in message
    assert not (clone / ".venv" / "complete").exists()


def test_full_disk(clone: Path, tmp_path: Path):
    full = stub_python(
        tmp_path, '[[ $* == *"-m venv"* ]] && echo "OSError: [Errno 28] No space left on device" && exit 1'
    )
    assert "the disk is full" in refusal(quickstart(clone, PYTHON=full))


def test_unknown_option(clone: Path):
    assert "unknown option '--fast'" in refusal(quickstart(clone, "--fast"))


def test_help_needs_nothing(clone: Path):
    result = quickstart(clone, "--help", PYTHON="python9")
    assert result.returncode == 0
    assert "ENGINE" in result.stdout


@pytest.mark.slow
def test_all_strategies_train_and_equal_ddp(ready_clone: Path):
    result = quickstart(ready_clone)
    assert result.returncode == 0, result.stderr + result.stdout
    (table,) = (ready_clone / "outputs" / "quickstart").glob("*/comparison/comparison.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    sizes = {(row["strategy"], row["world_size"]) for row in rows}
    assert sizes == {(strategy, "2") for strategy in STRATEGIES if strategy != "hybrid"} | {
        ("hybrid", "4"),
        ("ddp", "4"),
    }
    for row in rows:
        assert row["parity"] == ("baseline" if row["strategy"] == "ddp" else "yes")
        assert row["status"] == "complete"
        assert float(row["bytes_sent_per_iteration"]) > 0
    assert "not a measurement of Megatron-DeepSpeed on GPUs" in result.stdout
    assert table.with_name("index.html").is_file()
    progress = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert len(progress) == len(STRATEGIES) + 1
    made = {path.name for path in ready_clone.iterdir()} - {path.name for path in REPO_ROOT.iterdir()}
    assert made <= {"outputs", ".venv"}


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(ready_clone: Path):
    """A terminal gives Ctrl-C to the whole foreground group: quickstart, launcher, tee, not the trainer's session."""
    mark = f"QUICKSTART_TEST={ready_clone}"
    process = subprocess.Popen(
        ["bash", str(ready_clone / "scripts" / "quickstart.sh")],
        env=CLEAN | dict([mark.split("=", 1)]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    outputs = ready_clone / "outputs" / "quickstart"
    wait_for(lambda: any("iteration" in log.read_text() for log in outputs.glob("*/repeat1/ddp/node0.log")), 120)
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "INT received: stopped" in errors
    assert time.monotonic() - started < 30
    assert processes_with(mark) == []
