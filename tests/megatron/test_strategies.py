"""The launchers on the real engine: a tiny T5 on the bundled sample, on CPU, as a user would start them."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import REPO_ROOT, STRATEGIES

from t5bench.compare.parity import LOSS_TOLERANCE, NORM_TOLERANCE
from t5bench.plan.ports import free_port
from t5bench.record.log import Iteration, PeakMemory, iterations, peak_memory

pytestmark = pytest.mark.slow

# fp32 without dropout: what differs between the strategies is then rounding alone. The clipping norm is exceeded
# in some iterations and not in others, so that a wrong gradient scale cannot hide behind it.
EXACT = {"PRECISION_FLAG": "", "DROPOUT": "0", "CLIP_GRAD": "1.1", "MICRO_BATCH_SIZE": "2", "LR": "0.001"}
PROCESSES = dict.fromkeys(STRATEGIES, 2) | {"hybrid": 4}


@dataclass
class Launched:
    """A finished launch: its run directory, standard error and the parsed log of all nodes."""

    directory: Path
    errors: str

    @property
    def lines(self) -> list[str]:
        logs = sorted(self.directory.glob("node*.log"))
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]

    @property
    def iterations(self) -> list[Iteration]:
        return list(iterations(self.lines))

    @property
    def memory(self) -> list[PeakMemory]:
        return peak_memory(self.lines)


Launch = Callable[..., Launched]


@pytest.fixture(scope="module")
def launch(megatron_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch(strategy, directory, *arguments, **settings): a launcher run to its successful end."""
    data = tmp_path_factory.mktemp("data")
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WANDB_"))} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "MEGATRON_DIR": str(megatron_dir),
        "MEGATRON_DATA_DIR": str(data),
        "DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "MODEL_PRESET": "tiny",
        "TRAIN_ITERS": "20",
        "LOG_INTERVAL": "1",
        "WANDB_MODE": "disabled",
    }
    subprocess.run(
        ["bash", str(REPO_ROOT / "scripts" / "prepare_xsum_megatron.sh")],
        env=base | {"SAMPLE": "1"},
        check=True,
        timeout=120,
    )

    def run(strategy: str, directory: Path, *arguments: str, **settings: str) -> Launched:
        result = subprocess.run(
            ["bash", str(REPO_ROOT / "scripts" / f"run_megatron_t5_{strategy}.sh"), *arguments],
            env=base | {"OUTPUT_DIR": str(directory), "MASTER_PORT": str(free_port())} | settings,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=500,
            check=False,
        )
        launched = Launched(directory, result.stderr)
        assert result.returncode == 0, result.stderr + "\n".join(launched.lines[-60:])
        return launched

    run.environment = base
    return run


@pytest.fixture(scope="module")
def exact(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launched]:
    """exact(strategy): its one fp32 run without dropout, made when first asked for."""
    directory = tmp_path_factory.mktemp("exact")
    runs: dict[str, Launched] = {}

    def get(strategy: str) -> Launched:
        if strategy not in runs:
            runs[strategy] = launch(strategy, directory / strategy, **EXACT)
        return runs[strategy]

    return get


def largest_difference(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second)
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_and_equals_ddp(exact: Callable[[str], Launched], strategy: str):
    run, baseline = exact(strategy), exact("ddp")
    losses = [line.lm_loss for line in run.iterations]
    assert [line.iteration for line in run.iterations] == list(range(1, 21))
    assert losses[-1] < losses[0] - 0.3
    assert largest_difference(losses, [line.lm_loss for line in baseline.iterations]) < LOSS_TOLERANCE
    norms = [line.grad_norm for line in run.iterations]
    assert largest_difference(norms, [line.grad_norm for line in baseline.iterations]) < NORM_TOLERANCE
    assert min(norms) < float(EXACT["CLIP_GRAD"]) < max(norms), "clipping should be active in some iterations alone"
    assert [rank.rank for rank in run.memory] == list(range(PROCESSES[strategy]))


@pytest.mark.parametrize("strategy", ["zero1"])
def test_trains_in_bf16_with_dropout(launch: Launch, tmp_path: Path, strategy: str):
    run = launch(strategy, tmp_path / "run", LR="0.001")
    losses = [line.lm_loss for line in run.iterations]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.3


def test_two_agents_with_separate_node_ranks(launch: Launch, exact: Callable[[str], Launched], tmp_path: Path):
    """Two launchers, as on two nodes: the encoder is on node 0, the log on the last rank's node, the loss the same."""
    settings = EXACT | {
        "HOSTS": "127.0.0.1 127.0.0.2",
        "OUTPUT_DIR": str(tmp_path / "run"),
        "MASTER_PORT": str(free_port()),
    }
    command = ["bash", str(REPO_ROOT / "scripts" / "run_megatron_t5_pipeline.sh"), "127.0.0.1"]
    agents = [
        subprocess.Popen(
            [*command, str(rank)],
            env=launch.environment | settings,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    for agent in agents:
        _, errors = agent.communicate(timeout=300)
        assert agent.returncode == 0, errors
    logs = [(tmp_path / "run" / f"node{rank}.log").read_text() for rank in (0, 1)]
    assert "model parallel rank (0, 0)" in logs[0] and "model parallel rank (0, 1)" not in logs[0]
    assert "model parallel rank (0, 1)" in logs[1]
    assert not list(iterations(logs[0].splitlines()))
    losses = [line.lm_loss for line in iterations(logs[1].splitlines())]
    assert largest_difference(losses, [line.lm_loss for line in exact("pipeline").iterations]) < 1e-6


def test_three_dimensions_on_eight_processes(launch: Launch, exact: Callable[[str], Launched], tmp_path: Path):
    """TP 2 x PP 2 x DP 2: further processes of the hybrid are data parallel."""
    run = launch("hybrid", tmp_path / "run", NPROC_PER_NODE="8", TRAIN_ITERS="20", **EXACT)
    losses = [line.lm_loss for line in run.iterations]
    assert largest_difference(losses, [line.lm_loss for line in exact("ddp").iterations]) < LOSS_TOLERANCE
