"""How a run ended: one word from a closed list, the first cause in one sentence, what to do, and where it began.

A worker that raises reports its own exception (t5bench/run/worker.py). What no Python of ours sees is read in a node's
output by short stable messages: what C++ libraries print before they abort, and what torchrun and SLURM say. Of several
causes the strongest counts, and among equals the earliest: "connection closed by peer" comes from the victims and never
says why.
"""

import errno
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

from t5bench import EXIT_CONFIGURATION, Problem
from t5bench import SIGNALS as STOP_SIGNALS
from t5bench.text import visible

COMPLETE = "complete"
INCOMPLETE = "incomplete"
DIVERGED = "diverged"
OUT_OF_MEMORY = "out-of-memory"
TIMEOUT = "timeout"
NETWORK = "network"
CONFIGURATION = "configuration"
CRASHED = "crashed"
CANCELLED = "cancelled"
RUNNING = "running"  # the run has not ended

# What a launcher exits with; cancelled is 128 + the signal, as in every shell.
EXIT_CODES = {
    COMPLETE: 0,
    CRASHED: 1,
    CONFIGURATION: EXIT_CONFIGURATION,
    INCOMPLETE: 3,
    DIVERGED: 4,
    OUT_OF_MEMORY: 5,
    TIMEOUT: 6,
    NETWORK: 7,
}
# Limits of time that a parent has set (ulimit -t, alarm, timers), and a machine that loses its power.
LIMITS = (signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGPWR)
# Signals that people, SLURM and other batch systems send to end a run, and what they are called. The recorder ends in
# order when it receives one; KILL cannot be handled.
SIGNALS: dict[int, str] = {
    number: signal.Signals(number).name.removeprefix("SIG") for number in (*STOP_SIGNALS, *LIMITS)
}
_START = time.time() - time.monotonic()


def clock_time(monotonic: float) -> float:
    """Seconds since 1970 for a time of this host's monotonic clock, which all its processes share.

    It is this machine's clock when the process began: the clock of a record, which is not adjusted during a run.
    """
    return _START + monotonic


def now() -> float:
    return clock_time(time.monotonic())


class Strength(IntEnum):
    """How much a message says about the cause."""

    VICTIM = 0  # another process went away
    WAITED = 1  # another process, or the network, did not answer in time
    EXCEPTION = 2  # this process failed, for a reason of its own that no rule knows
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

    def fields(self) -> dict[str, Any]:
        """What a node's part of the record says of it."""
        status = self.ending()
        return {"status": status.name, "reason": status.reason, "remedy": status.remedy, "cause": asdict(self)}


class Rule(NamedTuple):
    """What a text that matches the pattern means; reason has a place for each group: {0} is the first."""

    pattern: str
    status: str
    reason: str
    remedy: str = ""
    strength: Strength = Strength.CAUSE

    def cause(self, match: re.Match[str], time: float, line: str, rank: int | None) -> Cause:
        reason = self.reason.format(*match.groups("?"))[:LONGEST_REASON]
        return Cause(self.status, self.strength, reason, self.remedy, time, line.strip()[: 2 * LONGEST_REASON], rank)


LONGEST_REASON = 300
KILLED = "a process was killed (SIGKILL)"
SPACE_REMEDY = "Free space and inodes there (df -h, df -i), or choose another OUTPUT_DIR"
FILE_SIZE_REMEDY = (
    "Raise the limit on the size of a file (ulimit -f unlimited), which a batch system or a shell's start-up file may"
    " set. Some file systems have one of their own"
)
QUOTA_REMEDY = f"See your quota (quota -s). {SPACE_REMEDY}"
READ_ONLY_REMEDY = "See dmesg: the kernel does this to a damaged file system"
FILES_REMEDY = "Raise the limit: ulimit -n 65536"
SHARED_MEMORY_REMEDY = (
    "Free space there (ls -l /dev/shm). A container has 64 MiB unless it is started with more:"
    " docker run --shm-size=16g, or --ipc=host"
)
_EITHER_REMEDY = f"{SPACE_REMEDY}. In a container /dev/shm may be too small: docker run --shm-size=16g"
PROCESSES_REMEDY = (
    "Stop other processes there, or raise the limit: ulimit -u, or pids.max of the container's or SLURM job's cgroup"
)
_SHARD_MORE = "Lower MICRO_BATCH_SIZE, or use a strategy that shards more (zero2, zero3, zero3_offload, tensor)"
_MORE_MEMORY = "Use a node with more memory, or a smaller model"
_NAME_THE_NETWORK = (
    "If a node's own name leads to a network that the others do not reach, name the interface of the one that they do:"
    " GLOO_SOCKET_IFNAME, and for GPUs NCCL_SOCKET_IFNAME"
)
_LOOK_AT_OTHERS = "Check the other nodes' logs for an earlier failure, and the network between them"
_OPEN_PORTS = (
    "Open all ports between the run's nodes, not only MASTER_PORT: Gloo and NCCL connect the workers on ports that the"
    f" kernel chooses. {_NAME_THE_NETWORK}"
)
A_COLLECTIVE = "a collective operation"
_NO_THREAD = "the limit on processes or threads is reached here: {0}"
_NAME_INTERFACE = "Unset it, or name one that 'ip -brief address' lists on this node with an address"

# What C++ libraries say: in an exception that they raise in Python, or in the output if they abort the process. The
# first rule that matches a text speaks for it.
OF_LIBRARIES = (
    Rule(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)",
         TIMEOUT, f"{A_COLLECTIVE} ({{1}} {{0}}) timed out: another process stopped, or the network is down",
         _LOOK_AT_OTHERS, Strength.WAITED),
    Rule(r"CUDA out of memory\. (Tried to allocate [0-9.]+ [KMG]iB)", OUT_OF_MEMORY,
         "the GPU's memory is full ({0})", _SHARD_MORE),
    Rule(r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY", OUT_OF_MEMORY, "the GPU's memory is full", _SHARD_MORE),
    Rule(r"can't allocate memory: you tried to allocate (\d+) bytes", OUT_OF_MEMORY,
         "the host's memory is full (tried to allocate {0} bytes)", _MORE_MEMORY),
    Rule(r"Cannot allocate memory|std::bad_alloc", OUT_OF_MEMORY, "the host's memory is full", _MORE_MEMORY),
    Rule(r"Unable to find address for: (\S+)", CONFIGURATION,
         "this node has no network interface {0} with an address, which GLOO_SOCKET_IFNAME names", _NAME_INTERFACE),
    Rule(r"[Nn]o socket interface found|Bootstrap ?: ?no (?:socket )?interface", CONFIGURATION,
         "NCCL finds no network interface of the name in NCCL_SOCKET_IFNAME here", _NAME_INTERFACE),
    Rule(r"(pthread_create failed|can't start new thread|Thread creation failed|Resource temporarily unavailable)",
         CRASHED, _NO_THREAD, PROCESSES_REMEDY),
    Rule(r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+", CRASHED,
         "a checkpoint could not be written", SPACE_REMEDY),
    Rule(r"unable to (?:write to file|allocate shared memory|resize file|mmap \d+ bytes from file)"
         r"|[Ee]rror while creating shared memory segment|shm_open.*No space left", CRASHED,
         "/dev/shm is full, or too small", SHARED_MEMORY_REMEDY),
    Rule(r"[Tt]imed out waiting (?:for )?\d+ ?ms|Watchdog caught collective operation timeout|wait timeout after \d+ms",
         TIMEOUT, f"{A_COLLECTIVE} timed out: another process stopped, or the network is down",
         _LOOK_AT_OTHERS, Strength.WAITED),
    Rule(r"connectFullMesh failed|[Tt]imed out (?:in )?connect|SO_ERROR|[Cc]onnect\w* timed ?out|connect.*Timeout",
         NETWORK, "a worker cannot connect to another node's worker", _OPEN_PORTS, Strength.WAITED),
    Rule(r"No route to host|Network is unreachable|Connection refused", NETWORK,
         "another node cannot be reached", f"{_LOOK_AT_OTHERS}. {_NAME_THE_NETWORK}", Strength.WAITED),
    Rule(r"Connection closed by peer|Connection reset by peer|[Bb]roken pipe|remote process exited|recvValue failed"
         r"|ncclRemoteError|ncclSystemError|unhandled system error", NETWORK,
         "the connection to another process was lost", _LOOK_AT_OTHERS, Strength.VICTIM),
)  # fmt: skip

# What PyTorch and the engines say in an exception of Python.
OF_EXCEPTIONS = (
    Rule(r"^(nodes? [\d, ]+ joined the run, but no worker there came .*)", TIMEOUT, "{0}",
         "See the output of that node's launcher. RENDEZVOUS_TIMEOUT is how long the others wait", Strength.WAITED),
    Rule(r"found NaN in|NaN in local grad norm|loss scale already at minimum", DIVERGED,
         "the loss is not a number", "Lower LR, or add LR_WARMUP_ITERS"),
    Rule(r"DataLoader worker .* killed by signal: Killed", CRASHED, KILLED,
         "The kernel does it when memory runs out (see dmesg), else SLURM or a user"),
    Rule(r"DataLoader worker .* killed by signal: Bus error", CRASHED,
         "a data loader cannot read its memory: the data were cut short during the run, or /dev/shm is full",
         f"Copy or prepare the data again if they were cut short. {SHARED_MEMORY_REMEDY}"),
)  # fmt: skip

_UNREACHED = Rule(
    r"client socket has timed out after (\d+)ms while trying to connect to \(([^)]*)\)", TIMEOUT,
    "the master ({1}) could not be reached within {0} ms", "Start rank 0 there, or compare ports and firewalls",
)  # fmt: skip
_LOST_AGAIN = Rule(
    r"DistNetworkError: .*(?:Failed to recv|[Cc]onnection was likely closed)", NETWORK,
    "the connection to node 0's torchrun was lost", _LOOK_AT_OTHERS, Strength.VICTIM,
)  # fmt: skip

# What torchrun and SLURM say.
OF_PROGRAMS = (
    Rule(r"EADDRINUSE|[Aa]ddress already in use", CONFIGURATION,
         "the rendezvous port is already in use", "Choose another on every node: MASTER_PORT=29900"),
    Rule(r"gai error: -?\d+ - ([^)\n]*)", CONFIGURATION, "the master host's name does not resolve ({0})",
         "Check its spelling, or use the address that 'getent hosts' prints on the master"),
    Rule(r"slurmstepd: error: .*DUE TO TIME LIMIT", TIMEOUT,
         "SLURM's time limit ended the job", "Ask for more time (--time), or fewer TRAIN_ITERS"),
    Rule(r"slurmstepd: error: .*CANCELLED", CANCELLED, "SLURM cancelled the job"),
    Rule(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined", TIMEOUT,
         "only {1} of {2} nodes joined within {0} s", "Start the others with that address, within RENDEZVOUS_TIMEOUT"),
    _UNREACHED,
    Rule(r"wait timeout after (\d+)ms, keys: \S*role_info/(\d+)", TIMEOUT,
         "a rank is missing: two nodes have the same rank, or a different NNODES", "Give each node its own rank"),
    Rule(r"wait timeout after (\d+)ms, keys: \S*assigned_ranks/", TIMEOUT,
         "not all nodes of the run joined within {0} ms", "See the output of node 0, which knows who is missing",
         Strength.WAITED),
    # Another node's torchrun, which keeps the store, gave up or ended; its own cause says why.
    _LOST_AGAIN,
    # torchrun's report lists these signals also for the workers that it ended itself after another had failed.
    Rule(r"failed \(exitcode: -9\)", CRASHED, KILLED,
         "The kernel does it when memory runs out (see dmesg), else SLURM or a user"),
    Rule(r"failed \(exitcode: -24\)", CRASHED, "a process used up its CPU time", "Raise the limit (ulimit -t)"),
    Rule(r"failed \(exitcode: -11\)", CRASHED, "a process crashed (segmentation fault)"),
    Rule(r"failed \(exitcode: -(\d+)\)", CRASHED, "a process was ended by signal {0}", "", Strength.VICTIM),
    Rule(r"Received (\d+) death signal", CRASHED, "torchrun was ended by signal {0}", "", Strength.VICTIM),
    # What torchrun says about its workers' ends explains nothing.
    Rule(r"ChildFailedError|SignalException|KeyboardInterrupt", CRASHED, "a worker failed", "", Strength.VICTIM),
)  # fmt: skip
# torchrun's own exception: it counts if torchrun reports no worker, for a worker reports its own.
OF_TORCHRUN = Rule(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b(?:: .*)?)$", CRASHED,
                   "{0}", "", Strength.EXCEPTION)  # fmt: skip


def first_match(rules: Iterable[Rule], text: str) -> tuple[Rule, re.Match[str]] | None:
    for rule in rules:
        match = re.search(rule.pattern, text)
        if match:
            return rule, match
    return None


# ---- exceptions ------------------------------------------------------------------------------------------------------

_OF_ERRNO = {
    errno.ENOSPC: (CRASHED, "a disk or /dev/shm is full", _EITHER_REMEDY),
    errno.EDQUOT: (CRASHED, "a disk quota is used up", QUOTA_REMEDY),
    errno.EFBIG: (CRASHED, "a file is larger than this process may write", FILE_SIZE_REMEDY),
    errno.ENOMEM: (OUT_OF_MEMORY, "the host's memory is full", _MORE_MEMORY),
    errno.EMFILE: (CRASHED, "too many files are open in a worker", FILES_REMEDY),
    errno.ENFILE: (CRASHED, "too many files are open on this host", "Close some, or raise fs.file-max (sysctl)"),
    errno.EROFS: (CRASHED, "a file system is read-only", READ_ONLY_REMEDY),
}


def remedy_of_writing(error: OSError, otherwise: str = SPACE_REMEDY) -> str:
    """What to do about a file that cannot be written."""
    remedies = {
        errno.EFBIG: FILE_SIZE_REMEDY,
        errno.EDQUOT: QUOTA_REMEDY,
        errno.EROFS: READ_ONLY_REMEDY,
        errno.EMFILE: FILES_REMEDY,
    }
    return remedies.get(error.errno or 0, otherwise)


def name_of(error: BaseException) -> str:
    kind = type(error)
    is_plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"


def message_of(error: BaseException) -> str:
    """Its text in one line, without the advice that PyTorch adds below. Without a text, where it was raised."""
    try:
        text = str(error).strip()
    except Exception:  # the exception's own code
        return "(no message: its __str__ fails)"
    original = re.search(r"^Original error was: *(\S.*)$", text, re.MULTILINE)  # below NumPy's advice
    if original:
        return original[1].strip()
    return text.splitlines()[0].strip() if text else _raised_in(error)


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"raised in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, those of a group, and those that led to it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        # Python 3.11's groups, and the package that gives them to 3.10.
        members = getattr(following, "exceptions", ())
        for member in members if isinstance(members, tuple) else ():
            if isinstance(member, BaseException) and id(member) not in seen:
                seen.add(id(member))
                yield from _chain(member)
        is_hidden = following.__suppress_context__ and not isinstance(following, SystemExit)
        following = following.__cause__ or (None if is_hidden else following.__context__)


def cause_of_exception(error: BaseException, rank: int | None) -> Cause:
    """What an exception that ended a worker says about the cause; time: the host's monotonic clock's.

    Of those that led to it, the last one with a known meaning counts.
    """
    moment = time.monotonic()
    text = f"{name_of(error)}: {message_of(error)}".removesuffix(": ")
    for each in _chain(error):
        known = _known(each, moment, text, rank)
        if known:
            return known
    return Cause(CRASHED, Strength.EXCEPTION, text[:LONGEST_REASON], "", moment, text[: 2 * LONGEST_REASON], rank)


def _known(error: BaseException, moment: float, text: str, rank: int | None) -> Cause | None:
    def cause(status: str, reason: str, remedy: str) -> Cause:
        line = text[: 2 * LONGEST_REASON]
        return Cause(status, Strength.CAUSE, reason[:LONGEST_REASON], remedy, moment, line, rank)

    message = message_of(error)
    if isinstance(error, Problem):
        return cause(CONFIGURATION, message, error.remedy)
    if isinstance(error, MemoryError):
        return cause(OUT_OF_MEMORY, "the host's memory is full", _MORE_MEMORY)
    if isinstance(error, BlockingIOError):
        return cause(CRASHED, _NO_THREAD.format(message), PROCESSES_REMEDY)
    if isinstance(error, OSError):
        if error.errno == errno.ENOSPC and str(error.filename).startswith("/dev/shm/"):
            return cause(CRASHED, "/dev/shm is full, or too small", SHARED_MEMORY_REMEDY)
        # Not the rules of libraries: a connection of W&B or of the hub is none to another node.
        return cause(*_OF_ERRNO[error.errno]) if error.errno in _OF_ERRNO else None
    rules = OF_EXCEPTIONS if not isinstance(error, RuntimeError) else (*OF_EXCEPTIONS, *OF_LIBRARIES)
    matched = first_match(rules, " ".join(str(error).split()))
    if matched:
        rule, match = matched
        return rule.cause(match, moment, text, rank)
    if type(error).__name__ == "OutOfMemoryError":  # torch's
        return cause(OUT_OF_MEMORY, "the GPU's memory is full", _SHARD_MORE)
    return None


def rejected_command_line(message: str, rank: int | None) -> Cause:
    """For what argparse says before it ends a worker."""
    reason = f"the engine rejects the command line: {message.strip()}"[:LONGEST_REASON]
    remedy = "Check what follows --, which goes to the engine unchanged"
    return Cause(CONFIGURATION, Strength.CAUSE, reason, remedy, time.monotonic(), reason, rank)


# ---- a node's output -------------------------------------------------------------------------------------------------

_RANK = re.compile(r"^\[rank(\d+)\]:")
# torchrun's report lists all failures, and then repeats the first one.
_ROOT_CAUSE = "Root Cause (first observed failure)"
_REPORTED_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_REPORTED_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+) *\(pid: (\d+)\)")
_ENDED = re.compile(r"Sending process (\d+) closing signal")


class CauseFinder:
    """Reads a node's output as it comes and keeps the best explanation of a failure."""

    def __init__(self) -> None:
        self.best: Cause | None = None
        self._rule: Rule | None = None  # of the best
        self.torchruns: Cause | None = None  # torchrun's own last exception
        self.spoke: set[int | None] = set()  # the ranks with a message that explains something
        self._root_cause_follows = False
        self._message_follows = False  # below an exception's name, as NumPy's do
        self.reported_rank: int | None = None  # torchrun saw it fail first
        self.exits: dict[int, int] = {}  # what torchrun reports: the exit codes, by rank, of all but those with 0
        self.ended: set[str] = set()  # the processes that torchrun ended and has not reported
        self._of = 0

    def read(self, line: str, now: float) -> None:
        self._read_report(line)
        prefix = _RANK.match(line)
        rank = int(prefix[1]) if prefix else None
        matched = first_match((*OF_PROGRAMS, *OF_LIBRARIES), line)
        if not matched:
            match = re.search(OF_TORCHRUN.pattern, line.rstrip().removesuffix(":"))
            if self._message_follows and self.torchruns and line.strip():
                self.torchruns = replace(
                    self.torchruns, reason=f"{self.torchruns.reason}: {line.strip()}"[:LONGEST_REASON]
                )
                self._message_follows = False
            if match:
                self._message_follows = line.rstrip().endswith(":")
                self.torchruns = OF_TORCHRUN.cause(match, now, line, None)
            return
        rule, match = matched
        if (rule.status, rule.strength) != (CRASHED, Strength.VICTIM):  # those are torchrun's
            self.spoke.add(rank)
        if rule is _LOST_AGAIN and self._rule is _UNREACHED:
            self.best = None  # torchrun tried again, and reached it
        if self.best is None or rule.strength > self.best.strength:
            self.best = rule.cause(match, now, line, rank)
            self._rule = rule

    def _read_report(self, line: str) -> None:
        self._root_cause_follows |= line.startswith(_ROOT_CAUSE)
        match = _REPORTED_RANK.match(line)
        if match:
            self._of = int(match[1])
            if self._root_cause_follows:
                self.reported_rank = self._of
                self._root_cause_follows = False
        elif match := _REPORTED_EXIT.match(line):
            self.exits[self._of] = int(match[1])
            self.ended.discard(match[2])
        elif match := _ENDED.search(line):
            self.ended.add(match[1])

    def cause(self, raised: Sequence[Cause] = ()) -> Cause | None:
        """The best explanation, with what the workers' own exceptions say.

        If a rank failed first, without a word, the others' messages are consequences.
        """
        causes = [*raised, *([self.best] if self.best else [])]
        if self.torchruns and not self.exits:
            causes.append(self.torchruns)
        if not causes:
            return None
        best = min(causes, key=lambda cause: (-cause.strength, cause.time))
        rank = self.reported_rank
        if rank is None:
            return best
        code = self.exits.get(rank, 0)
        spoke = self.spoke | {cause.rank for cause in raised}
        if best.strength < Strength.EXCEPTION and code not in (0, -signal.SIGTERM) and not spoke & {rank, None}:
            how = f"ended with exit status {code}" if code > 0 else f"was ended by signal {-code}"
            silent = {"reason": f"a process {how}", "remedy": "Its last lines in the node's log may say why"}
            return replace(best, status=CRASHED, strength=Strength.EXCEPTION, rank=rank, **silent)
        return replace(best, rank=rank) if best.rank is None else best

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Which of a failed node's ranks ended with exit status 0."""
        return [rank for rank in ranks if self.exits and not self.ended and rank not in self.exits]


def of_run(parts: Sequence[Mapping[str, Any]]) -> Status:
    """A run's status from its nodes' parts; the reason begins with the node that failed first.

    If another node's part is missing, what a node heard about its end counts.
    """
    nodes = parts[0]["nnodes"]
    known = {part["node"] for part in parts}
    heard = [end for part in parts for end in part.get("heard", []) if end["node"] not in known]
    failed = [part for part in (*parts, *heard) if part["status"] not in (COMPLETE, RUNNING)]
    if failed:
        first = first_failure(failed)
        origin = {"node": first["node"], "host": first["host"], **(first["cause"] or {})}
        where = f"{node_named(first['node'], first['host'])}: " if nodes > 1 else ""
        # A part may have come from another host as a file.
        return Status(first["status"], visible(where + first["reason"]), visible(first["remedy"]), origin)
    if any(part["status"] == RUNNING for part in parts):
        return Status(RUNNING)
    absent = sorted(set(range(nodes)) - known)
    if absent:
        lacking = f"there is no record of node {', '.join(map(str, absent))} here"
        return Status(INCOMPLETE, lacking, "Gather the nodes' parts: python -m t5bench collect --help")
    return Status(COMPLETE)


def node_named(node: int, host: str | None) -> str:
    """host: None or "?" if nobody has said it."""
    return f"node {node} ({host})" if host not in (None, "?") else f"node {node}"


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
