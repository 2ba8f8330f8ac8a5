"""The virtual environment in the checkout (.venv), which scripts/setup_environment.sh makes.

    "$PYTHON" -m t5bench.virtual_environment REQUIREMENTS-FILE...

creates or completes it, with only the standard library; if it is complete, nothing happens.

What stands in the way is said before anything is downloaded. PyTorch comes from the first of these that has it:

    the base Python            a conda environment, a cluster's module
    pip's wheel directories    find-links, of its configuration or in PIP_FIND_LINKS
    PyTorch's own index        the build for CPUs, or with a GPU that of the driver's CUDA
    pip's index                whose build for CPUs is the one for CUDA
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from t5bench import NEWEST, REPOSITORY, WRONG_PYTHON, Problem, inherited, note
from t5bench.text import guard_streams

# If the base Python already has a torch, that one is used instead.
TORCH = "torch==2.13.0"
VENV = REPOSITORY / ".venv"
PYTHON = VENV / "bin" / "python"
COMPLETE = VENV / "complete"
LOG = VENV / "install.log"
# What the smallest installation takes: PyTorch for CPUs and requirements.txt, measured with Python 3.11.
LEAST_BYTES = 2 << 30
# Settings with which pip would install elsewhere than into the environment, or say nothing or in colours.
UNWANTED = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN", "PIP_QUIET", "FORCE_COLOR", "CLICOLOR_FORCE")
NO_NETWORK = (
    "NewConnectionError|name resolution|Name or service not known|Connection refused|ConnectTimeout|unreachable"
    "|ProxyError|from versions: none|failed to lookup address|error sending request|dns error"
)
# "  Downloading numpy-2.4.6-cp311-manylinux.whl (16.9 MB)": pip's words, and uv's with a number like "178.4MiB".
DOWNLOADED = re.compile(r"^ *Downloading \S.*\((\d+(?:\.\d+)?) ?(bytes|kB|MB|GB|KiB|MiB|GiB)\)", re.MULTILINE)
MEGABYTES = {"bytes": 1e-6, "kB": 1e-3, "MB": 1, "GB": 1e3, "KiB": 2**10 / 1e6, "MiB": 2**20 / 1e6, "GiB": 2**30 / 1e6}


def ensure(requirements: "list[Path]") -> None:
    """Raises Problem if the environment cannot be created."""
    contents = hashlib.sha256(b"".join(path.read_bytes() for path in requirements)).hexdigest()
    version = version_of_environment()
    if version and COMPLETE.exists() and f"{contents}-{version}" in COMPLETE.read_text():
        return
    check_this_machine()
    began = time.monotonic()
    # pip is the last thing that venv makes: an interrupted environment is made again.
    if not (version and PYTHON.with_name("pip").exists()):
        make()
    LOG.write_bytes(b"")
    install(requirements)
    with COMPLETE.open("a") as file:
        file.write(f"{contents}-{version_of_environment()}\n")
    seconds = time.monotonic() - began
    note(f"the environment is complete after {seconds:.0f} s{downloads(LOG.read_text('utf-8', 'replace'))}")


def version_of_environment() -> str:
    """What the environment's Python says of itself; '' if there is none, or its base was removed."""
    program = "import sys; print(sys.version)"
    try:
        answer = subprocess.run([str(PYTHON), "-c", program], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return answer.stdout.removesuffix("\n")


def downloads(log: str) -> str:
    """How much was downloaded, as pip and uv say; '' if they say nothing of it."""
    megabytes = sum(float(size) * MEGABYTES[unit] for size, unit in DOWNLOADED.findall(log))
    return f", with {megabytes:,.1f} MB downloaded" if megabytes else ""


def check_this_machine() -> None:
    """Raises Problem for what would stop the installation."""
    if sys.version_info[:2] > NEWEST:
        raise Problem(*WRONG_PYTHON)
    if not (find_spec("venv") and find_spec("ensurepip")):
        remedy = "On Debian and Ubuntu: apt install python3-venv; or set PYTHON to another Python, such as conda's"
        raise Problem(f"{sys.executable} has no venv module", remedy)
    if os.pathsep in str(REPOSITORY):
        raise Problem(f"{REPOSITORY} has a colon in its path, which no virtual environment may have", "Rename it")
    folder = VENV if VENV.is_dir() else REPOSITORY
    probe = folder / f".writable.{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        remedy = "Copy the whole directory to a place of your own, such as your home directory, and run this there"
        raise Problem(f"{folder} cannot be written: {error.strerror}", remedy) from error
    free = shutil.disk_usage(folder).free
    if free < LEAST_BYTES:
        found = f"{folder} has {free / 1e9:.1f} GB left, and the packages take {LEAST_BYTES / 1e9:.1f} GB at least"
        raise Problem(found, "Free some space, or copy this directory to a larger disk")


def make() -> None:
    lends_torch = torch_of(sys.executable)
    VENV.mkdir(exist_ok=True)
    for path in VENV.glob("bin/python*"):
        if not path.exists():  # a link to a Python that was removed
            path.unlink()
    command = [sys.executable, "-m", "venv", str(VENV)]
    note(f"creating a virtual environment in {VENV}")
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if answer.returncode:
        print(*answer.stdout.splitlines()[-15:], sep="\n", file=sys.stderr)
        remedy = "See its message above; on Debian and Ubuntu: apt install python3-venv"
        raise Problem(f"{sys.executable} cannot make a virtual environment", remedy)
    if lends_torch:
        # After this environment's own packages come the base Python's, which may be a virtual environment itself.
        site = VENV / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
        lent = [path for path in sys.path if path.endswith("-packages")]
        (site / "base.pth").write_text("".join(f"{path}\n" for path in lent))


def torch_of(python: str) -> str:
    """The version of the torch that a Python has, and where it is; '' if it has none."""
    program = "import torch; print(getattr(torch, '__version__', ''), 'of', torch.__path__[0])"
    answer = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def install(requirements: "list[Path]") -> None:
    """Everything but torch by pip, whose configuration uv does not read."""
    present = torch_of(str(PYTHON))
    if present:
        note(f"using torch {present}")
    else:
        install_torch()
    # DeepSpeed is built from source, without isolation so that it sees torch; its operators are compiled when used.
    logged("installing build tools", *pip("install"), "setuptools", "wheel", "packaging")
    for path in requirements:
        command = [*pip("install"), "--no-build-isolation", "--requirement", str(path)]
        logged(f"installing {path.name}", *command)


def pip(*words: str) -> "list[str]":
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *words]


def install_torch() -> None:
    """Raises Problem."""
    configuration = configuration_of_pip()
    version = version_in_wheel_directories()
    if version:
        logged(
            f"installing torch {version} from {configuration.get('find-links', 'a wheel directory')}",
            *pip("install"),
            f"torch=={version}",
        )
        return
    if "no-index" in configuration:
        where = configuration.get("find-links", "")
        release = f"{TORCH} for Python 3.{sys.version_info[1]}"
        found = (
            f"pip may use no index, and its wheel directory {where} has no {release}"
            if where
            else ("pip may use no index, and has no wheel directory")
        )
        raise Problem(found, "Set PIP_FIND_LINKS to a directory with the wheels, or unset PIP_NO_INDEX")
    has_gpu = shutil.which("nvidia-smi") is not None
    if installed_from_pytorchs_index(has_gpu):
        return
    if not has_gpu:
        note(
            f"warning: PyTorch's index gave no build for CPUs (see {LOG}); pip's index has the one for CUDA, which "
            "also runs on CPUs but is about 2.7 GB, not 0.2 GB, to download"
        )
    logged(f"installing {TORCH} from pip's index", *pip("install"), TORCH)


def configuration_of_pip() -> "dict[str, str]":
    """pip's settings that are on, by their names, from its files and the environment."""
    answer = subprocess.run(pip("config", "list"), capture_output=True, text=True, env=environment(), check=False)
    settings = {}
    for line in answer.stdout.splitlines():
        section_and_name, _, value = line.partition("=")
        value = " ".join(value.strip().strip("'\"").replace("\\n", " ").split())
        if value.lower() not in ("", "0", "false", "no", "off"):
            settings[section_and_name.rpartition(".")[2]] = value
    return settings


def version_in_wheel_directories() -> str:
    """The version of torch that pip finds without any index; '' if none. A report of pip's is a format of its own."""
    report = LOG.with_name("torch.json")
    look = ["--dry-run", "--no-index", "--no-deps", "--ignore-installed", "--report", str(report), TORCH]
    answer = subprocess.run([*pip("install"), *look], capture_output=True, env=environment(), check=False)
    try:
        return json.loads(report.read_text())["install"][0]["metadata"]["version"] if answer.returncode == 0 else ""
    except (OSError, ValueError, LookupError, TypeError):  # a pip that is too old to report
        return ""


def installed_from_pytorchs_index(has_gpu: bool) -> bool:
    """Installs the build of torch for this machine with uv, which can choose it; whether that succeeded."""
    found = shutil.which("uv")
    if not found and not logged("installing uv, which chooses the build of PyTorch", *pip("install"), "uv", must=False):
        said = LOG.read_text("utf-8", "replace")
        if re.search(NO_NETWORK, said):
            raise no_index()
        return False
    uv = [found] if found else [str(PYTHON), "-m", "uv"]
    backend = "auto" if has_gpu else "cpu"  # auto: as the driver's version asks
    build = "this driver's CUDA" if has_gpu else "CPUs"
    title = f"installing {TORCH} for {build} from PyTorch's index"
    # Without bytecode, all processes of a first run would compile at the same time.
    command = [*uv, "pip", "install", "--python", str(PYTHON), "--compile-bytecode", "--torch-backend", backend, TORCH]
    return logged(title, *command, must=False)


def environment() -> "dict[str, str]":
    """For pip and uv: they install into the environment, build on its disk and keep a cache where they can."""
    chosen = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    scratch = VENV / "tmp"
    scratch.mkdir(exist_ok=True)
    chosen |= {"PIP_USER": "0", "TMPDIR": str(scratch), "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    has_cache = False
    with contextlib.suppress(OSError, RuntimeError):  # no home, or one that cannot be written
        cache = cache.expanduser()
        cache.mkdir(parents=True, exist_ok=True)
        has_cache = os.access(cache, os.W_OK)
    if not has_cache:
        chosen |= {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
    # Their messages are read: in English, and without colours.
    return chosen | {"LC_ALL": "C.UTF-8", "LANGUAGE": "", "NO_COLOR": "1"}


def no_index() -> Problem:
    remedy = "Check the network and pip's proxy, or set PIP_FIND_LINKS to a directory of wheels; then run this again"
    return Problem("the Python package index cannot be reached", remedy)


def logged(title: str, *command: str, must: bool = True) -> bool:
    """Runs a command whose output goes to the log; whether it succeeded. Raises Problem if it must and did not."""
    note(title)
    with LOG.open("ab") as log:
        begin = log.tell()
        succeeded = subprocess.run(command, env=environment(), stdout=log, stderr=log, check=False).returncode == 0
    shutil.rmtree(VENV / "tmp", ignore_errors=True)
    if succeeded or not must:
        return succeeded
    output = LOG.read_bytes()[begin:].decode(errors="replace")
    if "No space left on device" in output:
        raise Problem(f"the disk is full: {VENV} takes no more", "Free some space, then run this again")
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if "no-index" in configuration_of_pip():
        what = missing[1] if missing else "what the end of the log names"
        found = f"pip may use no index, and its wheel directory lacks {what}"
        raise Problem(found, f"Add it, for example with `pip download {what}` where there is a network")
    if re.search(NO_NETWORK, output):
        raise no_index()
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
    except KeyboardInterrupt:
        note("interrupted: run the same command again to continue")
        sys.exit(128 + signal.SIGINT)
