"""Text from hosts, logs and engines, for a terminal, a file or a page: control characters in it become visible.

What the programs of this repository print goes through one door, SafeStream, wherever it comes from: tables, errors
that quote a file's name, tracebacks. A worker's own output does not: the recorder reads it first. What may steer a
terminal, and is therefore our own, goes past it by `steer`.
"""

import codecs
import io
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from t5bench.inherited import open_missing_streams

# The one name of the time in which a device has nothing to do because Python has not started its next operator, whether
# it is measured or predicted.
WAITING_FOR_HOST = "waiting for the host"

# Colour and weight (SGR) move nothing, hide nothing that was written before, and ask the terminal for nothing. Then: C0
# and C1 controls, line separators, marks that reverse or hide text, and bytes that are no UTF-8.
_CONTROL = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]{0,32}m)"
    "|[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_BEGUN_COLOUR = re.compile(r"\x1b(?:\[[0-9;:]{0,32})?\Z")


def visible(text: str, keep: str = "\t", *, colours: bool = False) -> str:
    """The text with its control characters written out (``\\x1b``), except those to keep, and colours if asked."""

    def written(match: re.Match[str]) -> str:
        is_kept = colours if match["colour"] else match[0] in keep
        return match[0] if is_kept else match[0].encode("unicode_escape", "surrogatepass").decode()

    return _CONTROL.sub(written, text)


def processes(count: int) -> str:
    return f"{count} process{'es' * (count != 1)}"


def on_terminal(text: str) -> str:
    """A run's own output: lines, progress bars and colours stay; all other control characters are written out."""
    return visible(text, "\t\r\n", colours=True)


class SafeStream(io.TextIOWrapper):
    """Standard output or error that shows text, and lets no text do anything else with the terminal."""

    def write(self, text: str) -> int:
        super().write(visible(text, "\t\n"))
        return len(text)


def guard_streams() -> None:
    """Makes standard output and error safe, also one that the parent closed; for a program's beginning."""
    open_missing_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, SafeStream):
            options = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            setattr(sys, name, SafeStream(stream.detach(), **options))


def steer(stream: TextIO, sequence: str) -> None:
    """Sends a terminal our own control sequences, past the door. Text of others that is among them is visible()."""
    pass_by(stream, sequence.encode(errors="backslashreplace"))


def pass_by(stream: TextIO, text: bytes) -> None:
    """Sends bytes past the door that are safe already, as a Screen's are."""
    stream.flush()
    stream.buffer.write(text)
    stream.buffer.flush()


class Steering:
    """A stream for a library's progress bar, which overwrites its line, and has no text of others."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        steer(self.stream, text)

    def flush(self) -> None:
        self.stream.flush()


class Screen:
    """Makes a run's output safe for a terminal, block by block; a character may continue in the next block."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""

    def show(self, block: bytes, *, is_last: bool = False) -> bytes:
        text = self._rest + self._decoder.decode(block, final=is_last)
        begun = None if is_last else _BEGUN_COLOUR.search(text)
        self._rest = begun[0] if begun else ""
        return on_terminal(text.removesuffix(self._rest)).encode()


def in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same text, list or mapping of decoded JSON, with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {in_texts(key, change): in_texts(entry, change) for key, entry in value.items()}
    return [in_texts(entry, change) for entry in value] if isinstance(value, list | tuple) else value


def visible_in(value: Any) -> Any:
    return in_texts(value, visible)
