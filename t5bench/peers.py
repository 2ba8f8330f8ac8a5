"""The recorders of a run's nodes tell each other what no node sees alone: that training goes on, and how a node ended.

Node 0 listens beside the rendezvous port, the others connect to it, and it passes on what they say. A node that cannot
connect goes without: its own output, its process group's timeout and its own watchdog still end it.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

# Above the ports of all strategies, and of the ones that a user moves a run to.
PORT_OFFSET = 1000
RETRY_SECONDS = 1.0
# A node without power says nothing: after these its connection counts as lost.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

Message = dict[str, Any]


def peer_port(master_port: int) -> int:
    port = master_port + PORT_OFFSET
    return port if port < 1 << 16 else master_port - PORT_OFFSET


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Peers:
    """What this node knows of the others. ``run`` tells one run's messages from another's."""

    def __init__(self, node: int, nodes: int, address: str, port: int, run: str) -> None:
        self.node, self.nodes, self.address, self.port, self.run = node, nodes, address, port, run
        self.ends: dict[int, Message] = {}  # how other nodes ended, by rank
        self.gone: dict[int, float] = {}  # when a node went away without a word (monotonic seconds)
        self.hosts: dict[int, str] = {}
        self.iteration, self.progress = 0, time.monotonic()
        self.lock = threading.Lock()
        self.connections: dict[int, socket.socket] = {}
        self.closed = threading.Event()
        self.listener: socket.socket | None = None
        if nodes > 1:
            work = self._listen if node == 0 else self._connect
            threading.Thread(target=work, daemon=True).start()

    # -- saying ----------------------------------------------------------------------------------------------------

    def say(self, kind: str, **content: Any) -> None:
        """To all other nodes."""
        self._pass_on({"kind": kind, "node": self.node, "run": self.run, "host": socket.gethostname(), **content})

    def progressed(self, iteration: int) -> None:
        """An iteration line came on this node; said at most once a second."""
        now = time.monotonic()
        said, self.progress, self.iteration = self.progress, now, iteration
        if now - said >= 1 or iteration <= 1:
            self.say("progress", iteration=iteration)

    def _pass_on(self, message: Message, but: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self.lock:
            for node, connection in self.connections.items():
                if node != but:
                    with contextlib.suppress(OSError):
                        connection.sendall(line)

    # -- hearing ---------------------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        node, kind = message["node"], message["kind"]
        self.hosts[node] = message.get("host", "?")
        self.gone.pop(node, None)
        if kind == "progress":
            self.progress, self.iteration = time.monotonic(), message["iteration"]
        elif kind == "end":
            self.ends[node] = message["part"]
        elif kind == "gone":
            self._lost(message["lost"])

    def _lost(self, node: int) -> None:
        if node not in self.ends:
            self.gone.setdefault(node, time.monotonic())

    def _read(self, connection: socket.socket, on_message: Callable[[Message], None]) -> bool:
        """Until the other side closes; whether it did (True) or the network lost it (False)."""
        with contextlib.suppress(ValueError, KeyError, TypeError), connection.makefile("rb") as lines:
            try:
                for line in lines:
                    message = json.loads(line)
                    if message["run"] == self.run:
                        on_message(message)
            except (TimeoutError, OSError) as error:
                return isinstance(error, ConnectionResetError)
        return True

    # -- node 0 ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            self.listener = socket.create_server(
                ("", self.port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=self.nodes
            )
        except OSError:
            return
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                _keep_alive(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        known: list[int] = []

        def take(message: Message) -> None:
            if not known:
                known.append(message["node"])
                with self.lock:
                    self.connections[known[0]] = connection
            self._hear(message)
            self._pass_on(message, but=known[0])

        closed = self._read(connection, take)
        if known and closed and not self.closed.is_set():
            with self.lock:
                self.connections.pop(known[0], None)
            self._lost(known[0])
            self.say("gone", lost=known[0])

    # -- the others ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        while not self.closed.is_set():
            try:
                connection = socket.create_connection((self.address, self.port), timeout=5)
            except OSError:
                self.closed.wait(RETRY_SECONDS)
                continue
            connection.settimeout(None)
            _keep_alive(connection)
            with self.lock:
                self.connections = {0: connection}
            self.say("hello")
            if self._read(connection, self._hear) and not self.closed.is_set():
                self._lost(0)
            self.closed.wait(RETRY_SECONDS)

    # -- the end ---------------------------------------------------------------------------------------------------

    def wait_for_ends(self, seconds: float, enough: Callable[[Mapping[int, Message]], bool]) -> None:
        """Until every other node has ended or gone, what they said is enough, or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough(self.ends):
            if len(self.ends.keys() | self.gone.keys()) >= self.nodes - 1:
                return
            time.sleep(0.1)

    def close(self) -> None:
        self.closed.set()
        with self.lock:
            for connection in self.connections.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        if self.listener:
            self.listener.close()
