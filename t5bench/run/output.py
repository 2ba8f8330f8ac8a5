"""A node's output while a run goes on: passed on to the terminal, kept with its times, and understood line by line."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from t5bench.record import machine
from t5bench.record.log import Iteration, PeakMemory, iteration, padded_vocabulary, peak_memory
from t5bench.record.records import metrics_line
from t5bench.record.status import CauseFinder

BLOCK = 1 << 16
# Something that left the run behind may hold its output open.
OPEN_SECONDS = 5


def timestamp(seconds: float) -> str:
    """UTC to the millisecond, as the log's lines begin: 2026-11-21T04:43:36.123Z."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


class Output:
    """The output so far: its log, its iterations, peak memory and whatever explains a failure."""

    def __init__(
        self,
        log: BinaryIO,
        metrics: Path,
        hidden: Sequence[str],
        *,
        on_iteration: Callable[[int], None] = lambda iteration: None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.log, self.metrics_path, self.hidden = log, metrics, hidden
        self.on_iteration, self.on_line = on_iteration, on_line
        self.metrics: Any = None
        self.finder = CauseFinder()
        self.last: Iteration | None = None
        self.diverged_at: int | None = None
        self.memory: dict[int, PeakMemory] = {}
        self.unwritten: OSError | None = None
        self.padded_vocab_size: int | None = None
        self.rest = b""
        self.ended = 0.0

    def take(self, block: bytes, now: float) -> None:
        """Bytes as they came; the last line may go on in the next block."""
        *lines, self.rest = (self.rest + block).split(b"\n")
        for line in lines:
            self._take_line(line, now)
        with self._noting_errors():
            self.log.flush()

    def end(self, now: float) -> None:
        self.ended = now
        if self.rest:
            self._take_line(self.rest, now)
        for file in (self.log, self.metrics):
            with contextlib.suppress(OSError):
                if file:
                    file.close()

    @contextlib.contextmanager
    def _noting_errors(self) -> Any:
        """A record that cannot be written costs the record, never the run."""
        try:
            yield
        except OSError as error:
            if not self.unwritten:
                self.unwritten = error
                print(f"warning: the record of this run is not complete: {error}", file=sys.stderr)

    def _take_line(self, line: bytes, now: float) -> None:
        text = machine.hide(line.decode(errors="replace"), self.hidden)
        with self._noting_errors():
            self.log.write(f"{timestamp(now)} {text}\n".encode())
        self.finder.read(text, now)
        self.on_line(text)
        if found := iteration(text, time=round(now, 3)):
            self._take_iteration(found)
        elif "peak memory" in text:
            self.memory |= {peak.rank: peak for peak in peak_memory([text])}
        elif size := padded_vocabulary(text):
            self.padded_vocab_size = size

    def _take_iteration(self, found: Iteration) -> None:
        self.last = found
        self.on_iteration(found.iteration)
        loss = found.lm_loss
        if self.diverged_at is None and (found.nan or (loss is not None and not abs(loss) < float("inf"))):
            self.diverged_at = found.iteration
        with self._noting_errors():
            self.metrics = self.metrics or self.metrics_path.open("a", buffering=1)
            self.metrics.write(metrics_line(found) + "\n")


def pass_on(output: Output, source: int, sink: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Every block to the sink at once, and to the output, until the source ends.

    Or until nothing has come for OPEN_SECONDS after the run was over. A sink that is gone stops nothing.
    """
    over_since = None
    while True:
        if not select.select([source], [], [], 1)[0]:
            over_since = over_since or (time.monotonic() if is_over() else None)
            if over_since and time.monotonic() - over_since >= OPEN_SECONDS:
                return
            continue
        if not (block := os.read(source, BLOCK)):
            return
        shown = block
        for secret in output.hidden:
            shown = shown.replace(secret.encode(), machine.HIDDEN.encode())
        with contextlib.suppress(OSError):
            while shown:
                shown = shown[os.write(sink, shown) :]
        output.take(block, time.time())
