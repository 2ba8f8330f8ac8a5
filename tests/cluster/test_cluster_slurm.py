"""scripts/slurm/run_strategy.sbatch on a real SLURM."""

import json
import re
from pathlib import Path

import pytest
from cluster_lab import Cluster
from harness import STRATEGIES, Project, wait_for

from t5bench.record import log


class Job:
    def __init__(self, cluster: Cluster, project: Project, number: str, folder: Path) -> None:
        self.cluster, self.project, self.number, self.folder = cluster, project, number, folder

    @property
    def output(self) -> Path:
        return self.folder / f"t5-{self.number}.out"

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def end(self) -> str:
        """How it ended, when it has; nothing of it is left on any node."""
        state = self.cluster.finished_job(self.number)
        here = str(self.project.root)
        for node in self.cluster.nodes:
            assert not [line for line in self.cluster.processes(node).values() if here in line], node
        return f"{state['JobState']} {state['ExitCode']}"


def submit(
    cluster: Cluster,
    project: Project,
    *options: str,
    arguments: tuple[str, ...],
    folder: Path | None = None,
    **environment: str,
) -> Job:
    """sbatch, from within the checkout unless another directory is said."""
    folder = folder or project.root
    words = ["sbatch", "--parsable", *options, str(project.script("slurm/run_strategy.sbatch")), *arguments]
    result = cluster.login(*words, env=project.environment | environment, cwd=folder)
    return Job(cluster, project, result.stdout.strip(), folder)


def test_one_strategy(cluster: Cluster, project: Project, tmp_path: Path):
    """From another directory, with nothing but the strategy's name."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    job = submit(cluster, project, arguments=("zero2",), folder=folder)
    assert job.end() == "COMPLETED 0:0", job.text()
    iterations = list(log.iterations((project.root / "outputs" / "zero2" / "node1.log").read_text().splitlines()))
    assert [line.iteration for line in iterations] == [2, 4, 6]
    assert "iteration        6/       6" in job.text()


def test_options_on_the_command_line_overrule(cluster: Cluster, project: Project):
    job = submit(cluster, project, "--nodes=4", "--cpus-per-task=1", arguments=("hybrid",), TRAIN_ITERS="2")
    assert job.end() == "COMPLETED 0:0", job.text()
    assert len(list((project.root / "outputs" / "hybrid").glob("node*.log"))) == 4


def test_all_go_on_after_one_that_fails(cluster: Cluster, project: Project):
    """Dry runs, which every launcher takes from behind the strategy's name."""
    listed = [name for name in STRATEGIES if name != "zero1"]
    project.script("run_megatron_t5_zero1.sh").write_text("STRATEGY=zero1\nSTRATEGY_PORT=29801\nexit 7\n")
    job = submit(cluster, project, arguments=("all", "--dry-run"))
    assert job.end() == "FAILED 7:0", job.text()
    found = dict(re.findall(r"^(\w+): exit status (\d+)$", job.text(), re.MULTILINE))
    assert found == dict.fromkeys(listed, "0") | {"zero1": "7"}
    assert list(found)[:2] == ["ddp", "zero1"]
    for strategy in listed:
        assert f"outputs/{strategy}/tensorboard" in job.text()


def test_a_rank_that_fails_ends_the_job(cluster: Cluster, project: Project):
    job = submit(cluster, project, arguments=("ddp",), STUB_FAULT="1:3:raise:broken", TRAIN_ITERS="2000")
    assert job.end().startswith("FAILED"), job.text()
    assert "RuntimeError: broken" in job.text()


def test_a_cancelled_job_ends_in_order(cluster: Cluster, project: Project):
    job = submit(cluster, project, arguments=("ddp",), TRAIN_ITERS="100000")
    wait_for(lambda: "iteration " in job.text())
    cluster.login("scancel", job.number)
    assert job.end().startswith("CANCELLED"), job.text()
    # srun may be gone before the launchers' last words come through; the record is not.
    record = project.root / "outputs" / "ddp" / "run.json"
    wait_for(lambda: record.exists() and json.loads(record.read_text())["status"] == "cancelled")


@pytest.mark.parametrize(("words", "said"), [(("zero9",), "'zero9' is no strategy"), ((), "'' is no strategy")])
def test_wrong_names(cluster: Cluster, project: Project, words: tuple[str, ...], said: str):
    job = submit(cluster, project, arguments=words)
    assert job.end() == "FAILED 2:0"
    assert said in job.text()
    assert "It may be one of: ddp zero1" in job.text()
