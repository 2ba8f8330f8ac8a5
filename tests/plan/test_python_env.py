"""The virtual environment of quickstart and tests, where the base Python has a torch already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Project

# Where packages would be installed nothing is: what is looked at is which Python sees what.
SCRIPT = """
set -euo pipefail
source scripts/common.sh
source scripts/python_env.sh
install_into_venv() { :; }
touch requirements.txt
ensure_venv requirements.txt
python -c 'import torch; print(torch.__file__)'
torchrun a.py --flag "two words"
"""
TORCHRUN = "import sys\nprint(sys.executable, sys.argv[1:])\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A virtual environment with a torch that is none."""
    directory = tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    site = next(directory.glob("lib/python*/site-packages"))
    (site / "torch" / "distributed").mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    (site / "torch" / "distributed" / "__init__.py").touch()
    (site / "torch" / "distributed" / "run.py").write_text(TORCHRUN)
    return directory


def test_a_base_that_is_a_virtual_environment_lends_its_torch(project: Project, base: Path):
    (project.stubs / "torchrun").unlink()
    result = subprocess.run(
        ["bash", "-c", SCRIPT],
        cwd=project.root,
        env=os.environ | {"PYTHON": str(base / "bin" / "python"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    where, torchrun = result.stdout.splitlines()
    assert where.startswith(str(base))
    # The workers are of the environment that has the packages, not of the base.
    assert torchrun == f"{project.root}/.venv/bin/python ['a.py', '--flag', 'two words']"
