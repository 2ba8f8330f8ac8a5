"""Steps: which there are, what passes, what is ended, and what the next call does."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import STRATEGIES, processes_with, wait_for

from t5bench import Problem
from t5bench.acceptance.__main__ import Preset
from t5bench.acceptance.steps import FAILED, NOT_RUN, OUT_OF_TIME, PASSED, Runner, Step

LONG = "trap 'echo tidied; exit 0' TERM; sleep 1000 & echo begun; while :; do sleep 0.1; done"
SETTINGS = {"ENGINES": "both", "STRATEGIES": "", "MICRO_BATCH_SIZES": "32 8", "DEVICE": "cuda", "RESULTS_DIR": ""}


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SETTINGS | {"WORK_DIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("STRATEGIES", "ddp zero9", "there is no strategy 'zero9'"),
        ("MICRO_BATCH_SIZES", "8 x", "whole numbers of at least 1, found '8 x'"),
    ],
)
def test_impossible_settings(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str):
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv(name, value)
    with pytest.raises(Problem, match=message):
        Preset()


def test_the_parts_are_parity_the_sweep_and_points_that_do_the_same_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("t5bench.acceptance.__main__.count_gpus", lambda _: 2)
    monkeypatch.setattr("t5bench.record.machine.gpus", lambda _: [{"name": "NVIDIA H200"}] * 2)
    preset = Preset()
    assert preset.work.name == preset.output.name == "2x-nvidia-h200"
    steps = {step.name: step for step in preset.acceptance()}
    names = ["parity-native", "parity-megatron", "large-megatron", "large-native"]
    assert [*steps] == names
    for name in names[:2]:
        assert set(steps[name].command[2:]) == set(STRATEGIES) and steps[name].environment["SHARE_GPUS"] == "1"
    for name in names[2:]:
        # The benchmark stays as it is: its batch, precision, dropout and sizes are the launchers' defaults.
        assert steps[name].environment == {"ENGINE": name.partition("-")[2], "TRAIN_ITERS": "12"}
    points = [step for step in preset.throughput() if "MICRO_BATCH_SIZE" in step.environment]
    assert [step.environment["MICRO_BATCH_SIZE"] for step in points] == ["32"] * 3 + ["8"] * 3
    assert {step.environment["GLOBAL_BATCH_SIZE"] for step in points} == {"32"}
    runs = [step for step in points if not step.name.startswith("baseline")]
    assert all(step.environment["PROFILE_ITERATION"] == "30" and set(step.passes) == {0, 5} for step in runs)


def shell(name: str, text: str, **options) -> Step:
    return Step(name, ["sh", "-c", text], **options)


def results(work: Path, *steps: Step, seconds: float = 60) -> dict[str, str]:
    runner = Runner(work, time.monotonic() + seconds)
    for step in steps:
        runner.run(step)
    return {name: outcome["result"] for name, outcome in runner.outcomes.items()}


def test_a_step_passes_by_its_exit_status_once_and_leaves_what_it_wrote(tmp_path: Path):
    count, mended = tmp_path / "count", tmp_path / "mended"
    steps = [
        shell("good", f"echo $WORD; echo error >&2; echo x >>{count}", environment={"WORD": "spoken"}),
        shell("bad", f"[ -e {mended} ]"),
        shell("wanted", "exit 5", passes=(0, 5)),
    ]
    assert results(tmp_path, *steps) == {"good": PASSED, "bad": FAILED, "wanted": PASSED}
    assert (tmp_path / "logs" / "good.out").read_text() == "spoken\n"
    assert (tmp_path / "logs" / "good.log").read_text() == "error\n"
    mended.touch()
    assert results(tmp_path, *steps) == {"good": PASSED, "bad": PASSED, "wanted": PASSED}
    assert count.read_text() == "x\n"


def test_a_step_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path):
    step = shell("long", LONG, environment={"ACCEPTANCE_TEST": str(tmp_path)})
    assert results(tmp_path, step, shell("late", "true"), seconds=0.5) == {"long": OUT_OF_TIME, "late": NOT_RUN}
    assert (tmp_path / "logs" / "long.out").read_text() == "begun\ntidied\n"
    wait_for(lambda: processes_with(f"ACCEPTANCE_TEST={tmp_path}") == [])


def test_what_ends_the_acceptance_ends_its_step_in_order(tmp_path: Path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom t5bench.acceptance import steps\n"
        "from t5bench import raise_on_signals\nraise_on_signals()\n"
        "runner = steps.Runner(Path(sys.argv[1]), time.monotonic() + 60)\n"
        "runner.run(steps.Step('one', ['sh', '-c', sys.argv[2]]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), LONG])
    output = tmp_path / "logs" / "one.out"
    wait_for(lambda: output.exists() and output.read_text() == "begun\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert output.read_text() == "begun\ntidied\n"
