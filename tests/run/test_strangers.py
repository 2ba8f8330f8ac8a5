"""Who may say what on the port of a run, against a real listener: a stranger, a hostile node, and a node by mistake.

The wire is written here again, from the channel's description and not from its code.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from harness import wait_for
from made_runs import made_plan

from t5bench import Problem
from t5bench.plan import channel
from t5bench.plan.channel import MOST_WAITING, Place
from t5bench.plan.ports import free_port
from t5bench.plan.resume import View, agreed
from t5bench.run.guard import Guard, Stacks
from t5bench.run.peers import MOST_STRANGERS, Peers

HOST, RUN, SECRET = "127.0.0.1", "a run", b"the secret of the run"
CONTROL = "\x1b[2J\x1b]0;title\x07\x9b31m\rddp: complete\u202e"
CAUSE = {"status": "crashed", "strength": 3, "reason": "it broke", "remedy": "", "time": 1.0, "line": "", "rank": None}
END = {"node": 1, "nnodes": 2, "host": "x", "status": "crashed", "reason": "it broke", "remedy": "", "cause": CAUSE}
END |= {"signal": None, "ended": "2026-01-01T00:00:00.000Z"}


class Speaker:
    """Sends the given messages as node 1."""

    def __init__(self, port: int, secret: bytes = SECRET, run: str = RUN) -> None:
        wait_for(lambda: not socket.socket().connect_ex((HOST, port)))
        self.socket = socket.create_connection((HOST, port), timeout=20)
        self.lines = self.socket.makefile("rb")
        theirs, own = json.loads(self.lines.readline()), secrets.token_hex(16)
        self.say(json.dumps({"run": run, "nonce": own}).encode())
        self.key = hmac.new(secret, f"{run}\n{theirs['nonce']}\n{own}".encode(), hashlib.sha256).digest()
        self.number = 0

    def say(self, line: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(line + b"\n")

    def line(self, kind: str, number: int, **content: object) -> bytes:
        body = json.dumps({"kind": kind, "node": 1, "host": "x", **content}).encode()
        return hmac.new(self.key, b"0 %d " % number + body, hashlib.sha256).hexdigest().encode() + b" " + body

    def tell(self, kind: str, **content: object) -> "Speaker":
        self.say(self.line(kind, self.number, **content))
        self.number += 1
        return self

    def until_closed(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            return self.lines.read()
        return b""


class Listener:
    """Node 0 of a run of two nodes, and what it says on the terminal."""

    def __init__(self, secret: bytes) -> None:
        self.port, self.said = free_port(), list[str]()
        self.peers = Peers(Place(0, 2, HOST, self.port, RUN, secret), warn=self.said.append)

    def hears_node_1(self) -> bool:
        """Whether the true node 1 can say how it ended."""
        with contextlib.closing(Peers(Place(1, 2, HOST, self.port, RUN, SECRET))) as node:
            node.ended(END | {"status": "complete", "cause": None})
            wait_for(lambda: 1 in self.peers.ends, 15)
        return self.peers.ends[1]["status"] == "complete"


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Listener]]:
    monkeypatch.setattr(channel, "RETRY_SECONDS", 0.05)
    with contextlib.ExitStack() as stack:

        def start(secret: bytes = SECRET) -> Listener:
            listener = Listener(secret)
            stack.callback(listener.peers.close)
            return listener

        yield start


STRANGERS = {
    "no protocol": lambda port: Speaker(port).say(b"GET / HTTP/1.1\r\n\r\n"),
    "the old protocol": lambda port: Speaker(port).say(json.dumps({"kind": "hello", "node": 1, "run": RUN}).encode()),
    "no secret": lambda port: Speaker(port, b"").tell("hello", attempt=None).tell("ended", part=END),
    "another secret": lambda port: Speaker(port, b"guess").tell("hello", attempt=None).tell("ended", part=END),
    "another run": lambda port: Speaker(port, run="another").tell("hello", attempt=None),
    "deep": lambda port: Speaker(port).say(b"[" * 4000),
    "long": lambda port: Speaker(port).say(b"x" * 500_000),
}


def test_a_stranger_ends_nothing(listen):
    listener = listen()
    for name, attack in STRANGERS.items():
        for _ in range(2 * MOST_STRANGERS):
            attack(listener.port)
        time.sleep(0.3)
        assert not listener.peers.ends and not listener.peers.gone and not listener.peers.connections, name
    assert listener.hears_node_1()
    assert len(listener.said) <= MOST_STRANGERS and len("".join(listener.said)) < 2000


NODES = {
    "replay": lambda node: node.say(node.line("ended", 0, part=END)),
    "left out": lambda node: node.say(node.line("ended", node.number + 1, part=END)),
    "changed": lambda node: node.say(node.line("ended", node.number, part=END).replace(b"broke", b"burnt")),
    "no status": lambda node: node.tell("ended", part=END | {"status": "on fire"}),
    "no cause": lambda node: node.tell("ended", part=END | {"cause": {"time": "soon"}}),
    "no part": lambda node: node.tell("ended", part=[]),
    "no kind": lambda node: node.tell("shutdown"),
    "no node": lambda node: node.tell("ended", part=END, node=7),
    "for node 0": lambda node: node.tell("ended", part=END, node=0),
    "endless": lambda node: node.say(b"x" * (2 << 20)),
}


def test_invalid_messages_are_refused_and_the_guard_continues(listen, tmp_path):
    """From a node that has the secret: a faulty program, or a line that somebody changed on its way."""
    listener, plan = listen(), made_plan(settings={"WATCHDOG_SECONDS": "0", "RENDEZVOUS_TIMEOUT": "60"})
    guard = Guard(plan, os.getppid(), "none", listener.peers, Stacks(tmp_path / "stack"))
    for name, attack in NODES.items():
        node = Speaker(listener.port).tell("hello", attempt=None)
        wait_for(lambda: 1 in listener.peers.connections)
        attack(node)
        node.until_closed()
        wait_for(lambda: 1 not in listener.peers.connections)
        assert not listener.peers.ends, name
    time.sleep(1.5)
    assert guard.thread.is_alive() and guard.cause is None
    guard.finish()


def test_control_characters_of_a_node_are_made_visible(listen):
    listener = listen()
    node = Speaker(listener.port).tell("hello", attempt=None, host=f"x{CONTROL}")
    node.tell("ended", part=END | {"reason": CONTROL, "host": CONTROL, "cause": CAUSE | {"reason": CONTROL}})
    wait_for(lambda: 1 in listener.peers.ends)
    assert all(line.isprintable() for line in str(listener.peers.ends[1]).splitlines())
    assert r"\x1b[2J\x1b]0;title\x07\x9b31m\rddp: complete\u202e" in listener.peers.ends[1]["reason"]


def test_without_a_secret_nobody_listens(listen):
    listener = listen(b"")
    assert len(listener.said) == 1 and "T5_RUN_SECRET" in listener.said[0]
    assert socket.socket().connect_ex((HOST, listener.port)) and not listener.peers.sees_progress


# In a separate process, because the listener's must have no file descriptor left.
SLOW = """
import socket, sys, time
found = []
while len(found) < 1020:
    try: found.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5))
    except OSError: time.sleep(0.01)
print("ready", flush=True)
while True:
    for each in found:
        try: each.send(b"[")
        except OSError: pass
    time.sleep(2)
"""


def test_slow_connections_do_not_block_the_listener(listen):
    listener, limits = listen(), resource.getrlimit(resource.RLIMIT_NOFILE)
    attacker = subprocess.Popen([sys.executable, "-c", SLOW, str(listener.port)], stdout=subprocess.PIPE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (350, limits[1]))
    try:
        assert attacker.stdout.readline() == b"ready\n"
        assert listener.hears_node_1()
        assert threading.active_count() < 2 * MOST_WAITING + 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        attacker.kill()
        attacker.wait()


def test_an_error_in_accept_does_not_end_the_listener(listen, monkeypatch: pytest.MonkeyPatch):
    accept, left = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED, errno.ENOBUFS]

    def fail(self: socket.socket) -> tuple:
        if left:
            raise OSError(left.pop(), "accept")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail)
    assert listen().hears_node_1() and not left


def trickle(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.send(b"[")
            time.sleep(0.2)


def start_agreeing(found: dict[int, object], node: int, port: int, secret: bytes, seconds: float) -> threading.Thread:
    """A node that resumes; found[node] becomes the iteration, or the problem."""

    def take_part() -> None:
        try:
            found[node] = agreed(Place(node, 2, HOST, port, RUN, secret), VIEW, lambda _: VIEW, seconds)
        except Problem as problem:
            found[node] = problem

    thread = threading.Thread(target=take_part)
    thread.start()
    return thread


VIEW = View(10, "", "here")


def test_a_slow_stranger_does_not_delay_a_resume(listen):
    port, results = free_port(), {}
    first = start_agreeing(results, 0, port, SECRET, 30)
    for _ in range(40):
        threading.Thread(target=trickle, args=(Speaker(port, b"guess").socket,), daemon=True).start()
    start = time.monotonic()
    for thread in (first, start_agreeing(results, 1, port, SECRET, 30)):
        thread.join(25)
    assert results == {0: 10, 1: 10} and time.monotonic() - start < 20


@pytest.mark.parametrize("greeting", [b"", b'{"run": "a run", "nonce": "%s"}\n' % (b"0" * 32)], ids=["none", "slow"])
def test_a_false_node_0_does_not_delay_a_resume(monkeypatch: pytest.MonkeyPatch, greeting: bytes):
    """Somebody on the master has taken its port, and sends a byte now and then."""
    monkeypatch.setattr(channel, "PROOF_SECONDS", 1)
    with socket.create_server((HOST, 0)) as server:
        found: dict[int, object] = {}
        node = start_agreeing(found, 1, server.getsockname()[1], SECRET, 20)
        connection, _ = server.accept()
        connection.send(greeting)
        threading.Thread(target=trickle, args=(connection,), daemon=True).start()
        node.join(30)
    assert "did not say which checkpoint to resume from: it d" in str(found[1])


def test_a_node_with_another_secret_is_warned_and_named(listen):
    port, found = free_port(), {}
    for thread in [start_agreeing(found, node, port, secret, 2) for node, secret in enumerate((SECRET, b"another"))]:
        thread.join(20)
    assert str(found[1]).endswith("it did not prove that it belongs to this run")
    assert str(found[0]).endswith("; 127.0.0.1 has another secret and was ignored")
    assert all("T5_RUN_SECRET" in problem.remedy for problem in found.values())
