"""Text from hosts, logs and engines, for a terminal, a file or a page: control characters in it become visible."""

import codecs
import re
from collections.abc import Mapping
from typing import Any

# C0 and C1 controls, line separators, marks that reverse or hide text, and bytes that are no UTF-8.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
# Colour and weight (SGR): these move nothing, hide nothing that was written before, and ask the terminal for nothing.
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,32}m")
_BEGUN_COLOUR = re.compile(r"\x1b(?:\[[0-9;:]{0,32})?\Z")


def visible(text: str, keep: str = "\t") -> str:
    """The text with its control characters written out (``\\x1b``), except those to keep."""

    def written(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else match[0].encode("unicode_escape", "surrogatepass").decode()

    return _CONTROL.sub(written, text)


def on_terminal(text: str) -> str:
    """A run's own output: lines, progress bars and colours stay; all other control characters are written out."""
    parts, position = [], 0
    for colour in _COLOUR.finditer(text):
        parts += [visible(text[position : colour.start()], "\t\r\n"), colour[0]]
        position = colour.end()
    return "".join([*parts, visible(text[position:], "\t\r\n")])


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


def visible_in(value: Any) -> Any:
    """The same text, list or mapping of decoded JSON, with every text in it visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible_in(key): visible_in(entry) for key, entry in value.items()}
    return [visible_in(entry) for entry in value] if isinstance(value, list) else value
