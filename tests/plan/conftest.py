"""Plans that all tests of this folder share: what each launcher answers once, in a project with stubs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import STRATEGIES, Project, make_project, write_data_record

from t5bench.plan.planner import plan
from t5bench.plan.ports import free_port
from t5bench.record.gpus import GpuInventory
from t5bench.record.plan import Plan


@pytest.fixture(scope="session")
def planned_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project in which everything that a run needs is there. Tests only read it."""
    return make_project(tmp_path_factory.mktemp("planned"))


def planned(project: Project, *strategies: str, **environment: str) -> dict[str, Plan]:
    found = {}
    for strategy in strategies:
        result = project.launch(strategy, "--dry-run=json", **environment)
        assert result.returncode == 0, result.stderr
        found[strategy] = Plan.read(json.loads(result.stdout))
    return found


@pytest.fixture(scope="session")
def plans(planned_project: Project) -> dict[str, Plan]:
    """The plan of each strategy, as its launcher prints it."""
    return planned(planned_project, *STRATEGIES)


@pytest.fixture(scope="session")
def gpt_plans(planned_project: Project) -> dict[str, Plan]:
    prefix = planned_project.data_prefix.parent / "gpt" / planned_project.data_prefix.name
    prefix.parent.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(planned_project.data_prefix.with_suffix(suffix), prefix.with_suffix(suffix))
    write_data_record(prefix, tokenizer_type="GPT2BPETokenizer")
    return planned(planned_project, *STRATEGIES, "3d", MODEL_FAMILY="gpt")


@dataclass
class Made:
    """A plan that was made in this process."""

    plan: Plan

    @property
    def codes(self) -> list[str]:
        return [obstacle.code for obstacle in self.plan.obstacles]

    @property
    def notes(self) -> list[str]:
        return list(self.plan.notes)

    @property
    def said(self) -> str:
        told = [text for obstacle in self.plan.obstacles for text in (obstacle.found, obstacle.remedy)]
        return "\n".join([*self.plan.notes, *told])


@pytest.fixture
def making(planned_project: Project, tmp_path: Path, monkeypatch) -> Callable[..., Made]:
    """making("ddp", "--lr", "1", gpus=2): the plan with engine arguments and settings, on a machine with GPUs."""
    monkeypatch.setattr("t5bench.plan.engine.CHECKSUMS", planned_project.root / "patches" / "checksums")
    monkeypatch.setenv("PATH", planned_project.environment["PATH"])

    def build(strategy: str, *extra: str, gpus: int = 0, nnodes: int = 1, fault: str = "", **settings: str) -> Made:
        names = ("NVIDIA Stub",) * gpus
        inventory = GpuInventory(names, "nvidia-smi" if gpus else "", fault)
        monkeypatch.setattr("t5bench.plan.layout.visible_gpus", lambda environ: inventory)
        if gpus:
            settings = {"DEVICE": "auto", **settings}
        places = {
            "OUTPUT_DIR": str(tmp_path / "run"),
            "MEGATRON_DIR": str(planned_project.engine),
            "MEGATRON_DATA_DIR": str(planned_project.data_prefix.parent),
        }
        nodes = {"NNODES": str(nnodes), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environ = {**planned_project.environment, **places, **nodes, **settings}
        return Made(plan(environ, strategy, extra, str(tmp_path)))

    return build
