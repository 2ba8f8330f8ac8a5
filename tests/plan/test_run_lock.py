"""Who holds a directory: one of many that ask at once, and for how long."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import REPO_ROOT

from t5bench import Problem
from t5bench.plan import run_lock

TAKE = """
import os, sys, time
from pathlib import Path
from t5bench import Problem
from t5bench.plan import run_lock

while time.time() < float(sys.argv[2]):
    pass
try:
    run_lock.take(Path(sys.argv[1]), "node0", os.getpid())
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


HOLDERS = {
    "here": ({}, 1e6, True),
    "rebooted": ({"boot": "another"}, 0, False),
    "id came again": ({"processes": [[os.getpid(), "1"]]}, 0, False),
    "elsewhere": ({"host": "elsewhere"}, 60, True),
    "elsewhere and gone": ({"host": "elsewhere"}, 600, False),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_how_long(tmp_path: Path, name: str):
    changes, age, is_held = HOLDERS[name]
    run_lock.take(tmp_path, "node1", os.getpid())  # another node of the run
    run_lock.take(tmp_path, "node0", os.getpid())
    run_lock.keep(tmp_path, "node0")
    path = tmp_path / "node0.claim.1"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    os.utime(path, times=(time.time() - age,) * 2)
    path.with_suffix(".1.bak").touch()
    if is_held:
        with pytest.raises(Problem, match=rf"a run is already in progress in .* \(process {os.getpid()} on "):
            run_lock.take(tmp_path, "node0", os.getppid())
    else:
        run_lock.take(tmp_path, "node0", os.getppid())


@pytest.mark.parametrize(("age", "is_held"), [(20, True), (60, False)])
def test_a_node_without_power_holds_a_run_that_another_has_ended_for_half_a_minute(
    tmp_path: Path, age: int, is_held: bool
):
    """The run may start again on other nodes."""
    run_lock.take_for_run(tmp_path, 1, os.getpid(), {})
    run_lock.take(tmp_path, "node0", os.getpid())
    for name in ("node1", "run"):
        path = tmp_path / f"{name}.claim.1"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere"}))
        os.utime(path, times=(time.time() - age,) * 2)
    run_lock.release(tmp_path, "node0", os.getpid())
    ended = tmp_path / "node0.claim.1"
    ended.write_text(json.dumps(json.loads(ended.read_text()) | {"host": "third"}))
    if is_held:
        with pytest.raises(Problem, match="already in progress"):
            run_lock.check_run(tmp_path, {"seed": "2"})
    else:
        run_lock.check_run(tmp_path, {"seed": "2"})
