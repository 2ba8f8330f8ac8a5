"""scripts/search.sh: live searches of a tiny model on this machine's CPU, with two processes."""

import argparse
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from described import CONFIGS, description_of
from real_runs import environment
from support import REPO_ROOT
from warm_python import warm_python

from t5bench import Problem
from t5bench.choose.search import command, parity
from t5bench.choose.search.next_run import Option, Search, SearchRun, Standing
from t5bench.choose.search.runs import Runner, SearchState
from t5bench.costmodel.job import Architecture, Job, Parallel
from t5bench.plan.planner import plan
from t5bench.sweep import clipping
from t5bench.sweep.launch import BASELINE
from t5bench_evidence import grid

LAYOUTS = {
    "DEVICE": "cpu", "ENGINE": "native", "MODEL_PRESET": "tiny", "PRECISION_FLAG": "", "DROPOUT": "0",
    "GLOBAL_BATCH_SIZE": "4", "NPROC_PER_NODE": "2", "TRAIN_ITERS": "26",
}  # fmt: skip


def search(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(REPO_ROOT / "scripts" / "search.sh"), *arguments]
    chosen = environment(PYTHON=warm_python()) | LAYOUTS | settings
    return subprocess.run(words, env=chosen, capture_output=True, text=True, timeout=500, check=False)


def test_a_dry_run_lists_layouts_and_runs_nothing(sample_data: Path, tmp_path: Path):
    runs = tmp_path / "runs"
    result = search("--dry-run", RUNS_DIR=str(runs), MEGATRON_DATA_DIR=str(sample_data))
    assert result.returncode == 0, result.stderr
    assert "layouts may be the fastest" in result.stdout and "DDP 1/1/2, micro-batch 2" in result.stdout
    assert not runs.exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"RUNS": "0"}, "RUNS must be a whole number of at least 1"),
        ({"TRAIN_ITERS": "20"}, "TRAIN_ITERS must be a whole number of at least 25"),
        ({"TENSOR_PARALLEL_SIZE": "3"}, "no layout of 2 GPUs with TP=3"),
    ],
)
def test_what_cannot_be_searched(sample_data: Path, tmp_path: Path, settings: dict[str, str], says: str):
    result = search(RUNS_DIR=str(tmp_path / "runs"), MEGATRON_DATA_DIR=str(sample_data), **settings)
    assert result.returncode == 2 and says in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(("status", "fault"), [(0, ""), (1, "it does not train as DDP does"), (3, ""), (2, None)])
def test_only_curves_that_were_judged_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, fault: str | None
):
    monkeypatch.setattr(parity, "t5bench", lambda *_: status)
    if fault is None:
        with pytest.raises(Problem, match="ended with status 2"):
            parity.verdict(tmp_path, tmp_path)
    else:
        assert parity.verdict(tmp_path, tmp_path).startswith(fault) and bool(fault) == (status == 1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_small_model_of_the_check_is_of_the_searched_kind(kind: str, monkeypatch: pytest.MonkeyPatch):
    """With its parts; layouts of every size divide it, as their launchers plan it."""
    # As MODEL has it, since the samples are no longer than the window.
    model = replace(description_of(CONFIGS[kind]), window=0, global_every=1)
    sizes_alone = {"hidden", "heads", "kv_heads", "head_size", "ffn", "encoder_layers", "decoder_layers"}
    sizes_alone |= {"encoder_length", "decoder_length", "rotary_columns", "position_rows"}
    monkeypatch.setenv("MODEL", model.description())  # as a search's environment has it
    for tensor, pipeline, strategy in ((1, 1, "fsdp2"), (8, 1, "tensor"), (2, 4, "hybrid"), (1, 8, "pipeline")):
        parallel = Parallel(tensor, pipeline, 2)
        settings = parity.settings_of(SimpleNamespace(job=Job(model, parallel)))
        layout = {"TENSOR_PARALLEL_SIZE": str(tensor), "PIPELINE_PARALLEL_SIZE": str(pipeline), "ENGINE": "native"}
        own = {"DEVICE": "cpu", "PATH": "/usr/bin", "HOME": "/nonexistent", "NPROC_PER_NODE": str(parallel.world)}
        planned = plan({**own, **settings, **layout}, strategy)
        assert planned.layout, planned.obstacles
        small = Architecture.of_arguments(planned.named_arguments, 0)
        assert (small.kv_heads < small.heads) == (model.kv_heads < model.heads) and small.hidden <= 128
        changed = {part.name for part in fields(model) if getattr(model, part.name) != getattr(small, part.name)}
        assert changed <= sizes_alone, changed


@dataclass
class NothingRuns:
    """Stands for a search's runner, which trains nothing."""

    runs_dir: Path
    memory: SearchState
    layouts_fail: Mapping[str, str] = field(default_factory=dict)
    """Why a layout's small training fails, by its name."""
    baseline_fails: str = ""

    def train(self, directory: Path, *_: object) -> str:
        if directory.name == BASELINE:
            return self.baseline_fails
        return self.layouts_fail.get(directory.parent.name, "")


def searched(runner: NothingRuns, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """Among three layouts, which may all run."""
    monkeypatch.setattr(parity, "settings_of", lambda candidate: {"CLIP_GRAD": "1.3"})
    monkeypatch.setattr(parity, "verdict", lambda named, baseline: "")
    cells = {str(number): cell for number, cell in enumerate(grid.read()[:3])}
    candidates = {
        name: SimpleNamespace(title=f"layout {name}", strategy="zero1", job=cell.job, settings=lambda: {})
        for name, cell in cells.items()
    }
    search = Search([Option(name, cell.job, cell.machine) for name, cell in cells.items()])
    runner.memory.outcomes = {name: SearchRun(1.0 + int(name)) for name in cells}
    search.measured = dict(runner.memory.outcomes)
    return command.found(search, candidates, runner, lambda so_far: False)


def test_a_layout_that_does_not_train_as_ddp_does_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = NothingRuns(tmp_path, SearchState({}), layouts_fail={"0": "crashed: an error"})
    standing = searched(runner, monkeypatch)
    assert standing.named.option.name == "1" and runner.memory.parity == ["1"]
    assert runner.memory.failed == {"0": "crashed: an error"}


@pytest.mark.parametrize(
    ("norms", "clip", "runs"),
    [([0.5, 2.0], "1.3", 2), ([2.0, 8.0], "4", 3), ([0.1, 0.4], "0.2", 3), ([3.0], "1.3", 2), ([3.0, 3.0], "1.3", 2)],
)
def test_the_check_clips_some_of_ddps_iterations_and_not_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, norms: list[float], clip: str, runs: int
):
    """The recipe's clipping was chosen for a T5; where a searched model has other norms, DDP trains once more."""
    trained: list[tuple[str, str]] = []

    def train(directory: Path, strategy: str, processes: int, settings: Mapping[str, str], *_: object) -> str:
        trained.append((directory.name, settings["CLIP_GRAD"]))
        return ""

    monkeypatch.setattr(parity, "settings_of", lambda candidate: {"CLIP_GRAD": "1.3"})
    monkeypatch.setattr(clipping, "norms_of", lambda baseline: norms)
    monkeypatch.setattr(parity, "verdict", lambda named, baseline: f"compared with {baseline.name}")
    candidate = SimpleNamespace(strategy="zero1", settings=dict, job=SimpleNamespace(parallel=SimpleNamespace(world=2)))
    said = parity.fault_of("a", candidate, SimpleNamespace(runs_dir=tmp_path, train=train))
    assert len(trained) == runs and trained[-1] == ("named", clip)
    assert said == f"compared with {trained[-2][0]}" and trained[-2][1] == clip


def test_a_failing_ddp_is_blamed_on_no_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = NothingRuns(tmp_path, SearchState({}), baseline_fails="out-of-memory: the GPU's memory is full")
    with pytest.raises(Problem, match="DDP, with which layouts are compared, failed: out-of-memory"):
        searched(runner, monkeypatch)
    assert runner.memory.failed == {} and runner.memory.parity == []


def test_runs_that_fail_count_and_end_no_search_before_one_gave_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a layout that runs and then runs out of memory, both runs are lost."""
    memory = SearchState({})
    runner = Runner(tmp_path, False, 3, memory)
    candidate = SimpleNamespace(
        title="a layout", strategy="ddp", settings=dict, job=SimpleNamespace(parallel=SimpleNamespace(world=2))
    )
    monkeypatch.setattr(Runner, "train", lambda *_: "out-of-memory: the GPU's memory is full")
    may_go_on = command.budget(argparse.Namespace(runs=3, minutes=None), memory)
    memory.outcomes["twice"] = SearchRun(0.5)
    search = Search([], measured=dict(memory.outcomes))
    runner.measure("once", candidate)
    assert memory.lost == 1 and may_go_on(search)
    runner.measure("twice", candidate)
    assert memory.lost == 3 and memory.outcomes == {} and memory.ran_out == ["once", "twice"]
    assert "in run 2 of this layout; it ran before, at 0.5 s an iteration" in memory.failed["twice"]
    assert may_go_on(Search([])) and not may_go_on(Search([], measured={"another": SearchRun(1.0)}))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_search_stops_at_its_budget_and_continues_without_repeating_a_run(sample_data: Path, tmp_path: Path):
    """The budget of one run, then of two: two runs in all, of which the first is not repeated."""
    where = {"RUNS_DIR": str(tmp_path / "runs"), "MEGATRON_DATA_DIR": str(sample_data)}
    first = search(RUNS="1", **where)
    assert first.returncode == 3, first.stderr
    assert "The budget ended before this was certain" in first.stdout
    assert "its curves agree with DDP's" in first.stdout and "PASS" in first.stdout
    before = json.loads((tmp_path / "runs" / "search.json").read_text())
    second = search(RUNS="2", **where)
    assert second.returncode in (0, 3), second.stderr
    after = json.loads((tmp_path / "runs" / "search.json").read_text())
    (name,) = after["outcomes"]  # the first layout that runs is the first to run again
    assert after["outcomes"][name]["times"][0] == before["outcomes"][name]["seconds"]
    assert len(list((tmp_path / "runs" / "runs").iterdir())) == 2
    assert "<svg" in (tmp_path / "runs" / "search.svg").read_text()
    named = min(after["outcomes"].items(), key=lambda item: item[1]["seconds"])[0]
    assert named in after["parity"] and "bash scripts/run_megatron_t5_" in second.stdout
    other = search(RUNS="2", GLOBAL_BATCH_SIZE="8", **{name: where[name] for name in where})
    assert other.returncode == 2 and "holds another search: GLOBAL_BATCH_SIZE is '8' and was '4'" in other.stderr
