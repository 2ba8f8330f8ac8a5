"""The comparison of two checkouts, of which a small stand-in has nothing but a script."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO_ROOT

pytestmark = pytest.mark.nightly  # it helps whoever moves code, and nothing depends on it


def unchanged(task: str, stored: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO_ROOT / "tests" / "unchanged"), task, str(stored), "help", "--tree", str(tree)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "scripts").mkdir(parents=True)
    return tmp_path / "tree"


def test_what_differs_is_shown_and_what_varies_is_not(tmp_path: Path, tree: Path):
    script = tree / "scripts" / "train.sh"
    script.write_text("echo trains in $PWD; date --iso-8601=seconds; echo $HOME\n")
    assert unchanged("store", tmp_path / "stored", tree).returncode == 0
    moved = tree.rename(tmp_path / "moved")
    same = unchanged("compare", tmp_path / "stored", moved)
    assert (same.returncode, same.stdout) == (0, "nothing differs\n"), same.stderr
    (moved / "scripts" / "train.sh").write_text("echo runs in $PWD\nexit 3\n")
    (moved / "scripts" / "new.sh").write_text("echo new\n")
    other = unchanged("compare", tmp_path / "stored", moved)
    assert other.returncode == 1 and other.stdout.endswith("2 files differ\n"), other.stderr
    lines = other.stdout.splitlines()
    assert {"-exit status 0", "+exit status 3", "-trains in <tree>", "+runs in <tree>", "+new"} <= set(lines)


def test_what_was_never_stored_cannot_be_compared(tmp_path: Path, tree: Path):
    result = unchanged("compare", tmp_path, tree)
    assert result.returncode == 2 and "has no help; store it first" in result.stderr
