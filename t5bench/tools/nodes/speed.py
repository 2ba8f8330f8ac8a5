"""How fast a node computes, copies and reduces: health.py runs this module on the node, in a process of its own.

argv: the device (cuda or cpu), and the time limit in seconds. Prints a JSON object after every measurement, each with
all figures so far, so that what was measured before something hangs is known; the last line counts.

On GPUs, the figures are of all GPUs, one after another: TFLOP/s of a 16-bit matrix product, GB/s of a copy in the GPU's
memory and of one from the host, GB/s of bus bandwidth of an all-reduce among them. On the CPU, they are GFLOP and GB
per second of processor time of one thread, so that other programs on the machine change them little.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from t5bench.text import guard_streams

SIDE = 8192  # of the square matrices on a GPU
COPIED = 512 * 2**20  # bytes
REDUCED = 256 * 2**20
LOAD_SECONDS = 1.0  # under which clocks are read
CPU_SIDE = 512
CPU_COPIED = 32 * 2**20
CPU_REDUCED = 4 * 2**20
PIECE = 2**16
BEST_OF = 5


def show(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def best(measure: Callable[[], float], times: int = BEST_OF) -> float:
    """The shortest of several durations, after one that warms up."""
    measure()
    return min(measure() for _ in range(times))


# ---- GPUs ----------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """A matrix product on a GPU."""

    device: int
    left: Any
    right: Any
    out: Any
    repetitions: int = 1
    """For about LOAD_SECONDS."""

    def run(self) -> None:
        import torch

        torch.matmul(self.left, self.right, out=self.out)


def seconds_of(work: Callable[[], object]) -> float:
    """The time that the current GPU takes for it."""
    import torch

    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_gpus(figures: dict[str, Any]) -> None:
    import torch

    if not torch.cuda.is_available():
        figures["error"] = f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU"
        show(figures)
        return
    count = torch.cuda.device_count()
    figures |= {"product": [], "memory": [], "host_copy": []}
    loads = []
    for index in range(count):
        torch.cuda.set_device(index)
        loads.append(measure_product(index, figures))
        measure_copies(figures)
        show(figures)
    figures["clocks"] = clocks_under_load(loads)
    show(figures)
    if count > 1:
        figures["all_reduce"] = all_reduce_of_gpus(count)
        show(figures)


def measure_product(index: int, figures: dict[str, Any]) -> Load:
    import torch

    dtype = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16
    left = torch.randn(SIDE, SIDE, device="cuda", dtype=dtype)
    right = torch.randn(SIDE, SIDE, device="cuda", dtype=dtype)
    load = Load(index, left, right, torch.empty_like(left))
    seconds = best(lambda: seconds_of(load.run))
    figures["product"].append(2 * SIDE**3 / seconds / 1e12)
    load.repetitions = max(1, int(LOAD_SECONDS / seconds))
    return load


def measure_copies(figures: dict[str, Any]) -> None:
    import torch

    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = best(lambda: seconds_of(lambda: target.copy_(source)))
    figures["memory"].append(2 * COPIED / seconds / 1e9)
    pinned = torch.empty(COPIED // 4, dtype=torch.uint8, pin_memory=True)
    part = target[: len(pinned)]
    seconds = best(lambda: seconds_of(lambda: part.copy_(pinned, non_blocking=True)))
    figures["host_copy"].append(len(pinned) / seconds / 1e9)


def clocks_under_load(loads: list[Load]) -> str:
    """nvidia-smi's clock, highest clock and reasons of each visible GPU, read while all compute."""
    import torch

    from t5bench.record.gpus import smi_selection

    for load in loads:
        torch.cuda.set_device(load.device)
        for _ in range(load.repetitions):
            load.run()
    answer = clocks_of(smi_selection(os.environ))
    for load in loads:
        torch.cuda.synchronize(load.device)
    return answer


def clocks_of(selection: Sequence[str]) -> str:
    """nvidia-smi's table; empty if it answers none. Drivers from 535 on have another name for the reasons, beside the
    old one at first."""
    from t5bench.record.tools import ask

    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        query = f"--query-gpu=clocks.sm,clocks.max.sm,{reasons}"
        answer = ask("nvidia-smi", *selection, query, "--format=csv,noheader,nounits", seconds=3)
        if not answer.fault:
            return answer.output
        if answer.is_late:
            break
    return ""


def all_reduce_of_gpus(count: int) -> float:
    """Bus bandwidth in GB/s, as nccl-tests defines it, from one process."""
    import torch
    from torch.cuda import nccl

    tensors = [torch.zeros(REDUCED // 4, device=f"cuda:{index}") for index in range(count)]

    def reduce() -> float:
        for index in range(count):
            torch.cuda.synchronize(index)
        start = time.perf_counter()
        nccl.all_reduce(tensors)
        for index in range(count):
            torch.cuda.synchronize(index)
        return time.perf_counter() - start

    return REDUCED * 2 * (count - 1) / count / best(reduce) / 1e9


# ---- the CPU -------------------------------------------------------------------------------------------------------


def measure_cpu(figures: dict[str, Any]) -> None:
    """With numpy, which is imported ten times faster than torch."""
    import numpy as np

    def timed(work: Callable[[], object], repetitions: int) -> float:
        start = time.thread_time()
        for _ in range(repetitions):
            work()
        return (time.thread_time() - start) / repetitions

    generator = np.random.default_rng(0)
    left = generator.random((CPU_SIDE, CPU_SIDE), dtype=np.float32)
    right = generator.random((CPU_SIDE, CPU_SIDE), dtype=np.float32)
    out = np.empty_like(left)
    figures["product"] = [2 * CPU_SIDE**3 / best(lambda: timed(lambda: np.matmul(left, right, out=out), 10)) / 1e9]
    source = np.zeros(CPU_COPIED, np.uint8)
    target = np.empty_like(source)
    figures["memory"] = [2 * CPU_COPIED / best(lambda: timed(lambda: np.copyto(target, source), 5)) / 1e9]
    show(figures)
    figures["all_reduce"] = all_reduce_of_threads()
    show(figures)


def all_reduce_of_threads() -> float:
    """GB of bus bandwidth for a second of processor time, between two threads over TCP on the loopback interface, which
    is what gloo does between the processes of a node."""
    import numpy as np

    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname(), timeout=10)
        second, _ = server.accept()
    second.settimeout(10)
    spent = []

    def reduce(connection: socket.socket, rank: int) -> None:
        """Each adds one half for both, and sends the sum back."""
        values = np.zeros(CPU_REDUCED // 4, np.float32)
        halves = values[: len(values) // 2], values[len(values) // 2 :]
        own = halves[rank]
        other = halves[1 - rank]
        received = np.empty_like(own)
        for _ in range(BEST_OF + 1):
            start = time.process_time()
            exchange(connection, other, received)
            own += received
            exchange(connection, own, other)
            if rank == 0:
                spent.append(time.process_time() - start)

    partner = threading.Thread(target=reduce, args=(second, 1), daemon=True)
    partner.start()
    reduce(first, 0)
    partner.join(10)
    return CPU_REDUCED / min(spent) / 1e9


def exchange(connection: socket.socket, sent: Any, received: Any) -> None:
    """Both ends send and receive as many bytes, in pieces that the system's buffers hold."""
    outgoing = memoryview(sent).cast("B")
    incoming = memoryview(received).cast("B")
    for start in range(0, len(outgoing), PIECE):
        connection.sendall(outgoing[start : start + PIECE])
        piece = incoming[start : start + PIECE]
        while piece:
            count = connection.recv_into(piece)
            if not count:
                raise ConnectionError("the other thread ended")
            piece = piece[count:]


def main() -> None:
    device = sys.argv[1]
    seconds = float(sys.argv[2])
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    signal.alarm(int(seconds) + 1)  # nothing stays behind on the node
    figures: dict[str, Any] = {}
    try:
        if device == "cuda":
            measure_gpus(figures)
        else:
            measure_cpu(figures)
    except Exception as error:  # whatever it is belongs into the table
        show(figures | {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})
    os._exit(0)  # even if a thread hangs


if __name__ == "__main__":
    guard_streams()
    main()
