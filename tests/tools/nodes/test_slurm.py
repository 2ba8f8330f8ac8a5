"""The README's guide, unchanged, on a real SLURM: salloc and a terminal for each node, srun, and sbatch.

torchrun and the collectives are real, the engine is the stub trainer. What is proved is that the nodes find each other,
train to the end and leave nothing behind, not that the model learns.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_lab import NATIVE, Cluster, losses
from support import STRATEGIES, Project, wait_for

from t5bench.record import log

# Steps 1 and 8 of the README with two terminals, as one script: each ssh is a separate terminal.
TWO_TERMINALS = """
mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NODE0=${names[0]} NODE1=${names[1]}
export HOSTS="${NODE0} ${NODE1}"
terminal() { ssh -n "$1" "cd '$PWD' && env $SETTINGS HOSTS='$HOSTS' NODE0='$NODE0' NODE1='$NODE1' bash -c '$2'" ; }
terminal "$NODE0" 'bash scripts/run_megatron_t5_ddp.sh ${NODE0} 0' & first=$!
sleep 1
terminal "$NODE1" 'bash scripts/run_megatron_t5_ddp.sh ${NODE0} 1' & second=$!
wait "$first" && wait "$second" && echo "both ended well"
"""


def at_login(cluster: Cluster, project: Project, *words: str, **environment: str) -> subprocess.CompletedProcess:
    settings = project.environment | environment
    return cluster.login(*words, env=settings, cwd=project.root, timeout=90, check=False)


def iterations(project: Project, strategy: str, node: int) -> list[int]:
    lines = (project.root / "outputs" / strategy / f"node{node}.log").read_text().splitlines()
    return [line.iteration for line in log.iterations(lines)]


def test_two_terminals_in_an_allocation(cluster: Cluster, project: Project):
    settings = " ".join(f"{name}={value!r}" for name, value in project.environment.items())
    allocation = ("--nodes=2", "--gres=gpu:1", "--time=04:00:00", "--partition=gpu")
    words = ("salloc", *allocation, "bash", "-c", f"set -e\n{TWO_TERMINALS}")
    result = at_login(cluster, project, *words, SETTINGS=settings)
    assert "both ended well" in result.stdout, result.stdout + result.stderr
    assert iterations(project, "ddp", 1) == [2, 4, 6], "the last rank prints the iterations"
    assert iterations(project, "ddp", 0) == []
    assert not cluster.left_of(project)


class Job:
    """sbatch, from within the checkout unless another directory is said."""

    def __init__(self, cluster: Cluster, project: Project, *words: str, options=(), folder=None, **environment: str):
        self.cluster, self.project, folder = cluster, project, folder or project.root
        command = ["sbatch", "--parsable", *options, str(project.script("slurm/run_strategy.sbatch")), *words]
        result = cluster.login(*command, env=project.environment | environment, cwd=folder)
        self.number = result.stdout.strip()
        self.output = folder / f"t5-{self.number}.out"

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def end(self) -> str:
        """How it ended, when it has."""
        self.wait_until(lambda: self.fields()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"))
        return f"{self.fields()['JobState']} {self.fields()['ExitCode']}"

    def fields(self) -> dict[str, str]:
        """What SLURM says of it."""
        text = self.cluster.login("scontrol", "show", "job", self.number).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 200.0) -> None:
        """Waits; a failure shows what the job printed, and what SLURM says of it."""
        try:
            wait_for(condition, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.fields()}\n{self.text()}") from error


@pytest.fixture
def nothing_left(cluster: Cluster, project: Project) -> Iterator[None]:
    """On any node, once all jobs have ended."""
    yield
    wait_for(lambda: not cluster.left_of(project), 10)  # SLURM may still be clearing away


@pytest.mark.usefixtures("nothing_left")
def test_how_jobs_end(cluster: Cluster, project: Project, tmp_path: Path):
    """Four at the same time: one to its end, from another directory, with nothing but the strategy's name; one whose
    rank fails; one that is cancelled; and two that name no strategy."""
    place = {name: str(tmp_path / name) for name in ("broken", "cancelled")}
    cancelled = Job(cluster, project, "ddp", OUTPUT_DIR=place["cancelled"], TRAIN_ITERS="100000")
    complete = Job(cluster, project, "zero2", folder=tmp_path)
    fault = {"STUB_FAULT": "1:3:raise RuntimeError('broken')", "TRAIN_ITERS": "2000"}
    broken = Job(cluster, project, "ddp", OUTPUT_DIR=place["broken"], **fault)
    wrong = {"zero9": Job(cluster, project, "zero9"), "": Job(cluster, project)}
    for name, job in wrong.items():
        assert job.end() == "FAILED 2:0"
        assert f"there is no strategy '{name}'" in job.text()
        assert "Choose from: ddp zero1" in job.text()
    wait_for(lambda: "iteration " in cancelled.text())
    cluster.login("scancel", cancelled.number)
    assert complete.end() == "COMPLETED 0:0", complete.text()
    assert iterations(project, "zero2", 1) == [2, 4, 6]
    config = json.loads((project.root / "outputs" / "zero2" / "ds_config.json").read_text())
    assert config["zero_optimization"]["stage"] == 2
    assert "iteration        6/       6" in complete.text()
    assert broken.end().startswith("FAILED"), broken.text()
    assert "RuntimeError: broken" in broken.text()
    assert cancelled.end().startswith("CANCELLED"), cancelled.text()
    # srun may be gone before the launchers' last words come through; the record is not.
    record = tmp_path / "cancelled" / "run.json"
    wait_for(lambda: record.exists() and json.loads(record.read_text())["status"] == "cancelled")


@pytest.mark.usefixtures("nothing_left")
def test_every_launcher_infers_its_place_and_a_failure_does_not_stop_the_others(cluster: Cluster, project: Project):
    """Dry runs, requested after the strategy's name, under srun.

    Red Hat's /etc/profile exports HOSTNAME, and srun gives the nodes the environment of the login host.
    """
    (project.root / "ds_configs" / "megatron_zero1.json").unlink()
    job = Job(cluster, project, "all", "--dry-run", options=("--cpus-per-task=1",), HOSTNAME="login")
    assert job.end().startswith("FAILED"), job.text()
    found, text = dict(re.findall(r"^(\w+): exit status (\d+)$", job.text(), re.MULTILINE)), job.text()
    assert sorted(found) == sorted(STRATEGIES)
    assert list(found)[:2] == ["ddp", "zero1"]
    well = [strategy for strategy, status in found.items() if status == "0"]
    assert found.keys() - well == {"zero1"}
    assert text.count("would refuse to start") == 0
    for rank in (0, 1):
        assert all(f"outputs/{strategy}/node{rank}.stack" in text for strategy in well)
        # The two nodes' lines are mixed, but each keeps its own.
        assert text.count(f"  --node_rank {rank}\n") == len(well), text
    assert text.count("  --nnodes 2\n") == text.count("  --master_addr node0\n") == 2 * len(well), text


def test_a_preempted_job_is_queued_again_and_continues(
    cluster: Cluster, project: Project, tmp_path: Path, sample_data: Path
):
    project.environment |= NATIVE | {"MEGATRON_DATA_DIR": str(sample_data), "TRAIN_ITERS": "1000"}
    undisturbed = Job(cluster, project, "ddp", OUTPUT_DIR=str(tmp_path / "undisturbed"))
    assert undisturbed.end() == "COMPLETED 0:0", undisturbed.text()
    job = Job(cluster, project, "ddp", OUTPUT_DIR=str(tmp_path / "preempted"))
    # Early enough: it still trains when SLURM gets round to the urgent job.
    job.wait_until(lambda: bool(re.search(r"iteration +[2-5]\d/", job.text())))
    # Long enough for SLURM to end all of the preempted job before it starts again.
    urgent = ("srun", "--partition=urgent", f"--nodes={len(cluster.nodes)}", "--exclusive", "sleep", "15")
    cluster.login(*urgent, timeout=90)
    job.wait_until(lambda: "resuming from the checkpoint of iteration" in job.text(), 300)
    assert job.end() == "COMPLETED 0:0", job.text()
    assert losses(tmp_path / "preempted") == losses(tmp_path / "undisturbed")
