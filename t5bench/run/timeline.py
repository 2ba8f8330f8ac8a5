"""One iteration of all ranks on one time axis, and the parts that it is made of.

Each moment of a rank belongs to one part, so the parts add up to the iteration. On a GPU the running kernel decides:
one that computes, else one that communicates, else a copy. Where no kernel runs, or without a GPU, the rank's main
thread decides. A rank that reaches a collective operation early waits until the last rank of its group has reached it;
only what follows is communication. Between pipeline stages that waiting is the bubble.

Times are microseconds on the rank's own clock. The ranks of a host begin together, when the first of them leaves the
barrier before the iteration; the first ranks of all hosts leave it at the same moment.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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
    SAVING,
    SENDING,
    STEP,
    TRANSFER,
    WAITING,
)  # fmt: skip

_CODE, _IDLE = {part: code for code, part in enumerate(PARTS)}, -1
# What sending on the host's main thread covers.
_UNDER_SENDING = tuple(_CODE[part] for part in PARTS if part not in (LOGGING, SAVING))
# Marks of profile_step.py: the iteration, and a collective operation "t5|axis|operation|bytes sent|ranks|number".
ITERATION, COLLECTIVE = "t5 iteration", "t5|"
PAIRWISE = ("send", "recv", "batch_isend_irecv")
MOST_CELLS, MOST_EVENTS, MOST_STRETCHES = 4_000_000, 40_000, 400
_BACKWARD_NODE = "autograd::engine::evaluate_function"
# A smaller message tells the latency of a link, not its bandwidth.
LARGE_BYTES = 1 << 16

Key = tuple[str, int]  # a collective operation: its group, and its number among that group's
Last = Mapping[Key, tuple[float, int]]  # when the last rank reached it, and which rank that was


class Event(NamedTuple):
    """Something in a rank's trace; kind as PyTorch's profiler calls it: cpu_op, user_annotation, kernel, ..."""

    name: str
    kind: str
    thread: Any
    start: float
    end: float
    correlation: Any


class Collective(NamedTuple):
    """A stretch of a collective operation on one rank, which sends so many bytes, in so many steps round a ring."""

    key: Key
    axis: str
    sent: int
    steps: int
    event: Event


class RankTrace:
    """What a rank's profiler saw of the iteration."""

    def __init__(self, trace: Mapping[str, Any], rank: int, host: str, gradient_bytes: int) -> None:
        """trace: of torch.profiler's export_chrome_trace; gradient_bytes: what PyTorch's DDP sends in the iteration."""
        base = trace.get("baseTimeNanoseconds", 0) / 1000
        events = [
            Event(e["name"], e.get("cat", ""), e["tid"], base + e["ts"], base + e["ts"] + e["dur"],
                  e.get("args", {}).get("correlation"))
            for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") != "gpu_user_annotation"
        ]  # fmt: skip
        _, _, self.main, self.begin, self.end, _ = whole = next(e for e in events if e.name == ITERATION)
        self.rank, self.host, self.late = rank, host, dict[int, float]()
        self.events = [e for e in events if e.start >= self.begin and e.end <= self.end and e is not whole]
        self.launches = {e.correlation: e for e in self.events if e.kind in ("cuda_runtime", "cuda_driver")}
        self.marks: list[Collective] = []  # by their start
        self.unmarked = 0.0  # ms for which the main thread waits for collectives without a mark
        self.collectives = list(self._collectives(gradient_bytes))
        self.cell = max(1.0, (self.end - self.begin) / MOST_CELLS)

    def _collectives(self, gradient_bytes: int) -> Iterator[Collective]:
        """The collectives: those with a mark, and the all-reduces of PyTorch's DDP, which have none.

        With NCCL they are its kernels: a rank reaches a collective when its device does.
        """
        ordered = sorted(self.events, key=lambda event: event.start)
        for event in (event for event in ordered if event.name.startswith(COLLECTIVE)):
            _, axis, operation, size, ranks, number = event.name.split("|")
            steps = 1 if operation in PAIRWISE else ranks.count(",") * (1 + (operation == "all_reduce"))
            self.marks.append(Collective((f"{axis} {ranks}", int(number)), axis, int(size), steps, event))
        if kernels := [event for event in ordered if event.kind == "kernel" and "nccl" in event.name]:
            marked = [(self.mark_around(self.launch(kernel).start), kernel) for kernel in kernels]
            own = [kernel for mark, kernel in marked if not mark]
            yield from (mark._replace(event=kernel) for mark, kernel in marked if mark)
            for number, kernel in enumerate(own):
                yield Collective(("DDP", number), AXES[0], gradient_bytes // len(own), 2, kernel)
            return
        yield from self.marks
        for names in (("c10d::allreduce_",), ("gloo:all_reduce", "nccl:all_reduce")):
            own = [event for event in ordered if event.name in names and not self.mark_around(event.start)]
            for number, event in enumerate(own):
                yield Collective(("DDP", number), AXES[0], gradient_bytes // len(own), 2, event)

    def launch(self, kernel: Event) -> Event:
        """The event on the host that started it; itself if there is none."""
        return self.launches.get(kernel.correlation, kernel)

    def mark_around(self, moment: float) -> Collective | None:
        before = bisect.bisect(self.marks, moment, key=lambda mark: mark.event.start) - 1
        return self.marks[before] if before >= 0 and moment <= self.marks[before].event.end else None

    def introduction(self) -> tuple[str, int, float, dict[Key, float]]:
        """What the other ranks need to know: host, rank, begin, and when this rank reached each collective."""
        came: dict[Key, float] = {}
        for each in self.collectives:
            came[each.key] = min(each.event.start, came.get(each.key, each.event.start))
        return self.host, self.rank, self.begin, came

    def meet(self, everyone: Sequence[tuple[str, int, float, dict[Key, float]]]) -> Last:
        """Begins with the other ranks of its host; when the last rank reached each collective, on this rank's clock."""
        begins = {host: min(begin for other, _, begin, _ in everyone if other == host) for host, *_ in everyone}
        self.begin, last = begins[self.host], dict[Key, tuple[float, int]]()
        for host, rank, _, came in everyone:
            for key, moment in came.items():
                here = (moment - begins[host] + self.begin, rank)
                last[key] = max(last.get(key, here), here)
        return last

    def explained(self, last: Last) -> dict[str, Any]:
        """This rank's entry in profile.json: its parts, and how long it waited for which other rank, in ms."""
        cells = self.phases(self.main)
        of_device = [each for each in self.collectives if each.event.kind == "kernel"]
        for each in self.collectives if not of_device else ():
            is_main = each.event.thread == self.main
            self.communicate(cells, each, last, _UNDER_SENDING if is_main else (_CODE[HOST],))
        if kernels := [e for e in self.events if e.kind in ("kernel", "gpu_memcpy", "gpu_memset")]:
            device = self.device(kernels)
            for each in of_device:
                self.communicate(device, each, last, (_IDLE, _CODE[TRANSFER]))
            explained = [STEP, DATA, LOGGING, SAVING, WAITING, BUBBLE, *SENDING.values()]
            idle = np.where(np.isin(cells, [_CODE[part] for part in explained]), cells, _CODE[HOST])
            cells = np.where(device == _IDLE, idle, device)
        counts = np.bincount(cells, minlength=len(PARTS)) * self.cell / 1000
        return {
            "rank": self.rank,
            "host": self.host,
            "wall_ms": round((self.end - self.begin) / 1000, 3),
            "parts": {part: round(float(ms), 3) for part, ms in zip(PARTS, counts, strict=True) if ms},
            "timeline": self.stretches(cells),
            "waited_for": {str(rank): round(us / 1000, 3) for rank, us in sorted(self.late.items()) if us},
            "links": self.links(last),
            "operators": sum(event.kind in ("cpu_op", "kernel") for event in self.events),
        }

    def stretches(self, cells: np.ndarray) -> list[tuple[str, float]]:
        """The iteration in coarse steps: what takes most of each, and at how many ms the last step of it ends."""
        steps = np.array_split(cells, min(len(cells), MOST_STRETCHES))
        codes = [int(np.bincount(step).argmax()) for step in steps]
        ends = np.cumsum([len(step) for step in steps]) * self.cell / 1000
        following = zip(codes, ends, [*codes[1:], None], strict=True)
        return [(PARTS[code], round(float(end), 3)) for code, end, after in following if code != after]

    def span(self, start: float, end: float) -> slice:
        return slice(round((start - self.begin) / self.cell), round((end - self.begin) / self.cell))

    def phases(self, thread: Any) -> np.ndarray:
        """What a thread does in each cell of time, except communication; later paint covers earlier paint."""
        cells = np.full(round((self.end - self.begin) / self.cell), _CODE[HOST], np.int8)
        events = sorted((e for e in self.events if e.thread == thread), key=lambda e: (e.start, -e.end))
        nodes = (e.end for e in self.events if e.name.startswith(_BACKWARD_NODE))
        backward_ends = max(nodes, default=self.end)
        for event in events:
            if event.kind == "cpu_op":
                phase = FORWARD if event.start < backward_ends else STEP
                cells[self.span(event.start, event.end)] = _CODE[phase]
        for prefix, part in ((_BACKWARD_NODE, BACKWARD), ("Optimizer.", STEP), ("enumerate(DataLoader", DATA),
                             (DATA, DATA), (LOGGING, LOGGING), (SAVING, SAVING)):  # fmt: skip
            for event in events:
                if event.name.startswith(prefix):
                    again = part == BACKWARD and "CheckpointFunction" in event.name
                    cells[self.span(event.start, event.end)] = _CODE[RECOMPUTATION if again else part]
        return cells

    def communicate(self, cells: np.ndarray, found: Collective, last: Last, under: Sequence[int]) -> None:
        """Paints a collective over the parts that it covers. On the host's main thread, waiting covers all of them."""
        _, _, _, start, end, _ = found.event
        arrival, latest = last.get(found.key, (start, self.rank))
        arrival, waiting = min(max(arrival, start), end), BUBBLE if found.axis == AXES[2] else WAITING
        for stretch, part in ((self.span(start, arrival), waiting), (self.span(arrival, end), SENDING[found.axis])):
            free = np.isin(cells[stretch], under) | (part == waiting and under is _UNDER_SENDING)
            cells[stretch][free] = _CODE[part]
            self.unmarked += float(free.sum()) * self.cell / 1000 if under is not _UNDER_SENDING else 0.0
            if part == WAITING:
                self.late[latest] = self.late.get(latest, 0.0) + float(free.sum()) * self.cell

    def device(self, kernels: Iterable[Event]) -> np.ndarray:
        """What the device does, except communication: a kernel belongs to the phase in which the host launched it."""
        phases = {thread: self.phases(thread) for thread in {launch.thread for launch in self.launches.values()}}
        cells = np.full(round((self.end - self.begin) / self.cell), _IDLE, np.int8)
        # Copies from and to the host first: what computes paints over them.
        for event in sorted(kernels, key=lambda e: ("HtoD" not in e.name and "DtoH" not in e.name, e.start)):
            launch, stretch = self.launch(event), self.span(event.start, event.end)
            if "HtoD" in event.name or "DtoH" in event.name:
                cells[stretch] = _CODE[TRANSFER]
            elif "nccl" not in event.name:
                launched = self.span(launch.start, launch.start).start
                phase = phases[launch.thread][launched] if launch is not event else _CODE[HOST]
                cells[stretch] = phase or _CODE[FORWARD]
        return cells

    def links(self, last: Last) -> dict[str, dict[str, float]]:
        """Bytes that this rank sends in large messages along each axis, the time in which one of them travels, and the
        steps of all messages."""
        found: dict[str, dict[str, float]] = {}
        reached = 0.0  # time in which two of them travel counts once
        ends: dict[Key, float] = {}
        for each in self.collectives:
            ends[each.key] = max(each.event.end, ends.get(each.key, 0.0))
        for each in sorted(self.collectives, key=lambda each: last[each.key]):
            if (end := ends.pop(each.key, 0.0)) > last[each.key][0]:
                link = found.setdefault(each.axis, {"bytes": 0, "ms": 0.0, "steps": 0})
                link["steps"] += each.steps
                if each.sent < LARGE_BYTES:
                    continue
                link["bytes"] += each.sent
                travelled = max(0.0, end - max(last[each.key][0], reached)) / 1000
                link["ms"] = round(link["ms"] + travelled, 3)
                reached = max(reached, end)
        return found

    def longest_events(self, ranks: int) -> list[dict[str, Any]]:
        """Events for Perfetto and chrome://tracing: only this rank's longest ones, to limit their number in all."""
        name = {"name": f"rank {self.rank} ({self.host})"}
        longest = sorted(self.events, key=lambda event: event.start - event.end)[: MOST_EVENTS // ranks]
        return [{"ph": "M", "name": "process_name", "pid": self.rank, "args": name}] + [
            {"ph": "X", "name": e.name, "cat": e.kind, "pid": self.rank, "tid": e.thread,
             "ts": round(e.start - self.begin, 1), "dur": round(e.end - e.start, 1)}
            for e in longest
        ]  # fmt: skip
