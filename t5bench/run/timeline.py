"""One iteration of all ranks on one time axis, and the parts that it is made of.

A moment of a rank belongs to one part, so the parts add up to the iteration. On a GPU the kernels decide: one that
computes, else one that communicates, else a copy; and where no kernel runs, or without a GPU, what the rank's main
thread does. A rank that has come to a collective operation before the last of its group waits until that has come:
only what follows is communication. Between pipeline stages that waiting is the bubble.

Times are microseconds since the barrier before the iteration; ranks of one host share its clock, and the first rank of
each host that leaves the barrier tells how far the hosts' clocks are apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t5bench.record import profile
from t5bench.record.profile import (
    AXES,
    BACKWARD,
    BUBBLE,
    DATA,
    FORWARD,
    HOST,
    LOGGING,
    PARTS,
    RECOMPUTATION,
    SENDING,
    STEP,
    TRANSFER,
    WAITING,
)  # fmt: skip

_CODE = {part: code for code, part in enumerate(PARTS)}
# Marks of profile_step.py: the iteration, and a collective operation "t5|axis|operation|bytes sent|ranks|number".
ITERATION, COLLECTIVE = "t5 iteration", "t5|"
MOST_CELLS, MOST_EVENTS = 4_000_000, 40_000
_BACKWARD_NODE = "autograd::engine::evaluate_function"
# A smaller message tells the latency of a link, not its bandwidth.
LARGE_BYTES = 1 << 16
Key = tuple[str, int]  # a collective operation: its group, and the how manieth of that group
Last = Mapping[Key, tuple[float, int]]  # when the last rank came to it, on this rank's clock, and which rank


@dataclass(frozen=True)
class Event:
    """Something in a rank's trace; kind as PyTorch's profiler calls it: cpu_op, user_annotation, kernel, ..."""

    name: str
    kind: str
    thread: Any
    start: float
    end: float
    correlation: Any = None


@dataclass(frozen=True)
class Collective:
    """A stretch of one collective operation on one rank; key tells the operation on all of its group's ranks."""

    key: Key
    axis: str
    operation: str
    sent: int
    event: Event


@dataclass
class RankTrace:
    """What a rank's profiler saw of the iteration. gradient_bytes: what PyTorch's DDP sends of its gradients."""

    rank: int
    host: str
    events: list[Event]
    main: Any = None
    begin: float = 0.0
    end: float = 0.0
    gradient_bytes: int = 0
    collectives: list[Collective] = field(default_factory=list)

    @classmethod
    def read(cls, trace: Mapping[str, Any], rank: int, host: str, gradient_bytes: int) -> "RankTrace":
        """From what torch.profiler's export_chrome_trace wrote."""
        base = trace.get("baseTimeNanoseconds", 0) / 1000
        events = [
            Event(e["name"], e.get("cat", ""), e["tid"], base + e["ts"], base + e["ts"] + e["dur"],
                  e.get("args", {}).get("correlation"))
            for e in trace["traceEvents"] if e.get("ph") == "X"
        ]  # fmt: skip
        whole = next(event for event in events if event.name == ITERATION)
        inside = [e for e in events if e.start >= whole.start and e.end <= whole.end and e is not whole]
        found = cls(rank, host, inside, whole.thread, whole.start, whole.end, gradient_bytes)
        found.collectives = list(found._collectives())
        return found

    def _collectives(self) -> Iterable[Collective]:
        """Those with a mark, and what PyTorch's DDP sends without: it all-reduces the gradients."""
        marked = sorted((e for e in self.events if e.name.startswith(COLLECTIVE)), key=lambda e: e.start)
        for event in marked:
            _, axis, operation, size, ranks, number = event.name.split("|")
            yield Collective((f"{axis} {ranks}", int(number)), axis, operation, int(size), event)
        for names in (("c10d::allreduce_",), ("gloo:all_reduce", "nccl:all_reduce")):
            own = [e for e in self.events if e.name in names and not any(m.start <= e.start <= m.end for m in marked)]
            for number, event in enumerate(sorted(own, key=lambda e: e.start)):
                size = self.gradient_bytes // max(1, len(own))
                yield Collective(("DDP", number), AXES[0], "all_reduce", size, event)

    def introduction(self) -> tuple[str, int, float, dict[Key, float]]:
        """What the other ranks need to know: host, rank, begin, and when this rank came to each collective."""
        came: dict[Key, float] = {}
        for each in self.collectives:
            came[each.key] = min(each.event.start, came.get(each.key, each.event.start))
        return self.host, self.rank, self.begin, came

    def meet(self, everyone: Iterable[tuple[str, int, float, dict[Key, float]]]) -> "Last":
        """Begins with the other ranks of its host, and tells when the last rank came to each collective operation."""
        everyone, last = list(everyone), {}
        begins: dict[str, float] = {}
        for host, _, begin, _ in everyone:
            begins[host] = min(begin, begins.get(host, begin))
        self.begin = begins[self.host]
        for host, rank, _, came in everyone:
            for key, moment in came.items():
                here = moment - begins[host] + self.begin
                last[key] = max(last.get(key, (here, rank)), (here, rank))
        return last


class Painting:
    """A rank's iteration in cells of time, each of which has the code of a part; what comes later paints over."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        self.cell = max(1.0, (trace.end - trace.begin) / MOST_CELLS)
        self.cells = np.zeros(round((trace.end - trace.begin) / self.cell), np.int8)
        self.late: dict[int, float] = {}  # how long this rank waited for each other, in microseconds

    def span(self, start: float, end: float) -> slice:
        return slice(round((start - self.trace.begin) / self.cell), round((end - self.trace.begin) / self.cell))

    def phases(self, thread: Any) -> np.ndarray:
        """What a thread does, but for communication."""
        cells = np.zeros_like(self.cells)
        events = sorted((e for e in self.trace.events if e.thread == thread), key=lambda e: (e.start, -e.end))
        nodes = (e.end for e in self.trace.events if e.name.startswith(_BACKWARD_NODE))
        backward_ends = max(nodes, default=self.trace.end)
        for event in events:
            if event.kind == "cpu_op":
                phase = FORWARD if event.start < backward_ends else STEP
                cells[self.span(event.start, event.end)] = _CODE[phase]
        for prefix, part in ((_BACKWARD_NODE, BACKWARD), ("Optimizer.", STEP), ("enumerate(DataLoader", DATA),
                             (DATA, DATA), (LOGGING, LOGGING)):  # fmt: skip
            for event in events:
                if event.name.startswith(prefix):
                    again = part == BACKWARD and "CheckpointFunction" in event.name
                    cells[self.span(event.start, event.end)] = _CODE[RECOMPUTATION if again else part]
        return cells

    def communicate(self, cells: np.ndarray, found: Collective, last: tuple[float, int], *, over: bool) -> None:
        """Paints a collective, over all or into host gaps alone. last: when the last of its ranks came, and which."""
        arrival = min(max(last[0], found.event.start), found.event.end)
        waiting = _CODE[BUBBLE if found.axis == AXES[2] else WAITING]
        for start, end, code in (
            (found.event.start, arrival, waiting), (arrival, found.event.end, _CODE[SENDING[found.axis]]),
        ):  # fmt: skip
            stretch = cells[self.span(start, end)]
            free = (stretch != _CODE[LOGGING]) | (code == waiting) if over else stretch == _CODE[HOST]
            stretch[free] = code
            if code == _CODE[WAITING]:
                self.late[last[1]] = self.late.get(last[1], 0.0) + float(free.sum()) * self.cell

    def paint(self, last: Last) -> None:
        trace, self.cells = self.trace, self.phases(self.trace.main)
        for each in trace.collectives:
            self.communicate(self.cells, each, last[each.key], over=each.event.thread == trace.main)
        kernels = [e for e in trace.events if e.kind in ("kernel", "gpu_memcpy", "gpu_memset")]
        if kernels:
            device = self.device_cells(kernels, last)
            # With NCCL the host only launches what communicates.
            sends = not any("nccl" in event.name for event in kernels)
            explained = [STEP, DATA, LOGGING] + sends * [WAITING, BUBBLE, *SENDING.values()]
            codes = [_CODE[part] for part in explained]
            self.cells = np.where(device >= 0, device, np.where(np.isin(self.cells, codes), self.cells, 0))

    def device_cells(self, kernels: Sequence[Event], last: Last) -> np.ndarray:
        """What the device does, -1 for nothing: a kernel belongs to the phase in which the host launched it."""
        trace, cells = self.trace, np.full_like(self.cells, -1)
        launches = {e.correlation: e for e in trace.events if e.kind in ("cuda_runtime", "cuda_driver")}
        phases = {thread: self.phases(thread) for thread in {launch.thread for launch in launches.values()}}
        for event in kernels:
            if event.kind != "kernel":
                cells[self.span(event.start, event.end)] = _CODE[TRANSFER]
        unmarked = iter(sorted({key for key in last if key[0] == "DDP"}))
        computing = []
        for event in sorted(kernels, key=lambda e: e.start):
            launch = launches.get(event.correlation, event)
            if "nccl" in event.name:
                enclosing = (c for c in trace.collectives if c.event.start <= launch.start <= c.event.end)
                found = next(enclosing, None) or Collective(next(unmarked, ("DDP", -1)), AXES[0], "", 0, event)
                found = Collective(found.key, found.axis, found.operation, found.sent, event)
                stretch = cells[self.span(event.start, event.end)]
                stretch[stretch < 0] = _CODE[HOST]
                self.communicate(cells, found, last.get(found.key, (event.start, trace.rank)), over=True)
            elif event.kind == "kernel":
                computing.append((event, launch))
        for event, launch in computing:
            begun = min(self.span(launch.start, launch.start).start, len(cells) - 1)
            phase = phases[launch.thread][begun] if launch.thread in phases else _CODE[FORWARD]
            cells[self.span(event.start, event.end)] = phase or _CODE[FORWARD]
        return cells

    def parts(self) -> dict[str, float]:
        """Milliseconds of each part."""
        counts = np.bincount(self.cells, minlength=len(PARTS)) * self.cell / 1000
        return {part: round(float(ms), 3) for part, ms in zip(PARTS, counts, strict=True) if ms}


def links(trace: RankTrace, last: Last) -> dict[str, dict[str, float]]:
    """Bytes that this rank sends in large messages along each axis, and the milliseconds in which one of them does."""
    sent: dict[str, int] = {}
    stretches: dict[str, list[profile.Span]] = {}
    for key in {each.key for each in trace.collectives}:
        pieces = [each for each in trace.collectives if each.key == key]
        arrival, end = last[key][0], max(each.event.end for each in pieces)
        if pieces[0].sent >= LARGE_BYTES and end > arrival:
            axis = pieces[0].axis
            sent[axis] = sent.get(axis, 0) + pieces[0].sent
            stretches.setdefault(axis, []).append(profile.Span(axis, arrival, end - arrival))
    return {axis: {"bytes": sent[axis], "ms": round(profile.union(stretches[axis]) / 1000, 3)} for axis in sent}


def longest_events(trace: RankTrace, ranks: int) -> list[dict[str, Any]]:
    """This rank's part of a timeline of all for Perfetto and chrome://tracing: its events that take longest."""
    title = {
        "ph": "M",
        "name": "process_name",
        "pid": trace.rank,
        "args": {"name": f"rank {trace.rank} ({trace.host})"},
    }
    threads = {thread: number for number, thread in enumerate(dict.fromkeys(e.thread for e in trace.events))}
    longest = sorted(trace.events, key=lambda event: event.start - event.end)[: MOST_EVENTS // ranks]
    return [title] + [
        {"ph": "X", "name": e.name, "cat": e.kind, "pid": trace.rank, "tid": threads[e.thread],
         "ts": round(e.start - trace.begin, 1), "dur": round(e.end - e.start, 1)}
        for e in longest
    ]  # fmt: skip


def explained(trace: RankTrace, last: Last) -> dict[str, Any]:
    """What profile.json says of a rank: its parts, and for how long it waited for which other, in milliseconds."""
    painting = Painting(trace)
    painting.paint(last)
    return {
        "rank": trace.rank,
        "host": trace.host,
        "wall_ms": round((trace.end - trace.begin) / 1000, 3),
        "parts": painting.parts(),
        "waited_for": {str(rank): round(us / 1000, 3) for rank, us in sorted(painting.late.items()) if us},
        "links": links(trace, last),
        "operators": sum(event.kind in ("cpu_op", "kernel") for event in trace.events),
    }
