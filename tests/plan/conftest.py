"""Plans that all tests of this folder share: what each launcher answers once, in a project with stubs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness import STRATEGIES, Project, make_project

from t5bench.plan.__main__ import make
from t5bench.plan.launchers import Request
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
    data = str(planned_project.data_prefix.parent)
    return planned(planned_project, *STRATEGIES, "3d", MODEL_FAMILY="gpt", MEGATRON_DATA_DIR=data)


@dataclass
class Made:
    """What the planning process makes of a request."""

    request: Request
    plan: Plan
    besides: Mapping[str, str]

    @property
    def codes(self) -> list[str]:
        return [obstacle.code for obstacle in self.plan.obstacles]

    @property
    def said(self) -> str:
        told = [text for obstacle in self.plan.obstacles for text in (obstacle.found, obstacle.remedy)]
        return "\n".join([*self.request.findings.notes, *told])


@pytest.fixture
def making(
    planned_project: Project, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch
) -> Callable[..., Made]:
    """making("ddp", "--lr", "1", gpus=2): what becomes of a launcher's request with settings and arguments changed."""
    monkeypatch.setattr("t5bench.plan.engine.CHECKSUMS", planned_project.root / "patches" / "checksums")
    monkeypatch.setenv("PATH", planned_project.environment["PATH"])

    def build(strategy: str, *extra: str, gpus: int = 0, nnodes: int = 1, **settings: str) -> Made:
        monkeypatch.setattr("t5bench.plan.layout.count_gpus", lambda environment: gpus)
        family = settings.get("MODEL_FAMILY", "t5")
        plan = request.getfixturevalue("plans" if family == "t5" else "gpt_plans")[strategy]
        changed = {"OUTPUT_DIR": str(tmp_path / "run"), "NNODES": str(nnodes)} | settings
        assert changed.keys() <= plan.settings.keys()
        chosen = {name: replace(s, value=changed.get(name, s.value)) for name, s in plan.settings.items()}
        facts = {"node": "0", "master_address": "127.0.0.1", "dry_run": "1", "launcher": "1"}
        facts["default_tokenizer"] = "google-t5/t5-large"
        asked = Request(plan.strategy, chosen, extra, [], str(tmp_path), facts)
        return Made(asked, *make(asked))

    return build
