"""What a worker tells the recorder of its node: that it trains, and the exception that ended it.

Each worker has a file, <prefix>.<rank>. Its time is the worker's last sign of life. Its content is blank until the
worker fails, and then a WorkerReport; it has its final size from the beginning, so that a disk that becomes full costs
none. The worker's side imports nothing that takes long, because every worker does.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from t5bench.record.status import (
    A_COLLECTIVE,
    Cause,
    cause_of_exception,
    clock_time,
    message_of,
    name_of,
    rejected_command_line,
)
from t5bench.text import visible_in

REPORT_BYTES = 1 << 14
LONGEST_MESSAGE = 1000
# A file system of many nodes must not notice the signs of life.
SIGN_SECONDS = 1.0


def reports_prefix(stacks: Path) -> Path:
    """Where the reports of a node are whose workers leave their stacks at `stacks`: node0.worker for node0.stack."""
    return stacks.with_suffix(".worker")


@dataclass(frozen=True)
class WorkerReport:
    """An exception that ended a worker."""

    rank: int
    type: str
    """The exception's class, as a traceback names it."""
    message: str
    time: float
    """Of the host's monotonic clock in the file, else seconds since 1970."""
    cause: Cause

    def fields(self) -> dict[str, object]:
        """What the record says of it."""
        return {"rank": self.rank, "type": self.type, "message": self.message, "time": self.time}


class Reporter:
    """The worker's side. A worker trains on if its file cannot be written."""

    def __init__(self, prefix: Path, rank: int) -> None:
        self.path = Path(f"{prefix}.{rank}")
        self.rank = rank
        self.last_sign = 0.0
        self.rejection = ""  # what argparse last said about the command line
        self.process = os.getpid()
        self.descriptor = -1
        with contextlib.suppress(OSError):
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            os.write(self.descriptor, b" " * REPORT_BYTES)

    def alive(self) -> None:
        """Called in every iteration."""
        moment = time.monotonic()
        if moment - self.last_sign >= SIGN_SECONDS and self.descriptor >= 0:
            self.last_sign = moment
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)

    def failed(self, error: BaseException, operation: str = "") -> None:
        """Called with what ends the worker. operation: its last collective operation, in words."""
        if os.getpid() != self.process:  # a process that the worker started
            return
        cause = cause_of_exception(error, self.rank)
        if isinstance(error, SystemExit) and self.rejection:
            cause = rejected_command_line(self.rejection, self.rank)
        if operation:
            cause = replace(cause, reason=cause.reason.replace(A_COLLECTIVE, operation))
        message = message_of(error)[:LONGEST_MESSAGE]
        report = WorkerReport(self.rank, name_of(error), message, time.monotonic(), cause)
        text = json.dumps(asdict(report)).ljust(REPORT_BYTES).encode()
        with contextlib.suppress(OSError):
            if not self.path.exists():  # somebody removed the run directory
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_bytes(text)
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self.descriptor, text, 0)


class Reports:
    """The recorder's side: the reports of this node's workers."""

    def __init__(self, prefix: Path, hidden: Sequence[str] = ()) -> None:
        """hidden: secrets, which an exception's message may quote."""
        self.prefix = prefix
        self.hidden = hidden
        self._latest_sign = self._sign()

    def paths(self) -> list[Path]:
        return sorted(self.prefix.parent.glob(f"{self.prefix.name}.*"))

    def _sign(self) -> int:
        signs = [0]
        for path in self.paths():
            with contextlib.suppress(OSError):
                signs.append(path.stat().st_mtime_ns)
        return max(signs)

    def has_new_sign(self) -> bool:
        """Whether a worker gave a sign of life since the last call. Only changes count: the file server's clock may
        differ from this host's."""
        before, self._latest_sign = self._latest_sign, self._sign()
        return self._latest_sign != before

    def read(self) -> list[WorkerReport]:
        """The exceptions that ended workers, the earliest first."""
        import msgspec  # the recorder has these; a worker need not load them

        from t5bench.record.machine import hide

        reports = []
        for path in self.paths():
            with contextlib.suppress(OSError, ValueError):  # it is blank, or the worker was killed while it wrote
                content = visible_in(hide(json.loads(path.read_text()), self.hidden))
                report = msgspec.convert(content, WorkerReport)
                moment = clock_time(report.time)
                reports.append(replace(report, time=moment, cause=replace(report.cause, time=moment)))
        return sorted(reports, key=lambda report: report.time)
