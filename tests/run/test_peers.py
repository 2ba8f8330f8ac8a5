"""The recorders' channel, over real sockets on this machine; test_strangers.py has those who do not belong to it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from harness import wait_for

from t5bench.plan import channel
from t5bench.plan.channel import Place
from t5bench.plan.ports import free_port
from t5bench.run.peers import Introduced, Peers

HOST = "127.0.0.1"


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

        def start(node: int, nodes: int, *, port: int = own_port, host: str = HOST, **options) -> Peers:
            place = Place(node, nodes, host, port, "a run", b"the secret of the run")
            return stack.enter_context(contextlib.closing(Peers(place, **options)))

        yield start


@pytest.fixture
def nodes(peer) -> Iterator:
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
    assert not again.ends and not again.connections
    assert 0 in second.gone


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
    plan = {"settings": {}, "arguments": {"extra": ""}}

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
