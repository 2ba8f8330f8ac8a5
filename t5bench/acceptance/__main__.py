"""The steps of scripts/gpu_acceptance.sh, which provides Python, packages, the engine and the settings of every run.

Each step is a command that a user could type, and leaves its results in the work directory.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from t5bench import REPOSITORY, Problem, note, raise_on_signals
from t5bench.acceptance import results
from t5bench.acceptance.steps import FAILED, GRACE, PASSED, Runner, Step, module
from t5bench.plan.launchers import launcher
from t5bench.plan.layout import count_gpus
from t5bench.plan.ports import free_port
from t5bench.record import machine
from t5bench.record.status import CONFIGURATION, EXIT_CODES, OUT_OF_MEMORY
from t5bench.sweep.launch import BASELINE, choose
from t5bench.sweep.venv import write_torchrun

SCRIPTS = REPOSITORY / "scripts"
EXIT_FAILED, EXIT_TIME = 1, 3
# Seconds at the end of a part for stopping what is still running, and for the results.
RESERVE = GRACE + 20


class Preset:
    """What the settings in the environment ask for; a rehearsal runs the same steps with the tiny model on the CPU.

    batch: samples of an iteration in every throughput measurement, so that all do the same work. output: where the
    results go.
    """

    def __init__(self) -> None:
        """Raises Problem."""
        work, results_dir = Path(os.environ["WORK_DIR"]), os.environ["RESULTS_DIR"]
        self.rehearsal = os.environ["DEVICE"] == "cpu"
        if not self.rehearsal and not count_gpus(os.environ):
            found = "there is no GPU here (nvidia-smi -L lists none that CUDA_VISIBLE_DEVICES shows)"
            raise Problem(found, "--rehearse tries everything on the CPU")
        name = "rehearsal" if self.rehearsal else results.name_of([gpu["name"] for gpu in machine.gpus(os.environ)])
        self.work = work / name
        own = self.work / "results" if self.rehearsal else REPOSITORY / "docs" / "results" / name
        self.output = Path(results_dir) if results_dir else own
        self.engines = ["megatron", "native"] if os.environ["ENGINES"] == "both" else [os.environ["ENGINES"]]
        sizes = os.environ["MICRO_BATCH_SIZES"].split()
        if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
            raise Problem(f"MICRO_BATCH_SIZES must be whole numbers of at least 1, found '{' '.join(sizes)}'")
        self.micro_batch_sizes, self.batch = list(map(int, sizes)), max(map(int, sizes))
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
            size = common | {"MICRO_BATCH_SIZE": str(micro_batch)}
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
