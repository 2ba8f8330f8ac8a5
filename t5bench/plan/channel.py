"""The channel between the nodes of a run: node 0 listens, the others connect to it, and each message is a line.

Each side first names its run in clear text and sends a random number. The run's secret and both numbers give the key of
this connection. Every further line begins with an HMAC-SHA256 of the sender's side, the line's number and its text, so
nobody without the secret can pose as a node, and a line that is repeated, omitted or from another connection is
refused. Without a secret there is no channel. A lost connection is opened again and does not end a run.
"""

import contextlib
import hmac
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from t5bench import Problem, note
from t5bench.record.hosts import Host
from t5bench.record.plan import Plan
from t5bench.text import visible_in

RETRY_SECONDS = 1.0
BEAT_SECONDS = 2.0
# A node without power or cable says nothing. After this many seconds it counts as silent and its connection as lost.
SILENT_SECONDS = 10.0
# A connection has this long to prove that it is a node. Real nodes take milliseconds, so if too many connections are
# unproven, the oldest is closed.
PROOF_SECONDS = 10.0
MOST_WAITING = 64
MOST_OF_ADDRESS = 16
LONGEST_HELLO = 1 << 14
LONGEST_LINE = 1 << 20
ALL_RESUME = "Give RESUME=1 to every node or to none"
SECRET = "T5_RUN_SECRET"
SECRET_REMEDY = (
    f"Give all nodes the same secret: export {SECRET}=$(openssl rand -hex 32) on the first, and the same value on the"
    " others; nodes with a common home directory already share one"
)


def run_secret(environment: Mapping[str, str]) -> bytes:
    """T5_RUN_SECRET, else the one in the user's home directory, which is created if missing; "" if neither works."""
    given = environment.get(SECRET)
    if given:
        return given.encode()
    path = Path(environment.get("HOME") or os.devnull, ".config", "t5-parallelism", "secret")
    with contextlib.suppress(OSError):
        if not path.exists():
            _make_secret(path)
        owner_and_mode = path.stat()
        is_private = not stat.S_IMODE(owner_and_mode.st_mode) & 0o077
        if owner_and_mode.st_uid == os.geteuid() and is_private:
            return path.read_bytes().strip()
        note(f"warning: {path} is ignored because other users can read or write it: chmod 600 {path}")
    return b""


def _make_secret(path: Path) -> None:
    """Several nodes may do this at once on a shared file system: one of them wins, and all read its secret."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as own, contextlib.suppress(FileExistsError):
        own.write(secrets.token_hex(32) + "\n")
        own.flush()
        os.link(own.name, path)


# Codes of a StrangerError.
LACKS_SECRET = "lacks-secret"  # the other side names this run but lacks its secret
OTHER_PURPOSE = "other-purpose"  # one side resumes and the other does not


class StrangerError(Problem):
    """The other side is not a node of this attempt at this run."""


class Message(msgspec.Struct, tag_field="kind", tag=str.lower, kw_only=True):
    """A message between nodes. node, host: the sender's."""

    node: Annotated[int, msgspec.Meta(ge=0)] = 0
    host: Annotated[str, msgspec.Meta(max_length=253)] = ""


class Hello(Message):
    """Each side's first message. attempt: node 0's random word; None from a node that does not know it yet."""

    attempt: str | None
    purpose: str
    """As the channel's."""


class Refused(Message):
    """From node 0. A node with another secret learns of that, too, because it cannot verify this."""

    why: str
    code: str = ""
    """Of a StrangerError."""


class Alive(Message):
    """A sign of life of a node's process."""

    ages: dict[int, float] = {}
    """How many seconds ago node 0 heard of each node; empty from the others."""
    hosts: dict[int, str] = {}
    """Their names, which only node 0 hears from each; empty from the others."""
    idle: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """How many seconds ago the training went on, as far as the sender knows; None if this is about something else."""


class _Greeting(msgspec.Struct):
    run: str
    nonce: Annotated[str, msgspec.Meta(min_length=32, max_length=32)]


@dataclass(frozen=True)
class Endpoint:
    """This node's place in a run, and where node 0 listens. ``run`` distinguishes runs that use the same port."""

    node: int
    nodes: int
    address: str
    port: int
    run: str
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, plan: Plan, port: int) -> "Endpoint":
        assert plan.layout
        # Whoever meets at one port is meant to be one run: run/agreement.py compares what the nodes train.
        run = f"the run at port {port}"
        # One node alone listens too if others can reach it: they may take it for theirs.
        may_be_met = plan.layout.nnodes > 1 or not Host.of(plan.master_address).names_itself
        secret = run_secret(os.environ) if may_be_met else b""
        return cls(plan.node, plan.layout.nnodes, plan.master_address, port, run, secret)


class Connection:
    """Lines to and from one other place. Until it has proved that it is a node, it may send only little and briefly."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.file = stream.makefile("rb")
        self.nonce = secrets.token_hex(16)
        self.key = b""
        self.address = str(stream.getpeername()[0]).removeprefix("::ffff:")
        self.opened = time.monotonic()
        self.longest = LONGEST_HELLO
        self.sent = self.received = 0

    def proof(self, is_from_node_0: bool, number: int, body: bytes) -> bytes:
        return hmac.digest(self.key, b"%d %d " % (is_from_node_0, number) + body, "sha256").hex().encode()

    def send(self, line: bytes) -> None:
        """Never waits, because the training's output would wait too: a connection with a full buffer counts as lost."""
        sent = 0
        with contextlib.suppress(OSError):
            sent = os.write(self.stream.fileno(), line + b"\n")  # a socket with a timeout does not block by itself
        if sent <= len(line):
            self.shut()

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def lines(self) -> Iterator[bytes]:
        """Reads until the other side closes. Raises StrangerError, and OSError if the network lost the connection."""
        self.stream.settimeout(SILENT_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while (line := self.file.readline(self.longest)).endswith(b"\n"):
                yield line[:-1]
            if len(line) == self.longest:
                raise StrangerError("it sent a line that is too long")

    def close(self) -> None:
        self.file.close()
        self.stream.close()


class Channel:
    """The other nodes of a run. A subclass says what it does with their messages: see the methods under "hearing".

    ``attempt``, a random word of node 0, distinguishes attempts at a run. kinds: the subclass's messages. purpose: what
    its nodes do, to end a sentence.
    """

    kinds: ClassVar[Any] = Alive
    purpose: ClassVar[str] = "trains"

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.attempt = secrets.token_hex(16) if endpoint.node == 0 else None
        self.hosts: dict[int, str] = {}
        self.heard: dict[int, float] = {}  # when each node last said something (monotonic seconds)
        self.lock = threading.RLock()
        self.connections: dict[int, Connection] = {}
        self.closed = threading.Event()
        # Once set, node 0 accepts no new node and the others do not reconnect.
        self.over = threading.Event()
        self.listener: socket.socket | None = None
        self._waiting: list[Connection] = []  # unproven connections, the oldest first
        self._declared: dict[type, Message] = {}

    def start(self) -> None:
        if self.endpoint.secret:
            for work in (self._listen if self.endpoint.node == 0 else self._connect, self._beat):
                threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        with self.lock:
            for connection in (*self.connections.values(), *self._waiting):
                connection.shut()
        if self.listener:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts takes one more
            self.listener.close()

    # ---- hearing: what a subclass overrides, called from threads -----------------------------------------------------

    def hear(self, message: Any) -> None:
        """Called with each message of this run."""

    def joined(self, node: int) -> None:
        """Called when a node of this run has connected, perhaps again."""

    def left(self, node: int) -> None:
        """Called when a node's process has closed its connection, as every process does when it ends."""

    def met_stranger(self, address: str, error: StrangerError) -> None:
        """Called if node 0's port is not that of this run, and on node 0 if someone has another secret or purpose."""

    def cannot_listen(self, error: OSError) -> None:
        """Called when node 0 cannot listen, for example because its port is taken."""

    # ---- saying ------------------------------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        """Sends to all nodes that are connected to this one: from node 0 to all others, from the others to node 0."""
        self.pass_on(self._own(message))

    def declare(self, message: Message) -> None:
        """Sends a message now, and to every node that connects later."""
        with self.lock:
            self._declared[type(message)] = self._own(message)
            self.say(message)

    def pass_on(self, message: Message) -> None:
        """Sends a message to all nodes except its sender."""
        with self.lock:
            for node, connection in self.connections.items():
                if node != message.node:
                    self._send(connection, message)

    def _own(self, message: Message) -> Message:
        message.node = self.endpoint.node
        message.host = socket.gethostname()
        return message

    def ages(self) -> dict[int, float]:
        """How many seconds ago each node was last heard of."""
        now = time.monotonic()
        return {node: now - heard for node, heard in dict(self.heard).items()}

    def beat(self) -> Alive:
        """What is said every BEAT_SECONDS; a subclass may add to it."""
        return Alive(ages=self.ages(), hosts=dict(self.hosts)) if self.endpoint.node == 0 else Alive()

    def _beat(self) -> None:
        while not self.closed.wait(BEAT_SECONDS):
            self.say(self.beat())
            with self.lock:
                for connection in self._waiting:
                    if time.monotonic() - connection.opened > PROOF_SECONDS:
                        connection.shut()

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def _send(self, connection: Connection, message: Message) -> None:
        body = msgspec.json.encode(message)
        connection.send(connection.proof(self.endpoint.node == 0, connection.sent, body) + b" " + body)
        connection.sent += 1

    @staticmethod
    def _read(text: bytes, kind: Any) -> Any:
        try:
            return msgspec.convert(visible_in(msgspec.json.decode(text)), kind, str_keys=True)
        except (ValueError, RecursionError) as error:
            raise StrangerError(f"it sent a malformed message: {error}") from error

    def _messages(self, connection: Connection) -> Iterator[Any]:
        """Reads until the other side closes. Raises StrangerError, and OSError if the network lost the connection."""
        endpoint = self.endpoint
        connection.send(msgspec.json.encode(_Greeting(endpoint.run, connection.nonce)))
        for line in connection.lines():
            if connection.key:
                proof, _, body = line.partition(b" ")
                if not hmac.compare_digest(proof, connection.proof(endpoint.node != 0, connection.received, body)):
                    raise StrangerError("it did not prove that it belongs to this run", SECRET_REMEDY, LACKS_SECRET)
                connection.received += 1
                yield self._read(body, Hello | Refused | self.kinds)
                continue
            greeting = self._read(line, _Greeting)
            if greeting.run != endpoint.run:
                raise StrangerError(f"it belongs to another run, '{greeting.run[:300]}'")
            nonces = (connection.nonce, greeting.nonce) if endpoint.node == 0 else (greeting.nonce, connection.nonce)
            connection.key = hmac.digest(endpoint.secret, "\n".join((endpoint.run, *nonces)).encode(), "sha256")
            if endpoint.node != 0:
                self._send(connection, self._own(Hello(attempt=self.attempt, purpose=self.purpose)))

    # ---- connections -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        port = self.endpoint.port
        try:
            self.listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=128)
        except OSError as error:
            self.cannot_listen(error)
            return
        while not self.closed.is_set():
            try:
                connection = Connection(self.listener.accept()[0])
                self._make_room_for(connection)
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no file descriptor or thread is left, or the other side has gone already
                self.closed.wait(0.1)

    def _connect(self) -> None:
        while not self.closed.is_set() and not self.over.is_set():
            with contextlib.suppress(OSError):
                connection = Connection(
                    socket.create_connection((self.endpoint.address, self.endpoint.port), timeout=5)
                )
                self._make_room_for(connection)
                self._converse(connection)
            self.closed.wait(RETRY_SECONDS)

    def _make_room_for(self, new: Connection) -> None:
        """Closes the oldest unproven connections if there are too many; returns once their threads have let them go."""
        with self.lock:
            self._waiting.append(new)
            of_address = [each for each in self._waiting if each.address == new.address]
            for old in {*of_address[:-MOST_OF_ADDRESS], *self._waiting[:-MOST_WAITING]}:
                old.shut()
        while len(self._waiting) > 2 * MOST_WAITING and not self.closed.is_set():
            time.sleep(0.01)

    def _converse(self, connection: Connection) -> None:
        """Serves a connection until it ends."""
        other = None
        closed = False
        why = StrangerError("it does not answer")
        try:
            for message in self._messages(connection):
                if other is None:
                    other = self._greet(message, connection)
                    self.joined(other)
                elif message.node >= self.endpoint.nodes or (self.endpoint.node == 0 and message.node != other):
                    raise StrangerError("it claims to be another node than before")
                else:
                    self._note(message)
                    self.hear(message)
            closed = True
        except StrangerError as error:
            why = error
            if self.endpoint.node == 0 and connection.key:
                with self.lock:
                    self._send(connection, self._own(Refused(why=error.found, code=error.code)))
        except OSError:
            pass
        with self.lock:
            if connection in self._waiting:
                self._waiting.remove(connection)
            is_current = other is not None and self.connections.get(other) is connection
            if is_current:
                del self.connections[other]
            connection.close()
        if is_current and closed and not self.closed.is_set():
            self.left(other)
        if other is None and (self.endpoint.node != 0 or why.code):
            self.met_stranger(connection.address, why)

    def _greet(self, message: Message, connection: Connection) -> int:
        """The node that sent the greeting. Raises StrangerError if it belongs to another attempt."""
        node = message.node
        if isinstance(message, Refused):
            remedy = ALL_RESUME if message.code == OTHER_PURPOSE else ""
            raise StrangerError(message.why, remedy, message.code)
        if isinstance(message, Hello) and message.purpose != self.purpose:
            found = f"node {node} ({message.host}) {message.purpose}, and node {self.endpoint.node} {self.purpose}"
            raise StrangerError(found, ALL_RESUME, OTHER_PURPOSE)
        if not isinstance(message, Hello) or node >= self.endpoint.nodes or (node == 0) == (self.endpoint.node == 0):
            raise StrangerError("it sent no greeting")
        with self.lock:
            if self.endpoint.node == 0:
                is_new = message.attempt is None
                if not is_new and message.attempt != self.attempt:
                    raise StrangerError("it belongs to an earlier attempt")
                if self.closed.is_set() or (is_new and (self.over.is_set() or node in self.connections)):
                    raise StrangerError("this attempt has ended or already has this node")
                self._send(connection, self._own(Hello(attempt=self.attempt, purpose=self.purpose)))
            elif self.attempt not in (None, message.attempt):
                self.left(0)
                raise StrangerError("node 0 was restarted")
            self.attempt = self.attempt or message.attempt
            connection.longest = LONGEST_LINE
            self._waiting.remove(connection)
            self.connections[node] = connection
            self._note(message)
            for declared in self._declared.values():
                self._send(connection, declared)
        return node

    def _note(self, message: Message) -> None:
        self.hosts[message.node] = message.host
        self.heard[message.node] = time.monotonic()
