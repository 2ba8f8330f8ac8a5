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

from t5bench.costmodel.schedule import WEIGHT_STEP
from t5bench.profile import parts as profile
from t5bench.profile.parts import AXES, PARTS, SENDING

_CODE = {part: code for code, part in enumerate(PARTS)}
_IDLE = -1
# What sending on the host's main thread covers, and what such a thread does where its GPU is idle.
_EVENTS = (profile.LOGGING, profile.SAVING, profile.EVALUATING)
_UNDER_SENDING = tuple(_CODE[part] for part in PARTS if part not in _EVENTS)
_WHILE_IDLE = (profile.STEP, profile.DATA, *_EVENTS, profile.WAITING, profile.BUBBLE)
_BACKWARD_NODE = "autograd::engine::evaluate_function"
# What a range of PyTorch's, the engine's or step.py's belongs to, by how its name begins; the later ones lie within.
_NAMED = {
    _BACKWARD_NODE: profile.BACKWARD,
    WEIGHT_STEP: profile.BACKWARD,
    "Optimizer.": profile.STEP,
    "enumerate(DataLoader": profile.DATA,
}
_NAMED |= {part: part for part in (profile.DATA, *_EVENTS)}
# Marks of step.py: the iteration, and a collective operation "t5|axis|operation|bytes sent|ranks|number".
ITERATION = "t5 iteration"
COLLECTIVE = "t5|"
SENDS = ("send", "isend")
RECEIVES = ("recv", "irecv")
PAIRWISE = (*SENDS, *RECEIVES, "batch_isend_irecv")
MOST_CELLS = 4_000_000
MOST_EVENTS = 40_000
MOST_STRETCHES = 400
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


class CollectiveStretch(NamedTuple):
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
        self.rank = rank
        self.host = host
        self.late = dict[int, float]()
        self.events = [e for e in events if e.start >= self.begin and e.end <= self.end and e is not whole]
        self.launches = {e.correlation: e for e in self.events if e.kind in ("cuda_runtime", "cuda_driver")}
        self.marks: list[CollectiveStretch] = []  # by their start
        self.unmarked = 0.0  # ms for which the main thread waits for collectives without a mark
        self.collectives = list(self._collectives(gradient_bytes))
        self.came = dict[Key, float]()
        self.left = dict[Key, float]()
        for each in self.collectives:
            self.came[each.key] = min(each.event.start, self.came.get(each.key, each.event.start))
            self.left[each.key] = max(each.event.end, self.left.get(each.key, each.event.end))
        self.cell = max(1.0, (self.end - self.begin) / MOST_CELLS)

    def _collectives(self, gradient_bytes: int) -> Iterator[CollectiveStretch]:
        """The collectives: those with a mark, and the all-reduces of PyTorch's DDP, which have none.

        With NCCL they are its kernels: a rank reaches a collective when its device does.
        """
        ordered = sorted(self.events, key=lambda event: event.start)
        for event in (event for event in ordered if event.name.startswith(COLLECTIVE)):
            _, axis, operation, size, ranks, number = event.name.split("|")
            steps = 1 if operation in PAIRWISE else ranks.count(",")  # round a ring of the others
            if operation == "all_reduce":
                steps *= 2
            self.marks.append(CollectiveStretch((f"{axis} {ranks}", int(number)), axis, int(size), steps, event))
        kernels = [event for event in ordered if event.kind == "kernel" and "nccl" in event.name]
        if kernels:
            marked = [(self.mark_around(self.launch(kernel).start), kernel) for kernel in kernels]
            yield from (mark._replace(event=kernel) for mark, kernel in marked if mark)
            unmarked = [[kernel for mark, kernel in marked if not mark]]
        else:
            yield from self.marks
            own = [event for event in ordered if not self.mark_around(event.start)]
            calls = [event for event in own if event.name == "c10d::allreduce_"]
            unmarked = [calls, [event for event in own if event.name in ("gloo:all_reduce", "nccl:all_reduce")]]
        for events in unmarked:
            for number, event in enumerate(events):
                yield CollectiveStretch(("DDP", number), AXES[0], gradient_bytes // len(events), 2, event)

    def launch(self, kernel: Event) -> Event:
        """The event on the host that started it; itself if there is none."""
        return self.launches.get(kernel.correlation, kernel)

    def mark_around(self, moment: float) -> CollectiveStretch | None:
        before = bisect.bisect(self.marks, moment, key=lambda mark: mark.event.start) - 1
        return self.marks[before] if before >= 0 and moment <= self.marks[before].event.end else None

    def introduction(self) -> tuple[str, int, float, dict[Key, float]]:
        """What the other ranks need to know: host, rank, begin, and when this rank reached each collective."""
        return self.host, self.rank, self.begin, self.came

    def meet(self, everyone: Sequence[tuple[str, int, float, dict[Key, float]]]) -> Last:
        """Begins with the other ranks of its host; when the last rank reached each collective, on this rank's clock."""
        begins = {host: min(begin for other, _, begin, _ in everyone if other == host) for host, *_ in everyone}
        self.begin = begins[self.host]
        last = dict[Key, tuple[float, int]]()
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
            self.communicate(cells, each, last, _UNDER_SENDING if is_main else (_CODE[profile.HOST],))
        kernels = [e for e in self.events if e.kind in ("kernel", "gpu_memcpy", "gpu_memset")]
        if kernels:
            device = self.device(kernels)
            for each in of_device:
                self.communicate(device, each, last, (_IDLE, _CODE[profile.TRANSFER]))
            known = [_CODE[part] for part in (*_WHILE_IDLE, *SENDING.values())]
            idle = np.where(np.isin(cells, known), cells, _CODE[profile.HOST])
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
        cells = np.full(round((self.end - self.begin) / self.cell), _CODE[profile.HOST], np.int8)
        events = sorted((e for e in self.events if e.thread == thread), key=lambda e: (e.start, -e.end))
        nodes = (e.end for e in self.events if e.name.startswith(_BACKWARD_NODE))
        backward_ends = max(nodes, default=self.end)
        for event in events:
            if event.kind == "cpu_op":
                phase = profile.FORWARD if event.start < backward_ends else profile.STEP
                cells[self.span(event.start, event.end)] = _CODE[phase]
        for prefix, part in _NAMED.items():
            for event in events:
                if event.name.startswith(prefix):
                    again = part == profile.BACKWARD and "CheckpointFunction" in event.name
                    cells[self.span(event.start, event.end)] = _CODE[profile.RECOMPUTATION if again else part]
        return cells

    def communicate(self, cells: np.ndarray, collective: CollectiveStretch, last: Last, under: Sequence[int]) -> None:
        """Paints a collective over the parts that it covers. On the host's main thread, waiting covers all of them."""
        start = collective.event.start
        end = collective.event.end
        arrival, latest = last.get(collective.key, (start, self.rank))
        arrival = min(max(arrival, start), end)
        is_pipeline = collective.axis == AXES[2]
        waiting = profile.BUBBLE if is_pipeline else profile.WAITING
        sending = SENDING[collective.axis]
        for stretch, part in ((self.span(start, arrival), waiting), (self.span(arrival, end), sending)):
            free = np.isin(cells[stretch], under) | (part == waiting and under is _UNDER_SENDING)
            cells[stretch][free] = _CODE[part]
            self.unmarked += float(free.sum()) * self.cell / 1000 if under is not _UNDER_SENDING else 0.0
            if part == profile.WAITING:
                self.late[latest] = self.late.get(latest, 0.0) + float(free.sum()) * self.cell

    def device(self, kernels: Iterable[Event]) -> np.ndarray:
        """What the device does, except communication: a kernel belongs to the phase in which the host launched it."""
        phases = {thread: self.phases(thread) for thread in {launch.thread for launch in self.launches.values()}}
        cells = np.full(round((self.end - self.begin) / self.cell), _IDLE, np.int8)
        # Copies from and to the host first: what computes paints over them.
        for event in sorted(kernels, key=lambda e: ("HtoD" not in e.name and "DtoH" not in e.name, e.start)):
            launch = self.launch(event)
            stretch = self.span(event.start, event.end)
            if "HtoD" in event.name or "DtoH" in event.name:
                cells[stretch] = _CODE[profile.TRANSFER]
            elif "nccl" not in event.name:
                launched = self.span(launch.start, launch.start).start
                phase = phases[launch.thread][launched] if launch is not event else _CODE[profile.HOST]
                cells[stretch] = phase or _CODE[profile.FORWARD]
        return cells

    def links(self, last: Last) -> dict[str, dict[str, float]]:
        """Bytes that this rank sends in large messages along each axis, the time in which one of them travels, and the
        steps of all messages."""
        links: dict[str, dict[str, float]] = {}
        reached = 0.0  # time in which two of them travel counts once
        operations = {each.key: each for each in self.collectives}.values()
        for each in sorted(operations, key=lambda each: last[each.key]):
            begin = last[each.key][0]
            end = self.left[each.key]
            if end > begin:
                link = links.setdefault(each.axis, {"bytes": 0, "ms": 0.0, "steps": 0})
                link["steps"] += each.steps
            if end > begin and each.sent >= LARGE_BYTES:
                link["bytes"] += each.sent
                link["ms"] = round(link["ms"] + max(0.0, end - max(begin, reached)) / 1000, 3)
                reached = max(reached, end)
        return links

    def longest_events(self, ranks: int) -> list[dict[str, Any]]:
        """Events for Perfetto and chrome://tracing: only this rank's longest ones, to limit their number in all."""
        name = {"name": f"rank {self.rank} ({self.host})"}
        longest = sorted(self.events, key=lambda event: event.start - event.end)[: MOST_EVENTS // ranks]
        return [{"ph": "M", "name": "process_name", "pid": self.rank, "args": name}] + [
            {"ph": "X", "name": e.name, "cat": e.kind, "pid": self.rank, "tid": e.thread,
             "ts": round(e.start - self.begin, 1), "dur": round(e.end - e.start, 1)}
            for e in longest
        ]  # fmt: skip
