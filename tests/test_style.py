"""Linters as tests: what is committed is clean."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT


def tracked(*patterns: str) -> list[str]:
    output = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if output.returncode != 0:
        pytest.skip("not a git checkout: the files to lint are not known")
    return [name for name in output.stdout.split("\0") if name and (REPO_ROOT / name).exists()]


@pytest.mark.parametrize(
    ("command", "patterns"),
    [
        (["shellcheck", "-x"], ["*.sh", "*.sbatch", ".ci/run"]),
        (["shfmt", "-d", "-i", "2", "-ci"], ["*.sh", "*.sbatch", ".ci/run"]),
        (["ruff", "check"], ["*.py"]),
        (["ruff", "format", "--check"], ["*.py"]),
    ],
    ids=["shellcheck", "shfmt", "ruff", "ruff-format"],
)
def test_clean(command: list[str], patterns: list[str]):
    files = tracked(*patterns)
    assert files
    result = subprocess.run([*command, *files], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_tests_of_a_file_stay_in_one_process(tmp_path: Path):
    """What run_tests.sh relies on: fixtures that train or make hosts are made once."""
    shutil.copy(REPO_ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(REPO_ROOT / "tests" / "harness.py", tmp_path)
    shutil.copytree(REPO_ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPO_ROOT / "t5bench", tmp_path / "t5bench", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(
            "import os\nimport pytest\n"
            "@pytest.mark.parametrize('number', range(6))\n"
            f"def test_it(number): open('{name}', 'a').write(os.environ['PYTEST_XDIST_WORKER'] + ' ')\n"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert [len(set((tmp_path / name).read_text().split())) for name in ("one", "two")] == [1, 1]
