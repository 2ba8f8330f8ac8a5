"""What the launchers are set to, from the one place where their settings are written: their --help."""

import os
import re
import subprocess
from functools import cache

from t5bench import REPOSITORY


def command(strategy: str) -> list[str]:
    return ["bash", str(REPOSITORY / "scripts" / f"run_megatron_t5_{strategy}.sh")]


@cache
def settings(strategy: str, preset: str) -> dict[str, str]:
    """Names and values of a launcher's settings with this MODEL_PRESET, as the environment leaves or changes them.

    Raises CalledProcessError where there is no such launcher.
    """
    text = subprocess.run(
        [*command(strategy), "--help"],
        env=os.environ | {"MODEL_PRESET": preset},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    defaults = dict(re.findall(r"^  ([A-Z_]+) +(\S+)", text, re.MULTILINE))
    found = {name: os.environ.get(name) or default for name, default in defaults.items()}
    return {name: "" if value == "(unset)" else value for name, value in found.items()} | {"MODEL_PRESET": preset}


def model_parallel_sizes(strategy: str) -> tuple[int, int]:
    """Processes that share a layer (TP), and pipeline stages (PP)."""
    found = settings(strategy, "large")
    return int(found["TENSOR_PARALLEL_SIZE"]), int(found["PIPELINE_PARALLEL_SIZE"])
