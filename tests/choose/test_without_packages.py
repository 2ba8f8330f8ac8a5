"""Who only asks a question installs nothing: these commands need the standard library alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO_ROOT

from t5bench.__main__ import COMMANDS

# -I and -S: no package but what the checkout has, and nothing of the user's environment.
START = """
import runpy, sys
sys.path.insert(0, {!r})
sys.argv[0] = "t5bench"
runpy.run_module("t5bench", alter_sys=True, run_name="__main__")
"""
NETWORK = {"hosts": ["a", "b"], "backend": "gloo", "pairs": {"b": {"gbit": 9.0, "us": 50.0, "us_computing": 90.0}}}
HOST = {"engine": "megatron", "device": "cuda", "operator_us": {"a": 9.0, "b": 10.0}}
LLAMA = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
         "num_hidden_layers": 8, "num_attention_heads": 16, "max_position_embeddings": 2048}  # fmt: skip


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    program = START.format(str(REPO_ROOT))
    command = [sys.executable, "-I", "-S", "-c", program, *words]
    return subprocess.run(command, env={}, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str):
    done = ask(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m t5bench {command} [-h]")


@pytest.mark.parametrize(
    "words",
    [
        "strategies",
        "settings",
        "support",
        "ranks --tp 2 --dp 2",
        "predict --device a100",
        "predict --device h100 --schedule --json",
        "predict --device h100 --model t5-11b --network {folder}/network.json --host {folder}/host.json",
        "layouts --gpus 2 --device h100",
        "layouts --gpus 1,2 --device h100 --model {folder}/config.json --defaults",
    ],
)
def test_a_question_is_answered(words: str, tmp_path: Path):
    for name, content in (("network", NETWORK), ("host", HOST), ("config", LLAMA)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    done = ask(*words.format(folder=tmp_path).split())
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("words", ["predict a-run", "compare", "layouts --gpus 1 --device h100 --picture x.svg"])
def test_what_needs_a_package_says_which_and_how_to_install_it(words: str):
    done = ask(*words.split())
    assert done.returncode == 2
    assert "lacks a package: No module named" in done.stderr and "pip install -r" in done.stderr
    assert "Traceback" not in done.stderr
