"""What ends a run that nothing else would end, with real processes in the places of torchrun and its workers."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
from harness import processes_with, wait_for

from t5bench.run import guard as guards
from t5bench.run.guard import Guard, Stacks, workers
from t5bench.run.peers import Peers

# Starts a worker that stands still in a function of its own, and a data loader of that worker, and says so.
TORCHRUN = """
import os, subprocess, sys
worker = "import os, subprocess, sys\\n" \\
    "loader = subprocess.Popen(['sleep', '600'])\\n" \\
    "def stands_here(): print('ready', flush=True); sys.stdin.read()\\n" \\
    "stands_here()"
subprocess.run([sys.executable, "-c", worker], env=os.environ | {"RANK": "3", "PYTHONFAULTHANDLER": "1"})
"""


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


class Run:
    """torchrun's stand-in, what it prints going to the stacks."""

    def __init__(self, mark: str, program: str = TORCHRUN) -> None:
        self.stacks = Stacks()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"T5_RUN_MARK": mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.stacks.read(line.rstrip("\n"))


@pytest.fixture
def run(mark: str) -> Iterator[Run]:
    started = Run(mark)
    yield started
    for pid in processes_with(f"T5_RUN_MARK={mark}"):
        os.kill(pid, signal.SIGKILL)
    started.process.wait()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    monkeypatch.setattr(guards, "GRACE_SECONDS", 0)
    return Peers(0, 1, "127.0.0.1", 1, "a run")


@pytest.fixture
def guarded(mark: str, run: Run, peers: Peers) -> Iterator[Callable[..., Guard]]:
    """A guard of that run; it has ended the run when this returns."""
    started: list[Guard] = []

    def start(launcher: int | None = None, watchdog_seconds: float = 0) -> Guard:
        parent = os.getppid() if launcher is None else launcher
        started.append(Guard(parent, mark, peers, run.stacks, watchdog_seconds=watchdog_seconds, rendezvous_seconds=60))
        started[0].thread.join(20)
        assert not processes_with(f"T5_RUN_MARK={mark}")
        return started[0]

    yield start
    for each in started:
        each.finish()


def failed(status: str, strength: int | None, **more: object) -> dict:
    cause = None if strength is None else {"strength": strength, "time": 1.0}
    return {
        "node": 1, "host": "node1", "status": status, "reason": "why", "remedy": "what to do", "cause": cause,
        "signal": None,
    } | more  # fmt: skip


def test_workers_are_the_children_of_torchrun_and_not_their_loaders(run: Run, mark: str):
    assert list(workers(mark)) == [3]
    # A process that becomes another program has no environment for a moment.
    wait_for(lambda: len(processes_with(f"T5_RUN_MARK={mark}")) == 3)
    assert workers("another") == {}


def test_without_its_launcher_a_run_is_ended(guarded: Callable[..., Guard]):
    assert guarded(launcher=1).verdict is None  # the recorder says why


def test_a_run_that_stands_still_tells_where(guarded: Callable[..., Guard]):
    guard = guarded(watchdog_seconds=1)
    assert guard.verdict and guard.cause
    assert guard.verdict.name == "timeout"
    assert "before the first iteration: it stopped at rank 3 in stands_here (<string>:3)" in guard.verdict.reason
    assert guard.cause.strength == 3


def test_a_suspended_worker_is_named_and_ended(guarded: Callable[..., Guard], mark: str):
    os.kill(workers(mark)[3], signal.SIGSTOP)
    guard = guarded(watchdog_seconds=1)
    assert guard.verdict
    assert "rank 3 in a stop by signal (SIGSTOP)" in guard.verdict.reason


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        (failed("crashed", 3), "crashed", "ended because node 1 (node1) failed: why"),
        (failed("network", 0), "network", "ended because node 1 (node1) failed: why"),
        (failed("timeout", 1), "timeout", "it stopped at rank 3 in stands_here (<string>:3)"),
        (failed("cancelled", None, signal="INT"), "cancelled", "ended because node 1 (node1) was cancelled: why"),
    ],
    ids=["crashed", "network", "timeout", "cancelled"],
)
def test_a_run_that_failed_elsewhere_is_ended_here(
    guarded: Callable[..., Guard], peers: Peers, end: dict, status: str, reason: str
):
    peers.ends[1] = end
    guard = guarded()
    assert guard.verdict
    assert (guard.verdict.name, guard.verdict.reason) == (status, reason)


def test_a_run_whose_other_node_went_away_is_ended(guarded: Callable[..., Guard], peers: Peers):
    peers.gone[1] = 0.0
    guard = guarded()
    assert guard.verdict
    assert "node 1 (?) failed: it went away without a word" in guard.verdict.reason


def test_a_healthy_run_is_left_alone(run: Run, mark: str, peers: Peers):
    peers.ends[1] = failed("complete", None)
    guard = Guard(os.getppid(), mark, peers, run.stacks, watchdog_seconds=60, rendezvous_seconds=0)
    guard.thread.join(2.5)
    guard.finish()
    assert not guard.thread.is_alive() and guard.verdict is None
    assert len(processes_with(f"T5_RUN_MARK={mark}")) == 3


def test_a_run_without_workers_is_ended_after_the_rendezvous(mark: str, peers: Peers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guards, "START_SECONDS", 0)
    waits = Run(mark, "import sys; print('ready', flush=True); sys.stdin.read()")
    guard = Guard(os.getppid(), mark, peers, waits.stacks, watchdog_seconds=0, rendezvous_seconds=0)
    wait_for(lambda: waits.process.poll() is not None)
    guard.finish()
    assert guard.verdict and guard.verdict.name == "timeout"
    assert "found no other node at 127.0.0.1" in guard.verdict.reason
