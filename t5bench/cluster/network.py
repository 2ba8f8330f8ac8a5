"""The network between nodes, measured with all-reduces: one process on each node, started by check_cluster.py.

It arrives on standard input. MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are torch's own variables; argv is the
backend (nccl or gloo) and a time limit in seconds. Rank 0 prints ``result JSON``: for each other rank, and for all
together, bandwidth in Gbit/s and latency in microseconds. Every rank prints ``version NCCL`` on CUDA or ``error TEXT``.

Bandwidth is 2 (n-1)/n bytes / seconds, what each node's link carries, as nccl-tests defines its bus bandwidth.
"""

import json
import os
import signal
import statistics
import sys
import time
from datetime import timedelta

LARGEST = 64 * 2**20  # bytes
FIRST = 2**20
REPETITIONS = 5


def say(text: str) -> None:
    print(text, flush=True)


def main(backend: str, seconds: float) -> None:
    # Nothing stays behind on the node, whatever hangs and whether or not anyone listens.
    signal.alarm(int(seconds) + 1)
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        say(f"version {'.'.join(map(str, torch.cuda.nccl.version()))}")
    deadline = time.monotonic() + seconds
    dist.init_process_group(backend, timeout=timedelta(seconds=max(1.0, seconds - 2)))
    rank, size = dist.get_rank(), dist.get_world_size()

    def timed(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if backend == "nccl":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def measure(group: dist.ProcessGroup, members: int, allowance: float) -> dict[str, float]:
        one = torch.zeros(1, device=device)
        for _ in range(5):
            timed(one, group)
        latency = statistics.median(timed(one, group) for _ in range(50))
        probe = torch.zeros(FIRST // 4, device=device)
        timed(probe, group)
        took = timed(probe, group)
        # Rank 0 decides how much a slow network is asked to carry.
        count = torch.tensor([min(LARGEST, max(FIRST, int(FIRST * allowance / took / REPETITIONS)))], device=device)
        dist.broadcast(count, src=0, group=group)
        payload = torch.zeros(int(count.item()) // 4, device=device)
        times = [timed(payload, group) for _ in range(REPETITIONS)]
        carried = payload.numel() * 4 * 2 * (members - 1) / members
        return {"gbit": carried * 8 / statistics.median(times) / 1e9, "us": latency * 1e6}

    groups = {other: dist.new_group([0, other]) for other in range(1, size)}
    allowance = max(0.05, min(1.0, (deadline - time.monotonic() - 8) / size / 2))
    pairs = {other: measure(group, 2, allowance) for other, group in groups.items() if rank in (0, other)}
    together = measure(dist.group.WORLD, size, allowance) if size > 2 else None
    if rank == 0:
        say(f"result {json.dumps({'pairs': pairs, 'together': together})}")
    dist.barrier()
    dist.destroy_process_group()


try:
    main(sys.argv[1], float(sys.argv[2]))
except Exception as error:  # whatever it is belongs into the table
    say(f"error {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    sys.stdout.flush()
    os._exit(1)
