"""How a worker ends: at once, with everything done that Python does at its end, and with the program's status."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO_ROOT

WORKER = REPO_ROOT / "t5bench/run/worker.py"
# One thread of gloo's waits for Python's lock, to release its tensor, when the program of rank 0 ends.
LATE = """
import sys, time, torch, torch.distributed as dist
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
class TakesLong:
    def __del__(self, sleep=time.sleep): sleep(1)
if rank == 0:
    sys.setswitchinterval(60)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    kept, end = TakesLong(), time.monotonic() + 2
    print("waits", flush=True)
    while time.monotonic() < end: pass
else:
    input()
    dist.all_reduce(torch.ones(1000))
    input()
"""
ENDS = """
import atexit, threading, time
atexit.register(print, "its exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("its thread"))).start()
print("its output")
"""


@pytest.mark.slow
def test_a_thread_that_still_has_a_tensor_does_not_abort_the_end(tmp_path: Path):
    """Without the worker, Python 3.11 and torch 2.13 end rank 0 with "terminate called without an active exception"."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, *way, script, tmp_path / "store", str(rank)], **pipes)
        for rank, way in enumerate(([WORKER, tmp_path / "stacks"], []))
    ]
    assert ranks[0].stdout.readline() == "waits\n"
    ranks[1].stdin.write("\n")
    ranks[1].stdin.flush()
    assert (ranks[0].wait(60), ranks[0].stderr.read()) == (0, "")
    ranks[1].communicate("\n", timeout=60)


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise SystemExit", 0), ("raise SystemExit(3)", 3), ("raise SystemExit('no')", 1)]
)
def test_a_worker_ends_as_python_does(end: str, status: int, tmp_path: Path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS + end)
    result = subprocess.run([sys.executable, WORKER, tmp_path / "stacks", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (status, "its output\nits thread\nits exit function\n")
