"""What --trace writes: where two runs first differ, and what a run did that does not follow from its own numbers."""

import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from real_runs import GATE, TIME_LIMIT, environment, make_clone, train
from support import REPO_ROOT

from t5bench.compare.parity import own_contradictions, verdict
from t5bench.plan.ports import free_port
from t5bench.record.records import load
from t5bench.record.run import Run
from t5bench.sweep.parity_check import ARGUMENTS, TRACE
from training_comparison.first_difference import Place, first_difference
from training_comparison.traces import PHASES, trace_of_run

# Python imports this before anything else; PLANT is code.
HOOK = f"""
import os, sys
if "RANK" in os.environ and os.environ.get("PLANT"):
    sys.path.insert(0, {str(REPO_ROOT)!r})
    import torch
    from native import data_parallel, layers, precision, zero
    RANK = int(os.environ["RANK"])
    def after(owner, name, change):
        # Replaces a function by what makes of its result and its arguments another result.
        function = getattr(owner, name)
        setattr(owner, name, lambda *words, **more: change(function(*words, **more), *words))
    def rounded(values):
        return values.to(torch.bfloat16).to(values.dtype)
    exec(os.environ["PLANT"])
"""

# By what is wrong: what is planted, and a word of the sentence that a bf16 run of DDP gets for it.
MISTAKES_IN_BF16 = {
    "learning rate": (
        "step = data_parallel.TorchTrainer.step\n"
        "data_parallel.TorchTrainer.step = lambda self, batch, rate: step(self, batch, 1.01 * rate)",
        "the update of",
    ),
    "loss in bf16": ("after(data_parallel, 'mean_loss', lambda loss, *_: rounded(loss))", "printed the loss"),
    "norm in bf16": ("after(data_parallel, 'clip_gradients', lambda norm, *_: rounded(norm))", "gradient norm"),
    "accumulated in bf16": (
        "def accumulate(_, trainer, *__):\n"
        "    for parameter in trainer.model.parameters():\n"
        "        parameter.grad.copy_(rounded(parameter.grad))\n"
        "after(data_parallel.TorchTrainer, 'backward', accumulate)",
        "the reduced gradient of",
    ),
    "stale copies": (
        "forget = data_parallel.forget_copies\n"
        "calls = []\n"
        "data_parallel.forget_copies = lambda: calls.append(0) or len(calls) % 2 or forget()",
        "copies of",
    ),
    "masters in bf16": (
        "from torch.optim.optimizer import register_optimizer_step_post_hook as hook\n"
        "def round_all(optimizer, *_):\n"
        "    for group in optimizer.param_groups:\n"
        "        for parameter in group['params']:\n"
        "            parameter.data.copy_(rounded(parameter.data))\n"
        "hook(round_all)",
        "the update of",
    ),
    "reduced in bf16": (
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\n"
        "def reduce(group, bucket):\n"
        "    bucket.buffer().copy_(rounded(bucket.buffer()))\n"
        "    return allreduce_hook(group, bucket)\n"
        "after(data_parallel.TorchTrainer, '__init__',\n"
        "      lambda _, self, *__: self.replicas[0].register_comm_hook(None, reduce))",
        "the reduced gradient of",
    ),
}

# In ZeRO-1 alone, which gets: a word of the sentence of a bf16 run that is compared with DDP's.
MISTAKES_OF_ZERO1 = {
    "dropout on one rank": (
        "layers.SharedDropout.__init__ = lambda self, p, tp, init=layers.SharedDropout.__init__: init(\n"
        "    self, 0.01 if RANK == 1 else p, tp)",
        "forward pass, embedding of the encoder, rank 1",
    ),
    "epsilon of LayerNorm": (
        "after(layers.LayerNorm, '__init__', lambda _, self, *__: setattr(self, 'eps', 1e-4))",
        "forward pass, encoder.layers.0.input_layernorm, ranks 0, 1",
    ),
    "loss on one rank": (
        "after(zero.ZeroTrainer, 'loss', lambda loss, *_: loss * (1.01 if RANK == 1 else 1))",
        "the backward pass of rank 1 is",
    ),
}

REDUCED_IN_BF16 = """if True:
    from native import fsdp2
    policy = fsdp2.MixedPrecisionPolicy
    fsdp2.MixedPrecisionPolicy = lambda **words: policy(**words | {"reduce_dtype": torch.bfloat16})
    """

LINES = Path(__file__).with_name("places.txt").read_text().splitlines()
PLACES = [line.replace("\\n", "\n") for line in LINES if line and not line.startswith("#")]
FEW = ("1.001 if torch.distributed", "embedding.axis.all_reduce(first) => pass")


def rest_is_long(*names: str) -> list[Any]:
    """Cases that take minutes together."""
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


def traced(data: Path, directory: Path, strategy: str, plant: str = "", **settings: str) -> Run:
    directory.mkdir(parents=True)
    (directory / "sitecustomize.py").write_text(HOOK)
    own = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(data), "TRAIN_ITERS": "4", "OMP_NUM_THREADS": "1"}
    own |= {"PYTHONPATH": str(directory), "PLANT": plant}
    arguments: Sequence[str] = ("--", *ARGUMENTS, *TRACE)
    return train(strategy, directory / "run", arguments=arguments, **GATE | own | settings)


@pytest.fixture(scope="module")
def baseline(sample_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return traced(sample_data, tmp_path_factory.mktemp("traces") / "ddp", "ddp")


def located(run: Run, baseline: Run) -> Place | None:
    return first_difference(trace_of_run(run.directory), trace_of_run(baseline.directory))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hybrid", *rest_is_long("zero3", "zero1", "tensor", "pipeline", "fsdp2")])
def test_an_honest_run_differs_nowhere(sample_data: Path, tmp_path: Path, baseline: Run, strategy: str):
    run = traced(sample_data, tmp_path / strategy, strategy)
    assert located(run, baseline) is None
    assert own_contradictions(run) == own_contradictions(baseline) == []


@pytest.mark.slow
@pytest.mark.nightly
def test_honest_runs_in_bf16_differ_nowhere(sample_data: Path, tmp_path: Path):
    """In the sixth iteration their gradients differ by more than half."""
    longer = {"PRECISION_FLAG": "--bf16", "TRAIN_ITERS": "12"}
    ddp, tensor = (traced(sample_data, tmp_path / name, name, **longer) for name in ("ddp", "tensor"))
    assert located(tensor, ddp) is None
    assert own_contradictions(tensor) == []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which a test may make a mistake."""
    return make_clone(tmp_path_factory.mktemp("a copy"))


def trained_in(copy: Path, data: Path, directory: Path, strategy: str) -> Run:
    own = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(data), "TRAIN_ITERS": "4", "OMP_NUM_THREADS": "1"}
    own |= {"OUTPUT_DIR": str(directory), "MASTER_PORT": str(free_port())}
    launcher = str(copy / "scripts" / f"run_megatron_t5_{strategy}.sh")
    command = ["bash", launcher, "--", *ARGUMENTS, *TRACE]
    subprocess.run(command, env=environment(**GATE | own), stdout=subprocess.DEVNULL, timeout=TIME_LIMIT, check=True)
    return load(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [line if any(few in line for few in FEW) else pytest.param(line, marks=pytest.mark.nightly) for line in PLACES],
)
def test_a_mistake_of_one_layout_is_located(sample_data: Path, tmp_path: Path, baseline: Run, copy: Path, line: str):
    strategy, file, change, place = line.split(" | ")
    right, wrong = change.split(" => ")
    path = copy / file
    text = path.read_text()
    assert text.count(right) == 1, f"{file} has {text.count(right)} of {right!r}"
    path.write_text(text.replace(right, wrong))
    try:
        found = located(trained_in(copy, sample_data, tmp_path / strategy, strategy), baseline)
    finally:
        path.write_text(text)
    assert found is not None
    words = [found.step, found.phase, found.name.replace(" ", "-"), *found.ranks]
    assert " ".join(map(str, words)) == place
    assert found.sentence("iteration").startswith(f"first differs at iteration {found.step}, ")


def test_what_a_mistake_replaces_is_there_once():
    """Most mistakes are planted at night alone; what is rewritten meanwhile shows here."""
    for line in PLACES:
        _, file, change, _ = line.split(" | ")
        right, _ = change.split(" => ")
        assert (REPO_ROOT / file).read_text().count(right) == 1, line


def test_enough_mistakes_of_each_phase_are_planted():
    phases = Counter(line.rpartition(" | ")[2].split()[1] for line in PLACES)
    assert phases.keys() == PHASES.keys() and len(PLACES) >= 60


@pytest.fixture(scope="module")
def baseline_in_bf16(sample_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return traced(sample_data, tmp_path_factory.mktemp("traces") / "ddp", "ddp", PRECISION_FLAG="--bf16")


@pytest.mark.slow
def test_an_honest_run_in_bf16_does_not_contradict_its_own_numbers(baseline_in_bf16: Run):
    assert own_contradictions(baseline_in_bf16) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        "accumulated in bf16",
        *rest_is_long(*(name for name in MISTAKES_IN_BF16 if name != "accumulated in bf16")),
    ],
)
def test_a_mistake_in_bf16_contradicts_the_runs_own_numbers(sample_data: Path, tmp_path: Path, mistake: str):
    plant, word = MISTAKES_IN_BF16[mistake]
    run = traced(sample_data, tmp_path / "ddp", "ddp", plant, PRECISION_FLAG="--bf16")
    assert word in "; ".join(own_contradictions(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["", "loss on one rank", *rest_is_long("dropout on one rank", "epsilon of LayerNorm")]
)
def test_a_small_mistake_of_one_strategy_in_bf16_is_named(
    sample_data: Path, tmp_path: Path, baseline_in_bf16: Run, mistake: str
):
    """Their curves differ by less than those of correct runs may."""
    plant, words = MISTAKES_OF_ZERO1.get(mistake, ("", ""))
    run = traced(sample_data, tmp_path / "zero1", "zero1", plant, PRECISION_FLAG="--bf16")
    said = "; ".join(verdict(run, baseline_in_bf16).reasons)
    assert words in said
    assert bool(said) == bool(mistake)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [pytest.param("", id="honest", marks=pytest.mark.nightly), pytest.param(REDUCED_IN_BF16, id="reduced in bf16")],
)
def test_fsdp2_that_reduces_in_bf16_contradicts_its_own_numbers(sample_data: Path, tmp_path: Path, plant: str):
    """Its gradients are divided before a trace can see them."""
    run = traced(sample_data, tmp_path / "fsdp2", "fsdp2", plant, PRECISION_FLAG="--bf16")
    sentences = own_contradictions(run)
    if plant:
        assert "has only values of 16 bits" in "; ".join(sentences)
    else:
        assert sentences == []
