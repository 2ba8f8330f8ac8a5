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
    """The host. Raises Problem for anything else, such as an ssh option."""
    if not _HOST.fullmatch(host):
        remedy = "Give names or addresses, separated by spaces; a user for ssh belongs in ~/.ssh/config"
        raise Problem(f"'{host}' is not a host name or address", remedy)
    return host


def ssh(host: str, *command: str, options: Sequence[str] = ()) -> list[str]:
    """The words that run a command on a host, perhaps as another user, without asking for anything. Raises Problem."""
    user, at, name = host.rpartition("@")
    checked(name if _USER.fullmatch(user + at) else host)
    return ["ssh", *options, *OPTIONS, "--", host, *command]


def addresses_of(name: str) -> list[str]:
    """In the resolver's order."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None)))
    except OSError:
        return []


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def own_name_fault(own: str, addresses: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Why other nodes will not reach gloo on this one, which tells them how its own name resolves, and what to do;
    empty if they will."""
    first = next(iter(addresses), "")  # gloo takes no other
    if environment.get("GLOO_SOCKET_IFNAME") or (first and not is_loopback(first)):
        return "", ""
    return (
        f"{own} resolves to {first or 'nothing'} there, which other nodes cannot reach",
        f"Give {own} its network address in its own /etc/hosts, or name the interface:"
        " GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )
