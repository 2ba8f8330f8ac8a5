"""Launches that die as a node without power does, and are resumed: for both engines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import REPO_ROOT, processes_with, wait_for

from t5bench.plan.ports import free_port
from t5bench.record.checkpoints import DEEPSPEED_TRACKER, TRACKER
from t5bench.record.log import Iteration
from t5bench.record.records import read_metrics

ITERATIONS, SAVE_INTERVAL, DIES_AFTER = 24, 8, 17
LAST = 2 * SAVE_INTERVAL  # the newest checkpoint when a run dies
SETTINGS = {
    "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "MODEL_PRESET": "tiny", "LOG_INTERVAL": "1", "WANDB_MODE": "disabled",
    "TRAIN_ITERS": str(ITERATIONS), "SAVE_INTERVAL": str(SAVE_INTERVAL), "LR": "0.001", "MICRO_BATCH_SIZE": "2",
}  # fmt: skip


class Runs:
    """Launches of one strategy with the same settings, dropout included, in bf16."""

    def __init__(self, strategy: str, folder: Path, settings: Mapping[str, str]) -> None:
        self.script = REPO_ROOT / "scripts" / f"run_megatron_t5_{strategy}.sh"
        self.folder = folder
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WANDB_"))}
        inherited["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = inherited | SETTINGS | {"PYTHON": sys.executable} | settings

    def start(self, name: str, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """A launcher as a process; its OUTPUT_DIR is `name` in the folder."""
        environment = {"OUTPUT_DIR": str(self.folder / name), "MASTER_PORT": str(free_port())} | settings
        return subprocess.Popen(
            ["bash", str(self.script), *arguments],
            env=self.environment | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, name: str, **settings: str) -> str:
        """A launch to its successful end; what it said on standard error."""
        _, errors = (launched := self.start(name, **settings)).communicate(timeout=200)
        log = self.folder / name / "node0.log"
        assert launched.returncode == 0, errors + (log.read_text()[-4000:] if log.exists() else "")
        return errors

    def die(self, name: str) -> None:
        """Kills launcher, recorder, torchrun and workers at once (SIGKILL) after the second checkpoint is complete."""
        while not self._died(name):
            shutil.rmtree(self.folder / name)  # a busy machine let it end before it was killed

    def _died(self, name: str) -> bool:
        mark = uuid.uuid4().hex
        launched = self.start(name, T5_TEST_MARK=mark)
        wait_for(lambda: self.reached(name) >= DIES_AFTER or launched.poll() is not None, 200)
        while found := processes_with(f"T5_TEST_MARK={mark}"):
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        _, errors = launched.communicate(timeout=60)
        assert launched.returncode in (0, -signal.SIGKILL), errors
        return launched.returncode != 0 and self.reached(name) < ITERATIONS

    def reached(self, name: str) -> int:
        lines = self.lines(name)
        return lines[-1].iteration if lines else 0

    def lines(self, name: str) -> list[Iteration]:
        return read_metrics(self.folder / name / "metrics.jsonl")

    def raw(self, name: str) -> list[dict]:
        """Every line of metrics.jsonl that is whole, those of attempts that were superseded too."""
        found = []
        for line in (self.folder / name / "metrics.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def copy(self, name: str, new: str) -> Path:
        """A run directory once more; its checkpoints."""
        shutil.copytree(self.folder / name, self.folder / new)
        return self.folder / new / "checkpoints"


def curve(lines: Sequence[Iteration]) -> list[tuple[int, float | None, float | None]]:
    return [(line.iteration, line.lm_loss, line.grad_norm) for line in lines]


def assert_continues(runs: Runs, resumed: str, whole: str, begin: int) -> None:
    """The resumed run's curve is the uninterrupted one's, digit by digit, and so is all that was logged twice."""
    lines, expected = runs.lines(resumed), {line[0]: line[1:] for line in curve(runs.lines(whole))}
    assert [line.iteration for line in lines] == list(range(1, ITERATIONS + 1))
    assert [line.begin for line in lines] == [0] * begin + [begin] * (ITERATIONS - begin)
    assert curve(lines) == [(number, *values) for number, values in expected.items()]
    logged = [entry for entry in runs.raw(resumed) if "iteration" in entry]
    twice = [entry["iteration"] for entry in logged if entry["iteration"] > begin]
    assert len(twice) > len(set(twice)), "the run that died had logged more than its last checkpoint"
    for entry in logged:
        assert (entry["lm_loss"], entry["grad_norm"]) == expected[entry["iteration"]]


def assert_goes_on(runs: Runs, name: str, file: str = "", problem: str = "") -> None:
    """Resumes a copy of the run "died", of whose newest checkpoint this file is "missing" or "cut off"; "": none is."""
    checkpoints = runs.copy("died", name)
    if problem == "missing":
        (checkpoints / file).unlink()
    elif problem:
        size = (checkpoints / file).stat().st_size
        os.truncate(checkpoints / file, size // 2)
        # The engines' pointers do not survive a death in their writing, and without them training would start anew.
        for pointer in (TRACKER, DEEPSPEED_TRACKER):
            (checkpoints / pointer).unlink(missing_ok=True)
    said = runs.finish(name, RESUME="1")
    assert (f"iteration {LAST} is passed over: {file} is {problem}" in said) == bool(problem)
    begin = SAVE_INTERVAL if problem else LAST
    assert f"resuming from the checkpoint of iteration {begin}\n" in said
    assert_continues(runs, name, "whole", begin)
