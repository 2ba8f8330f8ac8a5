"""Why a run ended: messages of torchrun, torch, NCCL and SLURM as they were printed, and which of several counts."""

import builtins
import errno
import os
import re
from typing import Any

import pytest

from t5bench import Problem
from t5bench.record.status import CauseFinder, Strength, cause_of_exception, of_run

# As real runs printed them, shortened (torch 2.13, gloo, SLURM 22.05; the CUDA and NCCL lines as torch 2.x words them).
MESSAGES = [
    ("Timed out after 21 seconds waiting for clients. 1/2 clients joined.", "timeout", "only 1 of 2 nodes joined"),
    ("client socket has timed out after 20ms while trying to connect to (n0, 298).", "timeout", "master (n0, 298)"),
    ("port: 29812, name: EADDRINUSE, message: address already in use", "configuration", "port is already in use"),
    ("wait timeout after 15000ms, keys: /none/torchelastic/role_info/0", "timeout", "two nodes have the same rank"),
    ("cannot be retrieved (gai error: -2 - Name or service not known).", "configuration", "(Name or service"),
    ("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:1", "network", "connection to"),
    ("[E ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: W", "timeout", "operation timed out"),
    ("slurmstepd: error: *** JOB 12 ON node0 CANCELLED AT 1 DUE TO TIME LIMIT ***", "timeout", "SLURM's time limit"),
    ("slurmstepd: error: *** STEP 12.0 ON node0 CANCELLED AT 2026-11-20 ***", "cancelled", "SLURM cancelled"),
    ("E1123 2704 torch/api.py:1002] failed (exitcode: -9) local_rank: 1", "crashed", "was killed (SIGKILL)"),
    ("E1123 2704 torch/api.py:1002] failed (exitcode: -24) local_rank: 0", "crashed", "used up its CPU time"),
    ("E1123 2704 torch/api.py:1002] failed (exitcode: -15) local_rank: 1", "crashed", "was ended by signal 15"),
    ("  what():  CUDA out of memory. Tried to allocate 2.00 GiB. GPU", "out-of-memory", "2.00 GiB"),
    ("OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2", "crashed", "limit on processes or threads"),
    ("bash: fork: retry: Resource temporarily unavailable", "crashed", "limit on processes or threads is reached"),
    (
        "[E1125 0 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed with [/gloo/pair.h:311] Connect timeout [none]",
        "network",
        "a worker cannot connect",
    ),
    ("AssertionError", "crashed", "AssertionError"),
    ("W1123 378 torch/distributed/api.py:753] Received 15 death signal", "crashed", "torchrun was ended by signal 15"),
]


def found(*lines: str) -> CauseFinder:
    finder = CauseFinder()
    for number, line in enumerate(lines):
        finder.read(line, float(number))
    return finder


@pytest.mark.parametrize(("line", "status", "reason"), MESSAGES)
def test_one_message(line: str, status: str, reason: str):
    cause = found("something before", line, "something after").cause()
    assert cause is not None and reason in cause.reason
    assert (cause.status, cause.time, cause.line) == (status, 1.0, line.strip())


class OutOfMemoryError(RuntimeError):
    """As torch's."""


GLOO = "[enforce fail at /gloo/transport/tcp/{}"
SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), "out-of-memory", "(Tried to alloc"),
        (OutOfMemoryError("HIP says no"), "out-of-memory", "the GPU's memory is full"),
        (MemoryError(), "out-of-memory", "the host's memory is full"),
        (OSError(errno.ENOMEM, "fork"), "out-of-memory", "the host's memory is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
         "out-of-memory", "tried to allocate 8 bytes"),
        (SPACE, "crashed", "a disk or /dev/shm is full"),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), "crashed", "/dev/shm is full, or too small"),
        (RuntimeError("unable to write to file </torch_12_7>: No space left on device (28)"), "crashed", "/dev/shm is"),
        (RuntimeError("Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)"), "crashed",
         "/dev/shm is full, or too small"),
        (ImportError("\n\nIMPORTANT: READ THIS\n\nOriginal error was: libx.so: cannot open\n"), "crashed",
         "ImportError: libx.so: cannot open"),
        (OSError(errno.EDQUOT, "quota"), "crashed", "a disk quota is used up"),
        (OSError(errno.EMFILE, "open"), "crashed", "too many files are open in a worker"),
        (OSError(errno.EROFS, "open"), "crashed", "a file system is read-only"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"),
         "crashed", "a checkpoint could not be written"),
        (RuntimeError("can't start new thread"), "crashed", "the limit on processes or threads is reached here"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "crashed", "the limit on processes"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. "), "crashed", "data were cut short"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "crashed", "a process was killed"),
        # As torch 2.13 raised them on two hosts: all ports but the master's closed, and a wrong name.
        (RuntimeError(GLOO.format("device.cc:84] ifa != nullptr. Unable to find address for: eth7")), "configuration",
         "no network interface eth7 with an address, which GLOO_SOCKET_IFNAME names"),
        (RuntimeError("Gloo connectFullMesh failed with [/gloo/transport/tcp/pair.h:311] Connect timeout [none]"),
         "network", "a worker cannot connect to another node's worker"),
        (RuntimeError(GLOO.format("socket.cc:142] rv != -1. -1 vs -1. connect: Network is unreachable")), "network",
         "another node cannot be reached"),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:1"), "network",
         "the connection to another process was lost"),
        # W&B's and the hub's connections are none to another node.
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "crashed", "ConnectionRefusedError: [Errno"),
        (Exception("Current loss scale already at minimum - cannot decrease"), "diverged", "not a number"),
        (Problem("no data", "Prepare some"), "configuration", "no data"),
        (ValueError("mmap length is greater\nthan file size"), "crashed", "ValueError: mmap length is greater"),
        (KeyError("text"), "crashed", "KeyError: 'text'"),
        (AssertionError(), "crashed", "AssertionError"),
        (SystemExit("a stand-in"), "crashed", "SystemExit: a stand-in"),
    ],
)  # fmt: skip
def test_a_workers_exception(error: BaseException, status: str, reason: str):
    cause = cause_of_exception(error, 3)
    assert (cause.status, cause.rank) == (status, 3)
    assert reason in cause.reason


def test_what_to_do_where_a_container_or_a_second_network_is_the_reason():
    full = cause_of_exception(RuntimeError("unable to write to file </torch_12_7>: No space left on device (28)"), 0)
    assert "--shm-size" in full.remedy and "OUTPUT_DIR" not in full.remedy
    assert "--shm-size" in cause_of_exception(SPACE, 0).remedy
    for text in ("Gloo connectFullMesh failed with [pair.h:311] Connect timeout", "connect: No route to host"):
        assert "GLOO_SOCKET_IFNAME, and for GPUs NCCL_SOCKET_IFNAME" in cause_of_exception(RuntimeError(text), 0).remedy


def test_an_exception_without_a_message_says_where_it_was_raised():
    def importing() -> None:
        raise ImportError

    with pytest.raises(ImportError) as raised:
        importing()
    reason = cause_of_exception(raised.value, 0).reason
    assert re.fullmatch(r"ImportError: raised in importing \(.+/test_status\.py:\d+\)", reason), reason
    # torchrun's own, with the message below its name.
    cause = found(
        "Traceback (most recent call last):", "ImportError: ", "", "IMPORTANT: numpy is broken", "more"
    ).cause()
    assert cause is not None and cause.reason == "ImportError: IMPORTANT: numpy is broken"


@pytest.mark.parametrize("how", ["raise ValueError from error", "raise ValueError", "raise SystemExit(2) from None"])
def test_the_exception_that_led_to_the_last_one_counts(how: str):
    namespace: dict[str, Any] = {"Problem": Problem}
    exec(f"def fail():\n try: raise Problem('no data', 'Prepare some')\n except Problem as error: {how}", namespace)
    with pytest.raises((ValueError, SystemExit)) as raised:
        namespace["fail"]()
    cause = cause_of_exception(raised.value, 0)
    assert (cause.status, cause.reason, cause.remedy) == ("configuration", "no data", "Prepare some")


class Group(Exception):
    """As Python 3.11's ExceptionGroup, and the package of that name for 3.10."""

    def __init__(self, *exceptions: object) -> None:
        super().__init__(f"unhandled errors in a TaskGroup ({len(exceptions)} sub-exceptions)")
        self.exceptions = exceptions


def test_an_exception_in_a_group_counts():
    for members in ((MemoryError(),), (ValueError("x"), Group(KeyError("y"), MemoryError()))):
        assert cause_of_exception(Group(*members), 0).status == "out-of-memory"
    builtin = getattr(builtins, "ExceptionGroup", None)  # from Python 3.11 on
    if builtin:
        assert cause_of_exception(builtin("two", [ValueError("x"), MemoryError()]), 0).status == "out-of-memory"
    unknown = cause_of_exception(Group("no exception", ValueError("x")), 0)
    assert unknown.reason.endswith("Group: unhandled errors in a TaskGroup (2 sub-exceptions)")


@pytest.mark.parametrize(
    "lines",
    [
        ['  File "a.py", line 1, in f', "    g()", "OSError: [Errno 5] x"],  # 3.10
        ['  File "a.py", line 1, in f', "    g(a.b)", "    ~^^^^^", "OSError: [Errno 5] x", "a note"],  # 3.11 to 3.13
    ],
)
def test_the_last_line_of_a_traceback_of_every_python(lines: list[str]):
    cause = found("Traceback (most recent call last):", *lines).cause()
    assert cause is not None and cause.reason == "OSError: [Errno 5] x"


ROOT_CAUSE = "Root Cause (first observed failure):"


def test_the_rank_is_the_lines_or_the_first_that_torchrun_saw_fail():
    """How torchrun ended the others is no cause."""
    report = ["Failures:", "  rank      : 1 (local_rank: 1)", "  exitcode  : -9 (pid: 7)  (SIGKILL)", ROOT_CAUSE]
    report += ["  rank      : 2 (local_rank: 0)", "  rank      : 5 (local_rank: 1)"]
    for line, rank in (("[rank3]: what():  std::bad_alloc", 3), ("what():  std::bad_alloc", 2)):
        cause = found(line, *report).cause()
        assert cause is not None and (cause.reason, cause.rank) == ("the host's memory is full", rank)


LOST = "[rank0]: RuntimeError: Connection closed by peer"
WAITED_IN_VAIN = "torch.distributed.DistStoreError: wait timeout after 60000ms, keys: /default_pg/0//cpu//0/1"


@pytest.mark.parametrize(
    ("said", "rank", "code", "reason"),
    [
        (LOST, 1, 7, "a process ended with exit status 7"),
        (LOST, 1, -6, "a process was ended by signal 6"),
        (LOST, 1, -15, "the connection to another process was lost"),
        (WAITED_IN_VAIN, 0, 1, "a collective operation timed out"),
    ],
)
def test_a_rank_that_failed_first_without_a_message(said: str, rank: int, code: int, reason: str):
    report = [f"  rank      : {rank} (local_rank: {rank})", f"  exitcode  : {code} (pid: 5)"]
    finder = found(said, "elastic.multiprocessing.errors.ChildFailedError:", ROOT_CAUSE, *report)
    cause = finder.cause()
    assert cause is not None and cause.reason.startswith(reason)
    assert (cause.strength == Strength.EXCEPTION) == ("a process" in reason)
    assert finder.silent(range(2)) == [1 - rank]  # torchrun does not report those that ended with 0
    finder.read("Sending process 6 closing signal SIGTERM", 0)
    assert finder.silent(range(2)) == []


def test_a_master_that_was_reached_at_the_second_try_was_not_unreachable():
    """On a busy machine, or where the first node still waits for another, which never comes."""
    tried = "[c10d] The client socket has timed out after 8000ms while trying to connect to (node0, 29800)."
    cause = found(tried).cause()
    assert cause is not None and "could not be reached" in cause.reason
    lost = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."
    cause = found(tried, lost).cause()
    assert cause is not None and cause.reason == "the connection to node 0's torchrun was lost"


def test_the_collective_operation_that_nccl_gave_up_is_named():
    said = "[rank3]:[E] [PG ID 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,"
    cause = found(f"{said} NumelIn=4, Timeout(ms)=600000) ran for 600023 milliseconds before timing out.").cause()
    assert cause is not None and cause.reason.startswith("a collective operation (ALLREDUCE 7) timed out")


def test_a_cause_outweighs_earlier_messages():
    lines = ["RuntimeError: Connection closed by peer", "RuntimeError: Timed out waiting 15000ms", "KeyError: 'text'"]
    lines += ["what():  CUDA out of memory. ", "what():  std::bad_alloc"]
    for number, counts in enumerate([0, 1, 2, 3, 3], 1):  # of the last two, which are as strong, the first
        cause = found(*lines[:number]).cause()
        assert cause is not None and cause.time == counts


def test_an_ordinary_line_explains_nothing():
    lines = " iteration 10/ 20 | lm loss: 8.0E+00 |", "UserWarning: about an Error: see below", "loading errors.py"
    assert found(*lines).cause() is None


# ---- several nodes -------------------------------------------------------------------------------------------------


def part(node: int, status: str, strength: Strength | None = None, time: float = 0.0, nodes: int = 2) -> dict[str, Any]:
    cause = {"strength": int(strength), "time": time, "line": "a line"} if strength is not None else None
    said = {"status": status, "reason": f"reason {node}", "remedy": "", "cause": cause}
    return said | {"node": node, "host": f"node{node}", "nnodes": nodes}


CANCELLED = part(0, "cancelled") | {"signal": "INT"}
ENDED_FOR_IT = part(1, "cancelled", Strength.VICTIM) | {"signal": None}
VICTIM = part(0, "network", Strength.VICTIM, time=1.0)
HEARD = part(1, "crashed", Strength.CAUSE)


@pytest.mark.parametrize(
    ("parts", "name", "reason"),
    [
        ([part(0, "complete")], "incomplete", "there is no record of node 1 here"),
        # Of the strongest causes the earliest: a victim may speak first.
        ([VICTIM, part(1, "crashed", Strength.EXCEPTION, time=1.5)], "crashed", "node 1 (node1): reason 1"),
        ([part(0, "timeout", Strength.CAUSE, time=5.0), HEARD], "crashed", "node 1 (node1): reason 1"),
        ([part(0, "running"), part(1, "complete")], "running", ""),
        ([part(0, "crashed", nodes=1)], "crashed", "reason 0"),
        # Cancelling makes victims of the others but hides no failure: it ranks between a lost connection and a timeout.
        ([CANCELLED, part(1, "network", Strength.VICTIM)], "cancelled", "node 0 (node0): reason 0"),
        ([CANCELLED, part(1, "timeout", Strength.WAITED)], "timeout", "node 1 (node1): reason 1"),
        ([CANCELLED, part(1, "crashed")], "crashed", "node 1 (node1): reason 1"),
        ([ENDED_FOR_IT, CANCELLED], "cancelled", "node 0 (node0): reason 0"),
        # What a node heard of the others counts where their own parts are not at hand.
        ([VICTIM | {"heard": [HEARD]}], "crashed", "node 1 (node1): reason 1"),
        ([VICTIM | {"heard": [HEARD]}, HEARD | {"reason": "its own"}], "crashed", "node 1 (node1): its own"),
        ([part(0, "complete") | {"heard": [HEARD]}, part(1, "complete")], "complete", ""),
        ([part(0, "complete") | {"heard": [part(1, "complete")]}], "incomplete", "there is no record of node 1 here"),
    ],
)
def test_the_status_of_a_run(parts: list[dict[str, Any]], name: str, reason: str):
    status = of_run(parts)
    assert (status.name, status.reason) == (name, reason)
    assert not status.origin or parts[0]["nnodes"] == 1 or reason.startswith(f"node {status.origin['node']} (")
