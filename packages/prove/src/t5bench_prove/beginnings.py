"""What each rank begins with, compared with the other ranks and with one process. Nothing is trained.

    ranks = on_every_rank(lambda: Beginning(...), {"data": 2})
    for finding in compare_beginnings(ranks, whole, SOME_SAMPLES):
        print(finding)

prove_step follows what a step does with gradients, whatever its numbers are. This is the rest that is known before it:
the initial weights, the samples of the first steps, the numbers of the optimizer, and what a checkpoint gives back.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from t5bench_prove.any_model import as_rank
from training_comparison.step_trace import OwnPart

MicroBatch = Mapping[str, Tensor]
Numbers = Mapping[str, Mapping[str, Any]]

SOME_SAMPLES, SOME_TOKENS, ALL = "some samples", "some tokens", "all"
"""Of a step's samples, what a rank reads: its own ones, its part of the tokens of each, or what all ranks read."""


@dataclass(frozen=True)
class Beginning:
    """Of one rank, or of one process that trains alone. What is left empty is not compared."""

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's initial ones, or its parts of them; those that DDP sends to all, after it has."""
    parts: Mapping[str, OwnPart] = field(default_factory=dict)
    """Where its parts lie; a parameter that is not in here is whole."""
    steps: Sequence[Sequence[MicroBatch]] = ()
    """The first steps' micro-batches: tensors [samples, tokens, ...] by name."""
    numbers: Sequence[Numbers] = ()
    """The optimizer's in these steps, by parameter: what `numbers_of` finds when the schedule has set them."""
    saved: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint is of: weights, the optimizer's states, counts, states of generators, by name."""
    restored: Mapping[str, Any] = field(default_factory=dict)
    """The same of a training that has loaded it."""


def on_every_rank(begin: Callable[[], Beginning], mesh: Mapping[str, int]) -> list[Beginning]:
    """Calls it as each rank of PyTorch's fake process group, which sends nothing: what a rank receives is unset."""
    world = 1
    for size in mesh.values():
        world *= size
    found = []
    for rank in range(world):
        with as_rank(rank, mesh):
            found.append(begin())
    return found


def numbers_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Numbers:
    """Of each parameter by name, what its group has: lr, weight_decay, betas, eps, ...; nothing if it is in none."""
    groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        group = groups.get(id(parameter), {})
        found[name] = {key: value for key, value in group.items() if key != "params"}
    return found


def compare_beginnings(ranks: Sequence[Beginning], whole: Beginning, reads: str) -> list[str]:
    """whole: of one process. reads: SOME_SAMPLES, SOME_TOKENS or ALL. Returns what is wrong, a sentence each."""
    return [*of_weights(ranks, whole), *of_samples(ranks, whole, reads), *of_numbers(ranks, whole), *of_restored(ranks)]


def of_weights(ranks: Sequence[Beginning], whole: Beginning) -> Iterator[str]:
    for rank, own in enumerate(ranks):
        for name, weight in own.weights.items():
            expected = part_of(whole.weights[name], own.parts.get(name))
            if not is_same(weight, expected):
                yield f"{name} begins with other values on rank {rank} than in one process"


def part_of(whole: Tensor, own: OwnPart | None) -> Tensor:
    if own is None:
        return whole
    return torch.cat([whole.narrow(own.dim, begin, length) for begin, length in own.stretches], own.dim)


def of_samples(ranks: Sequence[Beginning], whole: Beginning, reads: str) -> Iterator[str]:
    for number, expected in enumerate(whole.steps):
        steps = [own.steps[number] for own in ranks]
        if reads == ALL:
            if any(samples_of([one]) != samples_of([steps[0]]) for one in steps):
                yield f"step {number + 1}: ranks read other samples, or the same in other micro-batches"
                continue
            steps = steps[:1]
        if reads == SOME_TOKENS:
            steps = [joined(steps)]
        read, wanted = Counter(samples_of(steps)), Counter(samples_of([expected]))
        wrong = sum((read - wanted).values())
        missing = sum((wanted - read).values())
        if wrong or missing:
            yield f"step {number + 1}: {wrong} samples are not its own or read twice, {missing} of its own are not read"


def samples_of(steps: Sequence[Sequence[MicroBatch]]) -> list[bytes]:
    """Each sample of all micro-batches as its bytes, in their order."""
    found = []
    for micro_batch in (one for step in steps for one in step):
        tensors = [micro_batch[name] for name in sorted(micro_batch)]
        found += [b"".join(bits(tensor[place]) for tensor in tensors) for place in range(len(tensors[0]))]
    return found


def joined(steps: Sequence[Sequence[MicroBatch]]) -> list[MicroBatch]:
    """Micro-batches of which each rank has a part of the tokens."""
    return [
        {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]} for parts in zip(*steps, strict=True)
    ]


def of_numbers(ranks: Sequence[Beginning], whole: Beginning) -> Iterator[str]:
    for number, expected in enumerate(whole.numbers):
        for rank, own in enumerate(ranks):
            for name, numbers in own.numbers[number].items():
                for key, value in expected[name].items():
                    if numbers.get(key) != value:
                        yield f"step {number + 1}: {key} of {name} is {numbers.get(key)} on rank {rank}, not {value}"


def of_restored(ranks: Sequence[Beginning]) -> Iterator[str]:
    for rank, own in enumerate(ranks):
        for name, value in own.saved.items():
            if name not in own.restored:
                yield f"{name} does not come back from a checkpoint on rank {rank}"
            elif not is_same(own.restored[name], value):
                yield f"{name} comes back from a checkpoint as another one on rank {rank}"


def is_same(value: Any, other: Any) -> bool:
    """Whether every bit is equal: NaN is NaN."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and bits(value) == bits(other)
    return bool(value == other)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
