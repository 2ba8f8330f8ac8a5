"""The recorders of a run's nodes exchange what a node cannot see alone: that training continues, and how a node ended.

A node that cannot connect is still ended by its own output, its process group's timeout and its own watchdog.
A lost connection ends nothing: training survives an outage that is shorter than its process group's timeout.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypedDict

from t5bench.plan import channel
from t5bench.plan.channel import SECRET_REMEDY, Alive, Channel, Message, Place, ProofError, StrangerError
from t5bench.record.status import CANCELLED, EXIT_CODES, NETWORK, SIGNALS, Cause, Strength

# How another node's part differs from this one's: (first, other) -> sentences.
Compare = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[str]]
# How much is shown about hosts that have not proved that they belong to the run.
MOST_STRANGERS, LONGEST_ADVICE = 3, 300


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
    """What this node knows of the others.

    ``compare`` is called on node 0, and ``on_differences`` gets the new sentences on every node. Once ``hurry`` is set,
    nothing waits any more. Without a secret only progress is believed; everything else is shown as advice.
    """

    kinds = Alive | Progress | Ended | Gone | Introduced | Differences

    def __init__(
        self,
        place: Place,
        *,
        hurry: threading.Event | None = None,
        compare: Compare = lambda first, other: [],
        on_differences: Callable[[Sequence[str]], None] = lambda sentences: None,
        on_problem: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(place)
        self.compare, self.on_differences, self.on_problem = compare, on_differences, on_problem
        self.hurry = hurry or threading.Event()
        self.ends: dict[int, Mapping[str, Any]] = {}  # how other nodes ended, by rank
        self.gone: dict[int, Mapping[str, Any]] = {}  # the same for nodes that disconnected without a word
        self.differences: list[str] = []
        self.iteration, self.progress, self._progress_said = 0, time.monotonic(), 0.0
        self._parts: dict[int, Mapping[str, Any]] = {}
        self._advised: set[int] = set()  # nodes that have ended, according to an unproven host
        self._strangers = 0
        self.start()

    def named(self, node: int) -> str:
        return f"node {node} ({self.hosts.get(node, '?')})"

    def heard_from(self) -> list[Mapping[str, Any]]:
        """How the other nodes ended, as they reported it, or that they disconnected without a word."""
        return [ends[node] for ends in (self.ends, self.gone) for node in sorted(ends)]

    def progressed(self, iteration: int) -> None:
        """Tells the others that this node has an iteration line, at most once a second."""
        now = time.monotonic()
        self.progress, self.iteration = now, iteration
        if now - self._progress_said >= 1:
            self._progress_said = now
            self.say(Progress(iteration=iteration))

    def introduce(self, part: Mapping[str, Any]) -> None:
        """Sends this node's part of the record, once it is known; node 0 compares the others' parts with its own."""
        if self.place.node != 0:
            self.declare(Introduced(part=dict(part)))
            return
        with self.lock:
            self._parts[0] = part
            for node in self._parts:
                self._compare(node)

    def ended(self, part: Mapping[str, Any]) -> None:
        """Tells the others how this node ended."""
        if self.place.node == 0:
            self.over.set()
        self.declare(Ended(part=dict(part)))

    def hear(self, message: Any) -> None:
        node = message.node
        if self.place.node == 0 and isinstance(message, Progress | Ended):
            self.pass_on(message)
        if isinstance(message, Progress):
            self.progress, self.iteration = time.monotonic(), message.iteration
        if not self.place.secret:
            self._be_advised(message)
            return
        self.gone.pop(node, None)
        if isinstance(message, Ended):
            cause = message.part["cause"]
            self.ends[node] = {**message.part, "node": node, "cause": asdict(cause) if cause else None}
            if node == 0:
                self.over.set()
        elif isinstance(message, Gone):
            self.left(message.lost)
        elif isinstance(message, Alive):
            now = time.monotonic()
            self.heard |= {n: now - age for n, age in message.ages.items() if n != self.place.node}
        elif isinstance(message, Introduced):
            with self.lock:
                self._parts[node] = message.part
                self._compare(node)
        elif isinstance(message, Differences):
            self._differ(message.sentences)

    def _be_advised(self, message: Any) -> None:
        if isinstance(message, Ended) and message.node not in self._advised:
            self._advised.add(message.node)
            said = f"{message.part['status']}: {message.part['reason']}"[:LONGEST_ADVICE]
            claim = f"a host that claims, without proof, to be {self.named(message.node)} says"
            self.on_problem(f"{claim}: {said}. {SECRET_REMEDY}")

    def joined(self, node: int) -> None:
        self.gone.pop(node, None)

    def left(self, node: int) -> None:
        if node not in self.ends and node != self.place.node and self.place.secret:
            self.gone.setdefault(node, self._went_away(node))
            if self.place.node == 0:
                self.say(Gone(lost=node))

    def _went_away(self, node: int) -> Mapping[str, Any]:
        remedy = "Check whether it was rebooted, or its processes were killed by a user or because memory ran out"
        cause = Cause.now(NETWORK, "it disconnected without giving a reason", remedy, Strength.WAITED)
        end = {"node": node, "nnodes": self.place.nodes, "host": self.hosts.get(node, "?"), "ended": None}
        said = {"status": cause.status, "reason": cause.reason, "remedy": remedy, "cause": asdict(cause)}
        return end | said | {"signal": None}

    def cannot_listen(self, error: OSError) -> None:
        self.on_problem(
            f"cannot listen on port {self.place.port} ({error.strerror}): when a node fails, the others will not learn"
            " why. It is MASTER_PORT + 1000, so choose another MASTER_PORT"
        )

    def unanswered(self, error: StrangerError) -> None:
        if isinstance(error, ProofError):
            self.unproven(self.place.address)

    def unproven(self, address: str) -> None:
        self._strangers += 1
        if self._strangers <= MOST_STRANGERS:
            last = "; further ones are not shown" if self._strangers == MOST_STRANGERS else ""
            self.on_problem(f"{address} names this run but has another secret, so it is ignored{last}. {SECRET_REMEDY}")

    def beat(self) -> Message:
        return Alive(ages=self._ages() if self.place.node == 0 else {})

    def _compare(self, node: int) -> None:
        if node == 0 or not {0, node} <= self._parts.keys():
            return
        try:
            found = self.compare(self._parts[0], self._parts[node])
        except (LookupError, TypeError, ValueError, AttributeError):
            found = [f"{self.named(node)} runs a different version of this repository"]
        self._differ(found)

    def _differ(self, sentences: Sequence[str]) -> None:
        with self.lock:
            new = [sentence for sentence in sentences if sentence not in self.differences]
            self.differences += new
            if new and self.place.node == 0:
                self.declare(Differences(sentences=list(self.differences)))
        if new:
            self.on_differences(new)

    @property
    def sees_progress(self) -> bool:
        """Whether a lack of progress means something: the last node has the iteration lines, node 0 passes them on."""
        last = self.place.nodes - 1
        source = last if self.place.node == 0 else 0
        age = self._ages().get(source, float("inf"))
        return self.place.node == last or (bool(self.place.secret) and age < channel.SILENT_SECONDS)

    def silent(self) -> dict[int, float]:
        """Nodes that have neither ended nor disconnected but are silent (no power or network), and for how long."""
        over = self.ends.keys() | self.gone.keys()
        found = {n: age for n, age in self._ages().items() if age >= channel.SILENT_SECONDS and n not in over}
        # Messages from the others pass through node 0.
        return {0: found[0]} if 0 in found else found

    def _ages(self) -> dict[int, float]:
        now = time.monotonic()
        return {node: now - heard for node, heard in dict(self.heard).items()}

    def of_silence(self) -> str:
        """Which nodes are silent, to end a sentence about a node that waited for others."""
        silent = self.silent()
        return "".join(f"; {self.named(node)} has been silent for {silent[node]:.0f} s" for node in sorted(silent))

    def wait_for_ends(self, seconds: float, enough: Callable[[Mapping[int, Mapping[str, Any]]], bool]) -> None:
        """Waits until the others have said enough, nobody is left who could say more, or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough(self.ends) and not self.hurry.is_set():
            if not self._may_say_more():
                return
            time.sleep(0.1)

    def _may_say_more(self) -> bool:
        """Whether a node may still report. One that never connected will not, and without node 0 nobody is heard."""
        over = self.ends.keys() | self.gone.keys() | self._advised
        silent = self.silent().keys()
        if self.place.node == 0:
            return not self.heard.keys() <= over | silent
        return 0 in self.heard and 0 not in silent and (0 in self.connections or 0 not in over)
