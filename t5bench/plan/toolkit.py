"""Completes a CUDA toolkit for compiling the engines' kernels, from the libraries that come with PyTorch.

Many images have only nvcc and CUDA's runtime. PyTorch's headers include cuSPARSE's, and DeepSpeed's operators link
cuRAND. The nvidia packages next to PyTorch may have both, but their libraries have a version in the name, which a
linker does not try.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import util
from pathlib import Path

from t5bench import Problem
from t5bench.record.machine import versions

LINKS = Path("~/.cache/t5-parallelism/cuda-libraries")
# A file of every complete toolkit that a compiler alone does not bring.
_TELLING_HEADER = "cusparse.h"


def completions(
    environment: Mapping[str, str], links: Path = LINKS, packages: Iterable[Path] | None = None
) -> dict[str, str]:
    """Variables with which torch's compiler finds all that it needs; empty if nothing is missing or there is no nvcc.

    CUDA_HOME if nvcc on PATH is a link or a wrapper, whose folder torch would mistake for the toolkit's; CPATH and
    LIBRARY_PATH if the toolkit is only a compiler, of the same CUDA as torch; DS_SKIP_CUDA_CHECK where nvcc's CUDA
    differs from torch's only in the minor version, which DeepSpeed would refuse. Existing values come first. Links to
    the libraries go into ``links``. packages: folders of the nvidia packages (default: torch's own).
    """
    given = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = f"{given}/bin/nvcc" if given else shutil.which("nvcc", path=environment.get("PATH"))
    home = _home(nvcc)
    if not nvcc or not home:
        return {}
    added = {} if given or home == Path(nvcc).parent.parent else {"CUDA_HOME": str(home)}
    folders = list(_nvidia_packages() if packages is None else packages)
    headers = [path for folder in folders for path in sorted(folder.glob("*/include"))]
    release = re.search(r"release ([0-9.]+)", _said(nvcc, "--version"))
    compiler = release[1] if release else ""
    torchs = versions()["cuda"] or ""
    if not compiler or compiler.partition(".")[0] != torchs.partition(".")[0]:
        return added
    if compiler.split(".")[:2] != torchs.split(".")[:2]:
        # Within a major version CUDA's libraries are compatible. DeepSpeed knows this of CUDA 12 at most.
        added["DS_SKIP_CUDA_CHECK"] = environment.get("DS_SKIP_CUDA_CHECK") or "1"
    lacks = not (home / "include" / _TELLING_HEADER).exists()
    if lacks and any((folder / _TELLING_HEADER).exists() for folder in headers):
        links = links.expanduser()
        _link_libraries(folders, links)
        for name, value in (("CPATH", os.pathsep.join(map(str, headers))), ("LIBRARY_PATH", str(links))):
            added[name] = os.pathsep.join(filter(None, (environment.get(name), value)))
    return added


def check_curand(environment: Mapping[str, str], packages: Iterable[Path] | None = None) -> None:
    """Raises Problem if DeepSpeed's CPUAdam, which offloading uses, cannot be linked for lack of cuRAND.

    PyTorch brings cuRAND up to 2.14; DeepSpeed links it in older releases. It is looked for where nvcc and
    completions() let the linker look; without an nvcc there is nothing to compile with, and DeepSpeed says so.
    """
    given = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    home = _home(f"{given}/bin/nvcc" if given else shutil.which("nvcc", path=environment.get("PATH")))
    if not home or not _links_curand():
        return
    folders = list(_nvidia_packages() if packages is None else packages)
    places = [home / "lib64", home / "lib", *home.glob("targets/*/lib"), Path("/usr/lib/x86_64-linux-gnu")]
    places += [path for folder in folders for path in folder.glob("*/lib")]
    places += [Path(path) for path in environment.get("LIBRARY_PATH", "").split(os.pathsep) if path]
    if not any(True for place in places for _ in place.glob("libcurand.so*")):
        lacking = "DeepSpeed's CPUAdam is linked with cuRAND, which neither the CUDA toolkit nor PyTorch brings here"
        raise Problem(lacking, "Install it next to PyTorch: pip install nvidia-curand")


def _links_curand() -> bool:
    """Whether the installed DeepSpeed links CPUAdam with cuRAND: by its sources, because importing it takes seconds."""
    spec = util.find_spec("deepspeed")
    for folder in (spec and spec.submodule_search_locations) or ():
        builder = Path(folder, "ops", "op_builder", "builder.py")
        if builder.is_file() and "'-lcurand'" in builder.read_text():
            return True
    return False


def _home(nvcc: str | None) -> Path | None:
    """The toolkit's folder, as nvcc says; None without one."""
    said = _said(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull) if nvcc else ""
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else None


def _nvidia_packages() -> list[Path]:
    spec = util.find_spec("nvidia")
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def import_fault(module: str) -> str:
    """Why this Python cannot import an installed module, such as one compiled for another torch; "" if it can."""
    importing = _run([sys.executable, "-c", f"import {module}"], seconds=120)
    if importing is None:
        return f"{module} cannot be imported within two minutes"
    lines = importing.stderr.strip().splitlines() or [f"exit status {importing.returncode}"]
    return f"{module} cannot be imported: {lines[-1]}" if importing.returncode else ""


def _link_libraries(folders: Iterable[Path], directory: Path) -> None:
    """Creates or corrects a link ``lib<name>.so`` for each library in the folders."""
    directory.mkdir(parents=True, exist_ok=True)
    for library in (path for folder in folders for path in sorted(folder.glob("*/lib/lib*.so.*"))):
        link = directory / re.sub(r"\.so\..*", ".so", library.name)
        if link.resolve() != library.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(library)


def _said(*command: str) -> str:
    result = _run(command, seconds=20)
    return result.stdout + result.stderr if result else ""


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
