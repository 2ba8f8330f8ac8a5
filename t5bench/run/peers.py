"""The recorders of a run's nodes tell each other what no node sees alone: that training goes on, and how a node ended.

Node 0 listens beside the rendezvous port, the others connect to it, and it passes on what they say. A node that cannot
connect goes without: its own output, its process group's timeout and its own watchdog still end it. A lost connection
is made again, and ends nothing by itself: training survives an outage that is shorter than its process group's timeout.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RETRY_SECONDS = 1.0
BEAT_SECONDS = 2.0
# A node without power or cable says nothing. After so many seconds it counts as silent and its connection as lost.
SILENT_SECONDS = 10.0
# Far more than any record needs: a stranger on the port shall not fill the memory.
LONGEST_LINE = 1 << 20

Message = dict[str, Any]
# What another node's part says differently from this one's: (first, other) -> sentences.
Compare = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[str]]


class AnotherRunError(ValueError):
    """The other side belongs to another run, or is no recorder at all."""


class Peers:
    """What this node knows of the others.

    ``run`` tells one run's messages from another's, and a random word of node 0 one attempt at it from the next.
    ``compare`` is asked on node 0, and ``on_differences`` gets the new sentences on every node.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        address: str,
        port: int,
        run: str,
        *,
        compare: Compare = lambda first, other: [],
        on_differences: Callable[[Sequence[str]], None] = lambda sentences: None,
        on_problem: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.node, self.nodes, self.address, self.port, self.run = node, nodes, address, port, run
        self.compare, self.on_differences, self.on_problem = compare, on_differences, on_problem
        self.attempt = uuid.uuid4().hex if node == 0 else None
        self.ends: dict[int, Message] = {}  # how other nodes ended, by rank
        self.gone: dict[int, float] = {}  # when a node went away without a word (monotonic seconds)
        self.heard: dict[int, float] = {}  # when a node last said something (monotonic seconds)
        self.hosts: dict[int, str] = {}
        self.differences: list[str] = []
        self.iteration, self.progress, self.progress_said = 0, time.monotonic(), 0.0
        self.lock = threading.RLock()
        self.connections: dict[int, socket.socket] = {}
        self.closed = threading.Event()
        self.hurry = threading.Event()  # set: wait for nobody any more
        self.listener: socket.socket | None = None
        self._parts: dict[int, Message] = {}
        self._own_end: Message | None = None
        self._silent_elsewhere: dict[int, float] = {}  # what node 0 said last of the others: node -> seconds
        if nodes > 1:
            for work in (self._listen if node == 0 else self._connect, self._beat):
                threading.Thread(target=work, daemon=True).start()

    # -- saying ----------------------------------------------------------------------------------------------------

    def _message(self, kind: str, **content: Any) -> Message:
        host = socket.gethostname()
        return {"kind": kind, "node": self.node, "run": self.run, "attempt": self.attempt, "host": host, **content}

    def say(self, kind: str, **content: Any) -> None:
        """To all other nodes."""
        message = self._message(kind, **content)
        if kind == "end":
            self._own_end = message
        self._pass_on(message)

    def progressed(self, iteration: int) -> None:
        """An iteration line came on this node; said at most once a second."""
        now = time.monotonic()
        self.progress, self.iteration = now, iteration
        if now - self.progress_said >= 1:
            self.progress_said = now
            self.say("progress", iteration=iteration)

    def introduce(self, part: Message) -> None:
        """This node's part of the record, once it knows what it is; node 0 compares the others' with its own."""
        with self.lock:
            self._parts[self.node] = part
        if self.node != 0:
            self.say("part", part=part)
        else:
            for node in [node for node in self._parts if node != 0]:
                self._compare(node)

    def _pass_on(self, message: Message, but: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self.lock:
            for node, connection in self.connections.items():
                if node != but:
                    self._send(connection, line)

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
            silent = self.silent() if self.node == 0 else {}
            self.say("alive", silent={str(node): seconds for node, seconds in silent.items()})

    # -- hearing ---------------------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        node, kind = message["node"], message["kind"]
        if not isinstance(node, int) or not 0 <= node < self.nodes or node == self.node:
            raise AnotherRunError(f"node {node} is not one of {self.nodes}")
        self.hosts[node] = str(message["host"])
        self.heard[node] = time.monotonic()
        self.gone.pop(node, None)
        if kind == "progress":
            self.progress, self.iteration = time.monotonic(), message["iteration"]
        elif kind == "end":
            self.ends[node] = message["part"]
        elif kind == "gone":
            self._lost(message["lost"])
        elif kind == "alive":
            self._silent_elsewhere = {int(other): seconds for other, seconds in message["silent"].items()}
        elif kind == "part":
            with self.lock:
                self._parts[node] = message["part"]
            self._compare(node)
        elif kind == "differences":
            self._differ(message["sentences"])

    def _compare(self, node: int) -> None:
        with self.lock:
            if self.node != 0 or not {0, node} <= self._parts.keys():
                return
            try:
                found = self.compare(self._parts[0], self._parts[node])
            except (LookupError, TypeError, ValueError, AttributeError):
                found = [f"node {node} ({self.hosts.get(node, '?')}) runs another version of this repository"]
            self._differ(found)
            if found:
                self.say("differences", sentences=self.differences)

    def _differ(self, sentences: Sequence[str]) -> None:
        with self.lock:
            new = [sentence for sentence in sentences if sentence not in self.differences]
            self.differences += new
        if new:
            self.on_differences(new)

    def _lost(self, node: int) -> None:
        if node not in self.ends and node != self.node:
            self.gone.setdefault(node, time.monotonic())

    def silent(self) -> dict[int, float]:
        """Nodes that neither ended nor went, and were not heard of for so many seconds: no power, no network."""
        now = time.monotonic()
        lines = range(1, self.nodes) if self.node == 0 else [0]
        found = {node: now - self.heard[node] for node in lines if node in self.heard}
        if self.node != 0 and found.get(0, SILENT_SECONDS) < SILENT_SECONDS:
            found |= self._silent_elsewhere
        return {
            node: seconds
            for node, seconds in found.items()
            if seconds >= SILENT_SECONDS and node not in self.ends and node not in self.gone and node != self.node
        }

    def _read(self, connection: socket.socket, on_message: Callable[[Message], None]) -> bool:
        """Until the other side closes; whether it did (True) or the network lost it (False).

        Raises AnotherRunError.
        """
        with connection.makefile("rb") as lines:
            try:
                while line := lines.readline(LONGEST_LINE):
                    if not line.endswith(b"\n"):
                        raise AnotherRunError("no line")
                    message = json.loads(line)
                    if message["run"] != self.run:
                        raise AnotherRunError("another run")
                    on_message(message)
            except (TimeoutError, OSError) as error:
                return isinstance(error, ConnectionResetError)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise AnotherRunError(str(error)) from error
        return True

    # -- node 0 ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            self.listener = socket.create_server(
                ("", self.port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=max(16, self.nodes)
            )
        except OSError as error:
            self.on_problem(
                f"port {self.port} cannot be listened on ({error.strerror}): when a node fails, the others will not"
                " tell why. The port is MASTER_PORT's and follows it"
            )
            return
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(SILENT_SECONDS)
        known: list[int] = []

        def take(message: Message) -> None:
            if not known:
                self._welcome(message, connection)
                known.append(message["node"])
            elif message["attempt"] != self.attempt:
                raise AnotherRunError("an earlier attempt")
            self._hear(message)
            if message["kind"] not in ("alive", "part", "hello"):
                self._pass_on(message, but=known[0])

        closed = False
        with contextlib.suppress(AnotherRunError):
            closed = self._read(connection, take)
        with self.lock:
            is_current = bool(known) and self.connections.get(known[0]) is connection
            if is_current:
                del self.connections[known[0]]
            connection.close()
        if is_current and closed and not self.closed.is_set():
            self._lost(known[0])
            if known[0] in self.gone:
                self.say("gone", lost=known[0])

    def _welcome(self, message: Message, connection: socket.socket) -> None:
        """Raises AnotherRunError for who belongs to an earlier attempt, or comes when this one is over."""
        is_new = message["attempt"] is None
        if message["kind"] != "hello" or not (is_new or message["attempt"] == self.attempt):
            raise AnotherRunError("an earlier attempt")
        if self.closed.is_set() or (is_new and self._own_end):
            raise AnotherRunError("this attempt is over")
        with self.lock:
            self.connections[message["node"]] = connection
            missed = [self._message("welcome"), self._own_end]
            missed += [self._message("differences", sentences=self.differences)] if self.differences else []
            for entry in missed:
                if entry:
                    self._send(connection, json.dumps(entry).encode() + b"\n")

    # -- the others ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        while not self.closed.is_set() and 0 not in self.ends:
            try:
                connection = socket.create_connection((self.address, self.port), timeout=5)
            except OSError:
                self.closed.wait(RETRY_SECONDS)
                continue
            connection.settimeout(SILENT_SECONDS)
            self._talk(connection)
            self.closed.wait(RETRY_SECONDS)

    def _talk(self, connection: socket.socket) -> None:
        welcome = False

        def take(message: Message) -> None:
            nonlocal welcome
            if not welcome:
                self._join(message, connection)
                welcome = True
            self._hear(message)

        with self.lock:
            self._send(connection, json.dumps(self._message("hello")).encode() + b"\n")
        closed = False
        with contextlib.suppress(AnotherRunError):
            closed = self._read(connection, take)
        with self.lock:
            self.connections.pop(0, None)
            connection.close()
        if closed and welcome and not self.closed.is_set():
            self._lost(0)

    def _join(self, message: Message, connection: socket.socket) -> None:
        """Raises AnotherRunError when node 0 has begun anew since this node's training began."""
        if message["kind"] != "welcome":
            raise AnotherRunError("no welcome")
        if message["attempt"] != self.attempt and self.attempt is not None:
            self._lost(0)
            raise AnotherRunError("a later attempt")
        with self.lock:
            self.attempt = message["attempt"]
            self.connections = {0: connection}
            if self.node in self._parts:
                self.say("part", part=self._parts[self.node])
            if self._own_end:
                self._pass_on(self._own_end | {"attempt": self.attempt})

    # -- the end ---------------------------------------------------------------------------------------------------

    def wait_for_ends(self, seconds: float, enough: Callable[[Mapping[int, Message]], bool]) -> None:
        """Until what the others said is enough, nobody is left who could say more, or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough(self.ends) and not self.hurry.is_set():
            if not self._may_say_more():
                return
            time.sleep(0.1)

    def _may_say_more(self) -> bool:
        """Whether there is a node to wait for: one never heard of is not, and without node 0 nothing is passed on."""
        over = self.ends.keys() | self.gone.keys()
        silent = self.silent().keys()
        if self.node == 0:
            return not self.heard.keys() <= over | silent
        return 0 in self.heard and 0 not in silent and (0 in self.connections or 0 not in over)

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
