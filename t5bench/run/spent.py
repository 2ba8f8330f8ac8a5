"""What this process spends its time with: computing, waiting for a core, held back by a quota, asleep."""

import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from t5bench.record.profile import DATA, LOGGING, SAVING

# The parts that may be slow by themselves, and how the iterations before the profiled one are averaged: some have no
# log line, and a loader may be late once.
BY_THEMSELVES = {DATA: statistics.median, LOGGING: statistics.fmean}
TIMED = 4  # of these iterations, the last ones, of which communication is known too
CONTENDED = 0.1  # of its computing, for which a loader's process waits for a core: it is late for want of one


def scheduled_ms(folder: str | Path) -> tuple[float, float]:
    """How long a thread computed, and waited for a core that others had."""
    with suppress(OSError, ValueError):
        computed, queued, _ = map(int, Path(folder, "schedstat").read_text().split())
        return computed / 1e6, queued / 1e6
    return 0.0, 0.0


def queued_ms(folder: str | Path) -> float:
    return scheduled_ms(folder)[1]


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

    queued_ms: of its main thread; by their numbers its other threads. machine_ms: all programs on all cores computed.
    """
    found = Counter(computed_ms=1000 * time.process_time(), queued_ms=queued_ms("/proc/self"))
    threads = (folder for folder in Path("/proc/self/task").glob("*") if folder.name != str(os.getpid()))
    found.update({folder.name: queued_ms(folder) for folder in threads})
    with suppress(OSError, ValueError):
        user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
        found["machine_ms"] = 1000 * sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")
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


class Spent(NamedTuple):
    """Milliseconds of the main thread; asleep: all in which it neither computed nor waited for a core."""

    computed: float = 0.0
    queued: float = 0.0
    asleep: float = 0.0

    @classmethod
    def until_now(cls) -> "Spent":
        """Since a moment that is the same for all calls."""
        computed, queued = 1000 * time.thread_time(), queued_ms("/proc/self")
        return cls(computed, queued, 1000 * time.perf_counter() - computed - queued)

    def plus(self, other: "Spent", times: int = 1) -> "Spent":
        return Spent(*(a + times * b for a, b in zip(self, other, strict=True)))


Parts = Mapping[str, Spent]  # by part; "": all of them, and what belongs to none


class MainThread:
    """Counts what the main thread spends by part. What lies inside of another part belongs to the inner one alone."""

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.within: list[str] = []  # the innermost part last
        self.inner, self.for_loaders = Spent(), 0.0

    @contextmanager
    def in_part(self, part: str) -> Iterator[None]:
        """Where it waits for a loader's process that waits for a core, it waits for that core itself."""
        outer, self.inner, before, others = self.inner, Spent(), Spent.until_now(), loaders()
        self.within.append(part)
        try:
            yield
        finally:
            self.within.pop()
            found = Spent.until_now().plus(before, -1)
            waited = min(kept_by(others), max(0.0, found.asleep)) if part == DATA else 0.0
            self.for_loaders += waited
            own = found.plus(self.inner, -1).plus(Spent(queued=waited, asleep=-waited))
            self.spent[part] = self.spent.get(part, Spent()).plus(own)
            self.inner = outer.plus(found)

    def until_now(self) -> Parts:
        waited = Spent(queued=self.for_loaders, asleep=-self.for_loaders)
        return {**self.spent, "": Spent.until_now().plus(waited)}


def between(before: Parts, after: Parts) -> Parts:
    return {part: spent.plus(before.get(part, Spent()), -1) for part, spent in after.items()}


def of_none(spent: Parts) -> Spent:
    """What belongs to no part."""
    rest = spent[""]
    for part in spent.keys() - {""}:
        rest = rest.plus(spent[part], -1)
    return rest


def main_thread(now: Parts, before: Sequence[Parts]) -> tuple[dict[str, Any], float]:
    """What profile.json says of an iteration's main thread (t5bench/record/profile.py), and how long it slept at most.

    before: other iterations, the last with communication as a part too. What they do not show may be chance.
    """
    alone = {}
    for part, average in BY_THEMSELVES.items():
        spent = [each.get(part, Spent()) for each in (now, *before)]
        own, *others = [max(0.0, each.computed + each.asleep) for each in spent]
        alone[part] = min(own, average(others)) if others else own
    own, *others = [of_none(each) for each in (now, *before[-TIMED:])]
    most = Spent(*map(min, zip(*others, strict=True))) if others else own
    working = max(0.0, min(own.computed, most.computed))
    found = {"alone_ms": alone, "working_ms": working, "asleep_ms": own.asleep}
    if saved := [each[SAVING].asleep for each in (now, *before) if each.get(SAVING, Spent()).computed > 0]:
        found["saving_ms"] = max(0.0, statistics.median(saved))
    return found, max(0.0, most.asleep)
