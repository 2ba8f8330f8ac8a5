"""Calls and their results: what passes, is ended or is skipped, what a KILL leaves, how another call continues."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes_with, wait_for

from t5bench import Problem
from t5bench.tools.acceptance import results
from t5bench.tools.acceptance.call import UNFINISHED, Call, reason_in
from t5bench.tools.acceptance.results import FAILED, NOT_RUN, OUT_OF_TIME, PASSED, SKIPPED, Results, StepResult
from t5bench.tools.acceptance.steps import FoundMachine, Step, measured

LONG = "trap 'echo tidied; exit 0' TERM; sleep 1000 & echo begun; while :; do sleep 0.1; done"
REHEARSAL = Results(True, [], 4)


@pytest.fixture
def here(tmp_path: Path) -> FoundMachine:
    return FoundMachine(os.environ | {"MEGATRON_DIR": str(tmp_path / "absent")}, rehearsal=True)


Run = Callable[..., dict[str, str]]


@pytest.fixture
def run(here: FoundMachine, tmp_path: Path) -> Run:
    """run(*steps): how they end, in a call that continues the earlier ones."""
    output = tmp_path / "results"

    def call(*steps: Step, seconds: float = 60) -> dict[str, str]:
        file = output / results.FILE
        found = results.continued([file] if file.exists() else [], Results(True, [], 4))
        found.calls.append(results.CallRecord("now", {}))
        directory = tmp_path / f"call-{len(found.calls)}"
        Call(here, found, directory, output, time.monotonic() + seconds).run_all(steps, {})
        return {name: outcome.result for name, outcome in results.read(file).steps.items()}

    return call


def test_a_step_passes_by_its_exit_status_once_and_keeps_what_it_wrote(run: Run, tmp_path: Path):
    count, mended = tmp_path / "count", tmp_path / "mended"
    steps = [
        Step("bad", ["sh", "-c", f"echo 'error: no luck' >&2; [ -e {mended} ]"]),
        Step("good", ["sh", "-c", f"echo $WORD; echo x >>{count}"], {"WORD": "spoken"}, figures=lambda: {"x": 1}),
        Step("wanted", ["sh", "-c", "exit 5"], passes=(0, 5)),
    ]
    assert run(*steps) == {"good": PASSED, "bad": FAILED, "wanted": PASSED}
    found = results.read(tmp_path / "results" / results.FILE)
    assert found.steps["bad"].reason == "error: no luck" and found.steps["good"].figures == {"x": 1}
    assert (tmp_path / "call-1" / "logs" / "good.out").read_text() == "spoken\n"
    mended.touch()
    assert run(*steps) == {"good": PASSED, "bad": PASSED, "wanted": PASSED}
    assert count.read_text() == "x\n"
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "README.md", "results.json", "records-1.tar.gz", "records-2.tar.gz"
    }  # fmt: skip
    assert "3 of 3 steps passed." in (tmp_path / "results" / "README.md").read_text()


def test_what_failed_before_comes_last(run: Run, tmp_path: Path):
    order = tmp_path / "order"
    steps = [Step(name, ["sh", "-c", f"echo {name} >>{order}; exit {status}"]) for name, status in (("a", 1), ("b", 0))]
    run(*steps)
    order.unlink()
    late = Step("c", ["sh", "-c", f"echo c >>{order}"])
    run(*steps, late)
    assert order.read_text().split() == ["c", "a"]


def test_a_step_whose_tools_are_missing_is_skipped_with_a_sentence(run: Run, here: FoundMachine, tmp_path: Path):
    assert run(Step("engine", ["true"], needs=("megatron",)), Step("other", ["true"])) == {
        "engine": SKIPPED,
        "other": PASSED,
    }
    reason = results.read(tmp_path / "results" / results.FILE).steps["engine"].reason
    assert reason.startswith(f"there is no Megatron-DeepSpeed at {tmp_path / 'absent'}")


def test_missing_packages_and_compilers_are_named(here: FoundMachine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "t5bench.tools.acceptance.steps.util.find_spec", lambda name: None if name == "hjson" else object()
    )
    assert here.missing()["deepspeed"].startswith("these Python packages are missing: hjson")
    monkeypatch.undo()
    here.environment = {**here.environment, "PATH": "/nonexistent"}
    assert here.missing()["offload"] == "these compilers are missing: g++, ninja"


def test_what_prepares_the_machine_runs_in_each_call_that_needs_it(run: Run, tmp_path: Path):
    count = tmp_path / "count"
    data = Step("data", ["sh", "-c", f"echo x >>{count}"])
    first, second = (Step(name, ["true"], after=(data,)) for name in ("first", "second"))
    run(first)
    run(first)
    assert count.read_text() == "x\n"
    run(first, second)  # perhaps on another machine
    assert count.read_text() == "x\nx\n"
    seen = tmp_path / "seen"
    copying = Step("data", ["cp", str(tmp_path / "results" / results.FILE), str(seen)])
    run(Step("fourth", ["true"], after=(copying,)))
    assert results.read(seen).passed("data"), "a KILL while it runs again leaves that it had passed"
    broken = Step("broken", ["false"])
    assert run(Step("third", ["true"], after=(broken,)))["third"] == NOT_RUN


def test_a_step_that_takes_too_long_is_ended_with_its_processes(run: Run, tmp_path: Path):
    step = Step("long", ["sh", "-c", LONG], {"ACCEPTANCE_TEST": str(tmp_path)})
    assert run(step, Step("late", ["true"]), seconds=0.5) == {"long": OUT_OF_TIME, "late": NOT_RUN}
    assert (tmp_path / "call-1" / "logs" / "long.out").read_text() == "begun\ntidied\n"
    wait_for(lambda: processes_with(f"ACCEPTANCE_TEST={tmp_path}") == [])


def test_on_a_gpu_a_step_that_is_stuck_or_does_not_fit_leaves_time_for_others(
    run: Run, here: FoundMachine, tmp_path: Path
):
    here.rehearsal = False
    stuck = Step("stuck", ["sleep", "1000"], seconds=0.1)
    assert run(stuck, Step("large", ["true"], seconds=1000), Step("small", ["true"], seconds=1)) == {
        "stuck": FAILED, "large": NOT_RUN, "small": PASSED
    }  # fmt: skip
    steps = results.read(tmp_path / "results" / results.FILE).steps
    assert steps["stuck"].reason == "it took longer than 0 s"
    assert "it takes about 1000 s" in steps["large"].reason


PROGRAM = """
import os, sys, time
from pathlib import Path
from t5bench.tools.acceptance import results
from t5bench.tools.acceptance.call import Call, earlier_files
from t5bench.tools.acceptance.steps import FoundMachine, Step
work, output, earlier = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
found = results.continued(earlier_files(output, earlier), results.Results(True, [], 4))
found.calls.append(results.CallRecord("now", {}))
directory = work / f"call-{len(found.calls)}"
def step(number):
    file = directory / f"{number}.json"
    command = f"sleep 0.3; head -c 300000 /dev/urandom | base64 >{directory}/{number}.log; echo {number} >{file}"
    return Step(f"step-{number}", ["sh", "-c", command], figures=lambda: file.read_text() if file.exists() else None)
here = FoundMachine(os.environ, rehearsal=True)
Call(here, found, directory, output, time.monotonic() + 60).run_all(map(step, range(24)), {})
"""


def test_ten_kills_lose_no_finished_step_and_each_next_call_continues_elsewhere(tmp_path: Path):
    """Each call is on another machine, as far as files tell: only results.json of the one before comes along."""
    generator, before = random.Random(42), set[str]()
    environment = os.environ | {"MEGATRON_DIR": str(tmp_path / "absent")}
    earlier = ""
    for number in range(11):
        work, output = tmp_path / f"machine-{number}", tmp_path / f"output-{number}"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(work), str(output), earlier],
            env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        lines: list[str] = []
        assert process.stderr
        lines.append(process.stderr.readline())  # the first step has begun, or one has passed before
        if number < 10:
            time.sleep(generator.uniform(0, 2))
            os.killpg(process.pid, signal.SIGKILL)
        lines += process.stderr.readlines()
        process.wait()
        ended = {line.split(":")[0] for line in lines if ": passed" in line}
        again = {line.split(" ")[0] for line in lines if line.endswith("...\n")}
        assert not again & before, "what has passed does not run again"
        came_back = check_what_came_back(output)
        assert before | ended <= came_back
        before = came_back
        earlier = str(tmp_path / f"results-{number}.json")
        shutil.copy(output / results.FILE, earlier)
    assert process.returncode == 0 and len(before) == 24


def check_what_came_back(output: Path) -> set[str]:
    """Fewer than nine readable files of at most 16 MiB; the steps that passed, each with its figures."""
    files = list(output.iterdir())
    assert len(files) <= 8 and all(path.stat().st_size <= 16 << 20 for path in files)
    found = results.read(output / results.FILE)
    for path in files:
        if path.suffix == ".gz" and path.name != UNFINISHED:
            with tarfile.open(path) as archive:
                assert all(archive.extractfile(member) for member in archive.getmembers())
    passed = {name for name, step in found.steps.items() if step.result == PASSED}
    assert all(found.steps[name].figures.strip() == name.removeprefix("step-") for name in passed)
    return passed


def test_what_ends_the_acceptance_ends_its_step_in_order(tmp_path: Path):
    program = PROGRAM.replace("map(step, range(24))", "[Step('one', ['sh', '-c', sys.argv[4]])]")
    program = "from t5bench import raise_on_signals\nraise_on_signals()\n" + program
    arguments = [str(tmp_path / "work"), str(tmp_path / "output"), "", LONG]
    environment = os.environ | {"MEGATRON_DIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment)
    output = tmp_path / "work" / "call-1" / "logs" / "one.out"
    wait_for(lambda: output.exists() and output.read_text() == "begun\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert output.read_text() == "begun\ntidied\n"


def test_results_of_another_machine_or_batch_are_not_continued(tmp_path: Path):
    file = tmp_path / results.FILE
    steps: dict[str, Any] = {"a": StepResult(PASSED, 1)}
    file.write_bytes(results.encoded(Results(False, ["NVIDIA H100"], 64, steps=steps)))
    assert results.continued([file], Results(False, ["NVIDIA H100"], 64)).passed("a")
    with pytest.raises(Problem, match="has the results of NVIDIA H100 with 64 samples an iteration, and this is"):
        results.continued([file], Results(False, ["NVIDIA H200"], 64))
    with pytest.raises(Problem, match="and this is NVIDIA H100 with 32"):
        results.continued([file], Results(False, ["NVIDIA H100"], 32))
    file.write_text(json.dumps({"rehearsal": "yes"}))
    with pytest.raises(Problem, match="cannot be continued"):
        results.continued([file], REHEARSAL)


def test_a_run_that_was_refused_has_no_row_and_the_others_go_on(run: Run, tmp_path: Path):
    """A launcher that refuses leaves no record."""
    refused = Step("refused", ["sh", "-c", "exit 2"], figures=lambda: measured(tmp_path / "absent", "native ddp"))
    assert run(refused, Step("next", ["true"])) == {"refused": FAILED, "next": PASSED}
    assert "| refused" in (tmp_path / "results" / "README.md").read_text()


def test_large_files_stay_out_of_the_records(run: Run, tmp_path: Path):
    """What fetches the archive takes 16 MiB."""
    large, small = (f"head -c {size}000000 /dev/urandom >{tmp_path}/call-1" for size in (15, 9))
    fill = f"{large}/big.json; {small}/b.log"
    assert run(Step("noise", ["sh", "-c", fill])) == {"noise": PASSED}
    archive = tmp_path / "results" / "records-1.tar.gz"
    assert archive.stat().st_size < 16 << 20
    with tarfile.open(archive) as records:
        assert {"records/b.log", "records/logs/noise.log"} <= set(records.getnames())
        assert "records/big.json" not in records.getnames()


def test_the_reason_is_the_last_error_in_a_steps_output(tmp_path: Path):
    log = tmp_path / "log"
    for text, reason in (
        ("error: first\nerror: second\n       remedy\n", "error: second"),
        ("Traceback\nValueError: bad\n", "ValueError: bad"),
        ("just words\n\n", "just words"),
        ("", "it wrote no error"),
    ):
        log.write_text(text)
        assert reason_in(log) == reason
