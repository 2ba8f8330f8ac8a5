"""What this process spends its time with: computing, waiting for a core, held back by a quota, asleep."""

import multiprocessing
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from t5bench.control_groups import throttled_ms
from t5bench.profile.parts import DATA, LOGGING, SAVING

# The parts that may be slow by themselves, and how the iterations before the profiled one are averaged: some have no
# log line, and a loader may be late once.
BY_THEMSELVES = {DATA: statistics.median, LOGGING: statistics.fmean}
# Of a time, only what all of the last iterations show is the training's own; more iterations would hide it, because any
# time is short once by chance.
LAST = 4
# A loader's process that waits for a core for more than this part of its computing time is late for want of a core.
CONTENDED = 0.1


def scheduled_ms(folder: str | Path) -> tuple[float, float]:
    """How long a thread computed, and waited for a core that others had."""
    with suppress(OSError, ValueError):
        computed, queued, _ = map(int, Path(folder, "schedstat").read_text().split())
        return computed / 1e6, queued / 1e6
    return 0.0, 0.0


def loaders() -> dict[int | None, tuple[float, float]]:
    """The same of each process of this one's data loaders, by its number: of all its threads, for some send."""
    times = {}
    for child in multiprocessing.active_children():
        threads = [scheduled_ms(folder) for folder in Path(f"/proc/{child.pid}/task").glob("*")]
        times[child.pid] = (sum(computed for computed, _ in threads), sum(queued for _, queued in threads))
    return times


def late_ms(before: Mapping[int | None, tuple[float, float]]) -> float:
    """For how long the slowest loader has been late since then for want of a core.

    That is the time that it waited for a core and, if this was long, the time that it computed, too: with a core at
    once it would be ahead.
    """
    latest = 0.0
    for pid, (computed_now, queued_now) in loaders().items():
        computed_before, queued_before = before.get(pid, (computed_now, queued_now))
        computed = computed_now - computed_before
        queued = queued_now - queued_before
        is_contended = queued > CONTENDED * computed
        latest = max(latest, queued + computed if is_contended else queued)
    return latest


def processor() -> Counter[str]:
    """Milliseconds that this process computed, waited for a core and was held back by a quota.

    queued_ms: of its main thread; by their numbers its other threads. machine_ms: all programs computed, on the cores
    that it may use: what runs on others takes nothing from it.
    """
    spent = Counter(computed_ms=1000 * time.process_time(), queued_ms=scheduled_ms("/proc/self")[1])
    for folder in Path("/proc/self/task").glob("*"):
        if folder.name != str(os.getpid()):
            spent[folder.name] = scheduled_ms(folder)[1]
    for core, of_core in enumerate(psutil.cpu_times(percpu=True)):
        if core in os.sched_getaffinity(0):
            busy = of_core.user + of_core.nice + of_core.system + of_core.irq + of_core.softirq
            spent["machine_ms"] += 1000 * busy
    spent["throttled_ms"] = throttled_ms()
    return spent


@dataclass(frozen=True)
class CpuAccounting:
    """Milliseconds of a thread."""

    computed: float = 0.0
    queued: float = 0.0
    """It waited for a core that others had."""
    asleep: float = 0.0
    """It neither computed nor waited for a core."""

    def __add__(self, other: "CpuAccounting") -> "CpuAccounting":
        return CpuAccounting(self.computed + other.computed, self.queued + other.queued, self.asleep + other.asleep)

    def __sub__(self, other: "CpuAccounting") -> "CpuAccounting":
        return CpuAccounting(self.computed - other.computed, self.queued - other.queued, self.asleep - other.asleep)


NOTHING = CpuAccounting()
# By part; what belongs to none has the name OUTSIDE.
Parts = Mapping[str, CpuAccounting]
OUTSIDE = ""


def main_thread_now() -> CpuAccounting:
    """The main thread's time since a moment that is the same for all calls."""
    computed = 1000 * time.thread_time()
    queued = scheduled_ms("/proc/self")[1]
    return CpuAccounting(computed, queued, 1000 * time.perf_counter() - computed - queued)


class MainThread:
    """A stopwatch for the thread that makes it: each moment belongs to the innermost part that it is in."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.spent: dict[str, CpuAccounting] = {}
        self.last = main_thread_now()
        self.within: list[str] = []  # the innermost part last

    @contextmanager
    def in_part(self, part: str) -> Iterator[None]:
        """Where it waits for a loader's process that waits for a core, it waits for that core itself."""
        if threading.get_ident() != self.thread:
            yield
            return
        self._count()
        self.within.append(part)
        before = loaders() if part == DATA else {}
        try:
            yield
        finally:
            interval = self._count()
            if before:
                waited = min(late_ms(before), max(0.0, interval.asleep))
                self.spent[part] += CpuAccounting(queued=waited, asleep=-waited)
            self.within.pop()

    def _count(self) -> CpuAccounting:
        """Adds the time since the last call to the innermost part, and returns it."""
        part = self.within[-1] if self.within else OUTSIDE
        now = main_thread_now()
        interval = now - self.last
        self.last = now
        self.spent[part] = self.spent.get(part, NOTHING) + interval
        return interval

    def until_now(self) -> Parts:
        self._count()
        return dict(self.spent)


def between(before: Parts, after: Parts) -> Parts:
    return {part: spent - before.get(part, NOTHING) for part, spent in after.items()}


def main_thread(now: Parts, before: Sequence[Parts], known: float = 0.0) -> dict[str, Any]:
    """What profile.json says of an iteration's main thread (t5bench/profile/parts.py).

    before: other iterations. What they do not show may be chance.
    known: ms for which it slept for reasons that are told elsewhere.
    """
    alone = {}
    for part, average in BY_THEMSELVES.items():
        times = []
        for iteration in (now, *before):
            spent = iteration.get(part, NOTHING)
            times.append(max(0.0, spent.computed + spent.asleep))
        alone[part] = min(times[0], average(times[1:])) if before else times[0]
    of_this = now[OUTSIDE]
    of_others = [iteration[OUTSIDE] for iteration in before[-LAST:]] or [of_this]
    working = min(of_this.computed, *(spent.computed for spent in of_others))
    asleep = min(of_this.asleep - known, *(spent.asleep for spent in of_others))
    summary = {"alone_ms": alone, "working_ms": max(0.0, working), "asleep_ms": max(0.0, asleep)}
    saved = [iteration.get(SAVING, NOTHING) for iteration in (now, *before)]
    slept = [spent.asleep for spent in saved if spent.computed > 0]
    if slept:
        summary["saving_ms"] = max(0.0, statistics.median(slept))
    return summary
