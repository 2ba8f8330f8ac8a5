"""What transformers' Trainer and accelerate's loop are compared with: plain PyTorch, on the samples that they took."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from t5bench_ledger.pairs.settings import ITERATIONS, Case

Batch = dict[str, Tensor]
Window = list[list[Any]]
"""Of each process, the micro-batches of a step."""


class SamplesError(Exception):
    """A loader gave other samples, or a loop made other steps, than their documentation promises."""


@dataclass(frozen=True)
class Plan:
    """How a data set is divided into steps."""

    micro_batches: int
    """Of a process and step, but in a short last window."""
    samples: int
    """Of the data set."""
    at_once: int
    """Samples of a micro-batch of all processes."""
    drops: bool
    """A last batch that is not full."""

    @property
    def epochs(self) -> int:
        """What the steps of an unreduced case take."""
        return max(1, ITERATIONS // self.steps)

    @property
    def steps(self) -> int:
        """Of an epoch."""
        batches = self.samples / self.at_once
        whole = math.floor(batches) if self.drops else math.ceil(batches)
        return math.ceil(whole / self.micro_batches)


def plan(case: Case, batch_size: int, *, drops: bool) -> Plan:
    """batch_size: of a process."""
    micro_batches = int(case.choices.get("gradient_accumulation_steps", case.micro_batches))
    # With split_batches the size is that of all processes together.
    at_once = batch_size if "split_batches" in case.choices else batch_size * case.processes
    match case.choices.get("data"):
        case "short last window":
            samples = max(1, 2 * micro_batches - 1) * at_once
        case "short last batch":
            samples = max(1, 2 * micro_batches * at_once - 1)
        case _:
            samples = ITERATIONS * micro_batches * at_once
    return Plan(micro_batches, samples, at_once, drops)


def gathered(own: Sequence[Any]) -> list[Any]:
    """What each process has."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def windows(own: Sequence[Sequence[Any]]) -> list[Window]:
    """Of each step, from the micro-batches that this process took for it. Raises SamplesError."""
    of_processes = gathered([window for window in own if window])
    counts = {len(steps) for steps in of_processes}
    if len(counts) > 1:
        raise SamplesError(f"the processes made different numbers of steps: {sorted(counts)}")
    return [list(step) for step in zip(*of_processes, strict=True)]


def check(planned: Plan, taken: Sequence[Sequence[int]], steps: int, planned_steps: int, *, ends_whole: bool) -> None:
    """Every sample must be taken once an epoch; two are where the last batch is filled up, none where it is left out.

    taken: the numbers of the samples that this process took, by epoch. ends_whole: whether the last of these was
    trained to its end. Raises SamplesError.
    """
    if steps != planned_steps:
        raise SamplesError(f"it made {steps} steps of {planned_steps}")
    most = 1 if planned.drops or planned.samples % planned.at_once == 0 else 2
    whole_epochs = len(taken) if ends_whole else len(taken) - 1
    of_processes = gathered(taken)
    left_out = planned.samples % planned.at_once if planned.drops else 0
    for epoch in range(whole_epochs):
        counts = Counter(number for own in of_processes for number in own[epoch])
        missing = planned.samples - len(counts)
        if missing != left_out or max(counts.values()) > most:
            times = max(counts.values())
            raise SamplesError(f"in epoch {epoch + 1} it left out {missing} samples, and took one {times} times")


def trained_plainly(
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Window],
    backward: Callable[[Window], float],
    rate_of: Callable[[int], float],
    clips: Callable[[], float],
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step. backward: adds a step's gradient, and returns its loss. rate_of: what a
    step's learning rates are multiplied by. clips: the norm before clipping."""
    begin = [group["lr"] for group in optimizer.param_groups]
    losses = []
    norms = []
    for number, window in enumerate(steps):
        for group, rate in zip(optimizer.param_groups, begin, strict=True):
            group["lr"] = rate * rate_of(number)
        optimizer.zero_grad()
        losses.append(backward(window))
        norms.append(clips())
        optimizer.step()
    return losses, norms


def clip(model: nn.Module, norm: float) -> float:
    """The norm before. norm: 0 for no limit."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return float(nn.utils.clip_grad_norm_(parameters, norm or math.inf))
