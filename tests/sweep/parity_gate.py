"""What the tests of the parity gate share: a copy of the project to change, and the gate's table."""

import os
import shutil
import sys
from pathlib import Path

from harness import REPO_ROOT


def copy_project(folder: Path) -> Path:
    """The project without its tests and what it made, in a new folder."""
    root = folder / "T5-Parallelism"
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache", "tests")
    shutil.copytree(REPO_ROOT, root, ignore=ignored)
    return root


def gate_environment() -> dict[str, str]:
    """The Python that runs the tests, one thread each on the CPU; nothing of a SLURM job or a W&B account."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WANDB_")) and k != "USER"}
    return base | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def verdicts(output: str) -> dict[tuple[str, str], str]:
    """PASS or FAIL by (run, engine), from the gate's table."""
    rows = [line.split() for line in output.splitlines() if line.rstrip().endswith((" PASS", " FAIL"))]
    return {(row[0], row[1]): row[-1] for row in rows}
