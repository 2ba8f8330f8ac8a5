"""The quickstart: a newcomer's first command, from a clone to the comparison of all strategies."""

import csv
import subprocess
from pathlib import Path

import pytest
from real_runs import environment
from support import NATIVE_STRATEGIES, REPO_ROOT, Project


def test_help_and_wrong_use():
    for argument, settings, status, said in (
        ("--help", {}, 0, "outputs/quickstart/"),
        ("", {"PYTHON": "python9"}, 2, "error: 'python9' is not on PATH"),
        ("", {"PYTHON": "/no/where/python3"}, 2, "error: there is no file /no/where/python3, which PYTHON names"),
        ("", {"PYTHON": "/etc/passwd"}, 2, "error: /etc/passwd, which PYTHON names, cannot be executed"),
        ("", {"TRAIN_ITERS": "0"}, 2, "error: TRAIN_ITERS must be a whole number of at least 1"),
    ):
        command = ["bash", str(REPO_ROOT / "scripts" / "quickstart.sh"), argument]
        options = {"capture_output": True, "text": True, "timeout": 60, "check": False}
        result = subprocess.run(command, env=environment(**settings), **options)
        assert result.returncode == status and said in result.stdout + result.stderr
        assert result.stderr.count("error: ") == status / 2


def test_a_checkout_that_cannot_be_written_is_one_sentence(project: Project):
    """Before anything is installed. In /proc not even root can make a file."""
    (project.root / "outputs").symlink_to("/proc/self/fdinfo")
    command = ["bash", str(project.root / "scripts" / "quickstart.sh")]
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    result = subprocess.run(command, env=environment(), **options)
    assert result.returncode == 2 and "outputs cannot be written\n       Copy the whole directory" in result.stderr
    assert not (project.root / ".venv").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_all_strategies_train_and_equal_ddp_and_everything_stays_in_the_checkout(quickstart: Path):
    (comparison,) = (quickstart / "outputs" / "quickstart").glob("*/comparison")
    rows = list(csv.DictReader((comparison / "comparison.csv").read_text().splitlines()))
    sizes = {(row["strategy"], row["world_size"]) for row in rows}
    assert sizes == {(s, "2") for s in NATIVE_STRATEGIES if s != "hybrid"} | {("hybrid", "4"), ("ddp", "4")}
    for row in rows:
        assert row["parity"] == ("baseline" if row["strategy"] == "ddp" else "yes")
        assert row["status"] == "complete"
        assert not row["bytes_sent_per_iteration"] or float(row["bytes_sent_per_iteration"]) > 0, "few samples: none"
    assert "not a measurement of Megatron-DeepSpeed on GPUs" in (quickstart / "outputs" / "stdout").read_text()
    assert (comparison / "index.html").is_file()
    said, answer, what_next = (quickstart / "outputs" / "stdout").read_text().splitlines()[-3:]
    assert said.startswith("After ") and answer.startswith("The ") and what_next.startswith("Next: ")
    progress = (quickstart / "outputs" / "stderr").read_text().splitlines()
    assert (
        len([line for line in progress if line.startswith("[") and "  complete, " in line])
        == len(NATIVE_STRATEGIES) + 2
    )
    made = {path.name for path in quickstart.iterdir()} - {path.name for path in REPO_ROOT.iterdir()}
    assert made <= {"outputs", ".venv"}
    assert [path.name for path in quickstart.parent.iterdir()] == [quickstart.name]
