"""What a run needs besides its weights to continue: its optimizer's moments, and its copies of the weights in fp32.

They are read from the checkpoint of any strategy, whole, by the names of the parameters, and written for another layout
as Megatron and the native engine write them. AdamW numbers its parameters: first those that are decayed, the
matrices, then biases and norms, each in the order in which the model has them.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native.pieces import KINDS, MOMENTS, WEIGHTS
from t5bench import Problem
from t5bench.tools.convert.checkpoint_file import read_checkpoint_file
from t5bench.tools.convert.shards import (
    Gathered,
    Weights,
    flat,
    joined,
    last_pipeline_layer,
    model_parallel_ranks,
    name_in_pipeline,
    zero3_states,
    zero_states,
)

MASTERS = "fp32_from_fp16_params"  # Megatron's name


@dataclass(frozen=True)
class Shard:
    """Of one tensor-parallel rank and pipeline stage."""

    values: Mapping[str, Weights]
    """By kind, by the parameter's name."""
    groups: Sequence[Mapping[str, Any]]
    """AdamW's settings for matrices and for vectors."""
    step: Tensor
    """The updates so far, []."""
    has_masters: bool
    """Whether the engine keeps masters apart from the weights."""
    scaler: Mapping[str, Any] | None = None
    """The state of fp16's loss scale."""


@dataclass(frozen=True)
class TrainingState:
    """Of the whole model."""

    values: Mapping[str, Weights]
    example: Shard

    @classmethod
    def of(cls, folder: Path, args: Namespace) -> "TrainingState":
        """args: the engine's arguments, as the checkpoint has them. Raises Problem."""
        shards = {ranks: shard(folder, args, *ranks) for ranks in model_parallel_ranks(args)}
        values = {kind: joined(args, {place: each.values[kind] for place, each in shards.items()}) for kind in KINDS}
        return cls(values, next(iter(shards.values())))


def is_matrix(value: Tensor) -> bool:
    return value.dim() > 1


def numbered(weights: Mapping[str, Tensor]) -> list[str]:
    """The parameters' names in AdamW's order."""
    matrices = [name for name, value in weights.items() if is_matrix(value)]
    vectors = [name for name, value in weights.items() if not is_matrix(value)]
    return [*matrices, *vectors]


def shard(folder: Path, args: Namespace, rank: int, stage: int) -> Shard:
    if not args.deepspeed:
        suffix = f"_{stage:03d}" if args.pipeline_model_parallel_size > 1 else ""
        return of_file(folder / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt")
    if args.ds_pipeline_enabled:
        return of_pipeline(folder, args, rank)
    if args.zero_stage == 3:
        return of_zero3(folder, rank)
    return of_zero(folder, rank)


def of_file(path: Path) -> Shard:
    """Of Megatron's own file, or of the native engine's."""
    content = read_checkpoint_file(path)
    weights = flat(content["model"])
    if "optimizer" not in content:
        raise Problem(f"{path} has no state of the optimizer")
    state = content["optimizer"]
    adam = state.get("optimizer", state)
    numbers = [number for group in adam["param_groups"] for number in group["params"]]
    names = numbered(weights)
    values: dict[str, Weights] = {WEIGHTS: weights}
    if MASTERS in state:
        masters = [value for group in state[MASTERS] for value in group]
        values[WEIGHTS] = dict(zip(names, masters, strict=True))
    for kind in MOMENTS:
        moments = {name: adam["state"][number][kind] for name, number in zip(names, numbers, strict=True)}
        if any(value.shape != weights[name].shape for name, value in moments.items()):
            raise Problem(f"the optimizer's states in {path} are not in the order of its parameters")
        values[kind] = moments
    step = torch.as_tensor(adam["state"][numbers[0]]["step"], dtype=torch.float32)
    return Shard(values, adam["param_groups"], step, MASTERS in state, state.get("grad_scaler"))


def of_zero(folder: Path, rank: int) -> Shard:
    """ZeRO-1 and 2: each group of parameters laid end to end, and cut into equal parts for the data-parallel ranks."""
    shapes = read_checkpoint_file(folder / f"mp_rank_{rank:02d}_model_states.pt")["param_shapes"]
    states = zero_states(folder, rank)
    adams = [state["base_optimizer_state"] for state in states]
    parts: dict[str, list[list[Tensor]]] = {WEIGHTS: [state["single_partition_of_fp32_groups"] for state in states]}
    for kind in MOMENTS:
        parts[kind] = [[each[kind] for each in adam["state"].values()] for adam in adams]
    values = {kind: dict(laid_out(parts[kind], shapes)) for kind in KINDS}
    return Shard(values, adams[0]["param_groups"], step_of(adams[0]), has_masters=True)


def of_pipeline(folder: Path, args: Namespace, rank: int) -> Shard:
    """ZeRO-1 in DeepSpeed's pipeline engine: each stage of a tensor-parallel rank counts as a rank of its own."""
    last = last_pipeline_layer(args)
    size = args.tensor_model_parallel_size
    stages = [of_zero(folder, stage * size + rank) for stage in range(args.pipeline_model_parallel_size)]
    values: dict[str, Weights] = {}
    for kind in KINDS:
        # The last stage's copy of the embedding has positions that it never trains: the first stage's count.
        held = [item for stage in reversed(stages) for item in stage.values[kind].items()]
        values[kind] = {name_in_pipeline(name, last): value for name, value in held}
    return replace(stages[0], values=values)


def laid_out(parts: list[list[Tensor]], shapes: Sequence[Mapping[str, torch.Size]]) -> Iterator[tuple[str, Tensor]]:
    """parts: by data-parallel rank and group. shapes: by group and parameter."""
    for number, group in enumerate(shapes):
        whole = torch.cat([own[number] for own in parts])
        begin = 0
        for name, shape in group.items():
            size = torch.Size(shape).numel()
            yield name, whole[begin : begin + size].view(shape)
            begin += size


def of_zero3(folder: Path, rank: int) -> Shard:
    states, shapes = zero3_states(folder, rank)
    adams = [state["optimizer_state_dict"] for state in states]
    parts: dict[str, list[list[Tensor]]] = {WEIGHTS: [state["fp32_flat_groups"] for state in states]}
    for kind in MOMENTS:
        parts[kind] = [[each[kind] for each in adam["state"].values()] for adam in adams]
    values = {kind: Gathered(parts[kind], shapes, torch.float32) for kind in KINDS}
    return Shard(values, adams[0]["param_groups"], step_of(adams[0]), has_masters=True)


def step_of(adam: Mapping[str, Any]) -> Tensor:
    return torch.as_tensor(adam["state"][0]["step"], dtype=torch.float32)


def optimizer_of(values: Mapping[str, Mapping[str, Tensor]], example: Shard) -> dict[str, Any]:
    """AdamW's state dictionary for a part of the model. values: by kind, by the parameter's name."""
    names = numbered(values[WEIGHTS])
    state = {}
    for number, name in enumerate(names):
        state[number] = {"step": example.step.clone()} | {kind: values[kind][name] for kind in MOMENTS}
    matrices = sum(is_matrix(value) for value in values[WEIGHTS].values())
    groups = []
    for settings, numbers in zip(example.groups, (range(matrices), range(matrices, len(names))), strict=True):
        groups.append({**settings, "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def masters_of(values: Mapping[str, Mapping[str, Tensor]]) -> list[list[Tensor]]:
    """As Megatron keeps them: by group."""
    masters = values[WEIGHTS]
    names = numbered(masters)
    matrices = sum(is_matrix(value) for value in masters.values())
    return [[masters[name] for name in names[:matrices]], [masters[name] for name in names[matrices:]]]
