"""The recorders' channel, over real sockets on this machine, and who may say what on it.

For strangers and hostile nodes the wire is written here again, from the channel's description and not from its code.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import wait_for

from t5bench import Problem
from t5bench.plan import channel
from t5bench.plan.channel import MOST_OF_ADDRESS, MOST_WAITING, Endpoint, run_secret
from t5bench.plan.ports import free_port
from t5bench.plan.resume import View, agreed
from t5bench.run.peers import MOST_STRANGERS, Introduced, Peers

HOST, RUN, SECRET = "127.0.0.1", "a run", b"the secret of the run"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch):
    for name in ("RETRY_SECONDS", "BEAT_SECONDS"):
        monkeypatch.setattr(channel, name, 0.05)


@pytest.fixture
def soon_silent(monkeypatch: pytest.MonkeyPatch):
    """Only where silence is the matter: on a busy machine, a node may get no processor for as long."""
    monkeypatch.setattr(channel, "SILENT_SECONDS", 0.5)


@pytest.fixture
def peer() -> Iterator:
    """peer(1, 3): the recorder of node 1 of 3."""
    own_port = free_port()
    with contextlib.ExitStack() as stack:

        def start(node: int, nodes: int, port: int = own_port, host: str = HOST, secret: bytes = SECRET, **options):
            return stack.enter_context(
                contextlib.closing(Peers(Endpoint(node, nodes, host, port, RUN, secret), **options))
            )

        yield start


@pytest.fixture
def nodes(peer) -> Callable[..., list[Peers]]:
    """nodes(3): the recorders of three nodes that have heard of node 0."""

    def start(count: int, **options) -> list[Peers]:
        started = [peer(node, count, **options) for node in range(count)]
        wait_for(lambda: len(started[0].connections) == count - 1)
        wait_for(lambda: all(0 in each.heard for each in started[1:]))
        return started

    return start


def end(node: int, status: str = "crashed") -> dict:
    said = {"reason": "", "remedy": "", "cause": None, "signal": None, "nnodes": 3, "ended": None}
    return {"node": node, "host": f"node{node}", "status": status, **said}


@pytest.mark.parametrize(("count", "host"), [(3, HOST), (8, HOST), (2, "::1")])
def test_every_node_hears_of_every_iteration_and_end(nodes, count: int, host: str):
    everyone = nodes(count, host=host)
    before = everyone[0].progress
    everyone[-1].progressed(7)
    wait_for(lambda: all(each.iteration == 7 for each in everyone))
    assert everyone[0].progress > before
    for node, each in enumerate(everyone):
        each.ended(end(node))
    wait_for(lambda: all(len(each.ends) == count - 1 for each in everyone))
    assert everyone[-1].ends[0] == end(0)
    assert everyone[0].ends[1] == end(1)


def test_a_node_knows_whether_missing_progress_means_something(soon_silent, nodes, peer):
    first, second, third = nodes(3)
    assert first.sees_progress and second.sees_progress and third.sees_progress
    third.closed.set()  # it says nothing more
    wait_for(lambda: not first.sees_progress)
    assert third.sees_progress, "it has the iteration lines itself"
    assert not peer(0, 2, port=free_port()).sees_progress, "behind a firewall"


def test_a_node_that_resumes_and_one_that_does_not_know_it_at_once():
    """The one that looks for a checkpoint ends; the other says why nobody comes."""
    port, warnings = free_port(), []
    view = View(10, "", "here", {})
    with contextlib.closing(Peers(Endpoint(0, 2, HOST, port, RUN, SECRET), warn=warnings.append)):
        began = time.monotonic()
        with pytest.raises(Problem, match="looks for a checkpoint, with RESUME=1, and node 0 trains") as caught:
            agreed(Endpoint(1, 2, HOST, port, RUN, SECRET), view, lambda _: view, 60)
        assert time.monotonic() - began < 30 and "RESUME=1 to every node or to none" in caught.value.remedy
        wait_for(lambda: warnings)
        assert "RESUME=1" in warnings[0]
    found = []

    def resume() -> None:
        with pytest.raises(Problem) as caught:
            agreed(Endpoint(0, 2, HOST, port, RUN, SECRET), view, lambda _: view, 60)
        found.append(str(caught.value))

    resuming = threading.Thread(target=resume)
    resuming.start()
    with contextlib.closing(Peers(Endpoint(1, 2, HOST, port, RUN, SECRET), warn=warnings.append)):
        resuming.join(30)
        assert "looks for a checkpoint, with RESUME=1" in found[0]
        wait_for(lambda: len(warnings) > 1)


def test_a_node_that_disconnects_without_a_word_is_gone_for_all(nodes):
    first, second, third, fourth = nodes(4)
    fourth.ended(end(3, "complete"))
    wait_for(lambda: 3 in second.ends)
    third.close()
    fourth.close()
    wait_for(lambda: list(first.gone) == list(second.gone) == [2] and list(first.connections) == [1])
    assert list(first.ends) == list(second.ends) == [3]


def test_a_lost_connection_is_restored_and_nobody_counts_as_gone(soon_silent, nodes, monkeypatch: pytest.MonkeyPatch):
    first, second, third = nodes(3)
    monkeypatch.setattr(channel, "RETRY_SECONDS", 1)  # long enough to be seen as silent before it comes back
    with second.lock:
        second.connections = {}  # nothing more is said on it, as when the cable is pulled
        second.ended(end(1))
    wait_for(lambda: 1 in first.silent() and 1 in third.silent())
    assert "; node 1 (" in third.of_silence()
    assert not first.gone
    wait_for(lambda: 1 in first.ends and 1 in third.ends)
    assert not first.silent() and not second.gone


def test_a_node_of_an_earlier_attempt_is_not_part_of_this_one(nodes, peer):
    first, second = nodes(2)
    first.close()
    wait_for(lambda: 0 in second.gone)
    again = peer(0, 2)
    second.ended(end(1))
    time.sleep(0.5)
    assert not again.ends and not again.connections and 0 in second.gone


def test_nobody_joins_an_attempt_that_is_over(nodes, peer):
    first, _, third = nodes(3)
    third.close()
    wait_for(lambda: 2 in first.gone)
    first.ended(end(0))
    late = peer(2, 3)
    time.sleep(0.5)
    assert not late.ends and not late.gone


def test_every_node_hears_a_difference_once(peer):
    told: dict[int, list[str]] = {0: [], 1: [], 2: []}
    plan = {"settings_by_role": {}, "arguments": {"extra": ""}}

    def part(node: int, torch: str) -> dict:
        facts = {"versions": {"torch": torch}, "plan": plan, "data": {}, "commits": {}, "patches": {}}
        return {"node": node, "host": f"node{node}", **facts}

    everyone = [peer(node, 3, warn=told[node].append) for node in range(3)]
    # Perhaps before it is connected.
    for node, torch in ((1, "2.4"), (0, "2.4"), (2, "2.5"), (2, "2.5")):
        everyone[node].introduce(part(node, torch))
    wait_for(lambda: all(told.values()))
    everyone[1].introduce({"another": "form"})
    wait_for(lambda: all(len(sentences) == 2 for sentences in told.values()))
    first, second = (f"the nodes of this run differ: {sentence}" for sentence in everyone[0].differences)
    assert told == {node: [first, second] for node in range(3)}
    assert "versions.torch is '2.5' on node 2 (node2), '2.4' on node 0" in first
    assert "node 1 (" in second and "runs a different version of this repository" in second


def test_a_taken_port_is_reported(peer):
    problems: list[str] = []
    with socket.create_server(("", 0)) as server:
        peer(0, 2, port=server.getsockname()[1], warn=problems.append)
        wait_for(lambda: bool(problems))
    assert "cannot listen on port" in problems[0]


def test_a_peer_that_reads_nothing_delays_nobody(nodes):
    first, second = nodes(2)
    with second.lock:  # what it reads it cannot take in
        start = time.monotonic()
        for _ in range(300):
            first.say(Introduced(part={"text": "x" * 100_000}))
        assert time.monotonic() - start < 10


def waited(peers: Peers, seconds: float = 30) -> float:
    start = time.monotonic()
    peers.wait_for_ends(seconds, lambda ends: any(entry["status"] == "crashed" for entry in ends.values()))
    return time.monotonic() - start


def test_waits_for_an_explanation_but_not_forever(nodes):
    first, second, third = nodes(3)
    assert 0.4 < waited(first, seconds=0.5) < 15
    third.ended(end(2, "complete"))
    threading.Timer(0.5, second.ended, (end(1),)).start()
    for each in (first, third):
        assert waited(each) < 15
        assert 1 in each.ends
    first.ends.clear()
    first.hurry.set()
    assert waited(first) < 15


def test_does_not_wait_for_silent_gone_or_absent_nodes(soon_silent, nodes, peer):
    first, second = nodes(2)
    second.closed.set()  # it says nothing more, and does not connect again when node 0 gives up on it
    assert waited(first) < 15  # silent
    second.close()
    wait_for(lambda: not first.connections)
    assert waited(first) < 15
    with socket.create_server((HOST, 0)) as nobody:
        assert waited(peer(1, 2, port=nobody.getsockname()[1])) < 15


# ---- strangers -------------------------------------------------------------------------------------------------------

CONTROL = "\x1b[2J\x1b]0;title\x07\x9b31m\rddp: complete\u202e"
CAUSE = {"status": "crashed", "strength": 3, "reason": "it broke", "remedy": "", "time": 1.0, "line": "", "rank": None}
END = {**end(1), "reason": "it broke", "cause": CAUSE}


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

    def wait_until_closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            self.lines.read()


@pytest.fixture
def listener(peer) -> Peers:
    """Node 0 of a run of two nodes; `said` has what it says on the terminal."""
    said: list[str] = []
    made = peer(0, 2, warn=said.append)
    made.said, made.port = said, made.endpoint.port
    return made


def hears_node_1(listener: Peers) -> bool:
    """Whether the true node 1 can say how it ended."""
    with contextlib.closing(Peers(Endpoint(1, 2, HOST, listener.port, RUN, SECRET))) as node:
        node.ended(END | {"status": "complete", "cause": None})
        wait_for(lambda: 1 in listener.ends, 15)
    return listener.ends[1]["status"] == "complete"


HELLO = {"purpose": "trains", "attempt": None}
STRANGERS = {
    "no protocol": lambda port: Speaker(port).say(b"GET / HTTP/1.1\r\n\r\n"),
    "no secret": lambda port: Speaker(port, b"").tell("hello", **HELLO).tell("ended", part=END),
    "another secret": lambda port: Speaker(port, b"guess").tell("hello", **HELLO).tell("ended", part=END),
    "another run": lambda port: Speaker(port, run="another").tell("hello", **HELLO),
    "deep": lambda port: Speaker(port).say(b"[" * 4000),
    "long": lambda port: Speaker(port).say(b"x" * 500_000),
}


def test_a_stranger_ends_nothing(listener):
    for name, attack in STRANGERS.items():
        for _ in range(2 * MOST_STRANGERS):
            attack(listener.port)
        time.sleep(0.3)
        assert not listener.ends and not listener.gone and not listener.connections, name
    assert hears_node_1(listener)
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


@pytest.mark.parametrize("name", NODES)
def test_an_invalid_message_ends_its_connection_and_nothing_else(listener, name: str):
    """From a node that has the secret: a faulty program, or a line that somebody changed on its way."""
    node = Speaker(listener.port).tell("hello", **HELLO)
    wait_for(lambda: 1 in listener.connections)
    NODES[name](node)
    node.wait_until_closed()
    wait_for(lambda: 1 not in listener.connections)
    assert not listener.ends and hears_node_1(listener)


def test_control_characters_of_a_node_are_made_visible(listener):
    node = Speaker(listener.port).tell("hello", **HELLO, host=f"x{CONTROL}")
    node.tell("ended", part=END | {"reason": CONTROL, "host": CONTROL, "cause": CAUSE | {"reason": CONTROL}})
    wait_for(lambda: 1 in listener.ends)
    assert all(line.isprintable() for line in str(listener.ends[1]).splitlines())
    assert r"\x1b[2J\x1b]0;title\x07\x9b31m\rddp: complete\u202e" in listener.ends[1]["reason"]


def test_without_a_secret_nobody_listens(peer):
    said: list[str] = []
    alone = peer(0, 2, secret=b"", warn=said.append)
    assert len(said) == 1 and "T5_RUN_SECRET" in said[0] and not alone.sees_progress
    assert socket.socket().connect_ex((HOST, alone.endpoint.port))


def test_a_stranger_has_little_time(listener, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "PROOF_SECONDS", 1)
    stranger, began = Speaker(listener.port), time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - began < 15:
            stranger.socket.send(b"[")
            time.sleep(0.2)
    assert time.monotonic() - began < 15


def test_many_connections_and_errors_in_accept_do_not_block_the_listener(listener, monkeypatch: pytest.MonkeyPatch):
    accept, left = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED, errno.ENOBUFS]

    def fail(self: socket.socket) -> tuple:
        if left:
            raise OSError(left.pop(), "accept")
        return accept(self)

    wait_for(lambda: listener.listener is not None)
    kept = [socket.create_connection((HOST, listener.port)) for _ in range(3 * MOST_WAITING)]
    monkeypatch.setattr(socket.socket, "accept", fail)
    assert hears_node_1(listener) and not left
    assert len(kept) > len(listener._waiting) <= MOST_OF_ADDRESS and threading.active_count() < 2 * MOST_WAITING


def test_a_node_with_another_secret_is_warned_and_named():
    port, found = free_port(), {}

    def resume(node: int, secret: bytes) -> None:
        with pytest.raises(Problem) as problem:
            agreed(
                Endpoint(node, 2, HOST, port, RUN, secret),
                View(10, "", "here", {}),
                lambda _: View(10, "", "here", {}),
                2,
            )
        found[node] = problem.value

    threads = [threading.Thread(target=resume, args=each) for each in enumerate((SECRET, b"another"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert str(found[1]).endswith("it did not prove that it belongs to this run")
    assert str(found[0]).endswith("; 127.0.0.1 has another secret and was ignored")
    assert all("T5_RUN_SECRET" in problem.remedy for problem in found.values())


# ---- the secret: given, or the one in the user's home directory ------------------------------------------------------


def test_all_nodes_read_one_secret_which_others_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home, path = {"HOME": str(tmp_path)}, tmp_path / ".config" / "t5-parallelism" / "secret"
    assert run_secret(home | {"T5_RUN_SECRET": "given"}) == b"given" and not path.exists()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(run_secret, [home] * 8))
    assert found == {path.read_bytes().strip()} == {run_secret(home | {"T5_RUN_SECRET": ""})} and len(min(found)) == 64
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    assert run_secret(home) == b"" and "chmod 600" in capsys.readouterr().err
    assert run_secret({}) == run_secret({"HOME": "/dev/null"}) == b""
