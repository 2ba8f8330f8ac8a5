"""Which steps there are: each is a command that a user could type, and leaves its results in the work directory."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from t5bench import REPOSITORY, Problem
from t5bench.acceptance.steps import Step
from t5bench.plan.launchers import declarations, launcher
from t5bench.plan.ports import free_port
from t5bench.plan.toolkit import completions
from t5bench.record.plan import Strategy
from t5bench.record.status import CONFIGURATION, EXIT_CODES, OUT_OF_MEMORY
from t5bench.sweep.rows import BASELINE, choose

MEGATRON, NATIVE = "megatron", "native"
# A micro-batch whose activations no GPU holds.
TOO_LARGE = 512

# Steps, and how many of them go on at once: one where time is measured.
Group = tuple[int, list[Step]]


@dataclass(frozen=True)
class Preset:
    """What to run and where. ``gpus`` is 0 in a rehearsal, which runs the same at tiny size on the CPU."""

    work: Path
    gpus: int
    engines: Sequence[str]
    strategies: Sequence[Strategy]
    micro_batch_sizes: Sequence[int]

    @classmethod
    def asked(cls, work: Path, gpus: int) -> "Preset":
        """What the settings in the environment ask for. Raises Problem."""
        engines = (MEGATRON, NATIVE) if os.environ["ENGINES"] == "both" else (os.environ["ENGINES"],)
        sizes = os.environ["MICRO_BATCH_SIZES"].split()
        if not all(size.isdecimal() and int(size) for size in sizes):
            raise Problem(f"MICRO_BATCH_SIZES must be whole numbers of at least 1, found '{' '.join(sizes)}'")
        names = {BASELINE, *choose(os.environ["STRATEGIES"].split())}
        chosen = [strategy for strategy in declarations() if strategy.name in names]
        return cls(work, gpus, engines, chosen, list(map(int, sizes)))

    @property
    def processes(self) -> int:
        """As many as there are devices, down to a power of two, which divides the global batch of 16."""
        return 1 << (min(16, max(1, self.gpus)).bit_length() - 1)

    @property
    def too_large(self) -> list[str]:
        """The strategies that the devices do not suffice for."""
        return [strategy.name for strategy in self.strategies if strategy.tp * strategy.pp > self.processes]

    @property
    def batch(self) -> int:
        """Samples of an iteration in every point of the throughput, so that all do the same work."""
        return max(self.micro_batch_sizes)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def acceptance(self) -> Iterator[Group]:
        # The native engine needs nothing compiled, so it computes while the compilers do.
        yield 1, [data(), self.refusal()]
        yield 3, [*self.compilation(), *self.parity(NATIVE)]
        yield 2, self.parity(MEGATRON)
        yield 1, [*self.large(), *self.out_of_memory()]

    def throughput(self) -> Iterator[Group]:
        yield 1, [data(), *self.compilation()]
        for size in self.micro_batch_sizes:
            yield 1, self.points(size)
        yield 1, [self.device("-after")]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def device(self, when: str = "") -> Step:
        return Step(f"device{when}", module("device", self.work / f"device{when}.json"), 30)

    def compilation(self) -> list[Step]:
        if not self.gpus or MEGATRON not in self.engines:
            return []
        path = os.pathsep.join([os.environ["MEGATRON_DIR"], os.environ["PYTHONPATH"]])
        return [Step("compile", module("compile"), 120, {"PYTHONPATH": path} | completions(os.environ))]

    def parity(self, engine: str) -> list[Step]:
        """check_parity.sh over two halves of the strategies, so that they can go on at once."""
        others = [strategy.name for strategy in self.strategies if strategy.name != BASELINE]
        halves = [half for half in (others[::2], others[1::2]) if half and engine in self.engines]
        steps = []
        for number, names in enumerate(halves, 1):
            name = f"parity-{engine}-{number}"
            # The check is made for these sizes.
            environment = {
                "ENGINE": engine,
                "MODEL_PRESET": "tiny",
                "GLOBAL_BATCH_SIZE": "16",
                "VOCABULARY_MULTIPLE": "128",
                "SHARE_GPUS": "1",
                "RUNS_DIR": str(self.work / "parity" / f"{name}-{time.strftime('%H%M%S')}"),
            }
            steps.append(Step(name, script("check_parity.sh", *names), 150, environment))
        return steps

    def large(self) -> list[Step]:
        """T5-Large as README configures it: DDP first, and last the strategies that on few devices are much like it."""
        first, *others = [strategy.name for strategy in self.strategies if strategy.name not in self.too_large]
        size = {"TRAIN_ITERS": "12" if self.gpus else "6", "NPROC_PER_NODE": str(self.processes)}
        names = [first, *reversed(others)]
        return [self.run(f"large/{engine}/{name}", name, engine, size) for name in names for engine in self.engines]

    def refusal(self) -> Step:
        """One process more than there are GPUs."""
        settings = {"DEVICE": "cuda", "NPROC_PER_NODE": str(self.gpus + 1)}
        return self.run("refused", BASELINE, NATIVE, settings, [EXIT_CODES[CONFIGURATION]])

    def out_of_memory(self) -> list[Step]:
        """A run that must end as out-of-memory; none on a CPU, whose memory is everybody's."""
        size = {"MICRO_BATCH_SIZE": str(TOO_LARGE), "GLOBAL_BATCH_SIZE": str(TOO_LARGE), "TRAIN_ITERS": "1"}
        ends = [EXIT_CODES[OUT_OF_MEMORY]]
        return [self.run("out-of-memory", BASELINE, self.engines[-1], size, ends)] if self.gpus else []

    def points(self, micro_batch: int) -> list[Step]:
        """One process: both engines, profiled at their end, and the plain loop. That memory is full is an answer."""
        iterations = "30" if self.gpus else "6"
        size = {"MICRO_BATCH_SIZE": str(micro_batch), "GLOBAL_BATCH_SIZE": str(self.batch), "TRAIN_ITERS": iterations}
        size["NPROC_PER_NODE"] = "1"
        profiled, ends = size | {"PROFILE_ITERATION": iterations}, [0, EXIT_CODES[OUT_OF_MEMORY]]
        plain = module("baseline", self.work / f"baseline-{micro_batch}.jsonl")
        return [
            *(self.run(f"throughput/{e}/micro-batch-{micro_batch}", BASELINE, e, profiled, ends) for e in self.engines),
            Step(f"baseline-{micro_batch}", plain, 150, size),
        ]

    def run(
        self, name: str, strategy: str, engine: str, settings: dict[str, str], passes: Sequence[int] = (0,)
    ) -> Step:
        """A run of a launcher; the name is its directory's too."""
        own = {"OUTPUT_DIR": str(self.work / "runs" / name), "ENGINE": engine, "MASTER_PORT": str(free_port())}
        environment = {"NPROC_PER_NODE": "1"} | settings | own
        return Step(name.replace("/", "-"), ["bash", str(launcher(strategy))], 60, environment, passes)


def module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"t5bench.acceptance.{name}", *map(str, arguments)]


def script(name: str, *arguments: str) -> list[str]:
    return ["bash", str(REPOSITORY / "scripts" / name), *arguments]


def data() -> Step:
    return Step("data", script("prepare_xsum_megatron.sh"), 15, {"SAMPLE": "1"})
