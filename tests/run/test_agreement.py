"""Nodes that share neither a home directory nor a secret compare their plans before they train, with real torchruns."""

import json
import re
import shutil
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from made_runs import made_plan
from support import REPO_ROOT, Project, wait_for

from t5bench.plan import shared_facts
from t5bench.plan.ports import free_port
from t5bench.record.status import EXIT_CODES, Strength, cause_of_exception
from t5bench.run import agreement

SETTINGS = {
    **{"HOSTS": "127.0.0.1 127.0.0.2", "NNODES": "2", "MODEL_PRESET": "tiny", "DEVICE": "cpu", "PRECISION_FLAG": ""},
    **{"TRAIN_ITERS": "4", "LOG_INTERVAL": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"},
}


def start(project: Project, node: int, directory: Path, **settings: str) -> subprocess.Popen[str]:
    """A launcher of a node with a home directory of its own."""
    home = directory / f"home{node}"
    home.mkdir(parents=True)
    places = {"HOME": str(home), "OUTPUT_DIR": str(directory / f"run{node}"), "T5_RUN_SECRET": None}
    environment = project.environment_with(SETTINGS | places | settings)
    command = ["bash", str(project.script("run_megatron_t5_ddp.sh")), "127.0.0.1", str(node)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def trainer(project: Project) -> Project:
    """With the real torchrun and collectives, and a stub of an engine."""
    project.use_real_torch()
    shutil.copy(REPO_ROOT / "tests/tools/nodes/stub_trainer.py", project.engine / "pretrain_t5.py")
    project.record_engine()
    return project


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"LR": "0.5"}, {"NNODES": "4"}, {}], ids=str)
def test_nodes_without_a_common_home(trainer: Project, tmp_path: Path, other: dict[str, str]):
    port = str(free_port())
    launchers = [start(trainer, node, tmp_path, MASTER_PORT=port, **(other if node else {})) for node in (0, 1)]
    said = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    for launcher, text in zip(launchers, said, strict=True):
        assert launcher.returncode == (2 if other else 0), said
        assert (" iteration " in "".join(said)) == (not other)
        for setting, value in other.items():
            assert "configuration: " in text and f"{setting} is '{value}' on node 1 (" in text
            assert "Start every node with the same launcher" in text


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["of all", pytest.param(None, marks=pytest.mark.nightly)])
def test_the_third_of_three_nodes_never_comes(trainer: Project, tmp_path: Path, secret: str | None):
    """The second hears from the first why torchrun ended, or says what it lost."""
    three = {"HOSTS": "127.0.0.1 127.0.0.2 127.0.0.3", "NNODES": "3", "GLOBAL_BATCH_SIZE": "6"}
    three |= {"MASTER_PORT": str(free_port()), "RENDEZVOUS_TIMEOUT": "8"}
    launchers = [start(trainer, node, tmp_path, T5_RUN_SECRET=secret, **three) for node in (0, 1)]
    said = [launcher.communicate(timeout=150)[0] for launcher in launchers]
    assert "timeout: " in said[0] and "only 2 of 3 nodes joined" in said[0]
    if secret:
        assert "timeout: node 0 (" in said[1] and "only 2 of 3 nodes joined" in said[1], said[1]
    else:
        lost = "network: node 1 (.*): the connection to node 0's torchrun was lost"
        late = "timeout: node 1 (.*): not all nodes of the run joined within 8000 ms"
        assert re.search(f"{lost}|{late}", said[1]), said[1]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_worker_that_dies_before_it_compares_leaves_nobody_waiting(trainer: Project, tmp_path: Path):
    """RENDEZVOUS_TIMEOUT counts, and the node where it died is named."""
    kills = tmp_path / "kills"
    kills.mkdir()
    (kills / "sitecustomize.py").write_text(
        "import os, signal\nif os.environ.get('LOCAL_RANK') == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    three = {"HOSTS": "127.0.0.1 127.0.0.2 127.0.0.3", "NNODES": "3", "GLOBAL_BATCH_SIZE": "6"}
    three |= {"MASTER_PORT": str(free_port()), "RENDEZVOUS_TIMEOUT": "20"}
    own = [{}, {"PYTHONPATH": str(kills)}, {}]
    launchers = [start(trainer, node, tmp_path, **three, **own[node]) for node in range(3)]
    said = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    found = "node 1 joined the run, but no worker there came to compare its plan within 20 s"
    assert "timeout: " not in said[1] and "killed" in said[1], said[1]
    for node in (0, 2):
        assert launchers[node].returncode == EXIT_CODES["timeout"] and found in said[node], said[node]
        assert "waiting for node 1, whose first worker" in said[node]


@pytest.mark.slow
def test_a_second_node_1_leaves_the_run_alone(trainer: Project, tmp_path: Path):
    both = {"MASTER_PORT": str(free_port()), "TRAIN_ITERS": "100000", "STUB_ITERATION_MS": "100"}
    launchers = [start(trainer, node, tmp_path, **both) for node in (0, 1)]
    wait_for((tmp_path / "run1" / "metrics.jsonl").exists, 60)
    stray = start(trainer, 1, tmp_path / "stray", **both, SEED="5")
    assert "is in progress and has its node 1" in stray.communicate(timeout=60)[0]
    assert stray.returncode == 2
    trained = len((tmp_path / "run1" / "metrics.jsonl").read_text().splitlines())
    wait_for(lambda: len((tmp_path / "run1" / "metrics.jsonl").read_text().splitlines()) > trained + 5)
    for launcher in launchers:
        launcher.terminate()
    for launcher in launchers:
        launcher.communicate(timeout=120)
        assert launcher.returncode == 128 + signal.SIGTERM


class Store(dict):
    """torch's, without other processes."""

    def get(self, key: str) -> bytes:
        return self[key].encode()

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")


def verdict_on(*plans: dict[str, str]) -> str:
    """What all nodes hear if each has one of these plans; {}: it is unknown."""
    said = [{"host": f"host{node}", "common": plan} for node, plan in enumerate(plans)]
    store = Store({f"plan/{node}": json.dumps(entry) for node, entry in enumerate(said)})
    verdict = agreement._ask_all(store, 0, len(said), said[0])
    assert agreement._ask_all(store, len(said) - 1, len(said), said[-1]) == verdict
    return verdict


def test_the_node_that_differs_is_named():
    one, two, three = {"SEED": "1"}, {"SEED": "2"}, {"SEED": "3"}
    assert verdict_on(one, {}, one) == "", "node 1's plan is unknown"
    assert verdict_on(one, two) == "SEED is '2' on node 1 (host1) and '1' on node 0"
    assert verdict_on(one, {}, one, two) == "SEED is '2' on node 3 (host3) and '1' on node 2 (host2), node 0"
    # Who is alone comes first, also if it is node 0, and every node's difference is told.
    assert verdict_on(two, one, one) == "SEED is '2' on node 0 and '1' on node 1 (host1), node 2 (host2)"
    everybody = verdict_on(one, two, three)
    assert everybody == "SEED is '2' on node 1 (host1) and '3' on node 2 (host2) and '1' on node 0"
    both = verdict_on({"SEED": "1", "LR": "5"}, {"SEED": "2", "LR": "5"}, {"SEED": "1", "LR": "6"})
    assert "SEED is '2' on node 1" in both and "LR is '6' on node 2" in both


def test_a_node_that_does_not_say_its_plan_is_named():
    store = Store({f"plan/{node}": "{}" for node in (0, 1, 3)})
    agreement._wait(store, 0, 2, 0)
    with pytest.raises(agreement.AbsentError, match=r"^nodes 2, 4 joined the run, but no worker there") as caught:
        agreement._wait(store, 0, 5, 0)
    cause = cause_of_exception(caught.value, 0)
    assert (cause.status, cause.strength) == ("timeout", Strength.WAITED)


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ({"settings": {"SEED": "5"}}, "SEED is '5' on node 1"),
        ({"settings": {"GLOBAL_BATCH_SIZE": "32"}}, "GLOBAL_BATCH_SIZE is '32' on node 1"),
        ({"settings": {"EVAL_ITERS": "3"}}, "EVAL_ITERS is '3' on node 1"),
        ({"settings": {"RESUME": "1"}}, "RESUME is '1' on node 1"),
        ({"settings": {"HIDDEN_SIZE": "64"}}, "HIDDEN_SIZE is '64' on node 1"),
        ({"world_size": 4}, "NPROC_PER_NODE is '4' on node 1"),
        ({"nodes": 2}, "NNODES is '2' on node 1"),
        ({"strategy": "zero1"}, "strategy is 'zero1' on node 1"),
        ({"engine": "native"}, "engine is 'native' on node 1"),
        ({"extra_arguments": ["--init-method-std", "0.5"]}, "--init-method-std is '0.5' on node 1"),
    ],
    ids=str,
)
def test_what_all_nodes_must_have_alike(there: dict, named: str):
    here = shared_facts.facts_of(made_plan(settings={"HIDDEN_SIZE": "32"}))
    other = {**there, "settings": {"HIDDEN_SIZE": "32"} | there.get("settings", {})}
    found = shared_facts.difference(shared_facts.facts_of(made_plan(**other)), "on node 1", here, "on node 0")
    assert named in found
