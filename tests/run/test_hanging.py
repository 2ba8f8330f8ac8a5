"""Which of a node's workers hangs, and where, with real torchrun and real engines; test_guard.py has every rank."""

import os
import re
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT, Project, processes_with, wait_for
from made_runs import made_plan
from real_runs import kill, start

from t5bench.plan.channel import Place
from t5bench.plan.ports import free_port
from t5bench.run.guard import Guard, Stacks
from t5bench.run.peers import Peers

SETTINGS = {
    "MODEL_PRESET": "tiny", "DEVICE": "cpu", "PRECISION_FLAG": "", "TRAIN_ITERS": "100000", "LOG_INTERVAL": "1",
    "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "SAMPLE_INTERVAL": "5",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "rank", "end"),
    [(4, 0, {"WATCHDOG_SECONDS": "30"}), (2, 1, {"STUB_TIMEOUT": "6"})],
    ids=["watchdog", "timeout"],
)
def test_the_hanging_rank_is_named_and_all_leave_their_stacks(
    project: Project, workers: int, rank: int, end: dict[str, str]
):
    """Either the watchdog ends the run, or a worker that has waited too long for the others, by way of torchrun."""
    (project.engine / "pretrain_t5.py").write_text((REPO_ROOT / "tests/cluster/stub_trainer.py").read_text())
    project.record_engine()
    project.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"NPROC_PER_NODE": str(workers), "MASTER_PORT": str(free_port()), "STUB_FAULT": f"{rank}:3:hang"}
    output = project.root / "outputs" / "ddp"
    output.mkdir(parents=True)
    (output / "node0.stack.9").write_text("of a run that was killed")
    result = project.launch("ddp", timeout=90, **SETTINGS | own | end)
    said = result.stderr
    assert result.returncode == 6, result.stdout + said
    assert f"rank {rank} is stuck in begin (" in said and said.count("rank ") == 1, said
    assert not list(output.glob("*.stack*"))
    log = (output / "node0.log").read_text()
    assert "rank 9 was" not in log
    if "WATCHDOG_SECONDS" in end:
        assert all(f"rank {each} was ended here:" in log for each in range(workers))
        assert log.count("all_reduce") >= workers - 1


# An engine's worker of rank 1 hangs after its third step: Python imports this before anything else.
HANG = """
import os, signal
if os.environ.get("RANK") == "1":
    from torch.optim.optimizer import register_optimizer_step_post_hook
    steps = []
    def hangs_here(*_):
        steps.append(1)
        if len(steps) == 3:
            print("hangs", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP) if os.environ["HANG"] == "stop" else signal.pause()
    register_optimizer_step_post_hook(hangs_here)
"""


class Kept(Stacks):
    """The run's own recorder removes the files when the run has ended, perhaps before this guard looks again."""

    def __init__(self, prefix: Path) -> None:
        self.kept: dict[int, str] = {}
        super().__init__(prefix)

    def texts(self) -> dict[int, str]:
        self.kept |= super().texts()
        return self.kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "how", "where"),
    [("native", "wait", "stuck in hangs_here ("), ("megatron", "stop", "suspended (SIGSTOP)")],
    ids=["native", "megatron"],
)
def test_a_real_engine(
    request: pytest.FixtureRequest, sample_data: Path, tmp_path: Path, engine: str, how: str, where: str
):
    """A guard of its own ends it as soon as it hangs: that of the run would need more time than a start may take."""
    (tmp_path / "sitecustomize.py").write_text(HANG)
    place = {"ENGINE": engine, "MEGATRON_DATA_DIR": str(sample_data), "PYTHONPATH": str(tmp_path), "HANG": how}
    if engine == "megatron":
        place["MEGATRON_DIR"] = str(request.getfixturevalue("megatron_dir"))
    output, mark = tmp_path / "run", f"OUTPUT_DIR={tmp_path}"
    (launcher,) = start("ddp", output, **SETTINGS | place | {"NPROC_PER_NODE": "2"})
    log = output / "node0.log"
    try:
        wait_for(lambda: log.exists() and "Z hangs" in log.read_text(), 300)
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in processes_with(mark)]
        (run,) = {found[1] for text in environments if (found := re.search(r"T5_RUN_MARK=([^\0]+)", text))}
        stacks = Kept(output / "node0.stack")
        plan = made_plan(settings={"WATCHDOG_SECONDS": "5", "RENDEZVOUS_TIMEOUT": "60"})
        guard = Guard(plan, os.getppid(), run, Peers(Place(0, 1, "127.0.0.1", 1, "a run")), stacks)
        guard.thread.join(60)
        assert guard.cause and f"rank 1 is {where}" in guard.cause.reason and "rank 0" not in guard.cause.reason
        assert launcher.wait(timeout=60) == 1
        assert "rank 0 was ended here:" in log.read_text() and "rank 1 was ended here:" in log.read_text()
    finally:
        kill([launcher], mark)
