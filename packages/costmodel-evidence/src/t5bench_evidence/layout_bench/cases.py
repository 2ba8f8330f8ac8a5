"""What planners are tried on: trainings that others ran, or could not run, in sets.

Cases of a set with the same `choice` are layouts of one training, among which a user would choose.
"""

import csv
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from t5bench import Problem
from t5bench.choose.search.runs import name_of
from t5bench.costmodel.job import Architecture, Job, Parallel, Zero, padded
from t5bench.costmodel.machine import DEVICES, GB, GIB, Link, Machine
from t5bench_evidence import check, grid, lab
from t5bench_evidence.check import PredictedFigure
from t5bench_evidence.jobs import job_of, machine_of, same_source_and_model
from t5bench_evidence.points import Point, read

B200 = Path(__file__).with_name("llama_b200.csv")
SAILOR_GH200 = Path(__file__).with_name("sailor_gh200.csv")
SAILOR = "sailor/"
"""How the names of its cases begin."""
LATENCY = 15e-6  # of a message between nodes, where a table does not say it
# Sources of the 526 published measurements whose points are a set of their own.
SOURCES = {
    "bigscience": ("bigscience-workshop/bigscience", "the experiments before BLOOM: GPTs on V100s and A100s"),
    "llm-foundry": ("mosaicml/llm-foundry", "MPTs under FSDP on A100s and H100s"),
}
MEGATRON = "NVIDIA/Megatron-LM"


@dataclass(frozen=True)
class Case:
    """One training."""

    name: str
    job: Job
    machine: Machine
    backend: str = "nccl"
    choice: str = ""
    """The choice of which it is a layout; "" for none."""
    seconds: float = 0.0
    """Of an iteration; 0 where that was not measured."""
    allocated: float = 0.0
    """Bytes between iterations; 0 where that was not measured."""
    peak: float = 0.0
    """The most bytes allocated at a time; 0 where that was not measured."""
    is_last_stage: bool = False
    """Whether the memory is the last pipeline stage's, not the fullest one's."""
    ran: bool | None = None
    """False if it ran out of memory; None where that was no question."""
    has_fused_loss: bool = False
    """Whether the loss is one kernel, which some planners know."""


@dataclass(frozen=True)
class CaseSet:
    name: str
    """One word, for tables and files."""
    about: str
    """What it is and who measured it, without a full stop."""
    cases: list[Case]


def all_sets() -> list[CaseSet]:
    """Those of this package. Raises Problem."""
    points = [point for path in check.FILES for point in read(path)[0]]
    apart = {repo for repo, _ in SOURCES.values()}
    by_source = []
    for name, (repo, about) in SOURCES.items():
        cases = _of_choices(list(_timed(point for point in points if point.source.repo == repo)))
        by_source.append(CaseSet(name, f"{about} ({repo})", cases))
    others = [point for point in points if point.source.repo not in apart]
    about_others = "the other published trainings with a stated GPU"
    return [
        a100_node(),
        *by_source,
        CaseSet("others", about_others, _of_choices(list(_timed(others)))),
        llama_b200(),
        sailor_gh200(),
        CaseSet("megatron-tests", f"memory of the last rank in {MEGATRON}'s own tests", list(_memory(points))),
        our_lab(),
    ]


def a100_node() -> CaseSet:
    cases = []
    for cell in grid.read():
        choice = "/".join(map(str, cell.choice))
        parallel = cell.job.parallel
        name = f"{choice}/tp{parallel.tensor}pp{parallel.pipeline}mb{cell.job.micro_batch}"
        cases.append(Case(name, cell.job, cell.machine, choice=choice, seconds=cell.seconds))
    about = "GPTs on 2 to 8 A100s of a node, Megatron-DeepSpeed, full recomputation (VIA-Research/vTrain f8dda84)"
    return CaseSet("a100-node", about, cases)


def _figures(point: Point) -> dict[str, float]:
    """The measured figures of a point that the cost model can be held against: by what they are of, or their use."""
    rows = [row for row in check.compare_all([point]) if isinstance(row, PredictedFigure)]
    return {row.what if row.use in ("memory", "peak") else row.use: row.measured for row in rows}


def _timed(points: Iterable[Point]) -> Iterator[Case]:
    """Those whose throughput and GPU are known, or that are known to fit."""
    choices: dict[Hashable, str] = {}
    for point in points:
        figures = _figures(point)
        rate = figures.get("throughput")
        ran = True if "bound" in figures else None
        if not rate and not ran:
            continue
        job = job_of(point)
        key = (same_source_and_model(point), job.parallel.world, job.global_batch)
        choice = choices.setdefault(key, f"{point.origin} {len(choices) + 1}") if rate else ""
        seconds = job.global_batch / rate if rate else 0.0
        yield Case(point.id, job, machine_of(point), choice=choice, seconds=seconds, ran=ran)


def _of_choices(cases: Sequence[Case]) -> list[Case]:
    """The same, in which the only layout of a choice has none."""
    counted = Counter(case.choice for case in cases)
    return [replace(case, choice="") if counted[case.choice] < 2 else case for case in cases]


def _memory(points: Iterable[Point]) -> Iterator[Case]:
    """Those of Megatron-LM's tests, which log the last rank's memory."""
    for point in points:
        if point.source.repo != MEGATRON:
            continue
        figures = _figures(point)
        allocated = figures.get("allocated", 0.0) * GB
        peak = figures.get("peak allocated", 0.0) * GB
        if allocated or peak:
            yield Case(point.id, job_of(point), machine_of(point), allocated=allocated, peak=peak, is_last_stage=True)


def our_lab() -> CaseSet:
    cases = []
    for choice in lab.choices():
        for candidate in choice.candidates():
            name = name_of(candidate)
            seconds = choice.seconds[name]
            case = Case(f"{choice.name}/{name}", candidate.job, candidate.machine, "gloo", choice.name, seconds)
            cases.append(case)
    about = "tiny models on the native engine, on CPU hosts of this project's lab"
    return CaseSet("our-lab", about, cases)


def llama_b200() -> CaseSet:
    about = "slices of Llama 3 on 8 B200s, Megatron-LM (MooreThreads/SimuMax 4dcaae5)"
    return CaseSet("llama-b200", about, read_layouts(B200))


# Of Sailor's two models: layers, hidden size, heads. Their head is the embedding.
SAILOR_MODELS = {"OPT-350": (24, 1024, 16), "GPT-Neo-2.7": (32, 2560, 32)}
SAILOR_LENGTH = 2048
SAILOR_VOCABULARY = 50257


def sailor_gh200() -> CaseSet:
    """In fp32, which in NVIDIA's container (its Dockerfile's) is TF32 on tensor cores: there
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is 1."""
    with SAILOR_GH200.open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    about = "GPTs on 4 to 256 GH200s, DeepSpeed's pipelines, TF32 (eth-easl/sailor cf2c8e3)"
    return CaseSet("sailor-gh200", about, _of_choices([_sailor_case(row) for row in rows]))


def _sailor_case(row: Mapping[str, str]) -> Case:
    tensor, pipeline, data = (int(row[name]) for name in ("tp", "pp", "dp"))
    layers, hidden, heads = SAILOR_MODELS[row["model"]]
    architecture = Architecture(
        encoder_layers=0,
        decoder_layers=layers,
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        kv_heads=heads,
        encoder_length=0,
        decoder_length=SAILOR_LENGTH,
        padded_vocabulary=padded(SAILOR_VOCABULARY, 128, tensor),
        family="gpt",
    )
    per_node = 4
    job = Job(
        architecture,
        Parallel(tensor, pipeline, data, devices_per_node=per_node, deepspeed=pipeline > 1),
        micro_batch=int(row["micro_batch"]),
        global_batch=int(row["global_batch"]),
        precision="tf32",
    )
    device = DEVICES["gh200"]
    machine = Machine(device, Link(device.nvlink, 10e-6), Link(per_node * 200e9 / 8, LATENCY), per_node)
    choice = f"{row['model']}/{row['gpus']}/{row['global_batch']}"
    seconds = float(row["seconds_per_iteration"])
    return Case(f"{SAILOR}{row['plan']}", job, machine, choice=choice, seconds=seconds)


def read_layouts(path: Path) -> list[Case]:
    """A table of layouts: a line of titles and a line for each layout, and comments that begin with #.

    LAYOUTBENCH.md describes the columns. Raises Problem.
    """
    try:
        with path.open() as lines:
            rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
        if not rows:
            raise ValueError("it has no layout")
        return _of_choices(_named_apart([_case_of_row(row) for row in rows]))
    except (OSError, KeyError, ValueError) as error:
        remedy = "packages/costmodel-evidence/LAYOUTBENCH.md describes such tables"
        raise Problem(f"{path} is no table of layouts: {error!r}", remedy) from error


def _named_apart(cases: Iterable[Case]) -> list[Case]:
    """With a number behind the name of a layout that was measured again."""
    seen: dict[str, int] = {}
    found = []
    for case in cases:
        seen[case.name] = seen.get(case.name, 0) + 1
        found.append(replace(case, name=f"{case.name} {seen[case.name]}") if seen[case.name] > 1 else case)
    return found


ATTENTION = {"flash1": "flash", "flash2": "flash", "megatron_fused_softmax": "unfused"}
NORMS = {"1": "fused", "0": "eager", "": ""}
GPUS = {"A100-80GB": "a100"}  # beside the names that `predict --device` takes


def _case_of_row(row: Mapping[str, str]) -> Case:
    def number(name: str) -> int:
        return int(row[name])

    hidden = number("hidden")
    tensor = number("tp")
    gpus = number("gpus")
    engine = row.get("software") or "unknown"
    is_padded = engine in ("megatron-core", "transformer-engine")
    vocabulary = padded(number("vocab"), 128, tensor) if is_padded else number("vocab")
    architecture = Architecture(
        encoder_layers=0,
        decoder_layers=number("layers"),
        hidden=hidden,
        heads=number("heads"),
        head_size=hidden // number("heads"),
        ffn=number("ffn"),
        kv_heads=number("kv_heads"),
        encoder_length=0,
        decoder_length=number("sequence_length"),
        padded_vocabulary=vocabulary,
        family="gpt",
        gated=row["gated"] == "1",
        activation="silu" if row["gated"] == "1" else "gelu",
        tied=False,
        positions="rotary",
        biases=False,
        head_bias=False,
        norm="rms",
    )
    per_node = number("per_node")
    is_megatron = row["zero_stage"] == "distributed"
    norm = NORMS[row.get("rms_norm_kernel", "")]
    job = Job(
        architecture,
        Parallel(
            tensor,
            number("pp"),
            gpus // (tensor * number("pp")),
            sequence_parallel=row["sequence_parallel"] == "1",
            devices_per_node=per_node,
        ),
        micro_batch=number("micro_batch"),
        global_batch=number("global_batch"),
        zero=Zero() if is_megatron else Zero(number("zero_stage")),
        distributed_optimizer=is_megatron,
        precision=row["precision"],
        recompute=row["recompute"],
        attention=ATTENTION.get(row["attention"], row["attention"]),
        norm_kernel=norm,
        dropout=0.0,
        engine=engine,
        dummy_gradients=is_megatron,
    )
    device = DEVICES[GPUS.get(row["gpu"], row["gpu"])]
    between = Link(float(row["link_gbit_per_gpu"]) * per_node * 1e9 / 8, LATENCY)
    machine = Machine(device, Link(device.nvlink, 10e-6), between, per_node)
    choice = "/".join((row["job"], row["attention"], row.get("rms_norm_kernel", "")))
    layout = f"tp{tensor}pp{row['pp']}mb{row['micro_batch']}sp{row['sequence_parallel']}{row['recompute']}"
    seconds = float(row["seconds_per_iteration"] or 0)
    return Case(
        name=f"{choice}/{layout}",
        job=job,
        machine=machine,
        choice=choice,
        seconds=seconds,
        peak=float(row.get("peak_gib") or 0) * GIB,
        ran={"ok": True, "oom": False}.get(row["status"]),
        has_fused_loss=row.get("fused_loss") == "1",
    )
