"""The recorders of a run's nodes exchange what a node cannot see alone: that training continues, and how a node ended.

Whether the nodes have the same plan is not asked here but by their workers (agreement.py).

A node that cannot connect is still ended by its own output, its process group's timeout and its own watchdog.
A lost connection ends nothing: training survives an outage that is shorter than its process group's timeout.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypedDict

from t5bench.plan import channel
from t5bench.plan.channel import (
    LACKS_SECRET,
    OTHER_PURPOSE,
    SECRET_REMEDY,
    Alive,
    Channel,
    Endpoint,
    Message,
    StrangerError,
)
from t5bench.record.records import differences
from t5bench.record.status import CANCELLED, EXIT_CODES, NETWORK, SIGNALS, Cause, Strength, node_named

# How much is shown about hosts that have not proved that they belong to the run, and about nodes that differ.
MOST_STRANGERS = 3
MOST_DIFFERENCES = 3


class End(TypedDict):
    """How a node ended: the fields of its part that the others need."""

    node: int
    nnodes: int
    host: str
    status: Literal[(*EXIT_CODES, CANCELLED)]
    reason: str
    remedy: str
    cause: Cause | None
    signal: Literal[(*SIGNALS.values(),)] | None
    ended: str | None


class Progress(Message):
    iteration: int


class Ended(Message):
    part: End


class Gone(Message):
    """Says that a node disconnected without a word."""

    lost: int


class Introduced(Message):
    part: dict[str, Any]


class Differences(Message):
    sentences: list[str]


class Peers(Channel):
    """What this node knows of the others. Once ``hurry`` is set, nothing waits any more; ``warn`` gets sentences."""

    kinds = Alive | Progress | Ended | Gone | Introduced | Differences

    def __init__(
        self,
        endpoint: Endpoint,
        hurry: threading.Event | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(endpoint)
        self.hurry = hurry or threading.Event()
        self.warn = warn
        self.ends: dict[int, Mapping[str, Any]] = {}  # how other nodes ended, by rank
        self.gone: dict[int, Mapping[str, Any]] = {}  # the same for nodes that disconnected without a word
        self.differences: list[str] = []
        self.iteration = 0
        self.progress = time.monotonic()
        self._progress_said = 0.0
        self._parts: dict[int, Mapping[str, Any]] = {}
        self._strangers: set[str] = set()
        if endpoint.nodes > 1 and not endpoint.secret:
            warn(f"without a secret, the nodes will not learn why another one failed. {SECRET_REMEDY}")
        self.start()

    def named(self, node: int) -> str:
        return node_named(node, self.hosts.get(node))

    def heard_from(self) -> list[Mapping[str, Any]]:
        """How the other nodes ended, as they reported it, or that they disconnected without a word."""
        return [ends[node] for ends in (self.ends, self.gone) for node in sorted(ends)]

    def progressed(self, iteration: int) -> None:
        """Tells the others that this node has an iteration line, at most once a second."""
        now = time.monotonic()
        self.progress = now
        self.iteration = iteration
        if now - self._progress_said >= 1:
            self._progress_said = now
            self.say(Progress(iteration=iteration))

    def trains(self) -> None:
        """Notes that a worker here gave a sign of life, with or without an iteration line; the next beat tells it."""
        self.progress = time.monotonic()

    def beat(self) -> Alive:
        beat = super().beat()
        return Alive(ages=beat.ages, hosts=beat.hosts, idle=time.monotonic() - self.progress)

    def introduce(self, part: Mapping[str, Any]) -> None:
        """Sends this node's part of the record, once it is known; node 0 compares the others' parts with its own."""
        if self.endpoint.node == 0:
            self._compare(0, part)
        else:
            self.declare(Introduced(part=dict(part)))

    def ended(self, part: Mapping[str, Any]) -> None:
        """Tells the others how this node ended."""
        if self.endpoint.node == 0:
            self.over.set()
        self.declare(Ended(part=dict(part)))

    def hear(self, message: Any) -> None:
        node = message.node
        if self.endpoint.node == 0 and isinstance(message, Progress | Ended):
            self.pass_on(message)
        self.gone.pop(node, None)
        if isinstance(message, Progress):
            self.progress = time.monotonic()
            self.iteration = message.iteration
        elif isinstance(message, Ended):
            cause = message.part["cause"]
            self.ends[node] = {**message.part, "node": node, "cause": asdict(cause) if cause else None}
            if node == 0:
                self.over.set()
        elif isinstance(message, Gone):
            self.left(message.lost)
        elif isinstance(message, Alive):
            now = time.monotonic()
            self.heard |= {n: now - age for n, age in message.ages.items() if n != self.endpoint.node}
            self.hosts = {**message.hosts, **self.hosts}
            if message.idle is not None:
                self.progress = max(self.progress, now - message.idle)
        elif isinstance(message, Introduced):
            self._compare(node, message.part)
        elif isinstance(message, Differences):
            self._differ(message.sentences)

    def left(self, node: int) -> None:
        if node not in self.ends and node != self.endpoint.node:
            remedy = "Check whether it was rebooted, or its processes were killed by a user or because memory ran out"
            cause = Cause.now(NETWORK, "it disconnected without giving a reason", remedy, Strength.WAITED)
            position = {"node": node, "nnodes": self.endpoint.nodes, "host": self.hosts.get(node, "?")}
            self.gone.setdefault(node, position | cause.fields() | {"signal": None, "ended": None})
            if self.endpoint.node == 0:
                self.say(Gone(lost=node))

    def cannot_listen(self, error: OSError) -> None:
        if self.endpoint.nodes == 1:
            return
        self.warn(
            f"cannot listen on port {self.endpoint.port} ({error.strerror}): when a node fails, the others will not"
            " learn why. It is MASTER_PORT + 1000, so choose another MASTER_PORT"
        )

    def met_stranger(self, address: str, error: StrangerError) -> None:
        if error.code not in (LACKS_SECRET, OTHER_PURPOSE):
            return
        host = address.rpartition(":")[0] or address  # which comes again and again, from another port
        if host in self._strangers or len(self._strangers) == MOST_STRANGERS:
            return
        self._strangers.add(host)
        found = f"{address} names this run but has another secret" if error.code == LACKS_SECRET else error.found
        remedy = SECRET_REMEDY if error.code == LACKS_SECRET else error.remedy
        last = "; further ones are not shown" if len(self._strangers) == MOST_STRANGERS else ""
        self.warn(f"{found}, so it is ignored{last}. {remedy}")

    def _compare(self, node: int, part: Mapping[str, Any]) -> None:
        """Takes a node's part. The others' are compared with node 0's as soon as both are known."""
        with self.lock:
            self._parts[node] = part
            for other in self._parts if node == 0 else (node,):
                if other != 0 and 0 in self._parts:
                    try:
                        self._differ(list(differences(self._parts[0], self._parts[other])))
                    except (LookupError, TypeError, ValueError, AttributeError):
                        self._differ([f"{self.named(other)} runs a different version of this repository"])

    def _differ(self, sentences: Sequence[str]) -> None:
        with self.lock:
            new = [sentence for sentence in sentences if sentence not in self.differences]
            self.differences += new
            if new and self.endpoint.node == 0:
                self.declare(Differences(sentences=list(self.differences)))
        if new:
            more = f"; and {len(new) - MOST_DIFFERENCES} more" if len(new) > MOST_DIFFERENCES else ""
            self.warn(f"the nodes of this run differ: {'; '.join(new[:MOST_DIFFERENCES])}{more}")

    @property
    def sees_progress(self) -> bool:
        """Whether a lack of progress means something: the last node has the iteration lines, node 0 passes them on."""
        last = self.endpoint.nodes - 1
        source = last if self.endpoint.node == 0 else 0
        return self.endpoint.node == last or self.ages().get(source, float("inf")) < channel.SILENT_SECONDS

    def silent(self) -> dict[int, float]:
        """Nodes that have neither ended nor disconnected but are silent (no power or network), and for how long."""
        over = self.ends.keys() | self.gone.keys()
        silent = {n: age for n, age in self.ages().items() if age >= channel.SILENT_SECONDS and n not in over}
        # Messages from the others pass through node 0.
        return {0: silent[0]} if 0 in silent else silent

    def of_silence(self) -> str:
        """Which nodes are silent, to end a sentence about a node that waited for others."""
        return "".join(f"; {self.named(n)} has been silent for {age:.0f} s" for n, age in sorted(self.silent().items()))

    def wait_for_ends(self, seconds: float, enough: Callable[[Mapping[int, Mapping[str, Any]]], bool]) -> None:
        """Waits until the others have said enough, nobody is left who could say more, or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough(self.ends) and not self.hurry.is_set():
            if not self._may_say_more():
                return
            time.sleep(0.1)

    def _may_say_more(self) -> bool:
        """Whether a node may still report. One that never connected will not, and without node 0 nobody is heard."""
        over = self.ends.keys() | self.gone.keys()
        silent = self.silent().keys()
        if self.endpoint.node == 0:
            return not self.heard.keys() <= over | silent
        return 0 in self.heard and 0 not in silent and (0 in self.connections or 0 not in over)
