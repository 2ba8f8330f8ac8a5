"""Whole and broken checkpoints, what may go on from them, and how nodes agree on one."""

import json
import os
import re
import socket
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Project
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import SETTINGS, make_run

from t5bench.compare.statistics import RESUMED, WARM_UP, timing
from t5bench.plan.ports import free_port
from t5bench.record import checkpoints
from t5bench.record.checkpoints import FIXED_SETTINGS, CheckpointError, Checkpoints, Node, Shape, agree, damage, misfits
from t5bench.record.records import load, read_metrics

DDP = Shape("native", 0, "", tp=1, pp=1, dp=2)
# What the engines wrote, listed from real runs: (engine, ZeRO stage, precision, TP, PP, DP) and the files of all ranks.
WRITTEN = {
    ("native", 0, "--bf16", 1, 1, 2): "mp_rank_00/model_optim_rng.pt random_00000.pt random_00001.pt",
    ("native", 0, "--bf16", 2, 2, 1): "mp_rank_00_000/model_optim_rng.pt mp_rank_00_001/model_optim_rng.pt "
    "mp_rank_01_000/model_optim_rng.pt mp_rank_01_001/model_optim_rng.pt "
    "random_00000.pt random_00001.pt random_00002.pt random_00003.pt",
    ("native", 2, "--bf16", 1, 1, 2): "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt "
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt mp_rank_00_model_states.pt random_00000.pt random_00001.pt",
    ("native", 3, "--bf16", 1, 1, 2): "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt "
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt random_00000.pt random_00001.pt "
    "zero_pp_rank_0_mp_rank_00_model_states.pt zero_pp_rank_1_mp_rank_00_model_states.pt",
    ("megatron", 0, "", 2, 1, 1): "mp_rank_00/model_optim_rng.pt mp_rank_01/model_optim_rng.pt",
    ("megatron", 0, "", 1, 2, 1): "mp_rank_00_000/model_optim_rng.pt mp_rank_00_001/model_optim_rng.pt",
    ("megatron", 1, "", 1, 1, 2): "mp_rank_00_model_states.pt zero_pp_rank_0_mp_rank_00_optim_states.pt "
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
}


def save(path: Path, content: bytes = b"weights" * 100) -> None:
    """A file as torch.save makes them: a zip archive with its tensors uncompressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"pickle")
        archive.writestr("archive/data/0", content)


def write_checkpoint(directory: Path, iteration: int, shape: Shape = DDP) -> Path:
    folder = directory / shape.directory(iteration)
    for name in shape.files(range(shape.tp * shape.pp * shape.dp)):
        save(folder / name)
    return folder


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", WRITTEN, ids=str)
def test_the_files_of_a_checkpoint(shape: tuple):
    made = Shape(*shape)
    assert made.files(range(made.tp * made.pp * made.dp)) == sorted(WRITTEN[shape].split())


def test_directories_are_named_as_the_engines_do():
    assert DDP.directory(20) == "iter_0000020"
    assert replace(DDP, zero_stage=1).directory(20) == "iter_0000020"
    assert Shape("megatron", 0, "", 1, 1, 2).directory(20) == "iter_0000020"
    assert Shape("megatron", 3, "", 1, 1, 2).directory(20) == "global_step20"


def test_a_node_reads_the_files_of_its_ranks():
    # Two nodes with two ranks each: TP within a node, the second stage on the second node.
    hybrid = Shape("native", 0, "", tp=2, pp=2, dp=1)
    assert hybrid.files(range(2, 4)) == [
        "mp_rank_00_001/model_optim_rng.pt", "mp_rank_01_001/model_optim_rng.pt", "random_00002.pt", "random_00003.pt",
    ]  # fmt: skip
    # 2 x 2 x 2: rank 5 is TP 1, DP 0, stage 1; its neighbour in data parallelism is rank 7.
    cube = Shape("megatron", 0, "", tp=2, pp=2, dp=2)
    assert cube.files([5]) == cube.files([7]) == ["mp_rank_01_001/model_optim_rng.pt"]
    assert Shape("megatron", 2, "--bf16", 1, 1, 4).files([3]) == [
        "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def saved_by_torch(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch = pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("torch") / "weights.pt"
    torch.save({"weight": torch.arange(300.0), "bias": torch.ones(7), "empty": torch.empty(0), "step": 3}, path)
    return path.read_bytes()


def test_what_torch_saves_is_whole(saved_by_torch: bytes, tmp_path: Path):
    (tmp_path / "weights.pt").write_bytes(saved_by_torch)
    assert damage(tmp_path / "weights.pt") == ""


@settings(max_examples=150, deadline=None)
@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_anywhere_is_recognised(saved_by_torch: bytes, tmp_path_factory, kept: float):
    path = tmp_path_factory.getbasetemp() / "cut.pt"
    path.write_bytes(saved_by_torch[: int(kept * len(saved_by_torch))])
    assert damage(path).startswith("is cut off (it has ")


def test_a_file_with_a_hole_is_recognised(saved_by_torch: bytes, tmp_path: Path):
    """As a machine leaves it that lost power: the right size, and zeros where blocks were not written yet."""
    start = saved_by_torch.index(b"\x00\x00\x80\x3f\x00\x00\x00\x40")  # 1.0 and 2.0 of the tensor
    (tmp_path / "hole.pt").write_bytes(saved_by_torch[:start] + bytes(64) + saved_by_torch[start + 64 :])
    assert "does not have its checksum" in damage(tmp_path / "hole.pt")
    assert damage(tmp_path / "nowhere.pt") == "is missing"


# ---- one node -------------------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint(tmp_path: Path):
    found = Checkpoints(tmp_path, DDP, range(2))
    assert found.newest() == (0, {})
    for iteration in (5, 10, 20, 30):
        write_checkpoint(tmp_path, iteration)
    assert found.newest() == (30, {})
    cut_off(tmp_path / "iter_0000030" / "mp_rank_00" / "model_optim_rng.pt")
    (tmp_path / "iter_0000020" / "random_00001.pt").unlink()
    iteration, faults = found.newest()
    assert iteration == 10
    assert re.fullmatch(r"iter_0000030/mp_rank_00/model_optim_rng.pt is cut off \(it has \d+ bytes\)", faults[30])
    assert faults[20] == "iter_0000020/random_00001.pt is missing"
    assert found.newest(limit=9) == (5, {})
    # The node with rank 0 alone does not need the file of rank 1.
    assert Checkpoints(tmp_path, DDP, [0]).newest() == (20, {30: faults[30]})


def test_the_engines_are_pointed_to_it_and_newer_ones_set_aside(tmp_path: Path):
    shape = Shape("megatron", 1, "", 1, 1, 2)
    for iteration in (10, 20):
        write_checkpoint(tmp_path, iteration, shape)
    (tmp_path / "latest").write_text("global_step20")
    for _ in range(2):  # and again, after an attempt that wrote 20 anew and died
        Checkpoints(tmp_path, shape, range(2)).point_to(10)
        assert (tmp_path / "latest").read_text() == "global_step10"
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
        assert Checkpoints(tmp_path, shape, range(2)).iterations() == [10]
        write_checkpoint(tmp_path, 20, shape)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "global_step10", "global_step20", "global_step20.passed-over", "global_step20.passed-over.1", "latest",
        "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


# ---- the run that wrote it ------------------------------------------------------------------------------------------


PART = {
    "strategy": "ddp", "engine": "native", "layout": {"tp": 1, "pp": 1, "dp": 2},
    "settings": SETTINGS | {"TRAIN_ITERS": "100", "LOG_INTERVAL": "1"},
}  # fmt: skip


def differences(layout: dict | None = None, strategy: str = "ddp", engine: str = "native", **changes: str) -> list[str]:
    wanted = PART["settings"] | changes
    return misfits(PART, settings=wanted, layout=layout or PART["layout"], strategy=strategy, engine=engine)


def test_what_differs_is_named():
    assert differences() == []
    assert differences(LR="1e-4", SAVE_INTERVAL="7", EVAL_ITERS="3", WANDB_MODE="disabled") == []
    assert differences(SEED="5") == ["SEED is '5' here and was '1234'"]
    assert differences(GLOBAL_BATCH_SIZE="32", PRECISION_FLAG="--bf16") == [
        "GLOBAL_BATCH_SIZE is '32' here and was '16'", "PRECISION_FLAG is '--bf16' here and was ''",
    ]  # fmt: skip
    assert differences({"tp": 1, "pp": 1, "dp": 4}) == ["the layout is TP=1 PP=1 DP=4 here and was TP=1 PP=1 DP=2"]
    assert differences(strategy="zero1", engine="megatron") == [
        "the strategy is 'zero1' here and was 'ddp'", "the engine is 'megatron' here and was 'native'",
    ]  # fmt: skip


def test_every_fixed_setting_is_one_of_the_launchers(project: Project):
    help_text = project.launch("ddp", "--help").stdout
    assert [name for name in FIXED_SETTINGS if not re.search(rf"^  {name} ", help_text, re.MULTILINE)] == []


# ---- all nodes ------------------------------------------------------------------------------------------------------


def agreed(*views: list[int], seconds: float = 20, runs: tuple[str, ...] = ()) -> list[int | str]:
    """What each node ends with, an iteration or a refusal, when these are the whole checkpoints that they have."""
    port, results, asked = free_port(), [None] * len(views), []

    def take_part(rank: int) -> None:
        def newest(limit: int | None) -> tuple[int, str]:
            asked.append((rank, limit))
            return max((i for i in views[rank] if limit is None or i <= limit), default=0), "something is missing"

        run = runs[rank] if runs else "ddp"
        try:
            results[rank] = agree(Node(rank, len(views), "127.0.0.1", port, run), newest, seconds)
        except CheckpointError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in reversed(range(len(views)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_nodes_take_the_newest_that_all_have():
    assert agreed([10, 20]) == [20]
    assert agreed([10, 20], [10, 20]) == [20, 20]
    assert agreed([10, 20, 30], [10, 20], [5, 10, 30]) == [10, 10, 10]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sets(st.integers(1, 6), min_size=1).map(sorted), min_size=2, max_size=4))
def test_nodes_agree_whatever_they_have(views: list[list[int]]):
    common = set.intersection(*map(set, views))
    results = agreed(*views)
    if common:
        assert results == [max(common)] * len(views)
    else:
        assert len(set(results)) == 1
        assert "there is no whole checkpoint to resume from on node" in results[0]


def test_a_node_without_any_is_named_to_all():
    results = agreed([10, 20], [])
    host = socket.gethostname()
    refusal = f"there is no whole checkpoint to resume from on node 1 ({host}): something is missing"
    assert results == [refusal, refusal]


def test_a_node_of_another_run_is_refused():
    results = agreed([10], [10], seconds=1, runs=("ddp", "zero1"))
    assert results[0] == "node 1 did not say in time which checkpoint it has"
    assert results[1] == "node 0 resumes 'ddp' and expects each of its 2 nodes once"


def test_a_node_that_does_not_come_is_named():
    port, started = free_port(), time.monotonic()
    with pytest.raises(CheckpointError, match="node 1, 2 did not say in time"):
        agree(Node(0, 3, "127.0.0.1", port, "ddp"), lambda limit: (10, ""), 0.5)
    with pytest.raises(CheckpointError, match="did not answer in time"):
        agree(Node(1, 2, "127.0.0.1", port, "ddp"), lambda limit: (10, ""), 0.5)
    assert time.monotonic() - started < 20


# ---- the record of a resumed run ------------------------------------------------------------------------------------


def metrics_of(directory: Path, *attempts: tuple[int, int, float], torn: str = "") -> Path:
    """metrics.jsonl of attempts (resumed from, last iteration, ms per iteration); `torn` is half a line of each."""
    path = directory / "metrics.jsonl"
    path.unlink(missing_ok=True)
    for begin, last, elapsed in attempts:
        if begin:
            checkpoints.mark_resume(path, begin)
        with path.open("a") as file:
            for number in range(begin + 1, last + 1):
                values = {"iteration": number, "total": 100, "elapsed_ms": elapsed, "lm_loss": 8.0}
                values |= {"learning_rate": 1e-4, "samples_per_second": 1.0, "tflops": 0.1}
                file.write(json.dumps(values) + "\n")
            file.write(torn)
    return path


@pytest.mark.parametrize("torn", ["", '{"iteration": 9'])
def test_a_later_attempt_supersedes_what_came_after_its_checkpoint(tmp_path: Path, torn: str):
    lines = read_metrics(metrics_of(tmp_path, (0, 37, 100), (30, 33, 200), (20, 25, 300), torn=torn))
    assert [line.iteration for line in lines] == list(range(1, 26))
    assert [line.elapsed_ms for line in lines] == [100] * 20 + [300] * 5
    assert [line.begin for line in lines] == [0] * 20 + [20] * 5


def test_twenty_iterations_after_a_resume_are_not_steady_state(tmp_path: Path):
    make_run(tmp_path, "ddp", elapsed_ms=[100.0] * 100)
    metrics_of(tmp_path, (0, 50, 100), (40, 100, 100))
    run = load(tmp_path)
    found = timing(run.iterations, run.record["settings"])
    assert [i for i, why in found.dropped.items() if why == WARM_UP] == list(range(1, 21))
    assert [i for i, why in found.dropped.items() if why == RESUMED] == list(range(41, 61))
    assert found.used == [*range(21, 41), *range(61, 101)]
    assert not found.warning


def test_a_run_resumed_near_its_end_counts_what_came_before(tmp_path: Path):
    lines = read_metrics(metrics_of(tmp_path, (0, 90, 100), (90, 100, 500)))
    found = timing(lines, SETTINGS | {"LOG_INTERVAL": "1"})
    assert found.milliseconds.median == 100
    assert found.used[-1] == 90


# ---- the launchers --------------------------------------------------------------------------------------------------


def died(project: Project, *iterations: int, strategy: str = "ddp", shape: Shape = DDP, **environment: str) -> Path:
    """A run directory of a failed run on the native engine with these checkpoints; its checkpoints."""
    environment = {"ENGINE": "native", "TRAIN_ITERS": "100", "SAVE_INTERVAL": "10", "PRECISION_FLAG": ""} | environment
    project.environment |= environment
    assert project.launch(strategy, STUB_STATUS="1").returncode == 1
    (project.stubs / "arguments").unlink()
    directory = project.root / "outputs" / strategy / "checkpoints"
    for iteration in iterations:
        write_checkpoint(directory, iteration, shape)
    return directory


def test_the_launcher_resumes_from_the_newest_whole_one(project: Project):
    directory = died(project, 10, 20)
    cut_off(directory / "iter_0000020" / "random_00001.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("")  # the run died while it wrote this
    result = project.launch("ddp", RESUME="1")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("iteration 20 is passed over: iter_0000020/random_00001.pt is cut off") == 1
    assert "resuming from the checkpoint of iteration 10\n" in result.stderr
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert (directory / "iter_0000020.passed-over").is_dir()
    arguments = project.recorded_arguments()
    assert arguments[arguments.index("--load") + 1] == str(directory)
    run = project.root / "outputs" / "ddp"
    assert '{"resumed_from": 10}' in (run / "metrics.jsonl").read_text().splitlines()
    assert (run / "node0.json.1").is_file()


def test_deepspeed_is_pointed_to_it_too(project: Project):
    directory = died(project, 10, strategy="zero2", shape=Shape("megatron", 2, "--bf16", 1, 1, 2), ENGINE="megatron",
                     PRECISION_FLAG="--bf16")  # fmt: skip
    result = project.launch("zero2", RESUME="1")
    assert result.returncode == 0, result.stderr
    assert (directory / "latest").read_text() == "global_step10"


def refused(project: Project, **environment: str) -> str:
    result = project.launch("ddp", RESUME="1", **environment)
    assert result.returncode == 2
    assert not project.was_started()
    return result.stderr


def test_what_cannot_be_resumed_is_refused(project: Project):
    directory = died(project)
    assert f"error: RESUME=1 but there is no checkpoint in {directory}\n" in refused(project)
    write_checkpoint(directory, 10)
    assert "SEED is '5' here and was '1234'\n" in refused(project, SEED="5")
    assert "GLOBAL_BATCH_SIZE is '32' here and was '16'" in refused(project, GLOBAL_BATCH_SIZE="32")
    assert "the layout is TP=1 PP=1 DP=4 here and was TP=1 PP=1 DP=2\n" in refused(project, NPROC_PER_NODE="4")
    assert "TRAIN_ITERS is '200' here and was '100'" in refused(project, TRAIN_ITERS="200")
    (directory / "iter_0000010" / "random_00000.pt").unlink()
    assert "to resume from: iter_0000010/random_00000.pt is missing\n" in refused(project)
    write_checkpoint(directory, 100)
    assert "already at iteration 100 of 100" in refused(project)
    assert sorted(path.name for path in directory.iterdir()) == ["iter_0000010", "iter_0000100"], "nothing was changed"


def test_other_data_are_refused(project: Project):
    died(project, 10)
    project.data_prefix.with_suffix(".bin").write_bytes(b"\1\0" * 20)
    assert "xsum_text_document.bin is not what the run was trained on\n" in refused(project)


def test_a_dry_run_says_what_it_would_resume_and_changes_nothing(project: Project):
    directory = died(project, 10, 20)
    (directory / "iter_0000020" / "random_00001.pt").unlink()
    result = project.launch("ddp", "--dry-run", RESUME="1")
    assert result.returncode == 0
    assert "iteration 20 is passed over: iter_0000020/random_00001.pt is missing" in result.stderr
    assert sorted(path.name for path in directory.iterdir()) == ["iter_0000010", "iter_0000020"]
    result = project.launch("ddp", "--dry-run", RESUME="1", SEED="5")
    assert result.returncode == 0
    assert "a real run would stop here: the run in" in result.stderr


def test_a_run_that_goes_on_is_not_resumed(project: Project):
    directory = died(project, 10)
    status = directory.parent / "node0.status"
    status.write_text(f"running {Path('/proc/sys/kernel/hostname').read_text().strip()} {os.getpid()}\n")
    assert f"a run is going on in {directory.parent} (process {os.getpid()})" in refused(project)


def test_an_unfinished_first_checkpoint_is_not_written_into(project: Project):
    directory = died(project, 10)
    cut_off(directory / "iter_0000010" / "random_00000.pt")
    result = project.launch("ddp")
    assert result.returncode == 2
    assert "holds checkpoints of an earlier run (up to iteration 10)" in result.stderr
