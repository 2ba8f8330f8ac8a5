"""The test command itself, over tests that are made for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT


@pytest.mark.parametrize("passes", [True, False])
def test_failed_tests_run_once_more_alone(tmp_path: Path, passes: bool):
    for folder in ("scripts", "t5bench"):
        shutil.copytree(REPO_ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "t5bench" / "sweep" / "venv.py").write_text("")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    seen = tmp_path / "seen"
    (tmp_path / "test_one.py").write_text(
        "import pathlib\nimport pytest\n"
        f"seen = pathlib.Path({str(seen)!r})\n"
        "def test_good(): seen.open('a').write('good ')\n"
        "@pytest.mark.xdist_group('hosts')\n"
        "def test_it():\n"
        "    seen.open('a').write('it ')\n"
        f"    assert seen.read_text().split().count('it') == {2 if passes else 3}\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = ["bash", str(tmp_path / "scripts" / "run_tests.sh"), "-q"]
    environment = inherited | {"PYTHON": sys.executable}
    result = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert (result.returncode == 0) == passes, result.stdout
    assert "FAILED test_one.py::test_it" in result.stdout
    assert sorted(seen.read_text().split()) == ["good", "it", "it"]
