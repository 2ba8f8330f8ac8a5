"""What is of use without a checkout, from the wheel in an environment of its own: no checkout, no torch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run
from packaging.requirements import Requirement
from support import REPO_ROOT

pytestmark = pytest.mark.nightly  # downloads 30 MB


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's programs, in which the wheel is installed with what it requires."""
    directory = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=REPO_ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        if name.startswith(("docs/", "tests/")) or not (REPO_ROOT / name).is_file():
            continue
        target = directory / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((REPO_ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
    pip = [str(directory / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    source = directory / "source"
    apart = [source / "packages" / name for name in ("costmodel-evidence", "planner-page")]
    subprocess.run([*pip, *map(str, (source, *apart))], check=True, timeout=300)
    (directory / "source").rename(directory / "gone")
    return directory / "venv" / "bin"


def t5bench(installed: Path, *words: str, status: int = 0) -> str:
    command = [str(installed / "t5bench"), *words]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(installed)}
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == status, result.stderr + result.stdout
    return result.stdout + result.stderr


def test_questions_are_answered(installed: Path, tmp_path: Path):
    assert "zero3_offload" in t5bench(installed, "strategies")
    layouts = ["--gpus", "2", "--per-node", "1", "--device", "a100", "--link", "10", "--global-batch", "16"]
    assert "ZeRO-3" in t5bench(installed, "layouts", *layouts)
    assert "do not use 0.18.2" in t5bench(installed, "ledger", "--answer", "0.18.2", status=1)
    runs = [str(make_run(tmp_path / name, name)) for name in ("ddp", "zero1")]
    assert "zero1" in t5bench(installed, "compare", *runs, "--output", str(tmp_path / "comparison"))
    assert (tmp_path / "comparison" / "index.html").is_file()
    assert "usage:" in t5bench(installed, "judge", "--help")
    t5bench(installed, "pack", *runs, "-o", str(tmp_path / "all.tar.gz"))
    t5bench(installed, "verify", str(tmp_path / "all.tar.gz"))


def test_packages_that_are_installed_beside_it_serve_their_options(installed: Path, tmp_path: Path):
    assert re.search(r"Allocated memory: \d+ figures", t5bench(installed, "predict", "--check"))
    page = tmp_path / "layouts.html"
    t5bench(installed, "layouts", "--page", str(page), "--device", "a100")
    assert "choose$space$one_to_run" in page.read_text()


@pytest.mark.parametrize("words", [["sweep", "--runs-dir", "/nowhere"], ["cluster"], ["support"], ["prepare-data"]])
def test_what_needs_launchers_says_so(installed: Path, words: list[str]):
    said = t5bench(installed, *words, status=2)
    assert f"t5bench {words[0]} needs the launchers of a clone" in said and "Traceback" not in said


def test_what_needs_torch_says_how_to_install_it(installed: Path):
    assert "pip install '.[train]'" in t5bench(installed, "generate", "/nowhere", "--prompt", "a", status=2)


def test_the_wheel_requires_what_requirements_txt_has():
    text = (REPO_ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    assert listed
    requirements = (REPO_ROOT / "requirements.txt").read_text().splitlines()
    known = {str(Requirement(line)) for line in requirements if line and not line.startswith("#")}
    assert {str(Requirement(each)) for each in re.findall(r'"(.*?)"', listed[1])} <= known
