"""The parts of a profiled iteration, from made traces and from real runs, and the causes that they name."""

import json
import os
import re
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from made_runs import RTX_5000_ADA, START, change, make_run, seal, stamp
from real_runs import environment, train
from support import wait_for

from t5bench.plan.planner import plan
from t5bench.profile import cpu_accounting, step, timeline
from t5bench.profile import parts as profile
from t5bench.profile.cpu_accounting import CpuAccounting, MainThread, between, main_thread
from t5bench.profile.explain import Explanation
from t5bench.profile.parts import AXES, SENDING
from t5bench.profile.record_causes import of_record
from t5bench.profile.step import Marks, OneIteration
from t5bench.record.log import Evaluation
from t5bench.record.records import load

# ---- made traces, in milliseconds ------------------------------------------------------------------------------------


def span(name: str, start: float, end: float, kind: str = "cpu_op", thread: int = 1, **args: Any) -> dict:
    times = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}
    return {"ph": "X", "name": name, "cat": kind, "tid": thread, "args": args} | times


def collective(axis: int, number: int, start: float, end: float, ranks: str = "0,1", size: int = 1 << 20) -> dict:
    return span(f"t5|{AXES[axis]}|all_reduce|{size}|{ranks}|{number}", start, end, "user_annotation")


def explained(
    *ranks: list[dict], begins: tuple[float, ...] = (0, 0), hosts: str = "aa", gradients: int = 0
) -> list[dict]:
    """A profile.json for ranks whose iterations take 100 ms; a rank's clock is late by its host's begin."""
    traces = []
    for rank, events in enumerate(ranks):
        whole = [span(timeline.ITERATION, 0, 100, "user_annotation"), *events]
        made = {"baseTimeNanoseconds": int(1e6 * begins[rank]), "traceEvents": whole}
        traces.append(timeline.RankTrace(made, rank, hosts[rank], gradients))
    everyone = [trace.introduction() for trace in traces]
    return [trace.explained(trace.meet(everyone)) for trace in traces]


NODE = "autograd::engine::evaluate_function: "
COMPUTED = [
    span(profile.LOGGING, 0, 5, "user_annotation"),
    span("aten::item", 1, 2),
    span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 10, "user_annotation"),
    span("aten::linear", 10, 30),
    span("aten::mm", 12, 28),
    span(f"{NODE}CheckpointFunctionBackward", 40, 70),
    span("aten::linear", 42, 50),
    span(f"{NODE}AddmmBackward0", 55, 68),
    span("gradients of weights", 72, 76, "user_annotation"),  # a zero-bubble schedule's
    span("aten::mm", 73, 75),
    span("aten::_foreach_norm", 80, 82),
    span("Optimizer.step#AdamW.step", 90, 95, "user_annotation"),
]
PARTS = {
    "logging": 5, "data loading": 5, "forward": 20, "recomputation": 17, "backward": 17, "optimizer and clipping": 7,
    "host gaps": 29,
}  # fmt: skip


def test_the_parts_of_a_rank_are_its_iteration():
    (found,) = explained(COMPUTED)
    assert found["parts"] == pytest.approx(PARTS)
    assert sum(found["parts"].values()) == pytest.approx(found["wall_ms"]) == 100
    starts = [0.0, *(end for _, end in found["timeline"])]
    coarse = Counter()
    for (part, end), start in zip(found["timeline"], starts, strict=False):
        coarse[part] += end - start
    assert coarse == pytest.approx(PARTS) and starts[-1] == 100


@pytest.mark.parametrize(("hosts", "begins"), [("aa", (0, 0)), ("ab", (0, 7000))], ids=["one clock", "two clocks"])
def test_the_first_rank_waits_for_the_last(hosts: str, begins: tuple[float, float]):
    first, second = explained(
        [collective(0, 1, 10, 50), collective(2, 1, 60, 80)], [collective(0, 1, 40, 50), collective(2, 1, 60, 80)],
        hosts=hosts, begins=begins,
    )  # fmt: skip
    assert first["parts"] == pytest.approx(
        {profile.WAITING: 30, SENDING[AXES[0]]: 10, SENDING[AXES[2]]: 20, "host gaps": 40}, abs=0.01
    )
    assert (first["waited_for"], second["waited_for"]) == ({"1": 30.0}, {})
    assert second["links"][AXES[0]] == {"bytes": 1 << 20, "ms": 10.0, "steps": 2}
    first, _ = explained([collective(2, 1, 10, 50)], [collective(2, 1, 40, 50)])  # between stages it is the bubble
    assert first["parts"][profile.BUBBLE] == pytest.approx(30) and first["waited_for"] == {}


def launched(
    kernel: str, at: float, start: float, end: float, number: int, kind: str = "kernel", thread: int = 1
) -> list[dict]:
    """What a thread of the host launches, and when it runs on a stream of its device."""
    name = "cudaLaunchKernel" if kind == "kernel" else "cudaMemcpyAsync"
    return [
        span(name, at, at + 0.1, "cuda_runtime", thread, correlation=number),
        span(kernel, start, end, kind, thread=7 + ("nccl" in kernel), correlation=number),
    ]


def test_with_nccl_a_rank_waits_on_its_device_and_computing_hides_what_is_sent():
    """The host launches at once on both ranks; the second one's device comes to the collective later."""
    kernel = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    first, second = explained(*(
        [span("aten::linear", 0, 2), *launched("gemm", 1, 10, 30, 1), collective(0, 1, 3, 4),
         *launched(kernel, 3.1, at, 60, 2), {**collective(0, 1, at, 60), "cat": "gpu_user_annotation"},
         *launched("Memcpy DtoH (Device -> Pinned)", 3.5, 50, 70, 3, "gpu_memcpy"),
         *launched("Memset (Device)", 3.6, 70, 72, 4, "gpu_memset"),
         span(f"{NODE}MmBackward0", 5, 6, thread=2), *launched("gemm", 5.1, 75, 80, 5, thread=2),
         span(profile.DATA, 80, 90, "user_annotation")] for at in (20, 45)
    ))  # fmt: skip
    parts = {"forward": 22, profile.WAITING: 15, SENDING[AXES[0]]: 15, profile.TRANSFER: 10, "host gaps": 23}
    assert first["parts"] == pytest.approx(parts | {"backward": 5, "data loading": 10}, abs=0.1)
    assert (first["waited_for"], second["waited_for"]) == ({"1": 15.0}, {})
    assert second["parts"][SENDING[AXES[0]]] == pytest.approx(15, abs=0.1)
    assert first["links"][AXES[0]] == {"bytes": 1 << 20, "ms": 15.0, "steps": 2}


def test_ddp_sends_gradients_during_the_backward_pass():
    """In two messages at the same time. What is not covered by computing is exposed."""
    ranks = [
        [span("aten::mm", 0, 10), span(f"{NODE}MmBackward0", 10, 40), span("c10d::allreduce_", at, at + 1),
         span("gloo:all_reduce", at + 1, 60, "user_annotation", thread=2), span("c10d::allreduce_", at + 1, at + 2),
         span("gloo:all_reduce", at + 2, 60, "user_annotation", thread=3)] for at in (20, 30)
    ]  # fmt: skip
    first, second = explained(*ranks, gradients=1 << 20)
    for found in (first, second):
        assert found["parts"][SENDING[AXES[0]]] == pytest.approx(20 + 2 * (found is second), abs=0.1)
        assert found["links"][AXES[0]] == {"bytes": 1 << 20, "ms": 30.0, "steps": 4}


def test_what_the_main_thread_spends_by_part():
    """What lies inside of another part belongs to the inner one, and what another iteration does not show is chance."""
    main = MainThread()
    begun = main.until_now()
    with main.in_part(profile.DATA):
        time.sleep(0.02)
        with main.in_part(profile.WAITING):
            time.sleep(0.1)
        time.sleep(0.03)
    time.sleep(0.07)
    now = between(begun, main.until_now())
    told = main_thread(now, [])
    assert told["alone_ms"] == {profile.DATA: pytest.approx(50, abs=15), profile.LOGGING: 0}
    assert told["asleep_ms"] == pytest.approx(70, abs=15) and told["working_ms"] < 50
    assert main_thread(now, [], known=60.0)["asleep_ms"] == pytest.approx(10, abs=10)
    told = main_thread(now, [{"": CpuAccounting(asleep=20.0)}] * 3)
    assert told["alone_ms"][profile.DATA] == told["working_ms"] == 0 and told["asleep_ms"] == 20


def test_a_collective_has_the_axis_of_its_ranks_and_what_a_ring_sends(monkeypatch: pytest.MonkeyPatch):
    """Of eight ranks, numbered tensor parallel first, then data, then pipeline parallel."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--deepspeed"]
    marks = Marks(["pretrain_t5.py", *sizes])
    of_ranks = {(0, 2): AXES[0], (4, 5): AXES[1], (3, 7): AXES[2], (0, 1, 2, 3): AXES[4]}
    assert {ranks: marks._axis(ranks, "all_reduce") for ranks in of_ranks} == of_ranks
    assert marks._axis((5, 7), "all_gather_into_tensor") == AXES[3]
    arguments = [torch.zeros(100), [torch.zeros(50)]]
    named = [marks._label(name, arguments) for name in ("all_reduce", "all_reduce", "all_gather")]
    assert [name.split("|")[3:] for name in named] == [[size, "0,1,2,3,4,5,6,7", n] for size, n in
                                                       (("700", "1"), ("700", "2"), ("350", "3"))]  # fmt: skip


def test_a_loader_that_waits_for_a_core_is_late_for_want_of_one(monkeypatch: pytest.MonkeyPatch):
    """As far as it computed and waited for a core, the main thread waited for that core too: 80 of 100 ms."""
    seen = iter(({1: (100.0, 0.0), 2: (0.0, 0.0)}, {1: (150.0, 30.0), 2: (190.0, 1.0)}))
    monkeypatch.setattr(cpu_accounting, "loaders", lambda: next(seen))
    main = MainThread()
    with main.in_part(profile.DATA):
        time.sleep(0.1)
    assert main.until_now()[profile.DATA].asleep == pytest.approx(20, abs=15)


# ---- causes, from made profiles --------------------------------------------------------------------------------------

# What a busy machine does to any run.
BUSY = ANOTHER, FEWER, THREADS, _ = (
    "another program on the core", "fewer cores than processes", "fewer cores than threads", "throttled CPU",
)  # fmt: skip
HEALTHY = {"forward": 30.0, "backward": 60.0, "host gaps": 5.0, SENDING[AXES[0]]: 5.0}


def made_profile(
    directory: Path, strategy: str, changes: list[dict], *, other: float = 100.0, link: dict | None = None, **run: Any
) -> Explanation:
    """Of a few ranks of 100 ms, two a node; changes: to a healthy rank's entry. other: ms of the other iterations."""
    options = {"log_interval": 1, "nodes": max(1, len(changes) // 2), "world_size": len(changes)}
    made = load(make_run(directory, strategy, **options | run))
    fixed = {"host": "node0", "wall_ms": 100.0, "waited_for": {}, "links": {}, "operators": 1000, "parts": HEALTHY}
    ranks = [fixed | {"rank": rank} | processor() | change for rank, change in enumerate(changes)]
    content = {"overhead": 0.1, "other_iterations_ms": other, "ranks": ranks, "link": link}
    (directory / "profile.json").write_text(json.dumps(content))
    found = Explanation(made)
    found.cores = {"node0": 2}
    return found


def busy_with(part: str, percent: float) -> dict:
    return {"parts": {name: size * (1 - percent / 100) for name, size in HEALTHY.items()} | {part: percent}}


def waiting(percent: float, *ranks: int) -> dict:
    """For each of these ranks so long."""
    return busy_with(profile.WAITING, percent * len(ranks)) | {"waited_for": {str(rank): percent for rank in ranks}}


def processor(**milliseconds: Any) -> dict:
    return {"processor": {"queued_ms": 0.0, "throttled_ms": 0.0} | milliseconds}


def alone(part: str, ms: float, **others: float) -> dict:
    return processor(alone_ms={part: ms}, **others)


def sending(**link: Any) -> dict:
    return {"parts": {"forward": 50.0, SENDING[AXES[0]]: 50.0}, "links": {AXES[0]: {"bytes": 0, "ms": 50.0} | link}}


def spending(**parts: float) -> dict:
    """Percent by part."""
    return {"parts": {part.replace("_", " "): percent for part, percent in parts.items()}}


# A link's best.
FAST, SLOW, LATE = ({"rate": rate, "latency_ms": late} for rate, late in ((1e9, 0.1), (2e7, 0.1), (1e9, 3.0)))
# What is left of 100 ms if nobody waits for a core, and a fifth of it.
QUEUED = {"queued_ms": 70.0}
WORKS = {"queued_ms": 70.0, "working_ms": 20.0}
WORKING = processor(**WORKS)
SLEEPY = processor(asleep_ms=6.0, **WORKS)
BUSY_STAGE = spending(forward=40.0, backward=60.0)
IDLE_STAGE = spending(forward=30.0, pipeline_bubble=70.0)
UNEQUAL_LAYERS = {"ENCODER_NUM_LAYERS": "1", "DECODER_NUM_LAYERS": "8"}


def computing(machine: float, queued: float, ranks: int, **others: Any) -> list[dict]:
    """Ranks that compute for 200 ms together, on two cores that compute for so long for all programs."""
    return [processor(computed_ms=200.0 / ranks, machine_ms=machine, queued_ms=queued, **others)] * ranks


def test_the_parts_of_an_iteration_cannot_take_longer_than_it():
    rank = {"rank": 0, "host": "h", "wall_ms": 9.0, "waited_for": {}, "links": {}, "operators": 1, "processor": {}}
    for forward in (0.0, 19.0):
        with pytest.raises(msgspec.ValidationError, match=f"the parts of rank 0 take {forward:g} ms of 9 ms"):
            msgspec.convert({"ranks": [rank | {"parts": {"forward": forward}}]}, profile.Profile)


# What is told, the strategy, its ranks, the options of made_profile, the causes that are named.
MADE: dict[str, tuple[str, list[dict], dict, list[str]]] = {
    "nothing": ("ddp", [{}, {}], {}, []),
    "a bubble": (
        "pipeline", [spending(forward=20, backward=20, pipeline_bubble=60), {}], {}, ["unequal pipeline stages"],
    ),
    "gaps": ("ddp", [spending(forward=3, backward=6, host_gaps=91)] * 2, {}, ["tiny micro-batches"]),
    "the larger of two first": (
        "ddp", [spending(forward=18, backward=16, data_loading=40, waiting_for_slower_ranks=20)
                | {"waited_for": {"1": 20.0}}, {}], {}, ["data loading", "slow rank"],
    ),
    "what only the profiled iteration has may be chance": ("ddp", [waiting(20, 1), {}], {"other": 82.0}, []),
    "what the others have too": ("ddp", [waiting(20, 1), {}], {"other": 95.0}, ["slow rank"]),
    "a stage slower than its layers explain": ("pipeline", [BUSY_STAGE, IDLE_STAGE], {}, ["slow rank"]),
    "the decoder's has more to compute": ("pipeline", [IDLE_STAGE, BUSY_STAGE], {}, ["unequal pipeline stages"]),
    # Python takes longer than the encoder's one layer, but less long than the decoder's eight.
    "a stage for which no other waits": (
        "pipeline", [spending(forward=5, backward=10, host_gaps=30, pipeline_bubble=55),
                     spending(forward=40, backward=50, host_gaps=10)],
        {"settings": UNEQUAL_LAYERS}, ["unequal pipeline stages"],
    ),
    "a log line that serves ten iterations": (
        "ddp", [waiting(30, 1), busy_with("logging", 30) | alone("logging", 3.0)], {"log_interval": 10}, [],
    ),
    # Who has the core that a rank waits for.
    "a program beside": ("zero2", [waiting(30, 1), processor(queued_ms=40.0)], {}, [ANOTHER]),
    "no other program": ("ddp", computing(210, 15, ranks=2), {}, []),
    "two ranks with many threads": ("ddp", computing(210, 40, ranks=2), {}, [THREADS]),
    "four ranks on two cores": ("ddp", computing(210, 55, ranks=4), {}, [FEWER]),
    "a program on one of their cores": (
        "ddp", [processor(computed_ms=100.0, machine_ms=130.0, queued_ms=30.0, cores=[core]) for core in (0, 1)], {},
        [ANOTHER],
    ),
    # Waiting for a core is not mistaken for another cause, nor is what a rank does once.
    "data late once": (
        "ddp", [busy_with("data loading", 30) | alone("data loading", 5.0), waiting(30, 0)], {"link": FAST}, [],
    ),
    "a link that is not slow": ("ddp", [sending(bytes=10**6)] * 2, {"link": FAST}, []),
    "little sleep": ("ddp", [WORKING, processor(asleep_ms=4.0, **WORKS)], {"link": FAST}, [ANOTHER]),
    "a rank of CPUs": (
        "ddp", [waiting(30, 1) | processor(working_ms=50.0), processor(working_ms=69.0, asleep_ms=4.0)],
        {"link": FAST}, [],
    ),
    # Nor does it hide one.
    "data": ("ddp", [busy_with("data loading", 8) | alone("data loading", 6, **QUEUED)], {}, [ANOTHER, "data loading"]),
    "a rank": ("ddp", [WORKING, SLEEPY], {"link": FAST}, [ANOTHER, "slow rank"]),
    "a rank that computes": (
        "tensor", [WORKING, processor(queued_ms=70.0, working_ms=35.0)], {"link": FAST}, [ANOTHER, "slow rank"],
    ),
    "a rank of a pipeline": ("pipeline", [SLEEPY, WORKING], {"link": FAST}, [ANOTHER, "slow rank"]),
    "a node": ("zero1", [WORKING, WORKING, SLEEPY, SLEEPY], {"link": FAST}, [ANOTHER, "slow node"]),
    "a link": ("ddp", [sending(bytes=1e5) | processor(**QUEUED)] * 2, {"link": SLOW}, [ANOTHER, "slow link"]),
    "its latency": ("tensor", [sending(steps=2) | processor(**QUEUED)] * 2, {"link": LATE}, [ANOTHER, "slow link"]),
}  # fmt: skip


# A slowdown of so many percent of the iteration is named from ten on.
for size in (8, 12, 70):
    SLOWED = {
        "data loading": [busy_with("data loading", size), waiting(size, 0)],
        "logging": [waiting(size, 1), busy_with("logging", size)],
        "slow rank": [waiting(size, 1), {}],
        "slow node": [waiting(size / 2, 2, 3), waiting(size, 3), {}, {}],
        "throttled CPU": [waiting(size, 1), processor(throttled_ms=size)],
    }
    MADE |= {f"{name} of {size} %": ("zero1", ranks, {}, [name] * (size > 10)) for name, ranks in SLOWED.items()}


@pytest.mark.parametrize("told", MADE)
def test_only_the_causes_that_show_are_named(tmp_path: Path, told: str):
    strategy, ranks, options, named = MADE[told]
    found = made_profile(tmp_path / "run", strategy, ranks, **options)
    assert [cause.name for cause in found.causes()] == named
    said = found.sentence()
    assert re.match(rf"{strategy} spends \d+% of each iteration \w+", said) and "10% more time" in said


def test_an_evaluation_is_neither_the_forward_pass_nor_the_profilers(tmp_path: Path):
    spans = (span(profile.EVALUATING, 0, 60, "user_annotation"), span("aten::mm", 5, 55), span("aten::mm", 70, 80))
    (entry,) = explained([*spans, span(f"{NODE}AddmmBackward0", 80, 90)])
    assert entry["parts"] == pytest.approx({"evaluation": 60, "forward": 10, "backward": 10, "host gaps": 20})
    said = made_profile(tmp_path, "ddp", [{"parts": entry["parts"]}] * 2).sentence()
    assert said.startswith("ddp spends 60% of this iteration evaluating, 20% ")
    assert ". With the profiler and an evaluation this iteration took 10% more time than " in said


@pytest.mark.parametrize(("clock", "named"), [(1900.0, []), (1500.0, ["slow node"])])
def test_a_node_with_slow_gpus_shows_without_a_profile(tmp_path: Path, clock: float, named: list[str]):
    made = make_run(tmp_path, "ddp", nodes=2, gpu=RTX_5000_ADA, sent_per_iteration=1e6, sample_seconds=0.5)
    samples = tmp_path / "node1.samples.jsonl"
    samples.write_text(samples.read_text().replace('"sm_mhz": 2000.0', f'"sm_mhz": {clock}'))
    seal(made)
    assert [cause.name for cause in of_record(load(made))] == named


@pytest.mark.parametrize(
    ("seconds", "asleep", "named"),
    [(0.05, 0, []), (1.5, 0, ["frequent checkpoints"]), (1.5, 1, ["slow disk"]), (30, 0, ["slow disk"])],
)
def test_what_saving_costs_shows_without_a_profile(tmp_path: Path, seconds: float, asleep: float, named: list[str]):
    """Every ten iterations of 0.1 s; the time of a line tells, for the native engine's own time stops meanwhile. A
    profile tells how much of it the disk takes."""
    lines = [100.0 + 1000 * seconds * (number % 10 == 1 and number > 10) for number in range(1, 41)]
    made = make_run(tmp_path, "ddp", elapsed_ms=lines, settings={"SAVE_INTERVAL": "10"})
    (tmp_path / "checkpoints" / "iter_0000030").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iter_0000030" / "model.pt").write_bytes(bytes(10**6))
    assert [cause.name for cause in of_record(load(made), asleep)] == named


def test_saving_costs_neither_what_an_evaluation_does_nor_a_pause(tmp_path: Path):
    """An evaluation of 3 s before each checkpoint, a pause of an hour before the run was resumed from one."""
    moments = []
    seconds = 0.0
    for number in range(1, 41):
        seconds += 0.1 + 3600 * (number == 11) + 3.0 * (number % 10 == 1 and number > 10)
        moments.append(START + seconds)
    evaluations = [Evaluation(number, "validation", 8.0, 2981.0) for number in (10, 20, 30)]
    settings = {"SAVE_INTERVAL": "10", "EVAL_INTERVAL": "10", "EVAL_ITERS": "9"}
    made = make_run(tmp_path, settings=settings, elapsed_ms=[100.0] * 40)
    metrics = tmp_path / "metrics.jsonl"
    log = tmp_path / "node0.log"
    logged = zip(map(json.loads, metrics.read_text().splitlines()), moments, strict=True)
    lines = [line | {"time": moment} for line, moment in logged]
    metrics.write_text("\n".join(map(json.dumps, [*lines[:10], {"resumed_from": 10}, *lines[10:]])) + "\n")
    said = " validation loss at iteration {} | lm loss value: 8.0E+00 | lm loss PPL: 2.981E+03 |"
    told = [f"{stamp(moments[found.iteration] - 0.15)}{said.format(found.iteration)}\n" for found in evaluations]
    log.write_text(log.read_text() + "".join(told))
    change(made, ended=stamp(START + 3700), evaluations=[asdict(found) for found in evaluations])
    assert of_record(load(made)) == []


# ---- planted in real runs --------------------------------------------------------------------------------------------

# Python imports this before anything else; PLANT=<what>:<ranks>.
HOOK = """
import os, time
what, _, ranks = os.environ.get("PLANT", "").partition(":")
def late(function, seconds):
    return lambda *a, **b: (time.sleep(seconds), function(*a, **b))[1]
def join_a_group():
    with open(os.environ["GROUP"] + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
if "RANK" in os.environ and (not ranks or os.environ["RANK"] in ranks.split(",")):
    after_steps = {"step": lambda: time.sleep(0.5), "group": join_a_group}
    if what in after_steps:
        from torch.optim.optimizer import register_optimizer_step_post_hook
        register_optimizer_step_post_hook(lambda *_: after_steps[what]())
    if what == "data":
        from torch.utils.data.dataloader import _BaseDataLoaderIter as Loader
        Loader.__next__ = late(Loader.__next__, 0.5)
    if what == "log":
        from torch.utils.tensorboard import SummaryWriter
        SummaryWriter.add_scalar = late(SummaryWriter.add_scalar, 0.05)
"""
ONE_MICRO_BATCH = {"MICRO_BATCH_SIZE": "8", "GLOBAL_BATCH_SIZE": "16"}
PLANTED: dict[str, tuple[str, dict[str, str]]] = {
    "": ("zero2", {"MICRO_BATCH_SIZE": "16", "GLOBAL_BATCH_SIZE": "32"}),
    "slow rank": ("ddp", ONE_MICRO_BATCH | {"PLANT": "step:1"}),
    "logging": ("tensor", ONE_MICRO_BATCH | {"PLANT": "log:1", "LOG_INTERVAL": "1"}),
    "tiny micro-batches": (
        "zero1",
        {"MICRO_BATCH_SIZE": "1", "GLOBAL_BATCH_SIZE": "32", "ENCODER_SEQ_LENGTH": "32"},
    ),
    "unequal pipeline stages": ("pipeline", {"ENCODER_NUM_LAYERS": "1", "DECODER_NUM_LAYERS": "8"}),
    "slow node": ("ddp", {"MICRO_BATCH_SIZE": "4", "GLOBAL_BATCH_SIZE": "16", "PLANT": "step:2,3", "NNODES": "2"}),
}


def trained(data: Path, directory: Path, strategy: str, **settings: str) -> Explanation:
    (directory / "sitecustomize.py").write_text(HOOK)
    nodes = [directory / "run"] * int(settings.pop("NNODES", "1"))
    fixed = {"ENGINE": "native", "MEGATRON_DATA_DIR": str(data), "PYTHONPATH": str(directory), "PRECISION_FLAG": ""}
    fixed |= {"TRAIN_ITERS": "5", "LOG_INTERVAL": "5", "PROFILE_ITERATION": "4", "OMP_NUM_THREADS": "1"}
    return Explanation(train(strategy, *nodes, **fixed | {"NPROC_PER_NODE": "2"} | settings))


def check(found: Explanation, name: str) -> None:
    """The parts of every rank are the iteration, all are in the timeline, and this cause comes first."""
    names = [cause.name for cause in found.causes() if cause.name == name or cause.name not in BUSY]
    assert names[:1] == [name][: bool(name)], (found.sentence(), found.causes())
    for rank in found.ranks:
        assert sum(rank.entry.parts.values()) == pytest.approx(rank.entry.measured_ms, rel=0.05)
    assert found.content.link.rate > 1e6
    events = json.loads((found.run.directory / "trace.json").read_text())["traceEvents"]
    layout = found.layout
    ranks = set(range(found.layout.world_size))
    assert {event["pid"] for event in events} == ranks and len(events) <= timeline.MOST_EVENTS + len(ranks)
    assert {event["args"]["name"][:6] for event in events if event["ph"] == "M"} == {f"rank {rank}" for rank in ranks}
    if found.plan.engine == "native" and layout.tp * layout.pp * layout.micro_batches == 1:
        # One iteration whole: DeepSpeed steps its optimizer at other times too. Per layer 4 matrix products forward in
        # the encoder and 7 in the decoder (query and key-value are two in cross-attention), and the head; backward has
        # two for each.
        counts = Counter(event["name"] for event in events)
        assert counts["aten::mm"] + counts["aten::addmm"] == 3 * (2 * 4 + 2 * 7 + 1) * len(ranks)


# The others' causes are named in made profiles every day.
PLANTED_DAILY = ("", "slow rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "planted"),
    [
        pytest.param(name, planted, marks=[pytest.mark.nightly] * (name not in PLANTED_DAILY))
        for name, planted in PLANTED.items()
    ],
    ids=PLANTED,
)
def test_what_is_planted_is_named_first(sample_data: Path, tmp_path: Path, name: str, planted: tuple[str, dict]):
    check(trained(sample_data, tmp_path, planted[0], **planted[1]), name)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_real_engine_is_explained(megatron_dir: Path, sample_data: Path, tmp_path: Path):
    real = {"ENGINE": "megatron", "MEGATRON_DIR": str(megatron_dir)}
    check(trained(sample_data, tmp_path, "zero2", **ONE_MICRO_BATCH, **real, PLANT="data:1"), "data loading")


@pytest.mark.slow
def test_a_quota_is_named_first(sample_data: Path, tmp_path: Path):
    """A quarter of a core for two ranks."""
    group = Path(f"/sys/fs/cgroup/cpu/t5-{os.getpid()}")
    if os.geteuid() != 0 or not group.parent.is_dir():
        pytest.skip("only root may plant this, and it needs the cpu controller of cgroup 1")
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text("25000")
    try:
        check(
            trained(sample_data, tmp_path, "ddp", **ONE_MICRO_BATCH, PLANT="group", GROUP=str(group)), "throttled CPU"
        )
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.parametrize(("resumed", "profiled"), [(None, 4), (1, 4), (2, 4), (3, None), (7, None)])
def test_a_resumed_run_profiles_the_iteration_of_that_number(tmp_path: Path, monkeypatch, resumed, profiled):
    """One that the first attempt profiled, and one that has no iteration before it, is not profiled again."""
    begun, stretch = [], SimpleNamespace(begin=lambda: begun.append(len(counted.ends)))
    monkeypatch.setattr(Marks, "surround_all", lambda *_: None)
    monkeypatch.setattr(step, "surround", lambda *_: None)
    monkeypatch.setattr(step, "ProfiledStretch", lambda _: stretch)
    monkeypatch.setattr(OneIteration, "_end", lambda self: begun.append(len(self.ends)))
    if resumed:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{resumed}")
    counted = OneIteration(4, tmp_path / "profile.json", ["native/pretrain_t5.py", "--load", str(tmp_path)])
    for _ in range(10):
        counted._counted(lambda: None, [])
    assert [(resumed or 0) + number for number in begun] == ([profiled - 1, profiled] if profiled else [])


def test_the_iteration_to_profile_is_in_the_workers_environment():
    settings = {"ENGINE": "native", "DEVICE": "cpu", "OUTPUT_DIR": "/run", "PROFILE_ITERATION": "9", "TRAIN_ITERS": "9"}
    assert plan(environment(**settings), "ddp").environment["T5_PROFILE"] == "9:/run/profile.json"
