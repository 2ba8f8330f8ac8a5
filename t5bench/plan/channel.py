"""The channel between the nodes of a run: node 0 listens, the others connect to it, and each message is a line of JSON.

A lost connection is made again, and ends nothing by itself. ``_encode`` and ``_decode`` alone know what a message looks
like on the wire and who may send one.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from t5bench.record.plan import Plan

RETRY_SECONDS = 1.0
BEAT_SECONDS = 2.0
# A node without power or cable says nothing. After so many seconds it counts as silent and its connection as lost.
SILENT_SECONDS = 10.0
# Far more than any record needs: a stranger on the port shall not fill the memory.
LONGEST_LINE = 1 << 20

Message = dict[str, Any]


class StrangerError(ValueError):
    """The other side is not a node of this attempt at this run."""


class AnotherRunError(StrangerError):
    """The other side is a node of another run."""


@dataclass(frozen=True)
class Place:
    """This node among a run's, and where node 0 listens. ``run`` tells a run from another that uses the same port."""

    node: int
    nodes: int
    address: str
    port: int
    run: str

    @classmethod
    def of(cls, plan: Plan, port: int) -> "Place":
        assert plan.layout
        run = f"{plan.strategy.name} with {plan.engine} at {plan.master_address}:{port}, {plan.layout}"
        return cls(plan.node, plan.layout.nnodes, plan.master_address, port, run)


class Channel:
    """The other nodes of a run. A subclass says what it does with their messages: see the methods under "hearing".

    A random word of node 0, ``attempt``, tells one attempt at a run from the next.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.attempt = uuid.uuid4().hex if place.node == 0 else None
        self.hosts: dict[int, str] = {}
        self.heard: dict[int, float] = {}  # when a node last said something (monotonic seconds)
        self.lock = threading.RLock()
        self.connections: dict[int, socket.socket] = {}
        self.closed = threading.Event()
        # Set: node 0 takes no node that is new, the others do not connect again.
        self.over = threading.Event()
        self.listener: socket.socket | None = None
        self._declared: dict[str, Message] = {}

    def start(self) -> None:
        if self.place.nodes > 1:
            for work in (self._listen if self.place.node == 0 else self._connect, self._beat):
                threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        with self.lock:
            for connection in self.connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self.listener:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts takes one more
            self.listener.close()

    # ---- hearing: what a subclass overrides, called from threads -----------------------------------------------------

    def hear(self, message: Message) -> None:
        """A message of this run: kind, node, host and what the sender gave to ``say``."""

    def joined(self, node: int) -> None:
        """A connection to this node is there, perhaps again."""

    def left(self, node: int) -> None:
        """The process of this node closed its connection, as all do that end."""

    def unanswered(self, why: str) -> None:
        """What node 0's port belongs to is not node 0 of this run."""

    def cannot_listen(self, error: OSError) -> None:
        """Node 0's port is taken, for example."""

    def beat(self) -> Message:
        """What is said with every sign of life."""
        return {}

    # ---- saying ------------------------------------------------------------------------------------------------------

    def say(self, kind: str, **content: Any) -> None:
        """To all nodes that are connected to this one: on node 0 all others, on the others node 0."""
        self.pass_on(self._message(kind, content))

    def declare(self, kind: str, **content: Any) -> None:
        """Said now, and to whoever connects later."""
        with self.lock:
            self._declared[kind] = content
            self.say(kind, **content)

    def pass_on(self, message: Message) -> None:
        """To all but its sender."""
        line = self._encode(message)
        with self.lock:
            for node, connection in self.connections.items():
                if node != message["node"]:
                    self._send(connection, line)

    def _message(self, kind: str, content: Message) -> Message:
        own = {"node": self.place.node, "run": self.place.run, "attempt": self.attempt, "host": socket.gethostname()}
        return {"kind": kind, **own, **content}

    def _send(self, connection: socket.socket, line: bytes) -> None:
        """Never waits, for the training's output waits meanwhile: a connection that takes no more counts as lost."""
        sent = 0
        with contextlib.suppress(OSError):
            sent = os.write(connection.fileno(), line)  # a socket with a timeout does not block by itself
        if sent < len(line):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        while not self.closed.wait(BEAT_SECONDS):
            self.say("alive", **self.beat())

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def _encode(self, message: Message) -> bytes:
        return json.dumps(message).encode() + b"\n"

    def _decode(self, line: bytes) -> Message:
        """Raises StrangerError."""
        try:
            message = json.loads(line)
            node, run = message["node"], message["run"]
            message["kind"], message["attempt"], message["host"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise StrangerError("it is no node of a run") from error
        if run != self.place.run:
            raise AnotherRunError(f"it belongs to another run, '{run}'")
        if not isinstance(node, int) or not 0 <= node < self.place.nodes or node == self.place.node:
            raise StrangerError(f"node {node} is not one of the other {self.place.nodes - 1}")
        return message

    def _messages(self, connection: socket.socket) -> Iterator[Message]:
        """Until the other side closes. Raises StrangerError, and OSError where the network lost the connection."""
        with connection.makefile("rb") as lines, contextlib.suppress(ConnectionResetError):
            while line := lines.readline(LONGEST_LINE):
                yield self._decode(line)

    # ---- connections -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family, port = socket.AF_INET6 if dual else socket.AF_INET, self.place.port
        try:
            self.listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=64)
        except OSError as error:
            self.cannot_listen(error)
            return
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _connect(self) -> None:
        while not self.closed.is_set() and not self.over.is_set():
            with contextlib.suppress(OSError):
                connection = socket.create_connection((self.place.address, self.place.port), timeout=5)
                self._converse(connection)
            self.closed.wait(RETRY_SECONDS)

    def _converse(self, connection: socket.socket) -> None:
        """To the end of a connection."""
        connection.settimeout(SILENT_SECONDS)
        other, closed, why = None, False, "it does not answer"
        if self.place.node != 0:
            self._send(connection, self._encode(self._message("hello", {})))
        try:
            for message in self._messages(connection):
                if other is None:
                    other = self._greet(message, connection)
                else:
                    self._take(message, other)
            closed = True
        except StrangerError as error:
            why = str(error)
            if isinstance(error, AnotherRunError) and self.place.node == 0:
                self._send(connection, self._encode(self._message("refused", {"attempt": None})))
        except OSError:
            pass
        with self.lock:
            is_current = other is not None and self.connections.get(other) is connection
            if is_current:
                del self.connections[other]
            connection.close()
        if is_current and closed and not self.closed.is_set():
            self.left(other)
        if other is None and self.place.node != 0:
            self.unanswered(why)

    def _greet(self, message: Message, connection: socket.socket) -> int:
        """The node that said hello. Raises StrangerError for who belongs to another attempt."""
        node, attempt = message["node"], message["attempt"]
        if message["kind"] != "hello" or (self.place.node != 0 and node != 0):
            raise StrangerError("it does not say hello")
        with self.lock:
            if self.place.node == 0:
                is_new = attempt is None
                if not is_new and attempt != self.attempt:
                    raise StrangerError("it belongs to an earlier attempt")
                if self.closed.is_set() or (is_new and (self.over.is_set() or node in self.connections)):
                    raise StrangerError("this attempt is over, or has this node already")
                self._send(connection, self._encode(self._message("hello", {})))
            elif self.attempt is None:
                self.attempt = attempt
            elif attempt != self.attempt:
                self.left(0)
                raise StrangerError("node 0 has begun anew")
            self.connections[node] = connection
            self._note(message)
            for kind, content in self._declared.items():
                self._send(connection, self._encode(self._message(kind, content)))
        self.joined(node)
        return node

    def _note(self, message: Message) -> None:
        self.hosts[message["node"]] = str(message["host"])
        self.heard[message["node"]] = time.monotonic()

    def _take(self, message: Message, other: int) -> None:
        """Raises StrangerError."""
        if message["attempt"] != self.attempt or (self.place.node == 0 and message["node"] != other):
            raise StrangerError("it speaks for another attempt, or for another node than before")
        self._note(message)
        try:
            self.hear(message)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StrangerError(f"it says what no node does: {error}") from error
