"""The README's guide, unchanged, on a real SLURM: salloc and a terminal for each node, srun, and sbatch.

torchrun and the collectives are real, the engine is the stub trainer. What is proved is that the nodes find each other,
train to the end and leave nothing behind, not that the model learns.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from cluster_lab import Cluster
from harness import STRATEGIES, Project, wait_for

from t5bench.record import log
from t5bench.record.records import load

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


def test_every_launcher_infers_its_place_under_srun(cluster: Cluster, project: Project):
    """The command that each of two nodes would run; only its rank differs between them.

    Red Hat's /etc/profile exports HOSTNAME, and srun gives the nodes the environment of the login host.
    """
    loop = f"for s in {' '.join(STRATEGIES)}; do bash scripts/run_megatron_t5_$s.sh --dry-run; done"
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", "--label")
    result = at_login(cluster, project, "env", "HOSTNAME=login", *srun, "bash", "-c", loop)
    assert result.returncode == 0, result.stderr
    assert "a real run would stop here" not in result.stderr
    by_node: dict[str, list[str]] = {"0": [], "1": []}
    for line in result.stdout.splitlines():
        node, command = line.split(": ", 1)
        if " torchrun " in command:
            by_node[node].append(command)
    assert len(by_node["1"]) == len(STRATEGIES)
    for first, second in zip(by_node["0"], by_node["1"], strict=True):
        assert "--master_addr node0 " in first
        assert re.sub(r"--node_rank 0 |node0\.(?=wandb|stack)", lambda m: m[0].replace("0", "1"), first) == second


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
        """How it ended, when it has; nothing of it is left on any node."""

        def fields() -> dict[str, str]:
            text = self.cluster.login("scontrol", "show", "job", self.number).stdout
            return dict(word.split("=", 1) for word in text.split() if "=" in word)

        wait_for(lambda: fields()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), 90)
        wait_for(lambda: not self.cluster.left_of(self.project), 10)  # SLURM may still be clearing away
        return f"{fields()['JobState']} {fields()['ExitCode']}"


def test_one_strategy(cluster: Cluster, project: Project, tmp_path: Path):
    """From another directory, with nothing but the strategy's name."""
    job = Job(cluster, project, "zero2", folder=tmp_path)
    assert job.end() == "COMPLETED 0:0", job.text()
    assert iterations(project, "zero2", 1) == [2, 4, 6]
    config = json.loads((project.root / "outputs" / "zero2" / "ds_config.json").read_text())
    assert config["zero_optimization"]["stage"] == 2
    assert "iteration        6/       6" in job.text()


def test_the_sweep_continues_after_a_failure(cluster: Cluster, project: Project):
    """Dry runs, requested after the strategy's name, on as many nodes as sbatch gets."""
    (project.root / "ds_configs" / "megatron_zero1.json").unlink()
    job = Job(cluster, project, "all", "--dry-run", options=("--nodes=4", "--cpus-per-task=1"))
    assert job.end().startswith("FAILED"), job.text()
    found = dict(re.findall(r"^(\w+): exit status (\d+)$", job.text(), re.MULTILINE))
    assert sorted(found) == sorted(STRATEGIES)
    assert list(found)[:2] == ["ddp", "zero1"]
    well = [strategy for strategy, status in found.items() if status == "0"]
    assert found.keys() - well == {"zero1"}
    for strategy in well:  # srun may cut a long line in two, but not before its 2,048th byte
        for rank in range(4):
            assert f"outputs/{strategy}/node{rank}.stack" in job.text()
    assert len(re.findall("--nnodes 4 .*--node_rank 3 ", job.text())) == len(well)


def test_a_rank_that_fails_ends_the_job(cluster: Cluster, project: Project):
    job = Job(cluster, project, "ddp", STUB_FAULT="1:3:raise:broken", TRAIN_ITERS="2000")
    assert job.end().startswith("FAILED"), job.text()
    assert "RuntimeError: broken" in job.text()


def test_a_cancelled_job_ends_in_order(cluster: Cluster, project: Project):
    job = Job(cluster, project, "ddp", TRAIN_ITERS="100000")
    wait_for(lambda: "iteration " in job.text())
    cluster.login("scancel", job.number)
    assert job.end().startswith("CANCELLED"), job.text()
    # srun may be gone before the launchers' last words come through; the record is not.
    record = project.root / "outputs" / "ddp" / "run.json"
    wait_for(lambda: record.exists() and json.loads(record.read_text())["status"] == "cancelled")


@pytest.mark.parametrize("words", [("zero9",), ()])
def test_wrong_names(cluster: Cluster, project: Project, words: tuple[str, ...]):
    job = Job(cluster, project, *words)
    assert job.end() == "FAILED 2:0"
    assert f"there is no strategy '{''.join(words)}'" in job.text()
    assert "Choose from: ddp zero1" in job.text()


def losses(directory: Path) -> dict[int, float | None]:
    """By iteration, the last time that it was trained."""
    return {line.iteration: line.lm_loss for line in load(directory).iterations}


NATIVE = {
    "ENGINE": "native", "TRAIN_ITERS": "60", "LOG_INTERVAL": "1", "SAVE_INTERVAL": "10", "PRECISION_FLAG": "",
    "RENDEZVOUS_TIMEOUT": "60", "GLOBAL_BATCH_SIZE": "2", "ENCODER_SEQ_LENGTH": "32", "DECODER_SEQ_LENGTH": "16",
}  # fmt: skip


def test_a_preempted_job_is_queued_again_and_continues(
    cluster: Cluster, project: Project, tmp_path: Path, sample_data: Path
):
    project.environment |= NATIVE | {"MEGATRON_DATA_DIR": str(sample_data)}
    undisturbed = Job(cluster, project, "ddp", OUTPUT_DIR=str(tmp_path / "undisturbed"))
    assert undisturbed.end() == "COMPLETED 0:0", undisturbed.text()
    job = Job(cluster, project, "ddp", OUTPUT_DIR=str(tmp_path / "preempted"))
    wait_for(lambda: bool(re.search(r"iteration +[2-5]\d/", job.text())))
    cluster.login("srun", "--partition=urgent", f"--nodes={len(cluster.nodes)}", "--exclusive", "true", timeout=60)
    wait_for(lambda: "resuming from the checkpoint of iteration" in job.text(), 200)
    assert job.end() == "COMPLETED 0:0", job.text()
    assert losses(tmp_path / "preempted") == losses(tmp_path / "undisturbed")


def test_a_node_that_is_rebooted_rejoins(cluster: Cluster, project: Project, tmp_path: Path, sample_data: Path):
    project.environment |= NATIVE | {"MEGATRON_DATA_DIR": str(sample_data)}
    settings = project.environment | {"OUTPUT_DIR": str(tmp_path / "run"), "HOSTS": "node0 node1"}
    settings |= {"MASTER_PORT": "29950", "DISTRIBUTED_TIMEOUT_MINUTES": "1", "TRAIN_ITERS": "200"}

    def start(**changes: str) -> list[subprocess.Popen]:
        words = ("bash", "scripts/run_megatron_t5_ddp.sh")
        return [cluster.start(node, *words, env=settings | changes, cwd=project.root) for node in ("node0", "node1")]

    first, _ = start()
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"iteration": 22,' in metrics.read_text(), 90)
    cluster.lab("poweroff", "node1")
    cluster.boot("node1")
    output, _ = first.communicate(timeout=120)
    assert first.returncode in (6, 7), output
    assert "node 1 (node1)" in output
    again = start(RESUME="1")
    said = [process.communicate(timeout=150)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], said
    assert "resuming from the checkpoint of iteration" in said[0]
    assert sorted(losses(tmp_path / "run")) == list(range(1, 201))


def test_without_ipv4(cluster: Cluster, project: Project, tmp_path: Path):
    """A second cluster: a sweep and the check of its hosts by address."""
    other = Cluster(tmp_path / "lab", 2, net="fd00:77::")
    settings = project.environment | {"HOSTS": "fd00:77::10 fd00:77::11", "LAUNCH": "ssh", "STRATEGIES": "ddp"}
    options = {"env": settings | {"RETRIES": "0"}, "cwd": project.root, "timeout": 150, "check": False}
    try:
        other.up()
        other.private(project.root.parent)
        for script in ("run_megatron_t5_all.sh", "check_cluster.sh"):
            result = other.login("bash", f"scripts/{script}", **options)
            assert result.returncode == 0, result.stdout + result.stderr
        assert [node["host"] for node in load(project.root / "outputs/all/repeat1/ddp").nodes] == ["node0", "node1"]
    finally:
        other.down()
    assert not other.directory.exists()
    assert cluster.login("ssh", "-n", "node0", "hostname").stdout.strip() == "node0"
