"""Faults of one node that docs/failures.md lists: each is played on a real launcher, whose torchrun is a stub."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from harness import Project, processes_with, wait_for

from t5bench.record.records import load


def recorder_of(project: Project) -> int:
    return int(subprocess.check_output(["pgrep", "-f", f"t5bench record --plan {project.root}/"]))


def status_of(project: Project) -> str:
    return (project.root / "outputs" / "ddp" / "node0.status").read_text()


# ---- the recorder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [signal.SIGTERM, None], ids=["term", "end"])
def test_recorder_stopped(project: Project, by: signal.Signals | None):
    launcher = project.start_sleeping(STUB_SLEEP="300" if by else "1")
    os.kill(recorder_of(project), signal.SIGSTOP)
    started = time.monotonic()
    if by:
        launcher.send_signal(by)
    errors = launcher.communicate(timeout=40)[1]
    assert time.monotonic() - started < 25
    assert launcher.returncode == (128 + by if by else 0), errors
    assert status_of(project).startswith("cancelled" if by else "complete")
    assert processes_with(f"STUB_DIR={project.stubs}") == []


def test_two_launchers_at_the_same_moment(project: Project):
    """One of them trains, and the other says who does."""
    command = ["bash", str(project.script("run_megatron_t5_ddp.sh"))]
    environment = project.environment_with({"STUB_WAIT": "4"})
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    launchers = [subprocess.Popen(command, env=environment, cwd=project.root, **pipes) for _ in range(3)]
    said = [launcher.communicate(timeout=60)[1] for launcher in launchers]
    assert sorted(launcher.returncode for launcher in launchers) == [0, 2, 2], "\n".join(said)
    assert sum("error: a run is going on in " in text for text in said) == 2
    assert len(load(project.root / "outputs" / "ddp").iterations) == 1


def test_run_directory_removed(project: Project):
    launcher = project.start_sleeping(STUB_SLEEP="6")
    directory = project.root / "outputs" / "ddp"
    wait_for((directory / "metrics.jsonl").exists)
    shutil.rmtree(directory)
    started = time.monotonic()
    wait_for((directory / "node0.log").exists, 10)
    assert time.monotonic() - started < 5
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 0, errors
    assert "was removed while the run goes on" in errors
    run = load(directory)
    assert (run.status, len(run.iterations)) == ("complete", 1)
    assert "stub torchrun output" in (directory / "node0.log").read_text()


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def sweep(project: Project, **environment: str) -> subprocess.Popen[str]:
    settings = {"STRATEGIES": "ddp", "RETRIES": "0", "WANDB_MODE": "disabled"} | environment
    return subprocess.Popen(
        ["bash", str(project.script("run_megatron_t5_all.sh"))],
        env=project.environment_with(settings),
        cwd=project.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


SLOW_START = """
import time
from t5bench.sweep import launch

class SlowNode(launch.Node):
    def send(self, script):
        super().send(script)
        time.sleep(5)

launch.Node = SlowNode
"""


def test_second_ctrl_c_in_a_sweep(project: Project):
    """Both come while the run is being started, and nobody knows its processes yet."""
    with (project.root / "t5bench" / "sweep" / "rows.py").open("a") as module:
        module.write(SLOW_START)
    process = sweep(project, STUB_SLEEP="300")
    wait_for((project.stubs / "started").exists)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGINT
    assert "INT received: stopped, nothing is left running" in errors
    assert processes_with(f"STUB_DIR={project.stubs}") == []


def test_two_sweeps_at_the_same_moment(project: Project):
    sweeps = [sweep(project, STUB_WAIT="4") for _ in range(2)]
    said = [process.communicate(timeout=90)[1] for process in sweeps]
    assert sorted(process.returncode for process in sweeps) == [0, 2], "\n".join(said)
    assert sum("error: a run is going on in " in text for text in said) == 1
