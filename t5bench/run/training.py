"""torchrun as a child of the recorder: its start, its output, and its end, whatever ends it."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from t5bench import note
from t5bench.plan.interpreter import is_plain, plain_folder, plain_link
from t5bench.record.status import SIGNALS
from t5bench.run import processes

# Between TERM and KILL: SLURM kills after 30 s (KillWait), and the record takes some of them.
TERM_SECONDS = 15.0
# How long a killed process may need to go: one that waits for a device does not.
GONE_SECONDS = 5.0
# What a suspended recorder (Ctrl-Z) has not read yet does not hold up the training: some thousand lines.
PIPE_BYTES = 1 << 20
# multiprocessing creates sockets in TMPDIR, whose names may have at most 107 characters.
LONGEST_SCRATCH = 75
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Training:
    """The command of a node and all that it starts, which a mark in their environment tells."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.mark = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.interrupted = threading.Event()
        """Set by a signal, after which nothing waits any more."""
        self.interrupted_by: str | None = None
        self.is_over = threading.Event()
        """Set when the command has ended, and all that it started."""
        self.output, self._input = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        with contextlib.suppress(OSError):  # more than this user may have
            fcntl.fcntl(self.output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def listen(self) -> None:
        """Makes the first signal end the run in order. Those that are ignored, as HUP is under nohup, stay so."""

        def interrupt(number: int, _: object) -> None:
            for each in SIGNALS:  # from a key that is held down
                signal.signal(each, signal.SIG_IGN)
            self.interrupted_by = SIGNALS[number]
            self.interrupted.set()

        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, interrupt)

    def start(self, environment: Mapping[str, str]) -> None:
        """Starts the command, with more variables in its environment; call it from the main thread.

        When the thread that started it ends, the kernel kills it too, also if it is suspended, and this its workers.
        It has a session of its own: a Ctrl-C on the terminal reaches only this process, which ends the others in order.
        """
        parent = os.getpid()

        def tie_to_parent() -> None:
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self._process = subprocess.Popen(
            self.command,
            env={**os.environ, "T5_RUN_MARK": self.mark, **self._temporary_directory(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._input,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=tie_to_parent,
        )
        os.close(self._input)
        threading.Thread(target=self._see_to_the_end, daemon=True).start()

    def _temporary_directory(self) -> dict[str, str]:
        """One of its own, because torchrun and multiprocessing leave directories there."""
        folder = Path(tempfile.gettempdir())
        if not is_plain(folder):  # what is compiled there could not be
            with contextlib.suppress(OSError):
                folder = plain_link(folder, plain_folder(short=True), name="tmp")
        path = folder / f"t5-{self.mark}"
        if len(str(path)) < LONGEST_SCRATCH:
            with contextlib.suppress(OSError):
                path.mkdir(0o700)
                self._scratch = path
                return {"TMPDIR": str(path)}
        return {}

    def _see_to_the_end(self) -> None:
        assert self._process
        while self._process.poll() is None and not self.interrupted.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(processes.TICK_SECONDS)
        if self.interrupted_by:
            note(f"{self.interrupted_by} received: stopping the processes of this run")
        processes.end(self.mark, TERM_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_SECONDS)
        self.is_over.set()

    def wait(self) -> None:
        """Returns when everything has ended, or could not be ended."""
        self.is_over.wait(TERM_SECONDS + processes.KILL_SECONDS + 2 * GONE_SECONDS)

    @property
    def exit_status(self) -> int | None:
        """As a shell tells it: 128 + the signal that ended it. None if it was not started, or did not end."""
        code = self._process.returncode if self._process else None
        return code if code is None or code >= 0 else 128 - code

    def give_up(self) -> None:
        """Ends the output of a command that is not to be started."""
        os.close(self._input)
        self.is_over.set()

    def clean_up(self) -> None:
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
