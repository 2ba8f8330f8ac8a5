"""What this process spends its time with: computing, waiting for a core, held back by a quota, asleep."""

import multiprocessing
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from t5bench.record.profile import DATA, LOGGING, SAVING

# The parts that may be slow by themselves, and how the iterations before the profiled one are averaged: some have no
# log line, and a loader may be late once.
BY_THEMSELVES = {DATA: statistics.median, LOGGING: statistics.fmean}
LAST = 4  # of these iterations tell what is chance: in many of them, any time may be short once
CONTENDED = 0.1  # of its computing, for which a loader's process waits for a core: it is late for want of one


def scheduled_ms(folder: str | Path) -> tuple[float, float]:
    """How long a thread computed, and waited for a core that others had."""
    with suppress(OSError, ValueError):
        computed, queued, _ = map(int, Path(folder, "schedstat").read_text().split())
        return computed / 1e6, queued / 1e6
    return 0.0, 0.0


def loaders() -> dict[int | None, tuple[float, float]]:
    """The same of each process of this one's data loaders, by its number: of all its threads, for some send."""
    found = {}
    for child in multiprocessing.active_children():
        threads = [scheduled_ms(folder) for folder in Path(f"/proc/{child.pid}/task").glob("*")]
        found[child.pid] = sum(computed for computed, _ in threads), sum(queued for _, queued in threads)
    return found


def kept_by(before: Mapping[int | None, tuple[float, float]]) -> float:
    """How long a loader's process waited for a core since then, and computed if it had to wait: else it is ahead."""
    kept = 0.0
    for pid, now in loaders().items():
        computed, queued = (a - b for a, b in zip(now, before.get(pid, now), strict=True))
        kept = max(kept, queued + computed * (queued > CONTENDED * computed))
    return kept


def processor() -> Counter[str]:
    """Milliseconds that this process computed, waited for a core and was held back by a quota.

    queued_ms: of its main thread; by their numbers its other threads. machine_ms: all programs computed, on the cores
    that it may use: what runs on others takes nothing from it.
    """
    found = Counter(computed_ms=1000 * time.process_time(), queued_ms=scheduled_ms("/proc/self")[1])
    threads = (folder for folder in Path("/proc/self/task").glob("*") if folder.name != str(os.getpid()))
    found.update({folder.name: scheduled_ms(folder)[1] for folder in threads})
    for core, of_core in enumerate(psutil.cpu_times(percpu=True)):
        if core in os.sched_getaffinity(0):
            busy = of_core.user, of_core.nice, of_core.system, of_core.irq, of_core.softirq
            found["machine_ms"] += 1000 * sum(busy)
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = "cpu" if "cpu" in controllers.split(",") else ""
            own = Path("/sys/fs/cgroup", folder, path.lstrip("/"))
            # A quota of a group above holds back too; in a container the path may begin above its root.
            for quota in {group / "cpu.stat" for group in (own, *own.parents)}:
                words = dict(line.split() for line in quota.read_text().splitlines()) if quota.is_file() else {}
                # cgroup 1 counts nanoseconds, cgroup 2 microseconds.
                found["throttled_ms"] += int(words.get("throttled_time", 0)) / 1e6
                found["throttled_ms"] += int(words.get("throttled_usec", 0)) / 1e3
    return found


# Milliseconds of a thread. It is asleep where it neither computed nor waited for a core.
COMPUTED, QUEUED, ASLEEP = range(3)
Parts = Mapping[str, np.ndarray]  # these three, by part; "": what belongs to none


def until_now() -> np.ndarray:
    """The main thread's, since a moment that is the same for all calls."""
    computed, queued = 1000 * time.thread_time(), scheduled_ms("/proc/self")[1]
    return np.array([computed, queued, 1000 * time.perf_counter() - computed - queued])


class MainThread:
    """A stopwatch for the thread that makes it: each moment belongs to the innermost part that it is in."""

    def __init__(self) -> None:
        self.thread, self.spent, self.last = threading.get_ident(), dict[str, np.ndarray](), until_now()
        self.within: list[str] = []  # the innermost part last

    @contextmanager
    def in_part(self, part: str) -> Iterator[None]:
        """Where it waits for a loader's process that waits for a core, it waits for that core itself."""
        if threading.get_ident() != self.thread:
            yield
            return
        self._count()
        self.within.append(part)
        others = loaders() if part == DATA else {}
        try:
            yield
        finally:
            asleep = self._count()[ASLEEP]
            waited = min(kept_by(others), max(0.0, asleep)) if others else 0.0
            self.spent[part] = self.spent[part] + [0.0, waited, -waited]
            self.within.pop()

    def _count(self) -> np.ndarray:
        """Adds the time since the last call to the innermost part, and returns it."""
        part, now = self.within[-1] if self.within else "", until_now()
        own, self.last = now - self.last, now
        self.spent[part] = self.spent.get(part, 0.0) + own
        return own

    def until_now(self) -> Parts:
        self._count()
        return dict(self.spent)


def between(before: Parts, after: Parts) -> Parts:
    return {part: spent - before.get(part, 0.0) for part, spent in after.items()}


def main_thread(now: Parts, before: Sequence[Parts], known: float = 0.0) -> dict[str, Any]:
    """What profile.json says of an iteration's main thread (t5bench/record/profile.py).

    before: other iterations. What they do not show may be chance.
    known: ms for which it slept for reasons that are told elsewhere.
    """
    nothing, alone = np.zeros(3), {}
    for part, average in BY_THEMSELVES.items():
        parts = [each.get(part, nothing) for each in (now, *before)]
        own, *others = [max(0.0, spent[COMPUTED] + spent[ASLEEP]) for spent in parts]
        alone[part] = min(own, average(others)) if others else own
    own, *others = [each[""] for each in (now, *before[-LAST:])]
    least = np.min(others, axis=0) if others else own
    found = {"alone_ms": alone, "working_ms": max(0.0, min(own[COMPUTED], least[COMPUTED]))}
    found["asleep_ms"] = max(0.0, min(own[ASLEEP] - known, least[ASLEEP]))
    saved = [each.get(SAVING, nothing) for each in (now, *before)]
    if slept := [spent[ASLEEP] for spent in saved if spent[COMPUTED] > 0]:
        found["saving_ms"] = max(0.0, statistics.median(slept))
    return found
