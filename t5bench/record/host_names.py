"""Which texts name a host. What people paste in their place is refused: what it is, and what to write instead."""

import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from t5bench import Problem

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_ZONE = re.compile(r"(?:%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*@|")
_QUOTES = "\"'`\u2018\u2019\u201c\u201d"
# What separates hosts in other programs' lists, but not within SLURM's brackets or bash's braces.
_SEPARATORS = re.compile(r"[\s,;|]+(?![^\[{]*[\]}])")
# How many processes a host takes, in lists for MPI and DeepSpeed, or its rank.
_SLOTS = re.compile(r"(?:\w+=)?[0-9]+")
_RANGES = re.compile(r"\[([0-9,-]+)\]")
# From one IPv4 address to another, whose beginning may be left out.
_SPAN = re.compile(r"((?:[0-9]+\.){3})([0-9]+)-(?:\1)?([0-9]+)")
_ANY_SPAN = re.compile(r"^(?:[0-9]+\.){3}[0-9]+-[0-9.]+$")
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
# As many names are written out in a remedy.
MOST_NAMED = 32
SEPARATED = "Give names or addresses, separated by blanks"


class Paste(NamedTuple):
    """A kind of text that is no name."""

    pattern: str
    is_what: str
    """Completes "it"; {0} is what the pattern found."""
    advice: str = ""


# The first that is found counts.
PASTES = (
    Paste(r"^-.*", "begins with a dash, as an option does"),
    Paste(r"^[A-Za-z][A-Za-z0-9+.-]*://.*", "is a URL", "MASTER_PORT sets the port"),
    Paste(rf"[{_QUOTES}]", "has a quotation mark in it: {0}"),
    Paste(r"^\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%\w]*\].*", "is an address in brackets", "MASTER_PORT sets the port"),
    Paste(r"\[[0-9]+[0-9,-]*(?:\]|$)", "is a list of nodes as SLURM writes it"),
    Paste(r"\$.*", "is a variable of the shell that was not replaced by its value"),
    Paste(r"[{}]", "has braces, which bash expands only outside of quotation marks"),
    Paste(r"[,;|]", "has '{0}' in it, but hosts are separated by blanks"),
    Paste(r".*@", "names a user", "A user for ssh belongs in ~/.ssh/config"),
    Paste(r"^[0-9A-Fa-f.:]+/[0-9]+$", "is a network, not an address"),
    Paste(r"/", "is a path", "Give the names that are in the file"),
    Paste(r"=", "gives a value to something", "NPROC_PER_NODE sets the number of processes on each node"),
    Paste(r"^[^:]*:[0-9]*$", "names a port, or a number of processes", "MASTER_PORT and NPROC_PER_NODE set these"),
    Paste(r"^[0-9]+$", "is a number", "NODE_RANK and NPROC_PER_NODE set ranks and processes"),
    Paste(_ANY_SPAN.pattern, "is a range of addresses"),
    Paste(r"[<>]", "is a placeholder of an explanation"),
    Paste(r"[*?]", "is a pattern"),
    Paste(r":", "is not an IPv6 address"),
    Paste(r"^[0-9.]+$", "is not an IPv4 address, which has numbers up to 255, none with a zero in front"),
    Paste(r"^\.|\.\.", "has a part without letters before or after a dot"),
    Paste(r"[^A-Za-z0-9_.-]", "has a character that no name has: {0!a}"),
    Paste(r"-(?:\.|$)|\.-", "has a dash beside a dot or at its end"),
    Paste(r"", "is empty"),
)


def is_name(text: str) -> bool:
    """Whether this is a host's name, an IPv4 address, or an IPv6 address, perhaps with its zone."""
    if ":" in text:
        address, percent, zone = text.partition("%")
        return _is_ipv6(address) and _ZONE.fullmatch(percent + zone) is not None
    if text.isdecimal() or _ANY_SPAN.fullmatch(text):
        return False  # the resolver would take 2 for 0.0.0.2
    if re.fullmatch("[0-9.]+", text):
        return _is_ipv4(text.removesuffix("."))
    return _NAME.fullmatch(text) is not None


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_ipv4(text: str) -> bool:
    """As the resolver reads it, which takes 127.1, and 010 for 8."""
    if any(len(part) > 1 and part.startswith("0") for part in text.split(".")):
        return False
    try:
        socket.inet_aton(text)
    except OSError:
        return False
    return True


def checked(text: str) -> str:
    """A host's name or address. Raises Problem for anything else, such as an ssh option."""
    if not is_name(text):
        names = meant([text])
        raise _problem(text, f"Name the host alone: {names[0]}" if len(names) == 1 else SEPARATED)
    return text


def checked_with_user(text: str) -> str:
    """A host for ssh, perhaps with a user before it. Raises Problem."""
    user, at, name = text.rpartition("@")
    checked(name if _USER.fullmatch(user + at) else text)
    return text


def check_list(texts: Sequence[str], remedy: str = 'Write HOSTS="{}"') -> None:
    """Raises Problem for the first that names no host. remedy: has a place for what the whole list may have meant."""
    for text in texts:
        if not is_name(text):
            listed = " ".join(meant(texts))
            if "[" in text and listed.count(" ") >= MOST_NAMED:
                listed = f"$(scontrol show hostnames '{' '.join(texts)}' | xargs)"
            raise _problem(text, remedy.format(listed) if listed else SEPARATED)


def _problem(text: str, remedy: str) -> Problem:
    for paste in PASTES:
        match = re.search(paste.pattern, text)
        if match:
            break
    if paste.advice:
        remedy = f"{remedy}. {paste.advice}"
    return Problem(f"'{text}' is not a host name or address: it {paste.is_what.format(match[0])}", remedy)


def meant(texts: Sequence[str]) -> list[str]:
    """The hosts that these texts probably mean; empty if that is not clear."""
    whole = " ".join(texts)
    for quote in _QUOTES:
        whole = whole.replace(quote, "")
    if re.fullmatch(r"\[.*\]|\(.*\)", whole) and not _RANGES.fullmatch(whole) and ":" not in whole:
        whole = whole[1:-1]  # another language's list
    names = []
    for word in _SEPARATORS.split(whole):
        if word and not _SLOTS.fullmatch(word):
            names += islice(_expanded(_alone(word)), MOST_NAMED + 1)
    return names if all(map(is_name, names)) else []


def _alone(word: str) -> str:
    """The host in what may be a URL, with a user before it and a port behind it."""
    word = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*://([^/]*).*", r"\1", word).rpartition("@")[2]
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]*:[^\]]*)\](?::[0-9]*)?", word)
    if bracketed:
        return bracketed[1]
    return re.sub(r"^([^:]*):[0-9]*$", r"\1", word)


def _expanded(word: str) -> Iterator[str]:
    """The names of a list such as node[01-04,07] or node{1..3}, one more than can be named at the most."""
    ranges = _RANGES.search(word)
    braces = _BRACES.search(word)
    span = _SPAN.fullmatch(word)
    parts: Iterator[str]
    if span:
        parts = _numbers(f"{span[2]}-{span[3]}")
        place = (span.start(2), span.end())
    elif ranges:
        parts = _numbers(ranges[1])
        place = ranges.span()
    elif braces:
        parts = iter(braces[3].split(",")) if braces[3] else _numbers(f"{braces[1]}-{braces[2]}")
        place = braces.span()
    else:
        yield word
        return
    for part in parts:
        yield from _expanded(word[: place[0]] + part + word[place[1] :])


def _numbers(ranges: str) -> Iterator[str]:
    """The numbers of "01-04,07", with as many digits as they are written with."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first or (last and not last.isdecimal()):
            yield "-"  # which no name ends with
            continue
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
