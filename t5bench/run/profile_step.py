"""Profiles one iteration of an engine on every rank (a launcher's PROFILE_ITERATION; worker.py starts it).

The profile lasts from the end of iteration N - 1's step to the end of N's, so it includes a log line, the data, the
forward and backward passes and the update. The first rank writes for all ranks of all nodes: FILE, with the kinds of
its own kernels and all ranks' parts (t5bench/run/timeline.py), and trace.json next to it.
"""

import functools
import importlib
import itertools
import json
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, record_function

from t5bench.record import profile
from t5bench.record.files import write_json, write_whole
from t5bench.run import timeline
from t5bench.run.spent import TIMED, MainThread, Parts, between, main_thread, processor

# An engine's function for an iteration, and those that PyTorch does not name: module, class or "", function.
STEPS = {
    "native": [("native.trainers", "TorchTrainer", "step")],
    "megatron": [("megatron.training", "", "train_step")],
}
LOADER = ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__")
PHASES = {
    "native": {
        profile.LOGGING: ("native.metrics", "Metrics", "record"),
        profile.SAVING: ("native.checkpoint", "", "save"),
        profile.DATA: LOADER,
    },
    "megatron": {
        profile.LOGGING: ("megatron.training", "", "training_log"),
        profile.SAVING: ("megatron.training", "", "save_checkpoint_and_time"),
        profile.DATA: LOADER,
    },
}
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base",
               "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all_single", "barrier",
               *timeline.PAIRWISE)  # fmt: skip
# Bytes of a large message and of one that is as good as empty, seconds for which each is sent, how often at least.
PROBES, PROBE_SECONDS, FEWEST_PROBES = (1 << 20, 4), 0.5, 2


class ProfiledStretch:
    """What the ranks and their devices ("cuda" or "cpu") do from begin() to end()."""

    def __init__(self, device: str) -> None:
        self.device, self.begun, self.wall_ms = device, 0.0, 0.0
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
        self.make = functools.partial(torch.profiler.profile, activities=activities)
        self.profiler, self.mark = self.make(), record_function(timeline.ITERATION)

    def synchronise(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        if self.device == "cuda":
            # Loading CUDA's tracer takes a while, which must not count for the iteration.
            with self.make():
                torch.zeros(1, device="cuda")
                self.synchronise()
        self.profiler.start()
        self.synchronise()
        self.before = processor()
        if dist.is_initialized():
            dist.barrier()
        self.begun = self.synchronise()
        self.mark.__enter__()

    def end(
        self, iteration: int, gradient_bytes: int = 0, spent: Sequence[Parts] = ()
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """On the first rank, the content of profile.json for all ranks, and the events of trace.json.

        spent: in this iteration and in those before.
        """
        self.wall_ms = 1000 * (self.synchronise() - self.begun)
        self.mark.__exit__(None, None, None)
        used = processor()
        used.subtract(self.before)
        self.profiler.stop()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self.profiler.export_chrome_trace(file.name)
            trace = json.loads(Path(file.name).read_text(errors="replace"))
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = timeline.RankTrace(trace, rank, socket.gethostname(), gradient_bytes)
        everyone: list[Any] = [mine.introduction()] * ranks
        if ranks > 1:
            dist.all_gather_object(everyone, mine.introduction())
        own_begin, last = mine.begin, mine.meet(everyone)
        beside = max([0.0, *(used.pop(name) for name in list(used) if name.isdigit())])
        found, lost = mine.explained(last), dict[str, Any](used)
        if spent:
            of_main, most = main_thread(spent[0], spent[1:])
            # Who sleeps may wait for another of its threads, which computes or sends for it and waits for a core.
            known = mine.unmarked + used["throttled_ms"] + beside
            of_main["asleep_ms"] = max(0.0, min(of_main["asleep_ms"] - known, most))
            # A host waits for its GPU.
            of_gpu = {key: of_main[key] for key in of_main.keys() & {"alone_ms", "saving_ms"}}
            lost |= of_main if self.device == "cpu" else of_gpu
        measured = {"measured_ms": self.wall_ms + (own_begin - mine.begin) / 1000, "processor": lost}
        told = found | measured, mine.longest_events(ranks)
        everyone = [told] * ranks
        if ranks > 1:
            dist.gather_object(told, everyone if rank == 0 else None)
        content = {"device": self.device, "iteration": iteration, "wall_ms": self.wall_ms}
        content["ranks"] = [entry for entry, _ in everyone]
        return content, [event for _, events in everyone for event in events]


def replace(place: tuple[str, str, str], wrap: Callable[[Callable], Callable]) -> None:
    module = importlib.import_module(place[0])
    owner = getattr(module, place[1]) if place[1] else module
    setattr(owner, place[2], wrap(getattr(owner, place[2])))


class Marks:
    """Names what PyTorch's profiler does not: collective operations with their groups, and an engine's own phases."""

    def __init__(self, words: list[str]) -> None:
        """words: the engine's command line, which tells the layout."""
        sizes = (f"--{axis}-model-parallel-size" for axis in ("tensor", "pipeline"))
        self.tp, self.pp = (int(words[words.index(flag) + 1]) if flag in words else 1 for flag in sizes)
        self.is_zero, self.active, self.gradient_bytes = "--deepspeed" in words, False, 0
        self.numbers: Counter[str] = Counter()
        self.main, self.is_timed = MainThread(), False  # communication is WAITING
        self.works: dict[int, tuple[str, Any]] = {}  # the name of each operation in progress, by its handle

    def place(self, engine: str) -> None:
        for operation in COLLECTIVES:
            label = functools.partial(self._label, operation)
            replace(("torch.distributed", "", operation), functools.partial(self._marked, label))
        for part, place in PHASES[engine].items():
            replace(place, functools.partial(self._phase, part))
        goes_on = functools.partial(self._marked, lambda arguments: self.works.get(id(arguments[0]), ("",))[0])
        replace(("torch.distributed", "Work", "wait"), goes_on)
        replace(("torch.nn.parallel", "DistributedDataParallel", "__init__"), self._sized)

    def _marked(self, name_of: Callable[[list[Any]], str], function: Callable) -> Callable:
        """Wraps the function in a range of the profile, whose name depends on the arguments."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            name = name_of([*args, *options.values()]) if self.active else ""
            with ExitStack() as inside:
                if (self.is_timed or self.main.within) and profile.WAITING not in self.main.within:
                    inside.enter_context(self.main.in_part(profile.WAITING))
                if name:
                    inside.enter_context(record_function(name))
                result = function(*args, **options)
            if name.startswith(timeline.COLLECTIVE):
                for work in result if isinstance(result, list) else [result]:
                    self.works[id(work)] = name, work
            return result

        return call

    def _phase(self, part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with self.main.in_part(part), record_function(part) if self.active else nullcontext():
                return function(*args, **options)

        return call

    def _sized(self, make: Callable) -> Callable:
        @functools.wraps(make)
        def call(replica: DistributedDataParallel, *args: Any, **options: Any) -> None:
            make(replica, *args, **options)
            ranks = dist.get_world_size(replica.process_group)
            self.gradient_bytes += 2 * (ranks - 1) * sum(p.nbytes for p in replica.parameters()) // ranks

        return call

    def _label(self, operation: str, arguments: list[Any]) -> str:
        """The mark of a collective operation, with the bytes that a rank sends in a ring."""
        ranks, sizes = range(dist.get_world_size()), [0]
        for argument in arguments:
            several = argument if isinstance(argument, list | tuple) else [argument]
            sizes.append(sum(each.nbytes for each in several if isinstance(each, torch.Tensor)))
            exchanged = [each for each in several if isinstance(each, dist.P2POp)]
            if isinstance(argument, dist.ProcessGroup):
                ranks = dist.get_process_group_ranks(argument)
            elif exchanged:
                ranks = sorted({dist.get_rank(), *(each.peer for each in exchanged)})
                sizes.append(sum(each.tensor.nbytes for each in exchanged if each.op is dist.isend))
            elif operation in timeline.PAIRWISE and isinstance(argument, int):
                ranks = sorted({dist.get_rank(), argument})
        size = max(sizes)
        if operation not in timeline.PAIRWISE:
            size = size * (2 if operation == "all_reduce" else 1) * (len(ranks) - 1) // len(ranks)
        group = f"{self._axis(ranks, operation)}|{','.join(map(str, ranks))}"
        self.numbers[group] += 1
        return timeline.COLLECTIVE + f"|{operation}|{size}|".join(group.split("|")) + f"|{self.numbers[group]}"

    def _axis(self, ranks: Sequence[int], operation: str) -> str:
        """The axis of a group of ranks, which are numbered tensor parallel first, then data, then pipeline parallel."""
        dp = dist.get_world_size() // (self.tp * self.pp)
        places = zip(*((rank // self.tp % dp, rank % self.tp, rank // (self.tp * dp)) for rank in ranks), strict=True)
        differ = [axis for axis, along in zip(profile.AXES, places, strict=False) if len(set(along)) > 1]
        if self.is_zero and "gather" in operation and differ == [profile.AXES[0]]:
            return profile.AXES[3]
        return differ[0] if len(differ) == 1 else profile.AXES[4]


def fastest(device: str, size: int) -> float:
    """Milliseconds of the fastest of several all-reduces of so many bytes, each as long as its slowest rank takes."""
    message, took, began, is_last = torch.zeros(size // 4, device=device), list[float](), time.perf_counter(), False
    while len(took) < FEWEST_PROBES or not is_last:
        before = time.perf_counter()
        message[0] = before - began > PROBE_SECONDS
        dist.all_reduce(message)
        is_last = bool(message[0])  # the same on all ranks, once the device is done
        took.append(1000 * (time.perf_counter() - before))
    slowest = torch.tensor(took, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.min())


def link(device: str) -> dict[str, float] | None:
    """What profile.json says of the slowest link; None of a single rank."""
    if (ranks := dist.get_world_size()) == 1:
        return None
    large, empty = (fastest(device, size) for size in PROBES)
    steps = 2 * (ranks - 1)  # of a ring
    return {"rate": 1000 * steps / ranks * PROBES[0] / max(large - empty, 1e-3), "latency_ms": empty / steps}


class OneIteration:
    """Counts an engine's iterations and profiles one of them."""

    def __init__(self, iteration: int, output: Path, words: list[str]) -> None:
        """words: the engine's command line, its program first."""
        self.iteration, self.output, self.marks, self.program = iteration, output, Marks(words), Path(words[0])
        self.ends: list[float] = []
        self.spent: list[Parts] = []  # until each of these ends

    def watch(self) -> None:
        engine = "native" if self.program.parent.name == "native" else "megatron"
        self.marks.place(engine)
        for place in STEPS[engine]:
            replace(place, self._counted)

    def _counted(self, step: Callable) -> Callable:
        @functools.wraps(step)
        def call(*args: Any, **options: Any) -> Any:
            result = step(*args, **options)
            self.ends.append(time.perf_counter())
            self.spent.append(self.marks.main.until_now())
            self.marks.is_timed = 0 <= self.iteration - len(self.ends) <= TIMED + 1
            if len(self.ends) == self.iteration - 1:
                self._begin()
            elif len(self.ends) == self.iteration:
                self._end()
            return result

        return call

    def _begin(self) -> None:
        self.stretch = ProfiledStretch("cuda" if torch.cuda.is_initialized() else "cpu")
        self.stretch.begin()
        self.marks.active, self.begun = True, self.marks.main.until_now()

    def _end(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()  # a rank that waits here waits for a slower one
        self.marks.active = self.marks.is_timed = False
        self.marks.works.clear()
        spent = [between(self.begun, self.marks.main.until_now())]
        spent += [between(*pair) for pair in itertools.pairwise(self.spent[:-1])]
        content, events = self.stretch.end(self.iteration, self.marks.gradient_bytes, spent)
        content["link"] = link(self.stretch.device)
        if dist.get_rank() == 0:
            write_json(self.output, content | self._overhead())
            write_whole(self.output.with_name("trace.json"), json.dumps({"traceEvents": events}))

    def _overhead(self) -> dict[str, float | None]:
        """The median of the earlier iterations without the first, and how much longer the profiled one took."""
        others = [1000 * (after - before) for before, after in itertools.pairwise(self.ends[:-1])]
        median = statistics.median(others) if others else None
        return {"other_iterations_ms": median, "overhead": median and self.stretch.wall_ms / median - 1}
