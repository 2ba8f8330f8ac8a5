"""The port of a run on this machine only."""

import random
import socket
from collections.abc import Iterator

import pytest

from t5bench.plan.ports import PORT_OFFSET, free_port, is_taken


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("", 0)) as server:
        yield server


def test_a_port_is_taken_while_somebody_listens(listener: socket.socket):
    port = listener.getsockname()[1]
    assert is_taken(port)
    listener.close()
    assert not is_taken(port)


def test_a_port_is_free_if_its_peer_is_too(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    taken = listener.getsockname()[1]
    other = free_port()
    monkeypatch.setattr(random, "sample", lambda *_: [taken, taken - PORT_OFFSET, other])
    assert free_port() == other


def test_looking_for_a_port_never_listens(monkeypatch: pytest.MonkeyPatch):
    """What another thread forks meanwhile would keep the port for a moment."""
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("it listens"))
    assert free_port()
