"""Standard output and error of a program that must not wait for whoever reads them.

A pager that waits for a key, a terminal after Ctrl-S, or a parent that never reads its pipe would stop a training in
the middle of a line, and with it the answer to TERM. A thread writes instead; what nobody takes is left out.
"""

import atexit
import contextlib
import io
import os
import select
import signal
import sys
import threading
import time
from collections import deque

from t5bench.text import SafeStream

# What a reader may be behind; more is left out, and a line says how much.
MOST_BYTES = 1 << 23
# A piece is written whole by the kernel, or not at all.
PIECE_BYTES = select.PIPE_BUF
# How long the end of a program waits for a reader that takes nothing.
STALLED_SECONDS = 3.0
LEFT_OUT = "\n[{} bytes are left out here, because nothing read them in time]\n"


class Queue:
    """What is to be written to one file, in order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._left_out = 0
        self._taken_at = time.monotonic()
        self._has_thread = False

    def put(self, text: bytes) -> None:
        """Takes the text, without waiting for its reader."""
        with self._changed:
            if self._waiting_bytes + len(text) > MOST_BYTES:
                self._left_out += len(text)
                return
            if self._left_out:
                text = LEFT_OUT.format(self._left_out).encode() + text
                self._left_out = 0
            self._waiting.append(text)
            self._waiting_bytes += len(text)
            self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        """Starts the thread; where the limit on threads is reached, this one writes, and may wait."""
        if self._has_thread:
            return
        try:
            threading.Thread(target=self._write_all, daemon=True).start()
            self._has_thread = True
        except RuntimeError:
            while self._waiting:
                self._write(self._waiting.popleft())
            self._waiting_bytes = 0

    def wait(self, seconds: float) -> None:
        """Returns when everything is written, or nothing was taken for so many seconds."""
        self._taken_at = time.monotonic()
        while True:
            with self._changed:
                if not self._waiting_bytes and self._left_out:
                    self._waiting.append(LEFT_OUT.format(self._left_out).encode())
                    self._waiting_bytes = len(self._waiting[-1])
                    self._left_out = 0
                    self._changed.notify_all()
                if not self._waiting_bytes or time.monotonic() - self._taken_at >= seconds:
                    return
                self._changed.wait(0.05)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                text = self._waiting.popleft()
            self._write(text)
            with self._changed:
                self._waiting_bytes -= len(text)
                self._changed.notify_all()

    def _write(self, text: bytes) -> None:
        """A reader that is gone, or a disk that is full, costs what it did not take."""
        rest = memoryview(text)
        while rest:
            try:
                written = os.write(self._descriptor, rest[:PIECE_BYTES])
            except BlockingIOError:  # another process that shares the file has made it so
                select.select([], [self._descriptor], [], 1)
                continue
            except OSError:
                return
            rest = rest[written:]
            self._taken_at = time.monotonic()


class Unread(io.RawIOBase):
    """A file whose writes never wait."""

    def __init__(self, descriptor: int, queue: Queue) -> None:
        self._descriptor = descriptor
        self.queue = queue

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: memoryview) -> int:  # type: ignore[override]
        self.queue.put(bytes(text))
        return len(text)


_queues: dict[tuple[int, int], Queue] = {}


def never_wait(*names: str) -> None:
    """Lets nothing wait for the readers of these streams ("stdout", "stderr"), which stay safe for a terminal.

    For a program that has guarded its streams. Those that lead to the same file share a queue, and so keep their order.
    """
    # Writing to the terminal from the background would otherwise suspend the process (stty tostop).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for name in names:
        stream = getattr(sys, name)
        if not isinstance(stream, SafeStream):  # somebody else's, who reads it
            continue
        descriptor = stream.fileno()
        state = os.fstat(descriptor)
        queue = _queues.setdefault((state.st_dev, state.st_ino), Queue(descriptor))
        stream.flush()
        raw = io.BufferedWriter(Unread(descriptor, queue))
        setattr(sys, name, SafeStream(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True))
    atexit.register(wait_for_readers)


def wait_for_readers() -> None:
    """At the program's end, and before another writes there: gives readers time, but not those that have stalled."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    for queue in _queues.values():
        queue.wait(STALLED_SECONDS)
