"""Which steps there are, and in which order: each of them is what a user would type."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.acceptance import launchers
from t5bench.acceptance.steps import EXIT_TIME, Step
from t5bench.plan.ports import free_port
from t5bench.record.status import COMPLETE, CONFIGURATION, EXIT_CODES, OUT_OF_MEMORY

MEGATRON, NATIVE = "megatron", "native"
ENGINES = (MEGATRON, NATIVE)
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
VOCABULARY = 32128
# Samples of an iteration in every point of the throughput, so that all do the same work.
THROUGHPUT_BATCH = 32


@dataclass(frozen=True)
class Plan:
    """What to run and where. ``gpus`` is 0 in a rehearsal, which runs everything else at tiny size on the CPU."""

    work: Path
    engine_directory: Path
    gpus: int
    strategies: Sequence[str]
    engines: Sequence[str] = ENGINES
    micro_batch_sizes: Sequence[int] = MICRO_BATCH_SIZES

    @property
    def rehearsal(self) -> bool:
        return self.gpus == 0

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    @property
    def preset(self) -> str:
        return "tiny" if self.rehearsal else "large"

    @property
    def iterations(self) -> int:
        return 6 if self.rehearsal else 12

    @property
    def vocabulary(self) -> int:
        """Of google-t5/t5-large, padded as the launchers do: the bundled sample has a smaller one of its own."""
        return 4352 if self.rehearsal else VOCABULARY

    @property
    def processes(self) -> int:
        """As many as there are devices, down to a power of two, which divides the global batch of 16."""
        return 1 if self.rehearsal else min(16, 1 << (self.gpus.bit_length() - 1))

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    def large_runs(self) -> list[tuple[str, str]]:
        """(engine, strategy) of every T5-Large run that the devices suffice for, engines in turn."""
        too_large = self.too_large()
        return [(engine, name) for name in self.strategies if name not in too_large for engine in self.engines]

    def too_large(self) -> list[str]:
        """The strategies whose T5-Large run needs more devices than there are."""
        return [name for name in self.strategies if prod(launchers.model_parallel_sizes(name)) > self.processes]


def settings(plan: Plan, directory: Path, engine: str) -> dict[str, str]:
    """What every run of a launcher here is told."""
    return {
        "OUTPUT_DIR": str(directory),
        "ENGINE": engine,
        "DEVICE": plan.device,
        "MODEL_PRESET": plan.preset,
        "NNODES": "1",
        "HOSTS": "",
        "MASTER_PORT": str(free_port()),
        "MEGATRON_DIR": str(plan.engine_directory),
        "MEGATRON_DATA_DIR": str(plan.work / "data"),
        "TOKENIZER_MODEL": "",
        "WANDB_MODE": "disabled",
        "LOG_INTERVAL": "1",
        "SAMPLE_INTERVAL": "0.5",
        "RENDEZVOUS_TIMEOUT": "60",
        "WATCHDOG_SECONDS": "300",
        "DISTRIBUTED_TIMEOUT_MINUTES": "4",
        "PYTHON": sys.executable,
    }


def full_size(plan: Plan, strategy: str) -> list[str]:
    """The launcher with a vocabulary of the benchmark's size. The engines pad to a multiple of this times TP."""
    tensor_parallel, _ = launchers.model_parallel_sizes(strategy)
    multiple = plan.vocabulary // tensor_parallel
    return [*launchers.command(strategy), "--", "--make-vocab-size-divisible-by", str(multiple)]


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


# ---- the parts -------------------------------------------------------------------------------------------------------


def data(plan: Plan) -> Step:
    return Step(
        "data",
        "the bundled sample",
        ["bash", str(REPOSITORY / "scripts" / "prepare_xsum_megatron.sh")],
        {"SAMPLE": "1", "TOKENIZER_MODEL": "", "MEGATRON_DATA_DIR": str(plan.work / "data"), "PYTHON": sys.executable},
    )


def floor(plan: Plan) -> Step:
    output = str(plan.work / "floor.json")
    return Step("floor", "the rates of matrix products and copies", module("acceptance.floor", "--json", output))


def compilations(plan: Plan) -> list[Step]:
    """Nothing is compiled for a rehearsal on the CPU; the native engine needs nothing compiled."""
    if plan.rehearsal or MEGATRON not in plan.engines:
        return []
    path = os.pathsep.join([str(plan.engine_directory), os.environ.get("PYTHONPATH", "")])
    return [
        Step("compile-deepspeed", "DeepSpeed's optimizers compiled", module("acceptance.compile", "deepspeed"),
             seconds=300),
        Step("compile-megatron", "Megatron's fused softmax compiled", module("acceptance.compile", "megatron"),
             {"PYTHONPATH": path}, seconds=300),
    ]  # fmt: skip


def refusals(plan: Plan) -> list[Step]:
    """The launchers count the devices and say so before anything starts."""
    directory, refused = plan.runs / "refused", (EXIT_CODES[CONFIGURATION],)
    too_many = settings(plan, directory, NATIVE) | {
        "DEVICE": "cuda", "MODEL_PRESET": "tiny", "NPROC_PER_NODE": str(plan.gpus + 1), "MICRO_BATCH_SIZE": "1",
        "GLOBAL_BATCH_SIZE": str(plan.gpus + 1),
    }  # fmt: skip
    hidden = settings(plan, directory, NATIVE) | {
        "DEVICE": "cuda", "MODEL_PRESET": "tiny", "NPROC_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    ddp = launchers.command("ddp")
    return [
        Step("refuses-too-many", "more processes than GPUs are refused", ddp, too_many, 30, 5, refused),
        Step("refuses-hidden", "GPUs that CUDA_VISIBLE_DEVICES hides do not count", ddp, hidden, 30, 5, refused),
    ]


def out_of_memory(plan: Plan) -> list[Step]:
    """A micro-batch whose activations fit on no GPU: the run must end as out-of-memory, and say so."""
    if plan.rehearsal:
        return []
    size, ends = "1024", (EXIT_CODES[OUT_OF_MEMORY],)
    changes = {"MICRO_BATCH_SIZE": size, "GLOBAL_BATCH_SIZE": size, "TRAIN_ITERS": "1", "NPROC_PER_NODE": "1"}
    found = []
    for engine in plan.engines:
        environment = settings(plan, plan.runs / "out-of-memory" / engine, engine) | changes
        title = f"out of memory is recognised, {engine}"
        found.append(Step(f"out-of-memory-{engine}", title, full_size(plan, "ddp"), environment, 150, 30, ends))
    return found


def parity(plan: Plan, engine: str) -> list[Step]:
    """check_parity.sh over a part of the strategies each, so that they can go on at once."""
    groups: dict[str, list[str]] = {"zero": [], "model-parallel": []}
    for strategy in plan.strategies:
        divided = prod(launchers.model_parallel_sizes(strategy)) > 1
        # DDP is what the check compares all others with.
        if strategy != "ddp":
            groups["model-parallel" if divided else "zero"].append(strategy)
    found = []
    for group, names in groups.items():
        if not names:
            continue
        name = f"parity-{engine}-{group}"
        environment = settings(plan, Path(), engine) | {
            "MODEL_PRESET": "tiny",
            "RUNS_DIR": str(plan.work / "parity" / name / time.strftime("%H%M%S")),
            "SHARE_GPUS": "1",
        }
        for chosen_by_the_check in ("OUTPUT_DIR", "MASTER_PORT"):
            del environment[chosen_by_the_check]
        command = ["bash", str(REPOSITORY / "scripts" / "check_parity.sh"), *names]
        found.append(Step(name, f"parity, {engine}: {' '.join(names)}", command, environment, 400, 60))
    return found


def large(plan: Plan) -> list[Step]:
    """T5-Large as README configures it, with every strategy that the devices suffice for."""
    found = []
    for engine, strategy in plan.large_runs():
        environment = settings(plan, plan.runs / "large" / engine / strategy, engine)
        environment |= {"TRAIN_ITERS": str(plan.iterations), "NPROC_PER_NODE": str(plan.processes)}
        title = f"T5-{plan.preset.capitalize()}, {engine} {strategy}"
        found.append(Step(f"large-{engine}-{strategy}", title, full_size(plan, strategy), environment, 150, 30))
    return found


def points(plan: Plan) -> list[Step]:
    """One process, more and more samples at a time until they do not fit; its last iteration is profiled."""
    found, ends = [], (EXIT_CODES[COMPLETE], EXIT_CODES[OUT_OF_MEMORY])
    for size in plan.micro_batch_sizes:
        for engine in plan.engines:
            environment = settings(plan, plan.runs / "throughput" / engine / f"micro-batch-{size}", engine)
            environment |= {
                "TRAIN_ITERS": str(plan.iterations),
                "NPROC_PER_NODE": "1",
                "MICRO_BATCH_SIZE": str(size),
                "GLOBAL_BATCH_SIZE": str(THROUGHPUT_BATCH),
                "PROFILE_ITERATION": str(plan.iterations),
            }
            title = f"throughput, {engine}, micro-batch {size}"
            found.append(Step(f"throughput-{engine}-{size}", title, full_size(plan, "ddp"), environment, 150, 30, ends))
    return found


def baseline(plan: Plan, mode: str, seconds: float) -> Step:
    """A plain PyTorch loop over Hugging Face's T5, mode "eager" or "compiled", beginning no size after ``seconds``.

    Compiling takes longer than measuring, so there the largest come first: they say most if time runs out.
    """
    compiled = mode == "compiled"
    sizes = sorted(plan.micro_batch_sizes, reverse=compiled)
    arguments = [
        "--preset", plan.preset, "--device", plan.device, "--micro-batch-sizes", ",".join(map(str, sizes)),
        "--global-batch-size", str(THROUGHPUT_BATCH), "--output", str(plan.work / f"baseline-{mode}.jsonl"),
        "--seconds", f"{max(0.0, seconds):.0f}", "--vocabulary", str(plan.vocabulary),
    ]  # fmt: skip
    if compiled:
        # A rehearsal goes the way of torch.compile without its compilers.
        arguments += ["--compile", "blocks", "--backend", "aot_eager" if plan.rehearsal else "inductor"]
    title = f"Hugging Face's T5 in a plain loop, {mode}"
    command = module("acceptance.baseline", *arguments)
    return Step(f"baseline-{mode}", title, command, seconds=seconds + 60, least=40, unfinished=EXIT_TIME)
