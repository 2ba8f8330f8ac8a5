"""Stands where Megatron's pretrain_t5.py stands: a real process group over gloo and real collectives, but no model.

It takes the engine's command line, prints its iteration line on the last rank and its peak-memory line on every rank,
and writes the checkpoints' marker. A few iterations take milliseconds (STUB_ITERATION_MS, 20 unless said).

STUB_FAULT="RANK:ITERATION:KIND[:VALUE]" makes that rank misbehave when the iteration begins; several, by spaces:

    raise        an exception                        exit:N       ends with that status
    hang         sleeps for ever                     kill:SIGNAL  ends itself, for instance kill:KILL
    nan          its loss is not a number, from now  slow:MS      every further iteration takes so much longer
    memory:MIB   touches so much memory, then goes on             disk:PATH  writes there until there is no space
    print:TEXT   prints it and goes on (underscores become spaces)
"""

import argparse
import contextlib
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


class Faults:
    """What is to go wrong on this rank."""

    def __init__(self, rank: int) -> None:
        entries = [entry.split(":", 3) for entry in os.environ.get("STUB_FAULT", "").split()]
        self.planned = {int(at): (kind, *value) for who, at, kind, *value in entries if int(who) == rank}
        self.loss_is_nan = False
        self.delay_ms = 0.0
        self.ballast = bytearray()

    def begin(self, iteration: int) -> None:
        if iteration not in self.planned:
            return
        kind, *values = self.planned[iteration]
        value = values[0] if values else ""
        if kind == "raise":
            raise RuntimeError(value or "the stub was told to fail")
        elif kind == "hang":
            signal.pause()
        elif kind == "exit":
            os._exit(int(value))
        elif kind == "kill":
            os.kill(os.getpid(), signal.Signals[f"SIG{value}"])
        elif kind == "nan":
            self.loss_is_nan = True
        elif kind == "slow":
            self.delay_ms = float(value)
        elif kind == "memory":
            self.ballast = bytearray(os.urandom(2**20)) * int(value)
        elif kind == "disk":
            with Path(value).open("wb") as stream:
                while True:
                    stream.write(bytes(2**20))
        elif kind == "print":
            print(value.replace("_", " "), flush=True)
        else:
            raise ValueError(f"STUB_FAULT: '{kind}' is no kind of fault")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--log-interval", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--encoder-seq-length", type=int, required=True)
    parser.add_argument("--distributed-timeout-minutes", type=float, required=True)
    parser.add_argument("--distributed-backend", choices=["gloo", "nccl"], required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--load", type=Path)
    return parser.parse_known_args()[0]


def iteration_line(args: argparse.Namespace, iteration: int, seconds: float, loss: float, world_size: int) -> str:
    """seconds is the mean over the interval that ends at this iteration."""
    samples = args.global_batch_size / seconds
    tokens = args.encoder_seq_length * args.global_batch_size
    return (
        f" iteration {iteration:8d}/{args.train_iters:8d} |"
        f" consumed samples: {iteration * args.global_batch_size:12d} | consumed tokens: {iteration * tokens:12d} |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
        f" learning rate: 1.000E-04 | global batch size: {args.global_batch_size:5d} | lm loss: {loss:.6E} |"
        f" loss scale: 1.0 | grad norm: 1.000000E+00 | actual seqlen: {args.encoder_seq_length:5d} |"
        f" number of skipped iterations: {0:3d} | number of nan iterations: {int(math.isnan(loss)):3d} |"
        f" samples per second: {samples:.3f} | tokens per gpu per second (tgs): {tokens / seconds / world_size:.3f} |"
        f" TFLOPs: 0.01 |"
    )


def checkpoint_marker(directory: Path) -> Path:
    return directory / "latest_checkpointed_iteration.txt"


def save(directory: Path, iteration: int) -> None:
    (directory / f"iter_{iteration:07d}").mkdir(parents=True, exist_ok=True)
    checkpoint_marker(directory).write_text(f"{iteration}\n")


def first_iteration(args: argparse.Namespace) -> int:
    with contextlib.suppress(FileNotFoundError, TypeError):
        return int(checkpoint_marker(args.load).read_text()) + 1
    return 1


def train(args: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    last = rank == world_size - 1
    faults = Faults(rank)
    start, since = first_iteration(args), time.monotonic()
    for iteration in range(start, args.train_iters + 1):
        faults.begin(iteration)
        time.sleep((float(os.environ.get("STUB_ITERATION_MS", "20")) + faults.delay_ms) / 1000)
        loss = torch.tensor(math.nan if faults.loss_is_nan else 8.0 / iteration)
        dist.all_reduce(loss)
        if iteration % args.log_interval == 0:
            now = time.monotonic()
            if last:
                seconds = (now - since) / min(args.log_interval, iteration - start + 1)
                print(iteration_line(args, iteration, seconds, loss.item() / world_size, world_size), flush=True)
            since = now
        if args.save and args.save_interval and iteration % args.save_interval == 0 and rank == 0:
            save(args.save, iteration)


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo", timeout=timedelta(minutes=args.distributed_timeout_minutes))
    rank = dist.get_rank()
    if rank == 0:
        print(f"stub trainer on {dist.get_world_size()} processes", flush=True)
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
