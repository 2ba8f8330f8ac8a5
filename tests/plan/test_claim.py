"""Who holds a directory: one of many that ask at once, and for how long."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import REPO_ROOT

from t5bench import Problem
from t5bench.plan import claim

TAKE = """
import os, sys, time
from pathlib import Path
from t5bench import Problem
from t5bench.plan import claim

while time.time() < float(sys.argv[2]):
    pass
try:
    claim.take(Path(sys.argv[1]), "node0", "run", os.getpid())
    print("mine", flush=True)
except Problem:
    print("refused", flush=True)
sys.stdin.read()
"""


def test_one_of_many_gets_the_claim_and_the_next_gets_it_later(tmp_path: Path):
    for _ in range(3):
        command = [sys.executable, "-c", TAKE, str(tmp_path), str(time.time() + 1.5)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, cwd=REPO_ROOT, **pipes) for _ in range(8)]
        assert sorted(process.stdout.readline() for process in processes) == ["mine\n", *["refused\n"] * 7]
        for process in processes:
            process.communicate()


@pytest.mark.parametrize(
    ("changes", "age", "is_held"),
    [
        ({}, 1e6, True),
        ({"boot": "another"}, 0, False),
        ({"processes": [[os.getpid(), "1"]]}, 0, False),
        ({"processes": []}, 0, False),
        ({"host": "elsewhere"}, 60, True),
        ({"host": "elsewhere"}, 600, False),
        ({"host": "elsewhere", "processes": []}, 0, False),
    ],
    ids=[
        "here",
        "rebooted",
        "id came again",
        "ended",
        "elsewhere",
        "elsewhere and gone",
        "elsewhere and ended",
    ],
)
def test_how_long(tmp_path: Path, changes: dict, age: float, is_held: bool):
    claim.take(tmp_path, "node0", "run", os.getpid())
    path = tmp_path / "node0.claim.1"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    os.utime(path, times=(time.time() - age,) * 2)
    path.with_suffix(".1.bak").touch()
    if is_held:
        with pytest.raises(Problem, match="a run is already in progress in "):
            claim.take(tmp_path, "node0", "run", os.getppid())
    else:
        claim.take(tmp_path, "node0", "run", os.getppid())


def test_the_nodes_of_one_run_share_a_directory_and_two_runs_do_not(tmp_path: Path):
    claim.take(tmp_path, "node0", "run", os.getpid())
    claim.take(tmp_path, "node1", "run", os.getpid())
    for name in ("node0", "node1"):
        claim.keep(tmp_path, name, os.getpid())
    with pytest.raises(Problem, match=rf"\(process {os.getpid()} on "):
        claim.take(tmp_path, "node2", "another run", os.getpid())
    claim.take(tmp_path, "node2", "run", os.getpid())


def test_waits_for_a_claim_that_another_node_is_writing(tmp_path: Path):
    """Between making a file and writing it there is a moment in which the other node finds it empty."""
    path = tmp_path / "node1.claim.1"
    path.touch()
    holder = {"run": "one", "host": "elsewhere", "boot": "", "processes": [[1, "1"]]}
    writing = threading.Timer(0.3, path.write_text, [json.dumps(holder)])
    writing.start()
    claim.take(tmp_path, "node0", "one", os.getpid())
    writing.join()
    with pytest.raises(Problem, match="already in progress"):
        claim.take(tmp_path, "node2", "two", os.getpid())
