"""What a node reports about itself: check.py runs this module there.

argv[1] is a Question as JSON. Prints a JSON object: ``findings``, one for each row of the table, ``free_port`` (null if
none is free), and ``clock`` (in seconds since 1970). It needs only the standard library.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from t5bench import REPOSITORY, Problem
from t5bench.corpus.index import dataset_paths, read_index
from t5bench.plan.engine import FIXES_ALONE, SERIES, state_of
from t5bench.record import machine
from t5bench.record.gpus import visible_gpus
from t5bench.record.hosts import Host, is_loopback, own_name_fault
from t5bench.text import guard_streams
from t5bench.tools.nodes.findings import Finding, Findings

GIB = 2**30
LEAST_DISK = 1 * GIB  # logs of many runs; checkpoints of the large model take several times more
LEAST_MEMORY = 2 * GIB  # a process that has loaded torch and the engine
REQUIRED = ("torch", "deepspeed", "transformers")
SOURCES = ("scripts", "native", "t5bench", "packages/judge/src", "ds_configs", "patches")
SAMPLES = 64
SAMPLE_BYTES = 2**20
SECONDS = 12.0  # for all facts


@dataclass(frozen=True)
class Question:
    """hosts: all of them, the master first. engine_directory: empty for the native engine."""

    host: str
    hosts: Sequence[str]
    engine_directory: str
    data_prefix: str
    output_directory: str
    device: str
    ports: Sequence[int]


def digest(*places: Path) -> str:
    """SHA-256 of these files and those in these folders, up to 64 MiB of each whole, else samples spread evenly over
    it; empty where there are none."""
    paths = sorted(path for place in places for path in (place, *place.rglob("*")))
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    checksum = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        checksum.update(f"{path} {size}\n".encode())
        with path.open("rb") as stream:
            for start in (*range(0, size, max(SAMPLE_BYTES, size // SAMPLES)), max(0, size - SAMPLE_BYTES)):
                stream.seek(start)
                checksum.update(stream.read(SAMPLE_BYTES))
    return checksum.hexdigest() if files else ""


def address(asked: Question) -> Findings:
    own = Host(socket.gethostname())
    master = Host.of(asked.hosts[0])
    problem, remedy = own_name_fault(own)
    if len(asked.hosts) > 1 and problem:
        return {"address": Finding("own name", problem, remedy)}
    leads_nowhere = master.is_loop or not master.addresses
    if asked.host != master.name and leads_nowhere and not is_loopback(asked.host):
        problem = f"the master's name {master.name} resolves to {', '.join(master.addresses) or 'nothing'} on this node"
        remedy = f"Add it to /etc/hosts of {asked.host}, or use the master's address in HOSTS"
        return {"address": Finding("no master", problem, remedy)}
    return {"address": Finding(next((address for address in own.addresses if not is_loopback(address)), own.name))}


def repository(_: Question) -> Findings:
    state = machine.checkout(REPOSITORY)
    content = digest(*(REPOSITORY / folder for folder in SOURCES))
    text = state.commit[:8] if state.commit else f"files {content[:8]}"
    if state.fault:
        remedy = (
            f"If the directory may be trusted: git config --global --add safe.directory {shlex.quote(str(REPOSITORY))}"
        )
        return {"repository": Finding(text, f"git: {state.fault}", remedy if "ownership" in state.fault else "")}
    same = {"commit": state.commit or "", "files": content}
    return {"repository": Finding(f"{text} changed" if state.is_changed else text, same=same)}


def engine(asked: Question) -> Findings:
    if not asked.engine_directory:
        return {"engine": Finding("native")}
    directory = Path(asked.engine_directory)
    state = state_of(directory)
    if state in (SERIES, FIXES_ALONE):
        return {"engine": Finding(state, same={"patches": state})}
    setup = f"Run on {asked.host}: MEGATRON_DIR={shlex.quote(str(directory))} bash scripts/setup_megatron.sh"
    return {"engine": Finding(state, f"the Megatron-DeepSpeed checkout at {directory} is {state}", setup)}


def libraries(_: Question) -> Findings:
    installed = {name: version or "none" for name, version in machine.versions().items()}
    problems = {name: f"{name} is not installed for the Python of this check" for name in REQUIRED}
    return {
        name: Finding(version, problems.get(name, "") if version == "none" else "", same={"version": version})
        for name, version in installed.items()
    }


def data(asked: Question) -> Findings:
    prefix = Path(asked.data_prefix)
    try:
        read_index(prefix)
    except Problem as problem:
        return {"data": Finding("missing or damaged", str(problem))}
    same = {path.suffix: digest(path) for path in dataset_paths(prefix)}
    same["tokenizer"] = digest(prefix.parent / "tokenizer")
    return {"data": Finding(f"{Path(f'{prefix}.bin').stat().st_size / 1e6:.1f} MB {same['.idx'][:8]}", same=same)}


def gpus(asked: Question) -> Findings:
    devices = machine.gpus(os.environ)
    if not devices:
        inventory = visible_gpus(os.environ)
        problem = inventory.why if asked.device == "cuda" or inventory.fault else ""
        return {"GPUs": Finding("no GPU", problem, same={"GPUs": ""})}
    kinds = set()
    for device in devices:
        memory = f" {round(device['memory_mib'] / 1024)} GiB" if device["memory_mib"] else ""
        kinds.add(device["name"].removeprefix("NVIDIA ") + memory)
    text = f"{len(devices)} x {' + '.join(sorted(kinds))}"
    driver = ", ".join(sorted({device["driver"] for device in devices}))
    return {"GPUs": Finding(text, same={"GPUs": text}), "driver": Finding(driver, same={"driver": driver})}


def is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def ports(asked: Question) -> Findings:
    """The rendezvous ports that are in use. Only the master's are needed."""
    taken = ", ".join(str(port) for port in asked.ports if not is_free(port))
    problem = f"rendezvous ports are in use: {taken}" if taken and asked.host == asked.hosts[0] else ""
    remedy = "Stop what listens there (an earlier run? ss -ltnp), or use another port on every node: MASTER_PORT=29900"
    return {"ports": Finding(f"{taken} taken" if taken else "free", problem, remedy)}


def disk(asked: Question) -> Findings:
    wanted = Path(asked.output_directory)
    path = next(path for path in (wanted, *wanted.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=path).close()  # what is writable may still have no inode, or be a file
    except OSError as error:
        return {
            "disk": Finding("not writable", f"cannot write to {path}: {error.strerror}", "Choose another OUTPUT_DIR")
        }
    free = shutil.disk_usage(path).free
    problem = f"only {free / GIB:.1f} GiB are free at {path}" if free < LEAST_DISK else ""
    return {
        "disk": Finding(f"{free / GIB:.0f} GiB free", problem, "Free some space, or put OUTPUT_DIR on a larger disk")
    }


def memory(asked: Question) -> Findings:
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total = int(sizes["MemTotal"]) * 1024
    available = int(sizes.get("MemAvailable", sizes["MemFree"])) * 1024  # kernels before 3.14, and WSL 1, lack it
    problem = f"only {available / GIB:.1f} GiB of memory are available" if available < LEAST_MEMORY else ""
    text = f"{available / GIB:.0f} of {total / GIB:.0f} GiB"
    return {"memory": Finding(text, problem, f"Stop what fills the memory of {asked.host}")}


FACTS = (address, repository, engine, libraries, data, gpus, ports, disk, memory)


def look(asked: Question) -> Findings:
    """All facts, in order. One that hangs, for example because of a lost file system, does not delay the others."""
    pool = ThreadPoolExecutor(len(FACTS))
    futures = {fact.__name__: pool.submit(fact, asked) for fact in FACTS}
    wait(futures.values(), SECONDS)
    findings: Findings = {}
    for name, future in futures.items():
        if not future.done():
            remedy = f"Something hangs on {asked.host}, perhaps a file system: check with df"
            findings[name] = Finding("no answer", "no answer in time", remedy)
        elif error := future.exception():
            findings[name] = Finding("unknown", f"{type(error).__name__}: {error}", f"Investigate it on {asked.host}")
        else:
            findings |= future.result()
    return findings


def main() -> None:
    asked = Question(**json.loads(sys.argv[1]))
    answer: dict[str, Any] = {"findings": {row: asdict(finding) for row, finding in look(asked).items()}}
    answer["free_port"] = next(filter(is_free, asked.ports), None)
    answer["clock"] = time.time()
    print(json.dumps(answer), flush=True)
    os._exit(0)  # even if a thread hangs


if __name__ == "__main__":
    guard_streams()
    main()
