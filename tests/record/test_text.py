"""Text of hosts, logs and engines, on its way to a terminal, a file or a page."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_run
from support import REPO_ROOT

from t5bench.record.command_script import quoted
from t5bench.text import Screen, on_terminal, visible, visible_in

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
    data = text.encode() + no_utf_8
    screen = Screen()
    shown = b""
    for start, stop in pairwise([0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]):
        shown += screen.show(data[start:stop])
    expected = on_terminal(text) + no_utf_8.decode(errors="backslashreplace")
    assert shown + screen.show(b"", is_last=True) == expected.encode()


EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b31m\b"
# What a terminal must not get: C0 except tabs and line ends, C1, and what reverses, separates or hides text.
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@pytest.mark.parametrize("command", ["compare", "explain", "collect", "parity", "verify", "reshape", "predict --check"])
def test_what_programs_print_steers_no_terminal(command: str, tmp_path: Path):
    """Errors quote names, and so do tracebacks and usages."""
    words = [sys.executable, "-m", "t5bench", *command.split(), str(tmp_path / EVIL), str(tmp_path / EVIL)]
    result = subprocess.run(words, capture_output=True, text=True, cwd=REPO_ROOT)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "owned" in said and not RAW.search(said), said


PLANT = "\x1b]0;owned\x07\x1b[2J\x1b[31m\r\b\x9b31m\u202e\u2028\ufeffend"
# In one process, because Python and its libraries take seconds to start.
EVERY_COMMAND = """
import sys
from pathlib import Path
from t5bench.__main__ import main
from t5bench.text import guard_streams

guard_streams()
for line in Path(sys.argv[1]).read_text().splitlines():
    try:
        main(line.split("\\t"))
    except SystemExit:
        pass
"""


def planted(value: Any, at: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every text in decoded JSON by its place, and a copy of the whole that has the plant at this place."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, str):
        yield at, value + PLANT
    for key, entry in entries:
        for place, changed in planted(entry, (*at, key)):
            copy = value.copy()
            copy[key] = changed
            yield place, copy


@pytest.mark.slow
@pytest.mark.parametrize("step", [24, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_no_command_shows_a_text_of_a_record_raw(step: int, tmp_path: Path):
    """Every step-th text of a node's part, planted alone, so that one that a reader refuses hides no other; then the
    file names, the log and the lines of the metrics."""
    good = make_run(tmp_path / "good" / "ddp")
    part = good / "node0.json"
    lines = []
    count = 0
    files = dict(planted(json.loads(part.read_text())))
    for count, content in enumerate(list(files.values())[::step]):
        directory = tmp_path / f"{count}" / "zero1"
        shutil.copytree(good, directory)
        (directory / "node0.json").write_text(json.dumps(content))
        (directory / "run.json").unlink()
        (directory / "node0.sha256").unlink(missing_ok=True)
        lines.append(["collect", str(directory), str(directory)])
        lines += [["compare", str(good), str(directory), "--output", str(tmp_path / f"page{count}")]]
        lines += [["explain", str(directory)], ["parity", str(good), str(directory)]]
    for name in ("node0.log", "metrics.jsonl"):
        count += 1
        directory = tmp_path / f"{count} \x1b[31m" / "zero1"
        shutil.copytree(good, directory)
        file = directory / name
        file.write_text(file.read_text().replace("1", f"1{PLANT}", 40))
        for command in ("compare", "explain", "parity", "collect", "export", "evaluate", "reshape", "generate"):
            lines.append([command, str(directory), str(directory)])
    (tmp_path / "lines").write_text("\n".join("\t".join(words) for words in lines))
    words = [sys.executable, "-c", EVERY_COMMAND, str(tmp_path / "lines")]
    result = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0 and "owned" in said and "Traceback" not in said, said[-3000:]
    assert not RAW.search(said), RAW.search(said)
    for page in (*tmp_path.glob("page*/*"), *tmp_path.rglob("comparison.md")):
        assert page.suffix == ".png" or not page.is_file() or not RAW.search(page.read_text()), page
    assert len(files) > 100


def test_a_launchers_message_steers_no_terminal():
    """Its own sentences, before Python starts, and the script that a dry run prints."""
    words = ["bash", str(REPO_ROOT / "scripts" / "run_megatron_t5_ddp.sh"), f"--{PLANT}"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 2 and "owned" in result.stderr and "\x1b" not in result.stderr
    assert not RAW.search(quoted(PLANT))
    printed = subprocess.run(["bash", "-c", f"printf %s {quoted(PLANT)}"], capture_output=True, check=True).stdout
    assert printed == PLANT.encode()
