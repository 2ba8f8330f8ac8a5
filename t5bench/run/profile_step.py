"""Runs an engine unchanged and profiles one of its iterations on every rank (a launcher's PROFILE_ITERATION).

    python -m t5bench.run.profile_step --iteration N --output FILE SCRIPT ARGUMENTS...

The profile goes from the end of iteration N - 1's step to the end of N's, so it holds that iteration's log line, its
data, its forward and backward passes and its update. The first rank writes for all of them, whichever node they are on:
FILE, of which t5bench/run/timeline.py says what it has beside the kinds of kernels, and trace.json beside it.
"""

import argparse
import functools
import importlib
import itertools
import json
import runpy
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from t5bench.record import profile
from t5bench.record.files import write_json, write_whole
from t5bench.run import timeline

# Where an engine does one iteration, and what of it PyTorch does not name: module, class or "", function.
STEPS = {
    "native": [("native.trainers", "TorchTrainer", "step"), ("native.trainers", "ZeroTrainer", "step")],
    "megatron": [("megatron.training", "", "train_step")],
}
RANGES = {
    "native": {
        profile.LOGGING: ("native.metrics", "Metrics", "record"),
        profile.DATA: ("native.train", "Data", "next"),
    },
    "megatron": {profile.LOGGING: ("megatron.training", "", "training_log")},
}
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base",
               "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all_single", "barrier",
               "send", "recv", "batch_isend_irecv")  # fmt: skip


class ProfiledStretch:
    """What a device ("cuda" or "cpu") does from begin() to end()."""

    def __init__(self, device: str, *, with_host: bool = False) -> None:
        """with_host: the host's operators too on a GPU, which are ten times as many as the kernels and slow it down."""
        activity = torch.profiler.ProfilerActivity
        self.activities = [activity.CUDA] if device == "cuda" else [activity.CPU]
        self.activities += [activity.CPU] if device == "cuda" and with_host else []
        self.device, self.begun, self.wall_ms = device, 0.0, 0.0
        self.profiler = torch.profiler.profile(activities=self.activities)
        self.mark = torch.profiler.record_function(timeline.ITERATION)

    def synchronise(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        if self.device == "cuda":
            # Loading CUDA's tracer takes a while, which is not the iteration's.
            with torch.profiler.profile(activities=self.activities):
                torch.zeros(1, device="cuda")
                self.synchronise()
        self.profiler.start()
        self.synchronise()
        if dist.is_initialized():
            dist.barrier()
        self.begun = self.synchronise()
        self.mark.__enter__()

    def stop(self) -> dict[str, Any]:
        """The trace, as export_chrome_trace writes it."""
        self.wall_ms = 1000 * (self.synchronise() - self.begun)
        self.mark.__exit__(None, None, None)
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text(errors="replace"))

    def summary(self, trace: dict[str, Any], iteration: int) -> dict[str, Any]:
        """What profile.json says of the kinds of kernels on this device."""
        spans = (
            profile.device_spans(trace)
            if self.device == "cuda"
            else [
                # A parent's time holds its children's.
                profile.Span(event.name, event.time_range.start, event.self_cpu_time_total)
                for event in self.profiler.events()
                if event.self_cpu_time_total > 0
                and not event.name.startswith((timeline.ITERATION, timeline.COLLECTIVE))
            ]
        )
        return profile.summary(spans, wall_ms=self.wall_ms, iteration=iteration, device=self.device)

    def end(self, iteration: int) -> dict[str, Any]:
        return self.summary(self.stop(), iteration)


class Marks:
    """Names what PyTorch's profiler does not: collective operations with their groups, and an engine's own phases."""

    def __init__(self, words: list[str]) -> None:
        """words: the engine's command line, which tells the layout."""
        sizes = (f"--{axis}-model-parallel-size" for axis in ("tensor", "pipeline"))
        self.tp, self.pp = (int(words[words.index(flag) + 1]) if flag in words else 1 for flag in sizes)
        self.is_zero, self.active = "--deepspeed" in words, False
        self.numbers: Counter[str] = Counter()
        self.works: dict[int, tuple[str, Any]] = {}  # what an operation that goes on was called, by its handle
        self.replicas: list[DistributedDataParallel] = []

    def axis(self, ranks: list[int], operation: str) -> str:
        """What these ranks share: ranks are laid out tensor parallel fastest, then data, then pipeline parallel."""
        dp = dist.get_world_size() // (self.tp * self.pp)
        places = [(rank // self.tp % dp, rank % self.tp, rank // (self.tp * dp)) for rank in ranks]
        differ = [axis for axis, along in zip(profile.AXES, zip(*places, strict=True), strict=False)
                  if len(set(along)) > 1]  # fmt: skip
        if differ == [profile.AXES[0]] and self.is_zero and "gather" in operation:
            return profile.AXES[3]
        return differ[0] if len(differ) == 1 else profile.AXES[4]

    def label(self, operation: str, arguments: list[Any]) -> str:
        ranks, sizes = list(range(dist.get_world_size())), [0]
        for argument in arguments:
            many = argument if isinstance(argument, list | tuple) else [argument]
            sizes.append(sum(each.nbytes for each in many if isinstance(each, torch.Tensor)))
            if isinstance(argument, dist.ProcessGroup):
                ranks = dist.get_process_group_ranks(argument)
            elif many and isinstance(many[0], dist.P2POp):
                ranks = sorted({dist.get_rank(), *(each.peer for each in many)})
                sizes.append(sum(each.tensor.nbytes for each in many if "send" in each.op.__name__))
            elif isinstance(argument, int) and operation in ("send", "recv"):
                ranks = sorted({dist.get_rank(), argument})
        if operation not in ("send", "recv", "batch_isend_irecv"):
            sizes = [size * (1 + (operation == "all_reduce")) * (len(ranks) - 1) // len(ranks) for size in sizes]
        key = f"{self.axis(ranks, operation)}|{','.join(map(str, ranks))}"
        self.numbers[key] += 1
        axis, group = key.split("|")
        return f"{timeline.COLLECTIVE}{axis}|{operation}|{max(sizes)}|{group}|{self.numbers[key]}"

    def collective(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if not self.active:
                return function(*args, **options)
            label = self.label(name, [*args, *options.values()])
            with torch.profiler.record_function(label):
                result = function(*args, **options)
            for work in result if isinstance(result, list) else [result]:
                self.works[id(work)] = label, work
            return result

        return call

    def ranged(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with torch.profiler.record_function(name) if self.active else nullcontext():
                return function(*args, **options)

        return call

    def place(self, engine: str) -> None:
        for name in COLLECTIVES:
            setattr(dist, name, self.collective(name, getattr(dist, name)))
        for part, place in RANGES[engine].items():
            replace(place, functools.partial(self.ranged, part))
        wait, make = dist.Work.wait, DistributedDataParallel.__init__

        def wait_marked(work: Any, *args: Any, **options: Any) -> Any:
            label, _ = self.works.get(id(work), ("", None))
            with torch.profiler.record_function(label) if self.active and label else nullcontext():
                return wait(work, *args, **options)

        def make_noted(replica: DistributedDataParallel, *args: Any, **options: Any) -> None:
            self.replicas.append(replica)
            make(replica, *args, **options)

        dist.Work.wait, DistributedDataParallel.__init__ = wait_marked, make_noted

    def gradient_bytes(self) -> int:
        """What this rank sends of its gradients in PyTorch's DDP, by a ring."""
        found = 0
        for replica in self.replicas:
            size = sum(p.nbytes for p in replica.parameters() if p.requires_grad)
            ranks = dist.get_world_size(replica.process_group)
            found += 2 * size * (ranks - 1) // ranks
        return found


def replace(place: tuple[str, str, str], wrap: Callable[[Callable], Callable]) -> None:
    module = importlib.import_module(place[0])
    owner = getattr(module, place[1]) if place[1] else module
    setattr(owner, place[2], wrap(getattr(owner, place[2])))


def processor() -> dict[str, float]:
    """Seconds that this process computed, waited for a core that others had, and was held back by a quota (cgroup)."""
    found = {"computed": time.process_time(), "queued": 0.0, "throttled": 0.0}
    with suppress(OSError):
        found["queued"] = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = "cpu" if "cpu" in controllers.split(",") else ""
            with suppress(OSError):
                text = Path("/sys/fs/cgroup", folder, path.lstrip("/"), "cpu.stat").read_text()
                words = dict(line.split() for line in text.splitlines())
                seconds = int(words.get("throttled_time", 0)) / 1e9 + int(words.get("throttled_usec", 0)) / 1e6
                found["throttled"] = max(found["throttled"], seconds)
    return found


class OneIteration:
    """Counts an engine's iterations and profiles one of them."""

    def __init__(self, iteration: int, output: Path, words: list[str]) -> None:
        self.iteration, self.output, self.marks = iteration, output, Marks(words)
        self.ends: list[float] = []
        self.stretch: ProfiledStretch | None = None

    def watch(self, engine: str) -> None:
        self.marks.place(engine)
        for place in STEPS[engine]:
            replace(place, self.counted)

    def counted(self, step: Callable) -> Callable:
        @functools.wraps(step)
        def call(*args: Any, **options: Any) -> Any:
            result = step(*args, **options)
            self.after_step()
            return result

        return call

    def after_step(self) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.iteration - 1:
            self.stretch = ProfiledStretch("cuda" if torch.cuda.is_initialized() else "cpu", with_host=True)
            self.stretch.begin()
            self.before, self.marks.active = processor(), True
        elif len(self.ends) == self.iteration and self.stretch:
            used = {f"{name}_ms": round(1000 * (s - self.before[name]), 3) for name, s in processor().items()}
            trace, self.marks.active = self.stretch.stop(), False
            self.tell(trace, used)
            self.stretch = None

    def tell(self, trace: dict[str, Any], used: dict[str, float]) -> None:
        """Brings all ranks' parts and traces to the first, which writes them."""
        assert self.stretch
        mine = timeline.RankTrace.read(trace, dist.get_rank(), socket.gethostname(), self.marks.gradient_bytes())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine.introduction())
        last = mine.meet(everyone)
        entry = timeline.explained(mine, last) | {"processor": used}
        told = everyone if mine.rank == 0 else None
        dist.gather_object((entry, timeline.longest_events(mine, len(everyone))), told)
        if told:
            content = self.stretch.summary(trace, self.iteration) | self.overhead()
            content["ranks"] = [entry for entry, _ in told]
            write_json(self.output, content)
            events = [event for _, events in told for event in events]
            write_whole(self.output.with_name("trace.json"), json.dumps({"traceEvents": events}))

    def overhead(self) -> dict[str, float | None]:
        """How much longer the profiled iteration took than the median of those before; the first is none of them."""
        others = [1000 * (after - before) for before, after in itertools.pairwise(self.ends[:-1])]
        if not others:
            return {"other_iterations_ms": None, "overhead": None}
        median = statistics.median(others)
        return {"other_iterations_ms": round(median, 3), "overhead": round(self.stretch.wall_ms / median - 1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT")
    arguments = parser.parse_args()
    sys.argv = arguments.script
    engine = "native" if Path(sys.argv[0]).parent.name == "native" else "megatron"
    OneIteration(arguments.iteration, arguments.output, sys.argv).watch(engine)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
