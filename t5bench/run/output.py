"""A node's output during a run: passed on to the terminal, kept with its times, and understood line by line."""

import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from t5bench import note
from t5bench.record.log import Evaluation, Iteration, PeakMemory, evaluation, iteration, padded_vocabulary, peak_memory
from t5bench.record.machine import HIDDEN
from t5bench.record.records import metrics_line
from t5bench.record.status import CauseFinder, now
from t5bench.run.self_healing import SelfHealingFile
from t5bench.text import Screen, visible

BLOCK = 1 << 16
# Of a longer line, this much is kept: half from its beginning and half from its end.
LONGEST_LINE = 1 << 14
# A process that the run left behind may hold its output open.
OPEN_SECONDS = 5


def timestamp(seconds: float) -> str:
    """UTC to the millisecond, as the log's lines begin: 2026-11-21T04:43:36.123Z."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class SecretFilter:
    """Removes secrets from a stream, even if they are split between blocks."""

    def __init__(self, hidden: Sequence[str]) -> None:
        self.secrets = [secret.encode() for secret in hidden]
        self.pattern = re.compile(b"|".join(map(re.escape, self.secrets)) or rb"(?!)")
        self.kept = b""

    def clear(self, block: bytes) -> bytes:
        """What may be shown. An end that may be the beginning of a secret is held back until more text has come.

        An empty block ends the stream.
        """
        text = self.kept + block
        end = self._beginning_of_a_secret(text) if block else len(text)
        for match in self.pattern.finditer(text):
            end = match.start() if match.start() < end < match.end() else end
        self.kept = text[end:]
        return self.pattern.sub(HIDDEN.encode(), text[:end])

    def _beginning_of_a_secret(self, text: bytes) -> int:
        """Where a secret begins that the text may end with; the text's length if there is none."""
        longest = max(map(len, self.secrets), default=0)
        for start in range(max(0, len(text) - longest), len(text)):
            tail = text[start:]
            if any(secret.startswith(tail) and secret != tail for secret in self.secrets):
                return start
        return len(text)


class OutputLine:
    """A line that arrives in pieces, with a bound on what is kept of it."""

    def __init__(self) -> None:
        self.kept = bytearray()
        self.left_out = 0  # bytes
        self.returned = False  # after a carriage return, what follows overwrites this, as progress bars do

    def add(self, piece: bytes) -> None:
        self.kept += piece
        surplus = max(0, len(self.kept) - LONGEST_LINE)
        self.left_out += surplus
        del self.kept[LONGEST_LINE // 2 : LONGEST_LINE // 2 + surplus]

    def text(self) -> str:
        whole = bytes(self.kept)
        if self.left_out:
            half = LONGEST_LINE // 2
            whole = whole[:half] + f" ... ({self.left_out} bytes left out) ... ".encode() + whole[half:]
        return visible(whole.decode(errors="backslashreplace"))


class Output:
    """The output so far: its log, its iterations, peak memory and whatever explains a failure."""

    def __init__(
        self,
        log: Path,
        metrics: Path,
        hidden: Sequence[str],
        on_iteration: Callable[[int], None] = lambda iteration: None,
        stacks: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """hidden: secrets, to be left out. stacks: called at the end; the stacks of the workers that were stopped, by
        rank. Raises OSError if there can be no log."""
        self.log = SelfHealingFile(log)
        self.metrics_path = metrics
        self.metrics: SelfHealingFile | None = None  # once there is an iteration line
        self.secrets = SecretFilter(hidden)
        self.on_iteration = on_iteration
        self.stacks = stacks
        self.finder = CauseFinder()
        self.first: Iteration | None = None
        self.last: Iteration | None = None
        self.diverged_at: int | None = None
        self.memory: dict[int, PeakMemory] = {}
        self.evaluations: list[Evaluation] = []
        self.unwritten: OSError | None = None
        self.padded_vocab_size: int | None = None
        self.line = OutputLine()
        self.ended = 0.0

    def take(self, block: bytes, now: float) -> bytes:
        """Takes the next bytes; returns what may be shown of them and of what was held back before."""
        shown = self.secrets.clear(block)
        *lines, rest = shown.split(b"\n")
        for line in lines:
            self._add(line, now)
            self._take_line(now)
        self._add(rest, now)
        with self._noting_errors():
            self.log.flush()
        return shown

    def end(self, now: float) -> bytes:
        """Ends the output; returns what is left to show."""
        self.ended = now
        shown = self.take(b"", now)
        if self.line.kept:
            self._take_line(now)
        for rank, text in self.stacks().items():
            for line in (f"rank {rank} was ended here:", *text.splitlines()):
                self._log(line, now)
        for file in (self.log, self.metrics):
            with self._noting_errors():
                if file:
                    file.close()
        return shown

    def restore(self) -> list[Path]:
        """Restores the files that somebody removed or cut short, and names them."""
        restored = []
        for file in filter(None, (self.log, self.metrics)):
            with self._noting_errors():
                if file.restore():
                    restored.append(file.path)
        return restored

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """A record that cannot be written does not stop the run."""
        try:
            yield
        except OSError as error:
            if not self.unwritten:
                self.unwritten = error
                note(f"warning: the record of this run is incomplete: {error}")

    def _log(self, line: str, now: float) -> None:
        with self._noting_errors():
            self.log.write(f"{timestamp(now)} {line}\n".encode())

    def _add(self, text: bytes, now: float) -> None:
        """Takes a part of a line. Text before a carriage return, which would be overwritten, is kept if it counts."""
        for number, piece in enumerate(text.split(b"\r")):
            if number > 0:
                self.line.returned = True
            if piece and self.line.returned:
                if b"iteration" in self.line.kept or b"peak memory" in self.line.kept:
                    self._take_line(now)
                self.line = OutputLine()
            self.line.add(piece)

    def _take_line(self, now: float) -> None:
        text, self.line = self.line.text(), OutputLine()
        self._log(text, now)
        self.finder.read(text, now)
        # The lines of several ranks may arrive as one.
        progress = iteration(text, time=round(now, 3))
        if progress:
            self.first = self.first or progress
            self.last = progress
            self.on_iteration(progress.iteration)
            is_finite = abs(progress.lm_loss or 0.0) < float("inf")
            if self.diverged_at is None and (progress.nan or not is_finite):
                self.diverged_at = progress.iteration
            with self._noting_errors():
                self.metrics = self.metrics or SelfHealingFile(self.metrics_path, remembers=True)
                self.metrics.write(f"{metrics_line(progress)}\n".encode())
                self.metrics.flush()
        evaluated = evaluation(text)
        if evaluated:
            self.evaluations.append(evaluated)
        self.memory |= {peak.rank: peak for peak in peak_memory([text])}
        self.padded_vocab_size = padded_vocabulary(text) or self.padded_vocab_size


def pass_on(
    output: Output, source: int, show: Callable[[bytes], None], is_over: Callable[[], bool], look: Callable[[], None]
) -> None:
    """Passes every block to the output, and what may be shown of it on at once, until the source ends.

    It also ends if nothing has come for OPEN_SECONDS after the run was over. show must not wait. look is called about
    once a second.
    """
    screen = Screen()
    looked = time.monotonic()
    over_since: float | None = None
    while True:
        if time.monotonic() - looked >= 1:
            look()
            looked = time.monotonic()
        if not select.select([source], [], [], 1)[0]:
            if over_since is None and is_over():
                over_since = time.monotonic()
            if over_since and time.monotonic() - over_since >= OPEN_SECONDS:
                break
            continue
        block = os.read(source, BLOCK)
        if not block:
            break
        show(screen.show(output.take(block, now()), is_last=False))
    look()
    show(screen.show(output.end(now()), is_last=True))
