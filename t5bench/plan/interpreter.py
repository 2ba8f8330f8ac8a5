"""The Python of a run. The plan checks its packages, torchrun and the workers run in it, and the record names them."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path


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
