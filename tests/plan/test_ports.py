"""The ports of a run."""

import socket

import pytest

from t5bench.plan import ports
from t5bench.plan.ports import FREE_PORTS, free_port, peer_port


def test_the_port_is_beside_the_rendezvous():
    assert peer_port(29800) == 30800
    assert peer_port(65000) == 64000


def test_a_free_port_can_be_listened_on():
    port = free_port()
    assert port in FREE_PORTS
    with socket.create_server(("", port)):
        pass


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    monkeypatch.setattr(ports, "FREE_PORTS", range(port, port + 1))
    with socket.create_server(("", port)), pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
        free_port()
