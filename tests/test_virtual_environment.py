"""The virtual environment of quickstart and tests: where its torch comes from, and what may be wrong."""

import ast
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import REPO_ROOT, Project

from t5bench.virtual_environment import downloads

BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
TORCHRUN = "import sys\nprint(sys.executable, sys.argv[1:])\n"


def ensure(project: Project, python: Path, *requirements: str, before: str = "", **environment: str):
    """t5bench.virtual_environment in the project's checkout, by this Python, which runs ``before`` first."""
    program = f"import runpy, sys\n{before}\nrunpy.run_module('t5bench.virtual_environment', run_name='__main__')"
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


def stub_venv(project: Project, pip: str, configuration: str = "") -> None:
    """A virtual environment that is there already and whose `pip install` is this shell command, without a wheel
    directory; configuration: what `pip config list` prints."""
    python = project.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/usr/bin/env bash
case $* in
  *"-m pip"*"config list"*) echo {shlex.quote(configuration)} ;;
  *"-m pip"*--dry-run*) exit 1 ;;
  *"-m pip"*) {pip} ;;
  *) exec {BASE} "$@" ;;
esac
""")
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


def test_pip_speaks_english_without_colours_and_says_what_it_downloads(project: Project):
    said = project.root / "environment"
    stub_venv(project, f"env >{shlex.quote(str(said))}")
    theirs = {"PIP_QUIET": "1", "FORCE_COLOR": "1", "PIP_DRY_RUN": "1", "LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de"}
    assert ensure(project, BASE, **theirs).returncode == 0
    lines = said.read_text().splitlines()
    assert {"LC_ALL=C.UTF-8", "LANGUAGE=", "NO_COLOR=1"} <= set(lines)
    assert not [line for line in lines if line.startswith(("PIP_QUIET", "PIP_DRY_RUN", "FORCE_COLOR"))]


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
    warned = "warning: PyTorch's index gave no build" in result.stderr
    assert warned is not has_gpu and ("about 2.7 GB, not 0.2 GB, to download" in result.stderr) is warned


def test_an_old_python_says_so():
    program = "import runpy, sys\nsys.version_info = (3, 8, 1)\nrunpy.run_module('t5bench', run_name='__main__')"
    result = subprocess.run([BASE, "-c", program], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "is Python 3.8.1, but 3.10 to 3.14 is needed" in result.stderr
    for name in ("__main__.py", "__init__.py"):  # an old Python reads them before it can say so
        ast.parse((REPO_ROOT / "t5bench" / name).read_text(), name, feature_version=(3, 6))


@pytest.mark.parametrize(
    ("before", "said", "configuration", "message"),
    [
        ("sys.modules['ensurepip'] = None", "", "", "has no venv module"),
        ("import t5bench; t5bench.NEWEST = (3, 9)", "", "", "but 3.10 to 3.14 is needed"),
        (
            "import pathlib\ndef refuse(self): raise OSError(30, 'Read-only file system')\npathlib.Path.touch = refuse",
            "", "", "cannot be written: Read-only file system\n       Copy the whole directory to a place of your own",
        ),
        (
            "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=10**9)",
            "", "", "has 1.0 GB left, and the packages take 2.1 GB at least",
        ),
        ("", "", "global.no-index='yes'", "pip may use no index, and has no wheel directory"),
        (
            "", "", ":env:.find-links='/wheels'\n:env:.no-index='1'",
            "its wheel directory /wheels has no torch==2.13.0 for Python 3.",
        ),
        ("", "OSError: [Errno 28] No space left on device", "", "the disk is full: "),
        ("", "NewConnectionError: Connection refused", "", "the Python package index cannot be reached"),
        ("", "no C compiler", "global.no-index='false'", "no C compiler\nerror: "),
    ],
)  # fmt: skip
def test_why_no_environment_can_be_made(project: Project, before: str, said: str, configuration: str, message: str):
    calls = project.root / "calls"
    stub_venv(project, f'echo "$*" >>{shlex.quote(str(calls))}; echo "{said}"; exit 1', configuration)
    result = ensure(project, BASE, before=before)
    assert result.returncode == 2 and message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (project.root / ".venv" / "complete").exists()
    assert calls.exists() is bool(said), "before anything is downloaded"


def make_wheel(directory: Path, name: str, version: str, module: str = "") -> None:
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": module,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{about}/RECORD": "".join(f"{path},,\n" for path in files)}.items():
            wheel.writestr(path, text)


@pytest.mark.nightly
def test_without_an_index_a_wheel_directory_is_enough(project: Project, tmp_path: Path):
    """Its build of torch is used and named, and whatever else it lacks is named."""
    wheels = tmp_path / "the wheels"
    for name in ("setuptools", "wheel", "packaging"):
        make_wheel(wheels, name, "99.0")
    make_wheel(wheels, "torch", "2.13.0+cpu", "__version__ = '2.13.0+cpu'")
    settings = {"PIP_FIND_LINKS": wheels.as_uri(), "PIP_NO_INDEX": "1", "HOME": "/nowhere", "PIP_TARGET": "/elsewhere"}
    result = ensure(project, BASE, **settings)
    assert result.returncode == 0, result.stderr
    assert f"installing torch 2.13.0+cpu from {wheels.as_uri()}" in result.stderr
    assert "MB downloaded" not in result.stderr and "uv" not in result.stderr
    (project.root / "requirements.txt").write_text("absent==1.0\n")
    command = [str(BASE), "-m", "t5bench.virtual_environment", "requirements.txt"]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    result = subprocess.run(command, cwd=project.root, env={"PATH": "/usr/bin:/bin", **settings}, **options)
    assert result.returncode == 2, result.stderr
    assert "using torch 2.13.0+cpu of" in result.stderr
    assert "pip may use no index, and its wheel directory lacks absent==1.0" in result.stderr


@pytest.mark.nightly
def test_an_environment_is_made_again_when_its_python_was_removed(project: Project):
    links = project.root / ".venv" / "bin"
    links.mkdir(parents=True)
    for name in ("python", "python3"):
        (links / name).symlink_to("/nowhere/python3.11")
    (links / "pip").touch()
    ours = project.root / ".venv" / "lib" / "notes.txt"
    ours.parent.mkdir()
    ours.touch()
    result = ensure(project, BASE, PIP_NO_INDEX="1")
    assert "creating a virtual environment" in result.stderr and "has no wheel directory" in result.stderr
    assert ours.exists(), "nothing of the user's is deleted"


def test_what_was_downloaded_is_what_pip_and_uv_say():
    log = """Collecting numpy
  Downloading numpy-2.4.6-cp311-manylinux.whl (16.9 MB)
     ━━━━━━━━━━━━━━━━━━━━ 16.9/16.9 MB 214.1 MB/s eta 0:00:00
  Downloading six-1.17.0-py2.py3-none-any.whl.metadata (1.7 kB)
  Using cached wandb-0.31.0-py3-none-linux.whl (20.0 MB)
Processing /opt/wheels/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl
Downloading torch (100.0MiB)
"""
    assert downloads(log) == ", with 121.8 MB downloaded"
    assert downloads("Requirement already satisfied: six") == ""
