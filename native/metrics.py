"""What a run reports: Megatron's iteration line, TensorBoard and W&B under Megatron's names, peak memory at the end."""

import math
import resource
import socket
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from native.parallel import Layout
from t5bench.model.flops import flops_per_iteration
from t5bench.model.job import Architecture
from t5bench.model.parameters import parameters

MEBIBYTE = 1 << 20


def start_wandb(args: Namespace) -> Any:
    """The wandb module with a run begun, or None: neither a missing key nor a network stops a training run."""
    import wandb

    options = {"project": args.wandb_project, "name": args.wandb_exp_name or None, "dir": args.wandb_save_dir or None}
    options["config"] = settings(args)
    if args.wandb_save_dir:
        Path(args.wandb_save_dir).mkdir(parents=True, exist_ok=True)
    for mode in (None, "offline"):
        try:
            return wandb if wandb.init(**options, mode=mode) is not None else None
        except Exception as error:  # wandb and its transports raise without a common base
            say(f"WARNING: W&B could not start{' offline' if mode else ''} ({error})")
    return None


def settings(args: Namespace) -> dict[str, Any]:
    """What TensorBoard and W&B show as the settings of the run."""
    return {key: value for key, value in vars(args).items() if isinstance(value, bool | int | float | str)}


def say(line: str) -> None:
    """Prints a line in one write, so that two processes' lines do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Metrics:
    """Collects one number per iteration and turns them into a line and curves every --log-interval iterations.

    Losses and gradient norms stay on the device until then. The last rank, which has the loss, does the telling.
    """

    def __init__(self, args: Namespace, layout: Layout) -> None:
        self.args, self.layout = args, layout
        architecture = Architecture.of_arguments(vars(args), args.padded_vocab_size)
        self.flops = flops_per_iteration(architecture, args.global_batch_size)
        args.parameters, self.speaks = parameters(architecture), args.rank == args.world_size - 1
        self.samples = args.global_batch_size
        is_gpt = args.family == "gpt"
        self.length = args.seq_length if is_gpt else args.encoder_seq_length
        self.tokens = args.seq_length if is_gpt else args.encoder_seq_length + args.decoder_seq_length  # of a sample
        self.seen: list[tuple[Tensor, Tensor, float]] = []
        self.tensorboard = self.wandb = None
        if self.speaks and args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(args.tensorboard_dir)
            for name, value in settings(args).items():
                self.tensorboard.add_text(name, str(value))
        if self.speaks and args.wandb_project:
            self.wandb = start_wandb(args)
        self.started = self.paused = self.synchronise()

    def synchronise(self) -> float:
        """Waits for every process and its device; the time in seconds."""
        if self.args.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    def __enter__(self) -> None:
        """`with metrics:` keeps what happens inside out of the time per iteration."""
        self.paused = self.synchronise()

    def __exit__(self, *exception: object) -> None:
        self.started += self.synchronise() - self.paused

    def record(self, iteration: int, loss: Tensor, norm: Tensor, next_rate: float) -> None:
        """Takes an iteration's loss on this rank's samples, its gradient norm, both [], and the next learning rate."""
        self.seen.append((loss, norm, next_rate))
        if iteration % self.args.log_interval:
            return
        now = self.synchronise()
        seconds, self.started = (now - self.started) / len(self.seen), now
        losses, norms, rates = zip(*self.seen, strict=True)
        losses = (self.layout.dp.all_reduce(torch.stack(losses)) / self.layout.dp.size).tolist()
        if self.speaks:
            self.tell(iteration, seconds, losses, torch.stack(norms).tolist(), rates)
        self.seen = []

    def tell(self, iteration: int, seconds: float, losses: list[float], norms: list[float], rates: list[float]) -> None:
        """Prints the line of an interval that ends at `iteration` and took `seconds` per iteration, and its curves."""
        args, gpus, elapsed_ms = self.args, self.args.world_size, seconds * 1000
        samples, tflops = self.samples / seconds, self.flops / seconds / 1e12
        tokens = samples * self.tokens
        say(
            f" iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: {iteration * self.samples:12d} |"
            f" consumed tokens: {iteration * self.samples * self.tokens:12d} |"
            f" elapsed time per iteration (ms): {elapsed_ms:.1f} | learning rate: {rates[-1]:.3E} |"
            f" global batch size: {self.samples:5d} | lm loss: {sum(losses) / len(losses):.6E} | loss scale: 1.0 |"
            f" grad norm: {norms[-1]:.6E} | actual seqlen: {self.length:5d} |"
            f" number of skipped iterations: {0:3d} |"
            f" number of nan iterations: {sum(not math.isfinite(loss) for loss in losses):3d} |"
            f" samples per second: {samples:.3f} |"
            f" tokens per gpu per second (tgs): {tokens / gpus:.3f} | TFLOPs: {tflops / gpus:.2f} |"
        )
        speeds = {"samples_per_sec": samples, "tokens_per_sec": tokens, "tokens_per_gpu_per_sec": tokens / gpus}
        speeds |= {f"{key}_per_replica": value / args.dp for key, value in speeds.items()}
        speeds |= {"iteration-time": seconds, "elapsed_ms_per_iteration": elapsed_ms, "tflops": tflops / gpus}
        speeds["approx_params_in_billions"] = args.parameters / 1e9
        first = iteration - len(losses) + 1
        for step, (loss, norm, rate) in enumerate(zip(losses, norms, rates, strict=True), first):
            values = {"lm loss": loss, "learning rate": rate, "loss scale": 1.0, "lm-loss-training/lm loss": loss}
            values |= {"grad-norm/grad-norm": norm, "learning-rate/learning-rate": rate}
            if step == iteration:
                values |= {"samples per second": samples, "elapsed time per iteration": elapsed_ms}
                values |= {"loss/lm loss": loss} | {f"throughput/{key}": value for key, value in speeds.items()}
            self.plot(step, values)

    def plot(self, step: int, values: dict[str, float]) -> None:
        """Sends values of iteration `step` to TensorBoard and W&B, there with the samples and tokens for other axes."""
        if self.tensorboard:
            for key, value in values.items():
                self.tensorboard.add_scalar(key, value, step)
        if self.wandb:
            consumed = step * self.samples
            self.wandb.log(values | {"Samples": consumed, "Tokens": consumed * self.tokens}, step=step)

    def validation(self, iteration: int, loss: Tensor, alone_on: str = "") -> None:
        """Prints and plots the mean of the data-parallel ranks' losses, []. alone_on: its set, without training."""
        mean = (self.layout.dp.all_reduce(loss) / self.layout.dp.size).item()
        if self.speaks:
            samples = f" on {self.args.eval_iters * self.samples}-sample draw from {alone_on} set" if alone_on else ""
            text = f" validation loss at iteration {iteration}{samples} | lm loss value: {mean:.6E} |"
            text += f" lm loss PPL: {math.exp(min(20, mean)):.6E} | "
            say("\n".join(("-" * len(text), text, "-" * len(text))))
            if not alone_on:
                self.plot(iteration, {"lm-loss-validation/lm loss validation": mean})

    def end(self) -> None:
        """Each rank's line on its peak memory in MiB, on the GPU as PyTorch counts it; then lets go of the curves."""
        on_gpu = self.args.device.type == "cuda"
        allocated = torch.cuda.max_memory_allocated() / MEBIBYTE if on_gpu else 0.0
        reserved = torch.cuda.max_memory_reserved() / MEBIBYTE if on_gpu else 0.0
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
        say(
            f" peak memory | rank {self.args.rank} | host {socket.gethostname()} | device {self.args.device} |"
            f" allocated MiB {allocated:.1f} | reserved MiB {reserved:.1f} | host rss MiB {host:.1f}"
        )
        peaks: list[Any] = [None] * self.args.world_size
        dist.all_gather_object(peaks, {"allocated": allocated, "reserved": reserved, "host rss": host})
        told = {f"peak memory/rank {rank} {what} MiB": v for rank, peak in enumerate(peaks) for what, v in peak.items()}
        if self.tensorboard:
            for key, value in told.items():
                self.tensorboard.add_scalar(key, value, self.args.train_iters)
            self.tensorboard.close()
        if self.wandb:
            self.wandb.run.summary.update(told)
            self.wandb.finish()
