"""Steps: what passes, what is ended, what goes on at the next call."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import processes_with, wait_for

from t5bench.acceptance.steps import FAILED, NOT_RUN, OUT_OF_TIME, PASSED, Runner, Step

LONG = "trap 'echo tidied; exit 0' TERM; sleep 1000 & echo begun; while :; do sleep 0.1; done"


def shell(name: str, text: str, seconds: float = 5.0, **options) -> Step:
    return Step(name, ["sh", "-c", text], seconds, **options)


def results(work: Path, *steps: Step, seconds: float = 60, **options) -> dict[str, str]:
    runner = Runner(work, time.monotonic() + seconds)
    runner.run(steps, **options)
    return {name: outcome["result"] for name, outcome in runner.outcomes.items()}


def test_a_step_passes_by_its_exit_status_and_leaves_what_it_wrote(tmp_path: Path):
    steps = [
        shell("good", "echo $WORD; echo error >&2", environment={"WORD": "spoken"}),
        shell("bad", "exit 3"),
        shell("wanted", "exit 5", passes=(0, 5)),
    ]
    assert results(tmp_path, *steps) == {"good": PASSED, "bad": FAILED, "wanted": PASSED}
    assert (tmp_path / "logs" / "good.out").read_text() == "spoken\n"
    assert (tmp_path / "logs" / "good.log").read_text() == "error\n"


def test_a_step_that_takes_too_long_is_ended_in_order_with_all_that_it_started(tmp_path: Path):
    step = shell("long", LONG, seconds=0.5, environment={"ACCEPTANCE_TEST": str(tmp_path)})
    assert results(tmp_path, step) == {"long": OUT_OF_TIME}
    assert (tmp_path / "logs" / "long.out").read_text() == "begun\ntidied\n"
    wait_for(lambda: processes_with(f"ACCEPTANCE_TEST={tmp_path}") == [])


def test_no_step_begins_without_the_time_that_it_takes_or_has_taken(tmp_path: Path):
    late = shell("late", "sleep 30", seconds=2)
    assert results(tmp_path, late, seconds=1) == {"late": NOT_RUN}
    assert not (tmp_path / "logs" / "late.log").exists()
    assert results(tmp_path, late, seconds=4) == {"late": OUT_OF_TIME}
    assert results(tmp_path, late, seconds=3.5) == {"late": NOT_RUN}


def test_the_next_call_goes_on_where_this_one_stopped(tmp_path: Path):
    count, mended = tmp_path / "count", tmp_path / "mended"
    text = f"echo x >>{count}"
    steps = (shell("first", text), shell("second", f"{text}; [ -e {mended} ]"))
    assert results(tmp_path, *steps) == {"first": PASSED, "second": FAILED}
    mended.touch()
    assert results(tmp_path, *steps) == {"first": PASSED, "second": PASSED}
    assert count.read_text().count("x") == 3  # the first passed and did not run again


def test_steps_together_take_the_time_of_the_longest(tmp_path: Path):
    # Each waits for the other, so one after another they would not end.
    begun = [tmp_path / "a", tmp_path / "b"]
    text = "touch {0}; while [ ! -e {1} ]; do sleep 0.05; done"
    steps = [shell(mine.name, text.format(mine, other)) for mine, other in (begun, begun[::-1])]
    assert results(tmp_path / "work", *steps, at_once=2) == {"a": PASSED, "b": PASSED}


def test_what_ends_the_acceptance_ends_its_step_in_order(tmp_path: Path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom t5bench.acceptance import steps\n"
        "from t5bench.sweep.runner import raise_on_signals\nraise_on_signals()\n"
        "runner = steps.Runner(Path(sys.argv[1]), time.monotonic() + 60)\n"
        "runner.run([steps.Step(name, ['sh', '-c', sys.argv[2]], 30) for name in ('one', 'two')])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), LONG])
    output = tmp_path / "logs" / "one.out"
    wait_for(lambda: output.exists() and output.read_text() == "begun\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert output.read_text() == "begun\ntidied\n"
    assert not (tmp_path / "logs" / "two.out").exists()
