"""A Python that has imported torch and DeepSpeed already, for tests that start many trainings.

Of a small training's time, most passes in the imports of torchrun and of each worker. `warm_python()` imports once, in
a process that forks itself for each of these programs, and gives the path of a program that a launcher takes as PYTHON.
Launcher, plan and recorder run in the real interpreter. A fork of torchrun or of a worker has its caller's arguments,
environment, directory and open files, and imports this project's modules and the engine's from where its caller would.
What only a new interpreter shows, such as an import that is missing, the tests with `real_runs.COLD` see.
"""

import array
import atexit
import contextlib
import gc
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TORCHRUN = "torch.distributed.run"
HEAVY = ("numpy", "torch", TORCHRUN, "torch._dynamo", "transformers", "deepspeed")
# As the engines set them before they import these libraries (t5bench/imports.py).
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCHDYNAMO_DISABLE": "1",
    "USE_TORCH": "0",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_OFFLINE": "1",
}
MOST_FILES = 64
SOCKET = "socket"

# Passes its arguments and open files to the warm process and waits for the fork's end; what it cannot do so, such as
# `python -c`, the real interpreter does. -I and -S: without site-packages, it starts within 20 ms.
CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys

def is_for_the_fork(words):
    return words[:2] == ["-m", {torchrun!r}] or bool(words) and words[0].endswith(".py")

words = sys.argv[1:]
while words and words[0] == "-u":
    words = words[1:]
if not is_for_the_fork(words):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
connection = socket.socket(socket.AF_UNIX)
connection.connect({socket!r})
files = []
for name in os.listdir("/proc/self/fd"):
    number = int(name)
    if number != connection.fileno() and os.path.exists("/proc/self/fd/" + name):
        try:
            os.fstat(number)
        except OSError:
            continue
        files.append(number)
ignored = []
for number in signal.valid_signals():
    if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
        ignored.append(int(number))
request = json.dumps(
    dict(words=words, directory=os.getcwd(), environment=dict(os.environ), files=files, ignored=ignored)
).encode()

def pass_on(number, frame):
    connection.send(bytes([number]))

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if int(number) not in ignored:
        signal.signal(number, pass_on)
header = len(request).to_bytes(8, "big")
connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
connection.sendall(request)
answer = connection.recv(16)
status = int(answer) if answer else 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class WarmPython:
    """The process, and the program that stands for it."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self.folder.name)
        self.python = folder / "python"
        self.python.write_text(CLIENT.format(python=sys.executable, torchrun=TORCHRUN, socket=str(folder / SOCKET)))
        self.python.chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=environment | ENVIRONMENT,
            stdin=subprocess.PIPE,  # its end tells the process that these tests have ended, however they did
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self.close)
        assert self.process.stdout
        assert self.process.stdout.readline() == b"ready\n", "the libraries of the trainings could not be imported"

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.folder.cleanup()


_started: list[WarmPython] = []


def warm_python() -> str:
    """The path of the program; the first call starts the process."""
    if not _started:
        _started.append(WarmPython())
    return str(_started[0].python)


# ---- the process that forks ----------------------------------------------------------------------------------------


@dataclass
class Request:
    """A program to become."""

    words: list[str]
    """-m, a module and its arguments, or a script and its arguments"""
    directory: str
    environment: dict[str, str]
    files: list[int]
    """the numbers that the received files have in the caller"""
    ignored: list[int]
    """the signals that the caller ignores"""


def receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """The request and the files that came with it, under numbers of this process."""
    received = array.array("i")
    header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MOST_FILES * received.itemsize))
    for level, kind, data in ancillary:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        received.frombytes(data)
    length = int.from_bytes(header, "big")
    text = b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    return Request(**json.loads(text)), list(received)


def take_files(received: list[int], numbers: list[int]) -> None:
    """Gives the received files the numbers that they have in the caller, and closes all others."""
    above = max([*numbers, *received]) + 1
    moved = []
    for file in received:
        copy = above + len(moved)
        os.dup2(file, copy)
        moved.append(copy)
    os.closerange(0, above)
    for copy, number in zip(moved, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.closerange(above, above + 1024)


class Server:
    """Forks for each request, and tells the caller how the fork ended."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / SOCKET))
        self.listener.listen(128)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        self.connection_of: dict[int, socket.socket] = {}

    def serve(self) -> Request | None:
        """Returns a request in the process that was forked for it, and None in the first process at the tests' end."""
        while True:
            for key, _ in self.selector.select(timeout=0.02):
                if key.fileobj == 0:
                    for process in self.connection_of:
                        os.kill(process, signal.SIGKILL)
                    return None
                if key.fileobj is self.listener:
                    request = self.accept()
                    if request:
                        return request
                else:
                    self.pass_on_signal(key.data)
            self.report_ended()

    def accept(self) -> Request | None:
        connection, _ = self.listener.accept()
        request, files = receive(connection)
        process = os.fork()
        if process == 0:
            os.setsid()
            take_files(files, request.files)
            return request
        for file in files:
            os.close(file)
        self.connection_of[process] = connection
        self.selector.register(connection, selectors.EVENT_READ, process)
        return None

    def pass_on_signal(self, process: int) -> None:
        """A byte is a signal for the fork; the end of the connection is its caller's death."""
        connection = self.connection_of[process]
        try:
            received = connection.recv(1)
        except ConnectionError:
            received = b""
        os.kill(process, received[0] if received else signal.SIGKILL)
        if not received:
            self.selector.unregister(connection)

    def report_ended(self) -> None:
        while self.connection_of:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            connection = self.connection_of.pop(process)
            if connection in self.selector.get_map():
                self.selector.unregister(connection)
            with contextlib.suppress(OSError):  # the caller has died
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def become(request: Request, base_path: list[str]) -> None:
    """Runs the program as the interpreter would, with this project's modules from where the caller has them."""
    signal.set_wakeup_fd(-1)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    if request.words[0] == "-m":
        folder = request.directory
        sys.argv = request.words[1:]
    else:
        folder = str(Path(request.words[0]).resolve().parent)
        sys.argv = request.words
    sys.path[:] = [*named, *base_path]
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
    sys.path.insert(0, folder)
    if sys.argv[0] == TORCHRUN:
        # torchrun starts the workers with the Python that runs it.
        sys.executable = request.environment["PYTHON"]
        sys.modules[TORCHRUN].main()
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    own_folder = str(Path(__file__).resolve().parent)
    base_path = [entry for entry in sys.path if entry != own_folder]
    for name in HEAVY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    server = Server(Path(sys.argv[1]))
    print("ready", flush=True)
    request = server.serve()
    if request:
        become(request, base_path)


if __name__ == "__main__":
    main()
