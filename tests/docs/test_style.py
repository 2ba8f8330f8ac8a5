"""Linters as tests: what is committed is clean."""

import subprocess

import pytest
from support import REPO_ROOT


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
        (["codespell"], ["*.md", "*.py", "*.sh", "*.sbatch", "*.j2", "*.cff", "*.yml", "requirements*.txt"]),
    ],
    ids=["shellcheck", "shfmt", "ruff", "ruff-format", "codespell"],
)
def test_clean(command: list[str], patterns: list[str]):
    files = tracked(*patterns)
    assert files
    result = subprocess.run([*command, *files], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
