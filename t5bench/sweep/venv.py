"""The virtual environment in the checkout (.venv) that the quickstart and the tests use.

    "$PYTHON" -m t5bench.sweep.venv REQUIREMENTS-FILE...

creates or completes it, with only the standard library; if it is complete, nothing happens.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from t5bench import NEWEST, REPOSITORY, WRONG_PYTHON, Problem, inherited, note
from t5bench.text import guard_streams

# If the base Python already has a torch, that one is used instead.
TORCH = "torch==2.13.0"
# MB to download, measured for Python 3.11 on Linux (x86-64): pip's log, and for CUDA the sizes in uv's lock file.
CPU_MB = 202
CUDA_MB = 2741
OTHER_MB = {"requirements.txt": 188, "requirements-dev.txt": 26}
VENV = REPOSITORY / ".venv"
PYTHON = VENV / "bin" / "python"
COMPLETE = VENV / "complete"
LOG = VENV / "install.log"
# Common failures: a pattern in the log, and what it means with what to do.
FAILURES = {
    "No space left on device": (
        f"the disk is full: about 4 GB are needed at {REPOSITORY}",
        "Free some space, then run this again",
    ),
    "NewConnectionError|name resolution|Name or service not known|Connection refused|ConnectTimeout|unreachable"
    "|ProxyError|from versions: none": (
        "the Python package index cannot be reached",
        "Check the network and pip's proxy, then run this again",
    ),
}


def ensure(requirements: "list[Path]") -> None:
    """Raises Problem if the environment cannot be created."""
    if sys.version_info[:2] > NEWEST:
        raise Problem(*WRONG_PYTHON)
    if not (find_spec("venv") and find_spec("ensurepip")):
        raise Problem(f"{sys.executable} has no venv module", "On Debian and Ubuntu: apt install python3-venv")
    contents = b"".join(path.read_bytes() for path in requirements)
    stamp = f"{hashlib.sha256(contents).hexdigest()}-{sys.version}"
    if not COMPLETE.exists() or stamp not in COMPLETE.read_text():
        # The last thing that venv makes: an interrupted one is made again.
        if not PYTHON.with_name("pip").exists():
            make()
        install(requirements)
        with COMPLETE.open("a") as file:
            file.write(f"{stamp}\n")


def make() -> None:
    VENV.mkdir(exist_ok=True)
    lends_torch = has_torch(sys.executable)
    logged(f"creating a virtual environment in {VENV}", sys.executable, "-m", "venv", str(VENV))
    if lends_torch:
        # After this environment's own packages come the base Python's, which may be a virtual environment itself.
        site = VENV / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
        lent = [path for path in sys.path if path.endswith("-packages")]
        (site / "base.pth").write_text("".join(f"{path}\n" for path in lent))


def has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def install(requirements: "list[Path]") -> None:
    """torch from PyTorch's own index: without a GPU the build for CPUs, with one that of the driver's CUDA. Where that
    index gives none, the package index's. Everything else by pip, whose configuration uv does not read."""
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not has_torch(str(PYTHON)):
        has_gpu = shutil.which("nvidia-smi") is not None
        if not installed_from_pytorchs_index(pip, has_gpu):
            if not has_gpu:
                note(
                    f"warning: PyTorch's index, download.pytorch.org, gave no build for CPUs (see {LOG}); the package "
                    f"index has the one for CUDA, which also runs on CPUs: {CUDA_MB:,} MB to download, not {CPU_MB} MB"
                )
            logged(f"installing {TORCH}: about {CUDA_MB:,} MB to download", *pip, TORCH)
    # DeepSpeed is built from source, without isolation so that it sees torch; its operators are compiled when used.
    logged("installing build tools", *pip, "setuptools", "wheel", "packaging")
    for path in requirements:
        size = f": about {OTHER_MB[path.name]} MB to download" if path.name in OTHER_MB else ""
        logged(f"installing {path.name}{size}", *pip, "--no-build-isolation", "--requirement", str(path))


def installed_from_pytorchs_index(pip: "list[str]", has_gpu: bool) -> bool:
    """Installs the build of torch for this machine with uv, which can choose it; whether that succeeded."""
    found = shutil.which("uv")
    if not found and not logged("installing uv", *pip, "uv", must=False):
        return False
    uv = [found] if found else [str(PYTHON), "-m", "uv"]
    if has_gpu:
        backend = "auto"  # as the driver's version asks
        title = f"installing {TORCH} for this driver's CUDA: about {CUDA_MB:,} MB to download"
    else:
        backend = "cpu"
        title = f"installing {TORCH} for CPUs: about {CPU_MB} MB to download"
    command = [*uv, "pip", "install", "--python", str(PYTHON), "--torch-backend", backend, TORCH]
    return logged(title, *command, must=False)


def logged(title: str, *command: str, must: bool = True) -> bool:
    """Runs a command whose output goes to the log; whether it succeeded. Raises Problem if it must and did not."""
    note(title)
    environment = dict(os.environ, DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")
    with LOG.open("ab") as log:
        begin = log.tell()
        succeeded = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode == 0
    if succeeded or not must:
        return succeeded
    output = LOG.read_bytes()[begin:].decode(errors="replace")
    for pattern, (meaning, remedy) in FAILURES.items():
        if re.search(pattern, output):
            raise Problem(meaning, remedy)
    print(*output.splitlines()[-15:], sep="\n", file=sys.stderr)
    remedy = f"The end of {LOG} is above; fix what it names, then run this again"
    raise Problem("cannot install the Python packages", remedy)


if __name__ == "__main__":
    guard_streams()
    inherited.put_right()
    try:
        ensure([Path(word) for word in sys.argv[1:]])
    except Problem as problem:
        note(problem.report)
        sys.exit(2)
