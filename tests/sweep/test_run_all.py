"""The sweep over the strategies: what it plans, in which order, what it skips and what it tries again."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from harness import STRATEGIES, Project, processes_with, wait_for

# The comparison has tests of its own; here it says what it was given.
COMPARE_STUB = "import json, sys; print(json.dumps(sys.argv[1:]))"


def add_to_torchrun(project: Project, lines: str) -> None:
    project.add_stub("torchrun", (project.stubs / "torchrun").read_text().replace("\n", f"\n{lines}\n", 1))


@pytest.fixture
def sweep(project: Project) -> Project:
    """A project whose torchrun can be told by a file which strategies fail, and whose comparison is a stub."""
    python = shlex.quote(project.environment["PYTHON"])
    (project.stubs / "compare.py").write_text(COMPARE_STUB)
    project.add_stub(
        "python-stub",
        "#!/usr/bin/env bash\n"
        f'[[ "$2 $3" != "t5bench compare" ]] || exec {python} "$STUB_DIR/compare.py" "${{@:3}}"\n'
        f'exec {python} "$@"\n',
    )
    project.environment["PYTHON"] = "python-stub"
    add_to_torchrun(
        project,
        'printf "%s %s\\n" "$WANDB_RUN_GROUP" "$*" >>"$STUB_DIR/order"\n'
        'for word in $(cat "$STUB_DIR/fails" 2>/dev/null); do\n'
        '  if [[ $* == *"/$word/"* ]]; then echo "ValueError: broken"; exit 1; fi\n'
        "done",
    )
    return project


def run_all(project: Project, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(project.script("run_megatron_t5_all.sh")), *arguments],
        env=project.environment_with(environment),
        cwd=project.root.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def order(project: Project) -> list[tuple[str, int]]:
    """(repeat/row, processes) of each torchrun so far."""
    found = []
    for line in (project.stubs / "order").read_text().splitlines():
        row = re.search(r"/(repeat\d+/[^/]+)/tensorboard", line)
        processes = re.search(r"--nproc_per_node (\d+)", line)
        assert row and processes
        found.append((row[1], int(processes[1])))
    return found


def test_repeats_are_interleaved_and_every_world_size_has_its_baseline(sweep: Project):
    result = run_all(sweep, STRATEGIES="ddp zero1 hybrid", REPEATS="2")
    assert result.returncode == 0, result.stderr
    rows = [("ddp", 2), ("zero1", 2), ("hybrid", 4), ("ddp-4", 4)]
    assert order(sweep) == [(f"repeat{repeat}/{row}", count) for repeat in (1, 2) for row, count in rows]
    progress = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert len(progress) == 8
    assert all("complete, 1600.0 samples/s" in line for line in progress)
    runs = sweep.root / "outputs" / "all"
    expected = [str(runs / f"repeat{repeat}" / row) for repeat in (1, 2) for row, _ in rows]
    compared = json.loads(result.stdout)
    assert compared == ["compare", *expected, "--output", str(runs / "comparison")]


def test_all_strategies_are_planned_without_being_named(sweep: Project):
    result = run_all(sweep, "--dry-run")
    assert result.returncode == 0, result.stderr
    planned = [line.rpartition("/")[2] for line in result.stdout.splitlines()]
    assert set(planned) == {*STRATEGIES, "ddp-4"}
    assert not sweep.was_started()


def test_without_ddp_there_is_no_baseline_to_add(sweep: Project):
    assert run_all(sweep, STRATEGIES="zero1 hybrid").returncode == 0
    assert [row for row, _ in order(sweep)] == ["repeat1/zero1", "repeat1/hybrid"]


def test_one_number_of_processes_for_all_needs_one_baseline(sweep: Project):
    assert run_all(sweep, STRATEGIES="ddp hybrid", NPROC_PER_NODE="4").returncode == 0
    assert order(sweep) == [("repeat1/ddp", 4), ("repeat1/hybrid", 4)]


def test_complete_runs_are_skipped_and_failed_ones_tried_again(sweep: Project):
    (sweep.stubs / "fails").write_text("zero1")
    result = run_all(sweep, STRATEGIES="ddp zero1", RETRIES="0")
    assert "FAILED (crashed): ValueError: broken" in result.stderr
    (sweep.stubs / "fails").unlink()
    (sweep.stubs / "order").unlink()
    again = run_all(sweep, STRATEGIES="ddp zero1", RETRIES="0")
    assert "ddp     complete already" in re.sub(" +complete", "     complete", again.stderr)
    assert [row for row, _ in order(sweep)] == ["repeat1/zero1"]
    listed = run_all(sweep, "--dry-run", STRATEGIES="ddp zero1").stdout
    assert listed.count("complete  ") == 2


def test_a_run_that_was_refused_keeps_nothing_but_itself_out_of_the_comparison(sweep: Project):
    (index,) = sweep.root.rglob("*_text_document.idx")
    add_to_torchrun(sweep, f"[[ $* != */zero1/* ]] || rm {shlex.quote(str(index))}")
    result = run_all(sweep, STRATEGIES="ddp zero1 zero2", RETRIES="0")
    assert result.returncode == 1
    assert "repeat1/zero2 left no record, and is not in the comparison" in result.stderr
    compared = json.loads(result.stdout)[1:-2]
    assert [Path(directory).name for directory in compared] == ["ddp", "zero1"]


def test_a_sweep_that_could_start_nothing_says_so(sweep: Project):
    add_to_torchrun(sweep, 'echo "EADDRINUSE, message: address already in use"; exit 1')
    result = run_all(sweep, STRATEGIES="ddp zero1", RETRIES="0")
    assert result.returncode == 2
    assert result.stderr.count("configuration: the rendezvous port is taken") == 2


def test_a_failed_run_is_tried_again_after_the_others(sweep: Project):
    (sweep.stubs / "fails").write_text("ddp")
    result = run_all(sweep, STRATEGIES="ddp zero1")
    assert [row for row, _ in order(sweep)] == ["repeat1/ddp", "repeat1/zero1", "repeat1/ddp"]
    assert "trying again what failed" in result.stderr


def test_runs_of_one_sweep_share_a_group(sweep: Project, tmp_path: Path):
    assert run_all(sweep, STRATEGIES="ddp", RUNS_DIR=str(tmp_path / "my trial")).returncode == 0
    assert (sweep.stubs / "order").read_text().startswith("my trial ")
    record = json.loads((tmp_path / "my trial" / "repeat1" / "ddp" / "run.json").read_text())
    assert record["settings"]["WANDB_RUN_GROUP"] == "my trial"


def test_a_strategy_that_cannot_run_here_is_named_and_left_out(sweep: Project):
    sweep.set_gpus(2)
    result = run_all(sweep, "--dry-run", STRATEGIES="ddp hybrid")
    assert result.returncode == 0, result.stderr
    assert "hybrid cannot run here: NPROC_PER_NODE is 4 but this node has 2 visible GPU(s)" in result.stderr
    assert [line.rpartition("/")[2] for line in result.stdout.splitlines()] == ["ddp"]


def test_wrong_use_is_refused_before_anything_runs(sweep: Project):
    for arguments, settings, message in (
        (["--fast"], {}, "unknown argument '--fast'"),
        ([], {"STRATEGIES": "ddp zero9"}, "there is no strategy 'zero9'"),
        ([], {"REPEATS": "0"}, "REPEATS must be a whole number of at least 1"),
        ([], {"STRATEGIES": "ddp", "MICRO_BATCH_SIZE": "3"}, "GLOBAL_BATCH_SIZE=16 is not divisible"),
    ):
        result = run_all(sweep, *arguments, **settings)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
    assert not sweep.was_started()


def test_ctrl_c_ends_the_run_and_the_sweep_and_the_same_command_goes_on(sweep: Project):
    process = subprocess.Popen(
        ["bash", str(sweep.script("run_megatron_t5_all.sh"))],
        env=sweep.environment_with({"STUB_SLEEP": "300", "STRATEGIES": "ddp zero1"}),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for((sweep.stubs / "started").exists)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "nothing is left running" in errors
    assert processes_with(f"STUB_DIR={sweep.stubs}") == []
    assert run_all(sweep, STRATEGIES="ddp zero1").returncode == 0
    assert [row for row, _ in order(sweep)] == ["repeat1/ddp", "repeat1/ddp", "repeat1/zero1"]
