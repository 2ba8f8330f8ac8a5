"""Hosts: which names are valid, how this host's own name resolves, and how to run a command on another host."""

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence

from t5bench import Problem

# As in scripts/common.sh: a name, an IPv4 address, or an IPv6 address, perhaps with its zone.
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*@|")
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# netdevice(7)
SIOCGIFFLAGS = 0x8913
IFF_UP = 1
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
    """In the resolver's order; none of a name that it does not know, or that is too long for it."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):
        return []


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def without_dot(host: str) -> str:
    """A name may end in a dot, which says that it is complete; no file of hosts has it so."""
    return host.rstrip(".") or host


def is_nobody(address: str) -> bool:
    """Whether this is an address to listen on (0.0.0.0), and so not the address of a host."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def is_without_zone(address: str) -> bool:
    """Whether this is a link-local IPv6 address that does not say on which interface, without which none connects."""
    return address.lower().startswith(("fe8", "fe9", "fea", "feb")) and ":" in address and "%" not in address


def interfaces() -> list[str]:
    """The network interfaces that are up."""
    up = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
                if struct.unpack_from("H", answer, 16)[0] & IFF_UP:
                    up.append(name)
    return up


def is_own(address: str) -> bool:
    """Whether this machine would connect to the address from that same address. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0]) == address.partition("%")[0]
    return False


def own_name_fault(own: str, addresses: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Why other nodes will not reach gloo on this one, which tells them how its own name resolves, and what to do;
    empty if they will."""
    # gloo takes the first that is this node's, or else a loopback address.
    first = next((address for address in addresses if is_loopback(address) or is_own(address)), "")
    if environment.get("GLOO_SOCKET_IFNAME") or (first and not is_loopback(first)):
        return "", ""
    return (
        f"{own} resolves to {first or ', '.join(addresses) or 'nothing'} there, which other nodes cannot reach",
        f"Give {own} its network address in its own /etc/hosts, or name the interface:"
        " GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )
