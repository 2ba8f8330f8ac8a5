"""Profiles one iteration of an engine on every rank (a launcher's PROFILE_ITERATION; worker.py starts it).

The profile lasts from the end of iteration N - 1's step to the end of N's, so it includes a log line, the data, the
forward and backward passes and the update. The first rank writes for all ranks of all nodes: FILE, with the kinds of
its own kernels and all ranks' parts (t5bench/profile/timeline.py), and trace.json next to it.
"""

import functools
import importlib
import itertools
import json
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, record_function

from t5bench.checkpoint_form import TRACKER
from t5bench.costmodel.layout import coordinates
from t5bench.profile import parts as profile
from t5bench.profile import timeline
from t5bench.profile.cpu_accounting import MainThread, Parts, between, main_thread, processor
from t5bench.record.files import write_json, write_whole
from t5bench.record.plan import by_name

# Functions of an engine, where PyTorch does not name them: module, class or "", function.
STEP = {"native": ("native.data_parallel", "TorchTrainer", "step"), "megatron": ("megatron.training", "", "train_step")}
PHASES = {
    "native": {
        profile.LOGGING: ("native.metrics", "Metrics", "record"),
        profile.SAVING: ("native.checkpoint", "Saver", "save"),
        profile.EVALUATING: ("native.train", "", "evaluate"),
    },
    "megatron": {
        profile.LOGGING: ("megatron.training", "", "training_log"),
        profile.SAVING: ("megatron.training", "", "save_checkpoint_and_time"),
        profile.EVALUATING: ("megatron.training", "", "evaluate_and_print_results"),
    },
}
LOADER = ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__")
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base",
               "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all_single", "barrier",
               *timeline.PAIRWISE)  # fmt: skip
# Bytes of a large message and of one that is as good as empty, seconds for which each is sent, how often at least.
PROBES = (1 << 20, 4)
PROBE_SECONDS = 0.5
FEWEST_PROBES = 2


def gathered(value: Any) -> list[Any]:
    """Every rank's, in their order."""
    if not dist.is_initialized():
        return [value]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


class ProfiledStretch:
    """What the ranks and their devices ("cuda" or "cpu") do from begin() to end()."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.begun = 0.0
        self.wall_ms = 0.0
        activities = [ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.make = functools.partial(torch.profiler.profile, activities=activities)
        self.profiler = self.make()
        self.mark = record_function(timeline.ITERATION)

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
        """The content of profile.json for all ranks, and the events of trace.json.

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
        rank = dist.get_rank() if dist.is_initialized() else 0
        trace_of_rank = timeline.RankTrace(trace, rank, socket.gethostname(), gradient_bytes)
        own_begin = trace_of_rank.begin
        introductions = gathered(trace_of_rank.introduction())
        entry = trace_of_rank.explained(trace_of_rank.meet(introductions))
        entry["measured_ms"] = self.wall_ms + (own_begin - trace_of_rank.begin) / 1000
        # Those of other threads have numbers as names.
        queued_of_threads = [used.pop(name) for name in list(used) if name.isdigit()]
        entry["processor"] = dict[str, Any](used) | {"cores": sorted(os.sched_getaffinity(0))}
        if spent:
            # Who sleeps may wait for another of its threads, which computes or sends for it and waits for a core.
            known = trace_of_rank.unmarked + used["throttled_ms"] + max(queued_of_threads, default=0.0)
            summary = main_thread(spent[0], spent[1:], known)
            if self.device != "cpu":  # a host waits for its GPU
                summary = {key: summary[key] for key in summary.keys() & {"alone_ms", "saving_ms"}}
            entry["processor"] |= summary
        everyone = gathered((entry, trace_of_rank.longest_events(len(introductions))))
        content = {"device": self.device, "iteration": iteration, "wall_ms": self.wall_ms}
        content["ranks"] = [entry for entry, _ in everyone]
        return content, [event for _, events in everyone for event in events]


def surround(place: tuple[str, str, str], around: Callable[[Callable[[], Any], list[Any]], Any]) -> None:
    """Replaces a function by what `around` does: it gets the call, and the call's arguments."""
    module, class_name, name = importlib.import_module(place[0]), *place[1:]
    owner = getattr(module, class_name) if class_name else module
    function = getattr(owner, name)

    @functools.wraps(function)
    def surrounded(*args: Any, **options: Any) -> Any:
        return around(functools.partial(function, *args, **options), [*args, *options.values()])

    setattr(owner, name, surrounded)


class Marks:
    """Names what PyTorch's profiler does not: collective operations with their groups, and an engine's own phases."""

    def __init__(self, words: list[str]) -> None:
        """words: the engine's command line, which tells the layout."""
        given = by_name(words)
        self.tp = int(given.get("--tensor-model-parallel-size", 1))
        self.pp = int(given.get("--pipeline-model-parallel-size", 1))
        self.is_zero = "--deepspeed" in words
        self.active = False
        self.gradient_bytes = 0
        self.numbers: Counter[tuple[str, str]] = Counter()  # of the operations so far, by axis and ranks
        self.main = MainThread()  # communication is WAITING
        self.works: dict[int, tuple[str, Any]] = {}  # the name of each operation in progress, by its handle

    def surround_all(self, engine: str) -> None:
        for operation in COLLECTIVES:
            label = functools.partial(self._label, operation)
            surround(("torch.distributed", "", operation), functools.partial(self._marked, label))
        for part, function in {profile.DATA: LOADER, **PHASES[engine]}.items():
            surround(function, functools.partial(self._phase, part))
        goes_on = functools.partial(self._marked, lambda arguments: self.works.get(id(arguments[0]), ("",))[0])
        surround(("torch.distributed", "Work", "wait"), goes_on)
        surround(("torch.nn.parallel", "DistributedDataParallel", "__init__"), self._sized)

    def _marked(self, name_of: Callable[[list[Any]], str], call: Callable[[], Any], arguments: list[Any]) -> Any:
        """In a range of the profile, whose name depends on the arguments."""
        name = name_of(arguments) if self.active else ""
        with self.main.in_part(profile.WAITING), record_function(name) if name else nullcontext():
            result = call()
        if name.startswith(timeline.COLLECTIVE):
            for work in result if isinstance(result, list) else [result]:
                self.works[id(work)] = name, work
        return result

    def _phase(self, part: str, call: Callable[[], Any], _: list[Any]) -> Any:
        with self.main.in_part(part), record_function(part) if self.active else nullcontext():
            return call()

    def _sized(self, make: Callable[[], Any], arguments: list[Any]) -> None:
        make()
        replica: DistributedDataParallel = arguments[0]
        ranks = dist.get_world_size(replica.process_group)
        self.gradient_bytes += 2 * (ranks - 1) * sum(p.nbytes for p in replica.parameters()) // ranks

    def _label(self, operation: str, arguments: list[Any]) -> str:
        """The mark of a collective operation, with the bytes that a rank sends in a ring."""
        if operation in timeline.SENDS + timeline.RECEIVES:
            return self._message(operation, arguments)
        ranks: Sequence[int] = range(dist.get_world_size())
        sizes = [0]
        for argument in arguments:
            values = argument if isinstance(argument, list | tuple) else [argument]
            sizes.append(sum(value.nbytes for value in values if isinstance(value, torch.Tensor)))
            exchanged = [value for value in values if isinstance(value, dist.P2POp)]
            if isinstance(argument, dist.ProcessGroup):
                ranks = dist.get_process_group_ranks(argument)
            elif exchanged:
                ranks = sorted({dist.get_rank(), *(exchange.peer for exchange in exchanged)})
                sizes.append(sum(exchange.tensor.nbytes for exchange in exchanged if exchange.op is dist.isend))
        size = max(sizes)
        if operation == "all_reduce":  # a reduce-scatter and an all-gather
            size *= 2
        if operation not in timeline.PAIRWISE:
            size = size * (len(ranks) - 1) // len(ranks)
        return self._mark(operation, size, ranks, ",".join(map(str, ranks)))

    def _message(self, operation: str, arguments: list[Any]) -> str:
        """The mark of a message between two ranks: the messages of a process group from one to another have an order.

        The bytes count where they arrive, because how long they travel is seen there: who sends may wait much later.
        """
        peer = next(argument for argument in arguments if isinstance(argument, int))
        ranks = [dist.get_rank(), peer]
        size = 0
        if operation in timeline.RECEIVES:
            ranks.reverse()
            size = sum(argument.nbytes for argument in arguments if isinstance(argument, torch.Tensor))
        groups = [argument.group_name for argument in arguments if isinstance(argument, dist.ProcessGroup)]
        return self._mark(operation, size, ranks, " ".join([f"{ranks[0]} to {ranks[1]}", *groups]))

    def _mark(self, operation: str, size: int, ranks: Sequence[int], group: str) -> str:
        axis = self._axis(ranks, operation)
        self.numbers[axis, group] += 1
        return f"{timeline.COLLECTIVE}{axis}|{operation}|{size}|{group}|{self.numbers[axis, group]}"

    def _axis(self, ranks: Sequence[int], operation: str) -> str:
        """The axis of a group of ranks, which are numbered tensor parallel first, then data, then pipeline parallel."""
        data, tensor, pipeline, gathers, all_ranks = profile.AXES
        dp = dist.get_world_size() // (self.tp * self.pp)
        places = [coordinates(rank, self.tp, dp) for rank in ranks]
        positions = {
            data: {place.dp for place in places},
            tensor: {place.tp for place in places},
            pipeline: {place.pp for place in places},
        }
        along = [axis for axis, values in positions.items() if len(values) > 1]
        if self.is_zero and "gather" in operation and along == [data]:
            return gathers
        return along[0] if len(along) == 1 else all_ranks


def fastest(device: str, size: int) -> float:
    """Milliseconds of the fastest of several all-reduces of so many bytes, each as long as its slowest rank takes."""
    message = torch.zeros(size // 4, device=device)
    took: list[float] = []
    began = time.perf_counter()
    is_last = False
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
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    large_size, empty_size = PROBES
    large = fastest(device, large_size)
    empty = fastest(device, empty_size)
    steps = 2 * (ranks - 1)  # of a ring
    return {"rate": 1000 * steps / ranks * large_size / max(large - empty, 1e-3), "latency_ms": empty / steps}


class OneIteration:
    """Counts an engine's iterations and profiles one of them, unless a resumed run begins with it or after it."""

    def __init__(self, iteration: int, output: Path, words: list[str]) -> None:
        """words: the engine's command line, its program first."""
        given = by_name(words)
        tracker = Path(given.get("--load", os.devnull), TRACKER)
        self.begin = int(tracker.read_text()) if "--finetune" not in given and tracker.is_file() else 0
        self.output = output
        self.marks = Marks(words)
        self.number = iteration - self.begin  # of those since then
        self.ends: list[float] = []
        self.spent: list[Parts] = []  # until each of these ends
        engine = "native" if Path(words[0]).parent.name == "native" else "megatron"
        self.marks.surround_all(engine)
        surround(STEP[engine], self._counted)

    def _counted(self, step: Callable[[], Any], _: list[Any]) -> Any:
        result = step()
        self.ends.append(time.perf_counter())
        self.spent.append(self.marks.main.until_now())
        if len(self.ends) == self.number - 1:
            self.stretch = ProfiledStretch("cuda" if torch.cuda.is_initialized() else "cpu")
            self.stretch.begin()
            self.marks.active = True
            self.begun = self.marks.main.until_now()
        elif len(self.ends) == self.number > 1:
            self._end()
        return result

    def _end(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()  # a rank that waits here waits for a slower one
        self.marks.active = False
        self.marks.works.clear()
        spent = [between(self.begun, self.marks.main.until_now())]
        spent += [between(*pair) for pair in itertools.pairwise(self.spent[:-1])]
        content, events = self.stretch.end(self.begin + self.number, self.marks.gradient_bytes, spent)
        content["link"] = link(self.stretch.device)
        if dist.get_rank() == 0:
            # Of the earlier iterations without the first.
            others = [1000 * (after - before) for before, after in itertools.pairwise(self.ends[:-1])]
            usual = statistics.median(others) if others else None
            content |= {"other_iterations_ms": usual, "overhead": usual and self.stretch.wall_ms / usual - 1}
            write_json(self.output, content)
            write_whole(self.output.with_name("trace.json"), json.dumps({"traceEvents": events}))
