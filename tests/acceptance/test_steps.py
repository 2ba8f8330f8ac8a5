"""Steps and measurements: which steps there are, what passes, what is ended; the device, and the plain PyTorch loop."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import STRATEGIES, processes_with, wait_for
from made_runs import made_plan
from torch.utils.flop_counter import FlopCounterMode

from t5bench.acceptance.__main__ import Preset, Runner, Step
from t5bench.acceptance.results import FAILED, NOT_RUN, OUT_OF_TIME, PASSED
from t5bench.model import flops

LONG = "trap 'echo tidied; exit 0' TERM; sleep 1000 & echo begun; while :; do sleep 0.1; done"
SETTINGS = {"ENGINES": "both", "STRATEGIES": "", "MICRO_BATCH_SIZES": "32 8", "DEVICE": "cuda", "RESULTS_DIR": ""}


def test_the_parts_are_parity_the_sweep_and_points_that_do_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (SETTINGS | {"WORK_DIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
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


def results(work: Path, *steps: Step, seconds: float = 60) -> dict[str, str]:
    runner = Runner(work)
    runner.deadline = time.monotonic() + seconds
    for step in steps:
        runner.run(step)
    return {name: outcome["result"] for name, outcome in runner.outcomes.items()}


def test_a_step_passes_by_its_exit_status_once_and_leaves_what_it_wrote(tmp_path: Path):
    count, mended = tmp_path / "count", tmp_path / "mended"
    steps = [
        Step("good", ["sh", "-c", f"echo $WORD; echo error >&2; echo x >>{count}"], {"WORD": "spoken"}),
        Step("bad", ["sh", "-c", f"[ -e {mended} ]"]),
        Step("wanted", ["sh", "-c", "exit 5"], passes=(0, 5)),
    ]
    assert results(tmp_path, *steps) == {"good": PASSED, "bad": FAILED, "wanted": PASSED}
    assert (tmp_path / "logs" / "good.out").read_text() == "spoken\n"
    assert (tmp_path / "logs" / "good.log").read_text() == "error\n"
    mended.touch()
    assert results(tmp_path, *steps) == {"good": PASSED, "bad": PASSED, "wanted": PASSED}
    assert count.read_text() == "x\n"


def test_a_step_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path):
    step = Step("long", ["sh", "-c", LONG], {"ACCEPTANCE_TEST": str(tmp_path)})
    late = Step("late", ["true"])
    assert results(tmp_path, step, late, seconds=0.5) == {"long": OUT_OF_TIME, "late": NOT_RUN}
    assert (tmp_path / "logs" / "long.out").read_text() == "begun\ntidied\n"
    wait_for(lambda: processes_with(f"ACCEPTANCE_TEST={tmp_path}") == [])


def test_what_ends_the_acceptance_ends_its_step_in_order(tmp_path: Path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom t5bench.acceptance.__main__ import Runner, Step\n"
        "from t5bench import raise_on_signals\nraise_on_signals()\nrunner = Runner(Path(sys.argv[1]))\n"
        "runner.deadline = time.monotonic() + 60\nrunner.run(Step('one', ['sh', '-c', sys.argv[2]]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), LONG])
    output = tmp_path / "logs" / "one.out"
    wait_for(lambda: output.exists() and output.read_text() == "begun\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert output.read_text() == "begun\ntidied\n"


def test_the_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its matrix products are those that are counted; full memory is a result, and a failure is not."""
    from t5bench.acceptance import baseline  # late: transformers' T5 takes seconds

    sizes = {"DROPOUT": "0.1", "GLOBAL_BATCH_SIZE": "4", "MICRO_BATCH_SIZE": "2", "TRAIN_ITERS": "6"}
    plan = made_plan(settings=sizes | {"VOCABULARY_MULTIPLE": "4352"})
    torch.backends.cuda.enable_cudnn_sdp(True)
    loop = baseline.Loop(plan)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it would fail on Hopper with PyTorch 2.11
    with FlopCounterMode(display=False) as counter:
        loop.iterate()
    assert counter.get_total_flops() == pytest.approx(flops.flops_per_iteration(loop.shape, 4), rel=0.02)

    def measure(*_: object) -> dict:
        raise errors.pop(0)

    monkeypatch.setattr(baseline.Loop, "measure", measure)
    monkeypatch.setattr(baseline, "ask", lambda strategy: plan)
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")
    for second, status in ((full, 0), (RuntimeError("the compiler failed"), 1)):
        errors, output = [full, second], tmp_path / "points.jsonl"
        assert baseline.main(output) == status
        eager, compiled = map(json.loads, output.read_text().splitlines())
        assert eager["status"] == "out-of-memory" and eager["reason"].endswith("Tried to allocate 2.00 GiB")
        assert compiled["status"] == ("crashed" if status else "out-of-memory")
