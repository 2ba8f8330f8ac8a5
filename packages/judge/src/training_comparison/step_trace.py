"""What each step of a training computed, in a file for each rank: a file to copy, which needs PyTorch alone.

    from step_trace import StepTrace

    trace = StepTrace("trace-new", model)
    for step, batch in enumerate(batches, 1):
        loss = ...
        loss.backward()
        trace.step(step, loss)      # before clipping and the update; with accumulation, once for all micro-batches
        optimizer.step()

All ranks do so, at the same place in both trainings. `judge --locate trace-new trace-old` then says at which step and
in which tensor two trainings first differ, and on which ranks.

It knows the parameters of DDP and of one process, DTensors (FSDP2, HSDP, tensor parallelism) and those of DeepSpeed's
ZeRO 1, 2 and 3, where `model` is DeepSpeed's engine. What your own tensor parallelism divides, `parts` describes.

A tensor is kept as a sketch: its products with 16 fixed vectors of signs. The mean square of two sketches' difference
estimates that of the tensors, and the sketches of slices and micro-batches add up to the whole's, so trainings of any
layout can be compared (Alon, Matias and Szegedy 1996, https://doi.org/10.1145/237814.237823).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

FORMAT = 2
VECTORS = 16
CHUNK = 1 << 22  # elements that are float64 at a time
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- a tensor in a few numbers ---------------------------------------------------------------------------------------


class OwnPart(NamedTuple):
    """Which part of a whole tensor a rank has."""

    dim: int
    """The dimension along which the whole is divided."""
    stretches: Sequence[tuple[int, int]]
    """Where each stretch of this rank begins in the whole, and its length."""

    def __str__(self) -> str:
        return f"{self.dim}: {', '.join(f'{begin} to {begin + length}' for begin, length in self.stretches)}"


@cache
def signs(axis: int, length: int, device: torch.device) -> Tensor:
    """1 or -1, [length, VECTORS], float64: the same in every training. A shorter axis has the first of a longer's."""
    random = hashlib.shake_128(f"axis {axis}".encode()).digest(length * VECTORS // 8)
    octets = torch.frombuffer(bytearray(random), dtype=torch.uint8)
    bits = octets.unsqueeze(-1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8)) & 1
    return (1.0 - 2.0 * bits.view(length, VECTORS).double()).to(device)


def signs_of(own: OwnPart, device: torch.device) -> Tensor:
    """Those along its dimension, [its length, VECTORS]."""
    end = max(begin + length for begin, length in own.stretches)
    whole = signs(own.dim, end, device)
    return torch.cat([whole.narrow(0, begin, length) for begin, length in own.stretches])


def products(values: Tensor, axes: Sequence[Tensor]) -> Tensor:
    """Of values [..., *lengths] with the vectors whose signs these axes [length, VECTORS] multiply: [..., VECTORS]."""
    found = values.double() @ axes[-1]
    for axis in reversed(axes[:-1]):
        found = (found * axis).sum(-2)
    return found


def sketch(tensor: Tensor, own: OwnPart | None = None) -> Tensor:
    """[VECTORS], float64, of a whole tensor or of this part of it."""
    values = tensor.detach()
    if values.dim() == 0:
        values = values.unsqueeze(0)
    if values.numel() == 0:
        return torch.zeros(VECTORS, dtype=torch.float64)
    axes = [signs(axis, length, values.device) for axis, length in enumerate(values.shape)]
    if own:
        axes[own.dim] = signs_of(own, values.device)
    rows = max(1, CHUNK * len(values) // values.numel())
    found = torch.zeros(VECTORS, dtype=torch.float64, device=values.device)
    for part, of_part in zip(values.split(rows), axes[0].split(rows), strict=True):
        found += products(part, [of_part, *axes[1:]])
    return found.cpu()


def square(tensor: Tensor) -> float:
    """The sum of all squares."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).square())


def bits(tensor: Tensor) -> int:
    """The sum of all bits as integers, modulo 2^53: where it differs, the tensors do."""
    integers = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])
    return int(integers.sum(dtype=torch.int64)) % (1 << 53)


# ---- a rank's file ---------------------------------------------------------------------------------------------------


class TraceFile:
    """The lines of a rank, each of one tensor in one step.

    phase: what the tensor is. Of samples: `data`, `forward` (a module's output) and `backward` (its gradient). Of
    parameters: `weights`, `gradient` (the rank's own), `reduced` (over the ranks) and `update`.
    part: which part of the whole; lines of different parts add up, those of the same part are copies.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        place: tuple[int, int] | None = None,
        is_continued: bool = False,
        **layout: Any,
    ) -> None:
        """place: this rank, and how many train; None for those of the process group. is_continued: adds to the file of
        a training that goes on. layout: what is known of it, for the first line: replicas, tensor_parallel, precision.
        """
        rank, world = place or place_in_group()
        self.lines: list[dict[str, Any]] = []
        """Of the step that has not ended."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory) / f"rank{rank}.jsonl"
        is_new = not (is_continued and path.exists())
        self.file = path.open("w" if is_new else "a")
        if is_new:
            self.file.write(json.dumps({"trace": FORMAT, "rank": rank, "world": world} | layout) + "\n")

    def add(self, phase: str, name: str = "", **content: Any) -> None:
        self.lines.append({"phase": phase, "name": name} | content)

    def add_tensor(self, phase: str, name: str, values: Tensor, own: OwnPart | None = None, **content: Any) -> None:
        """Of a parameter: the whole on this rank, or its part."""
        part = str(own) if own else ""
        self.add(phase, name, part=part, sketch=sketch(values, own).tolist(), **content)

    def add_samples(self, phase: str, name: str, values: Tensor, first: int) -> None:
        """values: [samples, ...]. first: the number that its first sample has in the step, whatever the layout."""
        values = values.detach()
        if values.dim() == 1:
            values = values.unsqueeze(1)
        axes = [signs(axis, length, values.device) for axis, length in enumerate(values.shape[1:])]
        for number, of_sample in enumerate(products(values, axes).tolist(), first):
            self.add(phase, name, sample=number, sketch=of_sample)

    def add_output(self, name: str, output: Tensor, first: int, replicas: int) -> None:
        """A module's output, and later its gradient, which is that of a mean over so many replicas."""
        self.add_samples("forward", name, output, first)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.add_samples("backward", name, gradient / replicas, first))

    def end_step(self, step: int) -> None:
        for line in self.lines:
            self.file.write(json.dumps({"step": step} | line) + "\n")
        self.file.flush()
        self.lines.clear()

    def close(self) -> None:
        self.file.close()


def place_in_group() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# ---- any training's steps --------------------------------------------------------------------------------------------


def nothing_divided(name: str) -> OwnPart | None:
    return None


class StepTrace:
    """Writes a training's steps into a directory of its own: see the head of this file.

    parts: of a parameter's name, what this rank has of it, where your own code divides it; DTensors and ZeRO know.
    place: this rank, and how many train, if the process group has others, too.
    is_continued: a training that goes on from a checkpoint adds to the directory's files.

    Costs in a step: a pass over parameters and gradients in float64, some 400 bytes for each on the disk; FSDP2 and
    ZeRO-3 gather each parameter and each gradient, one at a time.
    """

    def __init__(
        self,
        directory: str | Path,
        model: nn.Module,
        parts: Callable[[str], OwnPart | None] = nothing_divided,
        *,
        place: tuple[int, int] | None = None,
        is_continued: bool = False,
    ) -> None:
        self.model = model
        self.parameters = dict(trained_parameters(model))
        self.parts = parts
        self.file = TraceFile(directory, place=place, is_continued=is_continued)
        self.micro_batch = -1
        """The number of the last one that has begun in this step."""

    def step(self, step: int, loss: float | Tensor | None = None) -> None:
        """Between the step's last backward pass and clipping. loss: this rank's."""
        for name, parameter in self.parameters.items():
            values = whole(parameter)
            self.file.add_tensor("weights", name, values, self.parts(name), bits=bits(values))
        for name in reversed(self.parameters):  # as the backward pass goes
            gradient = gradient_of(self.parameters[name])
            if gradient is not None:
                self.file.add_tensor("reduced", name, gradient, self.parts(name), square=square(gradient))
        if loss is not None:
            self.file.add("loss", value=float(loss.detach()) if isinstance(loss, Tensor) else loss)
        self.file.end_step(step)
        self.micro_batch = -1

    def watch(self, modules: Mapping[str, nn.Module], first_sample: Callable[[int], int], replicas: int = 1) -> None:
        """Also writes what these modules put out: tensors [samples, ...] that each rank has as a whole.

        first_sample: of a micro-batch's number on this rank, counted from 0, the number that its first sample has in
        the step. replicas: over how many ranks' samples gradients are averaged.
        """

        def begin(*_: object) -> None:
            if torch.is_grad_enabled():
                self.micro_batch += 1

        def watch_one(name: str, module: nn.Module) -> None:
            def saw(_module: nn.Module, _inputs: object, output: Tensor) -> None:
                if torch.is_grad_enabled():
                    self.file.add_output(name, output, first_sample(self.micro_batch), replicas)

            module.register_forward_hook(saw)

        self.model.register_forward_pre_hook(begin)
        for name, module in modules.items():
            watch_one(name, module)


# ---- parameters of any kind ------------------------------------------------------------------------------------------


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """By their names in the model without its wrappers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
            while parts[0] == "module" and len(parts) > 1:
                parts = parts[1:]
            yield ".".join(parts), parameter


def whole(parameter: nn.Parameter) -> Tensor:
    """The values with which this rank computes; gathered where FSDP2 or ZeRO-3 has divided them."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return gathered(parameter.detach())


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Reduced over the ranks and gathered; before clipping, if this is asked before it."""
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
        return None if gradient is None else gradient.view(getattr(parameter, "ds_shape", parameter.shape))
    return None if parameter.grad is None else gathered(parameter.grad)


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
