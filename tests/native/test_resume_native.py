"""The native engine's runs die and go on, through the launchers: the loss curve is that of a run that did not die."""

import shutil
from pathlib import Path

import pytest
from dying_runs import ITERATIONS, LAST, SAVE_INTERVAL, Runs, assert_goes_on, curve
from native_runs import TOKENIZER

from t5bench.plan.ports import free_port

pytestmark = pytest.mark.slow


def settings_of(native_data: Path) -> dict[str, str]:
    return {"ENGINE": "native", "MEGATRON_DATA_DIR": str(native_data.parent), "TOKENIZER_MODEL": str(TOKENIZER)}


DAMAGES = {
    "ddp": ("iter_0000016/mp_rank_00/model_optim_rng.pt", "cut off"),
    "zero2": ("iter_0000016/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "missing"),
}


@pytest.mark.parametrize("strategy", DAMAGES)
def test_a_killed_run_continues_exactly(native_data: Path, tmp_path: Path, strategy: str):
    runs = Runs(strategy, tmp_path, settings_of(native_data))
    runs.finish("whole")
    runs.die("died")
    assert_goes_on(runs, "cut off", *DAMAGES[strategy])
    if strategy == "ddp":
        assert_goes_on(runs, "untouched")


def test_two_nodes_without_a_shared_file_system_take_the_newest_common_one(native_data: Path, tmp_path: Path):
    """ZeRO-3: every node has all the files that it needs. Node 1's newest one is not whole, and only node 1 knows."""
    runs = Runs("zero3", tmp_path, settings_of(native_data) | {"NNODES": "2", "NPROC_PER_NODE": "1"})

    def launch_both(**settings: str) -> list[str]:
        settings["MASTER_PORT"] = str(free_port())
        nodes = [runs.start(f"node {rank}", "127.0.0.1", str(rank), **settings) for rank in (1, 0)]
        said = [node.communicate(timeout=200)[1] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
        return said[::-1]

    launch_both()
    whole = curve(runs.lines("node 1"))
    for rank in (0, 1):
        shutil.rmtree(tmp_path / f"node {rank}" / "checkpoints" / f"iter_{ITERATIONS:07d}")
    newest = tmp_path / "node 1" / "checkpoints" / f"iter_{LAST:07d}"
    (newest / "random_00001.pt").unlink()
    said = launch_both(RESUME="1")
    for text in said:
        assert f"resuming from the checkpoint of iteration {SAVE_INTERVAL}\n" in text
    assert f"iteration {LAST} is passed over: not every node has it whole" in said[0]
    assert f"iteration {LAST} is passed over: {newest.name}/random_00001.pt is missing" in said[1]
    assert [line.begin for line in runs.lines("node 1")] == [0] * SAVE_INTERVAL + [SAVE_INTERVAL] * LAST
    assert curve(runs.lines("node 1")) == whole
