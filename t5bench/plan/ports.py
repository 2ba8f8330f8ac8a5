"""The ports of a run: MASTER_PORT, where its processes meet, and another one, where its recorders meet."""

import errno
import random
import socket

# Above the ports of all strategies, and above those to which users are likely to move a run.
PORT_OFFSET = 1000
# Below those that Linux assigns to connections by default (ip_local_port_range): a connection may get one of these
# before the run listens there.
FREE_PORTS = range(20000, 29000)


def peer_port(master_port: int) -> int:
    port = master_port + PORT_OFFSET
    return port if port < 1 << 16 else master_port - PORT_OFFSET


def is_taken(port: int) -> bool:
    """Whether something listens on this port of this machine.

    This never listens itself: a process that another thread forks meanwhile would keep the port for a moment.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    """A MASTER_PORT for a run on this machine only: it and its peer port are free. Raises OSError if there is none."""
    for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
        if not is_taken(port) and not is_taken(peer_port(port)):
            return port
    raise OSError(f"no port from {FREE_PORTS.start} to {FREE_PORTS.stop - 1} is free")
