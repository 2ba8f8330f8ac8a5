"""Which steps there are: each is a command that a user could type, and leaves its results in the work directory."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from t5bench import REPOSITORY, Problem
from t5bench.acceptance.steps import Step
from t5bench.plan.launchers import launcher
from t5bench.plan.ports import free_port
from t5bench.record.status import EXIT_CODES, OUT_OF_MEMORY
from t5bench.sweep.rows import BASELINE, choose


@dataclass(frozen=True)
class Preset:
    """What the settings in the environment ask for; a rehearsal runs the same at tiny size on the CPU."""

    work: Path
    rehearsal: bool
    engines: list[str]
    strategies: list[str]
    micro_batch_sizes: list[int]

    @classmethod
    def asked(cls, work: Path, rehearsal: bool) -> "Preset":
        """Raises Problem."""
        engines = ["megatron", "native"] if os.environ["ENGINES"] == "both" else [os.environ["ENGINES"]]
        sizes = os.environ["MICRO_BATCH_SIZES"].split()
        if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
            raise Problem(f"MICRO_BATCH_SIZES must be whole numbers of at least 1, found '{' '.join(sizes)}'")
        names = choose(os.environ["STRATEGIES"].split())
        return cls(work, rehearsal, engines, list(dict.fromkeys([BASELINE, *names])), list(map(int, sizes)))

    @property
    def batch(self) -> int:
        """Samples of an iteration in every point of the throughput, so that all do the same work."""
        return max(self.micro_batch_sizes)

    def device(self, when: str = "") -> Step:
        return Step(f"device{when}", module("acceptance.device", self.work / f"device{when}.json"))

    def acceptance(self) -> Iterator[Step]:
        yield data()
        # DDP alone has nothing to be compared with. The native engine comes first, for it needs no compiler.
        for engine in reversed(self.engines if len(self.strategies) > 1 else []):
            yield self.parity(engine)
        for engine in self.engines:
            yield self.sweep(engine)

    def throughput(self) -> Iterator[Step]:
        yield data()
        for size in self.micro_batch_sizes:
            yield from self.points(size)
        yield self.device("-after")

    def parity(self, engine: str) -> Step:
        """At the sizes that check_parity.sh is made for."""
        runs_dir = self.work / "parity" / f"{engine}-{time.strftime('%H%M%S')}"
        size = {"MODEL_PRESET": "tiny", "GLOBAL_BATCH_SIZE": "16", "VOCABULARY_MULTIPLE": "128", "SHARE_GPUS": "1"}
        command = ["bash", str(REPOSITORY / "scripts" / "check_parity.sh"), *self.strategies]
        size |= {"ENGINE": engine, "RUNS_DIR": str(runs_dir), "CHECK_BLIND_SPOTS": "0"}
        return Step(f"parity-{engine}", command, size)

    def sweep(self, engine: str) -> Step:
        """T5-Large as README configures it, under every strategy that the devices suffice for.

        A rehearsal's parity has trained them all, and two are enough here.
        """
        names = self.strategies[:2] if self.rehearsal else self.strategies
        options = ["--runs-dir", self.work / "runs" / "large" / engine, "--strategies", " ".join(names)]
        environment = {"ENGINE": engine, "TRAIN_ITERS": "6" if self.rehearsal else "12"}
        return Step(f"large-{engine}", module("sweep", *options), environment)

    def points(self, micro_batch: int) -> Iterator[Step]:
        """One process: each engine, profiled at its end, and the plain loop. That memory is full is an answer."""
        iterations = "6" if self.rehearsal else "30"
        size = {"MICRO_BATCH_SIZE": str(micro_batch), "GLOBAL_BATCH_SIZE": str(self.batch), "TRAIN_ITERS": iterations}
        size["NPROC_PER_NODE"] = "1"
        for engine in self.engines:
            name = f"throughput/{engine}/micro-batch-{micro_batch}"
            own = {"OUTPUT_DIR": str(self.work / "runs" / name), "ENGINE": engine, "MASTER_PORT": str(free_port())}
            environment = size | own | {"PROFILE_ITERATION": iterations}
            command = ["bash", str(launcher(BASELINE))]
            yield Step(name.replace("/", "-"), command, environment, (0, EXIT_CODES[OUT_OF_MEMORY]))
        plain = module("acceptance.baseline", self.work / f"baseline-{micro_batch}.jsonl")
        yield Step(f"baseline-{micro_batch}", plain, size)


def module(name: str, *arguments: object) -> list[str]:
    package = ["t5bench", name] if "." not in name else [f"t5bench.{name}"]
    return [sys.executable, "-m", *package, *map(str, arguments)]


def data() -> Step:
    return Step("data", ["bash", str(REPOSITORY / "scripts" / "prepare_xsum_megatron.sh")], {"SAMPLE": "1"})
