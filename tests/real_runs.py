"""Real trainings of a tiny T5 on the CPU, through the launchers as a user starts them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support import REPO_ROOT, processes_with
from warm_python import warm_python

from t5bench.plan.ports import free_port
from t5bench.record.records import load
from t5bench.record.run import Run

TIME_LIMIT = 500
# The clipping norm is exceeded in some iterations and not in others, so that a wrong gradient scale cannot hide.
SMALL = {"DEVICE": "cpu", "GLOBAL_BATCH_SIZE": "8", "LR": "0.001", "CLIP_GRAD": "1.14"}
TINY = SMALL | {
    "MODEL_PRESET": "tiny", "TRAIN_ITERS": "20", "LOG_INTERVAL": "1", "MICRO_BATCH_SIZE": "2", "WANDB_MODE": "disabled",
}  # fmt: skip
# The strategies then differ only by rounding.
EXACT = {"PRECISION_FLAG": "", "DROPOUT": "0"}
# The recipe of scripts/check_parity.sh, in which every number shows.
GATE = {
    "DEVICE": "cpu", "MODEL_PRESET": "tiny", "TRAIN_ITERS": "12", "LOG_INTERVAL": "1", "GLOBAL_BATCH_SIZE": "8",
    "MICRO_BATCH_SIZE": "2", "LR": "0.04", "MIN_LR": "0.01", "LR_WARMUP_ITERS": "3",
    "WEIGHT_DECAY": "5", "CLIP_GRAD": "1.3", "PRECISION_FLAG": "", "DROPOUT": "0", "WANDB_MODE": "disabled",
}  # fmt: skip
# Evaluated, saved after half of the iterations, and logged to W&B.
WATCHED = {
    "EVAL_ITERS": "2", "EVAL_INTERVAL": "10", "SAVE_INTERVAL": "10",
    "WANDB_MODE": "offline", "WANDB_RUN_GROUP": "trial", "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
}  # fmt: skip
# The Python that runs the tests, in which every process imports torch anew.
COLD = {"PYTHON": sys.executable}
CLONE = "a fresh clone/T5-Parallelism"


def environment(**settings: str) -> dict[str, str]:
    """The Python that runs the tests; nothing of a SLURM job, of a W&B account or of where packages come from."""
    foreign = ("SLURM_", "WANDB_", "PIP_", "VIRTUAL_ENV")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return inherited | {"PATH": path, "PYTHON": sys.executable} | settings


def start(strategy: str, *nodes: Path, arguments: Sequence[str] = (), **settings: str) -> list[subprocess.Popen[str]]:
    """The strategy's launcher on so many nodes, each with its output directory, which they may share.

    Its torchrun and workers are forks of a warm Python, unless a setting says which PYTHON to use: COLD is a user's.
    """
    chosen = TINY | {"MASTER_PORT": str(free_port()), "PYTHON": settings.get("PYTHON") or warm_python()} | settings
    if len(nodes) > 1:
        chosen |= {"NNODES": str(len(nodes)), "HOSTS": " ".join(f"127.0.0.{node + 1}" for node in range(len(nodes)))}
    launcher = str(REPO_ROOT / "scripts" / f"run_megatron_t5_{strategy}.sh")
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            ["bash", launcher, "127.0.0.1", str(rank), *arguments],
            env=environment(**chosen, OUTPUT_DIR=str(directory)),
            **output,
        )
        for rank, directory in enumerate(nodes)
    ]


def finish(launchers: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Waits for the launchers' successful end; what each said on standard error."""
    said = [launcher.communicate(timeout=TIME_LIMIT)[1] for launcher in launchers]
    assert not any(launcher.returncode for launcher in launchers), "\n".join(said)
    return said


def train(strategy: str, *nodes: Path, arguments: Sequence[str] = (), **settings: str) -> Run:
    """A run to its successful end, as the last node's directory has it."""
    finish(start(strategy, *nodes, arguments=arguments, **settings))
    return load(nodes[-1])


def kill(launchers: Sequence[subprocess.Popen[str]], mark: str) -> None:
    """Ends launchers, recorders, torchrun and workers, which have this text in their environment, like a power cut."""
    while found := processes_with(mark):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for launcher in launchers:
        launcher.communicate(timeout=60)


def make_clone(directory: Path) -> Path:
    """The files of the repository, with the virtual environment that runs these tests: nothing has to be downloaded."""
    target = directory / CLONE
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache")
    shutil.copytree(REPO_ROOT, target, ignore=ignored)
    (target / ".venv").symlink_to(sys.prefix)
    return target


def run_quickstart(directory: Path) -> None:
    """The quickstart in a clone, with what makes its runs comparable to the digit and watches them; what it says goes
    to outputs/stdout and outputs/stderr."""
    clone = make_clone(directory)
    command = ["bash", str(clone / "scripts" / "quickstart.sh")]
    settings = environment(**SMALL, **WATCHED, TRAIN_ITERS=TINY["TRAIN_ITERS"])
    result = subprocess.run(
        command, env=settings, cwd=clone.parent, capture_output=True, text=True, timeout=590, check=False
    )
    assert result.returncode == 0, result.stderr + result.stdout
    for name in ("stdout", "stderr"):
        (clone / "outputs" / name).write_text(getattr(result, name))


def verdicts(output: str) -> dict[tuple[str, str], str]:
    """PASS or FAIL by (run, engine), from the gate's table."""
    rows = [line.split() for line in output.splitlines() if line.rstrip().endswith((" PASS", " FAIL"))]
    return {(row[0], row[1]): row[-1] for row in rows}
