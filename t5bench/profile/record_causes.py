"""What slows a run down, as far as its record shows it without a profile: slow GPUs of a node, and checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from t5bench.compare.statistics import event_within
from t5bench.record.log import Iteration, evaluation
from t5bench.record.reader import log_lines
from t5bench.record.run import Run

WORTH_NAMING = 0.1  # share of the iteration from which on a slowdown is named
# A checkpoint is slow if it takes more than twice as long as these tell.
CHECKPOINT_SECONDS = 1.0  # that every one takes
ASLEEP_SECONDS = 0.1  # that every one sleeps
DISK = 100e6  # bytes per second that any disk writes


@dataclass(frozen=True)
class Slowdown:
    """What slows a run down, and how that is known."""

    name: str
    share: float
    """Of the iteration: what would be gained without it at most."""
    evidence: str


def of_record(run: Run, asleep: float = 0.0, saving: float = 0.0) -> list[Slowdown]:
    """asleep: seconds for which a rank sleeps in a checkpoint, which its profile tells; saving: what one took there."""
    slowdowns = (*_slow_clocks(run), *_checkpoints(run, asleep, saving))
    return [slowdown for slowdown in slowdowns if slowdown.share >= WORTH_NAMING]


def _slow_clocks(run: Run) -> Iterator[Slowdown]:
    """A node whose GPUs run at lower clocks than those of the other nodes, which wait for it."""
    clocks: dict[int, float] = {}
    for node, samples in run.samples.items():
        megahertz: list[float] = []
        for sample in samples:
            megahertz += [gpu["sm_mhz"] for gpu in sample["gpus"] if gpu["utilization"] and gpu.get("sm_mhz")]
        if megahertz:
            clocks[node] = median(megahertz)
    if len(clocks) < 2:
        return
    slowest = min(clocks, key=lambda node: clocks[node])
    usual = median(clock for node, clock in clocks.items() if node != slowest)
    host = next(node["host"] for node in run.nodes if node["node"] == slowest)
    text = f"GPUs of node {slowest} ({host}) run at {clocks[slowest]:.0f} MHz, the others' at {usual:.0f} MHz"
    yield Slowdown("slow node", 1 - clocks[slowest] / usual, text)


@dataclass(frozen=True)
class _Interval:
    """Between two log lines."""

    seconds: float
    iterations: int
    checkpoints: int
    has_event: bool
    """Of another kind than a checkpoint."""


def _checkpoints(run: Run, asleep: float, saving: float) -> Iterator[Slowdown]:
    """What saving adds to an iteration: the intervals with a checkpoint against those without, by the engine's own
    clock where there are none."""
    every = run.plan.number("SAVE_INTERVAL")
    timed = [line for line in run.iterations if line.time]
    if not every or not timed:
        return
    intervals = list(_intervals(run, timed, every))
    undisturbed = [interval for interval in intervals if not interval.checkpoints and not interval.has_event]
    seconds_without = [interval.seconds / interval.iterations for interval in undisturbed]
    iteration = median(seconds_without or [line.elapsed_ms / 1000 for line in timed])
    added = [
        (interval.seconds - interval.iterations * iteration) / interval.checkpoints
        for interval in intervals
        if interval.checkpoints
    ]
    checkpoint = median(added or [saving])
    size = _largest_checkpoint(run.directory / "checkpoints")
    writing = size / DISK
    is_slow = checkpoint > 2 * (CHECKPOINT_SECONDS + writing) or asleep > 2 * (ASLEEP_SECONDS + writing)
    duration = f"{checkpoint:.1f} s" if checkpoint >= 1 else f"{checkpoint:.3f} s"
    often = f"every {every} iterations" if every > 1 else "every iteration"
    yield Slowdown(
        name="slow disk" if size and is_slow else "frequent checkpoints",
        share=checkpoint / (checkpoint + every * iteration),
        evidence=f"saving {size / 1e6:,.0f} MB takes {duration} {often}",
    )


def _intervals(run: Run, timed: list[Iteration], every: int) -> Iterator[_Interval]:
    """Those in which no run was resumed and no profile was written, after which any time may pass.

    An evaluation comes before the checkpoint of its iteration, so an interval begins at the last one within it.
    """
    evaluated = _times_of_evaluations(run)
    for before, after in pairwise(timed):
        start = before.iteration
        end = after.iteration
        if after.begin != before.begin or start < run.plan.number("PROFILE_ITERATION") <= end + 1:
            continue
        evaluated_within = [iteration for iteration in evaluated if start < iteration < end]
        begin = max([start, *evaluated_within])
        yield _Interval(
            seconds=after.time - evaluated.get(begin, before.time),
            iterations=end - begin,
            checkpoints=(end - 1) // every - (begin - 1) // every,
            has_event=event_within(start, end, run.plan),
        )


def _times_of_evaluations(run: Run) -> dict[int, float]:
    """By iteration."""
    path = run.directory / f"node{run.nodes[-1]['node']}.log"
    times: dict[int, float] = {}
    if not run.evaluations or not path.exists():
        return times
    for _, time, text in log_lines(path):
        result = evaluation(text)
        if result:
            times[result.iteration] = time
    return times


def _largest_checkpoint(directory: Path) -> int:
    """In bytes."""
    largest = 0
    for folder in directory.glob("*"):
        if folder.is_dir():
            largest = max(largest, sum(file.stat().st_size for file in folder.rglob("*")))
    return largest
