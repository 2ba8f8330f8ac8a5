"""Hosts: what their names resolve to, which of them is this machine, and how to run a command on another one."""

import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address

from t5bench.record.host_names import checked_with_user

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# netdevice(7)
SIOCGIFFLAGS = 0x8913
IFF_UP = 1
# A command over ssh echoes this line before its own output, because the shell's start-up files may print a greeting.
BEGINS = "the output of the command begins:"


def ssh(host: str, *command: str, options: Sequence[str] = ()) -> list[str]:
    """The words that run a command on a host, perhaps as another user, without asking for anything. Raises Problem."""
    return ["ssh", *options, *OPTIONS, "--", checked_with_user(host), *command]


def addresses_of(name: str) -> list[str]:
    """In the resolver's order; none of a name that it does not know, or that is too long for it."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None)))
    except (OSError, UnicodeError):
        return []


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def is_own(address: str) -> bool:
    """Whether this machine would connect to the address from that same address. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0]) == address.partition("%")[0]
    return False


@dataclass(frozen=True)
class Host:
    """A node by one of its names. Its name is compared before any resolver is asked, and the resolver is asked once."""

    name: str
    """As someone has given it; a dot at its end says only that it is complete, and no file of hosts has it so."""

    @classmethod
    def of(cls, text: str) -> "Host":
        return cls(text.rstrip(".") or text)

    @cached_property
    def addresses(self) -> list[str]:
        return addresses_of(self.name)

    @cached_property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return self.may_be(Host.of(socket.gethostname())) or self.names_itself or self.has_own_address

    @property
    def is_address(self) -> bool:
        return ":" in self.name or re.fullmatch("[0-9.]+", self.name) is not None

    @property
    def names_itself(self) -> bool:
        """Whether it is a name by which every machine calls itself."""
        return self.name.lower() in ("localhost", "localhost.localdomain") or is_loopback(self.name)

    @property
    def is_loop(self) -> bool:
        """Whether it leads every machine to itself."""
        return bool(self.addresses) and all(map(is_loopback, self.addresses))

    @property
    def has_own_address(self) -> bool:
        """Whether it has an address by which others reach this machine."""
        return any(is_own(address) for address in self.addresses if not is_loopback(address))

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has addresses, of other machines alone."""
        return bool(self.addresses) and not any(is_loopback(each) or is_own(each) for each in self.addresses)

    @property
    def is_on_the_link(self) -> bool:
        """Whether it is an address that only machines on the same cable or switch reach."""
        return self.name.startswith("169.254.") or self._is_ipv6_of_the_link

    @property
    def lacks_zone(self) -> bool:
        """Whether it is an address of one link that does not say of which interface, without which none connects."""
        return self._is_ipv6_of_the_link and "%" not in self.name

    @property
    def _is_ipv6_of_the_link(self) -> bool:
        return ":" in self.name and self.name.lower().startswith(("fe8", "fe9", "fea", "feb"))

    @property
    def is_nobody(self) -> bool:
        """Whether it is an address to listen on (0.0.0.0), and so not that of a host."""
        return self.is_address and any(ip_address(each.partition("%")[0]).is_unspecified for each in self.addresses)

    def may_be(self, other: "Host") -> bool:
        """Whether two names may be one host: a cluster's short and long names differ only after the first dot."""
        mine = self.name.lower()
        theirs = other.name.lower()
        if mine == theirs or self.is_address or other.is_address:
            return mine == theirs
        return mine.partition(".")[0] == theirs.partition(".")[0]

    def surely_is(self, other: "Host") -> bool:
        """Whether two names are surely of one host: they are equal, or one is the beginning of the other."""
        shorter, longer = sorted((self, other), key=lambda host: len(host.name))
        short = shorter.name.lower()
        long = longer.name.lower()
        return short == long or (long.startswith(f"{short}.") and not longer.is_address)

    def is_same_as(self, other: "Host") -> bool:
        return self.may_be(other) or bool({*self.addresses} & {*other.addresses})


@dataclass(frozen=True)
class Hosts:
    """The nodes of a run, and the one of them at which they meet."""

    nodes: Sequence[Host]
    """In rank order; empty if they are not known."""
    master: Host
    """Its name is empty if it is not known."""

    @classmethod
    def of(cls, names: Sequence[str], master: str) -> "Hosts":
        """master: by default the first."""
        nodes = [Host.of(name) for name in names]
        if not master:
            return cls(nodes, nodes[0] if nodes else Host(""))
        named = Host.of(master)
        return cls(nodes, nodes[nodes.index(named)] if named in nodes else named)

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def own_rank(self) -> str:
        """The rank of this machine; empty if it is none of the nodes, or named twice."""
        for rank, node in enumerate(self.nodes):
            if node.is_here and self.nodes.count(node) == 1:
                return str(rank)
        return ""


def double(hosts: Sequence[Host], *, resolves: bool) -> str:
    """Which node is named more than once, in one clause; empty if none is. Several loopback addresses may stand for
    several nodes, in a rehearsal on one machine.

    resolves: compares what all names resolve to. Otherwise none is looked up unless some are addresses.
    """
    alike: dict[str, list[Host]] = {}
    for host in hosts:
        earlier_ones = alike.setdefault(host.name if host.is_address else host.name.lower().partition(".")[0], [])
        for earlier in earlier_ones:
            if earlier.surely_is(host):
                return f"a node is named more than once: {earlier.name} and {host.name}"
        earlier_ones.append(host)
    if not resolves and len({host.is_address for host in hosts}) < 2:
        return ""
    first: dict[str, Host] = {}
    for host in hosts:
        for address in host.addresses:
            earlier = first.setdefault(address, host)
            if earlier != host and not is_loopback(address):
                return f"{earlier.name} and {host.name} are the same node, {address}"
    return ""


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


def own_name_fault(own: Host, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Why other nodes will not reach gloo on this one, which tells them how its own name resolves, and what to do;
    empty if they will."""
    # gloo takes the first that is this node's, or else a loopback address.
    first = next((address for address in own.addresses if is_loopback(address) or is_own(address)), "")
    if environment.get("GLOO_SOCKET_IFNAME") or (first and not is_loopback(first)):
        return "", ""
    found = first or ", ".join(own.addresses) or "nothing"
    return (
        f"{own.name} resolves to {found} there, which other nodes cannot reach",
        f"Give {own.name} its network address in its own /etc/hosts, or name the interface:"
        " GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )
