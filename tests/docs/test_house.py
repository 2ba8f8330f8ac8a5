"""The house of docs/house.md: which room imports which, and what exists once."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from support import REPO_ROOT

from t5bench.record.settings import BY_NAME

MOST_SETTINGS_IN_A_LIST = 2
HOUSE = (REPO_ROOT / "docs" / "house.md").read_text()
ROOMS = {
    match[1]: set(re.split(r",\s*", match[2])) - {""}
    for match in re.finditer(r"^\| `(?:t5bench/)?([\w/-]+)` \|[^|]*\| ?([^|]*?) ?\|", HOUSE, re.MULTILINE)
}
TOOLS = {room for room in ROOMS if room.startswith("tools/")}
# What judge ships and every room may import: it knows none of them.
LEAF = "packages/judge/src/training_comparison"
PACKAGES = {room for room in ROOMS if room.startswith("packages/") and room != LEAF}
# They are also used without this repository: beside the standard library only by what their pyproject or the user adds.
ALONE = {
    LEAF: {"torch", "deepspeed"},
    "packages/judge": {"tensorboard", "wandb"},
}
# The room of each package that is imported by another name than t5bench or native.
ROOM_OF_IMPORT = {
    source.name: f"packages/{source.parts[-3]}"
    for source in sorted(REPO_ROOT.glob("packages/*/src/*"))
    if source.is_dir()
} | {Path(LEAF).name: LEAF}
# Rooms that choose values of settings for the runs that they start.
CHOOSE_VALUES = {"sweep", "choose", "tools/nodes", *PACKAGES}


def modules() -> list[Path]:
    folders = ("t5bench", "native", "docs", *(f"{package}/src" for package in PACKAGES))
    return sorted(path for folder in folders for path in (REPO_ROOT / folder).rglob("*.py"))


def room_of(parts: Sequence[str]) -> str:
    """The room of a module's dotted name, or of a file's path, in its parts; ``t5bench`` for the package itself."""
    if "/".join(parts[:4]) == LEAF:
        return LEAF
    if parts[0] == "packages":
        return "/".join(parts[:2])
    if parts[0] != "t5bench":
        return ROOM_OF_IMPORT.get(parts[0], parts[0])
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
        yield from (name for name in names if name.split(".")[0] in ("t5bench", "native", *ROOM_OF_IMPORT))


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
    folders = {path.parent.relative_to(REPO_ROOT / "t5bench") for path in (REPO_ROOT / "t5bench").rglob("*.py")}
    found = {str(folder) for folder in folders if str(folder.parent) not in ROOMS}  # what lies in a room belongs to it
    packages = {f"packages/{path.name}" for path in (REPO_ROOT / "packages").iterdir() if path.is_dir()}
    assert ROOMS.keys() == found - {".", "tools"} | packages | {"native", LEAF}


def test_imports_go_one_way():
    """No room reaches itself through others."""

    def reached(room: str) -> set[str]:
        return ROOMS[room] | {far for near in ROOMS[room] for far in reached(near)}

    for room in ROOMS:
        assert room not in reached(room)


def test_each_storey_knows_only_what_is_below_it():
    """The ground knows nothing, the harness neither choosing nor a tool, a tool no other; nothing knows a package."""
    above_the_harness = TOOLS | PACKAGES | {"choose"}
    assert len(TOOLS) > 1 and len(PACKAGES) > 1
    assert not ROOMS["costmodel"] and not ROOMS[LEAF]
    for room, imports in ROOMS.items():
        if room not in above_the_harness:
            assert not imports & above_the_harness, room
        elif room not in PACKAGES:
            assert not imports & (TOOLS | PACKAGES), room


def test_what_is_used_without_this_repository_imports_nothing_of_it():
    own = {"training_comparison", "t5bench_judge"}
    for path in (REPO_ROOT / "packages" / "judge" / "src").rglob("*.py"):
        room = room_of(path.relative_to(REPO_ROOT).parts)
        allowed = sys.stdlib_module_names | ALONE[room] | (own if room != LEAF else {"training_comparison"})
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_modules_keep_the_rules_of_the_house():
    for path in modules():
        check_module(path)


CHANGE_THE_PATH = (
    REPO_ROOT / "t5bench" / "__init__.py",
    REPO_ROOT / "t5bench" / "run" / "worker.py",
    REPO_ROOT / "packages" / "ledger" / "src" / "t5bench_ledger" / "forked_files.py",
)


def check_module(path: Path) -> None:
    """Its imports follow the arrows, it leaves the import path alone and has no second list of settings."""
    room = room_of(path.relative_to(REPO_ROOT).parts)
    text = path.read_text()
    settings = BY_NAME.keys()
    tree = ast.parse(text)
    if room in ROOMS:
        imports = {room_of(name.split(".")) for name in imported_modules(tree)}
        assert imports - {room, "t5bench", LEAF} <= ROOMS[room], f"{path}: what {room} must not import"
    # The first finds the packages beside this one; the second starts a program as Python would: from its own directory;
    # the third gives each fork the release that it tries.
    if path not in CHANGE_THE_PATH:
        assert not re.search(r"sys\.path(?:\[.*\] *=|\.insert|\.append| *\+?=[^=])", text)
    if path.name in ("settings.py", "help.py", "scripts.py", "space.py", "asked.py"):
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


def test_no_two_files_of_tests_have_one_name():
    """pytest imports a test file by its bare name, so one run collects all of them only while names differ."""
    names = [path.name for folder in ("tests", "packages/*/tests") for path in REPO_ROOT.glob(f"{folder}/**/test_*.py")]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice
