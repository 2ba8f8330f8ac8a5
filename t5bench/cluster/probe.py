"""What check_cluster.py asks of a node. It arrives there on standard input and needs only the standard library.

argv[1] is a JSON object: repository, engine_dir, data_prefix, output_dir (paths), ports (list), master (host name),
seconds (time limit). Prints ``clock SECONDS`` lines and a ``fact NAME JSON`` line for each fact, as it becomes known:
one that hangs, such as a file system that is gone, does not hold up the others.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "deepspeed", "transformers", "flash_attn", "apex")
SOURCES = ("scripts", "native", "t5bench", "ds_configs", "patches")
WHOLE_BELOW = 64 * 2**20  # bytes; larger files are sampled
SAMPLES, SAMPLE_BYTES = 64, 2**16

Question = dict[str, Any]


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL)
    return result.stdout


def digest(path: Path) -> str:
    """SHA-256 of a file; of a large one, of its size and of samples evenly spread over it."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        if size <= WHOLE_BELOW:
            while block := stream.read(2**20):
                found.update(block)
        else:
            for index in range(SAMPLES):
                stream.seek(index * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()


def digest_of_files(root: Path, paths: list[Path]) -> str:
    lines = [f"{digest(path)} {path.relative_to(root)}" for path in sorted(paths)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def names(question: Question) -> Any:
    def addresses(name: str) -> list[str]:
        try:
            return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
        except OSError:
            return []

    own = socket.gethostname()
    return {"own": own, "own_addresses": addresses(own), "master_addresses": addresses(question["master"])}


def repository(question: Question) -> Any:
    root = Path(question["repository"])
    if not root.is_dir():
        return None
    files = [
        path
        for folder in SOURCES
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix in (".sh", ".py", ".json", ".patch", ".sha256", "")
    ]
    try:
        commit = run("git", "-C", str(root), "rev-parse", "HEAD").strip()
        changed = bool(run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        commit, changed = None, None
    return {"commit": commit, "changed": changed, "content": digest_of_files(root, files)}


def engine(question: Question) -> Any:
    """missing, the state of the patches that the files are in, or other."""
    directory = Path(question["engine_dir"])
    if not (directory / "pretrain_t5.py").is_file():
        return "missing"
    for state in ("series", "megatron_t5_fixes", "unpatched"):
        listing = Path(question["repository"]) / "patches" / "checksums" / f"{state}.sha256"
        if listing.is_file() and all(
            (directory / name).is_file() and hashlib.sha256((directory / name).read_bytes()).hexdigest() == expected
            for expected, name in (line.split("  ", 1) for line in listing.read_text().splitlines() if line)
        ):
            return state
    return "other"


def libraries(_: Question) -> Any:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = None
    if found["torch"]:
        # Importing torch takes seconds; its file of versions says which CUDA it was built for.
        text = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
        if match := re.search(r"^cuda\b[^=\n]*= '([0-9.]+)'", text, re.MULTILINE):
            found["cuda"] = match[1]
    return found


def data(question: Question) -> Any:
    prefix = Path(question["data_prefix"])
    sys.path.insert(0, str(Path(question["repository"]) / "scripts"))
    try:
        from t5bench.corpus.index import read_index

        read_index(prefix)
        problem = None
    except ImportError:
        problem = "the repository is not there to check it"
    except ValueError as error:
        problem = str(error)
    found: dict[str, Any] = {"problem": problem}
    for kind in ("bin", "idx"):
        path = prefix.with_name(f"{prefix.name}.{kind}")
        found[kind] = {"bytes": path.stat().st_size, "digest": digest(path)} if path.is_file() else None
    tokenizer = prefix.parent / "tokenizer"
    files = [path for path in tokenizer.rglob("*") if path.is_file()]
    found["tokenizer"] = digest_of_files(tokenizer, files) if files else None
    return found


def gpus(_: Question) -> Any:
    if not shutil.which("nvidia-smi"):
        return []
    query = "--query-gpu=name,memory.total,driver_version"
    lines = run("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()
    rows = [line.split(", ") for line in lines if line.count(", ") == 2]
    return [{"name": name, "memory_mib": memory, "driver": driver} for name, memory, driver in rows]


def ports(question: Question) -> Any:
    """The ports that cannot be listened on, each with the process that does, where that can be seen."""
    taken = {}
    for port in question["ports"]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("", port))
                one.listen()
            except OSError:
                taken[port] = listener(port)
    return taken


def listener(port: int) -> str:
    """The process that listens on a port, or nothing: other users' cannot be seen."""
    row = re.compile(rf"^ *\d+: [0-9A-F]+:{port:04X} \S+ 0A (?:\S+ ){{5}} *(\d+)", re.MULTILINE)
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        text = re.sub(r" +", " ", Path(table).read_text())
        for inode in row.findall(text):
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                try:
                    if str(link.readlink()) == f"socket:[{inode}]":
                        pid = link.parts[2]
                        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
                except OSError:
                    continue
    return ""


def disk(question: Question) -> Any:
    path = Path(question["output_dir"])
    while not path.exists():
        path = path.parent
    return {"free": shutil.disk_usage(path).free, "writable": os.access(path, os.W_OK), "path": str(path)}


def memory(_: Question) -> Any:
    found = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return {"total": int(found["MemTotal"]) * 1024, "available": int(found["MemAvailable"]) * 1024}


FACTS: tuple[Callable[[Question], Any], ...] = (
    names, repository, engine, libraries, data, gpus, ports, disk, memory,
)  # fmt: skip


def say(text: str) -> None:
    sys.stdout.write(text + "\n")  # one write: lines of several threads do not mix
    sys.stdout.flush()


def find(fact: Callable[[Question], Any], question: Question) -> None:
    try:
        answer = {"value": fact(question)}
    except Exception as error:  # whatever it is belongs into the table
        answer = {"error": f"{type(error).__name__}: {error}"}
    say(f"fact {fact.__name__} {json.dumps(answer)}")


def main() -> None:
    question = json.loads(sys.argv[1])
    sys.dont_write_bytecode = True
    say(f"clock {time.time()}")
    threads = [threading.Thread(target=find, args=(fact, question), daemon=True) for fact in FACTS]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + question["seconds"]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    say(f"clock {time.time()}")
    os._exit(0)  # also with a thread that hangs


if __name__ == "__main__":  # also on standard input
    main()
