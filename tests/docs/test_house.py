"""The house of docs/house.md: which room imports which, and what exists once."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import REPO_ROOT

from t5bench.record.settings import BY_NAME

MOST_SETTINGS_IN_A_LIST = 2
HOUSE = (REPO_ROOT / "docs" / "house.md").read_text()
ROOMS = {
    match[1]: set(re.split(r",\s*", match[2])) - {""}
    for match in re.finditer(r"^\| `(?:t5bench/)?(\w+)` \|[^|]*\| ?([^|]*?) ?\|$", HOUSE, re.MULTILINE)
}


def modules() -> list[Path]:
    return sorted(path for folder in ("t5bench", "native", "docs") for path in (REPO_ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(REPO_ROOT).parts
    return parts[1] if parts[0] == "t5bench" and len(parts) > 2 else parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """The rooms that a module imports from, and ``t5bench`` for the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "t5bench":
                room = rest.partition(".")[0]
                yield room if room in ROOMS else "t5bench"
            elif first == "native":
                yield "native"


# What it prints is read by a program here, which decodes it as JSON; its error goes through the reader's own door.
READ_BY_A_PROGRAM = {"record/nvml.py"}
# Its output is the engine's, which the recorder shows.
STARTS_THE_ENGINE = {"run/worker.py"}


def test_whatever_is_started_prints_through_the_door_for_text():
    """A program that a shell or another program starts calls guard_streams before anything is printed."""
    for path in (REPO_ROOT / "t5bench").rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(REPO_ROOT / "t5bench"))
        if re.search(r'^if __name__ == "__main__":', text, re.MULTILINE) or path.name == "__main__.py":
            is_excepted = name in READ_BY_A_PROGRAM | STARTS_THE_ENGINE
            assert ("guard_streams()" in text) != is_excepted, name
        assert not re.search(r"sys\.(stdout|stderr)\.buffer|sys\.__std(out|err)__|os\.write\([12],", text) or name in {
            "text.py"
        }, f"{name} goes past the door of t5bench/text.py"


def test_the_table_names_every_room():
    found = {path.name for path in (REPO_ROOT / "t5bench").iterdir() if (path / "__init__.py").exists()}
    assert ROOMS.keys() == found | {"native"}


def test_imports_go_one_way():
    """No room reaches itself through others."""

    def reached(room: str) -> set[str]:
        return ROOMS[room] | {far for near in ROOMS[room] for far in reached(near)}

    for room in ROOMS:
        assert room not in reached(room)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPO_ROOT)))
def test_a_module_keeps_the_rules_of_the_house(path: Path):
    """Its imports follow the arrows, it leaves the import path alone and has no second list of settings."""
    room, text, settings = room_of(path), path.read_text(), BY_NAME.keys()
    tree = ast.parse(text)
    if room in ROOMS:
        assert set(imported(tree)) - {room, "t5bench"} <= ROOMS[room], f"what {room} must not import"
    if path.name != "worker.py":  # which starts a program as Python would: from its own directory
        assert not re.search(r"sys\.path(?:\[.*\] *=|\.insert|\.append| *\+?=[^=])", text)
    if path.name in ("settings.py", "scripts.py"):
        return  # the tables themselves
    for node in ast.walk(tree):
        items = getattr(node, "elts", [])
        # What a setting means for a comparison, a parity check or a resumed run is its role's to say. These rooms
        # choose values for the runs that they start.
        if isinstance(node, ast.Dict) and room not in ("sweep", "acceptance", "predict", "ledger"):
            items = node.keys
        named = [item.value for item in items if isinstance(item, ast.Constant) and item.value in settings]
        assert len(named) <= MOST_SETTINGS_IN_A_LIST, named
