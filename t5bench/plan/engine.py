"""The engine: whether a Megatron-DeepSpeed checkout is patched exactly as patches/ says, and what it can do here.

python -m t5bench.plan.engine state DIRECTORY         prints series, megatron_t5_fixes, unpatched, changed or missing
python -m t5bench.plan.engine differences DIRECTORY   prints what differs from the patched engine

The files themselves are compared, without git, which can overlook files and is absent from a bundle.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import util
from pathlib import Path

from t5bench import REPOSITORY
from t5bench.plan.request import Request
from t5bench.record.machine import checksum
from t5bench.record.plan import by_name

CHECKSUMS = REPOSITORY / "patches" / "checksums"
SERIES, FIXES_ALONE, UNPATCHED, CHANGED, MISSING = "series", "megatron_t5_fixes", "unpatched", "changed", "missing"
# What Python imports, a compiler reads, or make uses as its Makefile.
CODE = re.compile(r".+\.(py|pyc|so|c|cc|cpp|cu|cuh|h|hpp)|(GNU)?[Mm]akefile")
IMPORTABLE = (".py", ".pyc", ".so")
METADATA = (".dist-info", ".egg-info")
# What the engine compiles from these sources, again whenever the sources are newer.
BUILT = re.compile(r"megatron/(fused_kernels/build/.*|data/helpers\.cpython-[\w-]+\.so)")
# Upstream's other folders, from which training imports nothing.
OTHER_FOLDERS = {"__pycache__", "dataset", "docs", "examples", "examples_deepspeed", "images", "megatron", "tasks"}
MOST_NAMED = 3
# What --layout-independent-init refuses, or knows no initial weights for.
UNUSUAL = ("--swiglu", "--num-key-value-heads", "--num-experts", "--untie-embeddings-and-output-weights",
           "--init-method-xavier-uniform")  # fmt: skip
COMPILING_SECONDS = 900  # longer than any extension of the engine takes


def recorded_checksums(state: str, checksums: Path | None = None) -> dict[str, str]:
    """The sha256 of each of the engine's files, with these patches applied."""
    lines = ((checksums or CHECKSUMS) / f"{state}.sha256").read_text().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def state_of(directory: Path, checksums: Path | None = None) -> str:
    """The state of a checkout, one of the constants above. It covers everything that decides how the engine trains.

    checksums: the directory with the checksums of each state (default: this repository's).
    """
    if not (directory / "pretrain_t5.py").is_file():
        return MISSING
    digest = cache(lambda name: checksum(directory / name))
    for state in (SERIES, FIXES_ALONE, UNPATCHED):
        recorded = recorded_checksums(state, checksums)
        if all(digest(name) == wanted for name, wanted in recorded.items()):
            return CHANGED if any(_intruders(directory, recorded)) else state
    return CHANGED


def differences(directory: Path, checksums: Path | None = None) -> list[str]:
    """One line for each file that does not belong to the patched engine, and for each that differs from it."""
    recorded = recorded_checksums(SERIES, checksums)
    found = {name: checksum(directory / name) for name in recorded}
    changed = [name for name, digest in recorded.items() if found[name] != digest]
    lines = [f"{name} {'differs' if found[name] else 'is missing'}" for name in changed]
    return [*_intruders(directory, recorded), *lines]


def _intruders(directory: Path, own: Mapping[str, str]) -> Iterator[str]:
    """One line for each file that Python or a compiler would use although it does not belong to the engine."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and _is_imported(path, own):
            yield f"{path.name}/ would be imported instead of any other package of that name"
        elif path.suffix in METADATA and not path.name.startswith("megatron_core"):  # of pip install -e
            yield f"{path.name}/ would be mistaken for an installed package"
        elif path.suffix in IMPORTABLE and path.name not in own and not path.is_dir():
            yield f"{path.name} would be imported instead of any other module of that name"
    for folder, folders, names in os.walk(directory / "megatron"):
        place = Path(folder).relative_to(directory)
        for name in sorted(names):
            if place.name == "__pycache__":
                if _is_unchecked(Path(folder, name)):
                    yield f"{place / name} would be used whatever its source says"
            elif CODE.fullmatch(name) and (file := str(place / name)) not in own and not BUILT.fullmatch(file):
                yield f"{file} does not belong to the engine"
        links = [str(place / name) for name in folders if Path(folder, name).is_symlink()]
        yield from (f"{link} is a symbolic link" for link in links if not BUILT.fullmatch(f"{link}/"))


def _is_imported(folder: Path, own: Mapping[str, str]) -> bool:
    """Whether Python would import a package from this folder of the checkout that is not the engine's own.

    A folder without __init__.py is a package only if no other of its name has one, and without code it does not matter.
    """
    name = folder.name
    inits = [f"{name}/{init.name}" for init in folder.glob("__init__.*") if init.suffix in IMPORTABLE]
    if inits or name in OTHER_FOLDERS or not name.isidentifier():
        return any(init not in own for init in inits)
    files = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    if not any(path.suffix in IMPORTABLE for path in files):
        return False
    installed = util.find_spec(name)
    return installed is None or installed.origin is None


def _is_unchecked(path: Path) -> bool:
    """Whether this is compiled Python that is never compared with its source (PEP 552)."""
    with contextlib.suppress(OSError):
        return path.read_bytes()[4:8] == b"\1\0\0\0"
    return False


def check_engine(request: Request, directory: Path, device: str, gpus_shared: bool) -> str:
    """The state of the checkout, for the plan; what a run lacks goes to the findings."""
    if request.value("ENGINE") != "megatron":
        return SERIES
    state, lack = state_of(directory), request.findings.lack
    usual = {"--num-key-value-heads": request.value("NUM_ATTENTION_HEADS"), "--num-experts": "1"}
    for name, value in by_name(request.extra).items() if state != FIXES_ALONE else ():
        if name in UNUSUAL and value != usual.get(name):
            found = f"{name} cannot be given after --: the patched engine has no initial weights for such a model"
            request.findings.refuse("engine-argument", found, "Leave it out")
    checkout = f"the Megatron-DeepSpeed checkout at {directory}"
    setup = f"Run: MEGATRON_DIR='{directory}' bash '{REPOSITORY}/scripts/setup_megatron.sh'"
    if state == MISSING:
        lack("no-engine", f"there is no Megatron-DeepSpeed checkout at {directory}", setup)
    elif state == UNPATCHED:
        lack("engine-not-patched", f"{checkout} is not patched", setup)
    elif state == CHANGED:
        first = differences(directory)
        named = "; ".join(first[:MOST_NAMED]) + (f"; and {len(first) - MOST_NAMED} more" * (len(first) > MOST_NAMED))
        remedy = f"{setup} --check lists all differences, --reset stashes them; delete ignored files yourself"
        lack("engine-not-patched", f"{checkout} does not match patches/: {named}", remedy)
    elif state == FIXES_ALONE and (device == "cpu" or gpus_shared):
        why = "CPU" if device == "cpu" else "SHARE_GPUS=1"
        alone = f"{checkout} has only megatron_t5_fixes.patch"
        lack("engine-partly-patched", f"{alone}, but {why} needs all patches", setup)
    elif state == FIXES_ALONE:
        without = "W&B does not get the README's metrics, and TFLOPs count only the encoder"
        request.findings.notes.append(f"warning: only megatron_t5_fixes.patch is applied: {without}. {setup}")
    return state


def extension_locks() -> Iterator[Path]:
    """PyTorch's lock files: it keeps one next to each extension that it compiles, and waits forever if one exists."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser().glob("**/lock")


def check_locks(request: Request, directory: Path) -> None:
    """Finds locks left by a killed compilation. A lock may be in use if it is new or a process here has it open."""
    if request.value("ENGINE") != "megatron":
        return
    for lock in (*extension_locks(), directory / "megatron" / "fused_kernels" / "build" / "lock"):
        try:
            is_old = time.time() - lock.stat().st_mtime > COMPILING_SECONDS
        except OSError:
            continue
        if _is_open(lock):
            continue
        if is_old:
            found = f"{lock} was left by a compilation that was killed, and PyTorch would wait for it forever"
            request.findings.lack("stale-lock", found, f"Run: rm '{lock}'")
        else:
            waits = f"warning: PyTorch waits as long as {lock} exists, and no process of this machine holds it"
            request.findings.notes.append(f"{waits}. Unless another host is compiling, run: rm '{lock}'")


def _is_open(path: Path) -> bool:
    """Whether a process of this user has a file open on this machine."""
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if opened.samefile(path):
                return True
    return False


if __name__ == "__main__":
    task, place = sys.argv[1], Path(sys.argv[2])
    print("\n".join([state_of(place)] if task == "state" else differences(place)))
