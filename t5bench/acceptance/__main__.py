"""See scripts/gpu_acceptance.sh, which finds Python, packages and the engine, and says what every run is told."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from t5bench import REPOSITORY, Problem
from t5bench.acceptance import results
from t5bench.acceptance.preset import Preset
from t5bench.acceptance.steps import FAILED, GRACE, PASSED, Runner
from t5bench.plan.layout import count_gpus
from t5bench.record import machine
from t5bench.record.status import CONFIGURATION, EXIT_CODES
from t5bench.sweep.rows import note
from t5bench.sweep.runner import raise_on_signals
from t5bench.sweep.venv import write_torchrun

PARTS = {"acceptance": Preset.acceptance, "throughput": Preset.throughput}
EXIT_FAILED, EXIT_TIME = 1, 3
# Seconds of a part for ending what runs at its end, and for the results.
RESERVE = GRACE + 20


def places() -> tuple[Preset, Path]:
    """What to do, and where the results go. Raises Problem."""
    work, results_dir = Path(os.environ["WORK_DIR"]), os.environ["RESULTS_DIR"]
    if os.environ["DEVICE"] == "cpu":
        return Preset.asked(work / "rehearsal", True), Path(results_dir or work / "rehearsal" / "results")
    if not count_gpus(os.environ):
        found = "there is no GPU here (nvidia-smi -L lists none that CUDA_VISIBLE_DEVICES shows)"
        raise Problem(found, "--rehearse goes through all of it on the CPU")
    name = results.name_of([gpu["name"] for gpu in machine.gpus(os.environ)])
    return Preset.asked(work / name, False), Path(results_dir or REPOSITORY / "docs" / "results" / name)


def main(elapsed: float, parts: Sequence[str]) -> int:
    """elapsed: seconds since the command began. Raises Problem."""
    begun = time.monotonic() - elapsed
    preset, output = places()
    # The one on PATH may belong to another Python, whose packages its workers would get.
    write_torchrun(torchrun := preset.work / "bin" / "torchrun", Path(sys.executable))
    os.environ["PATH"] = f"{torchrun.parent}:{os.environ['PATH']}"
    runner = Runner(preset.work)
    for number, part in enumerate(parts, 1):
        runner.deadline = begun + 60 * float(os.environ["MINUTES"]) * number - RESERVE
        note(f"\n{part}")
        runner.run(preset.device())
        if not (preset.work / "device.json").exists():
            note((runner.logs / "device.log").read_text())
            return runner.outcomes["device"]["status"] or EXIT_TIME
        try:
            for step in PARTS[part](preset):
                runner.run(step)
        finally:  # what is known is kept, also where a signal ends this
            found = results.gather(preset, runner.outcomes)
            results.write(found, preset.work, output)
    note(f"\n{output / 'README.md'}\n{results.verdict(found)}")
    ends = {step["result"] for step in found["steps"].values()}
    return EXIT_FAILED if FAILED in ends else 0 if ends == {PASSED} else EXIT_TIME


if __name__ == "__main__":
    raise_on_signals()
    try:
        sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
    except Problem as problem:
        note(f"error: {problem}\n       {problem.remedy}".rstrip())
        sys.exit(EXIT_CODES[CONFIGURATION])
