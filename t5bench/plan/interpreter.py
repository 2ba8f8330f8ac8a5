"""The Python of a run. The plan checks its packages, torchrun and the workers run in it, and the record names them."""

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

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


def needs_link(prefix: str = sys.prefix) -> bool:
    """Whether what is compiled with the environment in this directory would fail, as for its blank or apostrophe."""
    return not _PLAIN.fullmatch(prefix) and is_environment(Path(prefix))


def plain_link(prefix: str = sys.prefix, folder: Path | None = None) -> Path:
    """A link to an environment, without a blank or the like in its path; Python that is started there sees only that.

    folder: where the link is created (default: the user's cache, or a folder of the user's in /tmp). Raises OSError.
    """
    home = Path("~/.cache/t5-parallelism").expanduser()
    if folder is None:
        folder = home if _PLAIN.fullmatch(str(home)) else Path(f"/tmp/t5-parallelism-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    link = folder / f"python-{hashlib.sha256(os.fsencode(prefix)).hexdigest()[:12]}"
    # Nodes with a common home, or launchers started together, create the same one.
    with contextlib.suppress(FileExistsError):
        link.symlink_to(prefix)
    if link.resolve() != Path(prefix).resolve():
        raise FileExistsError(f"{link} leads elsewhere than to {prefix}")
    return link
