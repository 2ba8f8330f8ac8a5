"""Completes a CUDA toolkit for compiling the engines' kernels, from the libraries that come with PyTorch.

Many images have only nvcc and CUDA's runtime. PyTorch's headers include cuSPARSE's, and DeepSpeed links cuRAND. The
nvidia packages next to PyTorch have both, but their libraries have a version in the name, which a linker does not try.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from importlib import util
from pathlib import Path

from t5bench.record.machine import versions

LINKS = Path("~/.cache/t5-parallelism/cuda-libraries")
# A file of every complete toolkit that a compiler alone does not bring.
_TELLING_HEADER = "cusparse.h"


def completions(
    environment: Mapping[str, str], links: Path = LINKS, packages: Iterable[Path] | None = None
) -> dict[str, str]:
    """Variables with which torch's compiler finds all that it needs; empty if nothing is missing or there is no nvcc.

    CUDA_HOME if nvcc on PATH is a link or a wrapper, whose folder torch would mistake for the toolkit's; CPATH and
    LIBRARY_PATH if the toolkit is only a compiler, of the same CUDA as torch. Existing values come first. Links to the
    libraries go into ``links``. packages: folders of the nvidia packages (default: torch's own). DS_SKIP_CUDA_CHECK if
    nvcc and torch have another minor version of the same CUDA: DeepSpeed's list of pairs that fit ends at CUDA 12.
    """
    given = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = f"{given}/bin/nvcc" if given else shutil.which("nvcc", path=environment.get("PATH"))
    top = nvcc and re.search(r"^#\$ TOP=(.+)$", _said(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull), re.MULTILINE)
    if not nvcc or not top:
        return {}
    home = Path(top[1].strip()).resolve()
    found = {} if given or home == Path(nvcc).parent.parent else {"CUDA_HOME": str(home)}
    if packages is None:
        spec = util.find_spec("nvidia")
        packages = map(Path, (spec and spec.submodule_search_locations) or ())
    folders = list(packages)
    headers = [path for folder in folders for path in sorted(folder.glob("*/include"))]
    release = re.search(r"release (\d+)\.(\d+)", _said(nvcc, "--version"))
    major, _, minor = (versions()["cuda"] or "").partition(".")
    is_torchs = release and major == release[1]
    if release and is_torchs and minor != release[2] and "DS_SKIP_CUDA_CHECK" not in environment:
        found["DS_SKIP_CUDA_CHECK"] = "1"
    lacks = not (home / "include" / _TELLING_HEADER).exists()
    if lacks and is_torchs and any((folder / _TELLING_HEADER).exists() for folder in headers):
        _link_libraries(folders, links := links.expanduser())
        added = {"CPATH": os.pathsep.join(map(str, headers)), "LIBRARY_PATH": str(links)}
        found |= {name: os.pathsep.join(filter(None, (environment.get(name), value))) for name, value in added.items()}
    return found


def _link_libraries(folders: Iterable[Path], directory: Path) -> None:
    """Creates or corrects a link ``lib<name>.so`` for each library in the folders."""
    directory.mkdir(parents=True, exist_ok=True)
    for library in (path for folder in folders for path in sorted(folder.glob("*/lib/lib*.so.*"))):
        link = directory / re.sub(r"\.so\..*", ".so", library.name)
        if link.resolve() != library.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(library)


def _said(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout + result.stderr
