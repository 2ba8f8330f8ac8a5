"""Takes the place of Megatron's pretrain_t5.py: a real process group over gloo and real collectives, but no model.

It takes the engine's command line, prints its iteration line on the last rank and its peak-memory line on every rank.
An iteration takes STUB_ITERATION_MS (20 unless said); STUB_TIMEOUT is the process group's timeout in seconds, for the
engine's argument has minutes.

STUB_FAULT="RANK:ITERATION:KIND[:VALUE]" makes that rank misbehave when the iteration begins; several, by spaces:

    raise:TEXT   an exception                        exit:N       ends with that status
    hang         sleeps for ever                     kill:SIGNAL  ends itself, for instance kill:KILL
    nan          its loss is not a number, from now  disk:PATH    writes there until there is no space
    memory:MIB   touches so much memory              print:TEXT   prints it (underscores become spaces)
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
from pathlib import Path

import torch
import torch.distributed as dist

ITERATION_LINE = (
    " iteration {:8d}/{:8d} | elapsed time per iteration (ms): {:.1f} | learning rate: 1.000E-04 | lm loss: {:.6E} |"
    " grad norm: 1.000000E+00 | number of nan iterations: {:3d} | samples per second: {:.3f} | TFLOPs: 0.01 |"
)


class Faults:
    """What is to go wrong on this rank."""

    def __init__(self, rank: int) -> None:
        entries = [[*entry.split(":", 3), ""][:4] for entry in os.environ.get("STUB_FAULT", "").split()]
        self.planned = {int(at): (kind, value) for who, at, kind, value in entries if int(who) == rank}
        self.loss_is_nan = False
        self.ballast = bytearray()

    def begin(self, iteration: int) -> None:
        kind, value = self.planned.get(iteration, ("", ""))
        if kind == "raise":
            raise RuntimeError(value)
        elif kind == "hang":
            signal.pause()
        elif kind == "exit":
            os._exit(int(value))
        elif kind == "kill":
            os.kill(os.getpid(), signal.Signals[f"SIG{value}"])
        elif kind == "nan":
            self.loss_is_nan = True
        elif kind == "memory":
            self.ballast = bytearray(os.urandom(2**20)) * int(value)
        elif kind == "disk":
            with Path(value).open("wb") as stream:
                while True:
                    stream.write(bytes(2**20))
        elif kind == "print":
            print(value.replace("_", " "), flush=True)
        elif kind:
            raise ValueError(f"STUB_FAULT: '{kind}' is no kind of fault")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("train-iters", "log-interval", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--distributed-timeout-minutes", type=float, required=True)
    parser.add_argument("--distributed-backend", choices=["gloo", "nccl"], required=True)
    return parser.parse_known_args()[0]


def train(args: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    faults, since = Faults(rank), time.monotonic()
    for iteration in range(1, args.train_iters + 1):
        faults.begin(iteration)
        time.sleep(float(os.environ.get("STUB_ITERATION_MS", "20")) / 1000)
        loss = torch.tensor(math.nan if faults.loss_is_nan else 8.0 / iteration)
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
