"""What a run reports: Megatron's iteration line, TensorBoard and W&B under Megatron's names, peak memory at the end."""

import math
import resource
import socket
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from native.parallel import Mesh
from t5bench.costmodel.flops import flops_per_iteration
from t5bench.costmodel.job import Architecture
from t5bench.costmodel.parameters import parameters

MEBIBYTE = 1 << 20


def start_wandb(args: Namespace) -> Any:
    """The wandb module with a run begun, or None: neither a missing key nor a network stops a training run."""
    import wandb

    options = {
        "project": args.wandb_project,
        "name": args.wandb_exp_name or None,
        "dir": args.wandb_save_dir or None,
        "config": settings(args),
    }
    if args.wandb_save_dir:
        Path(args.wandb_save_dir).mkdir(parents=True, exist_ok=True)
    for mode in (None, "offline"):
        try:
            run = wandb.init(**options, mode=mode)
        except Exception as error:  # wandb and its transports raise without a common base
            how = " offline" if mode else ""
            print_line(f"WARNING: W&B could not start{how} ({error})")
            continue
        return wandb if run is not None else None
    return None


def start_tensorboard(args: Namespace) -> Any:
    """A writer of TensorBoard's events, which has the settings as texts."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(args.tensorboard_dir)
    for name, value in settings(args).items():
        writer.add_text(name, str(value))
    return writer


def settings(args: Namespace) -> dict[str, Any]:
    """What TensorBoard and W&B show as the settings of the run."""
    return {key: value for key, value in vars(args).items() if isinstance(value, bool | int | float | str)}


def print_line(line: str) -> None:
    """Prints a line in one write, so that two processes' lines do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class IntervalCurves:
    """The iterations of an interval between two lines."""

    last: int
    """Its last iteration."""
    losses: list[float]
    """Of each iteration, as are the others."""
    norms: list[float]
    rates: list[float]


@dataclass(frozen=True)
class Speed:
    """How fast the iterations of an interval were."""

    seconds: float
    """Of an iteration."""
    samples: int
    """Of an iteration."""
    tokens: int
    """Of a sample."""
    flops: float
    """Of an iteration."""
    gpus: int

    @property
    def milliseconds(self) -> float:
        return self.seconds * 1000

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.samples_per_second * self.tokens

    @property
    def tflops(self) -> float:
        """Of all GPUs together."""
        return self.flops / self.seconds / 1e12


class Metrics:
    """Collects one number per iteration and turns them into a line and curves every --log-interval iterations.

    Losses and gradient norms stay on the device until then. The last rank, which has the loss, reports.
    """

    def __init__(self, args: Namespace, mesh: Mesh, other_samples: int = 0) -> None:
        """other_samples: how many more were trained before, by another batch, than this one would have been."""
        self.other_samples = other_samples
        self.args = args
        self.mesh = mesh
        architecture = Architecture.of_arguments(vars(args), args.padded_vocab_size)
        args.parameters = parameters(architecture)
        self.reports = args.rank == args.world_size - 1
        # Of an iteration.
        self.flops = flops_per_iteration(architecture, args.global_batch_size)
        self.samples = args.global_batch_size
        # Of a sample.
        if args.family == "gpt":
            self.length = self.tokens = args.seq_length
        else:
            self.length = args.encoder_seq_length
            self.tokens = args.encoder_seq_length + args.decoder_seq_length
        self.interval: list[tuple[Tensor, Tensor, float]] = []
        """Loss, gradient norm and next learning rate of each iteration since the last line."""
        self.tensorboard: Any = None
        self.wandb: Any = None
        if self.reports and args.tensorboard_dir:
            self.tensorboard = start_tensorboard(args)
        if self.reports and args.wandb_project:
            self.wandb = start_wandb(args)
        self.started = self.synchronise()
        self.paused = self.started

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
        self.interval.append((loss, norm, next_rate))
        if iteration % self.args.log_interval:
            return
        now = self.synchronise()
        seconds = (now - self.started) / len(self.interval)
        self.started = now
        losses, norms, rates = zip(*self.interval, strict=True)
        mean_losses = self.mesh.dp.all_reduce(torch.stack(losses)) / self.mesh.dp.size  # [iterations]
        if self.reports:
            curves = IntervalCurves(iteration, mean_losses.tolist(), torch.stack(norms).tolist(), list(rates))
            speed = Speed(
                seconds, samples=self.samples, tokens=self.tokens, flops=self.flops, gpus=self.args.world_size
            )
            self.print_iteration(curves, speed)
            self.plot_interval(curves, speed)
        self.interval = []

    def print_iteration(self, curves: IntervalCurves, speed: Speed) -> None:
        consumed = self.consumed(curves.last)
        print_line(
            f" iteration {curves.last:8d}/{self.args.train_iters:8d} |"
            f" consumed samples: {consumed:12d} |"
            f" consumed tokens: {consumed * self.tokens:12d} |"
            f" elapsed time per iteration (ms): {speed.milliseconds:.1f} |"
            f" learning rate: {curves.rates[-1]:.3E} |"
            f" global batch size: {self.samples:5d} |"
            f" lm loss: {sum(curves.losses) / len(curves.losses):.6E} |"
            f" loss scale: 1.0 |"
            f" grad norm: {curves.norms[-1]:.6E} |"
            f" actual seqlen: {self.length:5d} |"
            f" number of skipped iterations: {0:3d} |"
            f" number of nan iterations: {sum(not math.isfinite(loss) for loss in curves.losses):3d} |"
            f" samples per second: {speed.samples_per_second:.3f} |"
            f" tokens per gpu per second (tgs): {speed.tokens_per_second / speed.gpus:.3f} |"
            f" TFLOPs: {speed.tflops / speed.gpus:.2f} |"
        )

    def plot_interval(self, curves: IntervalCurves, speed: Speed) -> None:
        """The curves of each iteration, and the speed at the last one."""
        first = curves.last - len(curves.losses) + 1
        points = zip(curves.losses, curves.norms, curves.rates, strict=True)
        for step, (loss, norm, rate) in enumerate(points, first):
            values = {
                "lm loss": loss,
                "learning rate": rate,
                "loss scale": 1.0,
                "lm-loss-training/lm loss": loss,
                "grad-norm/grad-norm": norm,
                "learning-rate/learning-rate": rate,
            }
            if step == curves.last:
                values["samples per second"] = speed.samples_per_second
                values["elapsed time per iteration"] = speed.milliseconds
                values["loss/lm loss"] = loss
                for name, value in self.throughput(speed).items():
                    values[f"throughput/{name}"] = value
            self.plot(step, values)

    def throughput(self, speed: Speed) -> dict[str, float]:
        """Speeds under Megatron's names."""
        speeds = {
            "samples_per_sec": speed.samples_per_second,
            "tokens_per_sec": speed.tokens_per_second,
            "tokens_per_gpu_per_sec": speed.tokens_per_second / speed.gpus,
        }
        speeds |= {f"{name}_per_replica": value / self.args.dp for name, value in speeds.items()}
        return speeds | {
            "iteration-time": speed.seconds,
            "elapsed_ms_per_iteration": speed.milliseconds,
            "tflops": speed.tflops / speed.gpus,
            "approx_params_in_billions": self.args.parameters / 1e9,
        }

    def consumed(self, iteration: int) -> int:
        """Samples until the end of an iteration."""
        return self.other_samples + iteration * self.samples

    def plot(self, step: int, values: dict[str, float]) -> None:
        """Sends values of iteration `step` to TensorBoard and W&B, there with the samples and tokens for other axes."""
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            consumed = self.consumed(step)
            self.wandb.log(values | {"Samples": consumed, "Tokens": consumed * self.tokens}, step=step)

    def validation(self, iteration: int, loss: Tensor, evaluated_set: str = "") -> None:
        """Prints and plots the mean of the data-parallel ranks' losses, []. evaluated_set: of a run that only
        evaluates."""
        mean = (self.mesh.dp.all_reduce(loss) / self.mesh.dp.size).item()
        if not self.reports:
            return
        samples = ""
        if evaluated_set:
            samples = f" on {self.args.eval_iters * self.samples}-sample draw from {evaluated_set} set"
        perplexity = math.exp(min(20, mean))
        text = (
            f" validation loss at iteration {iteration}{samples} |"
            f" lm loss value: {mean:.6E} |"
            f" lm loss PPL: {perplexity:.6E} | "
        )
        rule = "-" * len(text)
        print_line(f"{rule}\n{text}\n{rule}")
        if not evaluated_set:
            self.plot(iteration, {"lm-loss-validation/lm loss validation": mean})

    def end(self) -> None:
        """Each rank's line on its peak memory in MiB, on the GPU as PyTorch counts it; then lets go of the curves."""
        peak = peak_memory(self.args.device)
        print_line(
            f" peak memory | rank {self.args.rank} | host {socket.gethostname()} | device {self.args.device} |"
            f" allocated MiB {peak['allocated']:.1f} | reserved MiB {peak['reserved']:.1f} |"
            f" host rss MiB {peak['host rss']:.1f}"
        )
        peaks: list[Any] = [None] * self.args.world_size
        dist.all_gather_object(peaks, peak)
        values: dict[str, float] = {}
        for rank, peak in enumerate(peaks):
            for kind, mebibytes in peak.items():
                values[f"peak memory/rank {rank} {kind} MiB"] = mebibytes
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, self.args.train_iters)
            self.tensorboard.close()
        if self.wandb:
            self.wandb.run.summary.update(values)
            self.wandb.finish()


def peak_memory(device: torch.device) -> dict[str, float]:
    """This process's, in MiB."""
    allocated = reserved = 0
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {"allocated": allocated / MEBIBYTE, "reserved": reserved / MEBIBYTE, "host rss": resident / MEBIBYTE}
