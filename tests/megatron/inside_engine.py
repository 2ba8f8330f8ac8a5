"""Starts processes inside the real engine."""

import os
import subprocess
import sys
from pathlib import Path

from harness import REPO_ROOT
from real_runs import environment

from t5bench.plan.ports import free_port

INSIDE = Path(__file__).with_name("inside")


def run_inside(engine: Path, directory: Path, *command: str, processes: int = 1, **settings: str) -> list[str]:
    """Runs a Python command in so many processes, to the successful end of all; what each of them said.

    {rank} in the command is the process's.
    """
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, (engine, INSIDE, REPO_ROOT / "tests", REPO_ROOT))),
        "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    logs = [directory / f"{rank}.log" for rank in range(processes)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            words = [sys.executable, *(word.format(rank=rank) for word in command)]
            own = environment(**given | {"RANK": str(rank)} | settings)
            started.append(subprocess.Popen(words, env=own, cwd=directory, stdout=output, stderr=output))
    try:
        statuses = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    said = [log.read_text(errors="replace") for log in logs]
    assert not any(statuses), "\n".join(text[-8000:] for text in said)
    return said
