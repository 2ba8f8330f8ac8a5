"""What a record shows, without a profile, about why a run is slow: a node with slow GPUs, and a slow disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from t5bench.compare.statistics import event_within
from t5bench.record.records import Run

WORTH_NAMING = 0.1  # share of the iteration from which on a cause is named
# A checkpoint that is not slow: seconds that every one takes, and sleeps, and bytes per second that any disk writes.
CHECKPOINT_SECONDS, ASLEEP_SECONDS, DISK = 1.0, 0.1, 100e6


@dataclass(frozen=True)
class Cause:
    """What slows a run down; share: of the iteration, what would be gained without it at most."""

    name: str
    share: float
    evidence: str


def of_record(run: Run, asleep: float = 0.0) -> list[Cause]:
    """asleep: seconds for which a rank sleeps in a checkpoint, which its profile tells."""
    found = (*_slow_clocks(run), *_checkpoints(run, asleep))
    return [cause for cause in found if cause.share >= WORTH_NAMING]


def _slow_clocks(run: Run) -> Iterator[Cause]:
    """A node whose GPUs run at lower clocks than those of the other nodes, which wait for it."""
    clocks = {}
    for node, samples in run.samples.items():
        busy = [gpu for sample in samples for gpu in sample["gpus"] if gpu["utilization"]]
        seen = [gpu["sm_mhz"] for gpu in busy if gpu.get("sm_mhz")]
        if seen:
            clocks[node] = median(seen)
    slowest = min(clocks, key=clocks.__getitem__, default=0)
    if others := [clock for node, clock in clocks.items() if node != slowest]:
        share, host = 1 - clocks[slowest] / median(others), {node["node"]: node["host"] for node in run.nodes}
        text = f"GPUs of node {slowest} ({host[slowest]}) run at {clocks[slowest]:.0f} MHz"
        yield Cause("slow node", share, f"{text}, the others' at {median(others):.0f} MHz")


def _checkpoints(run: Run, asleep: float) -> Iterator[Cause]:
    """What saving adds to an iteration: the intervals with a checkpoint against those without."""
    every, with_one, without = run.plan.number("SAVE_INTERVAL"), [], []
    for before, after in pairwise(line for line in run.iterations if line.time):
        start, end = before.iteration, after.iteration
        seconds = after.time - before.time
        saved = every and (end - 1) // every - (start - 1) // every
        if saved:
            with_one.append((seconds, end - start, saved))
        elif not event_within(start, end, run.plan):
            without.append(seconds / (end - start))
    if not with_one or not without:
        return
    own = median(without)
    each = median((seconds - iterations * own) / saved for seconds, iterations, saved in with_one)
    folders = [folder for folder in (run.directory / "checkpoints").glob("*") if folder.is_dir()]
    size = max((sum(file.stat().st_size for file in folder.rglob("*")) for folder in folders), default=0)
    takes = (each, CHECKPOINT_SECONDS), (asleep, ASLEEP_SECONDS)
    is_slow = size and any(seconds > 2 * (usual + size / DISK) for seconds, usual in takes)
    text = f"saving {size / 1e6:,.0f} MB takes {each:.1f} s every {every} iterations"
    yield Cause("slow disk" if is_slow else "frequent checkpoints", each / (each + every * own), text)
