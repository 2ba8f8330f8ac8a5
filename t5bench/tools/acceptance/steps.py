"""The steps of scripts/gpu_acceptance.sh, the most valuable first. Each is a command that a user could type.

A step's figures go to results.json. Its files go to the directory of the call that runs it.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from shutil import which
from typing import Any

from t5bench import REPOSITORY, Problem
from t5bench.compare import comparison, parity
from t5bench.plan import engine
from t5bench.plan.launchers import declarations, launcher
from t5bench.plan.ports import free_port
from t5bench.plan.scripts import script_defaults
from t5bench.profile import parts as profile
from t5bench.record import machine, nvml, records
from t5bench.record.status import EXIT_CODES, OUT_OF_MEMORY
from t5bench.sweep.launch import BASELINE, choose
from t5bench.tools.acceptance import gpu, results

SCRIPTS = REPOSITORY / "scripts"
NATIVE = "native"
MEGATRON = "megatron"
# What every run here has in common; all processes are on this machine.
COMMON = {
    "NNODES": "1",
    "HOSTS": "",
    "TOKENIZER_MODEL": "",
    "WANDB_MODE": "disabled",
    "LOG_INTERVAL": "1",
    "SAMPLE_INTERVAL": "0.5",
    "RENDEZVOUS_TIMEOUT": "60",
    # The first run of an engine waits for its compilers.
    "WATCHDOG_SECONDS": "900",
    "DISTRIBUTED_TIMEOUT_MINUTES": "10",
    # One process without a route to anywhere.
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# The vocabulary is google-t5/t5-large's, padded, because the bundled sample has a smaller one.
LARGE = {"DEVICE": "cuda", "MODEL_PRESET": "large", "VOCABULARY_MULTIPLE": "32128"}
# In fp32, because few processors compute in bf16 as fast.
TINY = {
    "DEVICE": "cpu", "MODEL_PRESET": "tiny", "VOCABULARY_MULTIPLE": "4352", "DS_ACCELERATOR": "cpu",
    "PRECISION_FLAG": "",
}  # fmt: skip
# ZeRO's communication beside its computation.
OVERLAPPING = ("zero2", "zero3")
OVERLAP = {"OVERLAP_COMM": "on", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
# One process.
ALONE = {"NPROC_PER_NODE": "1"}
# How the strategies are compared: scripts/check_parity.sh with a batch that every layout divides.
COMPARED = {"GLOBAL_BATCH_SIZE": "16", "VOCABULARY_MULTIPLE": "128", "SHARE_GPUS": "1"}
# What makes its runs exact.
EXACT = {"PRECISION_FLAG": "", "DROPOUT": "0"}
# Modules that a step imports, and the compilers that it runs.
MODULES = {
    "data": ("tokenizers", "transformers", "numpy"),
    "huggingface": ("transformers",),
    "deepspeed": ("deepspeed", "hjson", "pydantic", "msgpack", "cpuinfo", "einops", "tqdm", "psutil"),
    MEGATRON: ("deepspeed", "hjson", "pydantic", "einops", "regex", "six", "pybind11", "sentencepiece", "packaging"),
}
COMPILERS = {MEGATRON: ("g++", "ninja", "nvcc"), "offload": ("g++", "ninja", "nvcc")}


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Collection[str] = ()
    """Keys of FoundMachine.missing: what this step needs besides Python and torch."""
    after: Sequence["Step"] = ()
    """Steps that must have passed in the same call, because they prepare the machine."""
    seconds: float = 40
    """About how long it takes on one H100."""
    passes: Collection[int] = (0,)
    """The exit statuses that count as passed."""
    figures: Callable[[], Any] = lambda: None
    """What results.json keeps; None if the step has not left it."""


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-m", name, *map(str, arguments)]


class FoundMachine:
    """The devices, and what the machine lacks."""

    def __init__(self, environment: Mapping[str, str], *, rehearsal: bool) -> None:
        """Raises Problem without a GPU, unless this is a rehearsal."""
        self.rehearsal = rehearsal
        self.environment = environment
        self.nvml = None if rehearsal else gpu.visible(environment)
        if rehearsal:
            self.gpus = []
        elif self.nvml:
            self.gpus = self.nvml.names()
        else:
            self.gpus = [row["name"] for row in machine.gpus(environment)]
        if not self.gpus and not rehearsal:
            looked = f"neither the driver's library {nvml.LIBRARY} nor nvidia-smi lists a GPU"
            raise Problem(f"there is no GPU here: {looked}", "--rehearse tries everything on the CPU")
        # A rehearsal trains two processes, as the launchers do without a GPU.
        self.processes = len(self.gpus) or 2

    def missing(self) -> dict[str, str]:
        """By what steps need, why this machine does not have it."""
        missing: dict[str, str] = {}
        for need, names in MODULES.items():
            absent = [name for name in names if not util.find_spec(name)]
            if absent:
                remedy = "install requirements.txt, or add them to a bundle with CARRY"
                missing[need] = f"these Python packages are missing: {', '.join(absent)} ({remedy})"
        path = self.environment.get("PATH")
        for need, names in COMPILERS.items():
            wanted = [name for name in names if name != "nvcc" or not self.rehearsal]
            absent = [name for name in wanted if not which(name, path=path)]
            if absent:
                missing.setdefault(need, f"these compilers are missing: {', '.join(absent)}")
        directory = Path(self.environment["MEGATRON_DIR"])
        state = engine.state_of(directory)
        if state == engine.MISSING:
            missing[MEGATRON] = f"there is no Megatron-DeepSpeed at {directory}: run scripts/setup_megatron.sh"
        elif state != engine.SERIES:
            missing[MEGATRON] = f"{directory} is {state}: scripts/setup_megatron.sh --check says what differs"
        return missing

    def facts(self) -> dict[str, Any]:
        """Everything on which figures from this machine depend."""
        cpu = machine.cpu()
        commit, changed = machine.commit(REPOSITORY)
        packed = Path(self.environment.get("BUNDLE_DIRECTORY", ""), "commit")
        if commit is None and packed.is_file():
            commit = f"{packed.read_text().strip()}, when the bundle was packed"
        shared_memory = os.statvfs("/dev/shm")
        memory = []
        if self.nvml:
            memory = self.nvml.memory_mib()
        return {
            "GPUs": ", ".join(self.gpus),
            "GPU memory MiB": ", ".join(map(str, memory)),
            "driver": self.nvml.driver() if self.nvml else None,
            "CPU": f"{cpu['model']}, {cpu['cores']} cores, {cpu['memory_mib']} MiB",
            "/dev/shm": f"{shared_memory.f_frsize * shared_memory.f_blocks >> 20} MiB",
            "CUDA_HOME": self.environment.get("CUDA_HOME"),
            "commit": f"{commit}, with changes" if changed else commit,
            **machine.versions(),
        }


class Steps:
    """What the settings in the environment ask for; a rehearsal runs the same steps with the tiny model on the CPU."""

    def __init__(self, here: FoundMachine, environment: Mapping[str, str]) -> None:
        """Raises Problem."""
        self.here = here
        sizes = environment["MICRO_BATCH_SIZES"].split()
        if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
            found = " ".join(sizes)
            raise Problem(f"MICRO_BATCH_SIZES must be whole numbers of at least 1, found '{found}'")
        self.sizes = list(dict.fromkeys(sizes))
        self.batch = max(map(int, sizes))
        chosen = environment["ENGINES"]
        self.engines = [NATIVE, MEGATRON] if chosen == "both" else [chosen]
        names = set(choose(environment["STRATEGIES"].split())) - {BASELINE}
        self.strategies = [strategy for strategy in declarations("t5") if strategy.name in names]
        self.work = Path(environment["WORK_DIR"])
        self.extensions = self.work / "torch-extensions"
        # Enough for a profile, and in a rehearsal no more than that.
        self.iterations = "6" if here.rehearsal else "16"

    def common(self) -> dict[str, str]:
        """The environment of every step."""
        environment = COMMON | {
            "MEGATRON_DATA_DIR": str(self.work / "data"),
            "TORCH_EXTENSIONS_DIR": str(self.extensions),
        }
        if self.here.rehearsal:
            return environment | TINY | {"CUDA_VISIBLE_DEVICES": ""}
        environment |= LARGE
        if "CUDA_VISIBLE_DEVICES" not in self.here.environment:
            # The launchers count the GPUs with nvidia-smi, which may be missing.
            indices = range(len(self.here.gpus))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
        return environment

    def in_order(self, directory: Path) -> Iterator[Step]:
        """directory: of the call, for the files of the steps."""
        self.directory = directory
        self.data = Step(
            "data",
            ["bash", str(SCRIPTS / "prepare_xsum_megatron.sh")],
            {"SAMPLE": "1"},
            needs=("data",),
        )
        self.compiled = self.compilation()
        yield self.device("device")
        if NATIVE in self.engines:
            for size in self.sizes:
                yield self.run(NATIVE, BASELINE, size, **ALONE)
        for size in self.sizes:
            yield self.baseline(size)
        if MEGATRON in self.engines:
            for size in self.sizes[1:]:
                yield self.run(MEGATRON, BASELINE, size, **ALONE)
        for name in self.engines:
            yield from self.noise(name)
            yield from self.parity(name)
        if MEGATRON in self.engines:
            # The largest may not fit.
            yield self.run(MEGATRON, BASELINE, self.sizes[0], **ALONE)
        for name in self.engines:
            yield from self.every_strategy(name, min(self.sizes, key=int))
        yield self.device("device-after")

    def every_strategy(self, engine_name: str, micro_batch: str) -> Iterator[Step]:
        """Those that fit on the devices, and variants that show what a setting costs."""
        if self.here.processes > 1:
            yield self.run(engine_name, BASELINE, micro_batch, "all-devices")
        for strategy in self.strategies:
            if strategy.tp * strategy.pp <= self.here.processes:
                yield self.run(engine_name, strategy.name, micro_batch)
        yield self.run(engine_name, BASELINE, micro_batch, "without-dropout", DROPOUT="0", **ALONE)
        # Whether overlapping helps, and whether it still hangs: the step is then ended.
        for strategy in self.strategies:
            if strategy.name in OVERLAPPING:
                yield self.run(engine_name, strategy.name, micro_batch, "overlapping", **OVERLAP)

    def preparations(self, engine_name: str) -> list[Step]:
        """The steps before every run of an engine."""
        return [self.data, self.compiled] if engine_name == MEGATRON else [self.data]

    def device(self, name: str) -> Step:
        file = self.directory / f"{name}.json"

        def figures() -> Any:
            return json.loads(file.read_text()) if file.exists() else None

        command = module("t5bench.tools.acceptance.device", file)
        return Step(name, command, seconds=20, figures=figures)

    def compilation(self) -> Step:
        """Megatron's kernels and its index helper, so that no measurement waits for a compiler."""
        kernels = Path(self.here.environment["MEGATRON_DIR"], engine.KERNELS)
        is_compiled = any(kernels.rglob("*.so"))
        environment = {
            "ENGINE": MEGATRON,
            "OUTPUT_DIR": str(self.directory / "compile-megatron"),
            "MODEL_PRESET": "tiny",
            "TRAIN_ITERS": "2",
            "VOCABULARY_MULTIPLE": "4352",
            "MASTER_PORT": str(free_port()),
            **ALONE,
        }
        return Step(
            "compile-megatron",
            ["bash", str(launcher(BASELINE))],
            environment,
            needs=(MEGATRON,),
            after=(self.data,),
            seconds=30 if is_compiled else 150,
        )

    def run(self, engine_name: str, strategy: str, micro_batch: str, variant: str = "", **settings: str) -> Step:
        """A training run with a profile of its last iteration. Memory that does not suffice is a valid result."""
        words = [word for word in (engine_name, strategy, variant) if word]
        name = "-".join([*words, f"micro-batch-{micro_batch}"])
        directory = self.directory / "runs" / name
        # Several devices share a larger batch, which every micro-batch divides.
        devices = 1 if "NPROC_PER_NODE" in settings else self.here.processes
        environment = {
            "ENGINE": engine_name,
            "OUTPUT_DIR": str(directory),
            "MASTER_PORT": str(free_port()),
            "GLOBAL_BATCH_SIZE": str(self.batch * devices),
            "MICRO_BATCH_SIZE": micro_batch,
            "TRAIN_ITERS": self.iterations,
            "PROFILE_ITERATION": self.iterations,
        } | settings
        needs = {"data"}
        if engine_name == MEGATRON:
            needs.add(MEGATRON)
        if strategy.startswith("zero"):
            needs.add("deepspeed")
        is_offload = strategy.endswith("offload")
        if is_offload:
            needs.add("offload")
        return Step(
            name,
            ["bash", str(launcher(strategy))],
            environment,
            needs,
            after=self.preparations(engine_name),
            seconds=110 if is_offload else 50,
            passes=(0, EXIT_CODES[OUT_OF_MEMORY]),
            figures=lambda: measured(directory, " ".join(words)),
        )

    def baseline(self, micro_batch: str) -> Step:
        """The plain loop over Hugging Face's T5, as it is and, where that helps most for its time, compiled."""
        file = self.directory / f"huggingface-{micro_batch}.jsonl"
        is_compiled = int(micro_batch) == self.batch
        ways = ["eager", "compiled"] if is_compiled else ["eager"]
        environment = {
            "ENGINE": NATIVE,
            "GLOBAL_BATCH_SIZE": str(self.batch),
            "MICRO_BATCH_SIZE": micro_batch,
            "TRAIN_ITERS": self.iterations,
            "NPROC_PER_NODE": "1",
        }

        def points() -> Any:
            if not file.exists():
                return None
            return [json.loads(line) for line in file.read_text().splitlines()]

        return Step(
            f"huggingface-micro-batch-{micro_batch}",
            module("t5bench.tools.acceptance.baseline", file, *ways),
            environment,
            needs=("data", "huggingface"),
            after=(self.data,),
            seconds=90 if is_compiled else 40,
            figures=points,
        )

    def noise(self, engine_name: str) -> Iterator[Step]:
        """DDP twice, which shows the noise."""
        name = f"noise-{engine_name}"
        defaults = script_defaults("check_parity", self.here.environment)
        # The data are this acceptance's.
        recipe = {setting: value for setting, value in defaults.items() if value}
        runs = self.directory / name
        twice = ["--strategies", BASELINE, "--repeats", "2"]
        directories = [runs / "repeat1" / BASELINE, runs / "repeat2" / BASELINE]
        yield Step(
            name,
            module("t5bench", "sweep", "--runs-dir", runs, *twice),
            recipe | EXACT | COMPARED | {"ENGINE": engine_name},
            needs={"data", MEGATRON} if engine_name == MEGATRON else {"data"},
            after=self.preparations(engine_name),
            seconds=30,
            figures=lambda: noise(directories),
        )

    def parity(self, engine_name: str) -> Iterator[Step]:
        """Every strategy against DDP, which alone cannot be compared."""
        if not self.strategies:
            return
        name = f"parity-{engine_name}"
        environment = COMPARED | {
            "MODEL_PRESET": "tiny",
            "ENGINE": engine_name,
            "CHECK_BLIND_SPOTS": "0",
            "RUNS_DIR": str(self.directory / name),
        }
        needs = {"data", "deepspeed"}
        if engine_name == MEGATRON:
            needs.add(MEGATRON)
        printed = self.directory / "logs" / f"{name}.out"
        strategies = [strategy.name for strategy in self.strategies]
        # DDP runs with as many processes as each strategy needs.
        runs = len(strategies) + 2
        yield Step(
            name,
            ["bash", str(SCRIPTS / "check_parity.sh"), BASELINE, *strategies],
            environment,
            needs,
            after=self.preparations(engine_name),
            seconds=runs * (20 if engine_name == MEGATRON else 12),
            figures=lambda: printed.read_text() if printed.exists() else None,
        )


def measured(directory: Path, what: str) -> list[dict[str, Any]]:
    """A run's row as a comparison has it, with what its profile says; none without a record."""
    if not records.looks_like_run(directory):
        return []
    run = records.load(directory)
    row = comparison.build([run], baseline=run.strategy).to_json()["groups"][0]["rows"][0]
    limits = ""
    kernels: list[str] = []
    profile_path = directory / "profile.json"
    if profile_path.exists():
        limits = profile.limits(profile.read_profile(profile_path).ranks)
        events = json.loads((directory / "trace.json").read_text())["traceEvents"]
        kernels = results.attention_kernels(event["name"] for event in events)
    point = {
        "what": what,
        "micro_batch": int(row["runs"][0]["settings"]["MICRO_BATCH_SIZE"]),
        "limits": limits,
        "attention": kernels,
    }
    return [row | point]


def noise(directories: Sequence[Path]) -> dict[str, float] | None:
    """The largest relative differences of two runs' curves; None unless both are there."""
    if not all(map(records.looks_like_run, directories)):
        return None
    one, other = map(records.load, directories)
    largest = {}
    for name, key in (("loss", "lm_loss"), ("norm", "grad_norm")):
        difference = parity.difference(parity.curve(one, key), parity.curve(other, key), 0.0)
        if difference:
            largest[name] = difference.largest
    return largest
