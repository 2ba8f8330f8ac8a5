"""What a training step did, in a line of JSON for each rank: a file to copy, which needs PyTorch alone.

    from audit import audit

    loss.backward()
    audit(model, optimizer, step=step, loss=loss, directory="audit-new")    # before clipping and the update
    optimizer.step()

All ranks call it, at the same place in both trainings. `python -m t5bench judge --locate audit-new audit-old` then says
at which step and in which module two trainings first differ, and on which rank.

It understands parameters of DDP and of one process, DTensors (FSDP2, HSDP, tensor parallelism), those of DeepSpeed's
ZeRO 1, 2 and 3, and slices of your own tensor parallelism, which `slices` names.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VERSION = 1
CHUNK = 1 << 22  # elements for which the checksum's two vectors are computed at a time
ANGLE = 0.7390851332151607  # any number that is no fraction of pi


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    directory: str | Path,
    loss: float | Tensor | None = None,
    slices: Callable[[str], dist.ProcessGroup | None] = lambda name: None,
    checksums: bool = True,
) -> dict[str, Any]:
    """Appends this rank's line to directory/rank<R>.jsonl, and returns it.

    Between the step's last backward pass and the optimizer's step: then its gradients are there, and not yet clipped.
    With gradient accumulation, once for all micro-batches. Under ZeRO, pass DeepSpeed's engine.

    loss: this rank's. slices: for a parameter's name, the group whose ranks have its other slices; not for DTensors,
    which know. checksums: also of the parameters, which FSDP2 and ZeRO-3 gather for it, one at a time.

    The line has, for each module that has parameters of its own, their gradient's norm ("gradients"), the optimizer's
    states' norms ("optimizer") and [norm, two products with fixed vectors, exact checksum of all bits] ("parameters").
    Norms are of whole parameters, in float64. Costs: a pass over gradients, states and parameters in float64, four
    numbers a module on the disk, and an all-reduce of one number for each divided tensor.
    """
    names = _names(model)
    if getattr(model, "global_steps", 1) == 0:  # DeepSpeed's engine, which links states to parameters in its first step
        optimizer = None
    squares: dict[str, float] = {}
    parameters: dict[str, list[float]] = {}
    states: dict[str, dict[str, float]] = {}
    has_slices: set[str] = set()
    for name, parameter in names.items():
        module = name.rpartition(".")[0] or name
        group = slices(name)
        if group is not None:
            has_slices.add(module)
        gradient = _gradient(parameter)
        if gradient is not None:
            squares[module] = squares.get(module, 0.0) + _square(gradient, group)
        for key, state in _states(optimizer, parameter):
            of_module = states.setdefault(module, {})
            of_module[key] = of_module.get(key, 0.0) + _square(state, group)
        if checksums:
            found = _checksum(_whole(parameter), group)
            before = parameters.setdefault(module, [0.0, 0.0, 0.0, 0])
            parameters[module] = [one + other for one, other in zip(before, found, strict=True)]
    line = {
        "audit": VERSION,
        "step": step,
        "rank": dist.get_rank() if _is_distributed() else 0,
        "world": dist.get_world_size() if _is_distributed() else 1,
        "loss": float(loss) if loss is not None else None,
        "grad_norm": math.sqrt(sum(squares.values())),
        "gradients": {module: math.sqrt(square) for module, square in squares.items()},
        "optimizer": {
            module: {key: math.sqrt(square) for key, square in of_module.items()}
            for module, of_module in states.items()
        },
        "parameters": {
            # A slice's elements have other places in the whole, so their products say nothing.
            module: [math.sqrt(sums[0]), *([0.0, 0.0] if module in has_slices else sums[1:3]), sums[3] % (1 << 53)]
            for module, sums in parameters.items()
        },
    }
    path = Path(directory) / f"rank{line['rank']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by their names in the model without its wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
            while parts[0] == "module" and len(parts) > 1:
                parts = parts[1:]
            found[".".join(parts)] = parameter
    return found


def _is_of_zero(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    if _is_of_zero(parameter):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)
    return parameter.grad


def _states(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's states of a parameter that have its shape, by name; none before its first step."""
    if optimizer is None:
        return
    if _is_of_zero(parameter):
        from deepspeed.utils import safe_get_full_optimizer_state

        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(parameter, key)
            if state is not None:
                yield key, state
        return
    own = getattr(optimizer, "optimizer", optimizer).state.get(parameter, {})  # accelerate wraps optimizers
    for key in sorted(own):
        if isinstance(own[key], Tensor) and own[key].shape == parameter.shape:
            yield key, own[key]


def _whole(parameter: nn.Parameter) -> Tensor:
    """A parameter's values, gathered where FSDP2 or ZeRO-3 has divided them."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()


def _square(tensor: Tensor, group: dist.ProcessGroup | None) -> float:
    """The sum of a whole tensor's squares."""
    local = tensor.detach()
    groups = [group] if group is not None else []
    if hasattr(tensor, "placements"):
        if any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.redistribute(placements=[_settled(placement) for placement in tensor.placements])
        local = tensor.to_local().detach()
        mesh = tensor.device_mesh
        groups += [mesh.get_group(axis) for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
    square = torch.zeros((), dtype=torch.float64, device=local.device)
    if local.numel():
        square = torch.linalg.vector_norm(local, dtype=torch.float64).square()
    for one in groups:
        dist.all_reduce(square, group=one)
    return float(square)


def _settled(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement


def _checksum(whole: Tensor, group: dist.ProcessGroup | None) -> list[float]:
    """The sum of squares, two products with fixed vectors, and the sum of all bits as integers, which is exact."""
    flat = whole.reshape(-1)
    sums = torch.zeros(3, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK].double()
        angles = torch.arange(start, start + len(values), dtype=torch.float64, device=flat.device).mul_(ANGLE)
        sums += torch.stack([values @ values, values @ angles.cos(), values @ angles.sin()])
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.contiguous().view(integers[flat.element_size()]).sum(dtype=torch.int64)
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(bits, group=group)
    return [*sums.tolist(), int(bits)]
