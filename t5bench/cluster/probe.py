"""What a node reports about itself. check.py runs this module there, whether or not the node has the repository.

argv[1] is a Question as JSON. Prints a JSON object: a Cell for each row of the table, and two numbers without a row,
``free_port`` and ``clock`` (in seconds since 1970). It needs only the standard library.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

from t5bench.corpus.index import dataset_paths, read_index, read_record
from t5bench.plan.engine import CHANGED, MISSING, UNPATCHED, state_of
from t5bench.record import machine
from t5bench.record.hosts import addresses_of, is_loopback, own_name_fault

GIB = 2**30
LEAST_DISK = 1 * GIB  # logs of many runs; checkpoints of the large model take several times more
LEAST_MEMORY = 2 * GIB  # a process that has loaded torch and the engine
REQUIRED = ("torch", "deepspeed", "transformers")
SOURCES = ("scripts", "native", "t5bench", "ds_configs", "patches")
SAMPLES, SAMPLE_BYTES = 64, 2**20


@dataclass(frozen=True)
class Cell:
    """A node's entry in a row of the table: a problem makes it red, and ``same`` must be equal on all nodes."""

    text: str
    problem: str = ""
    remedy: str = ""
    same: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """hosts: all of them, the master first. engine_directory: empty for the native engine. seconds: the time limit."""

    host: str
    hosts: Sequence[str]
    repository: str
    engine_directory: str
    data_prefix: str
    output_directory: str
    device: str
    ports: Sequence[int]
    seconds: float


Cells = Mapping[str, Cell | int | None]


def digest(path: Path) -> str:
    """SHA-256 of a file's size and of samples spread evenly over it; up to 64 MiB the samples cover the whole file."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    starts = range(0, size, max(SAMPLE_BYTES, size // SAMPLES))
    with path.open("rb") as stream:
        for start in (*starts, max(0, size - SAMPLE_BYTES)):
            stream.seek(start)
            found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()


def digest_of_files(root: Path, *folders: Path) -> str:
    """Empty where there are none."""
    paths = sorted(path for folder in folders for path in folder.rglob("*"))
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    lines = [f"{digest(path)} {path.relative_to(root)}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def address(asked: Question) -> Cells:
    own, master = socket.gethostname(), asked.hosts[0]
    found = addresses_of(own)
    problem, remedy = own_name_fault(own, found)
    if len(asked.hosts) > 1 and problem:
        return {"address": Cell("own name", problem, remedy)}
    masters = addresses_of(master)
    if asked.host != master and all(map(is_loopback, masters)) and not is_loopback(asked.host):
        problem = f"the master's name {master} resolves to {', '.join(masters) or 'nothing'} on this node"
        remedy = f"Add it to /etc/hosts of {asked.host}, or use the master's address in HOSTS"
        return {"address": Cell("no master", problem, remedy)}
    return {"address": Cell(next((address for address in found if not is_loopback(address)), own))}


def repository(asked: Question) -> Cells:
    root = Path(asked.repository)
    if not root.is_dir():
        return {"repository": Cell("missing", f"there is no {root}", "Clone or copy the repository to that path")}
    commit, changed = machine.commit(root)
    content = digest_of_files(root, *(root / folder for folder in SOURCES))
    text = commit[:8] if commit else f"files {content[:8]}"
    same = {"commit": commit or "", "files": content}
    return {"repository": Cell(f"{text} changed" if changed else text, same=same)}


def engine(asked: Question) -> Cells:
    if not asked.engine_directory:
        return {"engine": Cell("native")}
    directory = Path(asked.engine_directory)
    state = state_of(directory, Path(asked.repository) / "patches" / "checksums")
    wrong = {MISSING: "is missing", UNPATCHED: "is not patched", CHANGED: "does not match patches/"}.get(state)
    if not wrong:
        return {"engine": Cell(state, same={"patches": state})}
    setup = f"Run on {asked.host}: MEGATRON_DIR={shlex.quote(str(directory))} bash scripts/setup_megatron.sh"
    return {"engine": Cell(state, f"the Megatron-DeepSpeed checkout at {directory} {wrong}", setup)}


def libraries(_: Question) -> Cells:
    found = {name: version or "none" for name, version in machine.versions().items()}
    lacking = {name for name in REQUIRED if found[name] == "none"}
    problem = "{} is not installed for the Python of this check"
    return {n: Cell(v, problem.format(n)) if n in lacking else Cell(v, same={"version": v}) for n, v in found.items()}


def data(asked: Question) -> Cells:
    prefix = Path(asked.data_prefix)
    paths, folder = dataset_paths(prefix), prefix.parent
    try:
        read_index(prefix)
    except ValueError as error:
        return {"data": Cell("damaged" if all(path.is_file() for path in paths) else "missing", str(error))}
    same = {path.suffix: digest(path) for path in paths}
    same["tokenizer"] = digest_of_files(folder, folder / "tokenizer")
    recorded = read_record(prefix).get("files")
    same["record"] = str([recorded.get(path.name) for path in paths]) if isinstance(recorded, dict) else ""
    return {"data": Cell(f"{paths[0].stat().st_size / 1e6:.1f} MB {same['.idx'][:8]}", same=same)}


def gpus(asked: Question) -> Cells:
    found = machine.gpus(os.environ)
    if not found:
        lacking = asked.device == "cuda"
        return {"GPUs": Cell("no GPU", "nvidia-smi lists no GPU") if lacking else Cell("no GPU", same={"GPUs": ""})}
    kinds = {f"{g['name'].removeprefix('NVIDIA ')} {round((g['memory_mib'] or 0) / 1024)} GiB" for g in found}
    text = f"{len(found)} x {' + '.join(sorted(kinds))}"
    driver = ", ".join(sorted({gpu["driver"] for gpu in found}))
    return {"GPUs": Cell(text, same={"GPUs": text}), "driver": Cell(driver, same={"driver": driver})}


def ports(asked: Question) -> Cells:
    """The rendezvous ports that are in use, each with its process. Only the master's are needed."""
    taken = {}
    for port in asked.ports:
        try:
            socket.create_server(("", port)).close()
        except OSError:
            taken[port] = listener(port)
    free = {"free_port": next((port for port in asked.ports if port not in taken), None)}
    listed = ", ".join(map(str, taken))
    if not taken:
        return free | {"ports": Cell("free")}
    if asked.host != asked.hosts[0]:
        return free | {"ports": Cell(f"{listed} taken*")}
    by = "; ".join(f"{port} by {process}" for port, process in taken.items() if process)
    problem = f"rendezvous ports are in use: {listed}{f' ({by})' if by else ''}"
    remedy = "Stop what listens there (an earlier run?), or use another port on every node: MASTER_PORT=29900"
    return free | {"ports": Cell(f"{listed} taken", problem, remedy)}


def listener(port: int) -> str:
    """The process that listens on a port, or "": another user's cannot be seen."""
    with contextlib.suppress(OSError):  # not every system has ss
        command = ["ss", "-Hltnp", f"sport = :{port}"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
        if match := re.search(r'"(.+?)",pid=(\d+)', said):
            return f"process {match[2]} ({match[1]})"
    return ""


def disk(asked: Question) -> Cells:
    wanted = Path(asked.output_directory)
    path = next(path for path in (wanted, *wanted.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=path).close()  # what is writable may still have no inode, or be a file
    except OSError as error:
        return {"disk": Cell("not writable", f"cannot write to {path}: {error.strerror}", "Choose another OUTPUT_DIR")}
    free = shutil.disk_usage(path).free
    problem = f"only {free / GIB:.1f} GiB are free at {path}" if free < LEAST_DISK else ""
    return {"disk": Cell(f"{free / GIB:.0f} GiB free", problem, "Free some space, or put OUTPUT_DIR on a larger disk")}


def memory(asked: Question) -> Cells:
    said = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = (int(said[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    problem = f"only {available / GIB:.1f} GiB of memory are available" if available < LEAST_MEMORY else ""
    text = f"{available / GIB:.0f} of {total / GIB:.0f} GiB"
    return {"memory": Cell(text, problem, f"Stop what fills the memory of {asked.host}")}


FACTS = (address, repository, engine, libraries, data, gpus, ports, disk, memory)


def look(asked: Question) -> Cells:
    """All facts, in order. One that hangs, for example because of a lost file system, does not delay the others."""
    pool = ThreadPoolExecutor(len(FACTS))
    futures = {fact.__name__: pool.submit(fact, asked) for fact in FACTS}
    wait(futures.values(), asked.seconds)
    found: dict[str, Cell | int | None] = {}
    for name, future in futures.items():
        if not future.done():
            remedy = f"Something hangs on {asked.host}, perhaps a file system: check with df"
            found[name] = Cell("no answer", "no answer in time", remedy)
        elif error := future.exception():
            found[name] = Cell("unknown", f"{type(error).__name__}: {error}", f"Investigate it on {asked.host}")
        else:
            found |= future.result()
    return found


def main() -> None:
    found = look(Question(**json.loads(sys.argv[1])))
    said = {name: asdict(cell) if isinstance(cell, Cell) else cell for name, cell in found.items()}
    print(json.dumps(said | {"clock": time.time()}), flush=True)
    os._exit(0)  # even if a thread hangs
