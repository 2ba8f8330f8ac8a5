"""Hosts: which names are valid, how this host's own name resolves, and how to run a command on another host."""

import os
import re
import socket
from collections.abc import Mapping, Sequence

from t5bench import Problem

# As in scripts/common.sh: a name, an IPv4 address, or an IPv6 address, perhaps with its zone.
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*@|")
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# A command over ssh echoes this line before its own output, because the shell's start-up files may print a greeting.
BEGINS = "the output of the command begins:"


def checked(host: str) -> str:
    """The host, perhaps with a user. Raises Problem for anything else, such as an ssh option."""
    user, at, name = host.rpartition("@")
    if not (_HOST.fullmatch(name) and _USER.fullmatch(user + at)):
        raise Problem(f"'{host}' is not a host name or address", "Correct it in HOSTS or on the command line")
    return host


def ssh(host: str, *command: str, options: Sequence[str] = ()) -> list[str]:
    """The words that run a command on a host without asking for anything. Raises Problem."""
    return ["ssh", *options, *OPTIONS, "--", checked(host), *command]


def addresses_of(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def own_name_fault(own: str, addresses: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Why other nodes will not reach gloo on this one, which tells them how its own name resolves, and what to do;
    empty if they will."""
    if environment.get("GLOO_SOCKET_IFNAME") or not all(map(is_loopback, addresses)):
        return "", ""
    return (
        f"{own} resolves to {', '.join(addresses) or 'nothing'} there, which other nodes cannot reach",
        f"Give {own} its network address in its own /etc/hosts, or name the interface:"
        " GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )
