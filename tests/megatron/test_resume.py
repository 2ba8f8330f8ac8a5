"""The real engine's runs die and go on, through the launchers: the loss curve is that of a run that did not die."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dying_runs import Runs, assert_goes_on
from harness import REPO_ROOT

pytestmark = pytest.mark.slow


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
    ("strategy", "damage"),
    [("ddp", ()), ("zero1", ("global_step16/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "cut off"))],
)
def test_a_killed_run_continues_exactly(engine: dict[str, str], tmp_path: Path, strategy: str, damage: tuple[str, ...]):
    runs = Runs(strategy, tmp_path, engine)
    runs.finish("whole")
    runs.die("died")
    assert_goes_on(runs, "resumed", *damage)
