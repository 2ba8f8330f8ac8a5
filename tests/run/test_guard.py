"""How a worker ends, and what ends a run that nothing else would end, with real processes."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import made_plan
from support import REPO_ROOT, Project, processes_with, wait_for

from t5bench.plan.channel import Endpoint
from t5bench.plan.ports import free_port
from t5bench.record.status import Cause, now
from t5bench.run import guard as guards
from t5bench.run.collectives import words_of
from t5bench.run.guard import Guard, Stacks
from t5bench.run.peers import Peers
from t5bench.run.processes import workers
from t5bench.run.reports import Reporter, Reports, reports_prefix

# A worker that hangs in a function, in a separate process, and says so.
WORKER = """
import subprocess, sys
loader = subprocess.Popen(["sleep", "600"])
def stands_here(): print("ready", flush=True); sys.stdin.read()
stands_here()
"""
TORCHRUN = """
import os, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], env=os.environ | {"RANK": "3"})
"""


# Workers that train, or only evaluate, for five seconds without a line in the log, and then hang.
TRAINS = """
import sys, time, torch
from torch.utils.data import DataLoader
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([weight])
batches = iter(DataLoader(range(100000)))
print("ready", flush=True)
until = time.monotonic() + 5
while time.monotonic() < until:
    time.sleep(0.2)
    WHAT
sys.stdin.read()
"""


class Run:
    """torchrun's stand-in, and a guard of it."""

    def __init__(self, directory: Path, program: str = TORCHRUN, worker: str = WORKER) -> None:
        self.mark, self.stacks = uuid.uuid4().hex, Stacks(directory / "stack")
        script = directory / "worker.py"
        script.write_text(worker)
        self.peers = Peers(Endpoint(0, 1, "127.0.0.1", 1, "a run", b"secret"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, REPO_ROOT / "t5bench/run/worker.py", self.stacks.prefix, script],
            env=os.environ | {"T5_RUN_MARK": self.mark, "PYTHONPATH": str(REPO_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def guard(self, watchdog: int = 0, rendezvous: int = 60, resume_from: int = 0) -> Guard:
        settings = {"WATCHDOG_SECONDS": str(watchdog), "RENDEZVOUS_TIMEOUT": str(rendezvous)}
        plan = made_plan(settings=settings, resume_from=resume_from)
        reports = Reports(reports_prefix(self.stacks.prefix))
        return Guard(plan, self.mark, self.peers, self.stacks, reports)

    def processes(self) -> list[int]:
        return processes_with(f"T5_RUN_MARK={self.mark}")

    def cause(self, **options: int) -> Cause | None:
        """Why the guard ended the run, which it must."""
        guard = self.guard(**options)
        guard.thread.join(20)
        assert not self.processes()
        return guard.cause


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    monkeypatch.setattr(guards, "GRACE_SECONDS", 0)
    started = Run(tmp_path)
    yield started
    for pid in started.processes():
        os.kill(pid, signal.SIGKILL)
    started.process.wait()


def test_workers_are_the_children_of_torchrun_and_not_their_loaders(run: Run):
    assert list(workers(run.mark)) == [3]
    # A process that becomes another program has no environment for a moment.
    wait_for(lambda: len(run.processes()) == 3)
    assert workers("another") == {}


@pytest.mark.parametrize("what", ["stuck in stands_here (", "suspended (SIGSTOP)"])
def test_a_stuck_run_reports_where(run: Run, what: str):
    if what.startswith("suspended"):
        workers(run.mark)[3].suspend()
    cause = run.cause(watchdog=1)
    assert cause and (cause.status, cause.strength) == ("timeout", 3)
    assert f"before the first iteration: rank 3 is {what}" in cause.reason


ALL_REDUCE = """File "/x/wait.py", line 8 in wait
  File "/x/torch/distributed/distributed_c10d.py", line 5 in all_reduce
  File "/x/train.py", line 9 in step
"""
STUCK = """File "/x/data.py", line 7 in read
  File "/x/train.py", line 3 in step
"""


@pytest.mark.parametrize("stuck", [*([rank] for rank in range(4)), [1, 2], []])
def test_the_ranks_that_wait_for_nobody_are_named(tmp_path: Path, stuck: list[int]):
    main = '  File "/x/train.py", line 20 in <module>\n'
    other = f'{STUCK}  File "/lib/threading.py", line 1002 in _bootstrap\n'
    later = f"Current thread 0x2:\n  {ALL_REDUCE}{main}"  # when it is ended
    for rank in range(4):
        first, second = ("Current thread", "Thread")[:: -1 if rank % 2 else 1]  # the one that the signal found
        threads = f"{first} 0x1:\n  {other}\n{second} 0x2:\n  {STUCK if rank in stuck else ALL_REDUCE}{main}"
        (tmp_path / f"stack.{rank}").write_text(threads + later)
    stacks = Stacks(tmp_path / "stack")  # workers may have begun before it
    assert list(stacks.stopped()) == stuck
    named = "; ".join(f"rank {rank} is stuck in read (/x/data.py:7)" for rank in stuck)
    assert stacks.sentence().startswith(named or "all ranks here are waiting for others: rank 0 in all_reduce (")


def failed(status: str, strength: int | None) -> dict:
    cause = None if strength is None else {"strength": strength, "time": 1.0}
    end = {"node": 1, "host": "node1", "status": status, "reason": "why", "remedy": "what to do", "cause": cause}
    return end | {"signal": "INT" if status == "cancelled" else None}


@pytest.mark.parametrize(
    ("end", "options", "status", "reason"),
    [
        (failed("crashed", 3), {}, "crashed", "stopped because node 1 (node1) failed: why"),
        (failed("network", 0), {}, "network", "stopped because node 1 (node1) failed: why"),
        (failed("timeout", 1), {}, "timeout", "rank 3 is stuck in stands_here (@/worker.py:4)"),
        (failed("cancelled", None), {}, "cancelled", "stopped because node 1 (node1) was cancelled: why"),
        (None, {}, "network", "stopped because node 1 failed: it disconnected without giving a reason"),
        # Before it overwrites the checkpoints of the run that it was to continue.
        (failed("complete", None), {"resume_from": 8}, "crashed",
         "the engine ignored the checkpoint of iteration 8 and started from scratch"),
    ],
)  # fmt: skip
def test_a_run_is_ended(run: Run, end: dict | None, options: dict, status: str, reason: str):
    run.peers.progressed(7)
    if end:
        run.peers.ends[1] = end
    else:
        run.peers.left(1)
    cause = run.cause(**options)
    assert cause and (cause.status, cause.reason) == (status, reason.replace("@", str(run.stacks.prefix.parent)))


def test_a_healthy_run_is_left_alone(run: Run):
    run.peers.ends[1] = failed("complete", None)
    run.peers.progressed(7)
    guard = run.guard(watchdog=60, rendezvous=0, resume_from=6)
    guard.thread.join(2.5)
    guard.finish()
    assert not guard.thread.is_alive() and guard.cause is None
    assert len(run.processes()) == 3


@pytest.mark.parametrize("what", ["weight.sum().backward(); optimizer.step()", "next(batches)"])
def test_a_run_that_writes_no_line_is_left_alone_while_it_trains(tmp_path: Path, what: str):
    """LOG_INTERVAL iterations, or an evaluation, may take longer than WATCHDOG_SECONDS."""
    run = Run(tmp_path, worker=TRAINS.replace("WHAT", what))
    began = time.monotonic()
    guard = run.guard(watchdog=2)
    guard.thread.join(30)
    assert guard.cause and guard.cause.status == "timeout", "then it hangs"
    assert re.search(r"no iteration in [2-7] s", guard.cause.reason) and time.monotonic() - began > 6
    assert not run.processes()


FAILS = {
    "raise RuntimeError('broken')": ("RuntimeError", "broken", "crashed"),
    "bytearray(2**60)": ("MemoryError", "raised in <module> ({path}:1)", "out-of-memory"),
    "import argparse; argparse.ArgumentParser().parse_args()": ("SystemExit", "2", "configuration"),
    "import torch; raise torch.OutOfMemoryError('CUDA out of memory.')": (
        "torch.OutOfMemoryError", "CUDA out of memory.", "out-of-memory"),
    "from t5bench import Problem\ntry: raise Problem('no data', 'Get some')\nexcept Problem: raise SystemExit(2)": (
        "SystemExit", "2", "configuration"),
    "import threading; raise OSError(28, 'No space left on device')": (
        "OSError", "[Errno 28] No space left on device", "crashed"),
    "": None,
    "raise SystemExit": None,
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'x'])": None,
    "import os; os.fork() or int('x'); os.wait()": None,
}  # fmt: skip


@pytest.mark.parametrize(("program", "removed"), [*((each, False) for each in FAILS), (next(iter(FAILS)), True)])
def test_a_worker_reports_its_exception(tmp_path: Path, program: str, removed: bool):
    """Even if somebody removed the run directory meanwhile; but not that of a process that it starts."""
    directory = tmp_path / "run"
    directory.mkdir()
    remove = f"import shutil; shutil.rmtree({str(directory)!r})\n" if removed else ""
    (tmp_path / "fails.py").write_text(remove + program)
    worker, stacks = REPO_ROOT / "t5bench/run/worker.py", directory / "node0.stack"
    # The real torch takes seconds to import, and only this of it matters here.
    (tmp_path / "torch.py").write_text("class OutOfMemoryError(RuntimeError): pass")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO_ROOT}", "RANK": "5"}
    command = [sys.executable, worker, stacks, tmp_path / "fails.py", "--unknown"]
    began = now()
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    reports = Reports(reports_prefix(stacks)).read()
    found = [(report.rank, report.type, report.message, report.cause.status) for report in reports]
    expected = []
    if FAILS[program]:
        kind, message, status = FAILS[program]
        expected.append((5, kind, message.replace("{path}", str(tmp_path / "fails.py")), status))
    assert found == expected, result.stderr
    assert all(began <= report.time == report.cause.time <= now() for report in reports)
    assert (result.returncode != 0) == bool(expected)


def test_a_secret_in_an_exception_is_hidden(tmp_path: Path):
    reporter = Reporter(tmp_path / "node0.worker", 0)
    reporter.failed(RuntimeError("login with 0123456789abcdef failed\x1b[2J"))
    (report,) = Reports(tmp_path / "node0.worker", ["0123456789abcdef"]).read()
    assert report.message == r"login with *** failed\x1b[2J"
    assert report.cause.reason == r"RuntimeError: login with *** failed\x1b[2J" == report.cause.line


def test_a_run_without_workers_is_ended_after_the_rendezvous(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(guards, "START_SECONDS", 0)
    cause = Run(tmp_path, "import sys; print('ready', flush=True); sys.stdin.read()").cause(rendezvous=0)
    assert cause and cause.status == "timeout"
    assert "torchrun got no answer from 127.0.0.1:" in cause.reason


def test_a_collective_operation_in_words():
    of_gloo = {"profiling_name": "gloo:all_reduce", "collective_seq_id": 7, "process_group": ["1", "tensor"]}
    assert words_of(of_gloo, [0, 2]) == "all_reduce 7 of ranks 0, 2"
    sent = {"profiling_name": "nccl:send 0->1", "is_p2p": True, "p2p_seq_id": 3, "process_group": ["2", "pipeline"]}
    assert words_of(sent, range(16)) == "send 0->1 3 of 16 ranks, 0 to 15"
    assert words_of(of_gloo, []) == "all_reduce 7 of group 1 tensor"


# ---- with torchrun, and alone ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "rank", "end"),
    [(4, 0, {"WATCHDOG_SECONDS": "15", "STUB_FAULT": "0:3:halt"}), (2, 1, {"STUB_TIMEOUT": "6"})],
    ids=["watchdog", "timeout"],
)
def test_the_hanging_rank_is_named_and_all_leave_their_stacks(project: Project, workers: int, rank: int, end: dict):
    """Either the watchdog ends the run, or a worker that has waited too long for the others, by way of torchrun."""
    (project.engine / "pretrain_t5.py").write_text((REPO_ROOT / "tests/tools/nodes/stub_trainer.py").read_text())
    project.record_engine()
    project.use_real_torch()
    settings = {"MODEL_PRESET": "tiny", "DEVICE": "cpu", "PRECISION_FLAG": "", "TRAIN_ITERS": "100000"}
    settings |= {"LOG_INTERVAL": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    output = project.root / "outputs" / "ddp"
    output.mkdir(parents=True)
    (output / "node0.stack.9").write_text("of a run that was killed")
    hang = {"NPROC_PER_NODE": str(workers), "STUB_FAULT": f"{rank}:3:hang"}
    result = project.launch("ddp", timeout=90, **settings | hang | end)
    said = result.stderr
    assert result.returncode == 6, result.stdout + said
    assert f"rank {rank} is stuck in begin (" in said and said.count("rank ") == 1, said
    ranks = ", ".join(map(str, range(workers)))
    assert (f", after all_reduce 2 of ranks {ranks}" in said) == ("WATCHDOG_SECONDS" in end), said
    assert not list(output.glob("*.stack*"))
    log = (output / "node0.log").read_text()
    assert "rank 9 was" not in log
    if "WATCHDOG_SECONDS" in end:
        assert all(f"rank {each} was ended here:" in log for each in range(workers))
        assert log.count(f"Collective operation: in all_reduce 3 of ranks {ranks}") == workers - 1


# With a thread, an exit function, and what only the interpreter's end would remove.
ENDS = """
import atexit, threading, time
class Kept:
    def __del__(self, say=print): say("taken apart")
kept = Kept()
kept.itself = kept
atexit.register(print, "its exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("its thread"))).start()
print("its output")
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise SystemExit", 0), ("raise SystemExit(3)", 3), ("raise SystemExit('no')", 1)]
)
def test_a_worker_ends_as_python_does(end: str, status: int, tmp_path: Path):
    """Where it succeeds, its interpreter is not taken apart: a thread of gloo's would abort it meanwhile."""
    (tmp_path / "ends.py").write_text(ENDS + end)
    command = [sys.executable, REPO_ROOT / "t5bench/run/worker.py", tmp_path / "stacks", tmp_path / "ends.py"]
    environment = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = "its output\nits thread\nits exit function\n" + "taken apart\n" * (status > 0)
    assert (result.returncode, result.stdout) == (status, said)
