"""Takes the place of Megatron's pretrain_t5.py: a real process group over gloo and real collectives, but no model.

It takes the engine's command line, prints its iteration line on the last rank and its peak-memory line on every rank.
An iteration takes STUB_ITERATION_MS (20 unless said); STUB_TIMEOUT is the process group's timeout in seconds, for the
engine's argument has minutes.

STUB_FAULT="RANK:ITERATION:WHAT" makes that rank misbehave when the iteration begins. WHAT is Python to run there, or
``hang``, ``halt`` (also after its stack was asked for), or ``nan``: the loss is not a number from then on.
"""

import argparse
import math
import os
import resource
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path  # noqa: F401 - for faults

import torch
import torch.distributed as dist

ITERATION_LINE = (
    " iteration {:8d}/{:8d} | elapsed time per iteration (ms): {:.1f} | learning rate: 1.000E-04 | lm loss: {:.6E} |"
    " grad norm: 1.000000E+00 | number of nan iterations: {:3d} | samples per second: {:.3f} | TFLOPs: 0.01 |"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("train-iters", "log-interval", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--distributed-timeout-minutes", type=float, required=True)
    parser.add_argument("--distributed-backend", choices=["gloo", "nccl"], required=True)
    return parser.parse_known_args()[0]


def begin(what: str) -> None:
    """What is planned for this iteration and rank."""
    if what == "hang":
        signal.pause()  # returns when the worker's stack is asked for
    elif what == "halt":
        while True:
            signal.pause()
    elif what != "nan":
        exec(what)


def train(args: argparse.Namespace) -> None:
    rank, world_size, is_nan = dist.get_rank(), dist.get_world_size(), False
    who, at, what = os.environ.get("STUB_FAULT", "0:0:").split(":", 2)
    since = time.monotonic()
    for iteration in range(1, args.train_iters + 1):
        if (rank, iteration) == (int(who), int(at)):
            is_nan = what == "nan"
            begin(what)
        time.sleep(float(os.environ.get("STUB_ITERATION_MS", "20")) / 1000)
        loss = torch.tensor(math.nan if is_nan else 8.0 / iteration)
        dist.all_reduce(loss)
        if iteration % args.log_interval == 0:
            now = time.monotonic()
            seconds, since = (now - since) / args.log_interval, now
            if rank == world_size - 1:
                mean, speed = loss.item() / world_size, args.global_batch_size / seconds
                found = (iteration, args.train_iters, seconds * 1000, mean, math.isnan(mean), speed)
                print(ITERATION_LINE.format(*found), flush=True)


def main() -> None:
    args = parse_arguments()
    seconds = float(os.environ.get("STUB_TIMEOUT", args.distributed_timeout_minutes * 60))
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    rank = dist.get_rank()
    train(args)
    host_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f" peak memory | rank {rank} | host {socket.gethostname()} | device cpu |"
        f" allocated MiB 0.0 | reserved MiB 0.0 | host rss MiB {host_mib:.1f}",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
