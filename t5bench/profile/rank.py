"""A rank's entry in profile.json as shares of its iteration."""

from collections.abc import Sequence

from t5bench.profile import parts as profile
from t5bench.profile.parts import BUBBLE, DATA, HOST, LOGGING, SENDING

FORWARD = (profile.FORWARD,)
BACKWARD = (profile.BACKWARD, profile.RECOMPUTATION)
COMPUTING = (*FORWARD, *BACKWARD)
# What each rank does for itself, and what all ranks of a stage have to do alike.
OWN_WORK = (DATA, LOGGING, profile.SAVING, profile.EVALUATING)
SHARED_WORK = (*COMPUTING, profile.STEP, HOST, profile.TRANSFER)


class ExplainedRank:
    """queued, throttled, lost, asleep and working are shares of the iteration."""

    def __init__(self, entry: profile.RankRecord, stage: int) -> None:
        used = entry.processor
        self.entry = entry
        self.stage = stage
        self.wall = entry.wall_ms
        self.name = f"rank {entry.rank} ({entry.host})"
        # Several threads together may wait for longer than the iteration takes.
        self.queued = min(1.0, used.queued_ms / self.wall)
        self.throttled = min(1.0, used.throttled_ms / self.wall)
        self.lost = max(self.queued, self.throttled)  # who is held back also waits for a core meanwhile
        self.asleep = used.asleep_ms / self.wall  # known on a CPU
        self.working = used.working_ms / self.wall
        self.exposed = self.share(BUBBLE, *SENDING.values())

    def share(self, *parts: str) -> float:
        return sum(self.entry.parts.get(part, 0.0) for part in parts) / self.wall

    def alone(self, part: str) -> float:
        """The share that a part takes without waiting for a core, in other iterations too."""
        took = self.entry.parts.get(part, 0.0)
        return min(took, self.entry.processor.alone_ms.get(part, took)) / self.wall

    def beyond(self, other: "ExplainedRank", parts: Sequence[str]) -> float:
        """How much longer than another it takes for these, where it does."""
        return sum(max(0.0, self.share(part) - other.share(part)) for part in parts)

    def waits_for(self, others: Sequence["ExplainedRank"]) -> float:
        """For how long, as far as all of these take longer than this one for something that has no name already."""
        waits = sum(self.entry.waited_for.get(other.entry.rank, 0.0) for other in others) / self.wall
        waits -= min(other.beyond(self, OWN_WORK) for other in others)
        for other in others:
            without_waiting_for_a_core = other.beyond(self, SHARED_WORK) - max(0.0, other.lost - self.lost)
            waits = min(waits, without_waiting_for_a_core)
        return waits
