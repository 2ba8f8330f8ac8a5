"""The house of docs/house.md: which room imports which, and what exists once."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import REPO_ROOT

from t5bench.record.settings import BY_NAME

MOST_SETTINGS_IN_A_LIST = 2
HOUSE = (REPO_ROOT / "docs" / "house.md").read_text()
ROOMS = {
    match[1]: set(re.split(r",\s*", match[2])) - {""}
    for match in re.finditer(r"^\| `(?:t5bench/)?([\w/]+)` \|[^|]*\| ?([^|]*?) ?\|", HOUSE, re.MULTILINE)
}
TOOLS = {room for room in ROOMS if room.startswith("tools/")}
GROUND = {"costmodel", "costmodel/evidence"}
# Rooms that choose values of settings for the runs that they start.
CHOOSE_VALUES = {"sweep", "tools/acceptance", "tools/ledger", "tools/nodes", "tools/predict", "tools/search"}


def modules() -> list[Path]:
    return sorted(path for folder in ("t5bench", "native", "docs") for path in (REPO_ROOT / folder).rglob("*.py"))


def room_of(parts: Sequence[str]) -> str:
    """The room of a module's dotted name, or of a file's path, in its parts; ``t5bench`` for the package itself."""
    if parts[0] != "t5bench":
        return parts[0]
    for depth in (3, 2):
        room = "/".join(parts[1:depth])
        if room in ROOMS:
            return room
    return "t5bench"


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports from this repository."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("t5bench", "native"))


# What it prints is read by a program here, which decodes it as JSON; its error goes through the reader's own door.
READ_BY_A_PROGRAM = {"record/nvml.py"}
# Its output is the engine's, which the recorder shows.
STARTS_THE_ENGINE = {"run/worker.py"}


def test_whatever_is_started_prints_through_the_door_for_text():
    """A program that a shell or another program starts calls guard_streams before anything is printed."""
    for path in (REPO_ROOT / "t5bench").rglob("*.py"):
        text = path.read_text()
        name = str(path.relative_to(REPO_ROOT / "t5bench"))
        if re.search(r'^if __name__ == "__main__":', text, re.MULTILINE) or path.name == "__main__.py":
            is_excepted = name in READ_BY_A_PROGRAM | STARTS_THE_ENGINE
            assert ("guard_streams()" in text) != is_excepted, name
        assert not re.search(r"sys\.(stdout|stderr)\.buffer|sys\.__std(out|err)__|os\.write\([12],", text) or name in {
            "text.py"
        }, f"{name} goes past the door of t5bench/text.py"


def test_the_table_names_every_room():
    found = {str(path.parent.relative_to(REPO_ROOT / "t5bench")) for path in (REPO_ROOT / "t5bench").rglob("*.py")}
    assert ROOMS.keys() == found - {".", "tools"} | {"native"}


def test_imports_go_one_way():
    """No room reaches itself through others."""

    def reached(room: str) -> set[str]:
        return ROOMS[room] | {far for near in ROOMS[room] for far in reached(near)}

    for room in ROOMS:
        assert room not in reached(room)


def test_the_harness_knows_no_tool_and_the_ground_knows_nothing():
    assert len(TOOLS) > 1
    for room, imports in ROOMS.items():
        assert not imports & TOOLS, f"{room} imports a tool"
    for room in GROUND:
        assert ROOMS[room] <= {"costmodel"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPO_ROOT)))
def test_a_module_keeps_the_rules_of_the_house(path: Path):
    """Its imports follow the arrows, it leaves the import path alone and has no second list of settings."""
    room = room_of(path.relative_to(REPO_ROOT).parts)
    text = path.read_text()
    settings = BY_NAME.keys()
    tree = ast.parse(text)
    if room in ROOMS:
        imports = {room_of(name.split(".")) for name in imported_modules(tree)}
        assert imports - {room, "t5bench"} <= ROOMS[room], f"what {room} must not import"
    if path.name != "worker.py":  # which starts a program as Python would: from its own directory
        assert not re.search(r"sys\.path(?:\[.*\] *=|\.insert|\.append| *\+?=[^=])", text)
    if path.name in ("settings.py", "scripts.py", "space.py", "asked.py"):
        return  # the tables themselves, and the settings that describe a layout
    if room in CHOOSE_VALUES:
        return
    # What a setting means for a comparison, a parity check or a resumed run is its role's to say.
    for node in ast.walk(tree):
        items = getattr(node, "elts", [])
        if isinstance(node, ast.Dict):
            items = node.keys
        named = [item.value for item in items if isinstance(item, ast.Constant) and item.value in settings]
        assert len(named) <= MOST_SETTINGS_IN_A_LIST, named
