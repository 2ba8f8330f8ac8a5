"""Whatever a user types first gets its page of help, or one true sentence: no traceback, and nothing to wait for."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from real_runs import environment
from support import REPO_ROOT

from t5bench.__main__ import COMMANDS

ANSWERS = {
    "verify": "^finding: .* cannot be read",
    "parity": "FAIL .*(holds no record|there is no run directory|cannot be read)",
    "predict": "is invalid and left out",
}
SCRIPTS = sorted(path for path in (REPO_ROOT / "scripts").glob("*.sh") if "common" not in path.name)


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.nightly)])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every command said to few or to all kinds of files, and to what else a user may type first."""
    directory = tmp_path_factory.mktemp("first-words")
    run = directory / "run"
    make_run(run, elapsed_ms=[100.0 + number % 7 for number in range(40)])
    program = Path(__file__).with_name("first_words.py")
    command = [sys.executable, str(program), str(directory), str(run), request.param]
    settings = {"PYTHONPATH": str(REPO_ROOT), "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    options: dict[str, Any] = {"env": environment(**settings), "capture_output": True, "text": True, "timeout": 550}
    result = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_every_command_explains_itself(told: list[dict[str, Any]]):
    helped = {each["words"][0]: each for each in told if each["words"][1:] == ["--help"]}
    assert helped.keys() == COMMANDS.keys()
    for name, each in helped.items():
        assert each["status"] == 0 and f"usage: python -m t5bench {name}" in each["output"], each


@pytest.mark.slow
def test_every_wrong_word_gets_one_sentence(told: list[dict[str, Any]]):
    refused = [each for each in told if each["words"][1:] != ["--help"]]
    assert len(refused) > 60
    wrong = []
    for each in refused:
        sentences = [line for line in each["errors"].splitlines() if line.startswith("error: ")]
        is_refused = each["status"] == 2 and len(sentences) == 1
        # What these find is their answer.
        is_answered = each["status"] == 1 and re.search(ANSWERS.get(each["words"][0], "^$"), each["output"])
        if not (is_refused or is_answered) or "Traceback" in each["errors"]:
            wrong.append(each)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_explains_itself(script: Path):
    options: dict[str, Any] = {"env": environment(), "capture_output": True, "text": True, "timeout": 60}
    result = subprocess.run(["bash", script, "--help"], check=False, stdin=subprocess.DEVNULL, **options)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "usage: " in result.stdout.lower() and len(result.stdout.splitlines()) > 5
