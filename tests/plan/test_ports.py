"""The ports of a run."""

import socket

import pytest

from t5bench.plan import ports


def test_the_recorders_meet_beside_the_rendezvous():
    assert (ports.peer_port(29800), ports.peer_port(65000)) == (30800, 64000)


def test_a_free_port_can_be_listened_on_and_a_taken_one_is_not_free(monkeypatch: pytest.MonkeyPatch):
    port = ports.free_port()
    monkeypatch.setattr(ports, "FREE_PORTS", range(port, port + 1))
    with socket.create_server(("", port)), pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
        ports.free_port()
