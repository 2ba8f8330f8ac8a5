"""RESUME=1: what may go on from a checkpoint, how nodes agree on one, and what the launchers make of it."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import change, cut_off, made_checkpoints, made_plan, make_run, write_checkpoint
from support import Project, processes_with, wait_for, write_indexed_dataset

from t5bench import Problem
from t5bench.checkpoint_form import SEAL
from t5bench.plan import channel
from t5bench.plan.channel import Endpoint
from t5bench.plan.ports import free_port, peer_port
from t5bench.plan.resume import View, agreed, changes, checkpoint, misfits
from t5bench.record import machine
from t5bench.record.checkpoints import Checkpoints
from t5bench.record.plan import Plan

EXTRA = ("--init-method-std", "0.02")


@pytest.fixture
def died(tmp_path: Path) -> Callable[..., Plan]:
    """died(10, 20): a run directory with a record and these checkpoints; the plan of a run that would go on, and may
    differ."""

    def make(
        *iterations: int, strategy: str = "ddp", extra: tuple = EXTRA, world_size: int = 2, **changes: str
    ) -> Plan:
        settings = {"TRAIN_ITERS": "30", "OUTPUT_DIR": str(tmp_path / "run"), **changes}
        if not (tmp_path / "run").exists():
            make_run(tmp_path / "run", settings=settings, engine="native", extra_arguments=EXTRA)
            write_indexed_dataset(tmp_path / "data", [[5, 6, 1]])
            change(tmp_path / "run", data=machine.data(tmp_path / "data", ""))
        plan = made_plan(strategy, settings, world_size=world_size, engine="native", extra_arguments=extra)
        for iteration in iterations:
            write_checkpoint(Checkpoints(plan), iteration)
        return replace(plan, data_prefix=str(tmp_path / "data"))

    return make


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, []),
        ({"LR": "1e-4", "SAVE_INTERVAL": "7", "EVAL_ITERS": "3", "WANDB_MODE": "disabled"}, []),
        ({"extra": ("--init-method-std", "0.5")}, ["--init-method-std is '0.5' here and was '0.02'"]),
        ({"extra": ()}, ["--init-method-std is 'not given' here and was '0.02'"]),
        ({"extra": (*EXTRA, "--finetune", "--load", "/other", "--exit-interval", "3")}, []),
        ({"GLOBAL_BATCH_SIZE": "32", "PRECISION_FLAG": "--bf16"},
         ["GLOBAL_BATCH_SIZE is '32' here and was '16'", "PRECISION_FLAG is '--bf16' here and was ''"]),
        # A longer run is one with another schedule, unless it keeps the former.
        ({"TRAIN_ITERS": "60"}, ["TRAIN_ITERS is '60' here and was '30'", "LR_DECAY_ITERS is '60' here and was '30'"]),
        ({"TRAIN_ITERS": "60", "LR_DECAY_ITERS": "30", "RESUME_CHANGES": "TRAIN_ITERS"}, []),
        ({"LR": "0.5", "CLIP_GRAD": "2", "RESUME_CHANGES": "LR"}, ["CLIP_GRAD is '2' here and was '1'"]),
        # The native engine's strategies, layouts and methods continue each other.
        ({"strategy": "zero1", "world_size": 4, "RECOMPUTE": "full"}, []),
    ],
)  # fmt: skip
def test_what_differs_is_named(died: Callable[..., Plan], changes: dict, differences: list[str]):
    died()
    assert [each.sentence for each in misfits(died(**changes))] == differences


@pytest.mark.parametrize(
    ("model", "is_free"),
    [
        ({"MODEL_FAMILY": "gpt", "DROPOUT": "0"}, True),
        ({"MODEL_FAMILY": "gpt", "DROPOUT": "0.1"}, False),
        ({"MODEL_FAMILY": "t5", "DROPOUT": "0"}, False),
    ],
)
def test_other_micro_batches_are_refused_where_they_change_the_curve(
    died: Callable[..., Plan], model: dict[str, str], is_free: bool
):
    died(10, **model)
    other = died(MICRO_BATCH_SIZE="4", world_size=4, **model)
    if is_free:
        assert checkpoint(other, agree=False) == 10
        assert "MICRO_BATCH_SIZE is '4' here and was '1'" in changes(other, 10).told
        return
    with pytest.raises(Problem) as refused:
        checkpoint(other, agree=False)
    assert refused.value.found.endswith("MICRO_BATCH_SIZE is '4' here and was '1'")
    assert "take as many that the data-parallel size times it divides GLOBAL_BATCH_SIZE" in refused.value.remedy


def megatron(directory: Path, strategy: str = "ddp", world_size: int = 2, **settings: str) -> Plan:
    """Of Megatron-DeepSpeed, in a run that DDP began there."""
    chosen = {"TRAIN_ITERS": "30", "OUTPUT_DIR": str(directory), **settings}
    if not directory.exists():
        make_run(directory, settings=chosen, engine="megatron")
        write_checkpoint(Checkpoints(made_plan("ddp", chosen, world_size=2, engine="megatron")), 10)
    return made_plan(strategy, chosen, world_size=world_size, engine="megatron")


def test_megatron_in_another_layout_is_refused_with_the_command_that_gives_it(tmp_path: Path):
    run = tmp_path / "run"
    assert checkpoint(megatron(run), agree=False) == 10
    with pytest.raises(Problem) as refused:
        checkpoint(megatron(run, "tensor"), agree=False)
    assert f"python -m t5bench reshape {run} --tp 2 --pp 1, then this launcher" in refused.value.remedy
    assert refused.value.remedy.endswith(f"OUTPUT_DIR={run}-tp2-pp1")
    with pytest.raises(Problem) as refused:
        checkpoint(megatron(run, "zero1"), agree=False)
    assert "cannot go on under ZeRO" in refused.value.remedy


def test_a_reshaped_checkpoint_of_megatron_fits_its_layout_on_any_number_of_replicas(tmp_path: Path):
    """The record that reshape keeps says what else must stay the same."""
    run = tmp_path / "run"
    plan = megatron(run)
    (run / "reshaped-from").mkdir()
    (run / "node0.json").rename(run / "reshaped-from" / "node0.json")
    assert checkpoint(megatron(run, world_size=4), agree=False) == 10
    assert refusal(megatron(run, SEED="5")).endswith("SEED is '5' here and was '1234'")
    assert refusal(megatron(run, "tensor")).endswith("the checkpoint is of another layout than TP=2 PP=1")
    assert refusal(megatron(run, "zero1")).endswith("ZeRO cannot continue a reshaped checkpoint")
    Checkpoints(plan).directory.joinpath("weights-only").touch()
    assert "only weights, which are for EVAL_ONLY=1" in refusal(plan)


def test_another_engine_is_refused_with_the_way_that_there_is(died: Callable[..., Plan], tmp_path: Path):
    died(10)
    plan = replace(died(), engine="megatron")
    with pytest.raises(Problem) as refused:
        checkpoint(plan, agree=False)
    assert "the engine is 'megatron' here and was 'native'" in refused.value.found
    run = plan.output_dir
    assert (
        f"python -m t5bench reshape {run} --engine megatron --tp 1 --pp 1, then this launcher" in refused.value.remedy
    )
    with pytest.raises(Problem) as refused:
        checkpoint(replace(died(strategy="zero1"), engine="megatron"), agree=False)
    assert "cannot go on under ZeRO" in refused.value.remedy
    run = tmp_path / "of megatron"
    with pytest.raises(Problem) as refused:
        checkpoint(replace(megatron(run), engine="native"), agree=False)
    assert f"python -m t5bench reshape '{run}' --engine native, then this launcher" in refused.value.remedy


def test_what_changes_is_told(died: Callable[..., Plan]):
    """By another strategy, on more processes, whose iterations are timed apart from those before."""
    plan = died(10)
    assert changes(plan, 10) == ("", 0, 0, 0)
    other = {"strategy": "tensor", "world_size": 4, "RECOMPUTE": "full"}
    told = (
        ": the strategy is 'tensor' here and was 'ddp'; the layout is 'TP=2 PP=1 DP=2' here and was 'TP=1 PP=1 DP=2';"
        " RECOMPUTE is 'full' here and was 'none'. It was saved by DP 2, and is read by TP 2 DP 2"
    )
    assert changes(died(**other), 10).told == told
    assert changes(died(**other, DROPOUT="0.1"), 10).told.endswith(". Dropout's random numbers begin anew")
    # Of the checkpoint that is taken, whatever a newer, damaged one says.
    write_checkpoint(Checkpoints(died(**other)), 20)
    assert changes(plan, 10) == ("", 0, 0, 0)
    assert changes(plan, 20).told == ". It was saved by TP 2 DP 2, and is read by DP 2"
    assert checkpoint(died(strategy="tensor", world_size=4), agree=False) == 20


def test_a_change_of_the_recipe_or_the_batch_is_told(died: Callable[..., Plan]):
    """The plan has where it was, and what was trained until then."""
    died(10)
    changed = died(GLOBAL_BATCH_SIZE="32", LR="0.5", RESUME_CHANGES="LR GLOBAL_BATCH_SIZE")
    found = changes(changed, 10)
    assert found.told == ": GLOBAL_BATCH_SIZE is '32' here and was '16'; LR is '0.5' here and was '0.0001'"
    assert (found.recipe_changed_at, found.trained_samples) == (10, 160)
    planned = replace(changed, resume_from=10, trained_samples=160)
    assert (planned.samples_until(10), planned.samples_until(12)) == (160, 224)
    with pytest.raises(Problem) as refused:
        checkpoint(died(LR="0.5"), agree=False)
    assert refused.value.remedy.endswith("To change them on purpose, add RESUME_CHANGES='LR'")
    assert "RESUME_CHANGES" not in refused_remedy(died(LR="0.5", SEED="5"))
    for other in ({"MICRO_BATCH_SIZE": "2"}, {"MICRO_BATCH_SIZE": "2", "RESUME_CHANGES": "MICRO_BATCH_SIZE"}):
        assert bool(list(misfits(died(**other)))) == ("RESUME_CHANGES" not in other)


def refused_remedy(plan: Plan) -> str:
    with pytest.raises(Problem) as refused:
        checkpoint(plan, agree=False)
    return refused.value.remedy


def test_an_earlier_release_s_checkpoint_is_refused_with_the_command_that_renews_it(died: Callable[..., Plan]):
    plan = died()
    folder = Checkpoints(plan).folder(10)
    for name in ("random_00000.pt", "mp_rank_00/model_optim_rng.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert f"iter_0000010 was saved by an earlier release: python -m t5bench reshape {plan.output_dir}" in refusal(plan)


def refusal(plan: Plan) -> str:
    with pytest.raises(Problem) as refused:
        checkpoint(plan, agree=False)
    return str(refused.value)


def test_a_run_that_cannot_be_resumed_is_refused_and_unchanged(died: Callable[..., Plan]):
    found = Checkpoints(plan := died())
    assert refusal(died(EVAL_ONLY="1")).startswith("EVAL_ONLY=1 but there is no checkpoint")
    died(10)
    other = " cannot be resumed with these settings: SEED is '5' here and was '1234'"
    assert refusal(died(SEED="5")).endswith(other)
    part = Path(plan.output_dir, "node0.json")
    part.rename(f"{part}.1")  # as an attempt that was killed at its start leaves it
    assert refusal(died(SEED="5")).endswith(other)
    (found.folder(10) / "__0_0.distcp").unlink()
    assert refusal(plan).endswith("no intact checkpoint to resume from: iter_0000010/__0_0.distcp is missing")
    (found.folder(10) / SEAL).unlink()
    assert refusal(plan).endswith(f"iter_0000010/{SEAL} is missing: its saving did not end")
    assert refusal(died(30)).endswith("is already at iteration 30 of 30")
    write_indexed_dataset(Path(plan.data_prefix), [[5, 6, 1], [4, 1]])
    assert ".bin is not the file on which the run was trained" in refusal(plan)
    assert sorted(path.name for path in found.directory.iterdir()) == ["iter_0000010", "iter_0000030"]


def test_without_a_checkpoint_a_run_begins_but_a_complete_one_stays(died: Callable[..., Plan]):
    """Every job that is queued again has RESUME=1, also one that died before it saved anything."""
    plan = died()
    metrics = Path(plan.output_dir, "metrics.jsonl")
    assert checkpoint(plan, agree=False) == checkpoint(plan, agree=True) == 0
    metrics.write_text("{}\n")
    assert checkpoint(plan, agree=True) == 0
    assert metrics.read_text() == '{}\n{"resumed_from": 0}\n'
    Path(plan.output_dir, "node0.status").write_text("complete \n\n")
    assert "is complete, and it saved no checkpoint" in refusal(plan)
    assert agreement([], []) == [0, 0]


def test_a_run_whose_end_was_not_recorded_continues_from_an_earlier_checkpoint(died: Callable[..., Plan]):
    plan = died(10, 30)
    status = Path(plan.output_dir, "node0.status")
    status.write_text("crashed the recorder was killed\n\n")
    assert checkpoint(plan, agree=False) == 10
    status.write_text("complete \n\n")
    assert refusal(plan).endswith("is already at iteration 30 of 30")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "RETRY_SECONDS", 0.05)


def agreement(
    *views: list[int], seconds: float = 20, second_run: str = "ddp", contents: Sequence[dict[str, str]] = ({},) * 4
) -> list[int | str]:
    """What each node ends with, an iteration or a refusal, when these are the whole checkpoints that they have."""
    port, results = free_port(), [None] * len(views)

    def take_part(rank: int) -> None:
        def look(limit: int | None) -> View:
            newest = max((i for i in views[rank] if limit is None or i <= limit), default=0)
            return View(newest, "something is missing" if views[rank] else "", f"host{rank}", contents[rank])

        endpoint = Endpoint(rank, len(views), "127.0.0.1", port, second_run if rank else "ddp", b"secret")
        try:
            results[rank] = agreed(endpoint, look(None), look, seconds)
        except Problem as problem:
            results[rank] = str(problem)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in reversed(range(len(views)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sets(st.integers(1, 6), min_size=1).map(sorted), min_size=2, max_size=4))
def test_nodes_agree_on_a_checkpoint(views: list[list[int]]):
    common = set.intersection(*map(set, views))
    results = agreement(*views)
    if common:
        assert results == [max(common)] * len(views)
    else:
        assert len(set(results)) == 1
        assert "there is no intact checkpoint to resume from on node" in str(results[0])


def test_saves_of_two_runs_are_not_one_checkpoint():
    """Also if both are of iteration 10. Only what both have is compared."""
    results = agreement([10], [10], [10], contents=[{"a": "1", "b": "2"}, {"c": "5"}, {"b": "3"}])
    for result in results:
        assert result == (
            "node 0 (host0) and node 2 (host2) have different checkpoints of iteration 10: b is not the same file there"
        )
    assert agreement([10], [10], contents=[{"a": "1", "b": "2"}, {"c": "5", "b": "2"}]) == [10, 10]


def test_a_node_of_another_run_is_refused():
    first, second = agreement([10], [10], seconds=1, second_run="zero1")
    assert first == "node 1 did not report its checkpoint in time"
    assert "did not say which checkpoint to resume from: it belongs to another run, 'ddp'" in str(second)


@pytest.mark.parametrize(("node", "nodes", "absent"), [(0, 3, "1, 2"), (1, 2, "0")])
def test_a_node_that_does_not_join_is_named(node: int, nodes: int, absent: str):
    started, view = time.monotonic(), View(10, "", "here", {})
    with pytest.raises(Problem, match=f"node {absent} did not report its checkpoint"):
        agreed(Endpoint(node, nodes, "127.0.0.1", free_port(), "ddp", b"secret"), view, lambda limit: view, 0.5)
    assert time.monotonic() - started < 20


def test_the_launcher_resumes_from_the_newest_intact_checkpoint(project: Project):
    project.environment |= {"ENGINE": "native", "TRAIN_ITERS": "100", "SAVE_INTERVAL": "10", "PRECISION_FLAG": ""}
    assert project.launch("ddp", STUB_STATUS="1").returncode == 1
    (project.stubs / "arguments").unlink()
    run = project.root / "outputs" / "ddp"
    found = made_checkpoints(run)
    for iteration in (10, 20):
        write_checkpoint(found, iteration)
    cut_off(found.folder(20) / "__1_0.distcp")
    pointer = found.directory / "latest_checkpointed_iteration.txt"
    pointer.write_text("")  # the run died while it wrote this
    passed_over = "iteration 20: iter_0000020/__1_0.distcp is truncated"

    refused = project.launch("ddp", "--", "--seed", "5", RESUME="1")
    assert refused.returncode == 2 and not project.was_started()
    assert "SEED is '5' here and was '1234'\n" in refused.stderr
    planned = project.launch("ddp", "--dry-run", RESUME="1")
    assert planned.returncode == 0 and passed_over in planned.stderr
    assert pointer.read_text() == "" and found.folder(20).is_dir()

    result = project.launch("ddp", RESUME="1")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(passed_over) == 1
    assert "resuming from the checkpoint of iteration 10\n" in result.stderr
    assert pointer.read_text() == "10"
    assert (found.directory / "iter_0000020.passed-over").is_dir()
    arguments = project.recorded_arguments()
    assert arguments[arguments.index("--load") + 1] == str(found.directory)
    assert '{"resumed_from": 10}' in (run / "metrics.jsonl").read_text().splitlines()
    assert (run / "node0.json.1").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_a_launcher_that_ends_while_it_waits_for_another_leaves_no_process(project: Project, number: signal.Signals):
    """A Ctrl-C reaches the whole process group."""
    port = free_port()
    changes = {"ENGINE": "native", "RESUME": "1", "NNODES": "2", "T5_RUN_SECRET": "word", "MASTER_PORT": str(port)}
    command = ["bash", str(project.script("run_megatron_t5_ddp.sh")), "127.0.0.1", "0"]
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    launcher = subprocess.Popen(command, env=project.environment_with(changes), **options)
    with socket.socket() as other:
        wait_for(lambda: other.connect_ex(("127.0.0.1", peer_port(port))) == 0)
    (os.killpg if number == signal.SIGINT else os.kill)(launcher.pid, number)
    assert "Traceback" not in launcher.communicate(timeout=10)[1]
    assert launcher.returncode == -number
    wait_for(lambda: processes_with(f"STUB_DIR={project.stubs}") == [], 10)
