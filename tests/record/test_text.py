"""Text of hosts, logs and engines, on its way to a terminal, a file or a page."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from harness import REPO_ROOT
from hypothesis import given
from hypothesis import strategies as st

from t5bench.record.text import Screen, on_terminal, visible, visible_in

COLOURED = "\x1b[1;31mred\x1b[0m \x1b[38:2::1:2:3mexact\x1b[m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe ½, 中文 🙂\t|", "Größe ½, 中文 🙂\t|"),
        ("\x1b[2J\x1b]0;t\x07\x9b1m\x7f\r\n", r"\x1b[2J\x1b]0;t\x07\x9b1m\x7f\r\n"),
        ("a\u202eb\u2028c\u200bd\udc9be", r"a\u202eb\u2028c\u200bd\udc9be"),
        (COLOURED, COLOURED.replace("\x1b", r"\x1b")),
    ],
)
def test_visible(text: str, shown: str):
    assert visible(text) == shown
    assert visible_in({text: [text, 1, None]}) == {shown: [shown, 1, None]}


@pytest.mark.parametrize(
    "sequence",
    ["\x1b[2J", "\x1b]0;t\x07", "\x1bP+q\x1b\\", "\x1b[>4;2m", "\x9b31m", "\b", "\x1b[" + "1" * 99 + "m"],
)
def test_a_terminal_gets_no_control_characters_except_colours_and_lines(sequence: str):
    shown = on_terminal(f"{COLOURED}\r\n 50 %\r{sequence}")
    assert shown.startswith(f"{COLOURED}\r\n 50 %\r\\x")
    assert not any(c in shown.removeprefix(COLOURED) for c in "\x1b\x9b\x07\x0e\b")


PIECES = st.lists(st.sampled_from(["é🙂", "\x1b[31m", "\x1b[", "\x1b", "]0;t\x07", "31m", "\r\n", "\x9b"])).map("".join)


@given(PIECES, st.lists(st.integers(0, 60)), st.sampled_from([b"", b"a\x9bm\xff"]))
def test_a_screen_shows_the_same_however_the_output_is_cut(text: str, cuts: list[int], no_utf_8: bytes):
    data, screen, shown = text.encode() + no_utf_8, Screen(), b""
    for start, stop in pairwise([0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]):
        shown += screen.show(data[start:stop])
    expected = on_terminal(text) + no_utf_8.decode(errors="backslashreplace")
    assert shown + screen.show(b"", is_last=True) == expected.encode()


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\b"


@pytest.mark.parametrize("command", ["compare", "explain", "collect", "parity", "verify", "reshape", "predict --check"])
def test_what_programs_print_steers_no_terminal(command: str, tmp_path: Path):
    """Errors quote names, and so do tracebacks and usages."""
    words = [sys.executable, "-m", "t5bench", *command.split(), str(tmp_path / EVIL), str(tmp_path / EVIL)]
    result = subprocess.run(words, capture_output=True, text=True, cwd=REPO_ROOT)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "owned" in said and not any(character in said for character in "\x1b\x9b\x07\b"), said
