"""The real engine's runs die and go on, through the launchers: the loss curve is that of a run that did not die."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dying_runs import SAVE_INTERVAL, Runs, assert_continues
from harness import REPO_ROOT

pytestmark = pytest.mark.slow
LAST = 2 * SAVE_INTERVAL  # the newest checkpoint when a run dies


@pytest.fixture(scope="module")
def engine(megatron_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings that name the engine and the sample's data."""
    settings = {"MEGATRON_DIR": str(megatron_dir), "MEGATRON_DATA_DIR": str(tmp_path_factory.mktemp("data"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")],
        env=os.environ | settings | {"SAMPLE": "1", "PATH": path, "PYTHON": sys.executable},
        check=True,
        timeout=120,
    )
    return settings


@pytest.mark.parametrize(
    ("strategy", "file"),
    [
        ("ddp", "iter_0000016/mp_rank_00/model_optim_rng.pt"),
        ("zero1", "global_step16/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_killed_run_continues_exactly(engine: dict[str, str], tmp_path: Path, strategy: str, file: str):
    runs = Runs(strategy, tmp_path, engine)
    runs.finish("whole")
    runs.die("died")
    checkpoints = runs.copy("died", "cut off")
    said = runs.finish("died", RESUME="1")
    assert f"resuming from the checkpoint of iteration {LAST}\n" in said
    assert "passed over" not in said
    assert_continues(runs, "died", "whole", LAST)

    torn = checkpoints / file
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    # Upstream's own pointer does not survive a death in its writing, and without it training starts anew.
    pointer = "latest" if strategy == "zero1" else "latest_checkpointed_iteration.txt"
    (checkpoints / pointer).unlink()
    said = runs.finish("cut off", RESUME="1")
    assert f"iteration {LAST} is passed over: {file} is cut off" in said
    assert_continues(runs, "cut off", "whole", SAVE_INTERVAL)
