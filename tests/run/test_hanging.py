"""Which of a node's workers hangs, and where, with real torchrun; test_guard.py has every rank.

Either the watchdog ends the run, or a worker that has waited too long for the others does, by way of torchrun.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT, Project

from t5bench.plan.ports import free_port

# An engine's worker of rank 1 hangs after its third step: Python imports this before anything else.
HANG = """
import os, signal
if os.environ.get("RANK") == "1":
    from torch.optim.optimizer import register_optimizer_step_post_hook
    steps = []
    def hangs_here(*_):
        steps.append(1)
        while len(steps) >= 3:
            os.kill(os.getpid(), signal.SIGSTOP) if os.environ["HANG"] == "stop" else signal.pause()
    register_optimizer_step_post_hook(hangs_here)
"""
SETTINGS = {
    "MODEL_PRESET": "tiny", "DEVICE": "cpu", "PRECISION_FLAG": "", "TRAIN_ITERS": "100000", "LOG_INTERVAL": "1",
    "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "SAMPLE_INTERVAL": "5",
}  # fmt: skip


def launch(project: Project, workers: int, **settings: str) -> tuple[str, str]:
    """What the terminal and the node's log say."""
    project.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"NPROC_PER_NODE": str(workers), "MASTER_PORT": str(free_port())}
    result = project.launch("ddp", timeout=300, **SETTINGS | own | settings)
    assert result.returncode == 6, result.stdout + result.stderr
    output = project.root / "outputs" / "ddp"
    assert not list(output.glob("*.stack*"))
    log = (output / "node0.log").read_text()
    assert "WATCHDOG_SECONDS" not in settings or all(f"rank {each} was ended here:" in log for each in range(workers))
    return result.stderr, log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "rank", "end"),
    [(4, 0, {"WATCHDOG_SECONDS": "15"}), (2, 1, {"STUB_TIMEOUT": "6"})],
    ids=["watchdog", "timeout"],
)
def test_the_hanging_rank_is_named_and_all_leave_their_stacks(
    project: Project, workers: int, rank: int, end: dict[str, str]
):
    (project.engine / "pretrain_t5.py").write_text((REPO_ROOT / "tests/cluster/stub_trainer.py").read_text())
    project.record_engine()
    said, log = launch(project, workers, STUB_FAULT=f"{rank}:3:hang", **end)
    assert f"rank {rank} is stuck in begin (" in said and said.count("rank ") == 1, said
    assert "STUB_TIMEOUT" in end or log.count("all_reduce") >= workers - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "how", "where", "seconds"),
    [("native", "wait", "stuck in hangs_here (", "30"), ("megatron", "stop", "suspended (SIGSTOP)", "45")],
)
def test_a_real_engine(
    project: Project,
    request: pytest.FixtureRequest,
    sample_data: Path,
    engine: str,
    how: str,
    where: str,
    seconds: str,
):
    """The watchdog is given more time than the engine takes to start on a busy machine."""
    (project.stubs / "sitecustomize.py").write_text(HANG)
    place = {"ENGINE": engine, "MEGATRON_DATA_DIR": str(sample_data), "WATCHDOG_SECONDS": seconds, "HANG": how}
    place["PYTHONPATH"] = str(project.stubs)
    if engine == "megatron":
        place["MEGATRON_DIR"] = str(request.getfixturevalue("megatron_dir"))
        shutil.copy(REPO_ROOT / "patches" / "checksums" / "series.sha256", project.root / "patches" / "checksums")
    said, _ = launch(project, 2, **place)
    assert f"rank 1 is {where}" in said and "rank 0" not in said, said
