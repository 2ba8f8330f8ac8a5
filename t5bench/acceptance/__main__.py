"""The steps of scripts/gpu_acceptance.sh, which provides Python, packages, the engine and the settings of every run.

Each step is a command that a user could type, and leaves its results in the work directory. A step that passed is not
repeated, so the same command continues where an earlier one stopped.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.acceptance import results
from t5bench.acceptance.results import FAILED, NOT_RUN, OUT_OF_TIME, PASSED, module
from t5bench.plan.launchers import launcher
from t5bench.plan.layout import count_gpus
from t5bench.plan.ports import free_port
from t5bench.record import machine
from t5bench.record.status import CONFIGURATION, EXIT_CODES, OUT_OF_MEMORY
from t5bench.sweep.launch import BASELINE, choose
from t5bench.sweep.venv import write_torchrun

SCRIPTS = REPOSITORY / "scripts"
EXIT_FAILED, EXIT_TIME = 1, 3
# Seconds for a step to end in order once its time is up: a launcher ends its workers and writes its record.
GRACE = 20
# Seconds at the end of a part for stopping what is still running, and for the results.
RESERVE = GRACE + 20


@dataclass(frozen=True)
class Step:
    """One command. passes: the exit statuses that count as passed."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    passes: Sequence[int] = (0,)


class Runner:
    """Runs steps until ``deadline`` (time.monotonic() seconds).

    outcomes: by the step's name its result, its exit status and its seconds. What a step writes to its standard output
    goes to logs/<name>.out, to its standard error to logs/<name>.log.
    """

    def __init__(self, work: Path) -> None:
        self.logs, self.file, self.deadline = work / "logs", work / "steps.json", 0.0
        self.logs.mkdir(parents=True, exist_ok=True)
        self.outcomes: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, step: Step) -> None:
        """Runs a step unless it has passed before; a signal that ends this process ends the step too."""
        if self.outcomes.get(step.name, {}).get("result") == PASSED:
            note(f"{step.name}: already passed")
            return
        note(f"{step.name} ...")
        begun, log = time.monotonic(), self.logs / f"{step.name}.log"
        result, status = NOT_RUN, None
        if begun < self.deadline:
            limited = ["timeout", f"--kill-after={GRACE}", str(self.deadline - begun), *step.command]
            with log.with_suffix(".out").open("wb") as output, log.open("wb") as errors:
                pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
                process = subprocess.Popen(limited, env=os.environ | dict(step.environment), **pipes)
            try:
                status = process.wait()
            finally:
                process.terminate()
                process.wait()
            late = time.monotonic() >= self.deadline
            result = PASSED if status in step.passes else OUT_OF_TIME if late else FAILED
        seconds = time.monotonic() - begun
        self.outcomes[step.name] = {"result": result, "status": status, "seconds": round(seconds, 1)}
        self.file.write_text(json.dumps(self.outcomes, indent=2) + "\n")
        note(f"{step.name}: {result}, {seconds:.0f} s" + ("" if result == PASSED else f"; see {log}"))


class Preset:
    """What the settings in the environment ask for; a rehearsal runs the same steps with the tiny model on the CPU.

    batch: samples of an iteration in every throughput measurement, so that all do the same work. output: where the
    results go.
    """

    def __init__(self) -> None:
        """Raises Problem."""
        self.rehearsal = os.environ["DEVICE"] == "cpu"
        if not self.rehearsal and not count_gpus(os.environ):
            found = "there is no GPU here (nvidia-smi -L lists none that CUDA_VISIBLE_DEVICES shows)"
            raise Problem(found, "--rehearse tries everything on the CPU")
        name = "rehearsal" if self.rehearsal else results.name_of([gpu["name"] for gpu in machine.gpus(os.environ)])
        self.work = Path(os.environ["WORK_DIR"], name)
        own = self.work / "results" if self.rehearsal else REPOSITORY / "docs" / "results" / name
        self.output = Path(os.environ["RESULTS_DIR"] or own)
        self.engines = ["megatron", "native"] if os.environ["ENGINES"] == "both" else [os.environ["ENGINES"]]
        sizes = os.environ["MICRO_BATCH_SIZES"].split()
        if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
            raise Problem(f"MICRO_BATCH_SIZES must be whole numbers of at least 1, found '{' '.join(sizes)}'")
        self.micro_batch_sizes, self.batch = sizes, max(map(int, sizes))
        self.strategies = list(dict.fromkeys([BASELINE, *choose(os.environ["STRATEGIES"].split())]))

    def device(self, when: str = "") -> Step:
        return Step(f"device{when}", module("t5bench.acceptance.device", self.work / f"device{when}.json"))

    def acceptance(self) -> Iterator[Step]:
        """The parity check, at the sizes of check_parity.sh; then T5-Large with README's settings, under every strategy
        for which there are enough devices."""
        # DDP alone cannot be compared. The native engine comes first because it needs no compiler.
        for engine in reversed(self.engines if len(self.strategies) > 1 else []):
            runs_dir = self.work / "parity" / f"{engine}-{time.strftime('%H%M%S')}"
            size = {"MODEL_PRESET": "tiny", "GLOBAL_BATCH_SIZE": "16", "VOCABULARY_MULTIPLE": "128", "SHARE_GPUS": "1"}
            size |= {"ENGINE": engine, "RUNS_DIR": str(runs_dir), "CHECK_BLIND_SPOTS": "0"}
            yield Step(f"parity-{engine}", ["bash", str(SCRIPTS / "check_parity.sh"), *self.strategies], size)
        for engine in self.engines:
            # A rehearsal's parity check has trained them all.
            names = " ".join(self.strategies[:2] if self.rehearsal else self.strategies)
            sweep = module("t5bench", "sweep", "--runs-dir", self.work / "runs/large" / engine, "--strategies", names)
            yield Step(f"large-{engine}", sweep, {"ENGINE": engine, "TRAIN_ITERS": "6" if self.rehearsal else "12"})

    def throughput(self) -> Iterator[Step]:
        """One process: each engine, with a profile at the end, and the plain loop. Full memory is a valid result."""
        iterations = "6" if self.rehearsal else "30"
        common = {"GLOBAL_BATCH_SIZE": str(self.batch), "TRAIN_ITERS": iterations, "NPROC_PER_NODE": "1"}
        for micro_batch in self.micro_batch_sizes:
            size = common | {"MICRO_BATCH_SIZE": micro_batch}
            for engine in self.engines:
                name = f"throughput/{engine}/micro-batch-{micro_batch}"
                own = {"OUTPUT_DIR": str(self.work / "runs" / name), "ENGINE": engine, "MASTER_PORT": str(free_port())}
                environment = size | own | {"PROFILE_ITERATION": iterations}
                passes = (0, EXIT_CODES[OUT_OF_MEMORY])
                yield Step(name.replace("/", "-"), ["bash", str(launcher(BASELINE))], environment, passes)
            name = f"baseline-{micro_batch}"
            yield Step(name, module("t5bench.acceptance.baseline", self.work / f"{name}.jsonl"), size)
        yield self.device("-after")


def main(elapsed: float, parts: Sequence[str]) -> int:
    """elapsed: seconds since the command began. Raises Problem."""
    begun, preset = time.monotonic() - elapsed, Preset()
    # A torchrun on PATH may belong to another Python and would start workers with its packages.
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
            runner.run(Step("data", ["bash", str(SCRIPTS / "prepare_xsum_megatron.sh")], {"SAMPLE": "1"}))
            for step in getattr(preset, part)():
                runner.run(step)
        finally:  # keep the results so far, even if a signal ends this
            found = results.gather(preset.work, runner.outcomes, rehearsal=preset.rehearsal, batch=preset.batch)
            results.write(found, preset.work, preset.output)
    note(f"\n{preset.output / 'README.md'}\n{results.verdict(found)}")
    ends = {step["result"] for step in found["steps"].values()}
    return EXIT_FAILED if FAILED in ends else 0 if ends == {PASSED} else EXIT_TIME


if __name__ == "__main__":
    raise_on_signals()
    try:
        sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
    except Problem as problem:
        note(problem.report)
        sys.exit(EXIT_CODES[CONFIGURATION])
