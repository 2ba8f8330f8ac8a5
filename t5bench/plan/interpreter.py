"""The Python of a run. The plan checks its packages, torchrun and the workers run in it, and the record names them."""

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path

from t5bench import Problem
from t5bench.record.plan import Plan

# What compilers' and linkers' command lines take without quotes: PyTorch and DeepSpeed write none.
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


def interpreter(environ: Mapping[str, str]) -> str:
    """The interpreter that a launcher was told to use, which is this one or a wrapper of it."""
    return environ.get("PYTHON") or sys.executable


def path_of_programs(environ: Mapping[str, str]) -> str:
    """PATH with which the programs that a run calls by name (ninja, nvcc, python3) are this Python's.

    If its environment is active, PATH stays as it is: the user may have put a module's programs in front.
    """
    programs = str(Path(sys.executable).parent)
    path = environ.get("PATH", os.defpath)
    first = shutil.which("python3", path=path) or shutil.which("python", path=path)
    is_active = first is not None and str(Path(first).parent) == programs
    is_systems = not is_environment(Path(sys.prefix)) and programs in path.split(":")
    return path if is_active or is_systems else f"{programs}:{path}"


def is_environment(prefix: Path) -> bool:
    """Whether a Python's directory is a virtual or a Conda environment, with programs of its own."""
    return (prefix / "pyvenv.cfg").exists() or (prefix / "conda-meta").exists()


def is_plain(path: str | Path) -> bool:
    """Whether compilers and linkers can read a path without quotes, which has no blank, apostrophe or the like."""
    return _PLAIN.fullmatch(str(path)) is not None


def needs_link(prefix: str = sys.prefix) -> bool:
    """Whether what is compiled with the environment in this directory would fail, as for its blank or apostrophe."""
    return not is_plain(prefix) and is_environment(Path(prefix))


def torch_elsewhere(*, can_be_linked: bool) -> str:
    """PyTorch's folder, if compilers cannot read its path and a link to this environment would not help, because it is
    another environment's, which this one is built on; else "". can_be_linked: whether a link is used at all."""
    spec = util.find_spec("torch")
    place = str(Path(spec.origin).parent) if spec and spec.origin else "/"
    is_linked = can_be_linked and needs_link() and Path(place).is_relative_to(sys.prefix)
    return "" if is_plain(place) or is_linked else place


def plain_folder(*, short: bool = False) -> Path:
    """A folder of this user's whose path compilers can read: in the cache, or in /tmp, where it is also short.

    Raises OSError.
    """
    home = Path("~/.cache/t5-parallelism").expanduser()
    folder = home if is_plain(home) and not short else Path(f"/tmp/t5-parallelism-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def plain_link(target: str | Path = sys.prefix, folder: Path | None = None, name: str = "python") -> Path:
    """A link to a directory without a blank or the like in its path; Python that is started there sees only that.

    folder: where the link is created (default: plain_folder). name: how the link's name begins. Raises OSError.
    """
    folder = folder or plain_folder()
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / f"{name}-{_digest(target)}"
    # Nodes with a common home, or launchers started together, create the same one.
    with contextlib.suppress(FileExistsError):
        link.symlink_to(target)
    if link.resolve() != Path(target).resolve():
        raise FileExistsError(f"{link} leads elsewhere than to {target}")
    return link


def _digest(path: str | Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def extensions_folder(environ: Mapping[str, str]) -> Path:
    """Where PyTorch compiles extensions with these variables, such as DeepSpeed's."""
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions").expanduser()


def plain_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which PyTorch compiles where compilers can read the path; empty if it does so anyway.

    Raises OSError.
    """
    found = {}
    if not is_plain(extensions_folder(environ)):
        # One for each environment: PyTorch tells their releases apart only in its own folder.
        found["TORCH_EXTENSIONS_DIR"] = str(plain_folder() / f"extensions-{_digest(sys.prefix)}")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if not is_plain(environ.get(name) or "/"):
            found[name] = str(plain_folder() / name.lower())
    return found


# ---- a plan whose paths compilers can read ---------------------------------------------------------------------------


def what_is_compiled(planned: Plan) -> str:
    """What a run compiles with PyTorch's headers and libraries; "" if nothing."""
    if "--compile" in planned.arguments.extra:
        return "what --compile makes of the layers"
    if planned.engine != "megatron":
        return ""
    if planned.device == "cuda":
        return "the engine's kernels"
    return "DeepSpeed's cpu_adam" if planned.offloads_optimizer else ""


def with_plain_engine(planned: Plan) -> Plan:
    """The plan with an engine whose path compilers can read, where it compiles kernels: ninja expands a $ in it.

    Raises OSError.
    """
    if planned.engine != "megatron" or planned.device != "cuda" or is_plain(planned.engine_directory):
        return planned
    link = str(plain_link(planned.engine_directory, name="engine"))
    program = [word.replace(planned.engine_directory, link) for word in planned.program]
    return replace(planned, program=program)


def with_plain_paths(planned: Plan) -> Plan:
    """The plan with paths that compilers can read: PyTorch and DeepSpeed quote none of theirs."""
    try:
        planned = replace(planned, environment={**planned.environment, **plain_caches(os.environ)})
        planned = with_plain_engine(planned)
        can_be_linked = Path(planned.python).is_relative_to(sys.prefix)
        if what_is_compiled(planned) and (place := torch_elsewhere(can_be_linked=can_be_linked)):
            found = (
                f"{what_is_compiled(planned)} cannot be compiled, because compilers cannot read PyTorch's path: {place}"
            )
            remedy = "Use an environment with a PyTorch of its own, or one whose path has no blank, quote or accent"
            return planned.stopped_by(Problem(found, remedy, "path-of-python", fatal=False))
        if not needs_link() or not can_be_linked:
            return planned
        link = plain_link()
    except OSError as error:
        found = f"nothing can be compiled with the environment {sys.prefix}, because of its path: {error}"
        remedy = "Create it where the path has only letters without accents, digits and .-_"
        return planned.stopped_by(Problem(found, remedy, "path-of-python", fatal=False))
    path = f"{link}/bin:{planned.environment.get('PATH') or os.environ.get('PATH', os.defpath)}"
    told = f"Python is started through {link}: compilers could not read the path of {sys.prefix}"
    python = str(link / Path(planned.python).relative_to(sys.prefix))
    environment = {**planned.environment, "PATH": path}
    return replace(planned, python=python, environment=environment, notes=[*planned.notes, told])
