"""The virtual environment of quickstart and tests: where its torch comes from, and what may be wrong."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO_ROOT, Project

BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
TORCHRUN = "import sys\nprint(sys.executable, sys.argv[1:])\n"


def ensure(project: Project, python: Path, *requirements: str, before: str = "", **environment: str):
    """t5bench.sweep.venv in the project's checkout, by this Python, which runs ``before`` first."""
    program = f"import runpy, sys\n{before}\nrunpy.run_module('t5bench.sweep.venv', run_name='__main__')"
    names = requirements or ("requirements.txt",)
    for name in names:
        (project.root / name).write_text("packaging\n")
    return subprocess.run(
        [str(python), "-c", program, *names],
        cwd=project.root,
        env={"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def stub_venv(project: Project, pip: str) -> None:
    """A virtual environment that is there already and whose `pip install` is this shell command."""
    python = project.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\n[[ $* != *"-m pip"* ]] || {{ {pip}; exit; }}\nexec {BASE} "$@"\n')
    python.chmod(0o755)
    python.with_name("pip").touch()


def test_torch_of_a_base_virtual_environment_is_used(project: Project, tmp_path: Path):
    base = tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base)], check=True)
    torch = next(base.glob("lib/python*/site-packages")) / "torch"
    (torch / "distributed").mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "distributed" / "run.py").write_text(TORCHRUN)
    # Nothing is installed: what is looked at is which Python sees what.
    skip = "import subprocess as s; run = s.run; s.run = lambda c, **k: run(['true'] if 'pip' in c else c, **k)"
    result = ensure(project, base / "bin" / "python", before=skip)
    assert result.returncode == 0, result.stderr
    python = project.root / ".venv" / "bin" / "python"
    where = subprocess.check_output([python, "-c", "import torch; print(torch.__file__)"], text=True)
    assert where.startswith(str(base))
    # The workers are of the environment that has the packages, not of the base.
    command = [python, "-m", "torch.distributed.run", "a.py", "--flag", "two words"]
    assert subprocess.check_output(command, text=True) == f"{python} ['a.py', '--flag', 'two words']\n"


def test_an_interrupted_environment_is_made_again(project: Project):
    subprocess.run([BASE, "-m", "venv", "--without-pip", str(project.root / ".venv")], check=True)
    result = ensure(project, BASE, PIP_NO_INDEX="1")
    assert "creating a virtual environment" in result.stderr and "No module named pip" not in result.stderr


def test_a_complete_environment_is_not_changed(project: Project):
    calls = project.root / "calls"
    stub_venv(project, f'echo "${{@: -1}}" >>{shlex.quote(str(calls))}')
    for names in (["one.txt"], ["one.txt"], ["one.txt", "two.txt"], ["one.txt"]):
        assert ensure(project, BASE, *names).returncode == 0
    said = calls.read_text().split()
    assert said[0] == "uv" and said[1].startswith("torch==")  # this uv finds no CPU build
    assert said.count("one.txt") == 2 and said.count("two.txt") == 1


@pytest.mark.parametrize("has_gpu", [False, True])
def test_uv_on_path_chooses_the_build_of_torch(project: Project, tmp_path: Path, has_gpu: bool):
    """The index that it fails to reach is named, with what that costs, unless the build would have been as large."""
    calls = tmp_path / "calls"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("uv", "nvidia-smi") if has_gpu else ("uv",):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\nexit 1\n')
        (tools / name).chmod(0o755)
    stub_venv(project, f'echo "pip $*" >>{shlex.quote(str(calls))}')
    result = ensure(project, BASE, PATH=f"{tools}:/usr/bin:/bin")
    assert result.returncode == 0, result.stderr
    first, second, *_ = calls.read_text().splitlines()
    assert first.startswith("uv pip install") and f"--torch-backend {'auto' if has_gpu else 'cpu'} torch==" in first
    assert second.startswith("pip ") and " torch==" in second, "pip's index is the second choice"
    warned = "warning: PyTorch's index, download.pytorch.org, gave no build" in result.stderr
    assert warned is not has_gpu and ("2,741 MB to download, not 202 MB" in result.stderr) is warned


def test_an_old_python_says_so():
    program = "import runpy, sys\nsys.version_info = (3, 8, 1)\nrunpy.run_module('t5bench', run_name='__main__')"
    result = subprocess.run([BASE, "-c", program], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "is Python 3.8.1, but 3.10 to 3.14 is needed" in result.stderr
    for name in ("__main__.py", "__init__.py"):  # an old Python reads them before it can say so
        ast.parse((REPO_ROOT / "t5bench" / name).read_text(), name, feature_version=(3, 6))


@pytest.mark.parametrize(
    ("before", "said", "message"),
    [
        ("sys.modules['ensurepip'] = None", "", "has no venv module"),
        ("", "OSError: [Errno 28] No space left on device", "the disk is full: "),
        ("", "NewConnectionError: Connection refused", "the Python package index cannot be reached"),
        ("", "no C compiler", "no C compiler\nerror: "),
    ],
)
def test_why_no_environment_can_be_made(project: Project, before: str, said: str, message: str):
    stub_venv(project, f'echo "{said}"; exit 1')
    result = ensure(project, BASE, before=before)
    assert result.returncode == 2 and message in result.stderr
    assert not (project.root / ".venv" / "complete").exists()
