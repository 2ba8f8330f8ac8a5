"""The network between nodes, measured with all-reduces: check.py runs this module on every node at once.

MASTER_ADDR, MASTER_PORT and RANK are torch's own variables, HOSTS are the ranks' names, argv[1] is the time limit in
seconds. Rank 0 prints a JSON object: ``backend``, and for each other rank (``pairs``) and for all (``together``) the
bandwidth in Gbit/s and the latency of a message in microseconds: between ranks that only wait for it (``us``), and
between ranks that compute before each message (``us_computing``), which also wait for each other and, on a CPU, for
its cores. A rank that fails prints ``{"error": TEXT}``, which begins with what it was doing.

Bandwidth is 2 (n-1)/n bytes / seconds, what each node's link carries, as nccl-tests defines its bus bandwidth.
"""

import json
import os
import signal
import statistics
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from t5bench.record.network import COMPUTING_SECONDS
from t5bench.text import guard_streams

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# bytes
FIRST = 2**20
LARGEST = 64 * 2**20
REPETITIONS = 5
MESSAGE = 256 * 2**10  # of tensor parallelism in a small model
FEWEST_MESSAGES = 20
MOST_MESSAGES = 200
doing = ["importing torch"]  # now: the last one


class Meter:
    """Measures all-reduces between the ranks of a group. allowance: seconds for one measurement."""

    def __init__(self, device: "torch.device", allowance: float) -> None:
        import torch

        self.device = device
        self.allowance = allowance
        self.square = torch.full((256, 256), 1e-3, device=device)
        self.compute(10)
        self.products = max(1, round(COMPUTING_SECONDS / (self.compute(50) / 50)))

    def compute(self, products: int) -> float:
        """The seconds that so many matrix products take."""
        start = time.perf_counter()
        for _ in range(products):
            self.square @ self.square
        self._synchronize()
        return time.perf_counter() - start

    def all_reduce(self, tensor: "torch.Tensor", group: "dist.ProcessGroup") -> float:
        """The seconds that it takes."""
        import torch.distributed as dist

        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, group: "dist.ProcessGroup") -> dict[str, float]:
        import torch
        import torch.distributed as dist

        members = dist.get_world_size(group)
        steps = 2 * (members - 1)  # of a ring
        one = torch.zeros(1, device=self.device)
        for _ in range(5):
            self.all_reduce(one, group)
        latency = statistics.median(self.all_reduce(one, group) for _ in range(50)) / steps
        probe = torch.zeros(FIRST // 4, device=self.device)
        self.all_reduce(probe, group)
        took = self.all_reduce(probe, group)
        # Rank 0 decides how much data a slow network has to carry.
        size = min(LARGEST, max(FIRST, int(FIRST * self.allowance / took / REPETITIONS)))
        one_message = COMPUTING_SECONDS + took * MESSAGE / FIRST
        number = min(MOST_MESSAGES, max(FEWEST_MESSAGES, int(2 * self.allowance / one_message)))
        decided = torch.tensor([size, number], device=self.device)
        dist.broadcast(decided, src=0, group=group)
        size, number = decided.tolist()
        payload = torch.zeros(size // 4, device=self.device)
        # The fastest, because TCP is still looking for the link's rate in the first ones.
        fastest = min(self.all_reduce(payload, group) for _ in range(REPETITIONS))
        share = steps / members
        bytes_per_second = payload.numel() * 4 * share / fastest
        message = torch.zeros(MESSAGE // 4, device=self.device)
        # Means, as an iteration adds up both its short and its long waits.
        alone = statistics.mean(self.compute(self.products) for _ in range(number))
        both = statistics.mean(self.compute(self.products) + self.all_reduce(message, group) for _ in range(number))
        waiting = both - alone - MESSAGE * share / bytes_per_second
        return {
            "gbit": bytes_per_second * 8 / 1e9,
            "us": latency * 1e6,
            "us_computing": max(latency, waiting / steps) * 1e6,
        }


def all_reduces(seconds: float) -> None:
    import torch
    import torch.distributed as dist

    deadline = time.monotonic() + seconds
    rank = int(os.environ["RANK"])
    hosts = os.environ["HOSTS"].split()
    master = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    size = len(hosts)
    timeout = timedelta(seconds=seconds + 1)  # the timer comes first, and says what took so long
    doing.append(f"connecting to {master} port {port}")
    store = dist.TCPStore(master, port, size, rank == 0, timeout, wait_for_workers=False)
    able = torch.cuda.is_available() and dist.is_nccl_available()
    store.set(f"backend{rank}", "nccl" if able else "gloo")
    backend = "nccl"
    for other, host in enumerate(hosts):
        doing.append(f"waiting until {host} reaches {master} port {port}")
        if store.get(f"backend{other}") == b"gloo":
            backend = "gloo"
    doing.append("exchanging data with the other nodes")
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

    allowance = max(0.05, min(1.0, (deadline - time.monotonic() - 8) / size / 2))
    meter = Meter(device, allowance)
    groups = {other: dist.new_group([0, other]) for other in range(1, size)}
    pairs = {other: meter.measure(group) for other, group in groups.items() if rank in (0, other)}
    together = meter.measure(dist.group.WORLD) if size > 2 else None
    if rank == 0:
        print(json.dumps({"backend": backend, "pairs": pairs, "together": together}), flush=True)
    meter.all_reduce(torch.zeros(1, device=device), dist.group.WORLD)  # none leaves before the last has measured
    dist.destroy_process_group()


def fail(problem: str) -> None:
    print(json.dumps({"error": problem}), flush=True)
    os._exit(1)


def main() -> None:
    seconds = float(sys.argv[1])
    # So that nothing stays behind on the node, whatever hangs and whether or not anyone listens.
    signal.alarm(int(seconds) + 2)
    # torch waits longer for a missing master than it is told.
    late = threading.Timer(seconds, lambda: fail(f"{doing[-1]} takes longer than {seconds:.0f} s"))
    late.daemon = True
    late.start()
    try:
        all_reduces(seconds)
    except Exception as error:  # whatever it is belongs into the table
        fail(f"{doing[-1]}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


if __name__ == "__main__":
    guard_streams()
    main()
