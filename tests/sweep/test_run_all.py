"""The sweep over the strategies: what it plans, in which order, what it skips and what it repeats."""

import json
import os
import re
import shlex
import signal
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from made_runs import make_run, with_values, write_checkpoint
from support import STRATEGIES, Project, processes_with, wait_for

from t5bench import Problem
from t5bench.record import collect
from t5bench.record.checkpoints import Checkpoints
from t5bench.record.records import load
from t5bench.sweep.launch import Launch, Node, PlannedRun, Started
from t5bench.sweep.order import balanced_orders
from t5bench.sweep.sweep import check_settings, progress

# The comparison and its upload have their own tests; here they only print their arguments.
COMMAND_STUB = """
import sys

def run(args):
    print(sys.argv[1], *args.runs, args.output if sys.argv[1] == "compare" else args.comparison, sep="|")
    return 0
"""


def add_to_torchrun(project: Project, lines: str) -> None:
    project.add_stub("torchrun", (project.stubs / "torchrun").read_text().replace("\n", f"\n{lines}\n", 1))


@pytest.fixture
def sweep(project: Project) -> Project:
    """A project whose torchrun can be told by a file which strategies fail, and whose comparison is a stub."""
    for name in ("compare.py", "wandb_report.py"):
        (project.root / "t5bench" / "report" / name).write_text(COMMAND_STUB)
    add_to_torchrun(
        project,
        'printf "%s %s\\n" "$WANDB_RUN_GROUP" "$*" >>"$STUB_DIR/order"\n'
        'for word in $(cat "$STUB_DIR/fails" 2>/dev/null); do\n'
        # A NUL makes a log a binary file for grep, and the rest no text of UTF-8.
        "  if [[ $* == *\"/$word/\"* ]]; then printf 'a\\0b\\377\\n'; echo 'ValueError: broken'; exit 1; fi\n"
        "done",
    )
    return project


def run_all(project: Project, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(project.script("run_megatron_t5_all.sh")), *arguments]
    where = {"env": project.environment_with(environment), "cwd": project.root.parent}
    return subprocess.run(command, **where, capture_output=True, text=True, timeout=120, check=False)


def order(project: Project) -> list[tuple[str, int]]:
    """(repeat/row, processes) of each torchrun so far."""
    lines = (project.stubs / "order").read_text().splitlines()
    found = [re.search(r"--nproc_per_node (\d+) .*/(repeat\d+/[^/]+)/tensorboard", line) for line in lines]
    return [(match[2], int(match[1])) for match in found if match]


def test_repeats_are_interleaved_and_every_world_size_has_its_baseline(sweep: Project, tmp_path: Path):
    """All in the group that the sweep's directory names."""
    runs = tmp_path / "my trial"
    result = run_all(sweep, STRATEGIES="ddp zero1 hybrid", REPEATS="2", RUNS_DIR=str(runs))
    assert result.returncode == 0, result.stderr
    rows = [("ddp", 2), ("zero1", 2), ("hybrid", 4), ("ddp-4", 4)]
    ran = [(f"repeat1/{row}", count) for row, count in rows]
    ran += [(f"repeat2/{row}", count) for row, count in balanced_orders(rows, 2)[1]]
    assert all(ran[place][0][8:] != ran[place + 4][0][8:] for place in range(4))
    assert order(sweep) == ran, "no row comes at the same place twice"
    assert json.loads((runs / "sweep.json").read_text())["runs"] == [name for name, _ in ran]
    progress = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert len(progress) == 8
    assert all("complete, 1600.0 samples/s" in line for line in progress)
    assert "left" in progress[0] and "left" not in progress[-1]
    given = [str(runs / name) for name, _ in ran]
    told = [line.split("|") for line in result.stdout.splitlines() if line]
    assert told == [[command, *given, f"{runs}/comparison"] for command in ("compare", "wandb")]
    assert (sweep.stubs / "order").read_text().startswith("my trial ")
    assert load(runs / "repeat1" / "ddp").plan.value("WANDB_RUN_GROUP") == "my trial"


@pytest.mark.parametrize(
    ("settings", "gpus", "planned"),
    [
        ({}, 0, [*STRATEGIES, "ddp-4"]),
        ({"STRATEGIES": "zero1 hybrid zero1-tp2", "NPROC_PER_NODE": "4"}, 0, ["zero1", "hybrid", "zero1-tp2"]),
        ({"STRATEGIES": "ddp hybrid"}, 2, ["ddp"]),
        ({"STRATEGIES": "ddp", "SLURM_JOB_NODELIST": "a,b", "SLURM_NODEID": "1", "MASTER_ADDR": "a"}, 0, ["ddp"]),
        ({"MODEL_FAMILY": "gpt", "STRATEGIES": "ddp 3d"}, 0, ["ddp", "3d", "ddp-4"]),
    ],
)
def test_what_is_planned(sweep: Project, settings: dict[str, str], gpus: int, planned: list[str]):
    sweep.set_gpus(gpus)
    data = {"MEGATRON_DATA_DIR": str(sweep.data_prefix.parent)}  # each family has a directory of its own
    result = run_all(sweep, "--dry-run", **data, **settings)
    assert all(("/outputs/gpt-all/" in line) == ("MODEL_FAMILY" in settings) for line in result.stdout.splitlines())
    listed = sorted(line.rpartition("/")[2] for line in result.stdout.splitlines())
    assert result.returncode == 0 and listed == sorted(planned), result.stderr
    assert not sweep.was_started()
    stopped = "hybrid cannot run here: NPROC_PER_NODE is 4 but this node has 2 visible GPU(s)" in result.stderr
    assert stopped == bool(gpus)
    left_out = "Left out: 3d (needs MODEL_FAMILY=gpt), fsdp2 (needs ENGINE=native)" in result.stderr
    assert left_out == ("STRATEGIES" not in settings)


def test_complete_runs_are_skipped_and_failed_ones_tried_again(sweep: Project):
    (sweep.stubs / "fails").write_text("ddp")
    result = run_all(sweep, STRATEGIES="ddp zero1", WANDB_MODE="disabled", LC_ALL="C")
    assert [row for row, _ in order(sweep)] == ["repeat1/ddp", "repeat1/zero1", "repeat1/ddp"]
    assert result.stderr.count("FAILED (crashed): ValueError: broken; see ") == 2
    assert "retrying the failed runs" in result.stderr and "wandb|" not in result.stdout
    assert "binary" not in result.stderr
    (sweep.stubs / "fails").unlink()
    checkpoints = Checkpoints(load(sweep.root / "outputs" / "all" / "repeat1" / "ddp").plan)
    write_checkpoint(checkpoints, 2)
    checkpoints.point_to(2)
    again = run_all(sweep, STRATEGIES="ddp zero1", RETRIES="0")
    assert re.search(r"repeat1/zero1 +already complete", again.stderr)
    assert len(order(sweep)) == 4 and " --load " in (sweep.stubs / "order").read_text().splitlines()[-1]
    assert run_all(sweep, "--dry-run", STRATEGIES="ddp zero1").stdout.count("complete  ") == 2
    other = run_all(sweep, STRATEGIES="ddp zero1", LR="0.5", ENGINE="native", NPROC_PER_NODE="4")
    engine, layout = "the engine is 'native' here and was 'megatron'", "the layout is 'TP=1 PP=1 DP=4' here and was "
    assert f"other settings: {engine}; {layout}'TP=1 PP=1 DP=2'; LR is '0.5' here and was '0.0001'" in other.stderr
    assert other.returncode == 2


FASTER_AT_4 = """case " $* " in
*" --micro-batch-size 1 "*) ms=10.0 ;;
*" --micro-batch-size 4 "*) ms=5.0 ;;
*" --micro-batch-size 8 "*) ms=12.0 ;;
*) ms=8.0 ;;
esac"""


def test_each_strategy_also_runs_at_its_best_micro_batch_and_the_fastest_with_another_recipe(sweep: Project):
    """Short runs find it; they and those of the other recipe are no rows, and the same command repeats none of them."""
    add_to_torchrun(sweep, FASTER_AT_4)
    torchrun = (sweep.stubs / "torchrun").read_text()
    sweep.add_stub("torchrun", torchrun.replace("(ms): 10.0", "(ms): $ms"))
    asked = {
        "STRATEGIES": "ddp zero1 zero2-mb8",
        "MICRO_BATCH_SIZE": "1 best",
        "DROPOUT": "0",
        "WANDB_MODE": "disabled",
    }
    recipe = {"RECIPE": "DROPOUT=0.1 CLIP_GRAD=1.5"}
    result = run_all(sweep, **asked, **recipe)
    assert result.returncode == 0, result.stderr
    for name in ("ddp", "zero1"):
        assert re.search(rf"^micro-batch of {name}: 4 \(.*2: 8 ms; 4: 5 ms; 8: 12 ms\)$", result.stderr, re.MULTILINE)
    assert "micro-batch of zero2" not in result.stderr
    runs = sweep.root / "outputs" / "all"
    rows = {"ddp", "zero1", "zero2-mb8", "ddp-mb4", "zero1-mb4"}
    assert {Path(name).name for name in json.loads((runs / "sweep.json").read_text())["runs"]} == rows
    trials = sorted((runs / ".micro-batches").iterdir())
    assert {path.name for path in trials} >= {f"{name}-mb{size}" for name in ("ddp", "zero1") for size in (2, 4, 8)}
    assert {load(path).plan.iterations for path in trials} == {25}
    fastest = {path.name: load(path).plan for path in (runs / ".recipe" / "repeat1").iterdir()}
    assert fastest.keys() == {"ddp-mb4", "zero1-mb4", "ddp"}
    assert {(each.value("DROPOUT"), each.value("CLIP_GRAD")) for each in fastest.values()} == {("0.1", "1.5")}
    assert {each.value("MICRO_BATCH_SIZE") for each in fastest.values()} == {"4", "1"}
    compared = next(line for line in result.stdout.splitlines() if line).split("|")[1:-1]
    assert {Path(directory).name for directory in compared} == rows
    count = len(order(sweep))
    assert "already complete" in run_all(sweep, **asked, **recipe).stderr and len(order(sweep)) == count
    planned = run_all(sweep, "--dry-run", **asked | {"MICRO_BATCH_SIZE": "best"}).stdout
    assert re.search(r"^best of ddp: from micro-batch \d, of 1 2 4 8$", planned, re.MULTILINE)


def test_gradients_are_clipped_to_a_number_among_ddps_own_norms(sweep: Project):
    """Which its short runs tell, so that no recipe for another model is needed. The same command repeats none."""
    norms = "grad norm: $((4 + done % 2)).0 |"
    sweep.add_stub("torchrun", (sweep.stubs / "torchrun").read_text().replace("grad norm: 1.5 |", norms))
    asked = {"STRATEGIES": "ddp zero1", "CLIP_GRAD": "among", "WANDB_MODE": "disabled", "LOG_INTERVAL": "1"}
    planned = run_all(sweep, "--dry-run", **asked)
    assert planned.stdout.startswith("CLIP_GRAD: a number among the gradient norms of short runs of DDP\nrun "), planned
    result = run_all(sweep, **asked)
    assert result.returncode == 0, result.stderr
    assert "DDP's gradient norms are 4 to 5: once more with CLIP_GRAD=4.47\n" in result.stderr
    runs = sweep.root / "outputs" / "all"
    assert {load(runs / "repeat1" / name).plan.value("CLIP_GRAD") for name in ("ddp", "zero1")} == {"4.47"}
    trials = {path.name: load(path).plan for path in (runs / ".clipping").iterdir()}
    assert {name: plan.value("CLIP_GRAD") for name, plan in trials.items()} == {
        "ddp-clip-1.0": "1.0",
        "ddp-clip-4.47": "4.47",
    }
    settings = {(plan.value("TRAIN_ITERS"), plan.value("LR_DECAY_ITERS")) for plan in trials.values()}
    assert settings == {("10", "1000")}, "the beginning of the run of 1,000 iterations"
    count = len((sweep.stubs / "order").read_text().splitlines())
    again = run_all(sweep, **asked)
    assert again.returncode == 0 and "CLIP_GRAD=4.47\n" in again.stderr
    assert len((sweep.stubs / "order").read_text().splitlines()) == count == 4


def test_a_refused_run_is_the_only_one_missing_from_the_comparison(sweep: Project):
    add_to_torchrun(sweep, f"[[ $* != */zero1/* ]] || rm {shlex.quote(str(sweep.data_prefix))}.idx")
    result = run_all(sweep, STRATEGIES="ddp zero1 zero2", RETRIES="0")
    assert result.returncode == 1
    assert "FAILED (configuration): Missing or empty Megatron indexed dataset files: " in result.stderr
    assert "repeat1/zero2 left no record and is missing from the comparison" in result.stderr
    compared = next(line for line in result.stdout.splitlines() if line).split("|")
    assert [Path(directory).name for directory in compared] == ["compare", "ddp", "zero1", "comparison"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"STRATEGIES": "ddp zero9"}, "there is no strategy 'zero9'"),
        ({"STRATEGIES": "ddp fsdp2"}, "fsdp2 needs ENGINE=native"),
        ({"STRATEGIES": "ddp zero1-tp3"}, "do not divide over the tensor-parallel size 3"),
        ({"MICRO_BATCH_SIZE": "4 most"}, "MICRO_BATCH_SIZE must be a whole number of at least 1, found 'most'"),
        ({"RECIPE": "LR=1"}, "RECIPE has 'LR=1'"),
        ({"REPEATS": "0"}, "REPEATS must be a whole number of at least 1"),
        ({"LAUNCH": "ssh"}, "LAUNCH=ssh but no hosts are known"),
        ({"STRATEGIES": "ddp", "MICRO_BATCH_SIZE": "3"}, "ddp: GLOBAL_BATCH_SIZE=16 is not divisible"),
        ({"STRATEGIES": "ddp", "MEGATRON_DATA_DIR": "/nowhere"}, "no strategy can run here"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(sweep: Project, settings: dict[str, str], message: str):
    result = run_all(sweep, **settings)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and result.stderr.count("error: ") == 1
    assert not sweep.was_started()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_signal_ends_the_sweep_and_the_same_command_continues(sweep: Project, number: signal.Signals):
    """A terminal sends Ctrl-C to the whole foreground group; `kill` signals only the sweep."""
    process = subprocess.Popen(
        ["nohup", "bash", str(sweep.script("run_megatron_t5_all.sh"))],
        env=sweep.environment_with({"STUB_SLEEP": "300", "STRATEGIES": "ddp zero1"}),
        cwd=sweep.root,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for((sweep.stubs / "started").exists)
    process.send_signal(signal.SIGHUP)  # which nohup lets it ignore
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"{number.name.removeprefix('SIG')} received: stopped; nothing is left running" in errors
    assert processes_with(f"STUB_DIR={sweep.stubs}") == []
    again = run_all(sweep, STRATEGIES="ddp zero1")
    assert again.returncode == 0, again.stderr
    assert [row for row, _ in order(sweep)] == ["repeat1/ddp", "repeat1/ddp", "repeat1/zero1"], again.stderr


def test_a_layout_that_ddp_would_refuse_starts_on_all_hosts(monkeypatch: pytest.MonkeyPatch):
    """The hosts are asked of DDP's plan, which knows nothing of pipelines."""
    monkeypatch.setenv("HOSTS", "node0 node1")
    launch = Launch({"ENGINE": "native", "DEVICE": "cpu", "PIPELINE_PARALLEL_SIZE": "2"}, over_ssh=True)
    script = launch._script(PlannedRun("pipeline", "pipeline"), Path("/runs/pipeline"), 1, "")
    assert "export HOSTS='node0 node1'" in script and "export PIPELINE_PARALLEL_SIZE=2" in script


def test_a_refused_attempt_leaves_what_the_next_one_resumes(tmp_path: Path):
    run = make_run(tmp_path / "ddp", status="crashed")
    before, launch = load(run), Launch({})
    launch.ask = Mock(side_effect=Problem("why"))
    started = Started(launch, PlannedRun("ddp", "ddp"), run)
    started.nodes.append(Node("", os.environ, run, 0))
    started.nodes[0].send("exit 2")
    started.nodes[0].process.stdin.close()
    started.nodes[0].process.wait()
    assert (started.poll(), started.problems) == (2, ["why"])
    assert load(run) == before
    write_checkpoint(checkpoints := Checkpoints(replace(before.plan, output_dir=str(run))), 2)
    checkpoints.point_to(2)
    row = PlannedRun("ddp", "ddp", plan=with_values(before.plan, {"LR": "0.5"}))
    with pytest.raises(Problem, match=r"ddp holds a run with other settings: LR is '0.5' here and was "):
        check_settings({run: row})
    elsewhere = replace(load(complete := make_run(tmp_path / "done")).plan, device="cuda")
    with pytest.raises(Problem, match="2 processes on cuda here and 1 x 2 processes on cpu then"):
        check_settings({complete: replace(row, plan=elsewhere)})


def test_the_terminal_shows_a_run_in_progress(tmp_path: Path):
    assert progress(tmp_path) == "starting"
    run = make_run(tmp_path / "ddp", elapsed_ms=[100.0] * 30)
    assert progress(run) == "iteration 30/30" and progress(run, bar=True) == f"[{'#' * 20}] iteration 30/30"
    (run / "node0.log").rename(tmp_path / "node1.terminal")
    assert progress(tmp_path) == "iteration 30/30", "of a node whose files are elsewhere"


def test_a_refusal_is_not_the_end_of_an_earlier_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The refusing node still has that attempt's record on its own disk."""
    there, terminal = make_run(tmp_path / "there", status="cancelled"), tmp_path / "node0.terminal"
    monkeypatch.setattr(collect, "local_copy", lambda source: nullcontext(there))
    terminal.write_text("error: the disk is full\n")
    run = Started(SimpleNamespace(ask=lambda *_: SimpleNamespace(obstacles=[])), PlannedRun("ddp", "ddp"), tmp_path)
    process = SimpleNamespace(returncode=2, poll=lambda: 2)
    run.nodes = [Node.__new__(Node)]
    vars(run.nodes[0]).update(host="node0", rank=0, part=tmp_path / "node0.json", output=terminal, process=process)
    assert (run.poll(), run.problems) == (2, ["node0: the disk is full"])
