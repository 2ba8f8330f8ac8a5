"""The commands of this room, as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from real_runs import environment
from support import REPO_ROOT

from t5bench.plan.ports import free_port

# Of the largest logit.
FP32_ROUNDING = 2e-6
MISTAKE = 1e-3


def t5bench(*words: object, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "t5bench", *map(str, words)]
    where = {"cwd": REPO_ROOT, "env": environment(**settings)}
    return subprocess.run(command, **where, capture_output=True, text=True, timeout=300, check=False)


def script(name: str, *words: object, engine: Path | None = None, **settings: str) -> Any:
    """What a script of this folder prints last, as JSON. Transformers has its models there, unlike in the tests' own
    process. engine: on its path."""
    command = [sys.executable, str(Path(__file__).with_name(name)), *map(str, words)]
    paths = [*([engine] if engine else []), REPO_ROOT, REPO_ROOT / "tests"]
    settings |= {"PYTHONPATH": ":".join(map(str, paths))}
    result = subprocess.run(
        command, env=environment(**settings), capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def check_logits(directory: Path, engine: Path, *runs: Path) -> None:
    """The exports of Megatron-DeepSpeed's runs in fp32 have the engine's logits, and their imports have them again."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    answers = script("megatron_logits.py", directory, *runs, engine=engine, **one, **place)
    assert len(answers) == len(runs)
    for name, found in answers.items():
        assert found["difference"] < FP32_ROUNDING, (name, found)
        assert found["imported"] < FP32_ROUNDING, (name, found)
        assert found["swapped"] > MISTAKE, (name, found)
        assert found["activation"] == "gelu"
