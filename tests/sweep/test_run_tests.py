"""The test command itself, over tests that are made for it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import REPO_ROOT

RunTests = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_tests(tmp_path: Path) -> RunTests:
    """run_tests.sh over the tests that are given, by name of the file, with the environment that is there."""
    for folder in ("scripts", "t5bench"):
        shutil.copytree(REPO_ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "t5bench" / "sweep" / "venv.py").write_text("")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "tests").mkdir()
    for file in (REPO_ROOT / "tests").glob("*.py"):
        shutil.copy(file, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = . tests\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def run(**tests: str) -> subprocess.CompletedProcess[str]:
        for name, text in tests.items():
            (tmp_path / "tests" / f"test_{name}.py").write_text(text)
        command = ["bash", str(tmp_path / "scripts" / "run_tests.sh"), "-q"]
        environment = inherited | {"PYTHON": sys.executable}
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)

    return run


def test_tests_of_a_file_stay_in_one_process(run_tests: RunTests, tmp_path: Path):
    """Fixtures that train or make hosts are made once."""
    text = (
        "import os\nimport pytest\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_it(number): open({!r}, 'a').write(os.environ['PYTEST_XDIST_WORKER'] + ' ')\n"
    )
    result = run_tests(**{name: text.format(str(tmp_path / name)) for name in ("one", "two")})
    assert result.returncode == 0, result.stdout
    assert [len(set((tmp_path / name).read_text().split())) for name in ("one", "two")] == [1, 1]


@pytest.mark.parametrize("second_time", ["passes", "fails"])
def test_what_failed_runs_once_more_alone(run_tests: RunTests, tmp_path: Path, second_time: str):
    seen = tmp_path / "seen"
    last = 2 if second_time == "passes" else 3
    text = (
        "import pathlib\nimport pytest\n"
        f"seen = pathlib.Path({str(seen)!r})\n"
        "def test_good(): seen.open('a').write('good ')\n"
        "@pytest.mark.xdist_group('hosts')\n"
        "def test_it():\n"
        "    seen.open('a').write('it ')\n"
        f"    assert seen.read_text().split().count('it') == {last}\n"
    )
    result = run_tests(one=text)
    assert (result.returncode == 0) == (second_time == "passes"), result.stdout
    assert "FAILED tests/test_one.py::test_it" in result.stdout
    assert sorted(seen.read_text().split()) == ["good", "it", "it"]
