"""Mistakes planted in one strategy of an engine (mistakes.txt), which scripts/check_parity.sh must name.

A few of them here; ALL_MISTAKES=1 python -m pytest tests/engines/test_mistakes.py plants all, in half an hour.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from real_runs import GATE, environment, make_clone, verdicts
from support import REPO_ROOT
from warm_python import warm_python

from t5bench.compare.parity import gate
from t5bench.plan.ports import free_port
from t5bench.record.records import load
from t5bench.sweep.parity_check import ARGUMENTS

pytestmark = pytest.mark.slow


class Mistake(NamedTuple):
    engine: str
    strategy: str
    file: str
    right: str
    wrong: str


LINES = Path(__file__).with_name("mistakes.txt").read_text().replace(" => ", " | ").splitlines()
MISTAKES = [Mistake(*line.replace("\\n", "\n").split(" | ")) for line in LINES if line and not line.startswith("#")]


# One that a gate with a small learning rate did not see, and one of each strategy of another kind.
FEW = ('"weight_decay": 0.0}', "shape_of(parameter)) > 0", "output.mean() / count", "(output * is_last)")
# GPT's 3D as DeepSpeed had it, and one of each other kind.
NIGHTLY = (
    "batch[:self.micro",
    "model._backward_prologue_per_tensor = super",
    "self.kept",
    "self.forward_step(micro_batches[number if part",
    "parameter.grad += gradient * (micro_batch",
    "int(match[1])",
)


def chosen() -> Iterator[Any]:
    for mistake in MISTAKES:
        if os.environ.get("ALL_MISTAKES") or mistake.wrong.startswith(FEW):
            yield mistake
        elif mistake.wrong.startswith(NIGHTLY):
            yield pytest.param(mistake, marks=pytest.mark.nightly)


class Planter:
    """Copies of the project and of the real engine with one mistake at a time, and DDP's runs without a mistake."""

    def __init__(self, directory: Path, data: Path, gpt: dict[str, str]) -> None:
        self.directory = directory
        self.project = make_clone(directory)
        self.engine = directory / "Megatron-DeepSpeed"
        shutil.copytree(gpt["MEGATRON_DIR"], self.engine, ignore=shutil.ignore_patterns(".git"))
        self.settings = GATE | {"MEGATRON_DATA_DIR": str(data), "MEGATRON_DIR": str(self.engine)}
        self.settings["PYTHON"] = warm_python()
        self.of_engine = {name: {"ENGINE": name} for name in ("native", "megatron")}
        self.of_engine["native-sequence"] = {"ENGINE": "native", "SEQUENCE_PARALLEL": "1"}
        self.of_engine["native-gpt"] = gpt | {"ENGINE": "native"}
        deep = {"ENCODER_NUM_LAYERS": "3", "DECODER_NUM_LAYERS": "3", "ENGINE": "native"}
        self.of_engine["native-deep"] = self.of_engine["native-interleaved"] = deep
        self.of_engine["native-zero-bubble"] = deep
        self.of_pipeline = {
            "native-deep": {"PIPELINE_PARALLEL_SIZE": "4"},
            "native-interleaved": {"PIPELINE_SCHEDULE": "interleaved"},
            "native-zero-bubble": {"PIPELINE_SCHEDULE": "zero-bubble"},
        }
        self.of_engine["gpt"] = gpt | {"MEGATRON_DIR": str(self.engine)}

    def path(self, file: str) -> Path:
        return (self.project if file.startswith(("native/", "ds_configs/")) else self.engine) / file

    def check(self, *strategies: str, **settings: str) -> tuple[dict[tuple[str, str], str], str]:
        """The verdicts of scripts/check_parity.sh on the real engine, and all that it said."""
        shorter = {"TRAIN_ITERS": "8", "CHECK_BLIND_SPOTS": "0", "RUNS_DIR": str(self.directory / strategies[0])}
        result = subprocess.run(
            ["bash", str(self.project / "scripts" / "check_parity.sh"), *strategies],
            env=environment(**self.settings | {"ENGINE": "megatron"} | shorter | settings),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        said = result.stdout + result.stderr
        assert result.returncode == 1, said
        return verdicts(result.stdout), said

    @contextmanager
    def planted(self, mistake: Mistake) -> Iterator[None]:
        path = self.path(mistake.file)
        checksums = self.project / "patches" / "checksums" / "series.sha256"
        right = path.read_text()
        sums = checksums.read_text()
        assert right.count(mistake.right) == 1, f"{mistake.file} has {right.count(mistake.right)} of {mistake.right!r}"
        path.write_text(right.replace(mistake.right, mistake.wrong))
        # The project's checksums call the engine patched.
        old, new = (hashlib.sha256(text.encode()).hexdigest() for text in (right, path.read_text()))
        checksums.write_text(sums.replace(old, new))
        try:
            yield
        finally:
            path.write_text(right)
            checksums.write_text(sums)

    def train(self, engine: str, strategy: str, directory: Path) -> Path:
        """A run of the strategy, unless the directory has it already."""
        pipeline = {} if strategy == "ddp" else self.of_pipeline.get(engine, {})
        own = self.of_engine[engine] | pipeline | {"OUTPUT_DIR": str(directory), "MASTER_PORT": str(free_port())}
        if not directory.exists():
            command = ["bash", str(self.project / "scripts" / f"run_megatron_t5_{strategy}.sh"), "--", *ARGUMENTS]
            settings = environment(**self.settings | own)
            subprocess.run(command, env=settings, stdout=subprocess.DEVNULL, timeout=300, check=False)
        return directory


@pytest.fixture(scope="module")
def planter(gpt: dict[str, str], sample_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Planter:
    return Planter(tmp_path_factory.mktemp("mistakes"), sample_data, gpt)


def test_the_list_is_long_enough_and_can_be_planted(planter: Planter):
    engines = [mistake.engine for mistake in MISTAKES]
    assert len(engines) == len(set(MISTAKES)) >= 40
    own = {f"native-{which}" for which in ("gpt", "sequence", "deep", "interleaved", "zero-bubble")}
    expected = {"native", "megatron", "gpt"} | own
    assert set(engines) == expected
    assert all((REPO_ROOT / "scripts" / f"run_megatron_t5_{m.strategy}.sh").exists() for m in MISTAKES)
    assert [m for m in MISTAKES if planter.path(m.file).read_text().count(m.right) != 1] == []


@pytest.mark.parametrize(
    "mistake",
    chosen(),
    ids=lambda m: f"{m.engine}-{m.strategy}-{m.wrong}",
)
def test_a_planted_mistake_is_named(planter: Planter, mistake: Mistake, tmp_path: Path):
    baseline = planter.train(mistake.engine, "ddp", planter.directory / mistake.engine / "ddp")
    with planter.planted(mistake):
        directory = planter.train(mistake.engine, mistake.strategy, tmp_path / mistake.strategy)
    assert load(directory).status == "complete", "a mistake that ends the run shows without a gate"
    (found, honest), blind = gate([directory, baseline], baseline)
    assert honest.passed and not blind
    print(mistake, found.loss, found.norm)
    engine = planter.of_engine[mistake.engine]["ENGINE"]
    assert not found.passed and str(found) == f"{mistake.strategy} ({engine})"


@pytest.mark.nightly
def test_a_dropout_mask_that_all_slices_share_is_found(planter: Planter, tmp_path: Path):
    """With sequence parallelism each rank has its own part of the mask that tensor parallelism draws: the gate
    compares the two with dropout, under which DDP draws other masks."""
    right = "mask = own_part(whole.bernoulli_(kept, generator=self.tp.rng), self.tp).clone()"
    wrong = "mask = whole.bernoulli_(kept, generator=self.tp.rng).chunk(self.tp.size, 1)[0].clone()"
    mistake = Mistake("native-sequence", "tensor", "native/tensor_parallel.py", right, wrong)
    planter.settings |= {"DROPOUT": "0.1"}
    try:
        baseline = planter.train("native", "tensor", tmp_path / "tensor")
        honest = planter.train("native-sequence", "tensor", tmp_path / "honest")
        with planter.planted(mistake):
            wrongly = planter.train("native-sequence", "tensor", tmp_path / "wrongly")
    finally:
        planter.settings |= {"DROPOUT": GATE["DROPOUT"]}
    (found, right_one, _), _ = gate([wrongly, honest, baseline], baseline)
    assert right_one.passed and not found.passed, (right_one, found)


@pytest.mark.nightly
def test_upstream_bugs_put_back_are_found(planter: Planter):
    """A mistake in one strategy shows against DDP, a mistake in all of them against the other engine."""
    bias, mask = [mistake for mistake in MISTAKES if mistake.file.endswith("t5_model.py")]
    with planter.planted(bias), planter.planted(mask):
        found, said = planter.check("tensor")
    assert found == {("ddp", "megatron"): "PASS", ("tensor", "megatron"): "FAIL", ("ddp", "native"): "FAIL"}, said


@pytest.mark.nightly
def test_deepspeed_that_trains_on_the_last_micro_batch(planter: Planter):
    """DeepSpeed 0.17.6's ZeRO-2, which the launcher refuses: in a copy that takes it."""
    folder = os.environ.get("DEEPSPEED_0_17_6")
    if not folder or not (Path(folder) / "deepspeed-0.17.6.dist-info").is_dir():
        pytest.skip(
            "DEEPSPEED_0_17_6 names no folder with that release: "
            "pip install --no-deps --no-build-isolation --target FOLDER deepspeed==0.17.6"
        )
    path = planter.project / "t5bench" / "record" / "wrong_releases.json"
    ledger = path.read_text()
    path.write_text(json.dumps(json.loads(ledger) | {"exceptions": [["right", "", ""]] * 99}))
    found, said = planter.check("zero1", "zero2", PYTHONPATH=folder)
    path.write_text(ledger)
    assert found.pop(("zero2", "megatron")) == "FAIL", said
    assert found == dict.fromkeys([("ddp", "megatron"), ("zero1", "megatron"), ("ddp", "native")], "PASS"), said
