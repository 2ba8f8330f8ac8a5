"""What others met in public when they resumed, made on purpose: each shows around the resume; nothing healthy does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPO_ROOT

LOGS = {
    "none": "ZeRO-1, 2",
    "moments dropped": "ZeRO-1, 2",
    "a fresh optimizer, at step 1": "ZeRO-1, 2",
    "effect after the first step": "ZeRO-1, 2",
    "a stale shard": "ZeRO-1, 2",
    "only rank 0's shard": "ZeRO-1, 2",
    "the schedule begun anew": "ZeRO-1, 2",
    "data repeated": "ZeRO-1, 2",
    "data skipped": "ZeRO-1, 2",
    "random numbers of dropout": "ZeRO-1, 2",
    "none in a pipeline": "pipeline 1F1B, 2",
    "an embedding's copy": "pipeline 1F1B, 2",
    "none with a scaler": "a scaler",
    "the scaler's state": "a scaler",
}


@pytest.mark.nightly
def test_a_mistake_in_a_resume_shows(tmp_path: Path):
    script = REPO_ROOT / "tests" / "native" / "resume_faults.py"
    paths = os.pathsep.join(str(REPO_ROOT / folder) for folder in (".", "tests", "tests/native"))
    environment = os.environ | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, check=True, capture_output=True)
    for name, setup in LOGS.items():
        command = [sys.executable, "-m", "t5bench", "judge", f"{tmp_path}/uninterrupted of {setup}.jsonl"]
        judged = subprocess.run(
            [*command, f"{tmp_path}/{name}.jsonl"], cwd=REPO_ROOT, capture_output=True, text=True, check=False
        )
        expected = "EQUAL" if name.startswith("none") else "DIFFERENT"
        assert judged.stdout.startswith(expected), f"{name}: {judged.stdout}{judged.stderr}"
