"""profile.json: the parts that a rank's iteration is divided into (t5bench/profile/timeline.py), and what they say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from t5bench.record.files import read
from t5bench.record.log import Amount, Count
from t5bench.record.reader import decoded
from t5bench.text import WAITING_FOR_HOST

HOST = "host gaps"
FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTATION = "recomputation"
STEP = "optimizer and clipping"
DATA = "data loading"
LOGGING = "logging"
SAVING = "saving a checkpoint"
EVALUATING = "evaluation"
TRANSFER = "transfers between host and device"
BUBBLE = "pipeline bubble"
WAITING = "waiting for slower ranks"
AXES = ("data parallel", "tensor parallel", "pipeline parallel", "ZeRO's gathers", "all ranks")
SENDING = {axis: f"communication: {axis}" for axis in AXES}
# How a sentence describes the time that a part takes.
DOING = {
    HOST: WAITING_FOR_HOST,
    FORWARD: "in the forward pass",
    BACKWARD: "in the backward pass",
    RECOMPUTATION: "computing activations again",
    STEP: "in the optimizer and clipping",
    DATA: "waiting for data",
    LOGGING: "logging",
    SAVING: "saving a checkpoint",
    EVALUATING: "evaluating",
    TRANSFER: "copying between host and device",
    BUBBLE: "in the pipeline bubble",
    WAITING: "waiting for slower ranks",
} | {sending: f"in {axis} communication" for axis, sending in SENDING.items()}
DOING |= {SENDING[AXES[3]]: "in ZeRO's gathers", SENDING[AXES[4]]: "in communication of all ranks"}
PARTS = tuple(DOING)


def named(part: str) -> str:
    """A part, measured or predicted, as a picture or a table calls it; files have shorter names."""
    return WAITING_FOR_HOST if part in (HOST, "host") else part


MOST_TOLD = 3
ROUNDED = 1.01  # of the iteration: the most that its parts, each of them rounded, add up to

Milliseconds = Annotated[float, Meta(ge=0, lt=1e9)]  # eleven days
Duration = Annotated[float, Meta(gt=0, lt=1e9)]


class LinkUse(Struct):
    """What a rank's large messages along an axis carried, how long that took, and how many steps all of them went."""

    bytes: Amount
    ms: Milliseconds
    steps: Count = 0


class AtBest(Struct):
    """What the slowest link carries at best: bytes per second, and how long an empty message takes for a step."""

    rate: Annotated[float, Meta(gt=0)]
    latency_ms: Milliseconds


class Processor(Struct):
    """What a rank's process spent the iteration with.

    queued_ms: its main thread waited for a core that others had. throttled_ms: a quota held it back. working_ms and
    asleep_ms: of its main thread, outside of communication, data, logging and saving. alone_ms: what a part takes, in
    this iteration and in those before, without waiting for a core. saving_ms: for how long it sleeps for a checkpoint.
    computed_ms: the process computed; machine_ms: all programs, on the cores that its main thread may use; cores: their
    numbers.
    """

    queued_ms: Milliseconds = 0.0
    throttled_ms: Milliseconds = 0.0
    alone_ms: dict[Literal[PARTS], Milliseconds] = {}
    working_ms: Milliseconds = 0.0
    asleep_ms: Milliseconds = 0.0
    saving_ms: Milliseconds = 0.0
    computed_ms: Milliseconds = 0.0
    machine_ms: Milliseconds = 0.0
    cores: list[Count] = []


class RankRecord(Struct):
    """timeline: parts, and when each stretch ends. waited_for: milliseconds by the other rank's number."""

    rank: Count
    host: str
    wall_ms: Duration
    parts: dict[Literal[PARTS], Milliseconds]
    waited_for: dict[Count, Milliseconds]
    links: dict[Literal[AXES], LinkUse]
    operators: Count
    processor: Processor
    timeline: list[tuple[Literal[PARTS], Milliseconds]] = []
    measured_ms: Duration | None = None  # by the process's own clock; wall_ms is the profiler's


class Profile(Struct):
    """other_iterations_ms: the median of the iterations before; overhead: how much longer the profiled one took."""

    ranks: Annotated[list[RankRecord], Meta(min_length=1)]
    link: AtBest | None = None
    other_iterations_ms: Duration | None = None
    overhead: Annotated[float, Meta(gt=-1, lt=1e9)] | None = None

    def __post_init__(self) -> None:
        for number, rank in enumerate(self.ranks):
            ends = [end for _, end in rank.timeline]
            if rank.rank != number or ends != sorted(ends):
                raise ValueError(f"rank {rank.rank} or its timeline is not in order")
            if not 0 < (total := sum(rank.parts.values())) <= ROUNDED * rank.wall_ms + 1:
                raise ValueError(f"the parts of rank {rank.rank} take {total:.6g} ms of {rank.wall_ms:.6g} ms")


def read_profile(path: Path) -> Profile:
    """Raises RecordError."""
    return decoded(path, read(path), Profile)


def shares(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """The parts of the profiled iteration, 0 to 1, as the mean of all ranks; the largest first."""
    means = {part: sum(rank.parts.get(part, 0.0) / rank.wall_ms for rank in ranks) / len(ranks) for part in PARTS}
    return dict(sorted(means.items(), key=lambda mean: -mean[1]))


def limits(ranks: Sequence[RankRecord], doing: Mapping[str, str] = DOING) -> str:
    """The largest parts in words."""
    largest = list(shares(ranks).items())[:MOST_TOLD]
    return ", ".join(f"{share:.0%} {doing[part]}" for part, share in largest if share)
