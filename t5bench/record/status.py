"""How a run ended: one word from a closed list, the first cause in one sentence, what to do, and where it began.

A node decides from its exit status and from short stable messages in its output. Of several messages the strongest
counts, and among equals the earliest: "connection closed by peer" comes from the victims and never says why.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from signal import SIGTERM
from typing import Any, NamedTuple

from t5bench.record.text import visible

COMPLETE, INCOMPLETE, DIVERGED, OUT_OF_MEMORY = "complete", "incomplete", "diverged", "out-of-memory"
TIMEOUT, NETWORK, CONFIGURATION, CRASHED, CANCELLED = "timeout", "network", "configuration", "crashed", "cancelled"
RUNNING = "running"  # the run has not ended

# What a launcher exits with; cancelled is 128 + the signal, as in every shell.
_BY_EXIT_CODE = (COMPLETE, CRASHED, CONFIGURATION, INCOMPLETE, DIVERGED, OUT_OF_MEMORY, TIMEOUT, NETWORK)
EXIT_CODES = {name: code for code, name in enumerate(_BY_EXIT_CODE)}
SIGNALS = {1: "HUP", 2: "INT", 15: "TERM"}
_START = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970 by this machine's clock when the process began: the clock of a record, which is not adjusted
    during a run."""
    return _START + time.monotonic()


class Strength(IntEnum):
    """How much a message says about the cause."""

    VICTIM = 0  # another process went away
    WAITED = 1  # another process, or the network, did not answer in time
    EXCEPTION = 2  # this process failed, for a reason that no rule knows
    CAUSE = 3


@dataclass(frozen=True)
class Status:
    """origin: node, host, rank, time and line of the first failure; None for a run that did not fail."""

    name: str
    reason: str = ""
    remedy: str = ""
    origin: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Cause:
    """What explains an end: a message, when it came (seconds since 1970), and which rank said it, if known."""

    status: str
    strength: Strength
    reason: str
    remedy: str
    time: float
    line: str
    rank: int | None = None

    @classmethod
    def now(cls, status: str, reason: str, remedy: str = "", strength: Strength = Strength.CAUSE) -> "Cause":
        """A cause that was observed now, not read from a message."""
        return cls(status, strength, reason, remedy, now(), reason)

    def ending(self) -> Status:
        who = f"rank {self.rank}: " if self.rank is not None else ""
        return Status(self.status, who + self.reason, self.remedy)


class Rule(NamedTuple):
    """What a line that matches the pattern means; reason has a place for each group: {0} is the first."""

    pattern: str
    status: str
    reason: str
    remedy: str = ""
    strength: Strength = Strength.CAUSE


_SHARD_MORE = "Lower MICRO_BATCH_SIZE, or use a strategy that shards more (zero2, zero3, zero3_offload, tensor)"
_MORE_MEMORY = "Use a node with more memory, or a smaller model"
_LOOK_AT_OTHERS = "Check the other nodes' logs for an earlier failure, and the network between them"

# The first rule that matches a line speaks for it.
RULES = (
    Rule(r"CUDA out of memory\. (Tried to allocate [0-9.]+ [KMG]iB)", OUT_OF_MEMORY,
         "the GPU's memory is full ({0})", _SHARD_MORE),
    Rule(r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY", OUT_OF_MEMORY,
         "the GPU's memory is full", _SHARD_MORE),
    Rule(r"can't allocate memory: you tried to allocate (\d+) bytes", OUT_OF_MEMORY,
         "the host's memory is full (tried to allocate {0} bytes)", _MORE_MEMORY),
    Rule(r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc", OUT_OF_MEMORY,
         "the host's memory is full", _MORE_MEMORY),
    Rule(r"No space left on device", CRASHED, "a disk or /dev/shm is full",
         "Free some space (df -h shows where), or use another OUTPUT_DIR"),
    Rule(r"EADDRINUSE|[Aa]ddress already in use", CONFIGURATION,
         "the rendezvous port is already in use", "Choose another on every node: MASTER_PORT=29900"),
    Rule(r"gai error: -?\d+ - ([^)\n]*)", CONFIGURATION, "the master host's name does not resolve ({0})",
         "Check its spelling, or use the address that 'getent hosts' prints on the master"),
    Rule(r"(unrecognized arguments: .*|the following arguments are required: .*"
         r"|argument \S+: (?:invalid|expected) .*)", CONFIGURATION,
         "the engine rejects the command line: {0}", "Check what follows --, which goes to the engine unchanged"),
    Rule(r"found NaN in|NaN in local grad norm|loss scale already at minimum", DIVERGED,
         "the loss is not a number", "Lower LR, or add LR_WARMUP_ITERS"),
    Rule(r"slurmstepd: error: .*DUE TO TIME LIMIT", TIMEOUT,
         "SLURM's time limit ended the job", "Ask for more time (--time), or fewer TRAIN_ITERS"),
    Rule(r"slurmstepd: error: .*CANCELLED", CANCELLED, "SLURM cancelled the job"),
    Rule(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined", TIMEOUT,
         "only {1} of {2} nodes joined within {0} s", "Start the others with that address, within RENDEZVOUS_TIMEOUT"),
    Rule(r"client socket has timed out after (\d+)ms while trying to connect to \(([^)]*)\)", TIMEOUT,
         "the master ({1}) could not be reached within {0} ms", "Start rank 0 there, or compare ports and firewalls"),
    Rule(r"wait timeout after (\d+)ms, keys: \S*role_info/(\d+)", TIMEOUT,
         "a rank is missing: two nodes have the same rank, or a different NNODES", "Give each node its own rank"),
    Rule(r"[Tt]imed out waiting (?:for )?\d+ ?ms|Watchdog caught collective operation timeout|wait timeout after \d+ms",
         TIMEOUT, "a collective operation timed out: another process stopped, or the network is down",
         _LOOK_AT_OTHERS, Strength.WAITED),
    Rule(r"No route to host|Network is unreachable|Connection refused", NETWORK,
         "another node cannot be reached", _LOOK_AT_OTHERS, Strength.WAITED),
    Rule(r"Connection closed by peer|Connection reset by peer|[Bb]roken pipe|remote process exited|recvValue failed"
         r"|ncclRemoteError|ncclSystemError|unhandled system error", NETWORK,
         "the connection to another process was lost", _LOOK_AT_OTHERS, Strength.VICTIM),
    # torchrun's report lists these signals also for the workers that it ended itself after another had failed.
    Rule(r"failed \(exitcode: -9\)|DataLoader worker .* killed by signal: Killed", CRASHED,
         "a process was killed (SIGKILL)", "The kernel does it when memory runs out (see dmesg), else SLURM or a user"),
    Rule(r"DataLoader worker .* killed by signal: Bus error", CRASHED,
         "a data loader cannot read its memory: the data were cut short during the run, or /dev/shm is full",
         "Copy or prepare the data again, or free space there (df -h /dev/shm)"),
    Rule(r"failed \(exitcode: -24\)", CRASHED, "a process used up its CPU time", "Raise the limit (ulimit -t)"),
    Rule(r"failed \(exitcode: -11\)", CRASHED, "a process crashed (segmentation fault)"),
    Rule(r"failed \(exitcode: -(\d+)\)", CRASHED, "a process was ended by signal {0}", "", Strength.VICTIM),
    Rule(r"Received (\d+) death signal", CRASHED, "torchrun was ended by signal {0}", "", Strength.VICTIM),
    # What torchrun says about its workers' ends explains nothing.
    Rule(r"ChildFailedError|SignalException|KeyboardInterrupt", CRASHED, "a worker failed", "", Strength.VICTIM),
    Rule(r"^(?:\[rank\d+\]:\s*)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b(?:: .*)?)$", CRASHED,
         "{0}", "", Strength.EXCEPTION),
    Rule(r"^error: (.*)", CONFIGURATION, "{0}", "", Strength.EXCEPTION),
)  # fmt: skip

_RANK = re.compile(r"^\[rank(\d+)\]:")
# torchrun's report lists all failures, and then repeats the first one.
_ROOT_CAUSE = "Root Cause (first observed failure)"
_REPORTED_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_REPORTED_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+) *\(pid: (\d+)\)")
_ENDED = re.compile(r"Sending process (\d+) closing signal")
LONGEST_REASON = 300


class CauseFinder:
    """Reads a node's output as it comes and keeps the best explanation of a failure."""

    def __init__(self) -> None:
        self.best: Cause | None = None
        self.spoke: set[int | None] = set()  # the ranks with a message that explains something
        self._root_cause_follows = False
        self.reported_rank: int | None = None  # torchrun saw it fail first
        self.exits: dict[int, int] = {}  # what torchrun reports: the exit codes, by rank, of all but those with 0
        self.ended: set[str] = set()  # the processes that torchrun ended and has not reported
        self._of = 0

    def read(self, line: str, now: float) -> None:
        self._read_report(line)
        rule, match = next(((rule, found) for rule in RULES if (found := re.search(rule.pattern, line))), (None, None))
        if not rule or not match:
            return
        rank = int(said[1]) if (said := _RANK.match(line)) else None
        if (rule.status, rule.strength) != (CRASHED, Strength.VICTIM):  # those are torchrun's
            self.spoke.add(rank)
        if self.best is None or rule.strength > self.best.strength:
            reason, shown = rule.reason.format(*match.groups("?"))[:LONGEST_REASON], line.strip()[: 2 * LONGEST_REASON]
            self.best = Cause(rule.status, rule.strength, reason, rule.remedy, now, shown, rank)

    def _read_report(self, line: str) -> None:
        self._root_cause_follows |= line.startswith(_ROOT_CAUSE)
        if match := _REPORTED_RANK.match(line):
            self._of = int(match[1])
            if self._root_cause_follows:
                self.reported_rank, self._root_cause_follows = self._of, False
        elif match := _REPORTED_EXIT.match(line):
            self.exits[self._of] = int(match[1])
            self.ended.discard(match[2])
        elif match := _ENDED.search(line):
            self.ended.add(match[1])

    def cause(self) -> Cause | None:
        """The best explanation. If a rank failed first, without a message, the others' messages are consequences."""
        best, rank = self.best, self.reported_rank
        if best is None or rank is None:
            return best
        code = self.exits.get(rank, 0)
        if best.strength < Strength.EXCEPTION and code not in (0, -SIGTERM) and not self.spoke & {rank, None}:
            how = f"ended with exit status {code}" if code > 0 else f"was ended by signal {-code}"
            said = {"reason": f"a process {how}", "remedy": "Its last lines in the node's log may say why"}
            return replace(best, status=CRASHED, strength=Strength.EXCEPTION, rank=rank, **said)
        return replace(best, rank=rank) if best.rank is None else best

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Which of a failed node's ranks ended with exit status 0."""
        return [rank for rank in ranks if self.exits and not self.ended and rank not in self.exits]


def of_run(parts: Sequence[Mapping[str, Any]]) -> Status:
    """A run's status from its nodes' parts; the reason begins with the node that failed first.

    If another node's part is missing, what a node heard about its end counts.
    """
    nodes, known = parts[0]["nnodes"], {part["node"] for part in parts}
    heard = [end for part in parts for end in part.get("heard", []) if end["node"] not in known]
    failed = [part for part in (*parts, *heard) if part["status"] not in (COMPLETE, RUNNING)]
    if failed:
        first = first_failure(failed)
        origin = {"node": first["node"], "host": first["host"], **(first["cause"] or {})}
        where = f"node {first['node']} ({first['host']}): " if nodes > 1 else ""
        # A part may have come from another host as a file.
        return Status(first["status"], visible(where + first["reason"]), visible(first["remedy"]), origin)
    if any(part["status"] == RUNNING for part in parts):
        return Status(RUNNING)
    if absent := sorted(set(range(nodes)) - known):
        lacking = f"there is no record of node {', '.join(map(str, absent))} here"
        return Status(INCOMPLETE, lacking, "Bring the nodes' parts together: python -m t5bench collect --help")
    return Status(COMPLETE)


def first_failure(failed: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The node that failed first: the one with the strongest cause, and among equals the earliest."""

    def key(part: Mapping[str, Any]) -> tuple[float, bool, float]:
        when = part["cause"]["time"] if part["cause"] else float("inf")
        return (-weight_of(part), not part.get("signal"), when)

    return min(failed, key=key)


def weight_of(part: Mapping[str, Any]) -> float:
    """How much a failed node's part says about the cause, on the scale of Strength.

    A user who cancels a run on one node makes the others victims, but may also cancel a run that has failed elsewhere.
    """
    if part["status"] == CANCELLED:
        return (Strength.VICTIM + Strength.WAITED) / 2
    return part["cause"]["strength"] if part["cause"] else Strength.EXCEPTION


def iterations_expected(total: int, interval: int) -> int:
    """The last iteration that a complete run logs; 0 if it is too short to log any."""
    return total - total % interval
